//! What each node may be following of each tenant: what it acknowledged last, and what was offered to it since. Stored
//! beside the node's document, in the same transaction.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::blocks::Block;
use mvm_planner::fleet::offers::{DocumentNumber, Most, Offers};
use mvm_planner::fleet::rollout::{Grant, Named, OfferedRevision};
use mvm_planner::fleet::shares::NO_SHARE;
use mvm_planner::revision::revision_with;
use mvm_proto::document::{DesiredCounts, Quotas, Resources, Tenant};
use mvm_proto::{Digest, NodeId, PoolId, TenantId};
use serde::{Deserialize, Serialize};

use super::NodeNews;
use super::live::Addresses;
use super::rollouts::grant_of;
use crate::records::Numbers;

/// What one node may be following, as it is stored.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct NodeOffers {
    tenants: BTreeMap<TenantId, TenantOffers>,
}

#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct TenantOffers {
    pub(super) share: Offers<Quotas>,
    pub(super) blocks: Offers<BTreeSet<Block>>,
    pub(super) pools: Offers<BTreeMap<PoolId, PoolOffer>>,
    /// Blocks that it was offered once, gave back, and has addresses of still.
    #[serde(default)]
    kept: BTreeSet<Block>,
    /// It was given the whole subnet once, and may have any address until a status tells none outside its blocks.
    #[serde(default)]
    had_whole_subnet: bool,
}

/// How many instances of a pool, and of which size.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct PoolOffer {
    pub(super) resources: Resources,
    pub(super) counts: DesiredCounts,
    /// Which revision; none of a version that did not note it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) revision: Option<Digest>,
    /// Of which secrets; none of a version that did not note it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) secrets: Option<Digest>,
    /// How far the node may roll to it; none: by its own rule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) update: Option<Grant>,
}

impl PoolOffer {
    /// What a rollout is decided by.
    pub(super) fn of_rollout(&self) -> OfferedRevision {
        let grant = self.update.unwrap_or(Grant::OWN_RULE);
        OfferedRevision { revision: self.revision, secrets: self.secrets, grant }
    }

    /// What the document names, where a version that did not note it meant `goal`.
    pub(super) fn named(&self, goal: Digest) -> Named {
        Named { revision: self.revision.unwrap_or(goal), secrets: self.secrets, grant: self.update }
    }
}

impl Most for PoolOffer {
    fn most(&self, other: &Self) -> Self {
        let (a, b) = (&self.resources, &other.resources);
        Self {
            resources: Resources {
                vcpus: a.vcpus.max(b.vcpus),
                mem_mib: a.mem_mib.max(b.mem_mib),
                data_disk_mib: a.data_disk_mib.max(b.data_disk_mib),
            },
            counts: self.counts.most(&other.counts),
            // Where they differ it is not known which one the node follows.
            revision: self.revision.filter(|revision| other.revision == Some(*revision)),
            secrets: self.secrets.filter(|secrets| other.secrets == Some(*secrets)),
            update: (self.update != other.update)
                .then(|| {
                    let granted = |offer: &Self| offer.update.unwrap_or(Grant::OWN_RULE);
                    granted(self).most(&granted(other))
                })
                .or(self.update),
        }
    }
}

impl TenantOffers {
    /// Whether instances may have addresses of a block, for all that was ever offered. What a node says of others is not
    /// believed.
    pub(super) fn may_use(&self, block: Block) -> bool {
        self.had_whole_subnet
            || self.kept.contains(&block)
            || self.blocks.most().is_some_and(|most| most.contains(&block))
    }

    /// A status of this document: blocks are given back, but for those that are in use.
    fn report(&mut self, number: DocumentNumber, in_use: &BTreeSet<Block>) {
        let before = &self.blocks.most().unwrap_or_default() | &self.kept;
        self.blocks.acknowledge(number);
        let held = self.blocks.most().unwrap_or_default();
        self.kept = (&before - &held).intersection(in_use).copied().collect();
        self.had_whole_subnet &= in_use.iter().any(|block| !held.contains(block));
    }

    fn offer(&mut self, number: DocumentNumber, tenant: Option<&Tenant>) {
        let blocks = tenant.and_then(|tenant| tenant.network.address_blocks.as_ref());
        self.had_whole_subnet |= tenant.is_some() && blocks.is_none();
        let pools = tenant.into_iter().flat_map(|tenant| &tenant.pools);
        let pools = pools.filter(|pool| pool.desired_counts != DesiredCounts::default()).map(|pool| {
            let offer = PoolOffer {
                resources: pool.instance_resources,
                counts: pool.desired_counts,
                // Without its secrets: what is rolled out is what is declared.
                revision: Some(revision_with(pool, None)),
                secrets: pool.secrets_hash,
                update: pool.update.map(grant_of),
            };
            (pool.pool_id.clone(), offer)
        });
        self.share.offer(number, tenant.map_or(NO_SHARE, |tenant| tenant.quotas));
        self.blocks.offer(number, blocks.into_iter().flatten().map(|block| Block((*block).into())).collect());
        self.pools.offer(number, pools.collect());
    }

    /// Whether the node acknowledged that it has nothing of the tenant.
    fn is_nothing(&self) -> bool {
        let agreed = self.share.is_agreed() && self.blocks.is_agreed() && self.pools.is_agreed();
        agreed
            && self.share.current().is_none_or(|share| *share == NO_SHARE)
            && self.blocks.current().is_none_or(BTreeSet::is_empty)
            && self.kept.is_empty()
            && !self.had_whole_subnet
            && self.pools.current().is_none_or(BTreeMap::is_empty)
    }
}

impl NodeOffers {
    /// The tenants that the node may be following something of.
    pub(super) fn tenants(&self) -> impl Iterator<Item = &TenantId> {
        self.tenants.keys()
    }

    pub(super) fn of(&self, tenant: &TenantId) -> Option<&TenantOffers> {
        self.tenants.get(tenant)
    }

    /// Whether its document says how far it may roll some pool.
    pub(super) fn grants_anything(&self) -> bool {
        let pools = self.tenants.values().filter_map(|offers| offers.pools.current());
        pools.flat_map(BTreeMap::values).any(|offer| offer.update.is_some())
    }

    /// The node's document of this number has these tenants.
    pub(crate) fn offer(&mut self, numbers: Numbers, tenants: &[Tenant]) {
        let number = (numbers.epoch, numbers.generation);
        let mut said: BTreeMap<&TenantId, &Tenant> =
            tenants.iter().map(|tenant| (&tenant.tenant_id, tenant)).collect();
        for (id, offers) in &mut self.tenants {
            offers.offer(number, said.remove(id));
        }
        for (id, tenant) in said {
            self.tenants.entry(id.clone()).or_default().offer(number, Some(tenant));
        }
        self.tenants.retain(|_, offers| !offers.is_nothing());
    }

    /// An instance brought an address of a block that the node was never offered.
    pub(super) fn keep(&mut self, tenant: &TenantId, block: Block) {
        self.tenants.entry(tenant.clone()).or_default().kept.insert(block);
    }

    /// What the node said of the documents that it follows. Blocks are given back only by a status, which tells as well
    /// which addresses are in use.
    pub(super) fn acknowledge(&mut self, news: &NodeNews) {
        let number = |numbers: Numbers| (numbers.epoch, numbers.generation);
        for (id, offers) in &mut self.tenants {
            if let Some(accepted) = news.accepted.map(number) {
                offers.share.acknowledge(accepted);
                offers.pools.acknowledge(accepted);
            }
            // An older agent does not tell which addresses its instances have.
            let is_told = news.addresses.contains_key(id) || !news.has_instances(id);
            if let Some(reported) = news.reported.map(number).filter(|_| is_told) {
                let in_use = news.addresses.get(id).map(Addresses::in_use).unwrap_or_default();
                offers.report(reported, &in_use);
            }
        }
        self.tenants.retain(|id, offers| !offers.is_nothing() || news.has_instances(id));
    }

    /// The node forgets its numbers: anything of what was offered may be what it follows.
    fn forget_numbers(&mut self) {
        for offers in self.tenants.values_mut() {
            offers.share.forget_numbers();
            offers.blocks.forget_numbers();
            offers.pools.forget_numbers();
        }
    }
}

/// What all nodes may be following, found by node and by tenant.
#[derive(Debug, Clone, Default)]
pub(crate) struct Offered {
    nodes: BTreeMap<NodeId, NodeOffers>,
    of_tenants: BTreeMap<TenantId, BTreeSet<NodeId>>,
}

impl Offered {
    pub(crate) fn new(nodes: BTreeMap<NodeId, NodeOffers>) -> Self {
        let mut offered = Self::default();
        for (id, offers) in nodes {
            offered.change(&id, |known| *known = offers);
        }
        offered
    }

    pub(crate) fn get(&self, node: &NodeId) -> Option<&NodeOffers> {
        self.nodes.get(node)
    }

    pub(super) fn of(&self, node: &NodeId, tenant: &TenantId) -> Option<&TenantOffers> {
        self.nodes.get(node)?.of(tenant)
    }

    /// The nodes that may be following something of a tenant.
    pub(crate) fn nodes_of(&self, tenant: &TenantId) -> impl Iterator<Item = &NodeId> {
        self.of_tenants.get(tenant).into_iter().flatten()
    }

    /// Changes what is known of a node, and says of which tenants that changed something.
    pub(super) fn change(
        &mut self,
        node: &NodeId,
        change: impl FnOnce(&mut NodeOffers),
    ) -> BTreeSet<TenantId> {
        let offers = self.nodes.entry(node.clone()).or_default();
        let before = offers.clone();
        change(offers);
        let all = before.tenants.keys().chain(offers.tenants.keys());
        let changed: BTreeSet<TenantId> =
            all.filter(|id| before.tenants.get(*id) != offers.tenants.get(*id)).cloned().collect();
        for id in &changed {
            let nodes = self.of_tenants.entry(id.clone()).or_default();
            if offers.tenants.contains_key(id) {
                nodes.insert(node.clone());
            } else {
                nodes.remove(node);
                if nodes.is_empty() {
                    self.of_tenants.remove(id);
                }
            }
        }
        changed
    }

    /// The node is there no more.
    pub(super) fn forget(&mut self, node: &NodeId) -> BTreeSet<TenantId> {
        let changed = self.change(node, |offers| *offers = NodeOffers::default());
        self.nodes.remove(node);
        changed
    }

    /// A trust root made every node forget its numbers.
    pub(super) fn forget_numbers(&mut self) {
        self.nodes.values_mut().for_each(NodeOffers::forget_numbers);
    }
}
