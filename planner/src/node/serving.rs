//! Whether an instance serves, has yet to prove that it does, or fails again and again: what a rollout goes by.

use std::time::Duration;

use mvm_proto::document::{Pool, Tenant, UpdateSleeping};
use mvm_proto::{Digest, Phase, Timestamp, WorkloadState};

use super::clock::Clock;
use crate::observation::ObservedInstance;

/// So many steps on an instance that failed in a row are more than bad luck.
const FAILURES: u32 = 3;

/// How far a pool is with the revision of its document on one node.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct RolloutProgress {
    /// Running instances that do the work that they are for. One of the revision does so once it has for as long as the
    /// document asks for.
    pub serving: u32,
    /// Of an older revision, for a rollout to replace.
    pub outdated: u32,
    /// Running, or on their way, beyond the running count.
    pub surge: u32,
    /// Why instances of the revision fail again and again.
    pub failing: Option<String>,
}

/// How far a pool is, from all instances of it.
#[must_use]
pub fn rollout_progress<'a>(
    tenant: &Tenant,
    pool: &Pool,
    revision: &Digest,
    instances: impl IntoIterator<Item = &'a ObservedInstance>,
    now: Timestamp,
) -> RolloutProgress {
    let (mut progress, mut up) = (RolloutProgress::default(), 0u32);
    let clock = Clock::new(now);
    for one in instances {
        let is_current = one.revision == *revision;
        if progress.failing.is_none() {
            progress.failing = failing(pool, one, is_current, now);
        }
        progress.outdated += u32::from(!is_current && is_replaced_by_rollout(tenant, pool, one));
        if is_lent_elsewhere(one) {
            continue;
        }
        let is_unproven = is_current && is_unproven(pool, one, &clock);
        progress.serving += u32::from(works(pool, one) && !is_unproven);
        up += u32::from(is_up_or_coming(one));
    }
    progress.surge = up.saturating_sub(pool.desired_counts.running);
    progress
}

/// Whether a rollout has to replace an instance of an older revision.
fn is_replaced_by_rollout(tenant: &Tenant, pool: &Pool, instance: &ObservedInstance) -> bool {
    let renews_sleepers = pool.update.is_none_or(|update| update.sleeping == UpdateSleeping::Background);
    let is_replaced = match instance.phase {
        Phase::Running | Phase::Warm => true,
        Phase::Sleeping => renews_sleepers,
        _ => false,
    };
    is_replaced && !instance.claimed && !pool.critical && !tenant.pinned
}

/// Why an instance of the pool's revision fails again and again, if it does.
fn failing(pool: &Pool, instance: &ObservedInstance, is_current: bool, now: Timestamp) -> Option<String> {
    let id = &instance.id;
    if instance.is_startable() && instance.failures >= FAILURES {
        return Some(format!("{id} could not be started {} times in a row", instance.failures));
    }
    let workload = instance.workload.as_deref().filter(|_| is_current && instance.phase == Phase::Running)?;
    if !workload.is_down() {
        return None;
    }
    let is_given_up = !workload.state.is_restarted(pool.restart);
    match workload.state {
        WorkloadState::Unhealthy if is_given_up || workload.restarts > 0 => {
            Some(format!("the program of {id} is unhealthy"))
        }
        WorkloadState::Failed if is_given_up => Some(format!("the program of {id} failed")),
        _ if workload.is_in_a_crash_loop(now) => {
            Some(format!("the program of {id} was started again {} times in a row", workload.restarts))
        }
        _ => None,
    }
}

fn works(pool: &Pool, instance: &ObservedInstance) -> bool {
    // One whose program is done for good, as it should be, has nothing more to do.
    let is_down = instance.workload.as_deref().is_some_and(|workload| {
        workload.is_down()
            && (workload.state.is_restarted(pool.restart) || workload.state != WorkloadState::Completed)
    });
    instance.phase == Phase::Running && instance.moving_to.is_none() && !is_for_rest(instance) && !is_down
}

/// What is lent has its place in another count, or in none.
fn is_lent_elsewhere(instance: &ObservedInstance) -> bool {
    instance.claimed || (instance.on_demand && instance.home.is_some_and(|home| home != Phase::Running))
}

/// Whether it counts among those that run, on its way there or on its way down.
pub(crate) fn is_up_or_coming(instance: &ObservedInstance) -> bool {
    let is_coming = instance.moving_to == Some(Phase::Running);
    (instance.phase == Phase::Running || is_coming) && !is_for_rest(instance) && !is_lent_elsewhere(instance)
}

fn is_for_rest(instance: &ObservedInstance) -> bool {
    matches!(instance.staging, Some(Phase::Warm | Phase::Sleeping))
}

/// Whether it works, and not for as long yet as the document asks for. Notes when it will have.
pub(crate) fn is_unproven(pool: &Pool, instance: &ObservedInstance, clock: &Clock) -> bool {
    let Some(update) = pool.update.filter(|update| update.min_ready_seconds > 0) else { return false };
    if !works(pool, instance) {
        return false;
    }
    let least = Duration::from_secs(update.min_ready_seconds);
    let since = instance.workload.as_ref().map_or(instance.since, |it| it.since.max(instance.since));
    // A clock that was set back may put `since` far ahead; then it takes twice as long at most.
    clock.is_held_until(since + least, 2 * least)
}
