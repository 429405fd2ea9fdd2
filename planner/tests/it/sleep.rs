//! The sleep policy, one case each: when what a request woke goes back, where to, and what keeps it.

use std::time::Duration;

use crate::world::one_pool::{desired, id, now, observed, steps};
use mvm_planner::{Action, NodePlan, Observation, ObservedInstance, plan_node};
use mvm_proto::{DesiredState, Phase};

const T1: u64 = 300;
const T2: u64 = 900;

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

/// `others` as the counts have them, then one that a request woke, at home in `home` and idle for `idle` seconds.
fn woken(desired: &DesiredState, others: &[(Phase, u64)], home: Phase, idle: u64) -> Observation {
    let mut phases = others.to_vec();
    phases.push((Phase::Running, 5000));
    let mut seen = observed(desired, &phases);
    let last = seen.instances.last_mut().unwrap();
    (last.on_demand, last.home, last.idle_since) = (true, Some(home), Some(now() - secs(idle)));
    seen
}

fn reasons(plan: &NodePlan) -> Vec<(Action, &str)> {
    plan.deferred.iter().map(|deferred| (deferred.action, deferred.reason.as_str())).collect()
}

#[test]
fn a_guest_that_is_busy_or_not_known_to_be_idle_is_left_alone_without_a_word() {
    let desired = desired(0, 0, 1);
    let mut seen = woken(&desired, &[], Phase::Sleeping, 0);
    seen.instances[0].idle_since = None;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), reasons(&plan), plan.next_deadline), (vec![], vec![], None));
}

#[test]
fn from_running_it_goes_warm_at_t1_and_from_warm_to_sleep_at_t2_of_the_same_idle_time() {
    let desired = desired(0, 0, 1);
    let mut seen = woken(&desired, &[], Phase::Sleeping, T1);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(
        (steps(&plan), plan.next_deadline),
        (vec![(Action::Warm, id(1))], Some(now() + secs(T2 - T1)))
    );
    assert_eq!(plan.steps[0].reason, "woken on demand, idle for 300 s");
    (seen.instances[0].phase, seen.instances[0].since) = (Phase::Warm, now() - secs(60));
    seen.instances[0].idle_since = Some(now() - secs(T2 - 1));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.next_deadline), (vec![], Some(now() + secs(1))));
    seen.instances[0].idle_since = Some(now() - secs(T2));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(1))]);
}

#[test]
fn where_t1_is_t2_it_sleeps_without_being_warm_before() {
    let mut desired = desired(0, 0, 1);
    desired.tenants[0].pools[0].sleep_policy.warm_after_seconds = T2;
    let plan = plan_node(&desired, &woken(&desired, &[], Phase::Sleeping, T2), now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(1))]);
}

#[test]
fn it_goes_no_further_than_the_count_that_it_came_from() {
    let of_warm = desired(0, 1, 0);
    let seen = woken(&of_warm, &[], Phase::Warm, 10 * T2);
    assert_eq!(steps(&plan_node(&of_warm, &seen, now())), [(Action::Warm, id(1))]);
    let of_running = desired(1, 0, 0);
    let seen = woken(&of_running, &[], Phase::Running, 10 * T2);
    let plan = plan_node(&of_running, &seen, now());
    assert_eq!((steps(&plan), reasons(&plan)), (vec![], vec![]), "the floor of ready capacity");
}

#[test]
fn neither_policy_nor_counts_undo_what_the_other_did() {
    let desired = desired(1, 1, 2);
    let others = [(Phase::Running, 5000), (Phase::Warm, 5000), (Phase::Sleeping, 5000)];
    for idle in [0, T1 - 1, T1, T2 - 1] {
        let mut seen = woken(&desired, &others, Phase::Sleeping, idle);
        seen.instances[0].idle_since = Some(now() - secs(10 * T2));
        for step in plan_node(&desired, &seen, now()).steps {
            assert_eq!((step.instance.map(|i| i.to_string()), step.action), (id(4), Action::Warm), "{idle}");
            let last = seen.instances.last_mut().unwrap();
            (last.phase, last.since) = (Phase::Warm, now());
            assert_eq!(steps(&plan_node(&desired, &seen, now())), [], "warm for now, it is no warm count's");
        }
    }
}

#[test]
fn while_it_is_being_woken_no_other_one_goes_in_its_place() {
    for (desired, home) in [(desired(1, 1, 0), Phase::Warm), (desired(1, 0, 1), Phase::Sleeping)] {
        let mut seen = woken(&desired, &[(Phase::Running, 5000)], home, 0);
        (seen.instances[1].phase, seen.instances[1].moving_to) = (home, Some(Phase::Running));
        let plan = plan_node(&desired, &seen, now());
        assert_eq!((steps(&plan), reasons(&plan)), (vec![], vec![]), "{home}");
    }
}

#[test]
fn every_guard_keeps_it_at_t1_and_at_t2_and_says_why() {
    type Guard = fn(&mut DesiredState, &mut ObservedInstance);
    let soon = || now() + secs(40);
    let guards: [(&str, Guard, bool); 5] = [
        ("the pool is pinned", |desired, _| desired.tenants[0].pools[0].pinned = true, false),
        ("the pool is critical", |desired, _| desired.tenants[0].pools[0].critical = true, false),
        ("manual override, 40 s left", |_, i| i.override_until = Some(now() + secs(40)), true),
        ("backing off after a failure, 40 s left", |_, i| i.retry_not_before = Some(now() + secs(40)), true),
        ("min_running_seconds, 40 s left", |_, i| i.since = now() - secs(20), true),
    ];
    for (why, guard, lifts) in guards {
        for (idle, action) in [(T1, Action::Warm), (T2, Action::Sleep)] {
            let mut desired = desired(0, 0, 1);
            let mut seen = woken(&desired, &[], Phase::Sleeping, idle);
            guard(&mut desired, &mut seen.instances[0]);
            let plan = plan_node(&desired, &seen, now());
            let said = format!("{why}; woken on demand, idle for {idle} s");
            assert_eq!((steps(&plan), reasons(&plan)), (vec![], vec![(action, said.as_str())]));
            assert!(!lifts || plan.next_deadline == Some(soon()), "{why}: {:?}", plan.next_deadline);
        }
    }
    let desired = desired(0, 0, 1);
    let mut seen = woken(&desired, &[], Phase::Sleeping, T2);
    seen.instances[0].claimed = true;
    let plan = plan_node(&desired, &seen, now());
    let filled_up = vec![(Action::Create, None)];
    assert_eq!((steps(&plan), reasons(&plan)), (filled_up, vec![]), "the sandbox that holds it decides");
}

#[test]
fn min_warm_seconds_keep_it_warm_at_t2() {
    let desired = desired(0, 0, 1);
    let mut seen = woken(&desired, &[], Phase::Sleeping, T2);
    (seen.instances[0].phase, seen.instances[0].since) = (Phase::Warm, now() - secs(10));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(
        reasons(&plan),
        [(Action::Sleep, "min_warm_seconds, 20 s left; woken on demand, idle for 900 s")]
    );
}

#[test]
fn without_room_among_the_warm_it_waits_running_and_sleeps_at_t2() {
    let mut desired = desired(0, 0, 1);
    desired.tenants[0].quotas.max_warm = 0;
    let plan = plan_node(&desired, &woken(&desired, &[], Phase::Sleeping, T1), now());
    assert_eq!((steps(&plan), plan.next_deadline), (vec![], Some(now() + secs(T2 - T1))));
    assert!(reasons(&plan)[0].1.contains("max_warm"), "{:?}", plan.deferred);
    let plan = plan_node(&desired, &woken(&desired, &[], Phase::Sleeping, T2), now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(1))]);
}

#[test]
fn what_stands_in_for_the_running_count_is_not_put_back_to_be_woken_again() {
    let mut desired = desired(1, 0, 1);
    desired.tenants[0].quotas.max_vcpus = 2;
    let mut seen = woken(&desired, &[], Phase::Sleeping, T2);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert!(
        plan.deferred.iter().any(|d| d.reason.contains("the running count lacks 1")),
        "{:?}",
        plan.deferred
    );
    // With two of them the colder one may go.
    seen = woken(&desired, &[(Phase::Running, 5000)], Phase::Sleeping, T2);
    let warmer = seen.instances[1].clone();
    seen.instances[0] = ObservedInstance { id: seen.instances[0].id.clone(), ..warmer };
    seen.instances[0].idle_since = Some(now() - secs(2 * T2));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(1))]);
    // One that is at home among those that run stands in for nobody.
    desired.tenants[0].pools[0].desired_counts.running = 2;
    (seen.instances[0].home, seen.instances[0].idle_since) = (Some(Phase::Running), None);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
}
