//! How a snapshot is stored: compressed or encrypted, as the pool says when the instance goes to sleep. Not part of a revision.

use std::sync::Arc;

use mvm_proto::document::SnapshotCompression;
use mvm_proto::text::chain;
use mvm_vmm::{Driver, SnapshotOptions};

use super::{Executor, StepError};
use crate::instance::PoolSpec;
use crate::instance::record::Record;

impl Executor {
    /// How the instance's snapshot is encoded, and where the key to it is.
    pub(super) fn snapshot_options(&self, record: &Record) -> SnapshotOptions {
        SnapshotOptions { policy: record.at_rest, key: Some(self.secrets.snapshot_key(&record.tenant)) }
    }

    /// The same for a snapshot that is about to be made, as its pool says now; one whose pool the document does not name
    /// any more goes by what was said before. Asked before anything is done to the guest: where its memory can't be
    /// encrypted, it goes on as it is.
    pub(super) fn options_to_save(
        &self,
        record: &mut Record,
        spec: Option<&PoolSpec>,
    ) -> Result<SnapshotOptions, StepError> {
        if let Some(spec) = spec {
            record.at_rest = spec.at_rest;
            // For a wake that finds the pool gone from the document.
            record.io_limits.clone_from(&spec.io_limits);
        }
        if record.at_rest.encryption && self.driver.encryption().is_err() {
            return Err(StepError::NoEncryption(self.driver.kind()));
        }
        if record.at_rest.compression != SnapshotCompression::default()
            && let Err(lacking) = self.driver.compression()
        {
            self.events.publish("NotCompressed", record.full_name(), format!("is saved as it is: {lacking}"));
        }
        let options = self.snapshot_options(record);
        options.check()?;
        Ok(options)
    }

    /// Compresses or hashes a snapshot in the background, and then measures again what it takes on disk.
    pub(crate) fn compress_later(&self, record: &Record) {
        let (id, options) = (record.id.clone(), self.snapshot_options(record));
        let (driver, turn) = (Arc::clone(&self.driver), Arc::clone(&self.background));
        let (isolation, records) = (Arc::clone(&self.isolation), Arc::clone(&self.records));
        tokio::spawn(async move {
            // Never closed: it lives as long as its holder.
            let Ok(_turn) = turn.acquire().await else { return };
            if let Ok(compression) = driver.compression()
                && let Err(error) = compression.compress_snapshot(&id, &options).await
            {
                tracing::warn!(%id, error = %chain(&error), "could not compress or hash a snapshot");
            }
            if let Ok(Some(disk)) = isolation.disk_use(&id).await {
                records.set_disk_used(&id, disk.used_bytes);
            }
        });
    }
}
