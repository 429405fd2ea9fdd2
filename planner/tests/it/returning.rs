//! What is lost with a node, when it moves, and what happens when the node returns.

use std::time::Duration;

use mvm_planner::fleet::{Fleet, Placer};
use proptest::prelude::*;

use crate::world::fleet::cases;
use crate::world::placement::{fleet, now, sum};
use crate::world::returning::{World, events};

fn fleet_with_nodes() -> impl Strategy<Value = Fleet> {
    fleet().prop_filter("a node", |fleet| !fleet.nodes.is_empty())
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn what_really_runs_passes_no_limit_while_nodes_are_lost_and_return(fleet in fleet_with_nodes(), events in events()) {
        let mut world = World::new(fleet, now());
        for event in &events {
            world.happens(event);
            prop_assert_eq!(world.passed(), None, "after {:?}: {:?}", event, world);
        }
    }

    #[test]
    fn a_fleet_whose_nodes_all_returned_runs_what_is_placed_and_nothing_twice(fleet in fleet_with_nodes(), events in events()) {
        let mut world = World::new(fleet, now());
        events.iter().for_each(|event| world.happens(event));
        let rounds = world.converge();
        prop_assert!(rounds < 20, "{rounds} rounds: {world:?}");
        let placed = world.placer.plan().placed;
        prop_assert_eq!(&world.in_truth(), &placed);
        for (key, pool) in &world.fleet.pools {
            let total = sum(placed.get(key));
            prop_assert!(total.running <= pool.counts.running && total.warm <= pool.counts.warm);
            prop_assert!(total.sleeping <= pool.counts.sleeping);
        }
    }

    #[test]
    fn the_grace_of_a_node_starts_at_the_election_if_that_is_later(
        fleet in fleet_with_nodes(), away in 0u64..10_000, elected in 0u64..10_000, which in 0usize..5,
    ) {
        let mut fleet = World::new(fleet, now()).fleet;
        fleet.elected_at = None;
        let mut placer = Placer::of(&fleet);
        placer.settle(now());
        let id = fleet.nodes.keys().nth(which % fleet.nodes.len()).unwrap().clone();
        let mut node = fleet.nodes[&id].clone();
        let (away, elected) = (now() + Duration::from_secs(away), now() + Duration::from_secs(elected));
        node.away_since = Some(away);
        placer.set_elected_at(elected);
        placer.set_node(&id, Some(node));
        let before = placer.plan().placed;
        let ends = away.max(elected) + fleet.away_grace.0;
        placer.settle(ends - Duration::from_millis(1));
        for (key, placed) in &before {
            prop_assert_eq!(placer.placed(key).and_then(|placed| placed.get(&id)), placed.get(&id));
        }
        placer.settle(ends);
        prop_assert!(placer.plan().placed.values().all(|placed| !placed.contains_key(&id)));
    }
}

#[test]
fn nodes_are_really_doubled_in_the_worlds_of_the_laws() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut doubles = 0;
    for _ in 0..2000 {
        let (fleet, events) = (fleet_with_nodes(), events()).new_tree(&mut runner).unwrap().current();
        let mut world = World::new(fleet, now());
        events.iter().for_each(|event| world.happens(event));
        doubles += world.doubles;
    }
    assert!(doubles > 20, "{doubles}");
}
