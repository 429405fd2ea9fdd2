//! What a document past its expiry still does, by example and on random fleets: what there is goes on, nothing changes.

use std::collections::BTreeMap;
use std::time::Duration;

use crate::world::fleet::{Kinds, cases, fleet};
use crate::world::model::World;
use crate::world::one_pool::{desired, id, now, observed, steps};
use crate::world::rest::run_by;
use mvm_planner::{Action, NodePlan, Observation, ObservedInstance, Step, plan_expired, plan_node};
use mvm_proto::{DesiredState, Digest, InstanceId, Phase};
use proptest::prelude::*;

const FREE: Kinds = Kinds { tight: false, guards: false, pressure: false };
const ANYTHING: Kinds = Kinds { tight: true, guards: true, pressure: true };

fn deferred(plan: &NodePlan) -> Vec<(Action, u32, &str)> {
    plan.deferred.iter().map(|d| (d.action, d.count, d.reason.as_str())).collect()
}

#[test]
fn what_crashed_is_started_again_and_no_sleeper_is_woken_in_its_place() {
    let desired = desired(2, 0, 1);
    let seen = observed(&desired, &[(Phase::Running, 100), (Phase::Failed, 100), (Phase::Sleeping, 100)]);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Wake, id(3)), (Action::Start, id(2))]);
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [(Action::Start, id(2))]);
}

#[test]
fn a_restart_that_was_cut_short_is_begun_again() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Stopped, 100)]);
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [], "something stopped it");
    seen.instances[0].retry_not_before = Some(now() - Duration::from_secs(1));
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [(Action::Start, id(1))]);
}

#[test]
fn what_crashed_while_warm_becomes_warm_again() {
    let desired = desired(0, 1, 0);
    let seen = observed(&desired, &[(Phase::Failed, 100)]);
    let mut world = World::new(seen, now());
    run_by(plan_expired, &desired, &mut world, |_, _, _| {});
    assert_eq!(world.observed.instances.len(), 1);
    assert_eq!(world.observed.instances[0].phase, Phase::Warm);
}

#[test]
fn nothing_is_made_for_counts_that_were_never_reached() {
    let desired = desired(2, 1, 1);
    let plan = plan_expired(&desired, &observed(&desired, &[(Phase::Running, 100)]), now());
    assert_eq!(steps(&plan), []);
    assert_eq!(
        deferred(&plan),
        [
            (Action::Create, 1, "the document has expired; running 1 of 2"),
            (Action::Create, 2, "the document has expired"),
        ]
    );
}

#[test]
fn nothing_is_stopped_replaced_pruned_or_cleared_away() {
    let mut desired = desired(0, 0, 0);
    desired.prune_unknown_tenants = true;
    let old = (Phase::Running, 86_400);
    let mut seen = observed(&desired, &[old, old, (Phase::Stopped, 86_400), (Phase::Warm, 86_400)]);
    seen.instances[0].revision = Digest::of(b"older");
    seen.instances[1].tenant = "gone".parse().unwrap();
    assert!(!plan_node(&desired, &seen, now()).is_empty());
    let plan = plan_expired(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(
        deferred(&plan),
        [
            (Action::Replace, 1, "the document has expired"),
            (Action::Stop, 2, "the document has expired"),
            (
                Action::Stop,
                1,
                "the document has expired; the document does not name its tenant, and asks to prune"
            ),
        ]
    );
}

#[test]
fn what_memory_pressure_put_to_sleep_is_woken_when_the_pressure_ends() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 1000)]);
    seen.instances[0].idle_since = Some(now() - Duration::from_secs(900));
    seen.memory_pressure = true;
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [(Action::Sleep, id(1))]);
    seen.instances[0].phase = Phase::Sleeping;
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), []);
    seen.memory_pressure = false;
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [(Action::Wake, id(1))]);
}

#[test]
fn what_a_request_woke_is_put_back_once_it_is_idle() {
    let desired = desired(0, 0, 1);
    let mut seen = observed(&desired, &[(Phase::Running, 1000)]);
    let woken = &mut seen.instances[0];
    (woken.on_demand, woken.home) = (true, Some(Phase::Sleeping));
    woken.idle_since = Some(now() - Duration::from_secs(901));
    assert_eq!(steps(&plan_expired(&desired, &seen, now())), [(Action::Sleep, id(1))]);
}

fn find<'a>(observed: &'a Observation, step: &Step) -> &'a ObservedInstance {
    let id = step.instance.as_ref().expect("an expired document makes no instance");
    observed.instances.iter().find(|i| i.id == *id).unwrap()
}

/// A step that keeps what there is.
fn keeps(desired: &DesiredState, observed: &Observation, step: &Step) {
    let instance = find(observed, step);
    match step.action {
        Action::Start => {
            assert!(instance.phase == Phase::Failed || instance.retry_not_before.is_some(), "{step}");
        }
        Action::Wake | Action::Resume => {
            let pool = desired.pools().find(|(t, p)| t.tenant_id == step.tenant && p.pool_id == step.pool);
            let counts = &pool.unwrap().1.desired_counts;
            let wanted = if instance.phase == Phase::Warm { counts.warm } else { counts.sleeping };
            // What was woken from there has its place there, and so has what is on its way.
            let rest = observed.instances.iter().filter(|i| {
                let has_place = [Some(i.phase), i.moving_to, i.staging, i.home.filter(|_| i.on_demand)];
                !i.claimed
                    && i.tenant == instance.tenant
                    && i.pool == instance.pool
                    && has_place.contains(&Some(instance.phase))
            });
            assert!(rest.count() > usize::try_from(wanted).unwrap(), "{step}");
        }
        Action::Warm | Action::Sleep => {
            let by_pressure = observed.memory_pressure && step.reason.starts_with("memory pressure");
            assert!(instance.staging.is_some() || instance.on_demand || by_pressure, "{step}");
        }
        Action::Restart => {}
        Action::Create | Action::Stop | Action::Destroy | Action::Replace => panic!("{step}"),
    }
}

fn revisions(world: &World) -> BTreeMap<InstanceId, Digest> {
    world.observed.instances.iter().map(|i| (i.id.clone(), i.revision)).collect()
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn an_expired_document_makes_replaces_stops_and_destroys_nothing((desired, observed) in fleet(ANYTHING)) {
        let mut world = World::new(observed, now());
        let before = revisions(&world);
        let mut started = Vec::new();
        run_by(plan_expired, &desired, &mut world, |before, _, step| {
            keeps(&desired, &before.observed, step);
            if step.action == Action::Start {
                started.extend(step.instance.clone());
            }
        });
        let mut after = revisions(&world);
        prop_assert_eq!(before.len(), after.len());
        // What was started anew is of the document's revision; nothing else changed.
        after.retain(|id, _| !started.contains(id));
        prop_assert!(after.iter().all(|(id, revision)| before[id] == *revision));
    }

    #[test]
    fn with_room_all_that_failed_and_a_count_wants_is_up_again((desired, observed) in fleet(FREE)) {
        let mut world = World::new(observed, now());
        run_by(plan_expired, &desired, &mut world, |_, _, _| {});
        for (tenant, pool) in desired.pools() {
            let (running, warm, sleeping) = world.counts(&tenant.tenant_id, &pool.pool_id);
            let failed = world.observed.instances.iter().any(|i| {
                i.tenant == tenant.tenant_id && i.pool == pool.pool_id && i.phase == Phase::Failed && !i.claimed
            });
            let wanted = &pool.desired_counts;
            let lacks = running < wanted.running || warm < wanted.warm || sleeping < wanted.sleeping;
            // Something lent may be away from its count.
            let lent = world.observed.instances.iter().any(|i| i.claimed || i.on_demand || i.staging.is_some());
            prop_assert!(!(failed && lacks) || lent, "{}/{}", tenant.tenant_id, pool.pool_id);
        }
    }

    #[test]
    fn the_order_of_an_observation_changes_nothing((desired, observed) in fleet(ANYTHING)) {
        let plan = plan_expired(&desired, &observed, now());
        let mut other = observed;
        other.instances.reverse();
        prop_assert_eq!(plan_expired(&desired, &other, now()), plan);
    }
}
