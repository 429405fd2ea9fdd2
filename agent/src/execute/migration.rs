//! Exports a sleeping instance to an archive, and imports one.
//!
//! An imported instance has no record until all of it has arrived and was checked: if the agent ends before that, it leaves
//! orphaned files, which the next agent sweeps. An exported instance is removed like a destroyed one, but keeps its session.

use std::time::Duration;

use mvm_image::BootImage;
use mvm_proto::Phase;
use mvm_proto::text::chain;
use mvm_vmm::{Driver, DriverError, Migration, Part, SnapshotRef};
use tokio::io::AsyncRead;

use super::steps::SessionFate;
use super::{Executor, StepError};
use crate::crash;
use crate::instance::PoolSpec;
use crate::instance::archive::{Header, Reader};
use crate::instance::record::Record;
use crate::instance::records::{Lease, StateError};
use crate::instance::transfer::Transfer;

impl Executor {
    fn migration(&self) -> Result<&dyn Migration, DriverError> {
        Ok(self.driver.migration()?)
    }

    /// The files of the leased instance, which must sleep.
    pub(crate) async fn outgoing(&self, record: &Record) -> Result<Vec<Part>, StepError> {
        let gone = || StepError::Gone(record.id.clone());
        let snapshot = record.snapshot.as_ref().ok_or_else(gone)?;
        // It may still be there, from a sleep that could not end it.
        self.driver.kill(&record.id).await?;
        Ok(self.migration()?.export(snapshot).await?)
    }

    /// Notes that the leased instance is in an archive, as it is now.
    pub(crate) async fn mark_exported(&self, lease: &Lease, by: &str) -> Result<(), StepError> {
        let id = lease.id();
        let mut record = self.records.get(id).ok_or_else(|| StepError::Gone(id.clone()))?;
        let now = self.clock.now();
        record.exported_at = Some(now);
        record.reason = format!("exported at {now}, asked by {by}; not to run here once it is imported");
        self.records.save(&record).await?;
        crash::point("export.marked");
        Ok(())
    }

    /// What an archive holds becomes the leased instance, which exists in memory only until it does.
    pub(crate) async fn take_in<R: AsyncRead + Unpin>(
        &self,
        lease: &Lease,
        header: &Header,
        mut reader: Reader<R>,
        spec: &PoolSpec,
        override_for: Duration,
        reason: &str,
    ) -> Result<Record, StepError> {
        let id = lease.id();
        let mut record = self.records.get(id).ok_or_else(|| StepError::Gone(id.clone()))?;
        let exported = record.snapshot.take().ok_or_else(|| StepError::Gone(id.clone()))?;
        let image = self.boot_image(&record)?;
        self.migration()?.begin_import(id).await?;
        crash::point("import.begun");
        let _room = self.room_for(&record, Some(spec), header.stored_bytes()).await?;
        for member in &header.members {
            let file = self.migration()?.import_part(id, &member.name).await?;
            reader.member(member, Some(file)).await?;
        }
        reader.close().await?;
        crash::point("import.received");
        record.snapshot = Some(self.fit_in(&record, image, &exported).await?);
        crash::point("import.placed");
        // It slept all the while, elsewhere.
        let now = self.clock.now();
        record.correct(Phase::Sleeping, now, reason);
        record.override_until = (!override_for.is_zero()).then(|| now + override_for);
        self.records.save(&record).await?;
        crash::point("import.recorded");
        Ok(record)
    }

    /// Records that the leased instance is, or is no more, on its way between two nodes.
    pub(crate) async fn mark_transfer(
        &self,
        lease: &Lease,
        transfer: Option<Transfer>,
        reason: &str,
    ) -> Result<(), StateError> {
        let id = lease.id();
        let Some(mut record) = self.records.get(id) else { return Ok(()) };
        record.transfer = transfer.map(Box::new);
        reason.clone_into(&mut record.reason);
        self.records.save(&record).await?;
        crash::point("transfer.marked");
        Ok(())
    }

    async fn fit_in(
        &self,
        record: &Record,
        image: BootImage,
        exported: &SnapshotRef,
    ) -> Result<SnapshotRef, DriverError> {
        let spec = record.spec(image, self.isolation.planned(record));
        self.migration()?.import(&spec, exported, &self.snapshot_options(record)).await
    }

    /// Leaves nothing of an instance that could not be taken in.
    pub(crate) async fn turn_away(&self, lease: &Lease) {
        if let Err(error) = self.driver.remove(lease.id()).await {
            // Without a record it is a stranger, and goes when the next sweep finds it.
            tracing::warn!(id = %lease.id(), error = %chain(&error), "could not remove the files of a failed import");
        }
        self.records.forget(lease.id());
    }

    /// Removes the leased instance, which goes on elsewhere. Once this was begun it is finished, also by the next agent.
    pub(crate) async fn remove_exported(&self, lease: &Lease) -> Result<(), StepError> {
        let id = lease.id();
        let record = self.records.get(id).ok_or_else(|| StepError::Gone(id.clone()))?;
        self.remove(record, SessionFate::GoesAlong).await
    }

    /// Writes down one step of a move.
    pub(crate) fn audit_move(&self, record: &Record, actor: &str, action: &str, failed: Option<String>) {
        let reason = format!("{action}, asked by {actor}");
        self.write_down(record, actor, action, reason, failed.map_or(Ok("done"), Err));
    }
}
