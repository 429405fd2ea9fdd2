//! What is placed where, and what of each node and of each quota is left. All changes of a count go through
//! [`State::add`] and [`State::remove`], which keep the sums and the index right.
//!
//! Nodes, pools and tenants have numbers here ([`super::slab`]); names are looked up where they come in.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::OnceLock;

use mvm_proto::document::{DesiredCounts, PoolRole, Quotas, Resources};
use mvm_proto::{NodeId, Phase, PoolId, TenantId};

use super::index::Index;
use super::names::{self, PoolNames};
use super::nodes::NodeState;
use super::numbers::Numbers;
use super::slab::{NodeNumber, PoolNumber, Slab, TenantNumber};
use super::{FleetPool, Placed, PoolKey};
use crate::usage::Usage;

/// The phases that counts are of, in the order in which they are placed.
pub(super) const PHASES: [Phase; 3] = [Phase::Running, Phase::Warm, Phase::Sleeping];

#[derive(Debug, Clone, Default)]
pub(super) struct State {
    pub(super) nodes: Slab<NodeNumber, NodeState>,
    pub(super) tenants: Slab<TenantNumber, TenantState>,
    /// Those that are declared, and those that nodes were told to have something of.
    pub(super) pools: Slab<PoolNumber, PoolEntry>,
    pub(super) index: Index,
    pub(super) numbers: Numbers,
    pub(super) tenant_names: BTreeMap<TenantId, TenantNumber>,
    pub(super) pool_names: PoolNames,
}

#[derive(Debug, Clone)]
pub(super) struct TenantState {
    pub(super) name: TenantId,
    /// None: pools name a tenant that is not declared.
    pub(super) quotas: Option<Quotas>,
    /// By what is placed.
    pub(super) used: Usage,
    /// By what nodes have beyond that.
    pub(super) beyond: Usage,
    /// Those that are declared.
    pub(super) pools: BTreeMap<PoolId, PoolNumber>,
    /// How many of those that are declared name pools that they avoid.
    pub(super) avoiding: usize,
    /// How many pools have a number.
    pub(super) numbered: usize,
}

#[derive(Debug, Clone)]
pub(super) struct PoolEntry {
    pub(super) key: PoolKey,
    pub(super) tenant: TenantNumber,
    pub(super) declared: Option<PoolState>,
    pub(super) told: PoolBeyond,
}

/// What nodes may have of one pool beyond what is placed on them.
#[derive(Debug, Clone, Default)]
pub(super) struct PoolBeyond {
    /// The nodes that were told of it, with whatever they have.
    pub(super) nodes: BTreeSet<NodeNumber>,
    /// How many instances that is on all of them together.
    pub(super) instances: u64,
}

#[derive(Debug, Clone)]
pub(super) struct PoolState {
    pub(super) spec: FleetPool,
    pub(super) total: DesiredCounts,
    on: [NodeCounts; PHASES.len()],
    pub(super) unplaced: Option<super::Unplaced>,
    /// The same as `on` by the nodes' names, from when it is asked for until something changes.
    named: OnceLock<Placed>,
}

/// How many instances of a pool nodes have in one phase: those that have any, in the order of their numbers.
#[derive(Debug, Clone, Default)]
pub(super) struct NodeCounts(Vec<(NodeNumber, u32)>);

impl NodeCounts {
    pub(super) fn of(&self, node: NodeNumber) -> u32 {
        self.find(node).map_or(0, |at| self.0[at].1)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (NodeNumber, u32)> {
        self.0.iter().copied()
    }

    fn find(&self, node: NodeNumber) -> Result<usize, usize> {
        self.0.binary_search_by_key(&node, |(node, _)| *node)
    }

    fn set(&mut self, node: NodeNumber, count: u32) {
        match self.find(node) {
            Ok(at) if count == 0 => drop(self.0.remove(at)),
            Ok(at) => self.0[at].1 = count,
            Err(_) if count == 0 => {}
            Err(at) => self.0.insert(at, (node, count)),
        }
    }
}

impl PoolState {
    pub(super) fn new(spec: FleetPool) -> Self {
        Self {
            spec,
            total: DesiredCounts::default(),
            on: Default::default(),
            unplaced: None,
            named: OnceLock::new(),
        }
    }

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

    /// The nodes that have any of it in a phase.
    pub(super) fn on(&self, phase: Phase) -> &NodeCounts {
        &self.on[slot(phase)]
    }

    /// What a node has of it.
    pub(super) fn counts(&self, node: NodeNumber) -> DesiredCounts {
        let [running, warm, sleeping] = self.on.each_ref().map(|on| on.of(node));
        DesiredCounts { running, warm, sleeping }
    }

    /// The nodes that have any of it, some of them more than once.
    pub(super) fn nodes(&self) -> impl Iterator<Item = NodeNumber> {
        self.on.iter().flat_map(NodeCounts::iter).map(|(node, _)| node)
    }

    fn has_any(&self, node: NodeNumber) -> bool {
        self.on.iter().any(|on| on.find(node).is_ok())
    }

    fn set(&mut self, node: NodeNumber, phase: Phase, count: u32) {
        self.on[slot(phase)].set(node, count);
        self.named.take();
    }
}

impl State {
    pub(super) fn pool_number(&self, key: &PoolKey) -> Option<PoolNumber> {
        let is_it = |number| self.pools.get(number).is_some_and(|entry| entry.key == *key);
        self.pool_names.find(names::hash(key), is_it)
    }

    /// A pool that is declared.
    pub(super) fn pool(&self, number: PoolNumber) -> Option<&PoolState> {
        self.pools.get(number)?.declared.as_ref()
    }

    pub(super) fn tenant_of(&self, pool: PoolNumber) -> Option<&TenantState> {
        self.tenants.get(self.pools.get(pool)?.tenant)
    }

    /// Where a pool is, by the nodes' names.
    pub(super) fn placed<'a>(&self, pool: &'a PoolState) -> &'a Placed {
        pool.named.get_or_init(|| {
            let of = |phase: Phase| {
                pool.on(phase).iter().map(move |(node, count)| (self.numbers.place(node), node, phase, count))
            };
            let mut all: Vec<_> = PHASES.into_iter().flat_map(of).collect();
            all.sort_unstable_by_key(|(place, ..)| *place);
            let mut placed: Vec<(NodeId, DesiredCounts)> = Vec::new();
            for same in all.chunk_by(|a, b| a.1 == b.1) {
                let mut counts = DesiredCounts::default();
                same.iter().for_each(|(_, _, phase, count)| *count_mut(&mut counts, *phase) = *count);
                let node = same.first().and_then(|(_, node, ..)| self.nodes.get(*node));
                placed.extend(node.map(|node| (node.name.clone(), counts)));
            }
            placed.into_iter().collect()
        })
    }

    /// The number of a tenant, which is known from now on.
    pub(super) fn tenant_number(&mut self, id: &TenantId) -> TenantNumber {
        if let Some(number) = self.tenant_names.get(id) {
            return *number;
        }
        let number = self.tenants.insert(TenantState {
            name: id.clone(),
            quotas: None,
            used: Usage::default(),
            beyond: Usage::default(),
            pools: BTreeMap::new(),
            avoiding: 0,
            numbered: 0,
        });
        self.tenant_names.insert(id.clone(), number);
        number
    }

    /// Forgets a tenant that is not declared and has no pools.
    pub(super) fn release_tenant(&mut self, number: TenantNumber) {
        let is_nothing = |tenant: &&TenantState| tenant.quotas.is_none() && tenant.numbered == 0;
        if let Some(tenant) = self.tenants.get(number).filter(is_nothing) {
            self.tenant_names.remove(&tenant.name);
            self.tenants.remove(number);
        }
    }

    /// The entry of a pool, which is there from now on until [`State::release_pool`].
    pub(super) fn pool_entry(&mut self, key: &PoolKey) -> PoolNumber {
        if let Some(number) = self.pool_number(key) {
            return number;
        }
        let tenant = self.tenant_number(&key.tenant);
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.numbered += 1;
        }
        let entry = PoolEntry { key: key.clone(), tenant, declared: None, told: PoolBeyond::default() };
        let number = self.pools.insert(entry);
        self.pool_names.insert(names::hash(key), number);
        number
    }

    /// Forgets a pool that is not declared and that no node was told of.
    pub(super) fn release_pool(&mut self, number: PoolNumber) {
        let is_nothing = |entry: &&PoolEntry| entry.declared.is_none() && entry.told.nodes.is_empty();
        let Some(entry) = self.pools.get(number).filter(is_nothing) else { return };
        let tenant = entry.tenant;
        self.pool_names.remove(names::hash(&entry.key), number);
        self.pools.remove(number);
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            tenant.numbered -= 1;
        }
        self.release_tenant(tenant);
    }

    /// A pool is as told, with what is placed of it, or declared no more; then nothing of it is placed.
    pub(super) fn declare_pool(&mut self, number: PoolNumber, spec: Option<FleetPool>) {
        let Some(entry) = self.pools.get_mut(number) else { return };
        let avoids = |spec: &FleetPool| usize::from(!spec.placement.anti_affinity.is_empty());
        let avoided = entry.declared.as_ref().map_or(0, |pool| avoids(&pool.spec));
        let was_declared = entry.declared.is_some();
        if let Some(tenant) = self.tenants.get_mut(entry.tenant) {
            tenant.avoiding = (tenant.avoiding + spec.as_ref().map_or(0, avoids)).saturating_sub(avoided);
            match (was_declared, &spec) {
                (false, Some(_)) => drop(tenant.pools.insert(entry.key.pool.clone(), number)),
                (true, None) => drop(tenant.pools.remove(&entry.key.pool)),
                _ => {}
            }
        }
        match (&mut entry.declared, spec) {
            (Some(pool), Some(spec)) => pool.spec = spec,
            (declared, spec) => *declared = spec.map(PoolState::new),
        }
    }

    /// Places `number` instances of a pool on a node.
    pub(super) fn add(&mut self, pool: PoolNumber, node: NodeNumber, phase: Phase, number: u32) {
        self.shift(pool, node, phase, |has| has.saturating_add(number));
    }

    /// Takes `number` instances of a pool off a node.
    pub(super) fn remove(&mut self, pool: PoolNumber, node: NodeNumber, phase: Phase, number: u32) {
        self.shift(pool, node, phase, |has| has.saturating_sub(number));
    }

    fn shift(&mut self, pool: PoolNumber, node: NodeNumber, phase: Phase, to: impl Fn(u32) -> u32) {
        let (Some(entry), Some(at)) = (self.pools.get_mut(pool), self.nodes.get_mut(node)) else { return };
        let Some(declared) = &mut entry.declared else { return };
        let has = declared.on(phase).of(node);
        let (more, fewer) = (to(has).saturating_sub(has), has.saturating_sub(to(has)));
        if more == fewer {
            return;
        }
        let beyond_before = at.beyond_of(pool, Some(declared), node);
        declared.set(node, phase, to(has));
        let total = count_mut(&mut declared.total, phase);
        *total = total.saturating_add(more).saturating_sub(fewer);
        if more > 0 && !at.pools.contains(&pool) {
            at.pools.push(pool);
        } else if to(has) == 0 && !declared.has_any(node) {
            at.pools.retain(|other| *other != pool);
        }
        let need = declared.need(phase);
        let used = |used: Usage| used.plus(need.times(more)).beyond(need.times(fewer));
        at.used = used(at.used);
        let beyond_after = at.beyond_of(pool, Some(declared), node);
        at.beyond = at.beyond.plus(beyond_after).beyond(beyond_before);
        entry.told.count(beyond_before, beyond_after);
        if let Some(tenant) = self.tenants.get_mut(entry.tenant) {
            tenant.used = used(tenant.used);
            tenant.beyond = tenant.beyond.plus(beyond_after).beyond(beyond_before);
        }
        self.rank(node);
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

fn slot(phase: Phase) -> usize {
    match phase {
        Phase::Running => 0,
        Phase::Warm => 1,
        _ => 2,
    }
}
