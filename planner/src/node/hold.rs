//! Holds: the reasons for which the planner leaves an instance alone.

use mvm_proto::document::{Pool, Tenant};
use mvm_proto::{Phase, Timestamp};

use super::clock::Clock;
use crate::observation::ObservedInstance;
use crate::plan::Action;

use std::time::Duration;

/// The longest backoff: a time further ahead was written before the clock was set back.
const MAX_BACKOFF: Duration = Duration::from_secs(3600);

/// The longest window that anyone may ask for. One that ends later was opened before the clock was set back.
pub const MAX_OVERRIDE: Duration = Duration::from_secs(7 * 86_400);

/// Why a step is not taken, and until when if time alone lifts it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Hold {
    Critical,
    Claimed,
    Moving,
    OnDemand,
    PinnedTenant,
    PinnedPool,
    Override(Timestamp),
    Backoff(Timestamp),
    MinRunning(Timestamp),
    MinWarm(Timestamp),
}

impl Hold {
    fn until(self) -> Option<Timestamp> {
        match self {
            Hold::Critical
            | Hold::Claimed
            | Hold::Moving
            | Hold::OnDemand
            | Hold::PinnedTenant
            | Hold::PinnedPool => None,
            Hold::Override(until) | Hold::Backoff(until) | Hold::MinRunning(until) | Hold::MinWarm(until) => {
                Some(until)
            }
        }
    }

    /// The instance is free to go, only not yet.
    pub(crate) fn is_short(self) -> bool {
        matches!(self, Hold::MinRunning(_) | Hold::MinWarm(_) | Hold::Override(_))
    }

    pub(crate) fn describe(self, clock: &Clock) -> String {
        let word = match self {
            Hold::Critical => "the pool is critical",
            Hold::Claimed => "it is claimed",
            Hold::Moving => "it is being moved to or from another node",
            Hold::OnDemand => "woken on demand and not put back yet",
            Hold::PinnedTenant => "the tenant is pinned",
            Hold::PinnedPool => "the pool is pinned",
            Hold::Override(_) => "manual override",
            Hold::Backoff(_) => "backing off after a failure",
            Hold::MinRunning(_) => "min_running_seconds",
            Hold::MinWarm(_) => "min_warm_seconds",
        };
        match self.until() {
            Some(until) => format!("{word}, {} s left", clock.left(until).as_millis().div_ceil(1000)),
            None => word.to_owned(),
        }
    }
}

/// What keeps anyone but its owner from this instance, whatever the step.
pub(crate) fn hands_off(instance: &ObservedInstance, clock: &Clock) -> Option<Hold> {
    if instance.claimed {
        return Some(Hold::Claimed);
    }
    if instance.moving {
        return Some(Hold::Moving);
    }
    match (instance.override_until, instance.retry_not_before) {
        (Some(until), _) if clock.is_held_until(until, MAX_OVERRIDE) => Some(Hold::Override(until)),
        (_, Some(until)) if clock.is_held_until(until, MAX_BACKOFF) => Some(Hold::Backoff(until)),
        _ => None,
    }
}

/// What keeps this step from this instance of a managed pool.
pub(crate) fn hold(
    tenant: &Tenant,
    pool: &Pool,
    instance: &ObservedInstance,
    action: Action,
    clock: &Clock,
) -> Option<Hold> {
    // Before the pool's own reasons: what moves is no surplus, whatever pool it is of.
    if instance.moving {
        return Some(Hold::Moving);
    }
    if pool.critical && !is_unfinished(instance, action) {
        return Some(Hold::Critical);
    }
    if let Some(hold) = hands_off(instance, clock) {
        return Some(hold);
    }
    match action {
        Action::Stop | Action::Destroy | Action::Replace if tenant.pinned => Some(Hold::PinnedTenant),
        Action::Sleep if pool.pinned => Some(Hold::PinnedPool),
        Action::Warm | Action::Sleep | Action::Stop | Action::Replace => too_young(pool, instance, clock),
        _ => None,
    }
}

/// What reconcile itself began, it may finish even in a critical pool, and what does not run it may start where one is
/// lacking: nothing works in such an instance, and leaving it would make a new one at every failure.
fn is_unfinished(instance: &ObservedInstance, action: Action) -> bool {
    instance.staging.is_some() || action == Action::Start
}

/// No minimum applies to what was booted only to be put to rest.
fn too_young(pool: &Pool, instance: &ObservedInstance, clock: &Clock) -> Option<Hold> {
    if instance.staging.is_some() {
        return None;
    }
    let policy = &pool.runtime_policy;
    let (seconds, hold): (u64, fn(Timestamp) -> Hold) = match instance.phase {
        Phase::Running => (policy.min_running_seconds, Hold::MinRunning),
        Phase::Warm => (policy.min_warm_seconds, Hold::MinWarm),
        _ => return None,
    };
    let least = Duration::from_secs(seconds);
    let until = instance.since + least;
    // A clock that was set back may put `since` far ahead; the hold then lasts twice the minimum at most.
    clock.is_held_until(until, 2 * least).then(|| hold(until))
}
