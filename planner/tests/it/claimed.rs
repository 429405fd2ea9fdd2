//! Laws of claimed instances: they are in no count, nothing is done to them, and their pools are filled up without them.

use mvm_planner::{ObservedInstance, plan_node};
use mvm_proto::{Digest, Phase, Timestamp, WorkloadState};
use proptest::prelude::*;
use proptest::sample::select;

use crate::world::fleet::{Kinds, cases, fleet};
use crate::world::model::World;
use crate::world::rest::{now, run_to_rest};
use mvm_planner::workload::Workload;

const FREE: Kinds = Kinds { tight: false, guards: false, pressure: false };
const ANYTHING: Kinds = Kinds { tight: true, guards: true, pressure: true };

fn may_be_claimed(instance: &ObservedInstance) -> bool {
    let has_a_count = matches!(instance.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
    has_a_count && instance.staging.is_none() && instance.moving_to.is_none() && !instance.on_demand
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn with_room_for_all_every_count_is_reached_without_what_is_claimed(
        (desired, mut observed) in fleet(FREE), picks in proptest::collection::vec(any::<bool>(), 40)
    ) {
        let free = observed.instances.iter_mut().filter(|instance| may_be_claimed(instance));
        free.zip(picks).for_each(|(instance, pick)| instance.claimed = pick);
        let claimed = |world: &World| {
            let claimed = world.observed.instances.iter().filter(|instance| instance.claimed);
            claimed.map(|instance| (instance.id.clone(), instance.phase, instance.revision)).collect::<Vec<_>>()
        };
        let mut world = World::new(observed, now());
        let before = claimed(&world);
        let rest = run_to_rest(&desired, &mut world, |_, _, _| {});
        prop_assert!(rest.deferred.iter().all(|it| it.reason.starts_with("it is claimed")), "{:?}", rest.deferred);
        for (tenant, pool) in desired.pools() {
            let wanted = &pool.desired_counts;
            prop_assert_eq!(
                world.counts(&tenant.tenant_id, &pool.pool_id),
                (wanted.running, wanted.warm, wanted.sleeping),
                "{}/{}", tenant.tenant_id, pool.pool_id
            );
        }
        prop_assert_eq!(claimed(&world), before, "nothing was done to them");
    }

    #[test]
    fn what_a_claimed_instance_is_of_or_does_changes_no_plan(
        (desired, observed) in fleet(ANYTHING),
        pick in any::<prop::sample::Index>(),
        (age, state) in (0..9000_i64, select(&WorkloadState::ALL)),
        home in select(&[Phase::Running, Phase::Warm, Phase::Sleeping]),
    ) {
        prop_assume!(!observed.instances.is_empty());
        let mut observed = observed;
        let at = pick.index(observed.instances.len());
        observed.instances[at].claimed = true;
        let plan = plan_node(&desired, &observed, now());
        let instance = &mut observed.instances[at];
        let since = Timestamp::from_unix_ms(now().unix_ms() - age * 1000);
        instance.since = since;
        (instance.idle_since, instance.last_used_at) = (Some(since), Some(since));
        (instance.home, instance.revision) = (Some(home), Digest::of(b"another"));
        instance.workload = Some(Box::new(Workload { state, since, restarts: 2 }));
        let other = plan_node(&desired, &observed, now());
        prop_assert_eq!(&plan.steps, &other.steps);
        // What is to be pruned says why it stays.
        let of_counts = |plan: &mvm_planner::NodePlan| {
            plan.deferred.iter().filter(|it| !it.reason.starts_with("it is claimed")).cloned().collect::<Vec<_>>()
        };
        prop_assert_eq!(of_counts(&plan), of_counts(&other));
        prop_assert_eq!(plan.next_deadline, other.next_deadline);
    }
}
