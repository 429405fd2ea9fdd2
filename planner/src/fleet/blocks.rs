//! Which addresses of a tenant's subnet each node may give to instances: blocks of 16 offsets, on demand.
//!
//! A block is never with two nodes: it is taken out of a node's document first, and given to another once the node
//! acknowledged that and uses none of its addresses. An instance that moves keeps its address, so an offset may be in
//! use on another node than its block is with; the node that has the block then has the offset reserved.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use mvm_proto::NodeId;
use mvm_proto::document::Subnet;
use serde::{Deserialize, Serialize};

use super::offers::Offers;

/// How many offsets a block has. Those of the network, its gateway, its builder and its broadcast are not for instances.
pub const BLOCK_OFFSETS: u32 = 16;

/// The number of a block: it begins at 16 times this offset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Block(pub u32);

impl Block {
    /// The block that an offset is in.
    #[must_use]
    pub fn of(offset: u32) -> Self {
        Self(offset / BLOCK_OFFSETS)
    }

    /// Its offsets that are for instances.
    pub fn offsets(self, subnet: &Subnet) -> impl Iterator<Item = u32> + use<> {
        let instances = subnet.instance_offsets();
        let begin = self.0.saturating_mul(BLOCK_OFFSETS);
        (begin..begin.saturating_add(BLOCK_OFFSETS)).filter(move |offset| instances.contains(offset))
    }
}

/// A node where a tenant has, had or is to have instances.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockNode {
    /// The blocks that it may follow.
    pub offers: Offers<BTreeSet<Block>>,
    /// Blocks with an address that one of its instances has, as it said with its last acknowledgement or later. Without
    /// those of addresses that instances brought from elsewhere; with those of instances that have not left yet.
    pub in_use: BTreeSet<Block>,
    /// How many instances it is to have, and has beyond that.
    pub instances: u32,
    /// How many more may be started there for a while: it gets addresses for them as far as nothing else needs them.
    pub burst: u32,
    /// It was not heard of lately, and gives nothing back meanwhile.
    pub away: bool,
}

/// What a node's document is to say.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NodeBlocks {
    pub blocks: BTreeSet<Block>,
    /// Offsets in its blocks that instances on other nodes use.
    pub reserved: BTreeSet<u32>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct BlockPlan {
    pub nodes: BTreeMap<NodeId, NodeBlocks>,
    pub exhausted: Vec<BlocksExhausted>,
    /// Some node is to have more as soon as there is a block for it.
    pub waiting: bool,
}

/// A node lacks addresses, and its tenant's subnet has no block left for it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BlocksExhausted {
    pub node: NodeId,
    pub subnet: Subnet,
    /// How many blocks the subnet has, how many are in documents, and how many wait for nodes to let go of them.
    pub blocks: u32,
    pub assigned: usize,
    pub leaving: usize,
    pub instances: u32,
    pub lacking_addresses: u32,
}

impl fmt::Display for BlocksExhausted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { node, subnet, blocks, assigned, leaving, instances, lacking_addresses } = self;
        write!(
            f,
            "{node} lacks {lacking_addresses} addresses for {instances} instances: the subnet {subnet} has {blocks} blocks of \
             {BLOCK_OFFSETS}, {assigned} are assigned and {leaving} wait until nodes no longer use them"
        )
    }
}

impl std::error::Error for BlocksExhausted {}

/// Gives each node blocks for the instances that it is to have, and takes back what it does not need.
///
/// A node whose removal is confirmed is left out; its blocks are free then. `elsewhere` says for each offset that is not,
/// or soon not, used where its block is, on which node it is used: from when a move begins, so that the node with the
/// block follows its newest document, which has the reservation, before the instance leaves. An older document that is still on
/// its way may give the block to the node again without it.
#[must_use]
pub fn assign_blocks(
    subnet: &Subnet,
    nodes: &BTreeMap<NodeId, BlockNode>,
    elsewhere: &BTreeMap<u32, NodeId>,
) -> BlockPlan {
    let mut assigning = Assigning::new(subnet, nodes, elsewhere);
    for (id, node) in nodes {
        assigning.give_back(id, node.burst.max(BLOCK_OFFSETS));
    }
    let lacking: Vec<(NodeId, u32)> =
        nodes.keys().filter_map(|id| Some((id.clone(), assigning.grow(id, 0)?))).collect();
    assigning.take_back(lacking.iter().map(|(_, lacking)| *lacking).sum());
    let mut waiting = !lacking.is_empty();
    for (id, node) in nodes.iter().filter(|(_, node)| lacking.is_empty() && node.instances > 0 && !node.away)
    {
        waiting |= assigning.grow(id, node.burst).is_some();
    }
    BlockPlan { waiting, ..assigning.plan(lacking) }
}

struct Assigning<'a> {
    subnet: &'a Subnet,
    nodes: &'a BTreeMap<NodeId, BlockNode>,
    elsewhere: &'a BTreeMap<u32, NodeId>,
    /// What each node may follow, or still uses.
    held: BTreeMap<&'a NodeId, BTreeSet<Block>>,
    /// What is in no node's hands.
    free: BTreeSet<Block>,
    blocks: BTreeMap<&'a NodeId, BTreeSet<Block>>,
}

impl<'a> Assigning<'a> {
    fn new(
        subnet: &'a Subnet,
        nodes: &'a BTreeMap<NodeId, BlockNode>,
        elsewhere: &'a BTreeMap<u32, NodeId>,
    ) -> Self {
        let held = |node: &BlockNode| &node.offers.most().unwrap_or_default() | &node.in_use;
        let held: BTreeMap<_, _> = nodes.iter().map(|(id, node)| (id, held(node))).collect();
        let mut free: BTreeSet<Block> = (0..block_count(subnet)).map(Block).collect();
        for block in held.values().flatten() {
            free.remove(block);
        }
        let current = |node: &BlockNode| node.offers.current().cloned().unwrap_or_default();
        let blocks = nodes.iter().map(|(id, node)| (id, current(node))).collect();
        Self { subnet, nodes, elsewhere, held, free, blocks }
    }

    /// How many instances of a node a block has addresses for.
    fn room(&self, block: Block, id: &NodeId) -> u32 {
        let is_ours = |offset: &u32| self.elsewhere.get(offset).is_none_or(|at| at == id);
        u32::try_from(block.offsets(self.subnet).filter(is_ours).count()).unwrap_or(0)
    }

    /// How many addresses a node has, and how many it needs: instances that brought theirs need none.
    fn has_and_needs(&self, id: &NodeId) -> (u32, u32) {
        let Some((node, blocks)) = self.nodes.get(id).zip(self.blocks.get(id)) else { return (0, 0) };
        let has = blocks.iter().map(|block| self.room(*block, id)).sum();
        let brought =
            self.elsewhere.iter().filter(|(offset, at)| *at == id && !blocks.contains(&Block::of(**offset)));
        (has, node.instances.saturating_sub(u32::try_from(brought.count()).unwrap_or(0)))
    }

    /// The highest block that a node does not use and does not need; `spare` addresses more than it needs stay.
    fn needless(&self, id: &NodeId, spare: u32) -> Option<Block> {
        let (has, needs) = self.has_and_needs(id);
        let keeps = if needs == 0 { 0 } else { needs.saturating_add(spare) };
        let unused = |block: &&Block| !self.nodes[id].in_use.contains(block);
        let blocks = self.blocks.get(id)?.iter().rev().filter(unused);
        blocks.copied().find(|block| has.saturating_sub(self.room(*block, id)) >= keeps)
    }

    fn give_back(&mut self, id: &'a NodeId, spare: u32) {
        while let Some(block) = self.needless(id, spare) {
            self.blocks.entry(id).or_default().remove(&block);
        }
    }

    /// Gives a node blocks until it has enough for its instances and `more`. Says how many addresses it lacks if there are
    /// not enough of them.
    fn grow(&mut self, id: &'a NodeId, more: u32) -> Option<u32> {
        loop {
            let (has, needs) = self.has_and_needs(id);
            let needs = needs.saturating_add(more);
            if has >= needs {
                return None;
            }
            let blocks = self.blocks.get(id)?;
            // What it is giving up is still its own.
            let is_anothers =
                |block: &Block| self.held.iter().any(|(other, held)| *other != id && held.contains(block));
            let own =
                self.held.get(id)?.iter().filter(|block| !blocks.contains(block) && !is_anothers(block));
            let useful = |block: &&Block| self.room(**block, id) > 0;
            let Some(block) = own.chain(&self.free).find(useful).copied() else { return Some(needs - has) };
            self.free.remove(&block);
            self.blocks.entry(id).or_default().insert(block);
        }
    }

    /// Takes as many spare blocks out of documents as have the addresses that others lack.
    fn take_back(&mut self, lacking: u32) {
        let coming = |assigning: &Self, id: &NodeId| -> u32 {
            let in_use = &assigning.nodes[id].in_use;
            let gone = |block: &&Block| !assigning.blocks[id].contains(block) && !in_use.contains(block);
            let blocks = assigning.held.get(id).into_iter().flatten().filter(gone);
            blocks.map(|block| assigning.room(*block, id)).sum()
        };
        let present: Vec<&NodeId> =
            self.nodes.iter().filter(|(_, node)| !node.away).map(|(id, _)| id).collect();
        let mut missing = lacking.saturating_sub(present.iter().map(|id| coming(self, id)).sum());
        for id in present {
            while let Some(block) = self.needless(id, 0).filter(|_| missing > 0) {
                missing = missing.saturating_sub(self.room(block, id));
                self.blocks.entry(id).or_default().remove(&block);
            }
        }
    }

    fn plan(self, lacking: Vec<(NodeId, u32)>) -> BlockPlan {
        let assigned = self.blocks.values().map(BTreeSet::len).sum();
        let blocks = block_count(self.subnet);
        let taken = usize::try_from(blocks).unwrap_or(usize::MAX).saturating_sub(self.free.len());
        let exhausted = |(node, lacking_addresses): (NodeId, u32)| BlocksExhausted {
            subnet: *self.subnet,
            blocks,
            assigned,
            leaving: taken.saturating_sub(assigned),
            instances: self.nodes[&node].instances,
            lacking_addresses,
            node,
        };
        let exhausted = lacking.into_iter().map(exhausted).collect();
        let reserved = |id: &NodeId, blocks: &BTreeSet<Block>| {
            let is_reserved =
                |(offset, at): &(&u32, &NodeId)| *at != id && blocks.contains(&Block::of(**offset));
            self.elsewhere.iter().filter(is_reserved).map(|(offset, _)| *offset).collect()
        };
        let nodes = self.blocks.iter().map(|(id, blocks)| {
            ((*id).clone(), NodeBlocks { reserved: reserved(id, blocks), blocks: blocks.clone() })
        });
        BlockPlan { nodes: nodes.collect(), exhausted, waiting: false }
    }
}

fn block_count(subnet: &Subnet) -> u32 {
    Block::of(*subnet.instance_offsets().end()).0 + 1
}
