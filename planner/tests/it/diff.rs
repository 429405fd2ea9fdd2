//! The difference of two plans, and what machines are lacking or not needed.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::Capacity;
use mvm_planner::fleet::diff::{ChangeAction, Difference, difference};
use mvm_planner::fleet::{
    AWAY_GRACE, Fleet, FleetNode, FleetPool, FleetTenant, Overcommit, Placer, PoolKey, place,
};
use mvm_proto::NodeId;
use mvm_proto::document::{DesiredCounts, PoolRole, Quotas, Resources};
use mvm_proto::placement::{Placement, Taint, TaintEffect};
use proptest::prelude::*;

use crate::world::fleet::cases;
use crate::world::placement::{change, fleet, instances, now, sum};

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_difference_applied_to_what_was_placed_gives_what_is(
        mut declared in fleet(), changes in proptest::collection::vec(change(), 0..5),
    ) {
        let mut before = declared.clone();
        before.placed = place(&before, now()).placed;
        let mut at = now();
        for change in &changes {
            at = at + change.after();
            change.apply(&mut declared, None, at);
        }
        declared.placed = before.placed.clone();
        // Instances of pools and on nodes that are gone are not placed any more.
        declared.placed.retain(|key, _| declared.pools.contains_key(key));
        declared.placed.values_mut().for_each(|placed| placed.retain(|id, _| declared.nodes.contains_key(id)));
        let plan = place(&declared, at);
        let difference = difference(&before, &declared, &plan, at);
        prop_assert_eq!(difference.changes.is_empty(), before.placed == plan.placed);
        prop_assert_eq!(difference.apply(&before.placed), plan.placed);
        prop_assert_eq!(difference.unplaced.len(), plan.unplaced.len());
        for change in &difference.changes {
            prop_assert!(change.count > 0 && !change.reason.is_empty(), "{change:?}");
            // What is stopped somewhere and started elsewhere is told as one move.
            if let ChangeAction::Start { phase, .. } = &change.action {
                let stops = |other: &&mvm_planner::fleet::diff::Change| {
                    (&other.tenant, &other.pool) == (&change.tenant, &change.pool)
                        && matches!(&other.action, ChangeAction::Stop { phase: stopped, .. } if stopped == phase)
                };
                prop_assert_eq!(difference.changes.iter().find(stops), None);
            }
        }
        let lines = difference.to_string().lines().count();
        prop_assert_eq!(lines, (difference.changes.len() + difference.unplaced.len()).max(1));
    }

    #[test]
    fn more_nodes_of_the_shapes_in_demand_place_exactly_what_was_in_demand(mut declared in fleet()) {
        for pool in declared.pools.values_mut() {
            pool.placement.colocate = None;
            pool.placement.spread = pool.placement.spread.take().filter(|spread| spread.by == "node");
        }
        let mut placer = Placer::of(&declared);
        placer.settle(now());
        let (before, demand) = (placer.plan(), placer.demand());
        let wanted: u64 = demand.iter().map(|demand| instances(&demand.counts)).sum();
        for zone in ["x", "y"] {
            for number in 0..=wanted {
                let node = FleetNode { labels: [("zone".to_owned(), zone.to_owned())].into(), ..large_node() };
                placer.set_node(&format!("new-{zone}-{number}").parse().unwrap(), Some(node));
            }
        }
        placer.settle(now());
        prop_assert_eq!(placer.demand(), vec![]);
        let after = placer.plan();
        let mut placed: BTreeMap<_, DesiredCounts> = BTreeMap::new();
        for (key, pool) in &declared.pools {
            let (had, has) = (sum(before.placed.get(key)), sum(after.placed.get(key)));
            let shape = (pool.resources.vcpus, pool.resources.mem_mib, pool.placement.node_labels.clone());
            let counts = placed.entry(shape).or_default();
            counts.running += has.running - had.running;
            counts.warm += has.warm - had.warm;
            counts.sleeping += has.sleeping - had.sleeping;
        }
        placed.retain(|_, counts| *counts != DesiredCounts::default());
        let told: BTreeMap<_, _> =
            demand.into_iter().map(|d| ((d.vcpus, d.mem_mib, d.node_labels), d.counts)).collect();
        prop_assert_eq!(told, placed);
    }

    #[test]
    fn empty_nodes_are_there_and_have_nothing(declared in fleet()) {
        let mut placer = Placer::of(&declared);
        placer.settle(now());
        let placed = placer.plan().placed;
        let told: BTreeSet<NodeId> = placer.empty_nodes().into_iter().map(|empty| empty.node).collect();
        let is_empty = |(id, node): &(&NodeId, &FleetNode)| {
            node.away_since.is_none() && node.beyond.is_empty() && placed.values().all(|placed| !placed.contains_key(*id))
        };
        let expected: BTreeSet<NodeId> = declared.nodes.iter().filter(is_empty).map(|(id, _)| id.clone()).collect();
        prop_assert_eq!(told, expected);
    }
}

fn large_node() -> FleetNode {
    FleetNode {
        labels: BTreeMap::new(),
        taints: BTreeSet::new(),
        cordoned: false,
        away_since: None,
        capacity: Capacity { vcpus: 1000, mem_mib: 1_000_000, disk_mib: 1_000_000, max_instances: 1000 },
        overcommit: Overcommit { vcpus_permille: 1000, mem_permille: 1000 },
        images: BTreeSet::new(),
        beyond: BTreeMap::new(),
    }
}

fn key() -> PoolKey {
    PoolKey { tenant: "acme".parse().unwrap(), pool: "workers".parse().unwrap() }
}

/// Three workers of one vCPU on nodes a and b, which take two each.
fn small() -> Fleet {
    let quotas = Quotas {
        max_vcpus: 4,
        max_mem_mib: 100_000,
        max_running: 100,
        max_warm: 100,
        max_pools: 10,
        max_instances_per_pool: 100,
        max_disk_gib: 100,
    };
    let mut fleet = Fleet::default();
    fleet.tenants.insert(key().tenant, FleetTenant { quotas });
    for id in ["a", "b"] {
        let node = FleetNode { capacity: Capacity { vcpus: 2, ..large_node().capacity }, ..large_node() };
        fleet.nodes.insert(id.parse().unwrap(), node);
    }
    let pool = FleetPool {
        resources: Resources { vcpus: 1, mem_mib: 256, data_disk_mib: 0 },
        counts: DesiredCounts { running: 3, ..DesiredCounts::default() },
        image: None,
        role: PoolRole::Worker,
        critical: false,
        placement: Placement::default(),
    };
    fleet.pools.insert(key(), pool);
    fleet
}

/// What changes when this is done to the small fleet, as people read it.
fn told(change: impl FnOnce(&mut Fleet)) -> (String, Difference) {
    let mut before = small();
    before.placed = place(&before, now()).placed;
    let mut after = before.clone();
    change(&mut after);
    let at = now() + AWAY_GRACE;
    let difference = difference(&before, &after, &place(&after, at), at);
    (difference.to_string(), difference)
}

#[test]
fn every_change_has_its_reason_in_plain_words() {
    let node = |id: &str| -> NodeId { id.parse().unwrap() };
    let pool = |fleet: &mut Fleet, running| fleet.pools.get_mut(&key()).unwrap().counts.running = running;
    let add_c = |fleet: &mut Fleet| drop(fleet.nodes.insert("c".parse().unwrap(), large_node()));
    assert_eq!(told(|_| {}).0, "nothing changes\n");
    assert_eq!(
        told(|fleet| pool(fleet, 4)).0,
        "acme/workers: b: 1 more running (pool grew from 3 to 4 running)\n"
    );
    assert_eq!(
        told(|fleet| pool(fleet, 2)).0,
        "acme/workers: a: 1 fewer running (pool shrank from 3 to 2 running)\n"
    );
    let beyond_quota = told(|fleet| {
        add_c(fleet);
        pool(fleet, 5);
    });
    let quota = "quota of tenant acme: max_vcpus is 4: 4 in use, 1 more needed";
    let expected = format!(
        "acme/workers: c: 1 more running (pool grew from 3 to 5 running)\n\
         acme/workers: no place for 1 running, 0 warm, 0 sleeping ({quota})\n"
    );
    assert_eq!(beyond_quota.0, expected);
    let away = told(|fleet| {
        add_c(fleet);
        fleet.nodes.get_mut(&node("b")).unwrap().away_since = Some(now());
    });
    let expected = format!("acme/workers: 1 running move from b to c (b is away since {})\n", now());
    assert_eq!(away.0, expected);
    let drained = told(|fleet| {
        add_c(fleet);
        let taint = Taint { key: "repair".to_owned(), value: "disk".to_owned(), effect: TaintEffect::Drain };
        fleet.nodes.get_mut(&node("a")).unwrap().taints.insert(taint);
    });
    let reason = "(a is drained: it has the taint repair=disk)";
    assert_eq!(drained.0, format!("acme/workers: 2 running move from a to c {reason}\n"));
    let removed = told(|fleet| {
        fleet.nodes.remove(&node("b"));
        fleet.placed.values_mut().for_each(|placed| placed.retain(|id, _| *id != node("b")));
    });
    assert!(removed.0.starts_with("acme/workers: b: 1 fewer running (b was removed)\n"), "{}", removed.0);
    let asleep = told(|fleet| {
        fleet.pools.get_mut(&key()).unwrap().counts = DesiredCounts { running: 2, warm: 0, sleeping: 1 };
    });
    let reason = "(the pool's counts changed: 3 to 2 running, 0 to 1 sleeping)";
    assert_eq!(asleep.0, format!("acme/workers: a: 1 from running to sleeping {reason}\n"));
    let gone = told(|fleet| {
        fleet.pools.clear();
        fleet.placed.clear();
    });
    assert_eq!(gone.0.lines().next(), Some("acme/workers: a: 2 fewer running (the pool was removed)"));
    let smaller = told(|fleet| {
        add_c(fleet);
        fleet.nodes.get_mut(&node("a")).unwrap().capacity.vcpus = 1;
    });
    assert!(smaller.0.ends_with("(a has no room for all that was placed on it)\n"), "{}", smaller.0);
}

#[test]
fn a_difference_is_json_for_programs() {
    let (_, difference) = told(|fleet| {
        fleet.nodes.insert("c".parse().unwrap(), large_node());
        fleet.nodes.get_mut(&"b".parse::<NodeId>().unwrap()).unwrap().away_since = Some(now());
    });
    let expected = serde_json::json!({
        "changes": [{
            "tenant": "acme", "pool": "workers", "count": 1,
            "action": "move", "from": "b", "to": "c", "phase": "running",
            "reason": format!("b is away since {}", now()),
        }],
        "unplaced": [],
    });
    assert_eq!(serde_json::to_value(&difference).unwrap(), expected);
}

#[test]
fn machines_are_in_demand_for_what_quotas_allow_only() {
    let mut fleet = small();
    fleet.pools.get_mut(&key()).unwrap().counts.running = 10;
    fleet.nodes.remove(&"b".parse::<NodeId>().unwrap());
    let mut placer = Placer::of(&fleet);
    placer.settle(now());
    let demand = serde_json::to_value(placer.demand()).unwrap();
    let counts = serde_json::json!({ "running": 2, "warm": 0, "sleeping": 0 });
    let expected = serde_json::json!([{ "vcpus": 1, "mem_mib": 256, "node_labels": {}, "counts": counts }]);
    assert_eq!(demand, expected, "two of ten are placed, and the quota allows four");
}
