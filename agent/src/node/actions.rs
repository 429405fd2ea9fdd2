//! What a person does to one instance by hand, and what a person asks of the whole node.
//!
//! An action takes the same lease, quotas and steps as the planner's own, and only moves that the life of an instance
//! has: an illegal one is an error, never a guess. It leaves a window in which reconcile keeps its hands off
//! (`override_until`), recorded before the first effect, so that no pass in between undoes it.

use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mvm_host::HostError;
use mvm_planner::MAX_OVERRIDE;
use mvm_planner::{Action, Observation};
use mvm_proto::ManualAction;
use mvm_proto::status::{InstanceStatus, WakeTiming};
use mvm_proto::text::chain;
use mvm_proto::{DesiredState, InstanceId, NodeId, Phase, PoolId, Problem, TenantId};
use mvm_vmm::{Driver, DriverError};

use crate::clock::Clock;
use crate::execute::timing::Stage;
use crate::execute::{Order, StepError, Stopwatch, WakeKind};
use crate::guest::GuestLinks;
use crate::instance::PoolSpec;
use crate::instance::records::StateError;
use crate::isolation::NetworkReport;
use crate::node::export::{Export, export};
use crate::node::reconcile_task::NodeHandle;
use crate::node::wake::{LEASE_PATIENCE, Waker, busy, shown};

/// How long reconcile keeps its hands off after an action by hand, unless told otherwise.
pub const DEFAULT_OVERRIDE: Duration = Duration::from_secs(600);

/// The step that does this to an instance of `phase`. `Ok(None)`: it is there already.
fn step_of(action: ManualAction, phase: Phase) -> Result<Option<Action>, &'static str> {
    use Phase::{Created, Destroyed, Failed, Ready, Running, Sleeping, Stopped, Warm};
    match (action, phase) {
        (_, phase) if phase == action.leads_to() => Ok(None),
        (_, Destroyed) => Err("it is gone"),
        (ManualAction::Start, Created | Ready | Stopped | Failed) => Ok(Some(Action::Start)),
        (ManualAction::Start, Warm | Sleeping) => Err("wake it instead"),
        (ManualAction::Stop, Running | Warm | Sleeping | Failed | Ready) => Ok(Some(Action::Stop)),
        (ManualAction::Stop, Created) => Err("it never ran; destroy it instead"),
        (ManualAction::Warm, Running) => Ok(Some(Action::Warm)),
        (ManualAction::Warm, Sleeping) => Err("wake it first"),
        (ManualAction::Sleep, Running | Warm) => Ok(Some(Action::Sleep)),
        (ManualAction::Wake, Warm) => Ok(Some(Action::Resume)),
        (ManualAction::Wake, Sleeping) => Ok(Some(Action::Wake)),
        (ManualAction::Destroy, Created | Ready | Stopped | Failed) => Ok(Some(Action::Destroy)),
        (ManualAction::Destroy, _) => Err("stop it first"),
        _ => Err("start it first"),
    }
}

fn event_of(action: ManualAction) -> &'static str {
    match action {
        ManualAction::Start => "InstanceStarted",
        ManualAction::Stop => "InstanceStopped",
        ManualAction::Warm => "InstanceWarmed",
        ManualAction::Sleep => "InstanceSlept",
        ManualAction::Wake => "InstanceWoken",
        ManualAction::Destroy => "InstanceDestroyed",
    }
}

/// How long the hands stay off, from what was asked.
pub fn override_for(seconds: Option<u64>) -> Result<Duration, Problem> {
    let asked = seconds.map_or(DEFAULT_OVERRIDE, Duration::from_secs);
    if asked > MAX_OVERRIDE {
        let detail = format!("override_seconds must be at most {}", MAX_OVERRIDE.as_secs());
        return Err(Problem::new(400, "bad_body", detail, "Ask for a shorter window."));
    }
    Ok(asked)
}

/// The end of a console: what is given when nobody says how much, and the most that is given.
pub const DEFAULT_LOG_BYTES: usize = 64 * 1024;
pub const MAX_LOG_BYTES: usize = 1024 * 1024;

/// One action on one instance.
#[derive(Debug, Clone)]
pub struct Manual {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub instance: InstanceId,
    pub action: ManualAction,
    /// How long reconcile keeps its hands off afterwards; zero: not at all.
    pub override_for: Duration,
    /// Who asks, for the instance's reason and the event.
    pub by: String,
}

/// What came of an action.
#[derive(Debug, Clone, PartialEq)]
pub struct Acted {
    /// That the instance is in then.
    pub phase: Phase,
    /// Where the time went; of a wake only.
    pub wake: Option<WakeTiming>,
}

/// Acts on instances, whatever the driver.
pub(crate) trait Acts: Send + Sync {
    fn act(&self, manual: Manual) -> BoxFuture<'static, Result<Acted, Problem>>;

    fn console(
        &self,
        instance: InstanceId,
        max_bytes: usize,
    ) -> BoxFuture<'static, Result<Vec<u8>, DriverError>>;
}

#[derive(Debug)]
pub(crate) struct Actor<D> {
    pub(crate) waker: Waker<D>,
    pub(crate) driver: Arc<D>,
    pub(crate) clock: Clock,
    pub(crate) node_id: NodeId,
}

impl<D> Clone for Actor<D> {
    fn clone(&self) -> Self {
        Self {
            waker: self.waker.clone(),
            driver: Arc::clone(&self.driver),
            clock: self.clock.clone(),
            node_id: self.node_id.clone(),
        }
    }
}

impl<D: Driver> Acts for Actor<D> {
    fn act(&self, manual: Manual) -> BoxFuture<'static, Result<Acted, Problem>> {
        let this = self.clone();
        Box::pin(async move {
            // Runs on even when the caller goes away: half an action helps nobody.
            let action = manual.action;
            let (watch, up) = Stopwatch::watched();
            let task = tokio::spawn(async move { this.carry_out(&manual, watch).await });
            match up.await {
                Ok(timing) => Ok(Acted {
                    phase: Phase::Running,
                    wake: (action == ManualAction::Wake).then_some(timing),
                }),
                Err(_) => task.await.unwrap_or_else(|error| Err(failed(action, &error.to_string()))),
            }
        })
    }

    fn console(
        &self,
        instance: InstanceId,
        max_bytes: usize,
    ) -> BoxFuture<'static, Result<Vec<u8>, DriverError>> {
        let driver = Arc::clone(&self.driver);
        Box::pin(async move { driver.console(&instance, max_bytes).await })
    }
}

impl<D: Driver> Actor<D> {
    async fn carry_out(&self, manual: &Manual, mut watch: Stopwatch) -> Result<Acted, Problem> {
        let Manual { tenant, pool, instance: id, action, .. } = manual;
        let to = action.leads_to();
        self.waker.find(tenant, pool, id)?;
        let on_demand = *action == ManualAction::Wake;
        // One that is under way is this one's too; the window is opened all the same.
        let joined = match self.waker.under_way(id).filter(|_| on_demand) {
            Some(other) => other.await.ok(),
            None => None,
        };
        let (lease, kept) = match on_demand {
            true => self.waker.lease(id).await?,
            false => {
                let lease = self.waker.records.wait_lease(id, to);
                (tokio::time::timeout(LEASE_PATIENCE, lease).await.map_err(|_| busy(id))?, false)
            }
        };
        if kept {
            watch.is(WakeKind::Kept);
        }
        // What was waited for may have changed it, or ended it.
        let phase = self.waker.find(tenant, pool, id)?;
        let step = step_of(*action, phase).map_err(|hint| illegal(id, phase, *action, hint))?;
        let spec = self.spec(tenant, pool);
        if step == Some(Action::Start) && spec.is_none() {
            return Err(no_spec(tenant, pool));
        }
        if matches!(step, Some(Action::Wake | Action::Resume)) {
            self.waker.check_image(id)?;
        }
        if step.is_some() && matches!(to, Phase::Running | Phase::Warm | Phase::Sleeping) {
            self.waker.check_room(id, to)?;
        }
        let before = self.override_it(manual, step).await?;
        watch.lap(Stage::Queued);
        let wake = |watch: &Stopwatch| on_demand.then(|| joined.unwrap_or_else(|| watch.read()));
        let Some(step) = step else { return Ok(Acted { phase, wake: wake(&watch) }) };
        let reason = format!("{action} by hand, asked by {}", manual.by);
        let asked_by = Some(manual.by.clone());
        let order = Order { action: step, staging: None, reason, spec, on_demand, asked_by };
        match self.waker.executor.execute_timed(&lease, &order, &mut watch).await {
            Ok(phase) => Ok(Acted { phase, wake: wake(&watch) }),
            Err(error) => {
                // What could not be done by hand is reconcile's to put right again.
                if let Some(mut record) = self.waker.records.get(id) {
                    record.override_until = before;
                    if self.waker.records.save(&record).await.is_err() {
                        self.waker.records.set(record);
                    }
                }
                Err(refused(*action, id, &error))
            }
        }
    }

    /// Opens the window, durably, by itself or with the first thing that the step writes down. Answers what there was
    /// before.
    async fn override_it(
        &self,
        manual: &Manual,
        step: Option<Action>,
    ) -> Result<Option<mvm_proto::Timestamp>, Problem> {
        let records = &self.waker.records;
        let Some(mut record) = records.get(&manual.instance) else {
            return self.waker.find(&manual.tenant, &manual.pool, &manual.instance).map(|_| None);
        };
        let before = record.override_until;
        let window = !manual.override_for.is_zero();
        record.override_until = window.then(|| self.clock.now() + manual.override_for);
        if matches!(step, Some(Action::Start | Action::Stop | Action::Destroy)) {
            // Each begins with an intent, before anything is done.
            records.set(record);
        } else {
            records.save(&record).await.map_err(|error| not_recorded(&error))?;
        }
        Ok(before)
    }

    pub(crate) fn spec(&self, tenant: &TenantId, pool: &PoolId) -> Option<PoolSpec> {
        let in_force = shown(&self.waker.in_force)?;
        let mut pools = in_force.desired.pools();
        pools
            .find(|(t, p)| t.tenant_id == *tenant && p.pool_id == *pool)
            .map(|(tenant, pool)| PoolSpec::of(tenant, pool))
    }
}

impl NodeHandle {
    /// Acts on an instance by hand; answers its phase when it is done.
    pub async fn act(&self, manual: Manual) -> Result<Acted, Problem> {
        let subject = format!("{}/{}/{}", manual.tenant, manual.pool, manual.instance);
        let message = format!("by hand, asked by {}", manual.by);
        let event = event_of(manual.action);
        let id = manual.instance.clone();
        let done = self.shared.actor.act(manual).await;
        match &done {
            Ok(_) => self.publish(event, &subject, &message),
            Err(problem) => self.publish("ManualActionFailed", &subject, &problem.detail),
        }
        self.trigger_after(id);
        done
    }

    /// The end of what an instance wrote to its console.
    pub async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, Problem> {
        let tail = self.shared.actor.console(instance.clone(), max_bytes).await;
        tail.map_err(|error| {
            let detail = format!("the console of {instance} could not be read: {}", chain(&error));
            Problem::new(503, "no_console", detail, "An instance that never booted has none.")
        })
    }

    /// Leaves a line in the tenant's audit log on what was asked of a guest.
    pub(crate) fn audit(
        &self,
        instance: &InstanceId,
        actor: &str,
        action: &str,
        reason: String,
        outcome: Result<&str, String>,
    ) {
        // One that is gone has its end in the log.
        if let Some(record) = self.shared.records.get(instance) {
            let at = self.shared.clock.now();
            self.shared.audit.append_for(&record, at, actor, action, reason, outcome);
        }
    }

    /// The links to the programs inside this node's instances.
    #[must_use]
    pub fn guests(&self) -> &GuestLinks {
        &self.shared.guests
    }

    #[must_use]
    pub fn node_id(&self) -> &NodeId {
        &self.shared.node_id
    }

    /// One tenant's and pool's instance, or a problem that says that there is none.
    pub fn find(
        &self,
        tenant: &TenantId,
        pool: &PoolId,
        instance: &InstanceId,
    ) -> Result<InstanceStatus, Problem> {
        let is_it =
            |found: &InstanceStatus| found.tenant_id == tenant.as_str() && found.pool_id == pool.as_str();
        self.instance(instance).filter(is_it).ok_or_else(|| {
            let detail = format!("there is no instance {tenant}/{pool}/{instance} on this node");
            Problem::new(404, "unknown_instance", detail, "List the tenant's instances.")
        })
    }

    /// One instance, whatever tenant it belongs to.
    #[must_use]
    pub fn instance(&self, id: &InstanceId) -> Option<InstanceStatus> {
        self.shared.records.get(id).map(|record| self.shared.status_of(&record))
    }

    /// The document in force.
    #[must_use]
    pub fn desired(&self) -> Option<Arc<crate::node::InForce>> {
        shown(&self.shared.in_force)
    }

    /// What the planner would be told now.
    #[must_use]
    pub fn observation(&self) -> Observation {
        Observation {
            capacity: self.shared.capacity,
            instances: self.shared.records.observed(),
            blocked: self.shared.blocked.borrow().clone(),
            memory_pressure: *self.shared.pressed.borrow(),
        }
    }

    /// What holds of the tenants' networks, by looking and, if `deep`, by trying.
    pub async fn verify_network(&self, deep: bool) -> Result<NetworkReport, HostError> {
        let in_force = self.desired();
        let desired = in_force.as_ref().map(|in_force| &in_force.desired);
        self.shared.isolation.verify(desired, &self.shared.records, deep).await
    }

    /// A document that asks for what runs here.
    #[must_use]
    pub fn export(&self) -> Export {
        let in_force = self.desired();
        let desired: Option<&DesiredState> = in_force.as_ref().map(|in_force| &in_force.desired);
        export(&self.shared.node_id, desired, &self.shared.records.all())
    }
}

fn illegal(id: &InstanceId, phase: Phase, action: ManualAction, hint: &str) -> Problem {
    let detail = format!("{id} is {phase}, and can't {action}");
    Problem::new(409, "illegal_move", detail, format!("For one that is {phase}: {hint}."))
}

pub(crate) fn no_spec(tenant: &TenantId, pool: &PoolId) -> Problem {
    let detail = format!("the document in force does not say what {tenant}/{pool} is made of");
    Problem::new(409, "unmanaged_pool", detail, "Push a document that names the pool.")
}

pub(crate) fn not_recorded(error: &StateError) -> Problem {
    let detail = format!("could not record the action, so it was not done: {}", chain(error));
    Problem::new(507, "storage_failed", detail, "Free some disk space.")
}

fn failed(action: ManualAction, reason: &str) -> Problem {
    let detail = format!("could not {action}: {reason}");
    Problem::new(503, "action_failed", detail, "Look at the instance's reason and console.")
}

fn refused(action: ManualAction, id: &InstanceId, error: &StepError) -> Problem {
    failed(action, &format!("{id}: {}", chain(error)))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// All that can be asked for by hand, and the step that each becomes.
    const ACCEPTED: [(ManualAction, &[Phase], Action); 7] = {
        use Phase::{Created, Failed, Ready, Running, Sleeping, Stopped, Warm};
        [
            (ManualAction::Start, &[Created, Ready, Stopped, Failed], Action::Start),
            (ManualAction::Stop, &[Ready, Running, Warm, Sleeping, Failed], Action::Stop),
            (ManualAction::Warm, &[Running], Action::Warm),
            (ManualAction::Sleep, &[Running, Warm], Action::Sleep),
            (ManualAction::Wake, &[Warm], Action::Resume),
            (ManualAction::Wake, &[Sleeping], Action::Wake),
            (ManualAction::Destroy, &[Created, Ready, Stopped, Failed], Action::Destroy),
        ]
    };

    #[test]
    fn an_action_by_hand_is_one_step_where_the_phase_has_it_and_refused_with_a_hint_elsewhere() {
        for action in ManualAction::ALL {
            for phase in Phase::ALL {
                let accepted =
                    |entry: &&(ManualAction, &[Phase], Action)| entry.0 == action && entry.1.contains(&phase);
                let step = step_of(action, phase);
                match ACCEPTED.iter().find(accepted) {
                    Some((_, _, expected)) => assert_eq!(step, Ok(Some(*expected)), "{action} {phase}"),
                    None if phase == action.leads_to() => assert_eq!(step, Ok(None), "{action} {phase}"),
                    None => assert!(!step.unwrap_err().is_empty(), "{action} {phase}"),
                }
            }
        }
    }

    #[test]
    fn no_action_by_hand_makes_a_move_that_an_instance_does_not_have() {
        for (action, phases, _) in ACCEPTED {
            for phase in phases {
                let to = action.leads_to();
                let through_warm = to == Phase::Sleeping && *phase == Phase::Running;
                let through_ready = to == Phase::Running && matches!(phase, Phase::Created | Phase::Failed);
                assert!(phase.advance(to).is_ok() || through_warm || through_ready, "{action} {phase}");
            }
        }
    }

    #[test]
    fn an_action_reads_back_from_its_own_text() {
        for action in ManualAction::ALL {
            assert_eq!(action.to_string().parse(), Ok(action));
        }
    }
}
