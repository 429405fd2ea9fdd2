//! The laws of placement, on random fleets and random changes to them.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::{Fleet, FleetPlan, Placed, Placer, PoolKey, Verdict, place};
use mvm_proto::document::DesiredCounts;
use proptest::prelude::*;

use crate::world::fleet::cases;
use crate::world::placement::{
    Change, change, fleet, instances, now, passed_in_truth, room_left, sum, tenant_use,
};

/// The fleet that a placer holds: what was declared, and what it placed.
fn held(declared: &Fleet, placer: &Placer) -> Fleet {
    Fleet { placed: placer.plan().placed, ..declared.clone() }
}

fn fleet_with_a_pool() -> impl Strategy<Value = Fleet> {
    fleet().prop_filter("a pool", |fleet| !fleet.pools.is_empty())
}

fn fleet_with_a_node() -> impl Strategy<Value = Fleet> {
    fleet().prop_filter("a node", |fleet| fleet.nodes.values().any(|node| node.away_since.is_none()))
}

/// How many instances of a pool are on each node, in whatever phase.
fn spread(placed: &Placed) -> BTreeMap<String, u64> {
    placed.iter().map(|(node, counts)| (node.to_string(), instances(counts))).collect()
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn what_is_placed_fits_its_nodes_and_its_tenants_quotas(fleet in fleet()) {
        let plan = place(&fleet, now());
        for (id, node) in &fleet.nodes {
            prop_assert!(room_left(&fleet, &plan.placed, id, node).is_some(), "{id} has too little room: {plan:?}");
        }
        for (id, tenant) in &fleet.tenants {
            prop_assert!(tenant_use(&fleet, &plan.placed, id).is_within(&tenant.quotas), "{id}: {plan:?}");
        }
        for (key, pool) in &fleet.pools {
            let total = sum(plan.placed.get(key));
            prop_assert!(total.running <= pool.counts.running && total.warm <= pool.counts.warm);
            prop_assert!(total.sleeping <= pool.counts.sleeping);
        }
    }

    #[test]
    fn nothing_is_placed_past_a_limit_that_what_nodes_still_have_and_claims_count_against(fleet in fleet()) {
        let plan = place(&fleet, now());
        prop_assert_eq!(passed_in_truth(&fleet, &plan.placed), None, "{:?}", plan);
    }

    #[test]
    fn what_is_not_placed_is_told_and_no_node_would_have_taken_it(fleet in fleet()) {
        let mut placer = Placer::of(&fleet);
        placer.settle(now());
        let plan = placer.plan();
        for (key, pool) in &fleet.pools {
            let total = sum(plan.placed.get(key));
            let lacks = DesiredCounts {
                running: pool.counts.running - total.running,
                warm: pool.counts.warm - total.warm,
                sleeping: pool.counts.sleeping - total.sleeping,
            };
            let told = plan.unplaced.get(key).map(|unplaced| unplaced.counts).unwrap_or_default();
            prop_assert_eq!(told, lacks);
            let explained = placer.explain(key).unwrap();
            prop_assert_eq!(explained.nodes.len(), fleet.nodes.len(), "every node has its verdict");
            if lacks.running > 0 && pool.placement.colocate.is_none() && explained.quota.is_none() {
                let refused = |verdict: &Verdict| matches!(verdict, Verdict::Refused(_));
                prop_assert!(explained.nodes.iter().all(|node| refused(&node.verdict)), "{explained:?}");
            }
            prop_assert!(plan.unplaced.get(key).is_none_or(|unplaced| !unplaced.reason.is_empty()));
        }
    }

    #[test]
    fn pools_get_only_nodes_that_suit_them(fleet in fleet()) {
        let plan = place(&fleet, now());
        for (key, placed) in &plan.placed {
            let placement = &fleet.pools[key].placement;
            for (id, counts) in placed {
                let node = &fleet.nodes[id];
                prop_assert!(!node.cordoned && node.away_since.is_none());
                for (label, value) in &placement.node_labels {
                    prop_assert_eq!(node.labels.get(label), Some(value));
                }
                let tolerated = |taint| placement.tolerations.iter().any(|t| t.tolerates(taint));
                prop_assert!(node.taints.iter().all(tolerated), "{key:?} on {id}");
                prop_assert!(placement.max_per_node.is_none_or(|max| instances(counts) <= u64::from(max)));
                for other in &placement.anti_affinity {
                    let other = PoolKey { tenant: key.tenant.clone(), pool: other.clone() };
                    let is_there = other != *key && plan.placed.get(&other).is_some_and(|p| p.contains_key(id));
                    prop_assert!(!is_there, "{key:?} is beside {other:?} on {id}");
                }
            }
            if let Some(group) = &placement.colocate {
                let of_group = |other: &PoolKey| {
                    other.tenant == key.tenant && fleet.pools[other].placement.colocate.as_ref() == Some(group)
                };
                let nodes: BTreeSet<_> =
                    plan.placed.iter().filter(|(other, _)| of_group(other)).flat_map(|(_, p)| p.keys()).collect();
                prop_assert!(nodes.len() <= 1, "the group {group} is on {nodes:?}");
            }
        }
    }

    #[test]
    fn a_spread_pool_keeps_its_skew_between_nodes(mut fleet in fleet()) {
        for node in fleet.nodes.values_mut() {
            node.cordoned = false;
            node.away_since = None;
            node.taints.clear();
        }
        let plan = place(&fleet, now());
        for (key, pool) in &fleet.pools {
            let Some(by_node) = pool.placement.spread.as_ref().filter(|spread| spread.by == "node") else { continue };
            if !pool.placement.node_labels.is_empty() {
                continue;
            }
            let counts = plan.placed.get(key).map(spread).unwrap_or_default();
            let count = |id: &mvm_proto::NodeId| counts.get(id.as_str()).copied().unwrap_or(0);
            let least = fleet.nodes.keys().map(count).min().unwrap_or(0);
            let most = fleet.nodes.keys().map(count).max().unwrap_or(0);
            prop_assert!(most <= least + u64::from(by_node.max_skew), "{key:?}: {counts:?}");
        }
    }

    #[test]
    fn a_settled_fleet_rests(fleet in fleet()) {
        let mut placer = Placer::of(&fleet);
        placer.settle(now());
        let plan = placer.plan();
        prop_assert_eq!(placer.settle(now()), BTreeSet::new());
        prop_assert_eq!(&placer.plan(), &plan);
        // The whole form agrees: where everything is is all there is to know.
        prop_assert_eq!(place(&held(&fleet, &placer), now()), plan);
    }

    #[test]
    fn placing_what_a_change_touches_places_as_placing_everything_does(
        mut declared in fleet(),
        changes in proptest::collection::vec(change(), 1..8),
    ) {
        let mut at = now();
        let mut placer = Placer::of(&declared);
        placer.settle(at);
        for change in changes {
            at = at + change.after();
            change.apply(&mut declared, Some(&mut placer), at);
            let whole = place(&held(&declared, &placer), at);
            let before = placer.plan().placed;
            let changed = placer.settle(at);
            let plan: FleetPlan = placer.plan();
            prop_assert_eq!(&plan, &whole, "after {:?}", change);
            let differ = |key: &&PoolKey| before.get(*key) != plan.placed.get(*key);
            let differing: BTreeSet<_> = declared.pools.keys().filter(differ).cloned().collect();
            // What left a removed node left before it settled.
            prop_assert!(differing.is_subset(&changed) , "{differing:?} {changed:?}");
        }
    }

    #[test]
    fn a_change_of_one_pool_moves_no_other(declared in fleet_with_a_pool(), counts in (0u32..6, 0u32..4, 0u32..4), which in 0usize..6) {
        let mut placer = Placer::of(&declared);
        placer.settle(now());
        let before = placer.plan();
        let key = declared.pools.keys().nth(which % declared.pools.len()).cloned().unwrap();
        let mut pool = declared.pools[&key].clone();
        pool.counts = DesiredCounts { running: counts.0, warm: counts.1, sleeping: counts.2 };
        placer.set_pool(&key, Some(pool));
        placer.settle(now());
        let after = placer.plan();
        for (other, placed) in before.placed.iter().filter(|(other, _)| **other != key) {
            // What had no room before may get what the change left; nothing that had a place loses it.
            for (id, had) in placed {
                let has = after.placed[other].get(id).copied().unwrap_or_default();
                prop_assert!(has.running >= had.running && has.warm >= had.warm && has.sleeping >= had.sleeping);
            }
        }
    }

    #[test]
    fn a_pool_that_only_grows_or_shrinks_moves_nothing(declared in fleet_with_a_pool(), more in 1u32..4, which in 0usize..6) {
        let mut placer = Placer::of(&declared);
        placer.settle(now());
        let key = declared.pools.keys().nth(which % declared.pools.len()).cloned().unwrap();
        let before = placer.placed(&key).cloned().unwrap_or_default();
        let mut pool = declared.pools[&key].clone();
        pool.counts.running += more;
        placer.set_pool(&key, Some(pool.clone()));
        placer.settle(now());
        let grown = placer.placed(&key).cloned().unwrap_or_default();
        for (id, had) in &before {
            prop_assert!(grown.get(id).is_some_and(|has| has.running >= had.running), "{before:?} {grown:?}");
        }
        // What had no place may find one when there is less of it.
        if !placer.plan().unplaced.contains_key(&key) {
            pool.counts.running = pool.counts.running.saturating_sub(more + 1);
            placer.set_pool(&key, Some(pool));
            placer.settle(now());
            let shrunk = placer.placed(&key).cloned().unwrap_or_default();
            for (id, has) in shrunk.iter().filter(|(_, has)| has.running > 0) {
                prop_assert!(grown.get(id).is_some_and(|had| has.running <= had.running), "{grown:?} {shrunk:?}");
            }
        }
    }

    #[test]
    fn a_lost_nodes_instances_move_after_its_grace_and_are_not_counted_twice(declared in fleet_with_a_node(), which in 0usize..5) {
        let mut placer = Placer::of(&declared);
        placer.settle(now());
        let before = placer.plan();
        let there: Vec<_> = declared.nodes.iter().filter(|(_, node)| node.away_since.is_none()).collect();
        let (id, mut node) = (there[which % there.len()].0.clone(), there[which % there.len()].1.clone());
        node.away_since = Some(now());
        placer.set_node(&id, Some(node.clone()));
        let grace = declared.away_grace.0;
        placer.settle(now() + (grace - std::time::Duration::from_millis(1)));
        for (key, placed) in &before.placed {
            let has = placer.placed(key).and_then(|placed| placed.get(&id));
            prop_assert_eq!(has, placed.get(&id), "before its grace nothing moves");
        }
        placer.settle(now() + grace);
        let on_it = |placer: &Placer| placer.plan().placed.values().filter(|placed| placed.contains_key(&id)).count();
        prop_assert_eq!(on_it(&placer), 0);
        node.away_since = None;
        placer.set_node(&id, Some(node));
        placer.settle(now() + grace);
        for (key, pool) in &declared.pools {
            let total = sum(placer.placed(key));
            prop_assert!(total.running <= pool.counts.running && total.warm <= pool.counts.warm);
            prop_assert!(total.sleeping <= pool.counts.sleeping);
        }
    }
}

/// Every kind of change does something in some world: a generator that does nothing proves nothing.
#[test]
fn changes_of_every_kind_are_tried() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let mut kinds = BTreeSet::new();
    for _ in 0..400 {
        let mut declared = fleet().new_tree(&mut runner).unwrap().current();
        let change: Change = change().new_tree(&mut runner).unwrap().current();
        let before = declared.clone();
        change.apply(&mut declared, None, now());
        if declared != before {
            kinds.insert(change.kind());
        }
    }
    assert_eq!(kinds.len(), Change::KINDS, "{kinds:?}");
}
