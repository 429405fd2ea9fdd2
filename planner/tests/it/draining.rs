//! The laws of draining a node, on random fleets.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::drain::{
    DrainPlan, MOVES_PER_NODE, Manners, Platform, Refused, Remains, Resident, Surroundings, Way, drain,
};
use mvm_planner::fleet::{Fleet, Placed, Placer, PoolKey};
use mvm_proto::document::DesiredCounts;
use mvm_proto::placement::TaintEffect;
use mvm_proto::{InstanceId, NodeId, Phase};
use proptest::prelude::*;

use crate::world::placement::{fleet, now};

/// What a case is made of beside the fleet: a source of small choices.
type Choices = Vec<u8>;

struct Case {
    fleet: Fleet,
    placer: Placer,
    node: NodeId,
    residents: Vec<Resident>,
    surroundings: Surroundings,
}

fn case(mut fleet: Fleet, choices: &Choices) -> Option<Case> {
    let mut next = choices.iter().copied().cycle();
    let mut choose = move |below: u8| next.next().unwrap_or(0) % below;
    // Without what nodes have beyond what is placed, so that a target's room can be reckoned here as well.
    fleet.nodes.values_mut().for_each(|node| node.beyond.clear());
    let mut placer = Placer::of(&fleet);
    placer.settle(now());
    let node = fleet.nodes.keys().find(|id| !placer.counts_on(id).is_empty())?.clone();
    let spec = fleet.nodes.get_mut(&node)?;
    spec.cordoned = true;
    placer.set_node(&node, Some(spec.clone()));
    placer.settle(now());
    let mut residents = Vec::new();
    for (key, counts) in placer.counts_on(&node) {
        let phases = [
            (Phase::Running, counts.running),
            (Phase::Warm, counts.warm),
            (Phase::Sleeping, counts.sleeping),
        ];
        for (phase, count) in phases {
            for _ in 0..count {
                if choose(8) == 0 {
                    continue; // It is not there yet.
                }
                let phase = if choose(9) == 0 { Phase::Stopped } else { phase };
                residents.push(Resident {
                    key: key.clone(),
                    id: InstanceId::from_bits(u32::try_from(residents.len()).unwrap() + 1),
                    phase,
                    has_disk: choose(3) == 0,
                    claimed: choose(9) == 0,
                    held_until: if choose(9) == 0 { "later".to_owned() } else { String::new() },
                    is_moving: false,
                });
            }
        }
    }
    let mut surroundings = Surroundings::default();
    for id in fleet.nodes.keys() {
        let lacking = if choose(8) == 0 { "it can't" } else { "" };
        let platform = Platform {
            driver: "qemu".to_owned(),
            accelerator: if choose(2) == 0 { "kvm" } else { "tcg" }.to_owned(),
            cpu: if choose(3) == 0 { "One" } else { "Two" }.to_owned(),
            lacking: lacking.to_owned(),
            ..Platform::default()
        };
        surroundings.platforms.insert(id.clone(), platform);
        surroundings.under_way.insert(id.clone(), usize::from(choose(6)));
    }
    for key in fleet.pools.keys() {
        let manners = Manners { pinned: choose(5) == 0, critical: choose(5) == 0 };
        surroundings.manners.insert(key.clone(), manners);
    }
    for one in &residents {
        if choose(4) == 0 {
            let at = usize::from(choose(5));
            let refused = fleet
                .nodes
                .keys()
                .nth(at)
                .map(|id| (id.clone(), Refused { reason: "it refused".to_owned(), lasting: true }));
            surroundings.refused.insert(one.id.clone(), refused.into_iter().collect());
        }
    }
    Some(Case { fleet, placer, node, residents, surroundings })
}

fn sum(placed: &Placed) -> DesiredCounts {
    placed.values().fold(DesiredCounts::default(), |sum, counts| DesiredCounts {
        running: sum.running + counts.running,
        warm: sum.warm + counts.warm,
        sleeping: sum.sleeping + counts.sleeping,
    })
}

fn sums(placer: &Placer) -> BTreeMap<PoolKey, DesiredCounts> {
    placer.plan().placed.iter().map(|(key, placed)| (key.clone(), sum(placed))).collect()
}

/// What is placed on a node needs of its processors, memory, disk and slots.
fn used(placer: &Placer, fleet: &Fleet, node: &NodeId) -> [u64; 4] {
    let mut used = [0; 4];
    for (key, counts) in placer.counts_on(node) {
        let size = fleet.pools[&key].resources;
        let [running, warm, sleeping] = [counts.running, counts.warm, counts.sleeping].map(u64::from);
        used[0] += u64::from(size.vcpus) * running;
        used[1] += size.mem_mib * (running + warm);
        used[2] += size.data_disk_mib * (running + warm + sleeping) + size.mem_mib * sleeping;
        used[3] += running + warm + sleeping;
    }
    used
}

fn room(fleet: &Fleet, node: &NodeId) -> [u64; 4] {
    let node = &fleet.nodes[node];
    let (capacity, over) = (node.capacity, node.overcommit);
    [
        u64::from(capacity.vcpus) * u64::from(over.vcpus_permille) / 1000,
        capacity.mem_mib * u64::from(over.mem_permille) / 1000,
        capacity.disk_mib,
        u64::from(capacity.max_instances),
    ]
}

fn counted(plan: &DrainPlan, of: impl Fn(&NodeId) -> usize, node: &NodeId) -> BTreeMap<NodeId, usize> {
    let mut all: BTreeMap<NodeId, usize> = BTreeMap::new();
    for begun in &plan.begin {
        for end in [node, &begun.to] {
            *all.entry(end.clone()).or_insert_with(|| of(end)) += 1;
        }
    }
    all
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 10_000, ..ProptestConfig::default() })]

    #[test]
    fn a_drain_keeps_all_counts_goes_where_there_is_room_and_accounts_for_everything(
        fleet in fleet(),
        choices in proptest::collection::vec(any::<u8>(), 24..80),
    ) {
        let Some(case) = case(fleet, &choices) else { return Ok(()) };
        let Case { fleet, placer: before, node, residents, surroundings } = case;
        let mut placer = before.clone();
        let plan = drain(&mut placer, &node, &residents, &surroundings, &|_| false);

        // Nothing is lost: every pool has as many in each phase as before.
        prop_assert_eq!(sums(&before), sums(&placer));
        // Minimal: this node alone gives, and others get just what it gave.
        for (key, placed) in &before.plan().placed {
            let after = placer.placed(key).cloned().unwrap_or_default();
            for id in fleet.nodes.keys() {
                let (was, is) = (placed.get(id).copied().unwrap_or_default(), after.get(id).copied().unwrap_or_default());
                let phases = [
                    (Phase::Running, was.running, is.running),
                    (Phase::Warm, was.warm, is.warm),
                    (Phase::Sleeping, was.sleeping, is.sleeping),
                ];
                for (phase, was, is) in phases {
                    let begun = |to: &NodeId| plan.begin.iter().filter(|b| b.key == *key && b.phase == phase && b.to == *to).count();
                    let gave: usize = if *id == node { fleet.nodes.keys().map(begun).sum() } else { 0 };
                    prop_assert_eq!(usize::try_from(is).unwrap() + gave, usize::try_from(was).unwrap() + begun(id));
                }
            }
        }
        for begun in &plan.begin {
            let (to, pool) = (&fleet.nodes[&begun.to], &fleet.pools[&begun.key]);
            prop_assert!(begun.to != node && !to.cordoned && to.away_since.is_none());
            for (label, value) in &pool.placement.node_labels {
                prop_assert_eq!(to.labels.get(label), Some(value));
            }
            for taint in &to.taints {
                prop_assert!(pool.placement.tolerations.iter().any(|t| t.tolerates(taint)), "{:?}", TaintEffect::Drain);
            }
            let most = used(&placer, &fleet, &begun.to);
            for (has, room) in most.into_iter().zip(room(&fleet, &begun.to)) {
                prop_assert!(has <= room, "{} has {most:?}", begun.to);
            }
            let Way::Move(id) = &begun.way else { continue };
            let one = residents.iter().find(|one| one.id == *id).unwrap();
            prop_assert!(one.phase == Phase::Sleeping || one.has_disk);
            prop_assert!(!one.claimed && one.held_until.is_empty());
            prop_assert!(!surroundings.refused.get(id).is_some_and(|nodes| nodes.contains_key(&begun.to)));
            let (here, there) = (&surroundings.platforms[&node], &surroundings.platforms[&begun.to]);
            prop_assert_eq!(&here.accelerator, &there.accelerator);
            prop_assert!(here.accelerator != "kvm" || here.cpu == there.cpu);
            prop_assert!(here.lacking.is_empty() && there.lacking.is_empty());
            let manners = surroundings.manners[&one.key];
            prop_assert!(one.phase == Phase::Sleeping || !(manners.pinned || manners.critical));
        }
        // Never more than so many at a time, at either end; what was under way before counts.
        let of = |id: &NodeId| surroundings.under_way[id];
        for (id, count) in counted(&plan, of, &node) {
            prop_assert!(count <= MOVES_PER_NODE, "{id} has {count}");
        }
        // Every instance that has something to lose goes or is told, once; and every place goes or is told.
        let gone: Vec<_> = plan.begin.iter().filter_map(|b| if let Way::Move(id) = &b.way { Some(id) } else { None }).collect();
        let told: Vec<_> = plan.left.iter().filter_map(|left| left.instance.as_ref()).collect();
        let all: BTreeSet<_> = gone.iter().chain(&told).copied().collect();
        prop_assert_eq!(all.len(), gone.len() + told.len());
        for one in residents.iter().filter(|one| one.phase == Phase::Sleeping || one.has_disk) {
            prop_assert!(all.contains(&one.id), "{:?} is not accounted for", one);
        }
        prop_assert!(plan.left.iter().all(|left| !left.reason.is_empty() && left.count > 0));
        let left: u32 = plan.left.iter().map(|left| left.count).sum();
        let remain: u32 = placer.counts_on(&node).values().map(|c| c.running + c.warm + c.sleeping).sum();
        prop_assert!(remain <= left, "{remain} places remain, {left} are told");
        // The same again is the same again.
        let mut again = before;
        prop_assert_eq!(drain(&mut again, &node, &residents, &surroundings, &|_| false), plan);
    }

    #[test]
    fn a_drain_goes_on_until_only_what_stays_or_waits_for_something_else_is_left(
        fleet in fleet(),
        choices in proptest::collection::vec(any::<u8>(), 24..80),
    ) {
        let Some(case) = case(fleet, &choices) else { return Ok(()) };
        let Case { mut placer, node, mut residents, mut surroundings, .. } = case;
        surroundings.under_way.clear();
        let places: u32 = placer.counts_on(&node).values().map(|c| c.running + c.warm + c.sleeping).sum();
        for _ in 0..=places {
            let plan = drain(&mut placer, &node, &residents, &surroundings, &|_| false);
            if plan.begin.is_empty() {
                let turn = |reason: &str| reason.contains("turn") || reason.contains("at a time");
                prop_assert!(plan.left.iter().all(|left| !turn(&left.reason)), "{:?}", plan.left);
                let stuck = plan.left.iter().filter(|left| left.remains == Remains::Stays);
                prop_assert!(stuck.into_iter().all(|left| !left.reason.is_empty()));
                return Ok(());
            }
            // All that was begun is done.
            for begun in &plan.begin {
                match &begun.way {
                    Way::Move(id) => residents.retain(|one| one.id != *id),
                    Way::Replace => {
                        let at = residents.iter().position(|one| one.key == begun.key && one.phase == begun.phase
                            && !one.has_disk && !one.claimed && one.held_until.is_empty());
                        at.into_iter().for_each(|at| drop(residents.remove(at)));
                    }
                    Way::Hand => {}
                }
            }
        }
        prop_assert!(false, "it never ends");
    }
}
