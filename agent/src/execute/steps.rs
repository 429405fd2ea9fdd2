//! The steps themselves, each as a sequence of records and effects that may be cut off after any of them.

use std::time::Duration;

use mvm_planner::Action;
use mvm_proto::Phase;

use super::{Executor, PoolSpec, StepError};
use crate::driver::{BootImage, Driver};
use crate::record::{Intent, Record};

impl<D: Driver> Executor<D> {
    async fn intend(&self, record: &mut Record, action: Action) -> Result<(), StepError> {
        record.intent = Some(Intent { action, at: self.clock.now() });
        Ok(self.records.save(record).await?)
    }

    async fn conclude(&self, record: &mut Record, phase: Phase, reason: &str) -> Result<(), StepError> {
        record.advance(phase, self.clock.now(), reason)?;
        record.intent = None;
        record.retry_not_before = None;
        Ok(self.records.save(record).await?)
    }

    pub(super) async fn start(
        &self,
        mut record: Record,
        spec: &PoolSpec,
        staging: Option<Phase>,
        reason: &str,
    ) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed) {
            return Err(Self::wrong_phase(&record, Action::Start));
        }
        record.revision = spec.revision;
        record.resources = spec.resources;
        record.flake_ref.clone_from(&spec.flake_ref);
        record.image_digest = spec.image_digest;
        record.staging = staging;
        let is_new = record.phase == Phase::Created;
        self.intend(&mut record, if is_new { Action::Create } else { Action::Start }).await?;
        if record.phase == Phase::Failed {
            self.driver.kill(&record.id).await?;
            record.advance(Phase::Stopped, self.clock.now(), reason)?;
        }
        if record.phase == Phase::Created {
            record.advance(Phase::Ready, self.clock.now(), reason)?;
        }
        self.driver.boot(&record.spec(BootImage::imagined(&record.flake_ref))).await?;
        self.conclude(&mut record, Phase::Running, reason).await
    }

    /// The snapshot is given up before the guest runs: a disk that moved on never meets old memory.
    pub(super) async fn wake(
        &self,
        mut record: Record,
        staging: Option<Phase>,
        on_demand: bool,
        reason: &str,
    ) -> Result<(), StepError> {
        let Some(snapshot) = record.snapshot.clone() else {
            return Err(Self::wrong_phase(&record, Action::Wake));
        };
        record.staging = staging;
        self.intend(&mut record, Action::Wake).await?;
        self.driver.restore(&record.spec(BootImage::imagined(&record.flake_ref)), &snapshot).await?;
        record.snapshot = None;
        // Paused and without a snapshot it is warm, whatever comes next.
        record.enter(Phase::Warm, self.clock.now(), reason);
        if on_demand {
            self.lend(&mut record, Phase::Sleeping);
        }
        self.intend(&mut record, Action::Wake).await?;
        self.driver.resume(&record.id).await?;
        self.conclude(&mut record, Phase::Running, reason).await?;
        self.driver.discard_snapshot(&record.id).await?;
        Ok(())
    }

    /// Marks an instance as a request's, with its place in the count that it came from.
    fn lend(&self, record: &mut Record, home: Phase) {
        record.on_demand = true;
        record.home.get_or_insert(home);
        record.last_used_at = Some(self.clock.now());
    }

    pub(super) async fn resume(
        &self,
        mut record: Record,
        on_demand: bool,
        reason: &str,
    ) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Warm | Phase::Running) {
            return Err(Self::wrong_phase(&record, Action::Resume));
        }
        self.driver.resume(&record.id).await?;
        let marked = record.staging.is_some() || on_demand || record.retry_not_before.is_some();
        record.staging = None;
        if on_demand {
            let home = record.phase;
            self.lend(&mut record, home);
        }
        record.retry_not_before = None;
        record.enter(Phase::Running, self.clock.now(), reason);
        self.keep(record, marked).await
    }

    pub(super) async fn warm(&self, mut record: Record, reason: &str) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Warm | Phase::Running) {
            return Err(Self::wrong_phase(&record, Action::Warm));
        }
        self.driver.pause(&record.id).await?;
        let marked = record.staging.is_some() || record.on_demand || record.retry_not_before.is_some();
        record.staging = None;
        record.retry_not_before = None;
        record.enter(Phase::Warm, self.clock.now(), reason);
        self.keep(record, marked).await
    }

    /// Running and warm are seen again at the next start; only marks need the disk.
    async fn keep(&self, record: Record, marked: bool) -> Result<(), StepError> {
        if marked {
            self.records.save(&record).await?;
        } else {
            self.records.set(record);
        }
        Ok(())
    }

    pub(super) async fn sleep(&self, mut record: Record, reason: &str) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Warm | Phase::Running) {
            return Err(Self::wrong_phase(&record, Action::Sleep));
        }
        self.driver.pause(&record.id).await?;
        record.enter(Phase::Warm, self.clock.now(), reason);
        self.intend(&mut record, Action::Sleep).await?;
        record.snapshot = Some(self.driver.snapshot(&record.id).await?);
        record.staging = None;
        self.conclude(&mut record, Phase::Sleeping, reason).await?;
        self.driver.kill(&record.id).await?;
        Ok(())
    }

    pub(super) async fn stop(
        &self,
        mut record: Record,
        grace: Duration,
        reason: &str,
    ) -> Result<(), StepError> {
        if record.phase == Phase::Stopped {
            return Ok(());
        }
        self.intend(&mut record, Action::Stop).await?;
        self.driver.stop(&record.id, grace).await?;
        record.snapshot = None;
        // A stand-in stays marked: nothing of it is worth keeping.
        record.staging = record.staging.filter(|staging| *staging == Phase::Running);
        self.conclude(&mut record, Phase::Stopped, reason).await?;
        self.driver.discard_snapshot(&record.id).await?;
        Ok(())
    }

    pub(super) async fn destroy(&self, mut record: Record) -> Result<(), StepError> {
        record.phase.advance(Phase::Destroyed)?;
        self.intend(&mut record, Action::Destroy).await?;
        self.driver.remove(&record.id).await?;
        Ok(self.records.delete(&record.id).await?)
    }

    pub(super) async fn replace(
        &self,
        record: Record,
        spec: &PoolSpec,
        grace: Duration,
        reason: &str,
    ) -> Result<(), StepError> {
        let (id, back_to) = (record.id.clone(), record.phase);
        let again = || self.records.get(&id).ok_or_else(|| StepError::Gone(id.clone()));
        self.stop(record, grace, reason).await?;
        let staging = (back_to != Phase::Running).then_some(back_to);
        self.start(again()?, spec, staging, reason).await?;
        match back_to {
            Phase::Warm => self.warm(again()?, reason).await,
            Phase::Sleeping => self.sleep(again()?, reason).await,
            _ => Ok(()),
        }
    }
}
