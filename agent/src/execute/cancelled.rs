//! Cancels a pause or sleep when a request needs the instance meanwhile; the instance then keeps running.
//!
//! It can be cancelled until the record says that the instance is warm or sleeping. The next agent can recover from every state
//! on the way: a VM without a recorded snapshot is warm or running, as it is observed.

use std::time::Duration;

use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase};
use mvm_vmm::{Driver, SnapshotOptions, SnapshotRef};

use super::guest::Drain;
use super::{Executor, StepError};
use crate::crash;
use crate::instance::record::Record;
use crate::instance::records::CancelSignal;

/// A snapshot that is only about to be written does not hear that it should end: it is told again this often.
const STOP_AGAIN: Duration = Duration::from_millis(20);

impl Executor {
    /// Lets a running guest finish its work, unless a request wants it meanwhile.
    pub(super) async fn drain_unless_wanted(
        &self,
        record: &Record,
        timeout: Duration,
        rest: Phase,
        cancel: &CancelSignal,
    ) -> Result<Drain, StepError> {
        tokio::select! {
            biased;
            () = cancel.cancelled() => Ok(Drain::Wanted),
            drained = self.drain(record, timeout, rest) => drained,
        }
    }

    /// Writes a paused guest's memory. None: a request wants it, and what was written is not to be used.
    pub(super) async fn snapshot_unless_wanted(
        &self,
        id: &InstanceId,
        options: &SnapshotOptions,
        cancel: &CancelSignal,
    ) -> Result<Option<SnapshotRef>, StepError> {
        if cancel.is_cancelled() {
            return Ok(None);
        }
        let mut snapshot = std::pin::pin!(self.driver.snapshot(id, options));
        tokio::select! {
            biased;
            () = cancel.cancelled() => {}
            written = &mut snapshot => return Ok(Some(written?)),
        }
        let stop = async {
            let mut told = false;
            loop {
                if let Err(error) = self.driver.stop_snapshot(id).await
                    && !std::mem::replace(&mut told, true)
                {
                    // It is waited for instead.
                    tracing::warn!(%id, error = %chain(&error), "could not stop a snapshot");
                }
                tokio::time::sleep(STOP_AGAIN).await;
            }
        };
        // Both go on: what stops it may need what the snapshot has in its hands. Whether it was written after all
        // makes no difference.
        tokio::select! {
            _ = &mut snapshot => Ok(None),
            () = stop => Ok(None),
        }
    }

    /// The guest runs on, or again, and is the request's. `home` is where it was on its way to: it keeps its place in
    /// that count.
    pub(super) async fn go_on(&self, mut record: Record, home: Phase) -> Result<(), StepError> {
        if record.intent.is_some() {
            self.driver.discard_snapshot(&record.id).await?;
            crash::point("call_off.discarded");
        }
        let bundle = if record.secrets_wiped { self.bundle(&record)? } else { None };
        self.driver.resume(&record.id).await?;
        crash::point("call_off.resumed");
        self.links.open(&record.id);
        self.links.take_back_sleep(&record.id);
        self.give_secrets(&mut record, bundle).await?;
        self.refresh(&mut record);
        record.idle_since = None;
        record.staging = None;
        record.intent = None;
        record.retry_not_before = None;
        self.lend(&mut record, home);
        record.advance(Phase::Running, self.clock.now(), "a request cancelled its pause or sleep")?;
        self.records.save(&record).await?;
        crash::point("call_off.kept");
        Ok(())
    }
}
