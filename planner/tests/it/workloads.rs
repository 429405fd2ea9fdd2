//! Programs that ended or are not healthy: what their pool's `restart` makes of them.

use crate::world::fleet::{Kinds, cases, is_brought_back};
use crate::world::model::World;
use crate::world::one_pool::{self, desired, id, observed, steps};
use crate::world::rest::{now, run_to_rest};
use mvm_planner::{Action, Observation, RESTARTS_IN_PLACE, Workload, plan_expired, plan_node};
use mvm_proto::document::Restart;
use mvm_proto::{DesiredState, Digest, Phase, WorkloadState};
use proptest::prelude::*;

use crate::world::crowd::{one_pool as random_pool, secs};

const CALM: Kinds = Kinds { tight: true, guards: true, pressure: false };

/// Running ones, of which the first has a program that is this since so many seconds.
fn with_down(
    desired: &DesiredState,
    count: usize,
    state: WorkloadState,
    age: u64,
    restarts: u32,
) -> Observation {
    let mut seen = observed(desired, &vec![(Phase::Running, 5000); count]);
    seen.instances[0].workload = Some(Box::new(Workload { state, since: now() - secs(age), restarts }));
    seen.instances[0].idle_since = None;
    seen
}

fn restart(mut desired: DesiredState, restart: Restart) -> DesiredState {
    desired.tenants[0].pools[0].restart = restart;
    desired
}

#[test]
fn the_policy_decides_which_programs_are_started_again() {
    use WorkloadState::{Completed, Failed, Unhealthy};
    for (policy, state, again) in [
        (Restart::Always, Completed, true),
        (Restart::Always, Failed, true),
        (Restart::Always, Unhealthy, true),
        (Restart::OnFailure, Completed, false),
        (Restart::OnFailure, Failed, true),
        (Restart::OnFailure, Unhealthy, true),
        (Restart::Never, Completed, false),
        (Restart::Never, Failed, false),
        (Restart::Never, Unhealthy, false),
    ] {
        let desired = restart(desired(2, 0, 0), policy);
        let plan = plan_node(&desired, &with_down(&desired, 2, state, 1, 0), now());
        let expected = if again { vec![(Action::Restart, id(1))] } else { Vec::new() };
        assert_eq!(steps(&plan), expected, "{policy:?} {state:?}");
        assert!(plan.deferred.is_empty(), "what is over for good leaves nothing to wait for");
    }
}

#[test]
fn a_program_that_ends_again_and_again_waits_longer_each_time_and_then_gets_a_new_guest() {
    let desired = desired(1, 0, 0);
    let plan = |age, restarts| {
        plan_node(&desired, &with_down(&desired, 1, WorkloadState::Failed, age, restarts), now())
    };
    let waits = plan(1, 2);
    assert_eq!((steps(&waits), waits.next_deadline), (vec![], Some(now() + secs(1))));
    let reason = &waits.deferred[0].reason;
    assert_eq!(reason, "its program failed; restarted 2 times in a row, 1 s left");
    assert_eq!(steps(&plan(2, 2)), [(Action::Restart, id(1))]);
    assert_eq!(steps(&plan(2, RESTARTS_IN_PLACE)), []);
    assert_eq!(steps(&plan(4, RESTARTS_IN_PLACE)), [(Action::Replace, id(1))]);
}

#[test]
fn where_no_new_guest_can_be_made_the_program_is_started_in_the_one_there_is() {
    let desired = desired(1, 0, 0);
    let seen = with_down(&desired, 1, WorkloadState::Failed, 900, 9);
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [(Action::Restart, id(1))]);
    let mut pressed = seen.clone();
    pressed.memory_pressure = true;
    assert_eq!(steps(&plan_node(&desired, &pressed, now())), [(Action::Restart, id(1))]);
    for guard in ["critical", "pinned", "small"] {
        let mut desired = desired.clone();
        let tenant = &mut desired.tenants[0];
        match guard {
            "critical" => tenant.pools[0].critical = true,
            "pinned" => tenant.pinned = true,
            // A larger guest of this pool does not fit any more.
            _ => {
                tenant.quotas.max_vcpus = 8;
                tenant.pools[0].instance_resources.vcpus = 9;
            }
        }
        assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Restart, id(1))], "{guard}");
    }
}

#[test]
fn what_a_sandbox_or_a_person_holds_is_left_alone_and_what_a_request_woke_is_not_replaced() {
    let desired = desired(1, 0, 0);
    let seen = with_down(&desired, 1, WorkloadState::Failed, 900, 9);
    let mut claimed = seen.clone();
    claimed.instances[0].claimed = true;
    // Its pool makes another one in its place.
    assert_eq!(steps(&plan_node(&desired, &claimed, now())), [(Action::Create, None)]);
    let mut held = seen.clone();
    held.instances[0].override_until = Some(now() + secs(60));
    assert_eq!(steps(&plan_node(&desired, &held, now())), []);
    let mut woken = seen;
    (woken.instances[0].on_demand, woken.instances[0].home) = (true, Some(Phase::Sleeping));
    assert_eq!(steps(&plan_node(&one_pool::desired(0, 0, 1), &woken, now())), [(Action::Restart, id(1))]);
}

#[test]
fn what_a_request_woke_goes_back_when_its_program_is_over_for_good() {
    let desired = restart(desired(0, 0, 1), Restart::Never);
    let mut woken = with_down(&desired, 1, WorkloadState::Completed, 10_000, 0);
    (woken.instances[0].on_demand, woken.instances[0].home) = (true, Some(Phase::Sleeping));
    assert_eq!(steps(&plan_node(&desired, &woken, now())), [(Action::Sleep, id(1))]);
}

#[test]
fn a_scale_down_takes_what_does_not_work() {
    let desired = desired(1, 0, 0);
    let mut seen = with_down(&desired, 2, WorkloadState::Unhealthy, 1, 0);
    // The other one is colder.
    seen.instances[1].idle_since = Some(now() - secs(4000));
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(1))]);
}

#[test]
fn a_revision_whose_program_does_not_work_takes_no_further_instance() {
    let desired = desired(2, 0, 0);
    let mut seen = with_down(&desired, 2, WorkloadState::Failed, 1, 9);
    seen.instances[1].revision = Digest::of(b"older");
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    let reasons: Vec<_> = plan.deferred.iter().map(|deferred| deferred.reason.as_str()).collect();
    assert!(reasons.contains(&"the workload of an instance of this revision has failed"), "{reasons:?}");
}

#[test]
fn what_does_not_work_and_is_of_an_older_revision_is_replaced_at_once() {
    let desired = desired(2, 0, 0);
    let mut seen = with_down(&desired, 2, WorkloadState::Failed, 0, 9);
    for instance in &mut seen.instances {
        instance.revision = Digest::of(b"older");
    }
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Replace, id(1))]);
    let mut world = World::new(seen, now());
    run_to_rest(&desired, &mut world, |_, _, _| ());
    assert!(world.observed.instances.iter().all(|i| i.revision != Digest::of(b"older")));
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn every_program_that_may_be_started_again_is_and_no_other((desired, seen) in random_pool(CALM)) {
        let plan = plan_node(&desired, &seen, now());
        let pool = &desired.tenants[0].pools[0];
        for step in plan.steps.iter().filter(|step| step.action == Action::Restart) {
            let instance = seen.instances.iter().find(|i| Some(&i.id) == step.instance.as_ref()).unwrap();
            prop_assert!(is_brought_back(&desired, instance) && instance.moving_to.is_none(), "{}", step);
            prop_assert!(instance.workload.as_ref().unwrap().due_at() <= now(), "{} before its time", step);
        }
        for instance in &seen.instances {
            let ahead = |at: Option<mvm_proto::Timestamp>| at.is_some_and(|at| at > now());
            let held = instance.claimed || ahead(instance.override_until) || ahead(instance.retry_not_before);
            let is_staged = matches!(instance.staging, Some(Phase::Warm | Phase::Sleeping));
            let due = instance.workload.as_ref().is_some_and(|workload| workload.due_at() <= now());
            if !is_brought_back(&desired, instance) || instance.moving_to.is_some() || held || is_staged || !due {
                continue;
            }
            let step = plan.steps.iter().find(|step| step.instance.as_ref() == Some(&instance.id));
            let told = plan.deferred.iter().any(|deferred| {
                deferred.instance.as_ref() == Some(&instance.id) && deferred.action == Action::Stop
            });
            let action = step.map(|step| step.action);
            prop_assert!(
                told || matches!(action, Some(Action::Restart | Action::Replace | Action::Stop)),
                "{:?} of {:?}: {:?}", action, instance, pool.desired_counts
            );
        }
    }
}
