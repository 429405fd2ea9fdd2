//! A fleet between changes: what changed is told to it, and [`Placer::settle`] places what is not placed.
//!
//! Settling first takes away: from nodes that are lost or drained, from nodes that are too small, and what a pool has
//! beyond its counts. Then it places what pools lack: all running counts first, pools in the order of their ranks.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::document::{DesiredCounts, PoolRole};
use mvm_proto::{NodeId, Phase, TenantId, Timestamp};

use super::filter::drives_out;
use super::state::{NodeState, PHASES, PoolState, State, count, count_mut};
use super::{
    AwayGrace, Fleet, FleetNode, FleetPlan, FleetPool, FleetTenant, Placed, PoolKey, Unplaced, UnplacedCause,
    is_lost,
};

/// Holds a fleet and the placement of its pools.
#[derive(Debug, Clone, Default)]
pub struct Placer {
    pub(super) state: State,
    /// Nodes that are away and not lost yet, the longest first.
    away: BTreeSet<(Timestamp, NodeId)>,
    elected_at: Option<Timestamp>,
    away_grace: AwayGrace,
    /// Nodes that may have to give something up.
    touched: BTreeSet<NodeId>,
    /// Pools that may have too many or too few; those that lack something stay here.
    open: BTreeSet<PoolKey>,
    /// Pools of which more, less or something else has no place than was told.
    news: BTreeSet<PoolKey>,
}

/// What one settling remembers.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// What nodes had of a pool before it, where it changed something.
    before: BTreeMap<PoolKey, BTreeMap<NodeId, DesiredCounts>>,
    /// What pools gave up because their counts say so: they get it back first, in another phase.
    pub(super) lost: BTreeMap<PoolKey, BTreeMap<NodeId, u32>>,
}

impl Settling {
    /// What a pool has on a node is about to change.
    pub(super) fn note(&mut self, state: &State, key: &PoolKey, id: &NodeId) {
        let Some(pool) = state.pool(key) else { return };
        if !self.before.contains_key(key) {
            self.before.insert(key.clone(), BTreeMap::new());
        }
        if let Some(before) = self.before.get_mut(key).filter(|before| !before.contains_key(id)) {
            before.insert(id.clone(), pool.placed.get(id).copied().unwrap_or_default());
        }
    }

    /// The pools that have something else somewhere than before it.
    fn changed(self, state: &State) -> BTreeSet<PoolKey> {
        let is_changed = |(key, before): &(PoolKey, BTreeMap<NodeId, DesiredCounts>)| {
            let Some(pool) = state.pool(key) else { return false };
            before.iter().any(|(id, before)| pool.placed.get(id).copied().unwrap_or_default() != *before)
        };
        self.before.into_iter().filter(is_changed).map(|(key, _)| key).collect()
    }
}

/// A pool that may have too many or too few, as it is after nodes gave up what they can't keep.
struct Work {
    rank: (PoolRole, bool),
    key: PoolKey,
    lacks: [u32; PHASES.len()],
    has_surplus: bool,
    was_unplaced: bool,
}

impl Placer {
    /// Holds this fleet; nothing is decided yet.
    #[must_use]
    pub fn of(fleet: &Fleet) -> Self {
        let (elected_at, away_grace) = (fleet.elected_at, fleet.away_grace);
        let mut placer = Self { elected_at, away_grace, ..Self::default() };
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
        let Some(mut spec) = node else {
            self.state.numbers.forget(id);
            return;
        };
        let has = std::mem::take(&mut spec.beyond);
        if let Some(since) = spec.away_since {
            self.away.insert((since, id.clone()));
        }
        let mut now = NodeState::new(spec, self.state.numbers.number(id));
        if let Some(before) = before {
            (now.pools, now.used) = (before.pools, before.used);
        }
        self.state.index.update(id, &mut now);
        self.state.numbers.update(&now);
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
        let pool = PoolState {
            spec,
            placed: Placed::new(),
            numbered: BTreeMap::new(),
            total: DesiredCounts::default(),
            unplaced: None,
        };
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

    /// The pools of which more, less or something else has no place than when this was asked last; a reason that is
    /// only worded differently is no news.
    pub fn take_unplaced_news(&mut self) -> BTreeSet<PoolKey> {
        std::mem::take(&mut self.news)
    }

    /// Places what is not placed, and says which pools' placements changed.
    pub fn settle(&mut self, now: Timestamp) -> BTreeSet<PoolKey> {
        let mut settling = Settling::default();
        self.leave_nodes(&mut settling, now);
        let mut work: Vec<Work> = self.open.iter().filter_map(|key| self.work(key)).collect();
        for work in work.iter().filter(|work| work.has_surplus) {
            self.shrink(&mut settling, &work.key);
        }
        work.sort_by(|a, b| (a.rank, &a.key).cmp(&(b.rank, &b.key)));
        // What is placed may open a domain for another phase, or bring a group its node: until nothing more is placed.
        let mut placed = 1;
        while placed > 0 {
            placed = 0;
            for (at, phase) in PHASES.into_iter().enumerate() {
                for work in work.iter_mut().filter(|work| work.lacks[at] > 0) {
                    let more = self.grow(&mut settling, &work.key, phase);
                    work.lacks[at] = work.lacks[at].saturating_sub(more);
                    placed += u64::from(more);
                }
            }
        }
        for work in work {
            self.conclude(&work);
        }
        settling.changed(&self.state)
    }

    fn work(&self, key: &PoolKey) -> Option<Work> {
        let pool = self.state.pool(key)?;
        Some(Work {
            rank: pool.rank(),
            key: key.clone(),
            lacks: PHASES.map(|phase| pool.lacks(phase)),
            has_surplus: PHASES.into_iter().any(|phase| pool.surplus(phase) > 0),
            was_unplaced: pool.unplaced.is_some(),
        })
    }

    /// Pools that may have too many or too few.
    pub(super) fn open(&self) -> impl Iterator<Item = &PoolKey> {
        self.open.iter()
    }

    /// In this order pools are placed, and in the reverse order they give way.
    pub(super) fn rank(&self, key: &PoolKey) -> Option<(PoolRole, bool)> {
        self.state.pool(key).map(PoolState::rank)
    }

    /// Takes off what can't stay on its node.
    fn leave_nodes(&mut self, settling: &mut Settling, now: Timestamp) {
        while let Some((since, id)) = self.away.first().cloned() {
            if !is_lost(since, self.elected_at, self.away_grace, now) {
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
        settling.note(&self.state, key, id);
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
            settling.note(&self.state, &key, id);
            self.state.remove(&key, id, phase, 1);
            self.open.insert(key);
        }
    }

    /// Says what a pool still lacks; one that lacks nothing need not be looked at again.
    fn conclude(&mut self, work: &Work) {
        let key = &work.key;
        let lacking = PHASES.into_iter().zip(work.lacks).find(|(_, lacks)| *lacks > 0);
        let unplaced = lacking.map(|(phase, _)| {
            let mut counts = DesiredCounts::default();
            PHASES
                .into_iter()
                .zip(work.lacks)
                .for_each(|(phase, lacks)| *count_mut(&mut counts, phase) = lacks);
            let (cause, reason) = self.obstacle(key, phase).unwrap_or((UnplacedCause::NoNode, String::new()));
            Unplaced { counts, cause, reason }
        });
        if unplaced.is_none() {
            self.open.remove(key);
        }
        if (unplaced.is_some() || work.was_unplaced)
            && let Some(pool) = self.state.pools.get_mut(key)
        {
            let told = |unplaced: &Option<Unplaced>| unplaced.as_ref().map(|told| (told.counts, told.cause));
            if told(&pool.unplaced) != told(&unplaced) {
                self.news.insert(key.clone());
            }
            pool.unplaced = unplaced;
        }
    }
}
