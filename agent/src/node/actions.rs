//! What is done to one instance for a request or by hand.
//!
//! An action takes the same lease, quotas and steps as the planner's own, and only moves that the life of an instance
//! has: an illegal one is an error, never a guess. It leaves a window in which reconcile keeps its hands off
//! (`override_until`), recorded before the first effect, so that no pass in between undoes it.

use std::sync::Arc;
use std::time::Duration;

use mvm_planner::{Action, MAX_OVERRIDE};
use mvm_proto::status::WakeTiming;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, ManualAction, Phase, PoolId, TenantId, WakeKind};

use crate::execute::timing::Stage;
use crate::execute::{Order, Stopwatch};
use crate::instance::record::Record;
use crate::node::actor::{Actor, Place};
use crate::node::error::ActionError;
use crate::node::handle::NodeHandle;

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
pub fn override_for(seconds: Option<u64>) -> Result<Duration, ActionError> {
    let asked = seconds.map_or(DEFAULT_OVERRIDE, Duration::from_secs);
    if asked > MAX_OVERRIDE { Err(ActionError::WindowTooLong) } else { Ok(asked) }
}

/// The end of a console: the default length, and the limit.
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

/// Why an instance is acted on.
#[derive(Debug, Clone)]
pub(crate) enum By {
    /// A request uses the instance: it keeps its place in the count that it came from, and no window is opened.
    Request,
    Hand {
        by: String,
        override_for: Duration,
    },
}

impl Actor {
    /// Runs on even when the caller goes away: half an action is of no use.
    async fn act(&self, place: Place, action: ManualAction, by: By) -> Result<Acted, ActionError> {
        let this = self.clone();
        let (watch, up) = Stopwatch::watched();
        let task = tokio::spawn(async move { this.carry_out(&place, action, &by, watch).await });
        match up.await {
            Ok(timing) => {
                Ok(Acted { phase: Phase::Running, wake: (action == ManualAction::Wake).then_some(timing) })
            }
            Err(_) => task.await.unwrap_or_else(|cause| Err(ActionError::Aborted { action, cause })),
        }
    }

    /// Does one thing to one instance, for a request or by hand.
    pub(super) async fn carry_out(
        &self,
        place: &Place,
        action: ManualAction,
        by: &By,
        mut watch: Stopwatch,
    ) -> Result<Acted, ActionError> {
        let (id, to) = (&place.instance, action.leads_to());
        self.find(place)?;
        let on_demand = action == ManualAction::Wake;
        // One that is under way is this one's too; the window is opened all the same.
        let joined = match by {
            By::Hand { .. } if on_demand => self.join_wake(id).await,
            _ => None,
        };
        let (lease, kept) =
            if on_demand { self.lease_to_wake(id).await? } else { (self.lease(id, to).await?, false) };
        if kept {
            watch.set_kind(WakeKind::Kept);
        }
        // What was waited for may have changed it, or ended it.
        let record = self.find(place)?;
        if let Some(transfer) = record.transfer.clone() {
            return Err(ActionError::Moving { instance: id.clone(), transfer });
        }
        let phase = record.phase;
        let step = match (step_of(action, phase), by) {
            // One that runs is marked as used.
            (Ok(None), By::Request) => Some(Action::Resume),
            (step, _) => {
                step.map_err(|hint| ActionError::Illegal { instance: id.clone(), phase, action, hint })?
            }
        };
        let spec = self.spec(&place.tenant, &place.pool);
        if step == Some(Action::Start) && spec.is_none() {
            return Err(ActionError::NoSpec { tenant: place.tenant.clone(), pool: place.pool.clone() });
        }
        if phase != to {
            if matches!(step, Some(Action::Wake | Action::Resume)) {
                self.check_image(&record)?;
            }
            if let Some(step @ (Action::Wake | Action::Resume | Action::Start)) = step {
                self.check_secrets(&record, step)?;
            }
            if matches!(to, Phase::Running | Phase::Warm | Phase::Sleeping) {
                self.check_room(id, to)?;
            }
        }
        let before = record.override_until;
        if let By::Hand { override_for, .. } = by {
            self.override_it(record, step, *override_for).await?;
        }
        watch.lap(Stage::Queued);
        let wake = |watch: &Stopwatch| on_demand.then(|| joined.unwrap_or_else(|| watch.read()));
        let Some(step) = step else { return Ok(Acted { phase, wake: wake(&watch) }) };
        let (reason, asked_by) = match by {
            By::Request => ("woken on demand".to_owned(), None),
            By::Hand { by, .. } => (format!("{action} by hand, asked by {by}"), Some(by.clone())),
        };
        let order = Order { action: step, staging: None, reason, spec, on_demand, asked_by, for_move: false };
        match self.executor.execute_timed(&lease, &order, &mut watch).await {
            Ok(phase) => Ok(Acted { phase, wake: wake(&watch) }),
            Err(cause) => {
                // What could not be done by hand is reconcile's to put right again.
                let record = self.records().get(id).filter(|record| record.override_until != before);
                if let Some(mut record) = record {
                    record.override_until = before;
                    if self.records().save(&record).await.is_err() {
                        self.records().set(record);
                    }
                }
                Err(ActionError::Step { action, instance: id.clone(), cause })
            }
        }
    }

    /// Opens the window, durably, by itself or with the first thing that the step writes down.
    async fn override_it(
        &self,
        mut record: Record,
        step: Option<Action>,
        override_for: Duration,
    ) -> Result<(), ActionError> {
        record.override_until = (!override_for.is_zero()).then(|| self.executor.clock.now() + override_for);
        if matches!(step, Some(Action::Start | Action::Stop | Action::Destroy)) {
            // Each begins with an intent, before anything is done.
            self.records().set(record);
            return Ok(());
        }
        self.records().save(&record).await.map_err(ActionError::NotRecorded)
    }
}

impl NodeHandle {
    /// Acts on an instance by hand; answers its phase when it is done.
    pub async fn act(&self, manual: Manual) -> Result<Acted, ActionError> {
        let Manual { tenant, pool, instance, action, override_for, by } = manual;
        let place = Place { tenant, pool, instance };
        let (subject, message) = (place.to_string(), format!("by hand, asked by {by}"));
        let by = By::Hand { by, override_for };
        let id = place.instance.clone();
        let done = self.shared.actor.act(place, action, by).await;
        match &done {
            Ok(_) => self.events().publish(event_of(action), &subject, &message),
            Err(error) => self.events().publish("ManualActionFailed", &subject, chain(error)),
        }
        self.trigger_after(id);
        done
    }

    /// Brings a sleeping or warm instance to running for a request; one that runs is left as it is. Says where the time
    /// went.
    pub async fn wake(
        &self,
        tenant: &TenantId,
        pool: &PoolId,
        instance: &InstanceId,
    ) -> Result<WakeTiming, Arc<ActionError>> {
        let place = Place { tenant: tenant.clone(), pool: pool.clone(), instance: instance.clone() };
        let woken = self.shared.actor.wake(&place).await;
        if !woken.as_ref().is_ok_and(|timing| timing.joined) {
            if woken.is_ok() {
                self.events().publish("InstanceWoken", place.to_string(), "woken on demand");
            }
            self.trigger_after(place.instance);
        }
        woken
    }
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
