//! Memory pressure, one case each: who goes to sleep, who never does, what waits, and what comes back.

use std::time::Duration;

use crate::world::one_pool::{self, desired, id, now, observed, steps};
use mvm_planner::{Action, NodePlan, Observation, check_move, plan_node};
use mvm_proto::document::PoolRole;
use mvm_proto::{DesiredState, Digest, InstanceId, Phase};

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// As [`observed`], under pressure. Each instance ran long enough and has been idle for the seconds given.
fn pressed(desired: &DesiredState, idle: &[(Phase, u64)]) -> Observation {
    let mut seen = observed(desired, &idle.iter().map(|(phase, _)| (*phase, 5000)).collect::<Vec<_>>());
    seen.memory_pressure = true;
    for (instance, (phase, idle)) in seen.instances.iter_mut().zip(idle) {
        let has_memory = matches!(phase, Phase::Running | Phase::Warm);
        instance.idle_since = has_memory.then(|| now() - secs(*idle));
    }
    seen
}

fn deferred(plan: &NodePlan) -> Vec<(Action, u32, &str)> {
    plan.deferred.iter().map(|d| (d.action, d.count, d.reason.as_str())).collect()
}

/// `workers` and two more pools like it, with roles of their own.
fn three_roles(running: u32, warm: u32, sleeping: u32) -> DesiredState {
    let mut desired = desired(running, warm, sleeping);
    for (name, role) in [("edge", PoolRole::Gateway), ("build", PoolRole::Builder)] {
        let mut pool = desired.tenants[0].pools[0].clone();
        pool.pool_id = name.parse().unwrap();
        pool.role = role;
        desired.tenants[0].pools.push(pool);
    }
    desired
}

#[test]
fn the_coldest_of_all_pools_sleep_first_running_and_warm_alike_two_at_a_time() {
    let desired = three_roles(2, 2, 0);
    let kinds = [(Phase::Running, 50), (Phase::Warm, 70), (Phase::Running, 90), (Phase::Running, 60)];
    let mut seen = pressed(&desired, &kinds);
    seen.instances[1].pool = "edge".parse().unwrap();
    seen.instances[2].pool = "build".parse().unwrap();
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(3)), (Action::Sleep, id(2))]);
    let reasons: Vec<_> = plan.steps.iter().map(|step| step.reason.as_str()).collect();
    assert_eq!(reasons, ["memory pressure, idle for 90 s", "memory pressure, idle for 70 s"]);
    assert!(deferred(&plan).contains(&(Action::Sleep, 2, "memory pressure; 2 at a time")), "{plan:?}");
    seen.memory_pressure = false;
    let plan = plan_node(&desired, &seen, now());
    assert!(plan.steps.iter().all(|step| step.action != Action::Sleep), "{:?}", plan.steps);
}

#[test]
fn as_cold_as_each_other_the_last_role_goes_first_then_the_newest() {
    let desired = three_roles(1, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 60); 3]);
    seen.instances[0].pool = "edge".parse().unwrap();
    seen.instances[1].pool = "build".parse().unwrap();
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(3)), (Action::Sleep, id(2))]);
    let desired = one_pool::desired(3, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 60); 3]);
    seen.instances[1].since = now() - secs(100);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(2)), (Action::Sleep, id(1))]);
}

#[test]
fn what_is_on_its_way_down_is_waited_for() {
    let desired = desired(4, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 90); 4]);
    seen.instances[0].moving_to = Some(Phase::Sleeping);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(2))]);
    seen.instances[1].moving_to = Some(Phase::Stopped);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert!(deferred(&plan).contains(&(Action::Sleep, 2, "memory pressure; 2 at a time")), "{plan:?}");
}

#[test]
fn short_of_its_minimum_runtime_an_instance_goes_only_when_nothing_else_can() {
    let desired = desired(1, 2, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 20), (Phase::Warm, 15), (Phase::Warm, 5)]);
    seen.instances[0].since = now() - secs(30);
    seen.instances[1].since = now() - secs(20);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(3))], "the one that is not young, though idle for least");
    let reasons = [
        (Action::Sleep, 1, "min_running_seconds, 30 s left; memory pressure"),
        (Action::Sleep, 1, "min_warm_seconds, 10 s left; memory pressure"),
    ];
    assert_eq!(deferred(&plan), reasons);
    assert_eq!(plan.next_deadline, Some(now() + secs(10)));
    // Not while that one is on its way either.
    seen.instances[2].moving_to = Some(Phase::Sleeping);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    seen.instances[2].moving_to = None;
    seen.instances[2].phase = Phase::Sleeping;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(1)), (Action::Sleep, id(2))]);
    let why =
        "memory pressure, idle for 20 s; nothing else can be put to sleep (min_running_seconds, 30 s left)";
    assert_eq!(plan.steps[0].reason, why);
}

#[test]
fn pinned_and_critical_pools_give_nothing() {
    for (critical, reason) in
        [(false, "the pool is pinned; memory pressure"), (true, "the pool is critical; memory pressure")]
    {
        let mut desired = desired(1, 1, 0);
        desired.tenants[0].pools[0].pinned = !critical;
        desired.tenants[0].pools[0].critical = critical;
        let mut seen = pressed(&desired, &[(Phase::Running, 4000), (Phase::Warm, 4000)]);
        let plan = plan_node(&desired, &seen, now());
        assert_eq!((steps(&plan), deferred(&plan)), (vec![], vec![(Action::Sleep, 2, reason)]));
        seen.instances[0].on_demand = true;
        seen.instances[0].home = Some(Phase::Sleeping);
        assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    }
}

#[test]
fn a_pinned_tenants_instances_sleep_like_others() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].pinned = true;
    let seen = pressed(&desired, &[(Phase::Running, 60)]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(1))]);
}

#[test]
fn claimed_overridden_busy_and_failing_instances_stay_up() {
    let desired = desired(4, 1, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 4000); 4]);
    seen.instances[0].claimed = true;
    seen.instances[1].override_until = Some(now() + secs(600));
    seen.instances[2].idle_since = None;
    seen.instances[3].retry_not_before = Some(now() + secs(9));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.next_deadline), (vec![], Some(now() + secs(9))));
    let said = deferred(&plan);
    assert!(said.contains(&(Action::Sleep, 1, "manual override, 600 s left; memory pressure")), "{said:?}");
    let backoff = "backing off after a failure, 9 s left; memory pressure";
    assert!(said.contains(&(Action::Sleep, 1, backoff)), "{said:?}");
}

#[test]
fn a_paused_instance_is_idle_whatever_is_known_of_it() {
    let desired = desired(0, 1, 0);
    let mut seen = pressed(&desired, &[(Phase::Warm, 0)]);
    seen.instances[0].idle_since = None;
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(1))]);
}

#[test]
fn what_was_put_to_sleep_stays_asleep_until_the_pressure_ends_and_then_comes_back() {
    let desired = desired(2, 1, 1);
    let asleep = [(Phase::Sleeping, 0), (Phase::Sleeping, 0), (Phase::Sleeping, 0), (Phase::Sleeping, 0)];
    let mut seen = pressed(&desired, &asleep);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [], "neither woken nor stopped");
    let reasons =
        [(Action::Wake, 2, "memory pressure; running 0 of 2"), (Action::Create, 1, "memory pressure")];
    assert_eq!(deferred(&plan), reasons);
    seen.memory_pressure = false;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(
        steps(&plan),
        [(Action::Wake, id(1)), (Action::Wake, id(2)), (Action::Wake, id(3))],
        "the third to be warm"
    );
}

#[test]
fn a_warm_instance_that_the_running_count_wants_is_not_stopped_for_the_warm_count() {
    let desired = desired(1, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Warm, 60)]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(1))]);
    seen.instances[0].override_until = Some(now() + secs(60));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
}

#[test]
fn what_no_count_wants_is_stopped_and_not_put_to_sleep_first() {
    let desired = desired(1, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 90), (Phase::Running, 60), (Phase::Sleeping, 0)]);
    seen.instances[1].idle_since = None;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(1)), (Action::Stop, id(3))]);
}

#[test]
fn what_the_counts_put_down_counts_among_the_two() {
    let desired = desired(3, 0, 0);
    let seen = pressed(&desired, &[(Phase::Running, 90); 4]);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(1)), (Action::Sleep, id(2))]);
}

#[test]
fn no_pass_starts_anything_under_pressure() {
    let mut desired = desired(2, 2, 2);
    desired.tenants[0].pools[0].stopped_retention_seconds = 86_400;
    for rests in [Phase::Sleeping, Phase::Stopped, Phase::Failed] {
        let seen = pressed(&desired, &[(rests, 0)]);
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(steps(&plan), [], "{rests}");
        assert!(plan.deferred.iter().all(|d| d.reason.starts_with("memory pressure")), "{plan:?}");
        assert!(!plan.deferred.is_empty());
    }
    let mut seen = pressed(&desired, &[(Phase::Warm, 60)]);
    seen.instances[0].override_until = Some(now() + secs(60));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    let desired = one_pool::desired(1, 0, 1);
    let mut seen = pressed(&desired, &[(Phase::Running, 60), (Phase::Sleeping, 0)]);
    seen.instances[0].idle_since = None;
    seen.instances.iter_mut().for_each(|i| i.revision = Digest::of(b"older"));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(
        deferred(&plan),
        [(Action::Replace, 1, "memory pressure"), (Action::Replace, 1, "memory pressure")]
    );
}

#[test]
fn what_was_booted_already_is_kept_running_where_one_is_lacking() {
    let desired = desired(1, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 0)]);
    seen.instances[0].staging = Some(Phase::Sleeping);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Resume, id(1))]);
}

#[test]
fn a_request_may_wake_an_instance_under_pressure() {
    let desired = desired(1, 0, 0);
    let seen = pressed(&desired, &[(Phase::Sleeping, 0)]);
    assert_eq!(check_move(&desired, &seen, &InstanceId::from_bits(1), Phase::Running), Ok(()));
}

#[test]
fn woken_on_demand_and_idle_an_instance_sleeps_without_being_warmed_before() {
    let desired = desired(0, 0, 1);
    for idle in [1, 300] {
        for home in [Phase::Running, Phase::Warm, Phase::Sleeping] {
            let mut seen = pressed(&desired, &[(Phase::Running, idle)]);
            seen.instances[0].on_demand = true;
            seen.instances[0].home = Some(home);
            let plan = plan_node(&desired, &seen, now());
            assert_eq!(steps(&plan), [(Action::Sleep, id(1))], "idle for {idle} s, at home in {home}");
            seen.instances[0].idle_since = None;
            assert_eq!(steps(&plan_node(&desired, &seen, now())), [], "busy");
        }
    }
}

#[test]
fn without_room_for_a_snapshot_the_next_coldest_sleeps() {
    let desired = desired(2, 0, 0);
    let mut seen = pressed(&desired, &[(Phase::Running, 90), (Phase::Running, 60)]);
    seen.capacity.disk_mib = 300;
    seen.instances[0].resources.mem_mib = 512;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(2))]);
    let reason = "the node's disk_mib is 300: 0 in use, 512 more needed; memory pressure, idle for 90 s";
    assert_eq!(deferred(&plan), [(Action::Sleep, 1, reason)]);
}
