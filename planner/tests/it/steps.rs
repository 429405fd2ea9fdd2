//! The ordered steps, one case each.

use crate::world::fleet::{AMPLE, AMPLE_CAPACITY};
use crate::world::one_pool::{desired, id, now, observed, steps};
use mvm_planner::{Action, Capacity, Observation, check_arrival, check_move, plan_node};
use mvm_proto::{InstanceId, Phase};

#[test]
fn a_running_deficit_is_filled_by_waking_then_resuming_then_starting_then_creating() {
    let desired = desired(4, 0, 0);
    let observed = observed(&desired, &[(Phase::Stopped, 9), (Phase::Warm, 99), (Phase::Sleeping, 9)]);
    let plan = plan_node(&desired, &observed, now());
    let expected =
        [(Action::Wake, id(3)), (Action::Resume, id(2)), (Action::Start, id(1)), (Action::Create, None)];
    assert_eq!(steps(&plan), expected);
}

#[test]
fn the_most_recently_used_sleeper_wakes_first() {
    let desired = desired(1, 0, 2);
    let mut observed =
        observed(&desired, &[(Phase::Sleeping, 99), (Phase::Sleeping, 99), (Phase::Sleeping, 99)]);
    observed.instances[1].last_used_at = Some(now());
    assert_eq!(steps(&plan_node(&desired, &observed, now())), [(Action::Wake, id(2))]);
}

#[test]
fn surplus_running_fills_warm_then_sleeping_and_only_the_rest_is_stopped() {
    let desired = desired(1, 1, 1);
    let observed = observed(&desired, &[(Phase::Running, 100); 4]);
    let plan = plan_node(&desired, &observed, now());
    let actions: Vec<_> = plan.steps.iter().map(|step| step.action).collect();
    assert_eq!(actions, [Action::Warm, Action::Sleep, Action::Stop]);
}

#[test]
fn a_minimum_runtime_defers_the_step_says_how_long_and_sets_the_deadline() {
    let desired = desired(0, 0, 0);
    let observed = observed(&desired, &[(Phase::Running, 19)]);
    let plan = plan_node(&desired, &observed, now());
    assert!(plan.steps.is_empty());
    assert!(plan.deferred[0].reason.starts_with("min_running_seconds, 41 s left"), "{:?}", plan.deferred);
    assert_eq!(plan.next_deadline, Some(now() + std::time::Duration::from_secs(41)));
}

#[test]
fn a_spare_instance_that_is_still_too_young_is_waited_for_instead_of_making_another() {
    let desired = desired(1, 1, 0);
    let observed = observed(&desired, &[(Phase::Running, 10), (Phase::Running, 10)]);
    let plan = plan_node(&desired, &observed, now());
    assert!(plan.steps.is_empty(), "{:?}", plan.steps);
}

#[test]
fn warm_and_sleeping_are_staged_one_at_a_time_from_nothing() {
    let desired = desired(0, 2, 2);
    let plan = plan_node(&desired, &observed(&desired, &[]), now());
    assert_eq!(steps(&plan), [(Action::Create, None)]);
    assert_eq!(plan.steps[0].staging, Some(Phase::Warm));
    assert_eq!((plan.deferred[0].count, plan.deferred[0].reason.as_str()), (3, "one at a time per pool"));
}

#[test]
fn staging_is_not_held_to_max_running_but_to_vcpus() {
    let mut desired = desired(0, 0, 1);
    desired.tenants[0].quotas.max_running = 0;
    desired.tenants[0].quotas.max_warm = 0;
    let nothing = observed(&desired, &[]);
    assert_eq!(steps(&plan_node(&desired, &nothing, now())), [(Action::Create, None)]);
    desired.tenants[0].quotas.max_vcpus = 1;
    let plan = plan_node(&desired, &nothing, now());
    assert!(plan.steps.is_empty());
    assert_eq!(plan.deferred[0].reason, "max_vcpus is 1: 0 in use, 2 more needed");
}

#[test]
fn stopped_instances_are_kept_as_a_reserve_and_destroyed_after_their_retention() {
    let desired = desired(0, 0, 0);
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Stopped, 3599)]), now());
    assert_eq!((plan.steps.len(), plan.next_deadline), (0, Some(now() + std::time::Duration::from_secs(1))));
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Stopped, 3600)]), now());
    assert_eq!(steps(&plan), [(Action::Destroy, id(1))]);
}

#[test]
fn gateways_come_up_before_workers_and_workers_go_down_first() {
    let mut up = desired(1, 0, 0);
    let mut gateway = up.tenants[0].pools[0].clone();
    gateway.pool_id = "edge".parse().unwrap();
    gateway.role = mvm_proto::document::PoolRole::Gateway;
    up.tenants[0].pools.push(gateway);
    let plan = plan_node(&up, &observed(&up, &[]), now());
    let pools: Vec<_> = plan.steps.iter().map(|step| step.pool.as_str()).collect();
    assert_eq!(pools, ["edge", "workers"]);

    let mut down = up.clone();
    down.tenants[0].pools.iter_mut().for_each(|pool| pool.desired_counts.running = 0);
    let mut seen = observed(&down, &[(Phase::Running, 100), (Phase::Running, 100)]);
    seen.instances[0].pool = "edge".parse().unwrap();
    let plan = plan_node(&down, &seen, now());
    let pools: Vec<_> = plan.steps.iter().map(|step| step.pool.as_str()).collect();
    assert_eq!(pools, ["workers", "edge"]);
}

#[test]
fn a_wake_is_held_to_the_same_limits_as_every_start() {
    let mut desired = desired(1, 0, 1);
    let seen = observed(&desired, &[(Phase::Running, 100), (Phase::Sleeping, 100)]);
    let asleep = InstanceId::from_bits(2);
    assert_eq!(check_move(&desired, &seen, &asleep, Phase::Running), Ok(()));
    desired.tenants[0].quotas.max_running = 1;
    assert_eq!(
        check_move(&desired, &seen, &asleep, Phase::Running),
        Err("max_running is 1: 1 in use, 1 more needed".to_owned())
    );
    desired.tenants[0].quotas = AMPLE;
    let small = Observation { capacity: Capacity { vcpus: 3, ..AMPLE_CAPACITY }, ..seen };
    assert_eq!(
        check_move(&desired, &small, &asleep, Phase::Running),
        Err("the node's vcpus is 3: 2 in use, 2 more needed".to_owned())
    );
}

#[test]
fn what_the_host_can_not_start_is_deferred_with_the_hosts_reason() {
    let desired = desired(2, 0, 0);
    let mut seen = observed(&desired, &[]);
    seen.blocked.push(mvm_planner::Blocked {
        tenant: "acme".parse().unwrap(),
        pool: None,
        reason: "the secrets are not there".to_owned(),
    });
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((plan.steps.len(), plan.deferred[0].reason.as_str()), (0, "the secrets are not there"));
}

#[test]
fn a_thousand_pools_at_rest_need_no_step() {
    let one = desired(10, 3, 4);
    let phases: Vec<_> = [(Phase::Running, 10), (Phase::Warm, 3), (Phase::Sleeping, 4)]
        .into_iter()
        .flat_map(|(phase, count)| std::iter::repeat_n((phase, 5000), count))
        .collect();
    let few = observed(&one, &phases);
    let mut many = one.clone();
    many.tenants[0].quotas = AMPLE;
    many.tenants[0].quotas.max_pools = 1000;
    let mut all = Observation { capacity: AMPLE_CAPACITY, ..Observation::default() };
    many.tenants[0].pools.clear();
    for number in 0..1000_u32 {
        let mut pool = one.tenants[0].pools[0].clone();
        pool.pool_id = format!("p{number}").parse().unwrap();
        for (index, instance) in (0_u32..).zip(&few.instances) {
            let mut instance = instance.clone();
            instance.pool = pool.pool_id.clone();
            instance.id = InstanceId::from_bits(number * 100 + index);
            all.instances.push(instance);
        }
        many.tenants[0].pools.push(pool);
    }
    let plan = plan_node(&many, &all, now());
    assert_eq!((all.instances.len(), plan.steps.len(), plan.deferred.len()), (17_000, 0, 0));
}

#[test]
fn one_that_comes_from_elsewhere_is_held_to_every_limit_of_a_new_one() {
    let desired = desired(0, 0, 0);
    let seen = observed(&desired, &[(Phase::Sleeping, 9), (Phase::Sleeping, 9)]);
    let mut newcomer = seen.instances[0].clone();
    newcomer.id = InstanceId::from_bits(0x77);
    let arrives = |desired: &_, seen: &_| check_arrival(desired, seen, &newcomer, Phase::Sleeping);
    assert_eq!(arrives(&desired, &seen), Ok(()));
    let with = |change: fn(&mut mvm_proto::document::Quotas)| {
        let mut tight = desired.clone();
        change(&mut tight.tenants[0].quotas);
        arrives(&tight, &seen).unwrap_err()
    };
    assert!(with(|quotas| quotas.max_instances_per_pool = 2).starts_with("max_instances_per_pool is 2"));
    assert!(with(|quotas| quotas.max_disk_gib = 0).starts_with("max_disk_gib"));
    let small = Observation { capacity: Capacity { max_instances: 2, ..AMPLE_CAPACITY }, ..seen.clone() };
    assert!(arrives(&desired, &small).unwrap_err().starts_with("the node's max_instances is 2"));
    let mut unnamed = desired.clone();
    unnamed.tenants[0].pools.clear();
    assert!(arrives(&unnamed, &seen).unwrap_err().starts_with("the document does not name"));
}
