//! A fleet between changes: what changed is told to it, and [`Placer::settle`] places what is not placed.
//!
//! Settling first takes away: from nodes that are lost or drained, from nodes that are too small, and what a pool has
//! beyond its counts. Then it places what pools lack: all running counts first, pools in the order of their ranks.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};

use mvm_proto::document::{DesiredCounts, PoolRole};
use mvm_proto::{NodeId, Phase, TenantId, Timestamp};

use super::filter::drives_out;
use super::spread::Domains;
use super::state::{NodeState, PHASES, PoolState, State, count, count_mut};
use super::{Fleet, FleetNode, FleetPlan, FleetPool, FleetTenant, Placed, PoolKey, Unplaced, is_lost};

/// Holds a fleet and the placement of its pools.
#[derive(Debug, Clone, Default)]
pub struct Placer {
    pub(super) state: State,
    /// Nodes that are away and not lost yet, the longest first.
    away: BTreeSet<(Timestamp, NodeId)>,
    elected_at: Option<Timestamp>,
    /// Nodes that may have to give something up.
    touched: BTreeSet<NodeId>,
    /// Pools that may have too many or too few; those that lack something stay here.
    open: BTreeSet<PoolKey>,
}

/// What one settling remembers.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// Placements as they were before it.
    before: BTreeMap<PoolKey, Placed>,
    /// What pools gave up because their counts say so: they get it back first, in another phase.
    pub(super) lost: BTreeMap<PoolKey, BTreeMap<NodeId, u32>>,
}

impl Placer {
    /// Holds this fleet; nothing is decided yet.
    #[must_use]
    pub fn of(fleet: &Fleet) -> Self {
        let mut placer = Self { elected_at: fleet.elected_at, ..Self::default() };
        for (id, node) in &fleet.nodes {
            placer.set_node(id, Some(node.clone()));
        }
        for (id, tenant) in &fleet.tenants {
            placer.set_tenant(id, Some(*tenant));
        }
        for (key, pool) in &fleet.pools {
            placer.set_pool(key, Some(pool.clone()));
            for (id, counts) in fleet.placed.get(key).into_iter().flatten() {
                for phase in PHASES {
                    placer.state.add(key, id, phase, count(counts, phase));
                }
            }
        }
        placer
    }

    /// A node is as told, or there no more.
    pub fn set_node(&mut self, id: &NodeId, node: Option<FleetNode>) {
        let on_it = self.state.nodes.get(id).map(|node| node.pools.clone()).unwrap_or_default();
        if node.is_none() {
            for key in on_it {
                self.take_off(&key, id);
                self.open.insert(key);
            }
        }
        let had = self.state.nodes.get(id).map(|node| node.spec.beyond.clone()).unwrap_or_default();
        for key in had.keys() {
            self.state.set_beyond(id, key, None);
        }
        let mut before = self.state.nodes.remove(id);
        if let Some(before) = &mut before {
            self.state.index.remove(id, before);
            if let Some(since) = before.spec.away_since {
                self.away.remove(&(since, id.clone()));
            }
        }
        let Some(mut spec) = node else { return };
        let has = std::mem::take(&mut spec.beyond);
        if let Some(since) = spec.away_since {
            self.away.insert((since, id.clone()));
        }
        let mut now = NodeState::new(spec);
        if let Some(before) = before {
            (now.pools, now.used) = (before.pools, before.used);
        }
        self.state.index.update(id, &mut now);
        self.state.nodes.insert(id.clone(), now);
        for (key, beyond) in has {
            self.state.set_beyond(id, &key, Some(beyond));
        }
        self.touched.insert(id.clone());
    }

    /// This coordinator became the leader: the grace of nodes that are away starts again.
    pub fn set_elected_at(&mut self, elected_at: Timestamp) {
        self.elected_at = Some(elected_at);
    }

    /// A tenant is as told, or there no more: nothing new of its pools is placed then.
    pub fn set_tenant(&mut self, id: &TenantId, tenant: Option<FleetTenant>) {
        let state = self.state.tenants.entry(id.clone()).or_default();
        state.quotas = tenant.map(|tenant| tenant.quotas);
        if state.is_nothing() {
            self.state.tenants.remove(id);
        }
    }

    /// A pool is as told, or there no more.
    pub fn set_pool(&mut self, key: &PoolKey, pool: Option<FleetPool>) {
        let known = self.state.pools.get_mut(key);
        if let (Some(known), Some(spec)) = (known, &pool)
            && known.spec.resources == spec.resources
        {
            if known.spec.placement.tolerations != spec.placement.tolerations {
                self.touched.extend(known.placed.keys().cloned());
            }
            known.spec = spec.clone();
            self.open.insert(key.clone());
            return;
        }
        let placed = self.state.pool(key).map(|pool| pool.placed.clone()).unwrap_or_default();
        for id in placed.keys() {
            self.take_off(key, id);
        }
        self.state.pools.remove(key);
        let tenant = self.state.tenants.entry(key.tenant.clone()).or_default();
        let Some(spec) = pool else {
            tenant.pools.remove(&key.pool);
            if tenant.is_nothing() {
                self.state.tenants.remove(&key.tenant);
            }
            self.open.remove(key);
            return;
        };
        tenant.pools.insert(key.pool.clone());
        let pool = PoolState { spec, placed: Placed::new(), total: DesiredCounts::default(), unplaced: None };
        self.state.pools.insert(key.clone(), pool);
        // Larger than it was, it may be too large for its nodes.
        for (id, counts) in placed {
            for phase in PHASES {
                self.state.add(key, &id, phase, count(&counts, phase));
            }
            self.touched.insert(id);
        }
        self.open.insert(key.clone());
    }

    /// Where everything is.
    #[must_use]
    pub fn plan(&self) -> FleetPlan {
        let placed = self.state.pools.iter().filter(|(_, pool)| !pool.placed.is_empty());
        let unplaced =
            self.state.pools.iter().filter_map(|(key, pool)| Some((key.clone(), pool.unplaced.clone()?)));
        FleetPlan {
            placed: placed.map(|(key, pool)| (key.clone(), pool.placed.clone())).collect(),
            unplaced: unplaced.collect(),
        }
    }

    /// Where one pool is.
    #[must_use]
    pub fn placed(&self, key: &PoolKey) -> Option<&Placed> {
        self.state.pool(key).map(|pool| &pool.placed)
    }

    /// What of one pool no node takes.
    #[must_use]
    pub fn unplaced(&self, key: &PoolKey) -> Option<&Unplaced> {
        self.state.pool(key).and_then(|pool| pool.unplaced.as_ref())
    }

    /// Places what is not placed, and says which pools' placements changed.
    pub fn settle(&mut self, now: Timestamp) -> BTreeSet<PoolKey> {
        let mut settling = Settling::default();
        self.leave_nodes(&mut settling, now);
        for key in self.open.clone() {
            self.shrink(&mut settling, &key);
        }
        let mut ranked: Vec<_> =
            self.open.iter().filter_map(|key| Some((self.rank(key)?, key.clone()))).collect();
        ranked.sort();
        // What is placed may open a domain for another phase, or bring a group its node: until nothing more is placed.
        let mut placed = 1;
        while placed > 0 {
            placed = 0;
            for phase in PHASES {
                for (_, key) in &ranked {
                    placed += u64::from(self.grow(&mut settling, key, phase));
                }
            }
        }
        for (_, key) in ranked {
            self.conclude(&key);
        }
        let changed = settling.before.into_iter().filter(|(key, before)| self.placed(key) != Some(before));
        changed.map(|(key, _)| key).collect()
    }

    /// Pools that may have too many or too few.
    pub(super) fn open(&self) -> impl Iterator<Item = &PoolKey> {
        self.open.iter()
    }

    /// In this order pools are placed, and in the reverse order they give way.
    pub(super) fn rank(&self, key: &PoolKey) -> Option<(PoolRole, bool)> {
        self.state.pool(key).map(|pool| (pool.spec.role, !pool.spec.critical))
    }

    /// Takes off what can't stay on its node.
    fn leave_nodes(&mut self, settling: &mut Settling, now: Timestamp) {
        while let Some((since, id)) = self.away.first().cloned() {
            if !is_lost(since, self.elected_at, now) {
                break;
            }
            // It takes nothing new while it is away, so it need not be looked at again.
            self.away.pop_first();
            let pools = self.state.nodes.get(&id).map(|node| node.pools.clone()).unwrap_or_default();
            for key in pools {
                self.leave(settling, &key, &id);
            }
        }
        for id in std::mem::take(&mut self.touched) {
            let Some(node) = self.state.nodes.get(&id) else { continue };
            let is_driven_out = |key: &&PoolKey| {
                let placement = self.state.pool(key).map(|pool| &pool.spec.placement);
                placement.is_some_and(|placement| {
                    node.spec.taints.iter().any(|taint| drives_out(placement, taint))
                })
            };
            let leaving: Vec<_> = node.pools.iter().filter(is_driven_out).cloned().collect();
            for key in leaving {
                self.leave(settling, &key, &id);
            }
            self.fit(settling, &id);
        }
    }

    fn leave(&mut self, settling: &mut Settling, key: &PoolKey, id: &NodeId) {
        self.remember(settling, key);
        self.take_off(key, id);
        self.open.insert(key.clone());
    }

    fn take_off(&mut self, key: &PoolKey, id: &NodeId) {
        let counts = self.state.pool(key).and_then(|pool| pool.placed.get(id)).copied().unwrap_or_default();
        for phase in PHASES {
            self.state.remove(key, id, phase, count(&counts, phase));
        }
    }

    /// Takes off what a node has no room for, of the lowest ranks first, and what sleeps last.
    fn fit(&mut self, settling: &mut Settling, id: &NodeId) {
        while let Some(node) = self.state.nodes.get(id).filter(|node| node.is_overfull()) {
            let helps = |key: &PoolKey, phase: Phase| {
                let pool = self.state.pool(key)?;
                let counts = pool.placed.get(id)?;
                (count(counts, phase) > 0 && node.relieves(&pool.need(phase))).then_some(())
            };
            let mut pools: Vec<_> =
                node.pools.iter().filter_map(|key| Some((self.rank(key)?, key))).collect();
            pools.sort();
            let unit = pools.iter().rev().find_map(|(_, key)| {
                let phase = [Phase::Warm, Phase::Running, Phase::Sleeping].into_iter();
                phase
                    .into_iter()
                    .find(|phase| helps(key, *phase).is_some())
                    .map(|phase| ((*key).clone(), phase))
            });
            let Some((key, phase)) = unit else { return };
            self.remember(settling, &key);
            self.state.remove(&key, id, phase, 1);
            self.open.insert(key);
        }
    }

    /// Takes away what a pool has beyond its counts: from nodes that take nothing new, then from full ones.
    fn shrink(&mut self, settling: &mut Settling, key: &PoolKey) {
        for phase in PHASES {
            let Some(pool) = self.state.pool(key) else { return };
            let mut surplus = pool.surplus(phase);
            if surplus == 0 {
                continue;
            }
            let mut domains = Domains::of(&self.state, key, &pool.spec.placement);
            let worth = |state: &State, domains: &Option<Domains>, id: &NodeId| {
                let node = state.nodes.get(id)?;
                let crowd = domains.as_ref().map_or(0, |domains| domains.count(id, &node.spec.labels));
                Some((!node.accepts(), crowd, Reverse(node.score().total()), id.clone()))
            };
            let on = pool.placed.iter().filter(|(_, counts)| count(counts, phase) > 0);
            let mut heap: BinaryHeap<_> = on.filter_map(|(id, _)| worth(&self.state, &domains, id)).collect();
            self.remember(settling, key);
            while surplus > 0 {
                let Some(top) = heap.pop() else { break };
                let id = top.3.clone();
                let current = worth(&self.state, &domains, &id);
                if current.as_ref() != Some(&top) {
                    heap.extend(current);
                    continue;
                }
                self.state.remove(key, &id, phase, 1);
                if let (Some(domains), Some(node)) = (&mut domains, self.state.nodes.get(&id)) {
                    domains.remove(&id, &node.spec.labels);
                }
                *settling.lost.entry(key.clone()).or_default().entry(id.clone()).or_default() += 1;
                surplus -= 1;
                let left = self.state.pool(key).and_then(|pool| pool.placed.get(&id));
                if left.is_some_and(|counts| count(counts, phase) > 0) {
                    heap.extend(worth(&self.state, &domains, &id));
                }
            }
        }
    }

    pub(super) fn remember(&self, settling: &mut Settling, key: &PoolKey) {
        if let Some(placed) = self.placed(key) {
            settling.before.entry(key.clone()).or_insert_with(|| placed.clone());
        }
    }

    /// Says what a pool still lacks; one that lacks nothing need not be looked at again.
    fn conclude(&mut self, key: &PoolKey) {
        let Some(pool) = self.state.pool(key) else { return };
        let mut lacks = DesiredCounts::default();
        for phase in PHASES {
            *count_mut(&mut lacks, phase) = pool.lacks(phase);
        }
        let lacking = PHASES.into_iter().find(|phase| pool.lacks(*phase) > 0);
        let reason = lacking.and_then(|phase| self.obstacle(key, phase));
        let Some(pool) = self.state.pools.get_mut(key) else { return };
        pool.unplaced = lacking.map(|_| Unplaced { counts: lacks, reason: reason.unwrap_or_default() });
        if pool.unplaced.is_none() {
            self.open.remove(key);
        }
    }
}
