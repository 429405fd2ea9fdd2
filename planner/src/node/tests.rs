//! A pool that is left alone because it is at rest would have been left alone by every pass.

// The worlds of the laws, by which the planner is known under its name from outside.
#[allow(dead_code, reason = "the laws use the rest")]
#[path = "../../tests/it/world/fleet.rs"]
mod fleet;

use fleet::{Kinds, NOW_MS, cases, fleet};
use mvm_proto::{DesiredState, Phase, Timestamp};
use proptest::prelude::*;

use super::{Freshness, Members, plan_expired, plan_node, plan_pools};
use crate::observation::Observation;

/// Half of the pools want what they have, or would if all of it were settled.
fn content(mut desired: DesiredState, observed: &Observation) -> DesiredState {
    for tenant in &mut desired.tenants {
        for pool in tenant.pools.iter_mut().step_by(2) {
            let have = |phase| {
                let is_its = |i: &&crate::ObservedInstance| {
                    i.tenant == tenant.tenant_id && i.pool == pool.pool_id && i.phase == phase
                };
                u32::try_from(observed.instances.iter().filter(is_its).count()).unwrap_or(u32::MAX)
            };
            let counts = [Phase::Running, Phase::Warm, Phase::Sleeping].map(have);
            let wanted = &mut pool.desired_counts;
            [wanted.running, wanted.warm, wanted.sleeping] = counts;
        }
    }
    desired
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_plan_is_the_same_when_the_pools_at_rest_are_looked_at_too(
        (desired, observed) in fleet(Kinds { tight: true, guards: true, pressure: true }),
        settled in any::<bool>(),
    ) {
        let mut observed = observed;
        if settled {
            for instance in &mut observed.instances {
                (instance.claimed, instance.on_demand) = (false, false);
                (instance.moving_to, instance.staging) = (None, None);
            }
        }
        let desired = content(desired, &observed);
        let now = Timestamp::from_unix_ms(NOW_MS);
        let all = |freshness| plan_pools(&desired, &observed, now, freshness, |_: &Members<'_>| false);
        prop_assert_eq!(plan_node(&desired, &observed, now), all(Freshness::Current));
        prop_assert_eq!(plan_expired(&desired, &observed, now), all(Freshness::Expired));
    }
}
