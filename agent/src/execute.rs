//! Executes one step on one instance. The caller decides which step, and with which parameters.
//!
//! The intent is recorded before an effect that can't be observed later, the outcome after it; pausing and resuming are only
//! observed. After a failure the instance is in the phase that its VM and snapshot prove, with a reason and a time of the next
//! attempt. [`runner`] runs many steps in parallel, [`recover`] finishes or undoes what an earlier agent began. A guest is
//! drained before it is paused, gets its tenant's secrets and its identity before it counts as running, and is asked to shut
//! down before its VMM is killed.

mod cancelled;
mod disk;
mod fork;
pub(crate) mod gate;
mod guest;
mod kernel_idle;
mod memory;
mod migration;
mod pause_sleep;
mod reclaim;
pub mod recover;
mod restart;
pub mod runner;
mod secrets;
mod snapshot_options;
mod steps;
pub mod timing;
mod warmup;

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::HostError;
use mvm_planner::{Action, Workload};
use mvm_proto::document::RuntimePolicy;
use mvm_proto::instance::IllegalTransition;
use mvm_proto::text::one_line;
use mvm_proto::{InstanceId, Phase, WorkloadState};
use tokio::sync::{Semaphore, broadcast};
use tokio::time::Instant;

use crate::instance::PoolSpec;

pub use disk::{NoRoom, Writing};
pub(crate) use secrets::bundle_of;
pub use timing::{StepEnd, StepOutcome, Stopwatch, Wake};

use crate::audit::AuditLog;
use crate::clock::Clock;
use crate::crash;
use crate::events::Events;
use crate::guest::{GuestLinks, LinkError};
use crate::instance::archive::ArchiveError;
use crate::instance::record::Record;
use crate::instance::records::{Lease, Records, StateError};
use crate::isolation::Isolation;
use crate::persist::{PersistError, Sessions};
use crate::secrets::{Secrets, SecretsError};
use mvm_image::{ImageError, Images};
use mvm_proto::text::chain;
use mvm_telemetry::Tracer;
use mvm_vmm::snapshot_key::KeyError;
use mvm_vmm::{AnyDriver, Driver, DriverError, DriverKind, VmState};

/// The longest that one step may take beyond the guest's own times to boot, drain and shut down.
const STEP_DEADLINE: Duration = Duration::from_secs(60);

/// How much of a console's end is looked at for its last line, and how much of that is told.
const CONSOLE_BYTES: usize = 4096;
const CONSOLE_LINE_BYTES: usize = 200;

#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error(transparent)]
    Guest(#[from] LinkError),
    #[error(transparent)]
    Image(#[from] ImageError),
    #[error("could not restore its session")]
    Session(#[from] PersistError),
    #[error("could not create or remove its cgroup, jail or network port")]
    Bounds(#[from] HostError),
    #[error(transparent)]
    Secrets(#[from] SecretsError),
    #[error("could not encrypt its memory; an unencrypted snapshot is not written")]
    Key(#[from] KeyError),
    #[error(
        "its memory is to be encrypted, which the {0} driver can't do: run its pool by another driver, or set \
         snapshot_encryption to false"
    )]
    NoEncryption(DriverKind),
    #[error("could not use its archive")]
    Archive(#[from] ArchiveError),
    #[error(transparent)]
    NoRoom(#[from] NoRoom),
    #[error("could not use its image: {0}")]
    NoImage(String),
    #[error("its VM ended: {0}")]
    Died(String),
    #[error("the pool's warm-up {0}")]
    Warmup(String),
    #[error("its guest speaks version 1 of the guest protocol, which can't carry an identity")]
    NoRebirth,
    #[error("could not record the step's intent; the step was not started")]
    State(#[from] StateError),
    #[error(transparent)]
    Illegal(#[from] IllegalTransition),
    #[error("its VMM did not exit within {0:?}")]
    TimedOut(Duration),
    #[error("{0} does not exist")]
    Gone(InstanceId),
    #[error(
        "{0} was exported and is being removed: release it again, or restart this agent to finish the removal"
    )]
    Leaving(InstanceId),
    #[error("{0} is being moved between nodes")]
    Moving(InstanceId),
    #[error("{instance} is {found}, and can't {action}")]
    WrongPhase { instance: InstanceId, found: Phase, action: Action },
    #[error("the document in force does not say what {0} is made of")]
    NoSpec(InstanceId),
}

/// One step, ready to be carried out on an instance that exists.
#[derive(Debug)]
pub struct Order {
    pub action: Action,
    pub staging: Option<Phase>,
    pub reason: String,
    /// Absent: the document does not name the pool, and only an end can come of the step.
    pub spec: Option<PoolSpec>,
    /// A request asks, not a count: the instance keeps its place in the count that it came from.
    pub on_demand: bool,
    /// The person or program that asks; absent: the counts and policies do.
    pub asked_by: Option<String>,
    /// A part of the move that the instance is marked for.
    pub for_move: bool,
}

/// How long a guest may take to end and to drain.
#[derive(Debug, Clone, Copy)]
struct Patience {
    grace: Duration,
    drain: Duration,
    /// For what is run in its pool's template, if that is made first.
    warmup: Duration,
    /// For its program to be found healthy.
    health: Duration,
}

impl Patience {
    fn of(spec: Option<&PoolSpec>) -> Self {
        let policy = RuntimePolicy::default();
        Self {
            grace: spec.map_or(Duration::from_secs(policy.graceful_shutdown_seconds), |spec| spec.grace),
            drain: spec.map_or(Duration::from_secs(policy.drain_timeout_seconds), |spec| spec.drain),
            warmup: spec.and_then(|spec| spec.warmup.as_ref()).map_or(Duration::ZERO, warmup::longest),
            health: spec.and_then(|spec| spec.health.as_ref()).map_or(Duration::ZERO, |h| h.decided_within()),
        }
    }
}

/// What steps are carried out with.
#[derive(Debug)]
pub struct Executor {
    pub driver: Arc<AnyDriver>,
    pub records: Arc<Records>,
    pub clock: Clock,
    pub links: GuestLinks,
    pub images: Images,
    pub isolation: Arc<Isolation>,
    /// Limits background work, which no caller waits for.
    pub background: Arc<Semaphore>,
    pub sessions: Arc<Sessions>,
    /// From boot to ready.
    pub boot_deadline: Duration,
    /// Where what is worth knowing beside a step's outcome is told.
    pub events: Events,
    /// Where every wake that ended well is told.
    pub wakes: broadcast::Sender<Wake>,
    /// Where every step that ended is told, one way or the other.
    pub ends: broadcast::Sender<StepEnd>,
    pub audit: AuditLog,
    pub secrets: Arc<Secrets>,
    pub writing: Writing,
    pub tracer: Tracer,
}

/// Whether a step that was to put an instance to rest ended with it running: it has work, or a request wants it.
pub(crate) fn was_cancelled(action: Action, phase: Phase) -> bool {
    matches!(action, Action::Warm | Action::Sleep) && phase == Phase::Running
}

/// Who decided on a step that no person asked for.
const BY_RECONCILE: &str = "reconcile";
const BY_REQUEST: &str = "request";

impl Executor {
    /// Does what `order` says to the leased instance and answers the phase it is in then. After an error the
    /// record says what is left of it and why.
    pub async fn execute(&self, lease: &Lease, order: &Order) -> Result<Phase, StepError> {
        self.execute_timed(lease, order, &mut Stopwatch::start()).await
    }

    /// The same with a stopwatch that goes along: when the instance runs, it says where the time went.
    pub async fn execute_timed(
        &self,
        lease: &Lease,
        order: &Order,
        watch: &mut Stopwatch,
    ) -> Result<Phase, StepError> {
        let patience = Patience::of(order.spec.as_ref());
        let before = self.records.get(lease.id());
        // What is on its way out has a life elsewhere: whatever kept it from being removed, it has none here.
        if before.as_ref().is_some_and(Record::is_leaving) && order.action != Action::Destroy {
            return Err(StepError::Leaving(lease.id().clone()));
        }
        // Planned before its move began.
        if !order.for_move && before.as_ref().is_some_and(|record| record.transfer.is_some()) {
            return Err(StepError::Moving(lease.id().clone()));
        }
        let begun = Instant::now();
        let work = Box::pin(self.carry_out(lease, order, patience, watch));
        let result = self.within(lease.id(), order.action, patience, work).await;
        let end = StepEnd {
            action: order.action,
            outcome: StepOutcome::of(order.action, &result),
            took: begun.elapsed(),
        };
        // No receiver is no error.
        let _ = self.ends.send(end);
        let default = if order.on_demand { BY_REQUEST } else { BY_RECONCILE };
        let actor = order.asked_by.as_deref().unwrap_or(default);
        self.write_down_step(before.as_ref(), actor, order.action, &order.reason, &result);
        tracing::debug!(id = %lease.id(), action = %order.action, timing = ?watch.read(), "a step is over");
        if let (Ok(_), Some(wake)) = (&result, watch.wake()) {
            // No receiver is no error.
            let _ = self.wakes.send(wake);
        }
        result
    }

    /// Finishes what an earlier agent began on the leased instance.
    pub async fn finish(&self, lease: &Lease, reason: &str) -> Result<Phase, StepError> {
        let id = lease.id();
        let Some(record) = self.records.get(id) else { return Err(StepError::Gone(id.clone())) };
        let Some(intent) = record.intent else { return Ok(record.phase) };
        let patience = Patience::of(None);
        let before = record.clone();
        let work = async {
            match intent.action {
                Action::Wake => Box::pin(self.wake_up(record, reason, &mut Stopwatch::start())).await?,
                Action::Stop => self.stop(record, patience.grace, reason).await?,
                Action::Destroy => self.destroy(record).await?,
                _ => Box::pin(self.boot_up(record, reason, &mut Stopwatch::start())).await?,
            }
            Ok(self.phase_of(id))
        };
        let result = self.within(id, intent.action, patience, Box::pin(work)).await;
        self.write_down_step(Some(&before), BY_RECONCILE, intent.action, reason, &result);
        result
    }

    fn write_down_step(
        &self,
        record: Option<&Record>,
        actor: &str,
        action: Action,
        reason: &str,
        result: &Result<Phase, StepError>,
    ) {
        let Some(record) = record else { return };
        let outcome = match (StepOutcome::of(action, result), result) {
            (_, Err(error)) => Err(chain(error)),
            (StepOutcome::CalledOff, _) => Ok("called off"),
            _ => Ok("done"),
        };
        self.write_down(record, actor, action.as_str(), reason.to_owned(), outcome);
    }

    /// Leaves a word in the tenant's audit log on what was done to an instance: what came of it, or why nothing did.
    fn write_down(
        &self,
        record: &Record,
        actor: &str,
        action: &str,
        reason: String,
        outcome: Result<&str, String>,
    ) {
        self.audit.append_for(record, self.clock.now(), actor, action, reason, outcome);
    }

    async fn within(
        &self,
        id: &InstanceId,
        action: Action,
        patience: Patience,
        work: impl Future<Output = Result<Phase, StepError>>,
    ) -> Result<Phase, StepError> {
        let record = self.records.get(id);
        let sessions = self.sessions.patience(action, record.as_ref());
        let waits = matches!(
            action,
            Action::Create | Action::Start | Action::Wake | Action::Replace | Action::Restart
        );
        let health = record.as_ref().map_or(Duration::ZERO, Self::health_within).max(patience.health);
        let health = if waits { health } else { Duration::ZERO };
        let own = record.and_then(|record| record.warmup.as_ref().map(warmup::longest)).unwrap_or_default();
        // The pool's template boots first, if there is none yet.
        let template = self.boot_deadline + patience.warmup.max(own);
        let deadline = STEP_DEADLINE
            + template
            + self.boot_deadline
            + patience.grace
            + patience.drain
            + sessions
            + health;
        let result = match tokio::time::timeout(deadline, work).await {
            Ok(result) => result,
            Err(_) => Err(StepError::TimedOut(deadline)),
        };
        if let Err(error) = &result {
            let reason = format!("could not {action}: {}", chain(error));
            self.settle_failure(id, action, reason).await;
        }
        self.measure_after(action, id).await;
        self.measure_memory_after_step(id);
        result
    }

    async fn carry_out(
        &self,
        lease: &Lease,
        order: &Order,
        patience: Patience,
        watch: &mut Stopwatch,
    ) -> Result<Phase, StepError> {
        let id = lease.id();
        let record = self.records.get(id).ok_or_else(|| StepError::Gone(id.clone()))?;
        let reason = order.reason.as_str();
        match order.action {
            Action::Create | Action::Start => {
                // A boot that failed after its program did goes on with the row of that one's restarts.
                let failed = record.phase == Phase::Failed;
                let goes_on = |workload: Box<Workload>| {
                    let (state, since) = (WorkloadState::Running, self.clock.now());
                    Box::new(Workload { state, since, ..*workload })
                };
                let workload = record.workload.filter(|_| failed).map(goes_on);
                let record = Record { workload, ..record };
                let spec = order.spec.as_ref().ok_or_else(|| StepError::NoSpec(id.clone()))?;
                self.start(record, spec, order.staging, reason, watch).await?;
            }
            Action::Wake => self.wake(record, order, watch).await?,
            Action::Resume => self.resume(record, order.on_demand, reason, watch).await?,
            Action::Warm => self.warm(record, patience.drain, reason, lease.cancel()).await?,
            Action::Sleep => {
                let spec = order.spec.as_ref();
                self.sleep(record, spec, patience.drain, reason, lease.cancel()).await?;
            }
            Action::Stop => self.stop(record, patience.grace, reason).await?,
            Action::Destroy => self.destroy(record).await?,
            Action::Replace => {
                let spec = order.spec.as_ref().ok_or_else(|| StepError::NoSpec(id.clone()))?;
                self.replace(record, spec, patience, reason).await?;
            }
            Action::Restart => self.restart(record, patience.grace, reason).await?,
        }
        Ok(self.phase_of(id))
    }

    fn phase_of(&self, id: &InstanceId) -> Phase {
        self.records.get(id).map_or(Phase::Destroyed, |record| record.phase)
    }

    /// After a failure: the phase is what VM and snapshot prove, and the next try waits.
    async fn settle_failure(&self, id: &InstanceId, action: Action, mut reason: String) {
        let Some(mut record) = self.records.get(id) else { return };
        let boots = matches!(action, Action::Create | Action::Start | Action::Replace);
        let half_booted =
            boots && matches!(record.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed);
        // What was restored and not told who it is must not run; while its snapshot stands, nothing is lost by that.
        let asleep = record.is_asleep();
        let half_woken = action == Action::Wake && (asleep || record.intent.is_some());
        if half_booted {
            reason.push_str(&self.last_words(id).await);
        }
        if half_booted || half_woken {
            // What came up without being recorded as up is not trusted to be whole.
            if let Err(error) = self.driver.kill(id).await {
                tracing::warn!(%id, error = %chain(&error), "could not clean up after a failed boot");
            }
            crash::point("failure.cleared");
        }
        let vm = self.driver.adopt(id).await.map(|vm| vm.map(|vm| vm.state));
        // A snapshot is worth something only while it is all that there is: memory that ran on has left it behind.
        let phase = match vm {
            Ok(Some(VmState::Running)) => Phase::Running,
            // Saved, and if there is a VM, only its end is missing, which is seen to.
            Ok(_) if asleep => Phase::Sleeping,
            Ok(Some(VmState::Paused)) => Phase::Warm,
            Ok(None) => Phase::Failed,
            // Nothing is known that was not known before.
            Err(_) => record.phase,
        };
        match vm {
            Ok(None) => {
                self.links.forget(id);
                self.let_go(&record).await;
            }
            Ok(Some(VmState::Paused)) => self.links.pause(id),
            Ok(Some(VmState::Running)) => {
                self.links.open(id);
                // It may have given memory back on its way to rest.
                if action == Action::Warm
                    && let Err(error) = self.driver.resume(id).await
                {
                    tracing::warn!(%id, error = %chain(&error), "could not deflate the balloon of a running guest");
                }
            }
            Err(_) => {}
        }
        if phase != Phase::Sleeping && vm.is_ok() {
            record.snapshot = None;
        }
        record.fail(phase, self.clock.now(), &reason, fastrand::f64());
        if let Err(error) = self.records.save(&record).await {
            tracing::warn!(%id, error = %chain(&error), "could not record a failure");
            // Kept in memory, so that the next try waits all the same.
            self.records.set(record.clone());
        }
        crash::point("failure.recorded");
        if phase == Phase::Sleeping {
            // The wake that failed stopped what was done to its snapshot.
            self.compress_later(&record);
        }
    }

    /// Takes away the bounds of a VM that is gone. What is left of them is found and removed by the next look.
    async fn let_go(&self, record: &Record) {
        if let Err(error) = self.isolation.release(record).await {
            tracing::warn!(id = %record.id, error = %chain(&error), "could not remove an instance's cgroup, jail or network port");
        }
    }

    /// The last line of a guest's console, as the end of a sentence; empty when it wrote none.
    async fn last_words(&self, id: &InstanceId) -> String {
        let tail = self.driver.console(id, CONSOLE_BYTES).await.unwrap_or_default();
        let text = String::from_utf8_lossy(&tail);
        let last = text.lines().map(str::trim).rfind(|line| !line.is_empty());
        last.map_or_else(String::new, |line| {
            format!("; its console ends with `{}`", one_line(line, CONSOLE_LINE_BYTES))
        })
    }

    fn wrong_phase(record: &Record, action: Action) -> StepError {
        StepError::WrongPhase { instance: record.id.clone(), found: record.phase, action }
    }
}
