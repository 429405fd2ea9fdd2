//! What keeps the planner's hands off, and what it says then: one case each.

use std::time::Duration;

use crate::world::one_pool::{desired, id, now, observed, steps};
use mvm_planner::{Action, NodePlan, plan_node};
use mvm_proto::document::PoolRole;
use mvm_proto::{Digest, InstanceId, Phase};

fn reasons(plan: &NodePlan) -> Vec<(Action, String)> {
    plan.deferred.iter().map(|deferred| (deferred.action, deferred.reason.clone())).collect()
}

fn secs(seconds: u64) -> Duration {
    Duration::from_secs(seconds)
}

#[test]
fn a_pinned_tenants_instances_are_slept_but_never_stopped_or_replaced() {
    let mut desired = desired(0, 0, 1);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 100)]);
    desired.tenants[0].pinned = true;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Sleep, id(1))]);
    assert_eq!(
        reasons(&plan),
        [(Action::Stop, "the tenant is pinned; running 1 more than wanted".to_owned())]
    );

    desired.tenants[0].pools[0].desired_counts.running = 2;
    desired.tenants[0].pools[0].desired_counts.sleeping = 0;
    seen.instances.iter_mut().for_each(|i| i.revision = Digest::of(b"older"));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((plan.steps.len(), plan.deferred.len()), (0, 2));
    assert!(plan.deferred.iter().all(|d| d.action == Action::Replace && d.reason.contains("pinned")));
}

#[test]
fn a_pinned_pool_is_warmed_but_never_put_to_sleep() {
    let mut desired = desired(0, 1, 1);
    desired.tenants[0].pools[0].pinned = true;
    let seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 100)]);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Warm, id(1)), (Action::Stop, id(2))]);
    assert_eq!(reasons(&plan)[0], (Action::Sleep, "the pool is pinned".to_owned()));
}

#[test]
fn a_critical_pool_gets_what_it_lacks_and_loses_nothing_whatever_its_counts() {
    let mut desired = desired(0, 0, 0);
    desired.tenants[0].pools[0].critical = true;
    let phases =
        [(Phase::Running, 9999), (Phase::Warm, 9999), (Phase::Sleeping, 9999), (Phase::Stopped, 9999)];
    let mut seen = observed(&desired, &phases);
    seen.instances[0].revision = Digest::of(b"older");
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert!(!plan.deferred.is_empty());
    assert!(
        plan.deferred.iter().all(|d| d.reason.starts_with("the pool is critical")),
        "{:?}",
        plan.deferred
    );

    desired.tenants[0].pools[0].desired_counts.running = 2;
    seen.instances.truncate(1);
    seen.instances[0].revision = mvm_planner::revision_of(&desired.tenants[0], &desired.tenants[0].pools[0]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Create, None)]);
}

#[test]
fn a_critical_pools_failed_instance_is_started_again_and_no_other_made_for_it() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].pools[0].critical = true;
    let seen = observed(&desired, &[(Phase::Failed, 100)]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Start, id(1))]);
}

#[test]
fn a_critical_pools_stopped_instance_starts_again_when_running_is_short_and_is_kept_when_not() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].pools[0].critical = true;
    let mut seen = observed(&desired, &[(Phase::Stopped, 9999)]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Start, id(1))]);
    seen.instances.extend(observed(&desired, &[(Phase::Stopped, 0), (Phase::Running, 100)]).instances.pop());
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
}

#[test]
fn a_manual_override_holds_until_the_instant_it_ends() {
    let desired = desired(0, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100)]);
    seen.instances[0].override_until = Some(now() + Duration::from_millis(1));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.next_deadline, seen.instances[0].override_until);
    assert!(plan.deferred[0].reason.starts_with("manual override, 1 s left"), "{:?}", plan.deferred);
    seen.instances[0].override_until = Some(now());
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(1))]);
}

#[test]
fn an_instance_started_by_hand_stops_no_other_one() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 500), (Phase::Running, 100)]);
    seen.instances[1].override_until = Some(now() + secs(600));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.deferred.len()), (vec![], 1));
    assert_eq!(plan.deferred[0].instance.as_ref().map(ToString::to_string), id(2));
}

#[test]
fn a_sleeper_woken_by_hand_is_not_replaced_by_a_new_one() {
    let desired = desired(0, 0, 2);
    let mut seen = observed(&desired, &[(Phase::Sleeping, 500), (Phase::Running, 100)]);
    seen.instances[1].override_until = Some(now() + secs(600));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), reasons(&plan)[0].0), (vec![], Action::Sleep));
    seen.instances[1].override_until = None;
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(2))]);
}

#[test]
fn waking_one_of_five_sleepers_on_demand_makes_no_sixth_and_the_policy_puts_it_back() {
    let desired = desired(0, 0, 5);
    let mut seen = observed(&desired, &[(Phase::Sleeping, 5000); 5]);
    seen.instances[2].phase = Phase::Running;
    seen.instances[2].on_demand = true;
    seen.instances[2].home = Some(Phase::Sleeping);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [], "busy");
    seen.instances[2].idle_since = Some(now() - secs(299));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.next_deadline), (vec![], Some(now() + secs(1))));
    seen.instances[2].idle_since = Some(now() - secs(300));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Warm, id(3))]);
    seen.instances[2].idle_since = Some(now() - secs(900));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Sleep, id(3))]);
}

#[test]
fn the_policy_leaves_the_counts_own_instances_alone_however_idle() {
    let desired = desired(2, 1, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 9999), (Phase::Running, 9999), (Phase::Warm, 9999)]);
    seen.instances.iter_mut().for_each(|i| i.idle_since = Some(now() - secs(9000)));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.deferred.len(), plan.next_deadline), (vec![], 0, None));
}

#[test]
fn a_claimed_instance_leaves_its_count_and_the_pool_is_filled_up_again() {
    for (phase, desired) in [
        (Phase::Running, desired(2, 0, 0)),
        (Phase::Warm, desired(0, 2, 0)),
        (Phase::Sleeping, desired(0, 0, 2)),
    ] {
        let mut seen = observed(&desired, &[(phase, 100), (phase, 100)]);
        assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
        seen.instances[0].claimed = true;
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(steps(&plan), [(Action::Create, None)], "{phase}");
    }
}

#[test]
fn a_claimed_instance_is_neither_replaced_nor_waited_for_when_its_pool_has_another_revision() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 100)]);
    seen.instances[0].claimed = true;
    seen.instances[0].revision = Digest::of(b"older");
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), reasons(&plan)), (vec![], vec![]));
}

#[test]
fn claimed_instances_count_against_quotas_and_no_place_is_made_by_stopping_one() {
    let mut desired = desired(1, 0, 0);
    desired.tenants[0].quotas.max_running = 1;
    let mut seen = observed(&desired, &[(Phase::Running, 100)]);
    seen.instances[0].claimed = true;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert!(plan.deferred[0].reason.contains("max_running"), "{:?}", plan.deferred);
}

#[test]
fn a_claimed_instance_in_a_pruned_pool_or_tenant_stays_and_the_others_go() {
    let mut desired = desired(0, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 1), (Phase::Failed, 1)]);
    seen.instances[0].claimed = true;
    desired.prune_unknown_pools = true;
    desired.tenants[0].pools.clear();
    let check = |plan: NodePlan| {
        assert_eq!(steps(&plan), [(Action::Stop, id(2)), (Action::Destroy, id(3))]);
        assert!(plan.deferred[0].reason.starts_with("it is claimed"), "{:?}", plan.deferred);
        assert!(plan.unmanaged.is_empty());
    };
    check(plan_node(&desired, &seen, now()));
    desired.tenants.clear();
    let kept = plan_node(&desired, &seen, now());
    assert_eq!((kept.steps.len(), kept.unmanaged.len()), (0, 3), "pools are not tenants");
    desired.prune_unknown_pools = false;
    desired.prune_unknown_tenants = true;
    check(plan_node(&desired, &seen, now()));
}

#[test]
fn prune_of_tenants_leaves_the_unnamed_pools_of_named_tenants() {
    let mut desired = desired(0, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 100)]);
    seen.instances[0].pool = "gone".parse().unwrap();
    seen.instances[1].tenant = "gone".parse().unwrap();
    desired.prune_unknown_tenants = true;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.unmanaged.len()), (vec![(Action::Stop, id(2))], 1));
    desired.prune_unknown_tenants = false;
    desired.prune_unknown_pools = true;
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.unmanaged.len()), (vec![(Action::Stop, id(1))], 1));
}

#[test]
fn a_failed_instance_waits_for_its_retry_and_then_starts_again_under_its_own_id() {
    let desired = desired(2, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Failed, 5)]);
    seen.instances[1].retry_not_before = Some(now() + secs(7));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!((steps(&plan), plan.next_deadline), (vec![], Some(now() + secs(7))));
    let reason = "backing off after a failure, 7 s left; running 1 of 2";
    assert_eq!(reasons(&plan), [(Action::Start, reason.to_owned())]);
    seen.instances[1].retry_not_before = Some(now());
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Start, id(2))]);
}

#[test]
fn nothing_is_made_anew_for_a_count_that_an_instance_on_its_way_will_fill() {
    // Both are being woken when one is wanted asleep again.
    let desired_rest = desired(1, 1, 1);
    let mut seen =
        observed(&desired_rest, &[(Phase::Sleeping, 100), (Phase::Sleeping, 90), (Phase::Warm, 80)]);
    seen.instances[0].moving_to = Some(Phase::Running);
    seen.instances[1].moving_to = Some(Phase::Running);
    let plan = plan_node(&desired_rest, &seen, now());
    let made = |plan: &NodePlan| plan.steps.iter().any(|step| step.action == Action::Create);
    assert!(!made(&plan), "{:?}", plan.steps);
    // One is being put to sleep when it is wanted running again.
    let desired_up = desired(1, 0, 0);
    let mut seen = observed(&desired_up, &[(Phase::Warm, 100)]);
    seen.instances[0].moving_to = Some(Phase::Sleeping);
    let plan = plan_node(&desired_up, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.deferred[0].reason, "one that is being put to rest will be brought back; running 0 of 1");
}

#[test]
fn a_sleeper_that_failed_to_wake_is_tried_again_before_another_takes_its_place() {
    let desired = desired(1, 0, 0);
    for rests in [Phase::Sleeping, Phase::Warm] {
        let mut seen = observed(&desired, &[(rests, 100)]);
        seen.instances[0].retry_not_before = Some(now() + secs(2));
        seen.instances[0].failures = 2;
        let plan = plan_node(&desired, &seen, now());
        assert_eq!((steps(&plan), plan.next_deadline), (vec![], Some(now() + secs(2))));
        seen.instances[0].failures = 3;
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(plan.steps.iter().map(|step| step.action).collect::<Vec<_>>(), [Action::Create]);
    }
}

#[test]
fn min_warm_seconds_hold_a_warm_instance_but_not_its_resume() {
    let down = desired(0, 0, 1);
    let seen = observed(&down, &[(Phase::Warm, 10)]);
    let plan = plan_node(&down, &seen, now());
    assert!(plan.steps.is_empty());
    assert_eq!(plan.deferred[0].reason, "min_warm_seconds, 20 s left; warm 1 more than wanted");
    assert_eq!(steps(&plan_node(&desired(1, 0, 0), &seen, now())), [(Action::Resume, id(1))]);
}

#[test]
fn one_that_may_not_go_yet_keeps_no_place_from_one_that_may() {
    // The younger of the two is the colder one, and held; only one is too many.
    let mut seen = observed(&desired(1, 1, 0), &[(Phase::Running, 10), (Phase::Running, 100)]);
    seen.instances[0].idle_since = Some(now() - secs(9));
    let plan = plan_node(&desired(1, 1, 0), &seen, now());
    assert_eq!(steps(&plan), [(Action::Warm, id(2))]);

    // Beside one that nobody knows the end of, the place is kept for the one that will take it.
    let mut seen =
        observed(&desired(1, 1, 0), &[(Phase::Running, 100), (Phase::Running, 10), (Phase::Running, 100)]);
    seen.instances[0].idle_since = Some(now() - secs(90));
    seen.instances[0].retry_not_before = Some(now() + secs(7));
    seen.instances[1].idle_since = Some(now() - secs(9));
    let plan = plan_node(&desired(1, 1, 0), &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(3))]);
    assert_eq!(
        reasons(&plan),
        [(Action::Warm, "min_running_seconds, 50 s left; running 1 more than wanted".to_owned())]
    );
}

#[test]
fn a_clock_set_back_by_a_day_holds_no_instance_for_a_day() {
    let desired = desired(0, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 0)]);
    seen.instances[0].since = now() + secs(86_400);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(1))]);
}

#[test]
fn an_override_above_the_maximum_holds_no_instance() {
    let desired = desired(0, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100)]);
    let week = secs(7 * 86_400);
    seen.instances[0].override_until = Some(now() + week);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    seen.instances[0].override_until = Some(now() + week + secs(1));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(1))]);
}

#[test]
fn the_idlest_is_put_down_first_then_the_newest_and_the_busy_last() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 900), (Phase::Running, 200), (Phase::Running, 300)]);
    seen.instances[1].idle_since = Some(now() - secs(50));
    seen.instances[2].idle_since = Some(now() - secs(60));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(3)), (Action::Stop, id(2))], "the first is busy");
    seen.instances.iter_mut().for_each(|i| i.idle_since = Some(now() - secs(60)));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Stop, id(2)), (Action::Stop, id(3))], "as idle as each other");
}

#[test]
fn ties_are_broken_by_id_whatever_the_order_of_the_observation() {
    let desired = desired(1, 1, 1);
    let seen = observed(&desired, &[(Phase::Running, 100); 5]);
    let mut turned = seen.clone();
    turned.instances.reverse();
    assert_eq!(plan_node(&desired, &seen, now()), plan_node(&desired, &turned, now()));
}

#[test]
fn sleeping_goes_in_the_reverse_order_of_roles() {
    let mut down = desired(0, 0, 1);
    let worker = down.tenants[0].pools[0].clone();
    for (name, role) in [("edge", PoolRole::Gateway), ("build", PoolRole::Builder)] {
        let mut pool = worker.clone();
        pool.pool_id = name.parse().unwrap();
        pool.role = role;
        down.tenants[0].pools.push(pool);
    }
    let mut seen = observed(&down, &[(Phase::Running, 100); 3]);
    seen.instances[0].pool = "edge".parse().unwrap();
    seen.instances[1].pool = "build".parse().unwrap();
    let plan = plan_node(&down, &seen, now());
    let order: Vec<_> = plan.steps.iter().map(|step| (step.pool.as_str(), step.action)).collect();
    assert_eq!(order, [("workers", Action::Sleep), ("build", Action::Sleep), ("edge", Action::Sleep)]);
}

#[test]
fn a_new_revision_starts_a_surge_instance_then_replaces_one_at_a_time_and_says_so() {
    let desired = desired(2, 0, 1);
    let mut seen =
        observed(&desired, &[(Phase::Running, 100), (Phase::Running, 100), (Phase::Sleeping, 100)]);
    seen.instances.iter_mut().for_each(|i| i.revision = Digest::of(b"older"));
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Create, None)]);
    assert_eq!(plan.steps[0].staging, Some(Phase::Running));
    assert_eq!(
        (plan.deferred[0].count, plan.deferred[0].reason.as_str()),
        (3, "a surge instance starts first")
    );

    let mut surge = seen.instances[0].clone();
    surge.id = InstanceId::from_bits(9);
    surge.revision = mvm_planner::revision_of(&desired.tenants[0], &desired.tenants[0].pools[0]);
    surge.staging = Some(Phase::Running);
    seen.instances.push(surge);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), [(Action::Replace, id(1))]);
    assert_eq!((plan.deferred[0].count, plan.deferred[0].reason.as_str()), (2, "one at a time per pool"));

    // While the first is being replaced, the second is left alone.
    seen.instances[0].moving_to = Some(Phase::Running);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    // When it failed, too.
    seen.instances[0].moving_to = None;
    seen.instances[0].phase = Phase::Failed;
    seen.instances[0].retry_not_before = Some(now() + secs(30));
    let plan = plan_node(&desired, &seen, now());
    assert!(plan.steps.iter().all(|step| step.action != Action::Replace), "{:?}", plan.steps);
    assert!(plan.deferred.iter().any(|d| d.reason.contains("backing off")), "{:?}", plan.deferred);
}

#[test]
fn what_moves_between_nodes_fills_a_free_place_is_no_surplus_and_is_left_alone() {
    // At the source, before and after its count went; at the target, before and after its count came.
    for (running, sleeping) in [(1, 1), (0, 1), (1, 0), (0, 0)] {
        let desired = desired(running, 0, sleeping);
        let mut seen = observed(&desired, &[(Phase::Sleeping, 100), (Phase::Sleeping, 100)]);
        for (instance, home) in seen.instances.iter_mut().zip([Phase::Running, Phase::Sleeping]) {
            (instance.moving, instance.home) = (true, Some(home));
            instance.revision = Digest::of(b"older");
        }
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(steps(&plan), [], "{running} running, {sleeping} asleep");
    }
    // Another one of the same count goes only if there is one too many without it.
    let desired = desired(0, 0, 1);
    let mut seen = observed(&desired, &[(Phase::Sleeping, 100), (Phase::Sleeping, 100)]);
    seen.instances[0].moving = true;
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    let mut seen =
        observed(&desired, &[(Phase::Sleeping, 9999), (Phase::Sleeping, 9999), (Phase::Sleeping, 9999)]);
    seen.instances[0].moving = true;
    assert_eq!(steps(&plan_node(&desired, &seen, now())).len(), 1);
}
