//! Steps between running, warm and sleeping.

use std::time::Duration;

use mvm_planner::Action;
use mvm_proto::text::chain;
use mvm_proto::{Phase, WakeKind};
use mvm_vmm::{Driver, DriverError};

use super::guest::{Drain, Life};
use super::timing::{Stage, Stopwatch};
use super::{Executor, Order, StepError};
use crate::crash;
use crate::instance::PoolSpec;
use crate::instance::record::Record;
use crate::instance::records::CancelSignal;

impl Executor {
    /// The snapshot is given up before the guest runs: a disk that moved on never meets old memory. Nothing need be
    /// written down before: until then it sleeps, and a VM beside its snapshot is one that never ran.
    pub(super) async fn wake(
        &self,
        mut record: Record,
        order: &Order,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        if record.snapshot.is_none() {
            return Err(Self::wrong_phase(&record, Action::Wake));
        }
        let renewed = order.spec.as_ref().filter(|it| it.renews_on_wake && it.revision != record.revision);
        // Nothing is given up for what could not start.
        if let Some(spec) = renewed.filter(|spec| self.resolve_image(spec).is_ok()) {
            return Box::pin(self.renew(record, spec, order, watch)).await;
        }
        record.staging = order.staging;
        if let Some(spec) = &order.spec {
            record.restart = spec.restart;
            record.health.clone_from(&spec.health);
        }
        if order.on_demand {
            self.lend(&mut record, Phase::Sleeping);
        }
        if record.exported_at.is_some() {
            let message = "it was exported and is now woken here: do not import an archive of it";
            self.events.publish("ExportedInstanceRuns", record.full_name(), message);
        }
        watch.set_kind(WakeKind::Woken);
        Box::pin(self.wake_up(record, &order.reason, watch)).await
    }

    /// Boots the pool's revision in place of waking one that is older, with its disk.
    async fn renew(
        &self,
        record: Record,
        spec: &PoolSpec,
        order: &Order,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        let id = record.id.clone();
        let message = "boots the pool's revision, because it slept with an older one";
        self.events.publish("InstanceRenewed", record.full_name(), message);
        watch.set_kind(WakeKind::Started);
        self.stop(record, Duration::ZERO, &order.reason).await?;
        let mut record = self.records.get(&id).ok_or(StepError::Gone(id))?;
        record.workload = None;
        if order.on_demand {
            self.lend(&mut record, Phase::Sleeping);
        }
        self.start(record, spec, order.staging, &order.reason, watch).await
    }

    /// From the intent on: also where an earlier agent was cut off.
    pub(super) async fn wake_up(
        &self,
        mut record: Record,
        reason: &str,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        let bundle = self.bundle(&record)?;
        let exits = self.driver.exits();
        if let Some(snapshot) = record.snapshot.clone() {
            let image = self.boot_image(&record)?;
            let bounds = self.isolation.prepare(&record).await?;
            crash::point("wake.bounded");
            let options = self.snapshot_options(&record);
            watch.lap(Stage::Prepared);
            match self.driver.restore(&record.spec(image, bounds), &snapshot, &options).await {
                Err(error @ (DriverError::Unusable { .. } | DriverError::NoSnapshot { .. })) => {
                    watch.lap(Stage::Restored);
                    return self.start_over(record, &error, reason, watch).await;
                }
                restored => restored?,
            }
            crash::point("wake.restored");
            watch.lap(Stage::Restored);
            record.snapshot = None;
            // Paused and without a snapshot it is warm, whatever comes next.
            record.advance(Phase::Warm, self.clock.now(), reason)?;
            self.intend(&mut record, Action::Wake).await?;
            crash::point("wake.given_up");
            watch.lap(Stage::Recorded);
        } else {
            // An earlier agent restored it: its port is known to that one's firewall, and to this one's from here on.
            self.isolation.prepare(&record).await?;
        }
        self.driver.resume(&record.id).await?;
        crash::point("wake.resumed");
        watch.lap(Stage::Restored);
        let points = ["wake.reborn", "wake.ready"];
        // Only a guest that was told who it is has a generation.
        let life = Life { bundle, start_workload: false, understands: record.generation > 0, points };
        self.bring_to_life(&mut record, life, exits, watch).await?;
        self.conclude_running(&mut record, reason, watch).await?;
        crash::point("wake.concluded");
        if let Err(error) = self.driver.discard_snapshot(&record.id).await {
            // It was given up: the next one takes its place.
            tracing::warn!(id = %record.id, error = %chain(&error), "could not delete its snapshot");
        }
        crash::point("wake.discarded");
        Ok(())
    }

    /// What it remembered can't be had back: it starts as one that was stopped, with its disk. Who it was woken for, and
    /// why it should run, stays as it is.
    async fn start_over(
        &self,
        mut record: Record,
        cause: &DriverError,
        reason: &str,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        watch.replace_kind(WakeKind::Started);
        let message = format!("boots anew, because its snapshot can't be restored: {}", chain(cause));
        self.events.publish("SnapshotUnusable", record.full_name(), message);
        let (on_demand, home) = (record.on_demand, record.home);
        record.snapshot = None;
        record.workload = None;
        record.advance(Phase::Stopped, self.clock.now(), reason)?;
        (record.on_demand, record.home) = (on_demand, home);
        self.intend(&mut record, Action::Start).await?;
        crash::point("wake.forgotten");
        self.driver.discard_snapshot(&record.id).await?;
        watch.lap(Stage::Recorded);
        Box::pin(self.boot_up(record, reason, watch)).await
    }

    /// Marks an instance as a request's, with its place in the count that it came from.
    pub(super) fn lend(&self, record: &mut Record, home: Phase) {
        record.on_demand = true;
        record.home.get_or_insert(home);
        record.last_used_at = Some(self.clock.now());
    }

    pub(super) async fn resume(
        &self,
        mut record: Record,
        on_demand: bool,
        reason: &str,
        watch: &mut Stopwatch,
    ) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Warm | Phase::Running) {
            return Err(Self::wrong_phase(&record, Action::Resume));
        }
        if record.phase == Phase::Warm {
            self.check_image(&record)?;
        }
        watch.set_kind(if record.phase == Phase::Warm { WakeKind::Resumed } else { WakeKind::Running });
        let without = record.phase == Phase::Warm && record.secrets_wiped;
        let bundle = if without { self.bundle(&record)? } else { None };
        watch.lap(Stage::Prepared);
        self.driver.resume(&record.id).await?;
        crash::point("resume.resumed");
        watch.lap(Stage::Restored);
        if record.phase == Phase::Warm {
            self.links.open(&record.id);
            self.give_secrets(&mut record, bundle).await?;
            self.refresh(&mut record);
            record.idle_since = None;
        }
        watch.lap(Stage::Reborn);
        let marked = record.staging.is_some() || on_demand || record.retry_not_before.is_some();
        record.staging = None;
        if on_demand {
            let home = record.phase;
            self.lend(&mut record, home);
        }
        record.retry_not_before = None;
        record.advance(Phase::Running, self.clock.now(), reason)?;
        self.records.set(record.clone());
        watch.mark_up();
        if marked {
            self.write_up(&record).await;
        }
        crash::point("resume.kept");
        Ok(())
    }

    pub(super) async fn warm(
        &self,
        record: Record,
        drain: Duration,
        reason: &str,
        cancel: &CancelSignal,
    ) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Warm | Phase::Running) {
            return Err(Self::wrong_phase(&record, Action::Warm));
        }
        let Some(mut record) = self.drained(record, drain, Phase::Warm, cancel).await? else {
            return Ok(());
        };
        self.pause(&mut record).await?;
        crash::point("warm.paused");
        if !cancel.commit() {
            return self.go_on(record, Phase::Warm).await;
        }
        let marked = record.staging.is_some() || record.on_demand || record.retry_not_before.is_some();
        record.staging = None;
        record.retry_not_before = None;
        record.advance(Phase::Warm, self.clock.now(), reason)?;
        self.keep(record, marked).await?;
        crash::point("warm.kept");
        Ok(())
    }

    /// Lets it finish its work, if it runs, on its way to `rest`. None: it goes on running, for it has work again or a
    /// request wants it.
    async fn drained(
        &self,
        record: Record,
        timeout: Duration,
        rest: Phase,
        cancel: &CancelSignal,
    ) -> Result<Option<Record>, StepError> {
        if record.phase != Phase::Running {
            return Ok(Some(record));
        }
        match self.drain_unless_wanted(&record, timeout, rest, cancel).await? {
            Drain::Over => return Ok(Some(record)),
            Drain::CalledOff => self.used(record),
            Drain::Wanted => self.go_on(record, rest).await?,
        }
        Ok(None)
    }

    async fn pause(&self, record: &mut Record) -> Result<(), StepError> {
        if record.phase == Phase::Running {
            record.idle_since = self.links.view(&record.id).and_then(|view| view.idle_since);
        }
        self.driver.pause(&record.id).await?;
        self.links.pause(&record.id);
        Ok(())
    }

    fn used(&self, mut record: Record) {
        record.last_used_at = Some(self.clock.now());
        record.idle_since = None;
        self.records.set(record);
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

    pub(super) async fn sleep(
        &self,
        mut record: Record,
        spec: Option<&PoolSpec>,
        drain: Duration,
        reason: &str,
        cancel: &CancelSignal,
    ) -> Result<(), StepError> {
        if !matches!(record.phase, Phase::Warm | Phase::Running) {
            return Err(Self::wrong_phase(&record, Action::Sleep));
        }
        let options = self.options_to_save(&mut record, spec)?;
        // Before anything is done to the guest: where there is no room, it goes on as it is.
        let _room = self.room_for_snapshot(&record, spec).await?;
        let wipes = record.secrets.is_some() && !record.secrets_wiped;
        if wipes && record.phase == Phase::Warm {
            // It runs for a moment, because only the guest itself can wipe its secrets.
            self.driver.resume(&record.id).await?;
            self.refresh(&mut record);
            record.advance(Phase::Running, self.clock.now(), reason)?;
        }
        let Some(mut record) = self.drained(record, drain, Phase::Sleeping, cancel).await? else {
            return Ok(());
        };
        crash::point("sleep.drained");
        if wipes {
            self.wipe_secrets(&mut record).await?;
        }
        if cancel.is_cancelled() {
            return self.go_on(record, Phase::Sleeping).await;
        }
        self.pause(&mut record).await?;
        crash::point("sleep.paused");
        record.advance(Phase::Warm, self.clock.now(), reason)?;
        self.intend(&mut record, Action::Sleep).await?;
        crash::point("sleep.intended");
        let snapshot = self.snapshot_unless_wanted(&record.id, &options, cancel).await?;
        crash::point("sleep.snapshotted");
        // From here on a request waits until it sleeps, and wakes it.
        let Some(snapshot) = snapshot.filter(|_| cancel.commit()) else {
            return self.go_on(record, Phase::Sleeping).await;
        };
        record.snapshot = Some(snapshot);
        record.staging = None;
        record.idle_since = None;
        self.conclude(&mut record, Phase::Sleeping, reason).await?;
        crash::point("sleep.concluded");
        self.driver.kill(&record.id).await?;
        self.links.forget(&record.id);
        crash::point("sleep.killed");
        self.let_go(&record).await;
        crash::point("sleep.released");
        self.compress_later(&record);
        Ok(())
    }
}
