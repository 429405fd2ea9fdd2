//! What is placed where, and what of each node and of each quota is left. All changes of a count go through
//! [`State::add`] and [`State::remove`], which keep the sums and the index right.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use mvm_proto::document::{DesiredCounts, PoolRole, Quotas, Resources};
use mvm_proto::{NodeId, Phase, PoolId, TenantId};

use super::filter::{Obstacle, against_class};
use super::index::{ClassKey, Index, Indexed};
use super::numbers::{NodeNumber, Numbers};
use super::score::Score;
use super::spread::Domains;
use super::{FleetNode, FleetPool, Placed, PoolKey};
use crate::limits::{PER_POOL, Shortage, first_passed, node_limits, quota_limits};
use crate::observation::Capacity;
use crate::usage::Usage;

/// The phases that counts are of, in the order in which they are placed.
pub(super) const PHASES: [Phase; 3] = [Phase::Running, Phase::Warm, Phase::Sleeping];

#[derive(Debug, Clone, Default)]
pub(super) struct State {
    pub(super) nodes: BTreeMap<NodeId, NodeState>,
    pub(super) tenants: BTreeMap<TenantId, TenantState>,
    pub(super) pools: BTreeMap<PoolKey, PoolState>,
    pub(super) index: Index,
    pub(super) numbers: Numbers,
    /// What there is of a pool beyond what is placed.
    pub(super) beyond: BTreeMap<PoolKey, PoolBeyond>,
}

#[derive(Debug, Clone)]
pub(super) struct NodeState {
    pub(super) spec: FleetNode,
    /// Its number in [`State::numbers`].
    pub(super) number: NodeNumber,
    /// What may be promised: its capacity with its overcommit.
    pub(super) room: Capacity,
    /// By what is placed.
    pub(super) used: Usage,
    /// By what is there beyond that.
    pub(super) beyond: Usage,
    pub(super) pools: BTreeSet<PoolKey>,
    pub(super) class: Arc<ClassKey>,
    pub(super) indexed: Option<Indexed>,
}

/// What nodes may have of one pool beyond what is placed on them.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolBeyond {
    /// The nodes that were told of it, with whatever they have.
    pub(super) nodes: BTreeSet<NodeId>,
    /// How many instances that is on all of them together.
    pub(super) instances: u64,
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct TenantState {
    /// None: pools name a tenant that is not declared.
    pub(super) quotas: Option<Quotas>,
    /// By what is placed.
    pub(super) used: Usage,
    /// By what nodes have beyond that.
    pub(super) beyond: Usage,
    pub(super) pools: BTreeSet<PoolId>,
}

#[derive(Debug, Clone)]
pub(super) struct PoolState {
    pub(super) spec: FleetPool,
    pub(super) placed: Placed,
    /// The same by the nodes' numbers, which are quicker to go through than their names.
    pub(super) numbered: BTreeMap<NodeNumber, DesiredCounts>,
    pub(super) total: DesiredCounts,
    pub(super) unplaced: Option<super::Unplaced>,
}

impl NodeState {
    pub(super) fn new(spec: FleetNode, number: NodeNumber) -> Self {
        let times = |amount: u64, permille: u32| amount.saturating_mul(u64::from(permille)) / 1000;
        let Capacity { vcpus, mem_mib, .. } = spec.capacity;
        let vcpus = times(u64::from(vcpus), spec.overcommit.vcpus_permille);
        let room = Capacity {
            vcpus: u32::try_from(vcpus).unwrap_or(u32::MAX),
            mem_mib: times(mem_mib, spec.overcommit.mem_permille),
            ..spec.capacity
        };
        let class = ClassKey { labels: spec.labels.clone(), taints: spec.taints.clone() };
        Self {
            room,
            number,
            used: Usage::default(),
            beyond: Usage::default(),
            pools: BTreeSet::new(),
            class: Arc::new(class),
            indexed: None,
            spec,
        }
    }

    /// Whether it takes something new.
    pub(super) fn accepts(&self) -> bool {
        !self.spec.cordoned && self.spec.away_since.is_none()
    }

    pub(super) fn score(&self) -> Score {
        Score::of_room(&self.room, &self.in_use())
    }

    /// By all that is there, or may be.
    pub(super) fn in_use(&self) -> Usage {
        self.used.plus(self.beyond)
    }

    pub(super) fn fits(&self, need: &Usage) -> Result<(), Shortage> {
        first_passed(&node_limits(&self.room, &self.in_use(), need))
    }

    /// Whether it has less than what is placed on it needs.
    pub(super) fn is_overfull(&self) -> bool {
        node_limits(&self.room, &self.used, &Usage::default())
            .iter()
            .any(|(_, allowed, used, _)| used > allowed)
    }

    /// Whether taking this off helps against what the node lacks.
    pub(super) fn relieves(&self, need: &Usage) -> bool {
        node_limits(&self.room, &self.used, need)
            .iter()
            .any(|(_, allowed, used, need)| used > allowed && *need > 0)
    }
}

impl TenantState {
    /// Whether nothing is known of it any more.
    pub(super) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

impl PoolState {
    /// In this order pools are placed, and in the reverse order they give way.
    pub(super) fn rank(&self) -> (PoolRole, bool) {
        (self.spec.role, !self.spec.critical)
    }

    pub(super) fn need(&self, phase: Phase) -> Usage {
        need(&self.spec.resources, phase)
    }

    pub(super) fn lacks(&self, phase: Phase) -> u32 {
        count(&self.spec.counts, phase).saturating_sub(count(&self.total, phase))
    }

    pub(super) fn surplus(&self, phase: Phase) -> u32 {
        count(&self.total, phase).saturating_sub(count(&self.spec.counts, phase))
    }
}

impl State {
    pub(super) fn pool(&self, key: &PoolKey) -> Option<&PoolState> {
        self.pools.get(key)
    }

    /// Places `number` instances of a pool on a node.
    pub(super) fn add(&mut self, key: &PoolKey, id: &NodeId, phase: Phase, number: u32) {
        let (Some(pool), Some(node)) = (self.pools.get_mut(key), self.nodes.get_mut(id)) else { return };
        if number == 0 {
            return;
        }
        let (used, before) = (pool.need(phase).times(number), node.beyond_of(key, Some(pool), id));
        let counts = pool.placed.entry(id.clone()).or_default();
        *count_mut(counts, phase) += number;
        pool.numbered.insert(node.number, *counts);
        *count_mut(&mut pool.total, phase) += number;
        node.pools.insert(key.clone());
        node.used = node.used.plus(used);
        let after = node.beyond_of(key, Some(pool), id);
        node.beyond = node.beyond.plus(after).beyond(before);
        self.index.update(id, node);
        self.numbers.update(node);
        let tenant = self.tenants.entry(key.tenant.clone()).or_default();
        tenant.used = tenant.used.plus(used);
        tenant.beyond = tenant.beyond.plus(after).beyond(before);
        self.count_beyond(key, before, after);
    }

    /// Takes `number` instances of a pool off a node.
    pub(super) fn remove(&mut self, key: &PoolKey, id: &NodeId, phase: Phase, number: u32) {
        let (Some(pool), Some(node)) = (self.pools.get_mut(key), self.nodes.get_mut(id)) else { return };
        let (used, before) = (pool.need(phase).times(number), node.beyond_of(key, Some(pool), id));
        let Some(counts) = pool.placed.get_mut(id).filter(|_| number > 0) else { return };
        *count_mut(counts, phase) -= number;
        *count_mut(&mut pool.total, phase) -= number;
        if *counts == DesiredCounts::default() {
            pool.placed.remove(id);
            pool.numbered.remove(&node.number);
            node.pools.remove(key);
        } else {
            pool.numbered.insert(node.number, *counts);
        }
        node.used = node.used.beyond(used);
        let after = node.beyond_of(key, Some(pool), id);
        node.beyond = node.beyond.plus(after).beyond(before);
        self.index.update(id, node);
        self.numbers.update(node);
        if let Some(tenant) = self.tenants.get_mut(&key.tenant) {
            tenant.used = tenant.used.beyond(used);
            tenant.beyond = tenant.beyond.plus(after).beyond(before);
        }
        self.count_beyond(key, before, after);
    }

    /// Whether this node takes one more of a pool, its tenant's quotas aside.
    pub(super) fn accepts(
        &self,
        key: &PoolKey,
        spec: &FleetPool,
        id: &NodeId,
        need: &Usage,
        domains: Option<&Domains>,
    ) -> Result<(), Obstacle> {
        let Some(node) = self.nodes.get(id) else { return Err(Obstacle::Away) };
        if node.spec.away_since.is_some() {
            return Err(Obstacle::Away);
        }
        if node.spec.cordoned {
            return Err(Obstacle::Cordoned);
        }
        let FleetNode { labels, taints, .. } = &node.spec;
        against_class(&spec.placement, labels, taints)?;
        node.fits(need)?;
        let pool = self.pool(key);
        let placed = pool.and_then(|pool| pool.placed.get(id)).map_or(0, instances);
        let has = placed + node.beyond_of(key, pool, id).instances;
        if let Some(max) = spec.placement.max_per_node.filter(|max| has >= u64::from(*max)) {
            return Err(Obstacle::MaxPerNode(max));
        }
        self.keeps_away(key, spec, node)?;
        domains.map_or(Ok(()), |domains| domains.allows(id, labels))
    }

    /// Whether a pool on this node and this one avoid each other: both ways, whichever of the two was placed first.
    pub(super) fn keeps_away(
        &self,
        key: &PoolKey,
        spec: &FleetPool,
        node: &NodeState,
    ) -> Result<(), Obstacle> {
        let avoids = |pool: &FleetPool, other: &PoolId| pool.placement.anti_affinity.contains(other);
        let others = node.pools.iter().filter(|other| other.tenant == key.tenant && *other != key);
        for other in others {
            let is_avoided = avoids(spec, &other.pool);
            if is_avoided || self.pool(other).is_some_and(|other| avoids(&other.spec, &key.pool)) {
                return Err(Obstacle::AntiAffinity(other.pool.clone()));
            }
        }
        Ok(())
    }

    /// Whether the tenant's quotas allow one more, beside so much more and so many more instances of the pool.
    pub(super) fn quota_allows(
        &self,
        key: &PoolKey,
        more: &Usage,
        more_instances: u64,
        need: &Usage,
    ) -> Result<(), String> {
        let tenant = self.tenants.get(&key.tenant);
        let Some(TenantState { quotas: Some(quotas), used, beyond, pools }) = tenant else {
            return Err(format!("the tenant {} does not exist", key.tenant));
        };
        let of = |told: &dyn std::fmt::Display| format!("quota of tenant {}: {told}", key.tenant);
        let max_pools = usize::try_from(quotas.max_pools).unwrap_or(usize::MAX);
        if pools.len() > max_pools {
            let position = pools.iter().take_while(|pool| **pool < key.pool).count();
            if position >= max_pools {
                let told =
                    format!("max_pools is {max_pools}, this is the tenant's pool number {}", position + 1);
                return Err(of(&told));
            }
        }
        let has = self.pools.get(key).map_or(0, |pool| instances(&pool.total));
        let has = has + self.beyond_instances(key) + more_instances;
        let per_pool = (PER_POOL, u64::from(quotas.max_instances_per_pool), has, need.instances);
        let [a, b, c, d, e] = quota_limits(quotas, &used.plus(*beyond).plus(*more), need);
        first_passed(&[per_pool, a, b, c, d, e]).map_err(|shortage| match beyond.instances {
            0 => of(&shortage),
            more => {
                format!(
                    "{}; this counts {more} that are claimed or not yet confirmed to be gone",
                    of(&shortage)
                )
            }
        })
    }
}

pub(super) fn need(resources: &Resources, phase: Phase) -> Usage {
    Usage::of(phase, resources, None)
}

pub(super) fn instances(counts: &DesiredCounts) -> u64 {
    PHASES.iter().map(|phase| u64::from(count(counts, *phase))).sum()
}

pub(super) fn count(counts: &DesiredCounts, phase: Phase) -> u32 {
    match phase {
        Phase::Running => counts.running,
        Phase::Warm => counts.warm,
        _ => counts.sleeping,
    }
}

pub(super) fn count_mut(counts: &mut DesiredCounts, phase: Phase) -> &mut u32 {
    match phase {
        Phase::Running => &mut counts.running,
        Phase::Warm => &mut counts.warm,
        _ => &mut counts.sleeping,
    }
}
