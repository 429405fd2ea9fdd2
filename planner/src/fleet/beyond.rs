//! What nodes have beyond what is placed on them: claimed instances, and what they may still follow of older documents.
//!
//! It counts like what is placed. A node that still has something gets it back before anything is started elsewhere.

use mvm_proto::document::{DesiredCounts, Resources};
use mvm_proto::{NodeId, Phase, TenantId};

use super::filter::against_class;
use super::nodes::NodeState;
use super::placer::Placer;
use super::slab::{NodeNumber, PoolNumber};
use super::spread::Domains;
use super::state::{PHASES, PoolBeyond, PoolState, State, count, instances, need};
use super::{Beyond, PoolKey};
use crate::limits::{Limit, first_passed, node_limits, quota_limits};
use crate::usage::Usage;

fn used(resources: &Resources, counts: &DesiredCounts) -> Usage {
    let of = |phase: Phase| need(resources, phase).times(count(counts, phase));
    PHASES.into_iter().fold(Usage::default(), |sum, phase| sum.plus(of(phase)))
}

impl NodeState {
    /// What of a pool is here beyond what is placed here; `pool` is none if it is declared no more.
    pub(super) fn beyond_of(&self, number: PoolNumber, pool: Option<&PoolState>, at: NodeNumber) -> Usage {
        let Some(beyond) = self.told_of(number) else { return Usage::default() };
        let placed = pool.map(|pool| used(&pool.spec.resources, &pool.counts(at)));
        let still_there = used(&beyond.resources, &beyond.still_there);
        still_there.beyond(placed.unwrap_or_default()).plus(used(&beyond.resources, &beyond.claimed))
    }

    fn told_of(&self, number: PoolNumber) -> Option<&Beyond> {
        let at = self.told.binary_search_by_key(&number, |(number, _)| *number).ok()?;
        self.told.get(at).map(|(_, beyond)| beyond)
    }

    fn tell(&mut self, number: PoolNumber, beyond: Option<Beyond>) {
        match (self.told.binary_search_by_key(&number, |(number, _)| *number), beyond) {
            (Ok(at), Some(beyond)) => self.told[at].1 = beyond,
            (Ok(at), None) => drop(self.told.remove(at)),
            (Err(at), Some(beyond)) => self.told.insert(at, (number, beyond)),
            (Err(_), None) => {}
        }
    }
}

impl PoolBeyond {
    /// What one node has of the pool beyond what is placed there changed.
    pub(super) fn count(&mut self, before: Usage, after: Usage) {
        self.instances = (self.instances + after.instances).saturating_sub(before.instances);
    }
}

impl Placer {
    /// What a node has of a pool beyond what is placed there is as told, or nothing.
    pub fn set_beyond(&mut self, id: &NodeId, key: &PoolKey, beyond: Option<Beyond>) {
        let Some(node) = self.state.numbers.number(id) else { return };
        if beyond.is_none() && self.state.pool_number(key).is_none() {
            return;
        }
        let pool = self.state.pool_entry(key);
        self.state.set_beyond(node, pool, beyond);
    }

    /// The pools of a tenant of which a node was told to have something beyond what is placed there.
    #[must_use]
    pub fn told_beyond(&self, id: &NodeId, tenant: &TenantId) -> Vec<PoolKey> {
        let (state, node) = (&self.state, self.state.numbers.number(id));
        let told = node.and_then(|node| state.nodes.get(node)).into_iter().flat_map(|node| &node.told);
        let keys = told.filter_map(|(pool, _)| Some(&state.pools.get(*pool)?.key));
        let mut keys: Vec<PoolKey> = keys.filter(|key| key.tenant == *tenant).cloned().collect();
        keys.sort();
        keys
    }
}

impl State {
    pub(super) fn set_beyond(&mut self, at: NodeNumber, pool: PoolNumber, beyond: Option<Beyond>) {
        let (Some(node), Some(entry)) = (self.nodes.get_mut(at), self.pools.get_mut(pool)) else { return };
        let declared = entry.declared.as_ref();
        let before = node.beyond_of(pool, declared, at);
        if beyond.is_some() {
            entry.told.nodes.insert(at);
        } else {
            entry.told.nodes.remove(&at);
        }
        node.tell(pool, beyond);
        let after = node.beyond_of(pool, declared, at);
        node.beyond = node.beyond.plus(after).beyond(before);
        entry.told.count(before, after);
        if let Some(tenant) = self.tenants.get_mut(entry.tenant) {
            tenant.beyond = tenant.beyond.plus(after).beyond(before);
        }
        self.rank(at);
        self.release_pool(pool);
    }

    /// Places what a pool lacks where it still is: that needs nothing that is not counted already. Says how many.
    pub(super) fn take_back(&mut self, number: PoolNumber, phase: Phase, lacking: u32) -> u32 {
        let Some(entry) = self.pools.get(number) else { return 0 };
        let (Some(pool), told) = (&entry.declared, &entry.told) else { return 0 };
        // What is there is mostly what is placed there.
        if told.instances == 0 || pool.spec.placement.colocate.is_some() {
            return 0;
        }
        let mut nodes: Vec<NodeNumber> = told.nodes.iter().copied().collect();
        nodes.sort_by_key(|node| self.numbers.place(*node));
        let mut domains = Domains::of(self, number, &pool.spec.placement);
        let mut taken = 0;
        for at in nodes {
            while taken < lacking && self.may_take_back(number, at, phase, domains.as_ref()) {
                self.add(number, at, phase, 1);
                if let (Some(domains), Some(node)) = (&mut domains, self.nodes.get(at)) {
                    domains.add(node);
                }
                taken += 1;
            }
        }
        taken
    }

    fn may_take_back(
        &self,
        number: PoolNumber,
        at: NodeNumber,
        phase: Phase,
        domains: Option<&Domains>,
    ) -> bool {
        let (Some(entry), Some(pool), Some(node), Some(tenant)) =
            (self.pools.get(number), self.pool(number), self.nodes.get(at), self.tenant_of(number))
        else {
            return false;
        };
        let (spec, need) = (&pool.spec, pool.need(phase));
        let placed = pool.counts(at);
        let suits = node.accepts()
            && against_class(&spec.placement, &node.spec.labels, &node.spec.taints).is_ok()
            && self.keeps_away(number, spec, node).is_ok()
            && domains.is_none_or(|domains| domains.allows(node).is_ok())
            && spec.placement.max_per_node.is_none_or(|max| instances(&placed) < u64::from(max));
        // What is placed has to be within every limit even when all that is beyond it is gone.
        let fits = |limits: &[Limit]| first_passed(limits).is_ok();
        let allowed = tenant.quotas.as_ref().is_some_and(|quotas| {
            fits(&quota_limits(quotas, &tenant.used, &need))
                && instances(&pool.total) < u64::from(quotas.max_instances_per_pool)
                && tenant.position(&entry.key.pool) < usize::try_from(quotas.max_pools).unwrap_or(usize::MAX)
        });
        suits
            && allowed
            && fits(&node_limits(&node.room, &node.used, &need))
            && is_counted(number, pool, node, &placed, phase)
    }
}

/// Whether one more placed here, beside these, is no more than what is counted already.
fn is_counted(
    number: PoolNumber,
    pool: &PoolState,
    node: &NodeState,
    placed: &DesiredCounts,
    phase: Phase,
) -> bool {
    let Some(beyond) = node.told_of(number) else { return false };
    let placed = used(&pool.spec.resources, placed);
    let with_it = placed.plus(pool.need(phase));
    let still_there = used(&beyond.resources, &beyond.still_there);
    still_there.most(with_it) == still_there.most(placed)
}
