//! A tenant's instances with their addresses, on nodes that get their documents late and whose instances move.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::blocks::{Block, BlockNode, BlockPlan, NodeBlocks, assign_blocks};
use mvm_proto::NodeId;
use mvm_proto::document::Subnet;
use proptest::prelude::*;

const NODES: usize = 4;

fn node_id(at: usize) -> NodeId {
    format!("node-{at}").parse().unwrap()
}

#[derive(Debug, Clone)]
pub(crate) enum Event {
    /// So many instances are wanted on a node.
    Want(usize, u32),
    /// So many more may be started there for a while.
    Burst(usize, u32),
    Plan,
    /// The node accepts its newest document; it starts and ends instances as wanted.
    Accept(usize),
    /// The node's acknowledgement arrives, with the blocks that it uses.
    Acknowledge(usize),
    /// An instance of the first node is to move to the second, with its address.
    Move(usize, usize, prop::sample::Index),
    /// An instance that is to move does, if its node has reserved its address.
    Arrive(prop::sample::Index),
    Away(usize),
    Remove(usize),
}

pub(crate) fn events() -> impl Strategy<Value = Vec<Event>> {
    let index = any::<prop::sample::Index>;
    let event = prop_oneof![
        3 => (0..NODES, 0u32..40).prop_map(|(node, wanted)| Event::Want(node, wanted)),
        1 => (0..NODES, 0u32..40).prop_map(|(node, more)| Event::Burst(node, more)),
        6 => Just(Event::Plan),
        6 => (0..NODES).prop_map(Event::Accept),
        6 => (0..NODES).prop_map(Event::Acknowledge),
        6 => (0..NODES, 0..NODES, index()).prop_map(|(from, to, which)| Event::Move(from, to, which)),
        8 => index().prop_map(Event::Arrive),
        1 => (0..NODES).prop_map(Event::Away),
        1 => (0..NODES).prop_map(Event::Remove),
    ];
    proptest::collection::vec(event, 0..70)
}

pub(crate) fn subnet() -> impl Strategy<Value = Subnet> {
    prop_oneof![
        Just("10.1.0.0/29"),
        Just("10.1.0.0/27"),
        Just("10.1.0.0/26"),
        Just("10.1.0.0/24"),
        Just("10.1.0.0/20")
    ]
    .prop_map(|text| text.parse().unwrap())
}

/// What one node does, whatever the coordinator knows of it.
#[derive(Debug, Default, Clone)]
struct Truth {
    document: NodeBlocks,
    sent: Option<((u64, u64), NodeBlocks)>,
    accepted: Option<(u64, u64)>,
    /// The addresses of its instances.
    offsets: BTreeSet<u32>,
}

#[derive(Debug)]
pub(crate) struct World {
    subnet: Subnet,
    pub(crate) nodes: BTreeMap<NodeId, BlockNode>,
    truths: BTreeMap<NodeId, Truth>,
    pub(crate) elsewhere: BTreeMap<u32, NodeId>,
    documents: u64,
    /// How many instances moved with their address.
    pub(crate) moved: usize,
}

impl World {
    pub(crate) fn new(subnet: Subnet) -> Self {
        let nodes: BTreeMap<_, _> = (0..NODES).map(|at| (node_id(at), BlockNode::default())).collect();
        let truths = nodes.keys().map(|id| (id.clone(), Truth::default())).collect();
        Self { subnet, nodes, truths, elsewhere: BTreeMap::new(), documents: 0, moved: 0 }
    }

    pub(crate) fn happens(&mut self, event: &Event) {
        match event {
            Event::Want(node, wanted) => {
                if let Some(node) = self.nodes.get_mut(&node_id(*node)) {
                    node.instances = *wanted;
                }
            }
            Event::Burst(node, more) => {
                if let Some(node) = self.nodes.get_mut(&node_id(*node)) {
                    node.burst = *more;
                }
            }
            Event::Plan => drop(self.plan()),
            Event::Accept(node) => self.accept(&node_id(*node)),
            Event::Acknowledge(node) => self.acknowledge(&node_id(*node)),
            Event::Move(from, to, which) => self.begin_move(&node_id(*from), &node_id(*to), which),
            Event::Arrive(which) if !self.elsewhere.is_empty() => {
                let (offset, to) = self.elsewhere.iter().nth(which.index(self.elsewhere.len())).unwrap();
                let (offset, to) = (*offset, to.clone());
                self.arrive(offset, &to);
            }
            Event::Arrive(_) => {}
            Event::Away(node) => {
                if let Some(node) = self.nodes.get_mut(&node_id(*node)) {
                    node.away = !node.away;
                }
            }
            Event::Remove(node) => self.remove(&node_id(*node)),
        }
    }

    pub(crate) fn plan(&mut self) -> BlockPlan {
        let plan = assign_blocks(&self.subnet, &self.nodes, &self.elsewhere);
        for (id, blocks) in &plan.nodes {
            let truth = self.truths.get_mut(id).unwrap();
            let sent = truth.sent.as_ref().map(|(_, blocks)| blocks.clone()).unwrap_or_default();
            if sent != *blocks {
                self.documents += 1;
                self.nodes.get_mut(id).unwrap().offers.offer((1, self.documents), blocks.blocks.clone());
                truth.sent = Some(((1, self.documents), blocks.clone()));
            }
        }
        plan
    }

    fn accept(&mut self, id: &NodeId) {
        let (Some(node), Some(truth)) = (self.nodes.get(id), self.truths.get_mut(id)) else { return };
        if node.away {
            return;
        }
        if let Some((number, blocks)) = truth.sent.clone() {
            truth.accepted = Some(number);
            truth.document = blocks;
        }
        let wanted = usize::try_from(node.instances).unwrap();
        while truth.offsets.len() > wanted {
            let offset = truth.offsets.pop_last().unwrap();
            if self.elsewhere.get(&offset) == Some(id) {
                self.elsewhere.remove(&offset);
            }
        }
        // An instance that was to leave and is gone reserves nothing.
        let truths = self.truths.clone();
        self.elsewhere.retain(|offset, _| truths.values().any(|truth| truth.offsets.contains(offset)));
        let truth = self.truths.get_mut(id).unwrap();
        let document = truth.document.clone();
        let free = document.blocks.iter().flat_map(|block| block.offsets(&self.subnet));
        for offset in free.filter(|offset| !document.reserved.contains(offset)) {
            if truth.offsets.len() < wanted {
                truth.offsets.insert(offset);
            }
        }
    }

    fn acknowledge(&mut self, id: &NodeId) {
        let (Some(node), Some(truth)) = (self.nodes.get_mut(id), self.truths.get(id)) else { return };
        if let Some(number) = truth.accepted.filter(|_| !node.away) {
            node.offers.acknowledge(number);
            let own = truth.offsets.iter().filter(|offset| self.elsewhere.get(offset) != Some(id));
            node.in_use = own.map(|offset| Block::of(*offset)).collect();
        }
    }

    fn begin_move(&mut self, from: &NodeId, to: &NodeId, which: &prop::sample::Index) {
        let Some(truth) = self.truths.get(from).filter(|truth| !truth.offsets.is_empty()) else { return };
        let offset = *truth.offsets.iter().nth(which.index(truth.offsets.len())).unwrap();
        if from != to && self.nodes.contains_key(to) && !self.elsewhere.contains_key(&offset) {
            self.elsewhere.insert(offset, to.clone());
        }
    }

    /// It leaves once its node follows its newest document, and that reserves its address or does not have its block. A document
    /// that is still on its way may give the block back without the reservation.
    fn arrive(&mut self, offset: u32, to: &NodeId) {
        let leaves = |truth: &Truth| {
            let document = &truth.document;
            let is_safe =
                document.reserved.contains(&offset) || !document.blocks.contains(&Block::of(offset));
            let follows_newest = truth.sent.as_ref().map(|(number, _)| *number) == truth.accepted;
            truth.offsets.contains(&offset) && is_safe && follows_newest
        };
        let from =
            self.truths.iter().find(|(id, truth)| *id != to && leaves(truth)).map(|(id, _)| id.clone());
        if let (Some(from), true) = (from, self.truths.contains_key(to)) {
            self.truths.get_mut(&from).unwrap().offsets.remove(&offset);
            self.truths.get_mut(to).unwrap().offsets.insert(offset);
            self.moved += 1;
        }
    }

    /// The node is gone, and so is all that ran there.
    fn remove(&mut self, id: &NodeId) {
        self.nodes.remove(id);
        if let Some(truth) = self.truths.remove(id) {
            self.elsewhere.retain(|offset, _| !truth.offsets.contains(offset));
        }
        let gone: Vec<u32> =
            self.elsewhere.iter().filter(|(_, to)| *to == id).map(|(offset, _)| *offset).collect();
        for offset in gone {
            self.elsewhere.remove(&offset);
        }
    }

    pub(crate) fn converge(&mut self) -> usize {
        for node in self.nodes.values_mut() {
            node.away = false;
        }
        let ids: Vec<NodeId> = self.nodes.keys().cloned().collect();
        for round in 0..50 {
            let before = format!("{:?} {:?}", self.nodes, self.truths);
            self.plan();
            for id in &ids {
                self.accept(id);
                self.acknowledge(id);
            }
            for (offset, to) in self.elsewhere.clone() {
                self.arrive(offset, &to);
            }
            if format!("{:?} {:?}", self.nodes, self.truths) == before {
                return round;
            }
        }
        usize::MAX
    }

    /// An address that two instances have.
    pub(crate) fn twice(&self) -> Option<u32> {
        let mut seen = BTreeSet::new();
        self.truths.values().flat_map(|truth| &truth.offsets).copied().find(|offset| !seen.insert(*offset))
    }

    /// A block that is in what two nodes may follow.
    pub(crate) fn shared(&self) -> Option<Block> {
        let mut seen = BTreeSet::new();
        let held = self.nodes.values().flat_map(|node| node.offers.most().unwrap_or_default());
        let mut followed = BTreeSet::new();
        let in_truth = self.truths.values().flat_map(|truth| &truth.document.blocks);
        held.into_iter()
            .find(|block| !seen.insert(*block))
            .or(in_truth.copied().find(|block| !followed.insert(*block)))
    }

    /// How many instances run on a node.
    pub(crate) fn running(&self, id: &NodeId) -> usize {
        self.truths[id].offsets.len()
    }
}
