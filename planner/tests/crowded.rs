//! Laws on one pool with many instances of it: some on their way, some held by hand for days, hardly room for any.

#![allow(clippy::unwrap_used, reason = "a test that can not go on fails there")]

#[path = "laws/fleet.rs"]
mod fleet;

use std::collections::BTreeMap;
use std::time::Duration;

use fleet::{Kinds, NOW_MS, cases, fleet};
use mvm_planner::{Action, NodePlan, Observation, ObservedInstance, plan_node, revision_of};
use mvm_proto::{DesiredState, InstanceId, Phase, Timestamp};
use proptest::collection::vec;
use proptest::prelude::*;

const ANYTHING: Kinds = Kinds { tight: true, guards: true, pressure: true };
const CALM: Kinds = Kinds { tight: true, guards: true, pressure: false };

fn now() -> Timestamp {
    Timestamp::from_unix_ms(NOW_MS)
}

/// The first pool of a fleet with all its instances.
fn one_pool(kinds: Kinds) -> impl Strategy<Value = (DesiredState, Observation)> {
    (fleet(kinds), vec((0..8_u8, 0..8_u8), 16)).prop_filter_map(
        "a pool",
        |((mut desired, mut seen), more)| {
            desired.tenants.truncate(1);
            let tenant = desired.tenants.first_mut()?;
            tenant.pools.truncate(1);
            let (tenant, pool) = (&desired.tenants[0], desired.tenants[0].pools.first()?);
            seen.instances.truncate(7);
            for (instance, (way, held)) in seen.instances.iter_mut().zip(more) {
                if instance.revision != mvm_proto::Digest::of(b"an older revision") {
                    instance.revision = revision_of(tenant, pool);
                    instance.resources = pool.instance_resources;
                }
                (instance.tenant, instance.pool) = (tenant.tenant_id.clone(), pool.pool_id.clone());
                let startable = matches!(instance.phase, Phase::Stopped | Phase::Failed | Phase::Created);
                instance.moving_to = match way {
                    0 if startable => Some(Phase::Running),
                    // Being replaced.
                    1 if instance.phase == Phase::Running && instance.staging.is_none() => {
                        Some(Phase::Running)
                    }
                    2 if instance.phase == Phase::Running => Some(Phase::Stopped),
                    _ => None,
                };
                // Nobody lends out what is only booted to rest.
                instance.staging = instance.staging.filter(|_| !instance.claimed && !instance.on_demand);
                if held == 0 {
                    instance.override_until = Some(now() + Duration::from_secs(3 * 86_400));
                }
            }
            Some((desired, seen))
        },
    )
}

fn serves(instance: &ObservedInstance) -> bool {
    instance.phase == Phase::Running
        && instance.moving_to.is_none()
        && !matches!(instance.staging, Some(Phase::Warm | Phase::Sleeping))
}

fn by_instance(plan: &NodePlan) -> BTreeMap<InstanceId, Action> {
    plan.steps.iter().filter_map(|step| Some((step.instance.clone()?, step.action))).collect()
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn what_serves_is_not_taken_below_the_count_unless_there_is_no_room_beside_it((desired, seen) in one_pool(CALM)) {
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        let wanted = usize::try_from(desired.tenants[0].pools[0].desired_counts.running).unwrap();
        // What a request woke goes when it is idle; the counts do not rely on it.
        let counted = |i: &&ObservedInstance| serves(i) && !(i.on_demand && i.home.is_some_and(|home| home != Phase::Running));
        let before = seen.instances.iter().filter(counted).count();
        let goes = |i: &&ObservedInstance| {
            let step = steps.get(&i.id);
            matches!(step, Some(Action::Stop | Action::Warm | Action::Sleep | Action::Replace))
        };
        let gone = seen.instances.iter().filter(counted).filter(goes).count();
        let in_place = plan.steps.iter().any(|step| step.reason.contains("no room for a stand-in"));
        let allowed = before.saturating_sub(wanted) + usize::from(in_place);
        prop_assert!(gone <= allowed, "{gone} of {before} go, {wanted} wanted: {:#?}", plan.steps);
    }

    #[test]
    fn no_step_is_both_taken_and_deferred((desired, seen) in one_pool(ANYTHING)) {
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        for deferred in &plan.deferred {
            let taken = deferred.instance.as_ref().and_then(|id| steps.get(id));
            prop_assert!(taken != Some(&deferred.action), "{deferred} and {taken:?}");
        }
    }
}
