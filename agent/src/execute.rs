//! Carries out one step on one instance. Nothing here decides: what to do, and with what, is given.
//!
//! Before an effect that can't be observed again the intent is recorded, after it the outcome; pausing and resuming
//! are only observed. Every failure leaves the instance in the phase that its VM and snapshot prove, with a reason
//! and a time before which it is not tried again. [`runner`] runs many steps at once, [`recover`] resolves what an
//! earlier agent began.

pub mod recover;
pub mod runner;
mod steps;

use std::sync::Arc;
use std::time::Duration;

use mvm_planner::Action;
use mvm_proto::document::{Pool, Resources, RuntimePolicy, Subnet, Tenant};
use mvm_proto::instance::IllegalMove;
use mvm_proto::{Digest, InstanceId, Phase};

use crate::driver::{Driver, DriverError, VmState};
use crate::reconcile::Clock;
use crate::record::Record;
use crate::state::{Lease, Records, StateError};

/// The longest that one step may take beyond the guest's own time to shut down. A boot on a loaded host without
/// KVM takes tens of seconds; anything longer hangs.
const STEP_DEADLINE: Duration = Duration::from_secs(120);

#[derive(Debug, thiserror::Error)]
pub enum StepError {
    #[error(transparent)]
    Driver(#[from] DriverError),
    #[error("the step was not begun, for its intent could not be recorded")]
    State(#[from] StateError),
    #[error(transparent)]
    Illegal(#[from] IllegalMove),
    #[error("it did not end within {0:?}")]
    TimedOut(Duration),
    #[error("{0} does not exist")]
    Gone(InstanceId),
    #[error("{instance} is {found}, and can't {action}")]
    WrongPhase { instance: InstanceId, found: Phase, action: Action },
    #[error("the document in force does not say what {0} is made of")]
    NoSpec(InstanceId),
}

/// What a pool's instances are made of now, and how they are stopped.
#[derive(Debug, Clone)]
pub struct PoolSpec {
    pub revision: Digest,
    pub resources: Resources,
    pub flake_ref: String,
    pub image_digest: Option<Digest>,
    /// Where its addresses come from.
    pub subnet: Subnet,
    pub grace: Duration,
}

impl PoolSpec {
    #[must_use]
    pub fn of(tenant: &Tenant, pool: &Pool) -> Self {
        Self {
            revision: mvm_planner::revision_of(tenant, pool),
            resources: pool.instance_resources,
            flake_ref: pool.flake_ref.clone(),
            image_digest: pool.image_digest,
            subnet: tenant.network.ipv4_subnet,
            grace: Duration::from_secs(pool.runtime_policy.graceful_shutdown_seconds),
        }
    }
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
}

#[derive(Debug)]
pub struct Executor<D> {
    driver: Arc<D>,
    records: Arc<Records>,
    clock: Clock,
}

impl<D: Driver> Executor<D> {
    #[must_use]
    pub fn new(driver: Arc<D>, records: Arc<Records>, clock: Clock) -> Self {
        Self { driver, records, clock }
    }

    /// Does what `order` says to the leased instance and answers the phase it is in then. After an error the
    /// record says what is left of it and why.
    pub async fn execute(&self, lease: &Lease, order: &Order) -> Result<Phase, StepError> {
        let grace = order.spec.as_ref().map_or_else(default_grace, |spec| spec.grace);
        let deadline = STEP_DEADLINE + grace;
        let id = lease.id();
        let result = match tokio::time::timeout(deadline, self.carry_out(id, order, grace)).await {
            Ok(result) => result,
            Err(_) => Err(StepError::TimedOut(deadline)),
        };
        if let Err(error) = &result {
            let reason = format!("could not {}: {}", order.action, crate::text::chain(error));
            self.settle_failure(id, order.action, &reason).await;
        }
        result
    }

    async fn carry_out(&self, id: &InstanceId, order: &Order, grace: Duration) -> Result<Phase, StepError> {
        let record = self.records.get(id).ok_or_else(|| StepError::Gone(id.clone()))?;
        let reason = order.reason.as_str();
        match order.action {
            Action::Create | Action::Start => {
                let spec = order.spec.as_ref().ok_or_else(|| StepError::NoSpec(id.clone()))?;
                self.start(record, spec, order.staging, reason).await?;
            }
            Action::Wake => self.wake(record, order.staging, order.on_demand, reason).await?,
            Action::Resume => self.resume(record, order.on_demand, reason).await?,
            Action::Warm => self.warm(record, reason).await?,
            Action::Sleep => self.sleep(record, reason).await?,
            Action::Stop => self.stop(record, grace, reason).await?,
            Action::Destroy => self.destroy(record).await?,
            Action::Replace => {
                let spec = order.spec.as_ref().ok_or_else(|| StepError::NoSpec(id.clone()))?;
                self.replace(record, spec, grace, reason).await?;
            }
        }
        Ok(self.records.get(id).map_or(Phase::Destroyed, |record| record.phase))
    }

    /// After a failure: the phase is what VM and snapshot prove, and the next try waits.
    async fn settle_failure(&self, id: &InstanceId, action: Action, reason: &str) {
        let boots = matches!(action, Action::Create | Action::Start | Action::Replace);
        let Some(mut record) = self.records.get(id) else { return };
        let half_booted =
            boots && matches!(record.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed);
        if half_booted {
            // What came up without being recorded as up is not trusted to be whole.
            if let Err(error) = self.driver.kill(id).await {
                tracing::warn!(%id, error = %crate::text::chain(&error), "could not clear away a failed boot");
            }
        }
        let vm = self.driver.adopt(id).await.ok().flatten();
        let phase = match (vm.map(|vm| vm.state), &record.snapshot) {
            (Some(VmState::Running), _) => Phase::Running,
            (Some(VmState::Paused), _) => Phase::Warm,
            (None, Some(_)) => Phase::Sleeping,
            (None, None) => Phase::Failed,
        };
        record.fail(phase, self.clock.now(), reason, fastrand::f64());
        if let Err(error) = self.records.save(&record).await {
            tracing::warn!(%id, error = %crate::text::chain(&error), "could not record a failure");
            // Kept in memory, so that the next try waits all the same.
            self.records.set(record);
        }
    }

    fn wrong_phase(record: &Record, action: Action) -> StepError {
        StepError::WrongPhase { instance: record.id.clone(), found: record.phase, action }
    }
}

fn default_grace() -> Duration {
    Duration::from_secs(RuntimePolicy::default().graceful_shutdown_seconds)
}
