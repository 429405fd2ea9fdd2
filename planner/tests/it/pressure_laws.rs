//! The planner's laws on random fleets whose node is short of memory.

use crate::world::fleet::{Kinds, cases, fleet, is_brought_back};
use crate::world::model::World;
use crate::world::rest::{now, run_to_rest};
use mvm_planner::{Action, Observation, ObservedInstance, Step, Workload, plan_node};
use mvm_proto::document::Pool;
use mvm_proto::{DesiredState, Phase, Timestamp, WorkloadState};
use proptest::prelude::*;

const FREE: Kinds = Kinds { tight: false, guards: false, pressure: false };
const ANYTHING: Kinds = Kinds { tight: true, guards: true, pressure: false };
const GUARDED: Kinds = Kinds { tight: false, guards: true, pressure: false };
/// The planner's bound on what goes down at once.
const AT_ONCE: usize = 2;

fn pool_of<'a>(desired: &'a DesiredState, instance: &ObservedInstance) -> Option<&'a Pool> {
    let mine = |(t, p): &(&_, &Pool)| {
        let t: &mvm_proto::document::Tenant = t;
        t.tenant_id == instance.tenant && p.pool_id == instance.pool
    };
    desired.pools().find(mine).map(|(_, pool)| pool)
}

/// Since when an instance that nothing holds is idle; its minimum runtime aside.
fn sleepable_from(desired: &DesiredState, i: &ObservedInstance, now: Timestamp) -> Option<Timestamp> {
    let pool = pool_of(desired, i)?;
    let ahead = |at: Option<Timestamp>| at.is_some_and(|at| at > now);
    let held =
        pool.pinned || pool.critical || i.claimed || ahead(i.override_until) || ahead(i.retry_not_before);
    let paused = (i.phase == Phase::Warm).then_some(i.since);
    let up = matches!(i.phase, Phase::Running | Phase::Warm);
    // A program that is over has nothing to do either.
    let is_over = |w: &Workload| w.is_down() && w.state != WorkloadState::Unhealthy;
    let over = i.workload.as_deref().filter(|w| i.phase == Phase::Running && is_over(w)).map(|w| w.since);
    let held = held || is_brought_back(desired, i);
    (up && !held).then(|| i.idle_since.or(paused).or(over)).flatten()
}

/// What goes first is lowest: whether it is short of its minimum runtime, and since when it is idle.
fn rank(desired: &DesiredState, i: &ObservedInstance, now: Timestamp) -> Option<(bool, Timestamp)> {
    let idle_from = sleepable_from(desired, i, now)?;
    let policy = pool_of(desired, i)?.runtime_policy;
    let least = if i.phase == Phase::Warm { policy.min_warm_seconds } else { policy.min_running_seconds };
    // No minimum applies to what was booted only to be put to rest.
    Some((i.staging.is_none() && now.since(i.since).as_secs() < least, idle_from))
}

fn is_for_pressure(step: &Step) -> bool {
    step.reason.starts_with("memory pressure")
}

fn find<'a>(instances: &'a [ObservedInstance], step: &Step) -> &'a ObservedInstance {
    instances.iter().find(|i| Some(&i.id) == step.instance.as_ref()).unwrap()
}

/// Nothing is started, and pressure takes only what may be taken.
fn only_down(desired: &DesiredState, before: &World, step: &Step) {
    let starts = matches!(step.action, Action::Create | Action::Start | Action::Wake | Action::Replace);
    assert!(!starts, "{step}");
    let instance = find(&before.observed.instances, step);
    assert!(step.action != Action::Resume || instance.staging.is_some(), "{step}");
    if is_for_pressure(step) {
        assert_eq!(step.action, Action::Sleep, "{step}");
        assert!(sleepable_from(desired, instance, before.now).is_some(), "{step}");
    }
}

/// Every instance is of a pool that the document names, and every other pool is free to give: so there is a choice.
fn crowd(desired: &mut DesiredState, observed: &mut Observation) {
    let mut names = Vec::new();
    for tenant in &mut desired.tenants {
        for pool in &mut tenant.pools {
            if names.len() % 2 == 0 {
                (pool.pinned, pool.critical) = (false, false);
            }
            names.push((tenant.tenant_id.clone(), pool.pool_id.clone()));
        }
    }
    for (instance, (tenant, pool)) in observed.instances.iter_mut().zip(names.iter().cycle()) {
        (instance.tenant, instance.pool) = (tenant.clone(), pool.clone());
    }
}

/// The counts that the fleet has already: nothing is spare, so nothing goes but for pressure.
fn content(mut desired: DesiredState, observed: &mut Observation) -> DesiredState {
    observed.instances.iter_mut().for_each(|i| i.staging = None);
    for tenant in &mut desired.tenants {
        for pool in &mut tenant.pools {
            let have = |phase| {
                let mine = |i: &&ObservedInstance| {
                    (&i.tenant, &i.pool, i.phase) == (&tenant.tenant_id, &pool.pool_id, phase)
                };
                u32::try_from(observed.instances.iter().filter(mine).count()).unwrap()
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
    fn under_lasting_pressure_nothing_starts_and_plans_come_to_rest((desired, observed) in fleet(ANYTHING)) {
        let mut world = World::new(observed, now());
        world.observed.memory_pressure = true;
        run_to_rest(&desired, &mut world, |before, _, step| only_down(&desired, before, step));
    }

    #[test]
    fn with_room_for_snapshots_all_that_may_sleep_sleeps_at_last((mut desired, mut observed) in fleet(GUARDED)) {
        crowd(&mut desired, &mut observed);
        let mut world = World::new(observed, now());
        world.observed.memory_pressure = true;
        run_to_rest(&desired, &mut world, |before, _, step| only_down(&desired, before, step));
        for instance in world.observed.instances.iter().filter(|i| i.staging.is_none()) {
            prop_assert_eq!(sleepable_from(&desired, instance, world.now), None, "{:?}", instance);
        }
    }

    #[test]
    fn when_the_pressure_ends_the_desired_counts_are_reached((desired, observed) in fleet(FREE)) {
        let mut world = World::new(observed, now());
        world.observed.memory_pressure = true;
        run_to_rest(&desired, &mut world, |_, _, _| {});
        world.observed.memory_pressure = false;
        let rest = run_to_rest(&desired, &mut world, |_, _, _| {});
        for (tenant, pool) in desired.pools() {
            let wanted = &pool.desired_counts;
            prop_assert_eq!(
                world.counts(&tenant.tenant_id, &pool.pool_id),
                (wanted.running, wanted.warm, wanted.sleeping),
                "{}/{}", tenant.tenant_id, pool.pool_id
            );
        }
        prop_assert!(rest.deferred.is_empty(), "{:?}", rest.deferred);
    }

    #[test]
    fn few_go_at_once_and_none_before_a_colder_one(
        (mut desired, mut observed) in fleet(GUARDED), spare in any::<bool>(), all_named in any::<bool>()
    ) {
        observed.memory_pressure = true;
        if all_named {
            crowd(&mut desired, &mut observed);
        }
        let desired = if spare { desired } else { content(desired, &mut observed) };
        let plan = plan_node(&desired, &observed, now());
        let taken: Vec<_> = plan.steps.iter().filter(|step| is_for_pressure(step)).collect();
        prop_assert!(taken.len() <= AT_ONCE, "{:?}", taken);
        // What is staged goes where it was booted for.
        let is_left = |i: &&ObservedInstance| {
            i.staging.is_none() && plan.steps.iter().all(|step| step.instance.as_ref() != Some(&i.id))
        };
        let left: Vec<_> =
            observed.instances.iter().filter(is_left).filter_map(|i| rank(&desired, i, now())).collect();
        // What sleeps has no memory to give back.
        let going = plan.steps.iter().filter(|step| {
            matches!(step.action, Action::Sleep | Action::Stop)
                && matches!(find(&observed.instances, step).phase, Phase::Running | Phase::Warm)
        }).count();
        for step in &taken {
            let instance = find(&observed.instances, step);
            let key = rank(&desired, instance, now()).unwrap();
            prop_assert!(left.iter().all(|other| *other >= key), "{step} goes before a colder one");
            prop_assert!(!key.0 || taken.len() == going, "{step} goes beside others");
        }
        let grown = left.iter().filter(|(young, _)| !young).count();
        prop_assert!(going >= AT_ONCE || grown == 0, "{grown} more could go, {going} do");
        prop_assert!(going > 0 || left.is_empty(), "something goes while anything may");
        for (tenant, pool) in desired.pools() {
            let mine = |i: &&ObservedInstance| i.tenant == tenant.tenant_id && i.pool == pool.pool_id;
            let stay = observed.instances.iter().filter(mine).filter(is_left);
            let stay = stay.filter(|i| sleepable_from(&desired, i, now()).is_some()).count();
            let said = plan.deferred.iter().filter(|d| {
                d.tenant == tenant.tenant_id
                    && d.pool == pool.pool_id
                    && d.action == Action::Sleep
                    && d.reason.contains("memory pressure")
            });
            let said: u32 = said.map(|d| d.count).sum();
            prop_assert!(usize::try_from(said).unwrap() >= stay, "{said} of {stay}: {:?}", plan.deferred);
        }
    }

    #[test]
    fn what_goes_does_not_depend_on_where_its_pool_is_written((mut desired, mut observed) in fleet(GUARDED)) {
        observed.memory_pressure = true;
        crowd(&mut desired, &mut observed);
        let mut other = desired.clone();
        other.tenants.reverse();
        other.tenants.iter_mut().for_each(|tenant| tenant.pools.reverse());
        let [steps, others] = [&desired, &other].map(|desired| plan_node(desired, &observed, now()).steps)
            .map(|steps| steps.into_iter().filter(is_for_pressure).collect::<Vec<_>>());
        prop_assert_eq!(steps, others);
    }

    #[test]
    fn nothing_is_stopped_under_pressure_that_any_count_wants((desired, observed) in fleet(FREE)) {
        let mut world = World::new(observed, now());
        world.observed.memory_pressure = true;
        run_to_rest(&desired, &mut world, |before, after, step| {
            let instance = find(&before.observed.instances, step);
            let is_down = is_brought_back(&desired, instance);
            if step.action != Action::Stop || instance.staging.is_some() || is_down {
                return;
            }
            let Some(pool) = pool_of(&desired, find(&before.observed.instances, step)) else { return };
            let (running, warm, sleeping) = after.counts(&step.tenant, &step.pool);
            let wanted = &pool.desired_counts;
            assert!(
                running + warm + sleeping >= wanted.running + wanted.warm + wanted.sleeping,
                "{step}: {running} running, {warm} warm, {sleeping} sleeping are left"
            );
        });
    }
}
