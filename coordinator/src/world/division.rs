//! What each node gets of a tenant's quotas and addresses: [`mvm_planner::fleet::shares`] and
//! [`mvm_planner::fleet::blocks`] decide it, from what is placed and from what nodes may be following.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::blocks::{Block, BlockNode, BlockPlan, BlocksExhausted, NodeBlocks, assign_blocks};
use mvm_planner::fleet::shares::{NO_SHARE, PoolNeed, ShareNode, ShareShort, shares};
use mvm_planner::fleet::{Beyond, PoolKey};
use mvm_proto::document::{DesiredCounts, Network, Quotas, Resources, Tenant};
use mvm_proto::{NodeId, TenantId, Timestamp};

use super::moves::Adjusted;
use super::offered::{NodeOffers, TenantOffers};
use super::{TenantEntry, World};
use crate::records::Numbers;
use crate::render::RenderedTenant;

/// What the nodes of a tenant are to have of it.
#[derive(Debug, Clone, Default)]
pub(crate) struct Division {
    nodes: BTreeMap<NodeId, (Quotas, NodeBlocks)>,
    short: Vec<ShareShort>,
    exhausted: Vec<BlocksExhausted>,
    /// Some node is to have more as soon as others let go of it.
    waiting: bool,
}

impl Division {
    /// What a node is to have.
    pub(super) fn of(&self, node: &NodeId) -> Option<&(Quotas, NodeBlocks)> {
        self.nodes.get(node)
    }

    /// What nodes lack, of those that are asked for.
    fn lacking(&self, is_asked: impl Fn(&NodeId) -> bool) -> Vec<Lacking> {
        let lacking = |reason, node: &NodeId, message| Lacking { node: node.clone(), reason, message };
        let short = self.short.iter().map(|short| lacking("ShareShort", &short.node, short.reason.clone()));
        let exhausted = self.exhausted.iter();
        let exhausted = exhausted.map(|lacks| lacking("AddressesExhausted", &lacks.node, lacks.to_string()));
        short.chain(exhausted).filter(|lacking| is_asked(&lacking.node)).collect()
    }
}

/// What a node has less of than what is placed on it needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Lacking {
    pub(crate) node: NodeId,
    /// For programs.
    pub(crate) reason: &'static str,
    /// For people.
    pub(crate) message: String,
}

/// Both are there while a revision is rolled out.
fn larger(a: Resources, b: Resources) -> Resources {
    Resources {
        vcpus: a.vcpus.max(b.vcpus),
        mem_mib: a.mem_mib.max(b.mem_mib),
        data_disk_mib: a.data_disk_mib.max(b.data_disk_mib),
    }
}

impl World {
    /// What the nodes that a pool is placed on lack of its tenant's quotas and addresses.
    pub(crate) fn lacking(&self, key: &PoolKey) -> Vec<Lacking> {
        let has = |node: &NodeId| {
            let counts = self.stored.get(key).and_then(|placed| placed.get(node));
            counts.is_some_and(|counts| *counts != DesiredCounts::default())
        };
        self.divisions.get(&key.tenant).map(|division| division.lacking(has)).unwrap_or_default()
    }

    /// What any node lacks of a tenant's quotas and addresses.
    pub(crate) fn tenant_lacking(&self, tenant: &TenantId) -> Vec<Lacking> {
        self.divisions.get(tenant).map(|division| division.lacking(|_| true)).unwrap_or_default()
    }

    /// Of each tenant with a subnet: how many instances are placed, and how many addresses it has for them.
    pub(crate) fn addresses(&self) -> Vec<(u64, u64)> {
        let count = |counts: &DesiredCounts| {
            u64::from(counts.running) + u64::from(counts.warm) + u64::from(counts.sleeping)
        };
        let of_tenant = |(id, entry): (&TenantId, &TenantEntry)| {
            let subnet = entry.rendered.as_ref()?.network.ipv4_subnet;
            let pools = self.pools_of.get(id).into_iter().flatten();
            let placed =
                pools.filter_map(|pool| self.stored.get(&PoolKey { tenant: id.clone(), pool: pool.clone() }));
            let used = placed.flat_map(BTreeMap::values).map(count).sum();
            Some((used, u64::from(subnet.instance_capacity())))
        };
        self.tenants.iter().filter_map(of_tenant).collect()
    }

    /// Divides what is to be divided anew. The nodes whose documents are to say something else are touched.
    pub(super) fn divide_all(&mut self, now: Timestamp) {
        for tenant in std::mem::take(&mut self.undivided) {
            self.divide(&tenant, now);
        }
    }

    fn divide(&mut self, id: &TenantId, now: Timestamp) {
        let Some(entry) = self.tenants.get(id) else {
            self.divisions.remove(id);
            return;
        };
        let (nodes, lost) = self.share_nodes(id, now);
        let shared = shares(id, &Quotas::from(entry.spec.quotas), &nodes);
        let mut division = Division { short: shared.short, waiting: shared.waiting, ..Division::default() };
        let mut blocks = entry.rendered.as_ref().map(|rendered| self.blocks(id, rendered, &nodes));
        if let Some(plan) = &mut blocks {
            division.exhausted = std::mem::take(&mut plan.exhausted);
            division.waiting |= plan.waiting;
        }
        for (node, share) in shared.shares {
            let blocks = blocks.as_mut().and_then(|plan| plan.nodes.remove(&node)).unwrap_or_default();
            division.nodes.insert(node, (share, blocks));
        }
        self.lost.extend(lost);
        self.decided(id, division);
    }

    /// The nodes where a tenant has, had or is to have something, and those of them that are lost.
    fn share_nodes(&self, id: &TenantId, now: Timestamp) -> (BTreeMap<NodeId, ShareNode>, Vec<NodeId>) {
        let mut nodes: BTreeMap<NodeId, ShareNode> = BTreeMap::new();
        for pool in self.pools_of.get(id).into_iter().flatten() {
            let key = PoolKey { tenant: id.clone(), pool: pool.clone() };
            let Some(spec) = self.pools.get(&key).map(|entry| &entry.spec) else { continue };
            let placed = self.stored.get(&key).into_iter().flatten();
            let placed = placed.map(|(node, counts)| (node, *counts));
            let moving = self.moves.ends_of(id).filter(|(moved, _)| *moved == key).map(|(_, node)| node);
            let moving =
                moving.filter(|node| self.stored.get(&key).is_none_or(|all| !all.contains_key(*node)));
            let moving: BTreeSet<&NodeId> = moving.collect();
            let all = placed.chain(moving.iter().map(|node| (*node, DesiredCounts::default())));
            let all = all.map(|(node, counts)| {
                (node, counts, self.moves.adjust(&key, node, counts, Adjusted::Quotas))
            });
            for (node, _, counts) in all.filter(|(node, placed, counts)| {
                *placed != DesiredCounts::default() || *counts != *placed || moving.contains(node)
            }) {
                let (named, _) = self.rollouts.spec_for(&key, node, spec);
                let resources = larger(spec.resources.into(), named.resources.into());
                let need = PoolNeed { resources, placed: counts, claimed: DesiredCounts::default() };
                nodes.entry(node.clone()).or_default().pools.insert(pool.clone(), need);
            }
        }
        for node in self.offered.nodes_of(id) {
            nodes.entry(node.clone()).or_default();
        }
        let mut lost = Vec::new();
        for (node, share) in &mut nodes {
            share.offers = self.offered.of(node, id).map(|offers| offers.share.clone()).unwrap_or_default();
            share.away = !self.is_managed(node);
            if self.is_lost(node, now) {
                share.away = true;
                lost.push(node.clone());
            }
        }
        (nodes, lost)
    }

    fn blocks(
        &self,
        id: &TenantId,
        tenant: &RenderedTenant,
        nodes: &BTreeMap<NodeId, ShareNode>,
    ) -> BlockPlan {
        let (mut block_nodes, mut elsewhere) = (BTreeMap::new(), BTreeMap::new());
        let mut holders: BTreeMap<Block, Vec<&NodeId>> = BTreeMap::new();
        for (node, share) in nodes {
            let addresses = share.pools.values().map(PoolNeed::addresses);
            let (instances, burst) =
                addresses.fold((0u32, 0u32), |(instances, burst), (more, more_burst)| {
                    (instances.saturating_add(more), burst.saturating_add(more_burst))
                });
            let offers = self.offered.of(node, id).map(|offers| offers.blocks.clone()).unwrap_or_default();
            for block in offers.most().unwrap_or_default() {
                holders.entry(block).or_default().push(node);
            }
            let block_node = BlockNode { offers, instances, burst, away: share.away, ..BlockNode::default() };
            block_nodes.insert(node.clone(), block_node);
        }
        for (offset, to) in self.moves.addresses_of(id) {
            if holders.get(&Block::of(offset)).into_iter().flatten().any(|holder| **holder != to) {
                elsewhere.insert(offset, to);
            }
        }
        for (node, block_node) in &mut block_nodes {
            let Some(has) = self.nodes.get(node).and_then(|entry| entry.news.addresses.get(id)) else {
                continue;
            };
            let is_anothers = |block: &Block| {
                let holders = holders.get(block).into_iter().flatten();
                holders.into_iter().any(|holder| *holder != node)
            };
            // A node that claims what it was never given takes no addresses from others.
            let offers = self.offered.of(node, id);
            let may_use = |block: Block| offers.is_some_and(|offers| offers.may_use(block));
            let own = has.blocks.iter().filter(|block| may_use(**block) && !is_anothers(block));
            block_node.in_use = own.copied().collect();
            for offset in has.offsets.iter().filter(|offset| may_use(Block::of(**offset))) {
                let block = Block::of(*offset);
                if is_anothers(&block) {
                    elsewhere.insert(*offset, node.clone());
                } else {
                    block_node.in_use.insert(block);
                }
            }
        }
        // A document asks for no more than its blocks have addresses for, whether instances brought theirs or not.
        for node in elsewhere.values() {
            if let Some(block_node) = block_nodes.get_mut(node) {
                block_node.instances = block_node.instances.saturating_add(1);
            }
        }
        assign_blocks(&tenant.network.ipv4_subnet, &block_nodes, &elsewhere)
    }

    /// This is what the nodes of a tenant are to have.
    fn decided(&mut self, id: &TenantId, division: Division) {
        let before = self.divisions.insert(id.clone(), division);
        let Some(after) = self.divisions.get(id) else { return };
        let before = before.unwrap_or_default();
        for (node, (share, blocks)) in &after.nodes {
            let offers = self.offered.of(node, id);
            let share_now = offers.and_then(|offers| offers.share.current()).copied().unwrap_or(NO_SHARE);
            let blocks_now = offers.and_then(|offers| offers.blocks.current()).cloned().unwrap_or_default();
            let reserved_before = before.nodes.get(node).map(|(_, blocks)| &blocks.reserved);
            if share_now != *share
                || blocks_now != blocks.blocks
                || reserved_before.is_none_or(|before| *before != blocks.reserved)
            {
                self.touched.insert(node.clone());
            }
        }
        if before.short != after.short || before.exhausted != after.exhausted {
            self.stale_tenants.insert(id.clone());
            let pools = self.pools_of.get(id).into_iter().flatten();
            self.stale_pools.extend(pools.map(|pool| PoolKey { tenant: id.clone(), pool: pool.clone() }));
        }
    }

    /// A node is to follow this document: what it says counts from now on.
    pub(crate) fn offer(&mut self, node: &NodeId, numbers: Numbers, tenants: &[Tenant]) {
        let changed = self.offered.change(node, |offers| offers.offer(numbers, tenants));
        self.tell_beyond(node, &changed);
    }

    /// What would be stored of a node beside this document.
    pub(crate) fn offers_with(&self, node: &NodeId, numbers: Numbers, tenants: &[Tenant]) -> NodeOffers {
        let mut offers = self.offered.get(node).cloned().unwrap_or_default();
        offers.offer(numbers, tenants);
        offers
    }

    /// What a node said of the documents that it follows.
    pub(super) fn acknowledge(&mut self, node: &NodeId) {
        let Some(entry) = self.nodes.get(node) else { return };
        if self.offered.get(node).is_none() {
            return;
        }
        let changed = self.offered.change(node, |offers| offers.acknowledge(&entry.news));
        self.left(&changed);
        for tenant in &changed {
            let is_waiting = self.divisions.get(tenant).is_none_or(|division| division.waiting);
            if is_waiting {
                self.undivided.insert(tenant.clone());
            }
        }
        self.tell_beyond(node, &changed);
    }

    /// What nodes may follow of these tenants changed: deleted ones may be gone from them.
    pub(super) fn left(&mut self, tenants: &BTreeSet<TenantId>) {
        self.leaving |= tenants.iter().any(|id| !self.tenants.contains_key(id));
    }

    /// Every node forgets its numbers.
    pub(crate) fn forget_numbers(&mut self) {
        self.offered.forget_numbers();
        self.unsaved.extend(self.nodes.keys().cloned());
    }

    /// A node was given a document by push, which has nothing that was placed.
    pub(crate) fn pushed(&mut self, node: &NodeId, numbers: Numbers) {
        if self.offered.get(node).is_none_or(|offers| offers.tenants().next().is_none()) {
            return;
        }
        self.offer(node, numbers, &[]);
        self.unsaved.insert(node.clone());
    }

    /// All of a tenant that a node may still have of pools, as the placer counts it.
    pub(super) fn beyond_of(offers: &TenantOffers, tenant: &TenantId) -> BTreeMap<PoolKey, Beyond> {
        let most = offers.pools.most().unwrap_or_default();
        let beyond = most.into_iter().map(|(pool, offer)| {
            let beyond = Beyond {
                resources: offer.resources,
                still_there: offer.counts,
                claimed: DesiredCounts::default(),
            };
            (PoolKey { tenant: tenant.clone(), pool }, beyond)
        });
        beyond.collect()
    }

    /// Tells the placer what a node may still have of these tenants.
    fn tell_beyond(&mut self, node: &NodeId, tenants: &BTreeSet<TenantId>) {
        for tenant in tenants {
            let offers = self.offered.of(node, tenant);
            let beyond = offers.map(|offers| Self::beyond_of(offers, tenant)).unwrap_or_default();
            let told = self.placer.told_beyond(node, tenant);
            for key in told.iter().filter(|key| !beyond.contains_key(*key)) {
                self.placer.set_beyond(node, key, None);
            }
            for (key, beyond) in beyond {
                self.placer.set_beyond(node, &key, Some(beyond));
            }
        }
    }

    /// The network of a tenant on one node.
    pub(super) fn network(tenant: &RenderedTenant, blocks: &NodeBlocks) -> Network {
        let number = |number: u32| u16::try_from(number).ok();
        Network {
            address_blocks: Some(blocks.blocks.iter().filter_map(|block| number(block.0)).collect()),
            reserved_offsets: blocks.reserved.iter().filter_map(|offset| number(*offset)).collect(),
            ..tenant.network.clone()
        }
    }
}
