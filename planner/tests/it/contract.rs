//! Cases that the contract decides and that random fleets seldom meet: one each, by what must not happen.

use std::time::Duration;

use crate::world::model::World;
use crate::world::one_pool::{desired, id, observed, steps, workers};
use crate::world::rest::{now, run_to_rest};
use mvm_planner::{Action, Blocked, NodePlan, Observation, plan_node};
use mvm_proto::document::Resources;
use mvm_proto::{DesiredState, Digest, InstanceId, Phase};

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

fn outdate(seen: &mut Observation, indexes: &[usize]) {
    for index in indexes {
        seen.instances[*index].revision = Digest::of(b"older");
    }
}

fn up(world: &World) -> usize {
    world.observed.instances.iter().filter(|i| i.phase == Phase::Running && i.moving_to.is_none()).count()
}

fn current(desired: &DesiredState, world: &World) -> usize {
    let (tenant, pool) = workers(desired);
    let revision = mvm_planner::revision_of(tenant, pool);
    world.observed.instances.iter().filter(|i| i.phase == Phase::Running && i.revision == revision).count()
}

#[test]
fn the_one_that_serves_is_not_stopped_for_one_that_is_on_its_way_up() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Stopped, 9), (Phase::Running, 5000)]);
    seen.instances[0].moving_to = Some(Phase::Running);
    seen.instances[0].override_until = Some(now() + secs(600));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    // Up, one of them goes.
    seen.instances[0] = observed(&desired, &[(Phase::Running, 1)]).instances[0].clone();
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(2))]);
}

#[test]
fn a_scale_down_during_a_replacement_leaves_the_one_that_serves() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Running, 5000)]);
    seen.instances[0].moving_to = Some(Phase::Running);
    outdate(&mut seen, &[0]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
}

#[test]
fn a_spare_instance_stands_in_for_the_rollout_before_it_goes() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_vcpus = 4;
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Running, 5000)]);
    outdate(&mut seen, &[0, 1]);
    let mut world = World::new(seen, now());
    run_to_rest(&desired, &mut world, |_, after, _| assert!(up(after) >= 1, "nothing serves"));
    assert_eq!((up(&world), current(&desired, &world)), (1, 1));
}

#[test]
fn a_spare_instance_that_leaves_no_room_for_the_rollout_goes_first() {
    // Two of 2 vcpus in 4, and the new size is 3: one has to go, whatever stands in.
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_vcpus = 4;
    desired.tenants[0].pools[0].instance_resources.vcpus = 3;
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Running, 5000)]);
    outdate(&mut seen, &[0, 1]);
    for instance in &mut seen.instances {
        instance.resources.vcpus = 2;
    }
    let mut world = World::new(seen, now());
    run_to_rest(&desired, &mut world, |_, _, _| ());
    assert_eq!((up(&world), current(&desired, &world)), (1, 1));
}

#[test]
fn one_that_has_no_room_to_be_replaced_does_not_keep_the_next_from_making_it() {
    let mut desired = desired(2, 0, 0);
    desired.tenants[0].quotas.max_vcpus = 4;
    let mut seen = observed(&desired, &[(Phase::Running, 6000), (Phase::Running, 5000)]);
    outdate(&mut seen, &[0, 1]);
    let size = |vcpus| Resources { vcpus, mem_mib: 256, data_disk_mib: 0 };
    (seen.instances[0].resources, seen.instances[1].resources) = (size(1), size(3));
    seen.instances[0].idle_since = Some(now() - secs(500));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Replace, id(2))]);
    let reason = &plan.deferred.iter().find(|d| d.instance.is_some()).unwrap().reason;
    assert!(reason.contains("max_vcpus is 4"), "the true obstacle is told: {reason}");
    let mut world = World::new(seen, now());
    run_to_rest(&desired, &mut world, |_, _, _| ());
    assert_eq!(current(&desired, &world), 2);
}

#[test]
fn no_place_is_kept_for_an_instance_held_for_days() {
    let desired = desired(0, 1, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Running, 5000)]);
    seen.instances[0].override_until = Some(now() + secs(3 * 86_400));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Warm, id(2))]);
}

#[test]
fn what_may_not_be_warm_sleeps_when_it_was_idle_for_long_enough() {
    let mut desired = desired(0, 2, 0);
    desired.tenants[0].quotas.max_warm = 1;
    let mut seen = observed(&desired, &[(Phase::Warm, 5000), (Phase::Running, 90_000)]);
    let woken = &mut seen.instances[1];
    (woken.on_demand, woken.home) = (true, Some(Phase::Warm));
    woken.idle_since = Some(now() - secs(400));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.next_deadline, Some(now() + secs(500)), "T2 is looked at in time");
    seen.instances[1].idle_since = Some(now() - secs(86_400));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(2))]);
}

#[test]
fn a_surge_instance_stays_for_one_that_is_short_of_its_minimum() {
    let desired = desired(2, 0, 0);
    let mut seen =
        observed(&desired, &[(Phase::Running, 5000), (Phase::Running, 57), (Phase::Running, 5000)]);
    outdate(&mut seen, &[1]);
    seen.instances[2].staging = Some(Phase::Running);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    assert_eq!(steps(&plan_node(&desired, &seen, now() + secs(3))), [(Action::Replace, id(2))]);
}

#[test]
fn pressure_does_not_wait_for_what_frees_no_memory() {
    let desired = desired(1, 0, 0);
    let phases = [(Phase::Running, 5000), (Phase::Sleeping, 5000), (Phase::Sleeping, 5000)];
    let mut seen = observed(&desired, &phases);
    seen.memory_pressure = true;
    seen.instances[0].idle_since = Some(now() - secs(100));
    let plan = plan_node(&desired, &seen, now());
    assert!(steps(&plan).contains(&(Action::Sleep, id(1))), "{:?}", plan.steps);
}

#[test]
fn pressure_leaves_a_young_one_where_a_prune_frees_memory() {
    let mut desired = desired(1, 0, 0);
    desired.prune_unknown_pools = true;
    let mut seen = observed(&desired, &[(Phase::Running, 5), (Phase::Running, 5000)]);
    seen.memory_pressure = true;
    seen.instances[0].idle_since = Some(now() - secs(4));
    seen.instances[1].pool = "gone".parse().unwrap();
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(2))]);
}

#[test]
fn a_stopped_reserve_stands_in_before_a_new_one_is_made() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Stopped, 60)]);
    outdate(&mut seen, &[0]);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Start, id(2))]);
    assert_eq!(plan.steps[0].staging, Some(Phase::Running));
}

#[test]
fn among_equals_under_pressure_the_newest_goes_wherever_its_pool_is_written() {
    for swapped in [false, true] {
        let mut desired = desired(2, 0, 0);
        let mut other = desired.tenants[0].pools[0].clone();
        other.pool_id = "others".parse().unwrap();
        desired.tenants[0].pools.push(other);
        if swapped {
            desired.tenants[0].pools.reverse();
        }
        let mut seen = observed(&desired, &[(Phase::Running, 5000); 3]);
        seen.memory_pressure = true;
        for (instance, (pool, age)) in
            seen.instances.iter_mut().zip([("workers", 4000), ("others", 3000), ("workers", 5000)])
        {
            instance.pool = pool.parse().unwrap();
            instance.since = now() - secs(age);
            instance.idle_since = Some(now() - secs(100));
            instance.revision = mvm_planner::revision_of(&desired.tenants[0], &desired.tenants[0].pools[0]);
        }
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(steps(&plan), [(Action::Sleep, id(2)), (Action::Sleep, id(1))], "swapped: {swapped}");
    }
}

#[test]
fn a_step_that_is_taken_is_not_deferred_as_well() {
    let desired = desired(0, 0, 1);
    let mut seen = observed(&desired, &[(Phase::Running, 5)]);
    seen.memory_pressure = true;
    let woken = &mut seen.instances[0];
    (woken.on_demand, woken.home) = (true, Some(Phase::Sleeping));
    woken.idle_since = Some(now() - secs(86_400));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(1))]);
    let again = plan.deferred.iter().filter(|d| d.instance == Some(InstanceId::from_bits(1)));
    assert_eq!(again.count(), 0, "{:?}", plan.deferred);
}

fn reasons(plan: &NodePlan) -> Vec<(Action, u32, &str)> {
    plan.deferred.iter().map(|d| (d.action, d.count, d.reason.as_str())).collect()
}

#[test]
fn a_pinned_pools_sleeping_count_is_not_filled() {
    let mut desired = desired(1, 0, 2);
    desired.tenants[0].pools[0].pinned = true;
    let plan = plan_node(&desired, &observed(&desired, &[(Phase::Running, 5000)]), now());
    assert_eq!((steps(&plan), reasons(&plan)), (vec![], vec![(Action::Sleep, 2, "the pool is pinned")]));
    // What sleeps already keeps its place, and wakes for the running count.
    let seen = observed(&desired, &[(Phase::Sleeping, 5000)]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Wake, id(1))]);
}

#[test]
fn a_critical_pools_counts_are_filled_by_new_instances_only() {
    let mut desired = desired(1, 1, 0);
    desired.tenants[0].pools[0].critical = true;
    let seen = observed(&desired, &[(Phase::Warm, 5000), (Phase::Sleeping, 5000)]);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Create, None)]);
    assert_eq!(plan.steps[0].staging, None);
    // What it boots toward rest goes there.
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Running, 5)]);
    seen.instances[1].staging = Some(Phase::Warm);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Warm, id(2))]);
}

#[test]
fn a_woken_one_that_no_count_wants_and_that_has_no_room_to_sleep_is_stopped() {
    let mut desired = desired(0, 0, 0);
    desired.tenants[0].quotas.max_disk_gib = 0;
    let mut seen = observed(&desired, &[(Phase::Running, 5000)]);
    let woken = &mut seen.instances[0];
    (woken.on_demand, woken.home) = (true, Some(Phase::Sleeping));
    woken.idle_since = Some(now() - secs(2000));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(1))]);
    assert!(plan.steps[0].reason.contains("max_disk_gib (in MiB) is 0"), "{}", plan.steps[0].reason);
    // Wanted asleep, it stays up until there is room.
    desired.tenants[0].pools[0].desired_counts.sleeping = 1;
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
}

#[test]
fn a_reserve_past_its_retention_is_used_before_it_is_destroyed_and_kept_while_a_count_lacks_one() {
    let wants_one = desired(1, 0, 0);
    let mut seen = observed(&wants_one, &[(Phase::Stopped, 90_000), (Phase::Stopped, 80_000)]);
    let plan = plan_node(&wants_one, &seen, now());
    assert_eq!(steps(&plan), [(Action::Start, id(2)), (Action::Destroy, id(1))]);
    let (tenant, pool) = ("acme".parse().unwrap(), Some("workers".parse().unwrap()));
    seen.blocked = vec![Blocked { tenant, pool, reason: "no image".to_owned() }];
    assert_eq!(steps(&plan_node(&wants_one, &seen, now())), [(Action::Destroy, id(1))]);
}

#[test]
fn a_replacement_with_a_smaller_data_disk_needs_no_room_of_its_own() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_disk_gib = 1;
    desired.tenants[0].quotas.max_running = 1;
    desired.tenants[0].pools[0].instance_resources.data_disk_mib = 256;
    let mut seen = observed(&desired, &[(Phase::Running, 5000)]);
    seen.instances[0].resources.data_disk_mib = 1024;
    outdate(&mut seen, &[0]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Replace, id(1))]);
    // While it is replaced it has the disk that it had.
    seen.instances[0].moving_to = Some(Phase::Running);
    desired.tenants[0].pools[0].desired_counts.sleeping = 1;
    desired.tenants[0].pools[0].pool_id = "others".parse().unwrap();
    let plan = plan_node(&desired, &seen, now());
    assert!(plan.deferred.iter().any(|d| d.reason.contains("max_disk_gib")), "{:?}", plan.deferred);
}

#[test]
fn pools_that_the_document_does_not_name_do_not_count_against_max_pools() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_pools = 1;
    let mut seen = observed(&desired, &[(Phase::Running, 5000)]);
    seen.instances[0].pool = "older".parse().unwrap();
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.unmanaged.len()), (vec![(Action::Create, None)], 1));
}

#[test]
fn a_full_subnet_starts_what_has_an_address_and_makes_nothing() {
    // A /29 has addresses for five.
    let mut desired = desired(4, 0, 0);
    desired.tenants[0].network.ipv4_subnet = "10.240.3.0/29".to_owned().try_into().unwrap();
    let mut seen = observed(&desired, &[(Phase::Stopped, 5); 5]);
    for instance in &mut seen.instances[..3] {
        instance.pool = "older".parse().unwrap();
    }
    let capacity = desired.tenants[0].network.ipv4_subnet.instance_capacity();
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Start, id(4)), (Action::Start, id(5))]);
    let full = format!("the subnet's addresses is {capacity}: 5 in use, 1 more needed; running 0 of 4");
    assert_eq!(reasons(&plan), [(Action::Create, 2, full.as_str())]);
}

#[test]
fn a_node_whose_blocks_are_full_makes_nothing_and_counts_no_address_that_is_not_in_them() {
    // Of the block's addresses two are left; one more instance came from another node with its own.
    let mut desired = desired(5, 0, 0);
    desired.tenants[0].network.address_blocks = Some(vec![2]);
    desired.tenants[0].network.reserved_offsets = (34..48).collect();
    let mut seen = observed(&desired, &[(Phase::Running, 100); 2]);
    seen.instances[0].offset = Some(200);
    seen.instances[1].offset = Some(33);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Create, None)]);
    let full = "this node's addresses is 2: 2 in use, 1 more needed; running 2 of 5";
    assert_eq!(reasons(&plan), [(Action::Create, 2, full)]);
    // What has an address elsewhere is started all the same; where it is not known it counts.
    for instance in &mut seen.instances {
        (instance.phase, instance.since) = (Phase::Stopped, now());
    }
    desired.tenants[0].network.address_blocks = Some(Vec::new());
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Start, id(1)), (Action::Start, id(2))]);
    // One that arrives is held to what this node may give only where it has one of these.
    let newcomer = |offset| {
        let mut one = seen.instances[0].clone();
        (one.id, one.offset) = (mvm_proto::InstanceId::from_bits(99), offset);
        mvm_planner::check_arrival(&desired, &seen, &one, Phase::Sleeping)
    };
    assert_eq!(newcomer(Some(201)), Ok(()));
    let told = newcomer(None).unwrap_err();
    assert_eq!(told, "this node's addresses is 0: 0 in use, 1 more needed");
}

#[test]
fn idle_for_exactly_t1_is_idle_long_enough() {
    let desired = desired(0, 0, 1);
    let mut seen = observed(&desired, &[(Phase::Running, 5000)]);
    let woken = &mut seen.instances[0];
    (woken.on_demand, woken.home) = (true, Some(Phase::Sleeping));
    woken.idle_since = Some(now() - secs(300));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Warm, id(1))]);
    assert_eq!(plan_node(&desired, &seen, now() - secs(1)).next_deadline, Some(now()));
}

#[test]
fn every_reason_why_a_pool_may_not_start_is_told() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_pools = 0;
    let mut seen = observed(&desired, &[]);
    let blocked = |pool: Option<&str>, reason: &str| Blocked {
        tenant: "acme".parse().unwrap(),
        pool: pool.map(|pool| pool.parse().unwrap()),
        reason: reason.to_owned(),
    };
    seen.blocked = vec![
        blocked(Some("workers"), "no image"),
        blocked(Some("others"), "no key"),
        blocked(None, "no secrets"),
    ];
    let told = "max_pools is 0, this is the tenant's pool number 1; no image; no secrets";
    assert_eq!(reasons(&plan_node(&desired, &seen, now())), [(Action::Create, 1, told)]);
}

#[test]
fn a_larger_sleeper_that_can_not_wake_keeps_no_warm_place_empty() {
    let mut desired = desired(0, 1, 0);
    desired.tenants[0].quotas.max_vcpus = 2;
    let mut seen = observed(&desired, &[(Phase::Sleeping, 5000)]);
    seen.instances[0].resources.vcpus = 4;
    outdate(&mut seen, &[0]);
    let mut world = World::new(seen, now());
    run_to_rest(&desired, &mut world, |_, _, _| ());
    assert!(world.observed.instances.iter().any(|i| i.phase == Phase::Warm));
}

#[test]
fn what_was_booted_to_rest_and_has_no_room_there_is_stopped_with_that_reason() {
    let mut desired = desired(0, 1, 0);
    desired.tenants[0].quotas.max_warm = 0;
    let mut seen = observed(&desired, &[(Phase::Running, 5)]);
    seen.instances[0].staging = Some(Phase::Warm);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(1))]);
    assert!(plan.steps[0].reason.contains("max_warm is 0"), "{}", plan.steps[0].reason);
}

#[test]
fn a_stopped_stand_in_that_is_being_destroyed_leaves_its_place_among_those_that_run() {
    let mut desired = desired(2, 0, 0);
    desired.tenants[0].quotas.max_running = 2;
    let mut seen = observed(&desired, &[(Phase::Running, 5000), (Phase::Stopped, 5)]);
    (seen.instances[1].staging, seen.instances[1].moving_to) = (Some(Phase::Running), Some(Phase::Destroyed));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Create, None)]);
    // One whose VMM still runs has its place until it is seen to be gone.
    seen.instances[1].phase = Phase::Running;
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
}
