//! What nodes have beyond what is placed on them: claimed instances, and what they may still follow of older documents.
//!
//! It counts like what is placed. A node that still has something gets it back before anything is started elsewhere.

use std::collections::BTreeMap;

use mvm_proto::document::{DesiredCounts, Resources};
use mvm_proto::{NodeId, Phase, TenantId};

use super::filter::against_class;
use super::placer::Placer;
use super::spread::Domains;
use super::state::{NodeState, PHASES, PoolState, State, count, instances, need};
use super::{Beyond, PoolKey};
use crate::limits::{Limit, first_passed, node_limits, quota_limits};
use crate::usage::Usage;

fn used(resources: &Resources, counts: &DesiredCounts) -> Usage {
    let of = |phase: Phase| need(resources, phase).times(count(counts, phase));
    PHASES.into_iter().fold(Usage::default(), |sum, phase| sum.plus(of(phase)))
}

impl NodeState {
    /// What of a pool is here beyond what is placed here; `pool` is none if it is declared no more.
    pub(super) fn beyond_of(&self, key: &PoolKey, pool: Option<&PoolState>, id: &NodeId) -> Usage {
        let Some(beyond) = self.spec.beyond.get(key) else { return Usage::default() };
        let placed = pool.and_then(|pool| Some(used(&pool.spec.resources, pool.placed.get(id)?)));
        let still_there = used(&beyond.resources, &beyond.still_there);
        still_there.beyond(placed.unwrap_or_default()).plus(used(&beyond.resources, &beyond.claimed))
    }
}

impl Placer {
    /// What a node has of a pool beyond what is placed there is as told, or nothing.
    pub fn set_beyond(&mut self, id: &NodeId, key: &PoolKey, beyond: Option<Beyond>) {
        self.state.set_beyond(id, key, beyond);
    }

    /// The pools of a tenant of which a node was told to have something beyond what is placed there.
    #[must_use]
    pub fn told_beyond(&self, id: &NodeId, tenant: &TenantId) -> Vec<PoolKey> {
        let node = self.state.nodes.get(id).into_iter();
        node.flat_map(|node| node.spec.beyond.keys()).filter(|key| key.tenant == *tenant).cloned().collect()
    }
}

impl State {
    pub(super) fn set_beyond(&mut self, id: &NodeId, key: &PoolKey, beyond: Option<Beyond>) {
        let Some(node) = self.nodes.get_mut(id) else { return };
        let pool = self.pools.get(key);
        let before = node.beyond_of(key, pool, id);
        let told = self.beyond.entry(key.clone()).or_default();
        match beyond {
            Some(beyond) => {
                node.spec.beyond.insert(key.clone(), beyond);
                told.nodes.insert(id.clone());
            }
            None => {
                node.spec.beyond.remove(key);
                told.nodes.remove(id);
            }
        }
        let after = node.beyond_of(key, pool, id);
        node.beyond = node.beyond.plus(after).beyond(before);
        self.index.update(id, node);
        self.numbers.update(node);
        let tenant = self.tenants.entry(key.tenant.clone()).or_default();
        tenant.beyond = tenant.beyond.plus(after).beyond(before);
        if tenant.is_nothing() {
            self.tenants.remove(&key.tenant);
        }
        self.count_beyond(key, before, after);
        if self.beyond.get(key).is_some_and(|told| told.nodes.is_empty()) {
            self.beyond.remove(key);
        }
    }

    /// What one node has of a pool beyond what is placed there changed.
    pub(super) fn count_beyond(&mut self, key: &PoolKey, before: Usage, after: Usage) {
        if let Some(told) = self.beyond.get_mut(key) {
            told.instances = (told.instances + after.instances).saturating_sub(before.instances);
        }
    }

    /// How many instances of a pool all nodes have beyond what is placed.
    pub(super) fn beyond_instances(&self, key: &PoolKey) -> u64 {
        self.beyond.get(key).map_or(0, |told| told.instances)
    }

    /// Places what a pool lacks where it still is: that needs nothing that is not counted already. Says how many.
    pub(super) fn take_back(&mut self, key: &PoolKey, phase: Phase, lacking: u32) -> u32 {
        let (Some(told), Some(pool)) = (self.beyond.get(key), self.pools.get(key)) else { return 0 };
        // What is there is mostly what is placed there.
        if told.instances == 0 || pool.spec.placement.colocate.is_some() {
            return 0;
        }
        let (nodes, labels): (Vec<NodeId>, _) = (told.nodes.iter().cloned().collect(), BTreeMap::new());
        let mut domains = Domains::of(self, key, &pool.spec.placement);
        let mut taken = 0;
        for id in nodes {
            while taken < lacking && self.may_take_back(key, &id, phase, domains.as_ref()) {
                self.add(key, &id, phase, 1);
                if let Some(domains) = &mut domains {
                    domains.add(&id, self.nodes.get(&id).map_or(&labels, |node| &node.spec.labels));
                }
                taken += 1;
            }
        }
        taken
    }

    fn may_take_back(&self, key: &PoolKey, id: &NodeId, phase: Phase, domains: Option<&Domains>) -> bool {
        let (Some(pool), Some(node), Some(tenant)) =
            (self.pools.get(key), self.nodes.get(id), self.tenants.get(&key.tenant))
        else {
            return false;
        };
        let (spec, need) = (&pool.spec, pool.need(phase));
        let placed = pool.placed.get(id).copied().unwrap_or_default();
        let suits = node.accepts()
            && against_class(&spec.placement, &node.spec.labels, &node.spec.taints).is_ok()
            && self.keeps_away(key, spec, node).is_ok()
            && domains.is_none_or(|domains| domains.allows(id, &node.spec.labels).is_ok())
            && spec.placement.max_per_node.is_none_or(|max| instances(&placed) < u64::from(max));
        // What is placed has to be within every limit even when all that is beyond it is gone.
        let fits = |limits: &[Limit]| first_passed(limits).is_ok();
        let allowed = tenant.quotas.as_ref().is_some_and(|quotas| {
            fits(&quota_limits(quotas, &tenant.used, &need))
                && instances(&pool.total) < u64::from(quotas.max_instances_per_pool)
                && tenant.pools.iter().take_while(|pool| **pool < key.pool).count()
                    < usize::try_from(quotas.max_pools).unwrap_or(usize::MAX)
        });
        suits
            && allowed
            && fits(&node_limits(&node.room, &node.used, &need))
            && is_counted(key, pool, node, id, phase)
    }
}

/// Whether one more placed here is no more than what is counted already.
fn is_counted(key: &PoolKey, pool: &PoolState, node: &NodeState, id: &NodeId, phase: Phase) -> bool {
    let Some(beyond) = node.spec.beyond.get(key) else { return false };
    let placed = pool.placed.get(id).map(|placed| used(&pool.spec.resources, placed)).unwrap_or_default();
    let with_it = placed.plus(pool.need(phase));
    let still_there = used(&beyond.resources, &beyond.still_there);
    still_there.most(with_it) == still_there.most(placed)
}
