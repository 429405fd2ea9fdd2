//! What nodes say comes into the world: only what differs from before makes anything be looked at again.

use std::collections::BTreeMap;

use mvm_planner::fleet::PoolKey;
use mvm_proto::object::ManagedBy;
use mvm_proto::status::Feature;
use mvm_proto::{NodeId, TenantId};

use super::conditions;
use super::live::Addresses;
use super::{NodeNews, NodeOffers, PoolNews, PoolsHeard, World};
use crate::fleet::Standing;

impl World {
    /// What a node said last; `news` has no pools of its own.
    pub(crate) fn hear(&mut self, id: &NodeId, news: NodeNews, heard: PoolsHeard) {
        let entry = self.nodes.entry(id.clone()).or_default();
        let mut pools = std::mem::take(&mut entry.news.pools);
        let differences = take_in(&mut pools, heard);
        let is_news = entry.news != news || !differences.is_empty();
        let before = std::mem::replace(&mut entry.news, NodeNews { pools, ..news });
        if !is_news {
            return;
        }
        let now = &entry.news;
        // A node that accepts a document says nothing that its object shows.
        let is_shown = !differences.is_empty() || shows_other(&before, now);
        let came = now.standing == Standing::Present && before.standing != Standing::Present;
        if before.standing != now.standing || before.converged != now.converged {
            self.stale_pools.extend(self.stored.pools_on(id).cloned());
        }
        let could = before.info.as_ref().is_some_and(|info| info.has(Feature::RemovedTenants));
        let rolled = before.info.as_ref().is_some_and(|info| info.has(Feature::RolloutLimits));
        let rolls = now.info.as_ref().is_some_and(|info| info.has(Feature::RolloutLimits));
        if came || entry.can_remove_tenants() != could || rolls != rolled {
            self.touched.insert(id.clone());
        }
        if came && self.lost.remove(id) {
            let offers = self.offered.get(id);
            self.undivided.extend(offers.into_iter().flat_map(NodeOffers::tenants).cloned());
        }
        let addresses = &entry.news.addresses;
        let moved = before.addresses.iter().chain(addresses).filter(|(tenant, told)| {
            let of = |all: &BTreeMap<TenantId, Addresses>| all.get(*tenant).map(|told| told.offsets.clone());
            !told.offsets.is_empty() && of(&before.addresses) != of(addresses)
        });
        self.undivided.extend(moved.map(|(tenant, _)| tenant.clone()));
        for (key, difference) in differences {
            match difference {
                Difference::Came => drop(self.heard_of.entry(key.clone()).or_default().insert(id.clone())),
                Difference::Went => self.unhear(&key, id),
                Difference::Changed => {}
            }
            let news = self.nodes.get(id).and_then(|entry| entry.news.pools.get(&key));
            self.rollouts.heard(&key, news);
            self.stale_pools.insert(key);
        }
        if is_shown {
            self.stale_nodes.insert(id.clone());
        }
        self.update_node(id);
        self.acknowledge(id);
        for (tenant, block) in self.moves.brought_to(id) {
            self.offered.change(id, |offers| offers.keep(&tenant, block));
        }
        if let Some(news) = self.nodes.get(id).map(|entry| entry.news.standing == Standing::Present) {
            self.reopen_drain(id, came && news);
        }
        self.reopen_rollouts_on(id);
    }

    /// Whether a node that nothing was heard of since the start counts as there.
    pub(crate) fn hear_standing(&mut self, id: &NodeId, standing: Standing) {
        let Some(entry) = self.nodes.get_mut(id).filter(|entry| entry.news.standing != standing) else {
            return;
        };
        entry.news.standing = standing;
        self.reopen_rollouts_on(id);
        self.stale_nodes.insert(id.clone());
        self.stale_pools.extend(self.stored.pools_on(id).cloned());
        self.update_node(id);
    }

    pub(super) fn unhear(&mut self, key: &PoolKey, id: &NodeId) {
        if let Some(nodes) = self.heard_of.get_mut(key) {
            nodes.remove(id);
            if nodes.is_empty() {
                self.heard_of.remove(key);
            }
        }
    }

    /// What nodes said last of a pool that they were given something of. What others say of it is not believed.
    pub(crate) fn news_of<'a>(
        &'a self,
        key: &'a PoolKey,
    ) -> impl Iterator<Item = (&'a NodeId, &'a PoolNews)> {
        let nodes = self.heard_of.get(key).into_iter().flatten();
        let is_placed = |id: &NodeId| self.stored.get(key).is_some_and(|placed| placed.contains_key(id));
        let nodes = nodes.filter(move |id| is_placed(id) || self.was_given(id, &key.tenant));
        nodes.filter_map(|id| Some((id, self.nodes.get(id)?.news.pools.get(key)?)))
    }
}

impl World {
    /// Whether a node can have instances of a tenant. Where the node or the tenant is not declared, a document that was pushed
    /// may name anything.
    pub(crate) fn may_have(&self, id: &NodeId, tenant: &TenantId) -> bool {
        let declared = self.nodes.get(id).and_then(|entry| entry.declared.as_ref());
        let is_ours = declared.is_some_and(|(_, spec)| spec.managed_by == ManagedBy::Objects);
        !is_ours
            || !self.tenants.contains_key(tenant)
            || self.stored.pools_on(id).any(|key| key.tenant == *tenant)
            || self.was_given(id, tenant)
    }

    fn was_given(&self, id: &NodeId, tenant: &TenantId) -> bool {
        self.offered.of(id, tenant).is_some() || self.holdings.nodes_of(tenant).any(|has| has == id)
    }
}

/// Whether the object of a node says something else after this news. What it has of pools is looked at apart.
fn shows_other(before: &NodeNews, now: &NodeNews) -> bool {
    let shown = |news: &NodeNews| {
        let conditions = news.conditions.iter().filter(|condition| conditions::is_shown(condition));
        conditions.cloned().collect::<Vec<_>>()
    };
    (before.standing, &before.info, &before.ready, &before.refused, &before.usage, &before.second_machine)
        != (now.standing, &now.info, &now.ready, &now.refused, &now.usage, &now.second_machine)
        || shown(before) != shown(now)
}

enum Difference {
    Came,
    Changed,
    Went,
}

/// Brings a node's pools up to date, and says which differ from before.
fn take_in(pools: &mut BTreeMap<PoolKey, PoolNews>, heard: PoolsHeard) -> Vec<(PoolKey, Difference)> {
    let changes = match heard {
        PoolsHeard::Some(changes) => changes,
        PoolsHeard::All(all) => {
            let gone: Vec<_> = pools.keys().filter(|key| !all.contains_key(*key)).cloned().collect();
            let gone = gone.into_iter().map(|key| (key, None));
            gone.chain(all.into_iter().map(|(key, news)| (key, Some(news)))).collect()
        }
    };
    let mut differences = Vec::new();
    for (key, news) in changes {
        let before = match news.clone() {
            Some(news) => pools.insert(key.clone(), news),
            None => pools.remove(&key),
        };
        let difference = match (before, news) {
            (before, news) if before == news => continue,
            (None, _) => Difference::Came,
            (Some(_), None) => Difference::Went,
            (Some(_), Some(_)) => Difference::Changed,
        };
        differences.push((key, difference));
    }
    differences
}
