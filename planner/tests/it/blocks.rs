//! The laws of addresses: blocks of a tenant's subnet, net ids and subnets.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::blocks::{Block, BlockNode, assign_blocks};
use mvm_planner::fleet::networks::{NetworkError, REUSE_AFTER, Removal, TenantNetwork, allocate};
use mvm_proto::document::Subnet;
use mvm_proto::{NodeId, Timestamp};
use proptest::prelude::*;

use crate::world::blocks::{World, events, subnet};
use crate::world::fleet::cases;
use crate::world::placement::now;

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn no_block_is_with_two_nodes_and_no_address_exists_twice(subnet in subnet(), events in events()) {
        let mut world = World::new(subnet);
        for event in &events {
            world.happens(event);
            prop_assert_eq!(world.shared(), None, "after {:?}: {:?}", event, world);
            prop_assert_eq!(world.twice(), None, "after {:?}: {:?}", event, world);
        }
    }

    #[test]
    fn nodes_get_addresses_for_all_that_is_wanted_or_are_told_what_lacks(subnet in subnet(), events in events()) {
        let mut world = World::new(subnet);
        events.iter().for_each(|event| world.happens(event));
        world.converge();
        let plan = world.plan();
        let wanted: u32 = world.nodes.values().map(|node| node.instances).sum();
        for (id, node) in &world.nodes {
            let lacks = plan.exhausted.iter().find(|exhausted| exhausted.node == *id);
            if lacks.is_none() {
                prop_assert_eq!(world.running(id), usize::try_from(node.instances).unwrap(), "{} of {:?}", id, world);
            }
        }
        // Each node may leave the rest of a block unused, and an address that moved is reserved in its block.
        let partly = 15 * world.nodes.len() + world.elsewhere.len();
        let room = usize::try_from(subnet.instance_capacity()).unwrap();
        if !plan.exhausted.is_empty() {
            prop_assert!(usize::try_from(wanted).unwrap() + partly > room, "{:?}: {:?}", plan.exhausted, world);
        }
    }

    #[test]
    fn blocks_stay_where_they_are_while_nothing_changes(subnet in subnet(), events in events()) {
        let mut world = World::new(subnet);
        events.iter().for_each(|event| world.happens(event));
        let rounds = world.converge();
        prop_assert!(rounds <= 20, "{rounds} rounds: {world:?}");
        let blocks = |world: &World| {
            let current = |node: &BlockNode| node.offers.current().cloned().unwrap_or_default();
            world.nodes.values().map(current).collect::<Vec<_>>()
        };
        let before = blocks(&world);
        world.plan();
        prop_assert_eq!(&blocks(&world), &before);
        // One instance more or less on a node changes no other node's blocks, and takes none away.
        let was_full = !world.plan().exhausted.is_empty();
        if let Some(node) = world.nodes.values_mut().next().filter(|_| !was_full) {
            // The first instance brings the addresses for its bursts along.
            let burst = if node.instances == 0 { node.burst.div_ceil(16) as usize + 1 } else { 0 };
            node.instances += 1;
            let plan = world.plan();
            if plan.exhausted.is_empty() {
                let after = blocks(&world);
                prop_assert!(after[0].is_superset(&before[0]) && after[0].len() <= before[0].len() + 1 + burst);
                prop_assert_eq!(&after[1..], &before[1..]);
            }
        }
    }
}

/// A tenant alone on one node has addresses for what is placed there and for its bursts; they give way to what others lack.
#[test]
fn bursts_get_addresses_that_nothing_else_needs() {
    let subnet: Subnet = "10.1.0.0/26".parse().unwrap();
    let node = |instances, burst| BlockNode { instances, burst, ..BlockNode::default() };
    let blocks = |nodes: &BTreeMap<NodeId, BlockNode>| {
        let plan = assign_blocks(&subnet, nodes, &BTreeMap::new());
        assert!(plan.exhausted.is_empty(), "{:?}", plan.exhausted);
        plan.nodes.into_iter().map(|(id, given)| (id, given.blocks)).collect::<BTreeMap<_, _>>()
    };
    let (a, b): (NodeId, NodeId) = ("a".parse().unwrap(), "b".parse().unwrap());
    let mut nodes: BTreeMap<NodeId, BlockNode> = [(a.clone(), node(20, 30))].into();
    assert_eq!(blocks(&nodes)[&a], [0, 1, 2, 3].map(Block).into());
    nodes.get_mut(&a).unwrap().offers.offer((1, 1), [0, 1, 2, 3].map(Block).into());
    nodes.get_mut(&a).unwrap().offers.acknowledge((1, 1));
    nodes.insert(b.clone(), node(5, 0));
    let plan = assign_blocks(&subnet, &nodes, &BTreeMap::new());
    assert_eq!(plan.nodes[&a].blocks, [0, 1, 2].map(Block).into());
    assert_eq!(
        (plan.exhausted.len(), plan.nodes[&b].blocks.len()),
        (1, 0),
        "it waits until the other lets go"
    );
    nodes.get_mut(&a).unwrap().offers.offer((1, 2), plan.nodes[&a].blocks.clone());
    nodes.get_mut(&a).unwrap().offers.acknowledge((1, 2));
    assert_eq!(blocks(&nodes)[&b], [Block(3)].into());
}

#[test]
fn instances_really_move_in_the_worlds_of_the_laws() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut moved, mut exhausted) = (0, 0);
    for _ in 0..2500 {
        let (subnet, events) = (subnet(), events()).new_tree(&mut runner).unwrap().current();
        let mut world = World::new(subnet);
        events.iter().for_each(|event| world.happens(event));
        moved += world.moved;
        exhausted += usize::from(!world.plan().exhausted.is_empty());
    }
    assert!(moved > 30 && exhausted > 30, "{moved} moved, {exhausted} were exhausted");
}

#[test]
fn an_exhausted_subnet_is_told_with_its_numbers() {
    let subnet: Subnet = "10.1.0.0/26".parse().unwrap();
    let node = |instances| BlockNode { instances, ..BlockNode::default() };
    let nodes: BTreeMap<NodeId, BlockNode> =
        [("a", 40), ("b", 30)].map(|(id, instances)| (id.parse().unwrap(), node(instances))).into();
    let plan = assign_blocks(&subnet, &nodes, &BTreeMap::new());
    let told: Vec<String> = plan.exhausted.iter().map(ToString::to_string).collect();
    let expected = "b lacks 15 addresses for 30 instances: the subnet 10.1.0.0/26 has 4 blocks of 16, 4 are assigned and \
                    0 wait until nodes no longer use them";
    assert_eq!(told, [expected]);
    assert_eq!(plan.nodes[&"a".parse().unwrap()].blocks, [0, 1, 2].map(Block).into());
}

mod networks {
    use super::*;

    const NODES: usize = 3;

    #[derive(Debug, Clone)]
    enum Event {
        Create(Option<Subnet>),
        Delete(prop::sample::Index, BTreeSet<usize>),
        Confirm(prop::sample::Index, usize),
        Days(u64),
    }

    fn node_id(at: usize) -> NodeId {
        format!("node-{at}").parse().unwrap()
    }

    fn events() -> impl Strategy<Value = Vec<Event>> {
        let index = any::<prop::sample::Index>;
        let named = prop_oneof![
            Just("10.255.192.0/19"),
            Just("10.255.250.0/24"),
            Just("10.0.0.0/16"),
            Just("172.16.9.0/29")
        ];
        let named = proptest::option::weighted(0.3, named.prop_map(|text| text.parse().unwrap()));
        let event = prop_oneof![
            5 => named.prop_map(Event::Create),
            4 => (index(), proptest::collection::btree_set(0..NODES, 0..=NODES)).prop_map(|(w, n)| Event::Delete(w, n)),
            5 => (index(), 0..NODES).prop_map(|(which, node)| Event::Confirm(which, node)),
            3 => (1u64..25).prop_map(Event::Days),
        ];
        proptest::collection::vec(event, 0..40)
    }

    fn network(at: u16) -> TenantNetwork {
        let subnet = Subnet::default_of(u8::try_from(at).unwrap());
        TenantNetwork { tenant: format!("t-{at}").parse().unwrap(), net_id: at, subnet, removal: None }
    }

    /// All but a few default subnets are in use, so that they run out and are used again.
    fn crowded() -> Vec<TenantNetwork> {
        (0..250).map(network).collect()
    }

    proptest! {
        #![proptest_config(cases())]

        #[test]
        fn networks_overlap_no_other_and_are_used_again_only_30_days_after_all_nodes_confirmed(events in events()) {
            let mut networks = crowded();
            // Computed here a second time: who has not confirmed, and when the last one did.
            let mut ends: BTreeMap<usize, (BTreeSet<usize>, Timestamp)> = BTreeMap::new();
            let mut at = now();
            for event in events {
                match event {
                    Event::Days(days) => at = at + std::time::Duration::from_secs(days * 24 * 60 * 60),
                    Event::Delete(which, nodes) => {
                        let which = which.index(networks.len());
                        ends.entry(which).or_insert_with(|| {
                            networks[which].removal = Some(Removal::new(nodes.iter().map(|n| node_id(*n)).collect(), at));
                            (nodes, at)
                        });
                    }
                    Event::Confirm(which, node) if !ends.is_empty() => {
                        let which = which.index(ends.len());
                        let (which, (waiting, last)) = ends.iter_mut().nth(which).unwrap();
                        if waiting.remove(&node) {
                            *last = at;
                        }
                        networks[*which].removal.as_mut().unwrap().confirm(&node_id(node), at);
                    }
                    Event::Confirm(..) => {}
                    Event::Create(wanted) => {
                        let is_free = |which: usize| {
                            ends.get(&which).is_some_and(|(waiting, last)| waiting.is_empty() && at >= *last + REUSE_AFTER)
                        };
                        let taken: Vec<_> =
                            networks.iter().enumerate().filter(|(which, _)| !is_free(*which)).map(|(_, n)| n.clone()).collect();
                        let overlaps = |subnet: &Subnet| taken.iter().any(|other| other.subnet.overlaps(subnet));
                        match allocate(&networks, wanted, at) {
                            Ok((net_id, subnet)) => {
                                prop_assert!(!overlaps(&subnet), "{subnet}");
                                prop_assert!(taken.iter().all(|other| other.net_id != net_id), "{net_id}");
                                prop_assert!(wanted.is_none_or(|wanted| wanted == subnet));
                                let tenant = format!("new-{}", networks.len()).parse().unwrap();
                                networks.push(TenantNetwork { tenant, net_id, subnet, removal: None });
                            }
                            Err(NetworkError::Overlaps { wanted: named, .. }) => {
                                prop_assert!(wanted == Some(named) && overlaps(&named));
                            }
                            Err(NetworkError::Exhausted { .. }) => {
                                prop_assert!(wanted.is_none());
                                prop_assert!((0..=255).all(|number| overlaps(&Subnet::default_of(number))));
                            }
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn what_was_never_used_comes_first_then_what_rested_longest() {
        let mut networks: Vec<_> = (0..256).map(network).collect();
        let days = |days: u64| now() + std::time::Duration::from_secs(days * 24 * 60 * 60);
        let full = allocate(&networks, None, now()).unwrap_err();
        let expected = "all 256 /20 subnets of 10.240.0.0/12 are taken: 256 in use, 0 of deleted tenants that nodes have not \
                        confirmed, 0 of deleted tenants that rest for 30 days";
        assert_eq!(full.to_string(), expected);
        networks[9].removal = Some(Removal::new(BTreeSet::new(), days(0)));
        networks[5].removal = Some(Removal::new(BTreeSet::new(), days(1)));
        networks[3].removal = Some(Removal::new([node_id(0)].into(), days(0)));
        let resting = allocate(&networks, None, days(29)).unwrap_err().to_string();
        assert!(
            resting.contains("253 in use, 1 of deleted tenants that nodes have not confirmed, 2 of"),
            "{resting}"
        );
        assert!(resting.ends_with(&format!("the next is free at {}", days(30))), "{resting}");
        // Net ids are not exhausted, so none is used again; the subnet that has been free the longest is.
        assert_eq!(allocate(&networks, None, days(40)), Ok((256, Subnet::default_of(9))));
        let named = allocate(&networks, Some(Subnet::default_of(3)), days(40)).unwrap_err().to_string();
        let expected = "the subnet 10.240.48.0/20 overlaps 10.240.48.0/20 of the deleted tenant t-3, which node-0 and 0 more nodes \
                        have not confirmed";
        assert_eq!(named, expected);
    }

    #[test]
    fn all_4096_net_ids_are_given_before_one_is_used_again() {
        let subnet = |at: u16| format!("10.{}.{}.0/29", at / 256, at % 256).parse().unwrap();
        let gone = Removal::new(BTreeSet::new(), now());
        let mut networks: Vec<TenantNetwork> = (0..4096u16)
            .map(|at| TenantNetwork {
                tenant: format!("t-{at}").parse().unwrap(),
                net_id: at,
                subnet: subnet(at),
                removal: (at == 77).then(|| gone.clone()),
            })
            .collect();
        let later = now() + REUSE_AFTER;
        assert_eq!(allocate(&networks, None, later).unwrap().0, 77);
        let last = networks.pop().unwrap();
        assert_eq!(allocate(&networks, None, later).unwrap().0, 4095);
        networks.push(last);
        let error = allocate(&networks, None, now()).unwrap_err().to_string();
        assert!(error.starts_with("all 4096 net ids are taken: 4095 in use, 0 of"), "{error}");
    }
}
