//! Steps that begin and end a VM, each as a sequence of records and effects that may be cut off after any of them.

use std::time::Duration;

use mvm_image::Resolution;
use mvm_planner::Action;
use mvm_proto::text::chain;
use mvm_proto::{Digest, Phase};
use mvm_vmm::Driver;

use super::guest::Life;
use super::timing::{Stage, Stopwatch};
use super::{Executor, Patience, StepError};
use crate::crash;
use crate::instance::PoolSpec;
use crate::instance::record::{Intent, Record};
use crate::instance::records::CancelSignal;

/// What becomes of the session of an instance that is removed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum SessionFate {
    /// Another instance may have it.
    Released,
    /// The instance has it on the node that it moved to.
    GoesAlong,
}

impl Executor {
    pub(super) async fn intend(&self, record: &mut Record, action: Action) -> Result<(), StepError> {
        record.intent = Some(Intent { action, at: self.clock.now() });
        Ok(self.records.save(record).await?)
    }

    pub(super) async fn conclude(
        &self,
        record: &mut Record,
        phase: Phase,
        reason: &str,
    ) -> Result<(), StepError> {
        record.advance(phase, self.clock.now(), reason)?;
        record.intent = None;
        record.retry_not_before = None;
        Ok(self.records.save(record).await?)
    }

    /// The same for a guest that is up. Waiting requests continue at once: should this agent end before that is
    /// durable, the intent on disk has the next one find out again. With a session that would bring back what the store
    /// has, over what was worked since: then no request continues before. Nor is a guest ended because it could not be
    /// written down; every later record of it says so too.
    pub(super) async fn conclude_running(
        &self,
        record: &mut Record,
        reason: &str,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        record.advance(Phase::Running, self.clock.now(), reason)?;
        record.intent = None;
        record.retry_not_before = None;
        if record.session.is_some() {
            self.write_up(record).await;
        }
        self.records.set(record.clone());
        watch.mark_up();
        crash::point("up.told");
        if record.session.is_none() {
            self.write_up(record).await;
        }
        Ok(())
    }

    /// Makes durable what the record of an instance that runs says.
    pub(super) async fn write_up(&self, record: &Record) {
        if let Err(error) = self.records.save(record).await {
            tracing::warn!(id = %record.id, error = %chain(&error), "could not record that it is running");
        }
    }

    pub(super) async fn start(
        &self,
        mut record: Record,
        spec: &PoolSpec,
        staging: Option<Phase>,
        reason: &str,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed) {
            return Err(Self::wrong_phase(&record, Action::Start));
        }
        if record.phase == Phase::Failed {
            // Before the intent: a VM that is there after it is the one that was meant.
            self.driver.kill(&record.id).await?;
            crash::point("start.cleared");
            record.advance(Phase::Stopped, self.clock.now(), reason)?;
        }
        let image = self.resolve_image(spec)?;
        self.records.place(&mut record, spec, self.isolation.net_of(&spec.network))?;
        record.revision = spec.revision;
        record.resources = spec.resources;
        record.flake_ref.clone_from(&spec.flake_ref);
        record.image_digest = spec.image_digest;
        (record.secrets, record.own_secrets) = (spec.secrets, spec.own_secrets);
        record.at_rest = spec.at_rest;
        record.image = Some(image);
        record.staging = staging;
        record.persist.clone_from(&spec.persist);
        record.warmup.clone_from(&spec.warmup);
        record.io_limits.clone_from(&spec.io_limits);
        record.restart = spec.restart;
        record.health.clone_from(&spec.health);
        record.workload_override.clone_from(&spec.workload_override);
        record.snapshot = None;
        let is_new = record.phase == Phase::Created;
        self.intend(&mut record, if is_new { Action::Create } else { Action::Start }).await?;
        crash::point("start.intended");
        Box::pin(self.boot_up(record, reason, watch)).await
    }

    /// The image that the pool boots from now.
    pub(super) fn resolve_image(&self, spec: &PoolSpec) -> Result<Digest, StepError> {
        match self.images.resolve(&spec.image()) {
            Resolution::Ready(digest) | Resolution::Outdated { digest, .. } => Ok(digest),
            Resolution::Working { message } | Resolution::Unavailable { message, .. } => {
                Err(StepError::NoImage(message))
            }
        }
    }

    /// From the intent on: also where an earlier agent was cut off.
    pub(super) async fn boot_up(
        &self,
        mut record: Record,
        reason: &str,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        if record.phase == Phase::Created {
            record.advance(Phase::Ready, self.clock.now(), reason)?;
        }
        record.idle_since = None;
        let bundle = self.bundle(&record)?;
        let exits = self.driver.exits();
        self.links.forget(&record.id);
        let image = self.boot_image(&record)?;
        let bounds = self.isolation.prepare(&record).await?;
        crash::point("start.bounded");
        watch.lap(Stage::Prepared);
        // What was forked greeted before it was saved.
        let is_fork = self.begin_vm(&record, image, bounds).await?;
        crash::point("start.begun");
        // A fork begins paused.
        self.driver.resume(&record.id).await?;
        crash::point("start.booted");
        watch.lap(Stage::Restored);
        let points = ["start.reborn", "start.ready"];
        let life = Life { bundle, start_workload: true, understands: is_fork, points };
        self.bring_to_life(&mut record, life, exits, watch).await?;
        self.conclude_running(&mut record, reason, watch).await?;
        crash::point("start.concluded");
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
        crash::point("stop.intended");
        let left = match record.phase {
            Phase::Running => self.shut_down(&record, grace).await,
            _ => grace,
        };
        self.driver.stop(&record.id, left).await?;
        self.links.forget(&record.id);
        crash::point("stop.stopped");
        self.let_go(&record).await;
        crash::point("stop.released");
        record.snapshot = None;
        record.idle_since = None;
        // A surge instance stays marked: it leaves nothing worth keeping.
        record.staging = record.staging.filter(|staging| *staging == Phase::Running);
        self.conclude(&mut record, Phase::Stopped, reason).await?;
        crash::point("stop.concluded");
        self.driver.discard_snapshot(&record.id).await?;
        crash::point("stop.discarded");
        Ok(())
    }

    pub(super) async fn destroy(&self, record: Record) -> Result<(), StepError> {
        record.phase.advance(Phase::Destroyed)?;
        self.remove(record, SessionFate::Released).await
    }

    /// Leaves nothing of an instance on this node.
    pub(super) async fn remove(&self, mut record: Record, session: SessionFate) -> Result<(), StepError> {
        self.intend(&mut record, Action::Destroy).await?;
        crash::point("destroy.intended");
        self.driver.remove(&record.id).await?;
        self.links.forget(&record.id);
        crash::point("destroy.removed");
        self.isolation.release(&record).await?;
        crash::point("destroy.released");
        match session {
            SessionFate::Released => self.sessions.release(&record).await,
            SessionFate::GoesAlong => self.sessions.leave(&record.id),
        }
        self.records.delete(&record.id).await?;
        crash::point("destroy.deleted");
        Ok(())
    }

    pub(super) async fn replace(
        &self,
        mut record: Record,
        spec: &PoolSpec,
        patience: Patience,
        reason: &str,
    ) -> Result<(), StepError> {
        // A new guest for a program that was down is one more of its restarts; another revision begins anew.
        let restarts = record.is_brought_back() && record.revision == spec.revision;
        record.workload =
            record.workload.filter(|_| restarts).map(|w| Box::new(w.restarted(self.clock.now())));
        // Nothing is stopped for what could not start then.
        self.resolve_image(spec)?;
        let (id, back_to) = (record.id.clone(), record.phase);
        let again = || self.records.get(&id).ok_or_else(|| StepError::Gone(id.clone()));
        self.stop(record, patience.grace, reason).await?;
        let staging = (back_to != Phase::Running).then_some(back_to);
        self.start(again()?, spec, staging, reason, &mut Stopwatch::start()).await?;
        // Half a replacement can't be called off.
        let never = CancelSignal::default();
        match back_to {
            Phase::Warm => self.warm(again()?, patience.drain, reason, &never).await,
            Phase::Sleeping => self.sleep(again()?, Some(spec), patience.drain, reason, &never).await,
            _ => Ok(()),
        }
    }
}
