//! The planner's laws where steps take time, fail and are cut short.

use std::time::Duration;

use crate::world::fleet::{Kinds, NOW_MS, cases, fleet};
use crate::world::slow::SlowWorld;
use crate::world::{fleet, limits};
use mvm_planner::{Action, NodePlan, plan_node};
use mvm_proto::{DesiredState, Phase, Timestamp};
use proptest::prelude::*;

const FREE: Kinds = Kinds { tight: false, guards: false, pressure: false };
const TIGHT: Kinds = Kinds { tight: true, guards: false, pressure: false };
/// How long the trouble lasts, and how many rounds may pass after it.
const TROUBLED_ROUNDS: usize = 40;
const CALM_ROUNDS: usize = 600;

fn start() -> Timestamp {
    Timestamp::from_unix_ms(NOW_MS)
}

/// Plans and begins steps while things go wrong.
fn live_through_trouble(desired: &DesiredState, world: &mut SlowWorld) {
    for _ in 0..TROUBLED_ROUNDS {
        let plan = plan_node(desired, &world.observed, world.now);
        let before = world.observed.clone();
        world.begin(desired, &plan, |world| limits::inside(desired, &before, &world.observed));
        world.trouble(desired);
        world.finish(desired, false, 4);
        world.now = world.now + Duration::from_secs(world.chance.below(20));
    }
}

/// Goes on until nothing is left to do. What is idle stays idle, and the clock goes from deadline to deadline.
fn settle_down(desired: &DesiredState, world: &mut SlowWorld) -> NodePlan {
    world.finish(desired, true, 0);
    world.calm();
    let mut trail = Vec::new();
    for _ in 0..CALM_ROUNDS {
        let plan = plan_node(desired, &world.observed, world.now);
        if plan.is_empty() && world.is_idle() {
            match plan.next_deadline {
                Some(at) if at.since(world.now) < Duration::from_secs(100 * 3600) => {
                    assert!(at > world.now, "a deadline lies ahead");
                    world.now = at;
                    continue;
                }
                _ => return plan,
            }
        }
        trail.push(plan.clone());
        let before = world.observed.clone();
        world.begin(desired, &plan, |world| limits::inside(desired, &before, &world.observed));
        world.now = world.now + Duration::from_secs(1);
        world.finish(desired, true, 0);
    }
    let tail: Vec<_> = trail.iter().rev().take(4).rev().collect();
    panic!("not at rest after {CALM_ROUNDS} rounds; the last plans were {tail:#?}");
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn after_any_trouble_the_desired_counts_are_reached((desired, observed) in fleet(FREE), seed in any::<u64>()) {
        let mut world = SlowWorld::new(observed, start(), seed);
        live_through_trouble(&desired, &mut world);
        let rest = settle_down(&desired, &mut world);
        for (tenant, pool) in desired.pools() {
            let of = |phase| {
                let mine = |i: &&mvm_planner::ObservedInstance| {
                    i.tenant == tenant.tenant_id && i.pool == pool.pool_id && i.phase == phase
                };
                u32::try_from(world.observed.instances.iter().filter(mine).count()).unwrap()
            };
            let wanted = &pool.desired_counts;
            prop_assert_eq!(
                (of(Phase::Running), of(Phase::Warm), of(Phase::Sleeping)),
                (wanted.running, wanted.warm, wanted.sleeping),
                "{}/{}: {:?}", tenant.tenant_id, pool.pool_id, rest
            );
        }
    }

    #[test]
    fn no_trouble_makes_a_plan_pass_a_limit_or_forget_to_rest(
        (desired, observed) in fleet(TIGHT), seed in any::<u64>()
    ) {
        let mut world = SlowWorld::new(observed, start(), seed);
        live_through_trouble(&desired, &mut world);
        settle_down(&desired, &mut world);
    }

    #[test]
    fn a_new_revision_never_takes_a_pool_below_its_running_count(
        (desired, _) in fleet(FREE), seed in any::<u64>()
    ) {
        let mut world = SlowWorld::new(Default::default(), start(), seed);
        world.observed.capacity = fleet::AMPLE_CAPACITY;
        settle_down(&desired, &mut world);
        let mut next = desired.clone();
        for tenant in &mut next.tenants {
            tenant.pools.iter_mut().for_each(|pool| pool.flake_ref = "builtin:next".to_owned());
        }
        let before: Vec<_> = world.observed.instances.iter().map(|i| i.id.clone()).collect();
        world.now = world.now + Duration::from_secs(3600);
        for _ in 0..CALM_ROUNDS {
            let plan = plan_node(&next, &world.observed, world.now);
            if plan.is_empty() && world.is_idle() && plan.deferred.is_empty() {
                break;
            }
            world.begin(&next, &plan, |_| {});
            for (tenant, pool) in next.pools() {
                let up = world.observed.instances.iter().filter(|i| {
                    i.tenant == tenant.tenant_id
                        && i.pool == pool.pool_id
                        && i.phase == Phase::Running
                        && i.moving_to.is_none()
                });
                let up = u32::try_from(up.count()).unwrap();
                prop_assert!(up >= pool.desired_counts.running, "{up} up: {plan:?}");
            }
            world.finish(&next, false, 0);
            world.now = world.now + Duration::from_secs(7);
        }
        // The same instances, all of the new revision.
        let after: Vec<_> = world
            .observed
            .instances
            .iter()
            .filter(|i| i.phase != Phase::Stopped)
            .map(|i| i.id.clone())
            .collect();
        prop_assert_eq!(after, before);
        prop_assert!(plan_node(&next, &world.observed, world.now).is_empty());
    }

    #[test]
    fn a_revision_that_never_starts_leaves_what_runs_alone((desired, _) in fleet(FREE), seed in any::<u64>()) {
        let mut world = SlowWorld::new(Default::default(), start(), seed);
        world.observed.capacity = fleet::AMPLE_CAPACITY;
        settle_down(&desired, &mut world);
        let mut bad = desired.clone();
        for tenant in &mut bad.tenants {
            tenant.pools.iter_mut().for_each(|pool| pool.flake_ref = "builtin:bad".to_owned());
        }
        world.now = world.now + Duration::from_secs(3600);
        let had = world.observed.instances.len();
        for _ in 0..60 {
            let plan = plan_node(&bad, &world.observed, world.now);
            world.begin(&bad, &plan, |_| {});
            for (step, id) in world.take_under_way() {
                let boots = matches!(step.action, Action::Create | Action::Start | Action::Replace);
                world.end(&bad, &step, &id, boots);
            }
            world.now = world.now + Duration::from_secs(20);
        }
        for (tenant, pool) in bad.pools() {
            let up = world.observed.instances.iter().filter(|i| {
                i.tenant == tenant.tenant_id && i.pool == pool.pool_id && i.phase == Phase::Running
            });
            prop_assert!(u32::try_from(up.count()).unwrap() >= pool.desired_counts.running);
        }
        prop_assert!(world.observed.instances.len() <= had + bad.pools().count(), "failures do not pile up");
    }
}
