//! Plans and carries plans out until nothing is left to do.

use std::time::Duration;

use mvm_planner::{NodePlan, Observation, Step, plan_node};
use mvm_proto::{DesiredState, Timestamp};

use super::fleet::NOW_MS;
use super::model::World;

pub(crate) fn now() -> Timestamp {
    Timestamp::from_unix_ms(NOW_MS)
}

/// Every instance may be staged, woken, put to rest, replaced and stopped once each, one pool slot at a time.
fn most_rounds(desired: &DesiredState, observed: &Observation) -> usize {
    let wanted: u32 = desired
        .pools()
        .map(|(_, pool)| {
            let counts = &pool.desired_counts;
            counts.running + counts.warm + counts.sleeping
        })
        .sum();
    20 + 8 * (usize::try_from(wanted).unwrap() + observed.instances.len())
}

/// Plans and carries out until nothing is left to do; time moves by a second a round, or to the next deadline.
pub(crate) fn run_to_rest(
    desired: &DesiredState,
    world: &mut World,
    each_step: impl FnMut(&World, &World, &Step),
) -> NodePlan {
    run_by(plan_node, desired, world, each_step)
}

pub(crate) type Plans = fn(&DesiredState, &Observation, Timestamp) -> NodePlan;

/// The same by another planner.
pub(crate) fn run_by(
    plans: Plans,
    desired: &DesiredState,
    world: &mut World,
    mut each_step: impl FnMut(&World, &World, &Step),
) -> NodePlan {
    let limit = most_rounds(desired, &world.observed);
    let begun = world.now;
    let mut trail = Vec::new();
    for round in 0..limit {
        let plan = plans(desired, &world.observed, world.now);
        if plan.is_empty() {
            match plan.next_deadline {
                // An hour without a deadline in it is rest.
                Some(at) if at < begun + Duration::from_secs(3 * 3600) => {
                    assert!(at > world.now, "a deadline lies ahead");
                    world.now = at;
                    continue;
                }
                _ => return plan,
            }
        }
        trail.push(plan.clone());
        let before = world.clone();
        // In an order that is not the plan's: no step may rely on another one.
        let mut steps = plan.steps;
        if round % 2 == 1 {
            steps.reverse();
        }
        for step in &steps {
            world.apply(desired, step);
            each_step(&before, world, step);
        }
        world.now = world.now + Duration::from_secs(1);
    }
    let tail: Vec<_> = trail.iter().rev().take(6).rev().collect();
    panic!("not at rest after {limit} rounds; the last plans were {tail:#?}");
}
