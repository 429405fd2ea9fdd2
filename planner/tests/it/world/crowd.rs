//! One pool with many instances of it: some on their way, some held by hand for days, some dated ahead of the clock.

use std::time::Duration;

use mvm_planner::{Observation, ObservedInstance, revision_of};
use mvm_proto::{DesiredState, Digest, Phase, Timestamp};
use proptest::collection::vec;
use proptest::prelude::*;

use super::fleet::{Kinds, fleet};
use super::rest::now;

pub(crate) fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// The first pool of a fleet with all its instances.
pub(crate) fn one_pool(kinds: Kinds) -> impl Strategy<Value = (DesiredState, Observation)> {
    (fleet(kinds), vec((0..12_u8, 0..24_u8), 16)).prop_filter_map(
        "a pool",
        move |((mut desired, mut seen), more)| {
            desired.tenants.truncate(1);
            let tenant = desired.tenants.first_mut()?;
            tenant.pools.truncate(1);
            let (tenant, pool) = (&desired.tenants[0], desired.tenants[0].pools.first()?);
            seen.instances.truncate(7);
            for (instance, (way, held)) in seen.instances.iter_mut().zip(more) {
                if instance.revision != Digest::of(b"an older revision") {
                    instance.revision = revision_of(tenant, pool);
                    instance.resources = pool.instance_resources;
                }
                (instance.tenant, instance.pool) = (tenant.tenant_id.clone(), pool.pool_id.clone());
                set_off(instance, way);
                // Nobody lends out what is only booted to rest.
                instance.staging = instance.staging.filter(|_| !instance.claimed && !instance.on_demand);
                if kinds.guards {
                    keep_off(instance, held);
                }
            }
            Some((desired, seen))
        },
    )
}

/// Sends some on their way.
fn set_off(instance: &mut ObservedInstance, way: u8) {
    let startable = matches!(instance.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed);
    instance.moving_to = match (way, instance.phase) {
        (0, _) if startable => Some(Phase::Running),
        (1 | 2, _) if startable => {
            // What stood in is known by it until it is gone.
            instance.staging = (way == 2).then_some(Phase::Running);
            Some(Phase::Destroyed)
        }
        // Being replaced.
        (0, phase) if instance.staging.is_none() => Some(phase),
        (1, Phase::Running | Phase::Warm) => Some(Phase::Stopped),
        (2, Phase::Running | Phase::Warm) if instance.staging.is_none() => Some(Phase::Sleeping),
        (3, Phase::Sleeping | Phase::Warm) => Some(Phase::Running),
        _ => None,
    };
}

/// Holds some for days, or dates them ahead as a clock that was set back does.
fn keep_off(instance: &mut ObservedInstance, held: u8) {
    match held {
        0 => instance.override_until = Some(now() + secs(3 * 86_400)),
        1 => instance.override_until = Some(now() + secs(8 * 86_400)),
        2 => instance.retry_not_before = Some(now() + secs(2 * 3600)),
        3 => instance.since = now() + secs(100),
        4 => instance.since = now() + secs(20),
        5 if instance.workload.is_none() => instance.idle_since = Some(now() - secs(1000)),
        _ => {}
    }
}

pub(crate) fn serves(instance: &ObservedInstance) -> bool {
    instance.phase == Phase::Running
        && instance.moving_to.is_none()
        && !matches!(instance.staging, Some(Phase::Warm | Phase::Sleeping))
}

/// No claim, no request, no hand and no failure keeps the planner from it, nor its minimum runtime.
pub(crate) fn is_free(desired: &DesiredState, i: &ObservedInstance) -> bool {
    let (tenant, pool) = (&desired.tenants[0], &desired.tenants[0].pools[0]);
    let ahead = |at: Option<Timestamp>| at.is_some_and(|at| at > now());
    let least = match i.phase {
        Phase::Running => pool.runtime_policy.min_running_seconds,
        Phase::Warm => pool.runtime_policy.min_warm_seconds,
        _ => 0,
    };
    let young = i.since + secs(least) > now();
    let held = i.claimed || ahead(i.override_until) || ahead(i.retry_not_before);
    !tenant.pinned && !pool.critical && !pool.pinned && !held && !young && i.moving_to.is_none()
}
