//! A fleet between changes: what changed is told to it, and [`Placer::settle`] places what is not placed.
//!
//! Settling first takes away: from nodes that are lost or drained, from nodes that are too small, and what a pool has
//! beyond its counts. Then it places what pools lack: all running counts first, pools in the order of their ranks.

use std::cmp::Ordering;
use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::document::DesiredCounts;
use mvm_proto::{NodeId, Phase, TenantId, Timestamp};

use super::filter::drives_out;
use super::slab::{NodeNumber, Number as _, PoolNumber};
use super::state::{PHASES, PoolEntry, PoolState, State, count, count_mut};
use super::{
    AwayGrace, Fleet, FleetNode, FleetPlan, FleetPool, FleetTenant, Placed, PoolKey, Unplaced, UnplacedCause,
    is_lost,
};

/// Holds a fleet and the placement of its pools.
#[derive(Debug, Clone, Default)]
pub struct Placer {
    pub(super) state: State,
    /// Nodes that are away and not lost yet, the longest first.
    away: BTreeSet<(Timestamp, NodeNumber)>,
    elected_at: Option<Timestamp>,
    away_grace: AwayGrace,
    /// Nodes that may have to give something up.
    touched: BTreeSet<NodeNumber>,
    /// Pools that may have too many or too few; those that lack something stay here.
    open: BTreeSet<PoolNumber>,
    /// Pools of which more, less or something else has no place than was told.
    news: BTreeSet<PoolKey>,
}

/// What one settling remembers.
#[derive(Debug, Default)]
pub(super) struct Settling {
    /// How many instances of a pool nodes had in a phase before it, where it changed something.
    before: BTreeMap<(PoolNumber, NodeNumber, Phase), u32>,
    /// What pools gave up because their counts say so: they get it back first, in another phase.
    lost: BTreeMap<(PoolNumber, NodeNumber), u32>,
}

impl Settling {
    /// What a pool has on a node in this phase is about to change.
    pub(super) fn note(&mut self, state: &State, pool: PoolNumber, node: NodeNumber, phase: Phase) {
        let count = || state.pool(pool).map_or(0, |pool| pool.on(phase).of(node));
        self.before.entry((pool, node, phase)).or_insert_with(count);
    }

    /// A pool gave one up on a node.
    pub(super) fn lose(&mut self, pool: PoolNumber, node: NodeNumber) {
        *self.lost.entry((pool, node)).or_default() += 1;
    }

    /// How many a pool gave up on which nodes.
    pub(super) fn lost(&self, pool: PoolNumber) -> BTreeMap<NodeNumber, u32> {
        let from = self.lost.range((pool, NodeNumber::of(0))..);
        from.take_while(|((of, _), _)| *of == pool).map(|((_, node), lost)| (*node, *lost)).collect()
    }

    /// The pools that have something else somewhere than before it.
    fn changed(self, state: &State) -> BTreeSet<PoolKey> {
        let mut changed: Vec<PoolNumber> = Vec::new();
        for ((number, node, phase), before) in self.before {
            let is_changed = |pool: &PoolState| pool.on(phase).of(node) != before;
            if changed.last() != Some(&number) && state.pool(number).is_some_and(is_changed) {
                changed.push(number);
            }
        }
        changed.into_iter().filter_map(|number| Some(state.pools.get(number)?.key.clone())).collect()
    }
}

/// A pool that may have too many or too few, as it is after nodes gave up what they can't keep.
struct Work {
    pool: PoolNumber,
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
            let Some(number) = placer.state.pool_number(key) else { continue };
            for (id, counts) in fleet.placed.get(key).into_iter().flatten() {
                let Some(node) = placer.state.numbers.number(id) else { continue };
                for phase in PHASES {
                    placer.state.add(number, node, phase, count(counts, phase));
                }
            }
        }
        placer
    }

    /// A node is as told, or there no more.
    pub fn set_node(&mut self, id: &NodeId, node: Option<FleetNode>) {
        let known = self.state.numbers.number(id);
        if let Some(number) = known {
            if node.is_none() {
                for pool in self.state.nodes.get(number).map(|node| node.pools.clone()).unwrap_or_default() {
                    self.take_off(pool, number);
                    self.open.insert(pool);
                }
            }
            let had = self.state.nodes.get(number).into_iter().flat_map(|node| &node.told);
            for pool in had.map(|(pool, _)| *pool).collect::<Vec<_>>() {
                self.state.set_beyond(number, pool, None);
            }
            if let Some(since) = self.state.nodes.get(number).and_then(|node| node.spec.away_since) {
                self.away.remove(&(since, number));
            }
        }
        let Some(mut spec) = node else {
            if let Some(number) = known {
                self.state.forget_node(number);
                self.touched.remove(&number);
            }
            return;
        };
        let has = std::mem::take(&mut spec.beyond);
        let away_since = spec.away_since;
        let number = self.state.declare_node(id, spec);
        if let Some(since) = away_since {
            self.away.insert((since, number));
        }
        for (key, beyond) in has {
            let pool = self.state.pool_entry(&key);
            self.state.set_beyond(number, pool, Some(beyond));
        }
        self.touched.insert(number);
    }

    /// This coordinator became the leader: the grace of nodes that are away starts again.
    pub fn set_elected_at(&mut self, elected_at: Timestamp) {
        self.elected_at = Some(elected_at);
    }

    /// A tenant is as told, or there no more: nothing new of its pools is placed then.
    pub fn set_tenant(&mut self, id: &TenantId, tenant: Option<FleetTenant>) {
        let number = self.state.tenant_number(id);
        if let Some(state) = self.state.tenants.get_mut(number) {
            state.quotas = tenant.map(|tenant| tenant.quotas);
        }
        self.state.release_tenant(number);
    }

    /// A pool is as told, or there no more.
    pub fn set_pool(&mut self, key: &PoolKey, pool: Option<FleetPool>) {
        let Some(spec) = pool else {
            if let Some(number) = self.state.pool_number(key) {
                self.take_off_all(number);
                self.open.remove(&number);
                self.state.declare_pool(number, None);
                self.state.release_pool(number);
            }
            return;
        };
        let number = self.state.pool_entry(key);
        let Some(known) = self.state.pool(number) else {
            self.state.declare_pool(number, Some(spec));
            self.open.insert(number);
            return;
        };
        if known.spec.resources == spec.resources {
            if known.spec.placement.tolerations != spec.placement.tolerations {
                self.touched.extend(known.nodes());
            }
            self.state.declare_pool(number, Some(spec));
        } else {
            let placed = self.take_off_all(number);
            self.state.declare_pool(number, None);
            self.state.declare_pool(number, Some(spec));
            // Larger than it was, it may be too large for its nodes.
            for (node, phase, count) in placed {
                self.state.add(number, node, phase, count);
                self.touched.insert(node);
            }
        }
        self.open.insert(number);
    }

    /// Where everything is.
    #[must_use]
    pub fn plan(&self) -> FleetPlan {
        let mut plan = FleetPlan::default();
        for (_, PoolEntry { key, declared, .. }) in self.state.pools.iter() {
            let Some(pool) = declared else { continue };
            if pool.nodes().next().is_some() {
                plan.placed.insert(key.clone(), self.state.placed(pool).clone());
            }
            plan.unplaced.extend(pool.unplaced.clone().map(|unplaced| (key.clone(), unplaced)));
        }
        plan
    }

    /// Where one pool is.
    #[must_use]
    pub fn placed(&self, key: &PoolKey) -> Option<&Placed> {
        let pool = self.state.pool(self.state.pool_number(key)?)?;
        Some(self.state.placed(pool))
    }

    /// What of one pool no node takes.
    #[must_use]
    pub fn unplaced(&self, key: &PoolKey) -> Option<&Unplaced> {
        self.state.pool(self.state.pool_number(key)?)?.unplaced.as_ref()
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
        let mut work: Vec<Work> = self.open.iter().filter_map(|number| self.work(*number)).collect();
        let entry = |state: &State, work: &Work| state.pools.get(work.pool).map(|entry| entry.key.clone());
        if work.len() > 1 {
            work.sort_by_cached_key(|work| entry(&self.state, work));
        }
        for work in work.iter().filter(|work| work.has_surplus) {
            self.shrink(&mut settling, work.pool);
        }
        work.sort_by_key(|work| self.state.pool(work.pool).map(PoolState::rank));
        // What is placed may open a domain for another phase, or bring a group its node: until nothing more is placed.
        let mut placed = 1;
        while placed > 0 {
            placed = 0;
            for (at, phase) in PHASES.into_iter().enumerate() {
                for work in work.iter_mut().filter(|work| work.lacks[at] > 0) {
                    let more = self.grow(&mut settling, work.pool, phase);
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

    fn work(&self, number: PoolNumber) -> Option<Work> {
        let pool = self.state.pool(number)?;
        Some(Work {
            pool: number,
            lacks: PHASES.map(|phase| pool.lacks(phase)),
            has_surplus: PHASES.into_iter().any(|phase| pool.surplus(phase) > 0),
            was_unplaced: pool.unplaced.is_some(),
        })
    }

    /// Pools that may have too many or too few.
    pub(super) fn open(&self) -> impl Iterator<Item = PoolNumber> {
        self.open.iter().copied()
    }

    /// In this order pools are placed, and in the reverse order they give way.
    pub(super) fn order(&self, one: &PoolEntry, other: &PoolEntry) -> Ordering {
        let rank = |entry: &PoolEntry| entry.declared.as_ref().map(PoolState::rank);
        (rank(one), &one.key).cmp(&(rank(other), &other.key))
    }

    /// Takes off what can't stay on its node.
    fn leave_nodes(&mut self, settling: &mut Settling, now: Timestamp) {
        while let Some((since, node)) = self.away.first().copied() {
            if !is_lost(since, self.elected_at, self.away_grace, now) {
                break;
            }
            // It takes nothing new while it is away, so it need not be looked at again.
            self.away.pop_first();
            let pools = self.state.nodes.get(node).map(|node| node.pools.clone()).unwrap_or_default();
            for pool in pools {
                self.leave(settling, pool, node);
            }
        }
        for number in std::mem::take(&mut self.touched) {
            let Some(node) = self.state.nodes.get(number) else { continue };
            let is_driven_out = |pool: &&PoolNumber| {
                self.state.pool(**pool).is_some_and(|pool| {
                    node.spec.taints.iter().any(|taint| drives_out(&pool.spec.placement, taint))
                })
            };
            let leaving: Vec<_> = node.pools.iter().filter(is_driven_out).copied().collect();
            for pool in leaving {
                self.leave(settling, pool, number);
            }
            self.fit(settling, number);
        }
    }

    fn leave(&mut self, settling: &mut Settling, pool: PoolNumber, node: NodeNumber) {
        PHASES.into_iter().for_each(|phase| settling.note(&self.state, pool, node, phase));
        self.take_off(pool, node);
        self.open.insert(pool);
    }

    fn take_off(&mut self, pool: PoolNumber, node: NodeNumber) {
        PHASES.into_iter().for_each(|phase| self.state.remove(pool, node, phase, u32::MAX));
    }

    /// Takes a pool off all nodes; says what they had.
    fn take_off_all(&mut self, number: PoolNumber) -> Vec<(NodeNumber, Phase, u32)> {
        let Some(pool) = self.state.pool(number) else { return Vec::new() };
        let of = |phase: Phase| pool.on(phase).iter().map(move |(node, count)| (node, phase, count));
        let placed: Vec<_> = PHASES.into_iter().flat_map(of).collect();
        for (node, phase, count) in &placed {
            self.state.remove(number, *node, *phase, *count);
        }
        placed
    }

    /// Takes off what a node has no room for, of the lowest ranks first, and what sleeps last.
    fn fit(&mut self, settling: &mut Settling, number: NodeNumber) {
        while let Some(node) = self.state.nodes.get(number).filter(|node| node.is_overfull()) {
            let helps = |pool: &PoolState, phase: Phase| {
                pool.on(phase).of(number) > 0 && node.relieves(&pool.need(phase))
            };
            let mut pools: Vec<_> =
                node.pools.iter().filter_map(|pool| Some((*pool, self.state.pools.get(*pool)?))).collect();
            pools.sort_by(|(_, one), (_, other)| self.order(other, one));
            let unit = pools.into_iter().find_map(|(pool, entry)| {
                let declared = entry.declared.as_ref()?;
                let mut phases = [Phase::Warm, Phase::Running, Phase::Sleeping].into_iter();
                phases.find(|phase| helps(declared, *phase)).map(|phase| (pool, phase))
            });
            let Some((pool, phase)) = unit else { return };
            settling.note(&self.state, pool, number, phase);
            self.state.remove(pool, number, phase, 1);
            self.open.insert(pool);
        }
    }

    /// Says what a pool still lacks; one that lacks nothing need not be looked at again.
    fn conclude(&mut self, work: &Work) {
        let lacking = PHASES.into_iter().zip(work.lacks).find(|(_, lacks)| *lacks > 0);
        let unplaced = lacking.map(|(phase, _)| {
            let mut counts = DesiredCounts::default();
            PHASES
                .into_iter()
                .zip(work.lacks)
                .for_each(|(phase, lacks)| *count_mut(&mut counts, phase) = lacks);
            let obstacle = self.obstacle(work.pool, phase);
            let (cause, reason) = obstacle.unwrap_or((UnplacedCause::NoNode, String::new()));
            Unplaced { counts, cause, reason }
        });
        if unplaced.is_none() {
            self.open.remove(&work.pool);
        }
        if (unplaced.is_some() || work.was_unplaced)
            && let Some(PoolEntry { key, declared: Some(pool), .. }) = self.state.pools.get_mut(work.pool)
        {
            let told = |unplaced: &Option<Unplaced>| unplaced.as_ref().map(|told| (told.counts, told.cause));
            if told(&pool.unplaced) != told(&unplaced) {
                self.news.insert(key.clone());
            }
            pool.unplaced = unplaced;
        }
    }
}
