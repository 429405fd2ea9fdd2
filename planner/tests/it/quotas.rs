//! Quotas and capacity, each at its limit.

use crate::world::one_pool::{desired, id, now, observed, steps};
use mvm_planner::{Action, plan_node};
use mvm_proto::Phase;
use mvm_proto::document::{PoolRole, Quotas};

/// What the plan says, and the change that makes it say so.
type Case<T> = (&'static str, fn(&mut T));

/// Three are wanted; the limit leaves room for two, and the plan says which limit it was.
#[test]
fn each_limit_stops_the_third_start_and_is_named() {
    let cases: [Case<Quotas>; 5] = [
        ("max_vcpus is 5: 4 in use, 2 more needed", |q| q.max_vcpus = 5),
        ("max_mem_mib is 600: 512 in use, 256 more needed", |q| q.max_mem_mib = 600),
        ("max_running is 2: 2 in use, 1 more needed", |q| q.max_running = 2),
        ("max_disk_gib (in MiB) is 1024: 1024 in use, 512 more needed", |q| q.max_disk_gib = 1),
        ("max_instances_per_pool is 2: 2 in use, 1 more needed", |q| q.max_instances_per_pool = 2),
    ];
    for (reason, lower) in cases {
        let mut desired = desired(3, 0, 0);
        desired.tenants[0].pools[0].instance_resources.data_disk_mib = 512;
        lower(&mut desired.tenants[0].quotas);
        let plan = plan_node(&desired, &observed(&desired, &[]), now());
        assert_eq!(steps(&plan), [(Action::Create, None), (Action::Create, None)], "{reason}");
        assert_eq!(plan.deferred[0].reason, format!("{reason}; running 0 of 3"));
        assert_eq!(plan.deferred[0].count, 1);
    }
}

#[test]
fn max_warm_zero_leaves_the_spare_instance_running_and_says_why() {
    let mut desired = desired(1, 1, 0);
    desired.tenants[0].quotas.max_warm = 0;
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Running, 100); 2]), now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.deferred[0].reason, "max_warm is 0: 0 in use, 1 more needed; warm 0 of 1");
}

#[test]
fn the_nodes_capacity_holds_whatever_the_quotas_allow() {
    let desired = desired(3, 0, 0);
    let cases: [Case<mvm_planner::Capacity>; 3] = [
        ("the node's vcpus is 4: 4 in use, 2 more needed", |c| c.vcpus = 4),
        ("the node's mem_mib is 700: 512 in use, 256 more needed", |c| c.mem_mib = 700),
        ("the node's max_instances is 2: 2 in use, 1 more needed", |c| c.max_instances = 2),
    ];
    for (reason, shrink) in cases {
        let mut seen = observed(&desired, &[]);
        shrink(&mut seen.capacity);
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(
            (plan.steps.len(), plan.deferred[0].reason.clone()),
            (2, format!("{reason}; running 0 of 3"))
        );
    }
}

#[test]
fn a_pool_beyond_max_pools_starts_nothing_and_keeps_what_it_has() {
    let mut desired = desired(2, 0, 0);
    desired.tenants[0].quotas.max_pools = 0;
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Running, 100)]), now());
    assert_eq!(steps(&plan), []);
    assert!(plan.deferred[0].reason.starts_with("max_pools is 0"), "{:?}", plan.deferred);
}

#[test]
fn a_gateway_gets_the_last_room_before_a_worker_that_stands_first_in_the_document() {
    let mut desired = desired(1, 0, 0);
    let mut gateway = desired.tenants[0].pools[0].clone();
    gateway.pool_id = "edge".parse().unwrap();
    gateway.role = PoolRole::Gateway;
    desired.tenants[0].pools.push(gateway);
    desired.tenants[0].quotas.max_running = 1;
    let plan = plan_node(&desired, &observed(&desired, &[]), now());
    assert_eq!((plan.steps.len(), plan.steps[0].pool.as_str()), (1, "edge"));
    assert_eq!(plan.deferred[0].pool.as_str(), "workers");
}

#[test]
fn a_quota_lowered_below_what_runs_stops_nothing_starts_nothing_and_is_reported() {
    let mut desired = desired(4, 0, 0);
    desired.tenants[0].quotas.max_running = 2;
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Running, 100); 3]), now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.deferred[0].reason, "max_running is 2: 3 in use, 1 more needed; running 3 of 4");
    let told: Vec<_> = plan.over_limit.iter().map(ToString::to_string).collect();
    assert_eq!(told, ["max_running is 2: 3 in use"]);
    assert_eq!(plan.over_limit[0].tenant.as_ref().unwrap().as_str(), "acme");
}

#[test]
fn what_a_plan_frees_is_not_spent_by_the_same_plan() {
    let mut desired = desired(0, 0, 0);
    let mut other = desired.tenants[0].pools[0].clone();
    other.pool_id = "other".parse().unwrap();
    other.desired_counts.running = 1;
    desired.tenants[0].pools.push(other);
    desired.tenants[0].quotas.max_running = 1;
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Running, 100)]), now());
    assert_eq!(steps(&plan), [(Action::Stop, id(1))]);
    assert_eq!(plan.deferred[0].reason, "max_running is 1: 1 in use, 1 more needed; running 0 of 1");
}

#[test]
fn unmanaged_instances_use_the_tenants_quota_and_the_node() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_running = 1;
    let mut seen = observed(&desired, &[(Phase::Running, 100)]);
    seen.instances[0].pool = "gone".parse().unwrap();
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((plan.steps.len(), plan.unmanaged.len(), plan.deferred.len()), (0, 1, 1));
}

#[test]
fn what_rests_and_is_wanted_among_those_that_run_is_kept_while_something_bars_it() {
    let resting = [(Phase::Running, 100), (Phase::Sleeping, 100), (Phase::Sleeping, 100), (Phase::Warm, 100)];
    let mut desired = desired(3, 0, 0);
    desired.tenants[0].quotas.max_running = 1;
    let plan = plan_node(&desired, &observed(&desired, &resting), now());
    // Two are lacking: the sleepers are kept for them, and nobody wants the third.
    assert_eq!(steps(&plan), [(Action::Stop, id(4))]);
    assert_eq!((plan.deferred[0].action, plan.deferred[0].count), (Action::Wake, 2));

    let blocked = mvm_planner::Blocked {
        tenant: "acme".parse().unwrap(),
        pool: None,
        reason: "SecretsReady=False".to_owned(),
    };
    desired.tenants[0].quotas.max_running = 64;
    let seen = mvm_planner::Observation { blocked: vec![blocked], ..observed(&desired, &resting[..3]) };
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [], "it passes, and then they are woken");
}

#[test]
fn a_sleeper_that_is_too_large_to_come_back_makes_room_for_one_that_is_not() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_vcpus = 2;
    desired.tenants[0].quotas.max_instances_per_pool = 1;
    let mut seen = observed(&desired, &[(Phase::Sleeping, 100)]);
    seen.instances[0].resources.vcpus = 4;
    seen.instances[0].revision = mvm_proto::Digest::of(b"older");
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(1))]);
}

#[test]
fn surplus_running_sleeps_where_no_more_may_be_warm() {
    let mut desired = desired(0, 1, 1);
    desired.tenants[0].quotas.max_warm = 0;
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Running, 100)]), now());
    assert_eq!(steps(&plan)[0], (Action::Sleep, id(1)));
}
