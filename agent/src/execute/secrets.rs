//! A tenant's secrets in its guests: in place before the workload starts, wiped before memory is saved.
//!
//! A guest keeps its secrets until it wipes them, so one that was only paused does not get them again. The wipe is recorded
//! before it is done: however the sleep ends, a guest that continues gets its secrets again.

use mvm_proto::text::chain;
use zeroize::Zeroizing;

use super::{Executor, StepError};
use crate::instance::record::Record;
use crate::instance::records::Lease;
use crate::secrets::BundleOf;

/// The secrets that an instance was started with.
pub(crate) fn bundle_of(record: &Record) -> BundleOf<'_> {
    BundleOf { tenant: &record.tenant, pool: &record.pool, own: record.own_secrets }
}

impl Executor {
    /// What an instance's guest is to be given; absent: its tenant has none. Read before anything is done to the
    /// instance: one whose bundle is not there stays as it is.
    pub(super) fn bundle(&self, record: &Record) -> Result<Option<Zeroizing<Vec<u8>>>, StepError> {
        let Some(expected) = &record.secrets else { return Ok(None) };
        Ok(Some(self.secrets.read(bundle_of(record), expected)?))
    }

    /// Waits until they are in place.
    pub(super) async fn give_secrets(
        &self,
        record: &mut Record,
        bundle: Option<Zeroizing<Vec<u8>>>,
    ) -> Result<(), StepError> {
        if let Some(bundle) = bundle {
            self.links.give_secrets(&record.id, &bundle).await?;
            record.secrets_wiped = false;
        }
        Ok(())
    }

    /// Has a running guest wipe them. One that does not is not saved.
    pub(super) async fn wipe_secrets(&self, record: &mut Record) -> Result<(), StepError> {
        record.secrets_wiped = true;
        self.records.save(record).await?;
        Ok(self.links.wipe_secrets(&record.id).await?)
    }

    /// To an instance that was about to sleep, and runs again instead.
    pub(crate) async fn give_secrets_back(&self, lease: &Lease) {
        let Some(mut record) = self.records.get(lease.id()) else { return };
        let given = async {
            let bundle = self.bundle(&record)?;
            self.links.open(&record.id);
            self.give_secrets(&mut record, bundle).await?;
            Ok::<_, StepError>(self.records.save(&record).await?)
        };
        if let Err(error) = given.await
            && let Some(mut record) = self.records.get(lease.id())
        {
            let reason = format!("runs without its secrets: {}", chain(&error));
            // Told once, however often it is tried.
            if record.reason != reason {
                self.events.publish("SecretsNotGiven", record.full_name(), reason.as_str());
                record.reason = reason;
                self.records.set(record);
            }
        }
    }
}
