//! Placing what a pool lacks, one instance after the other, on the best node that takes it.

use std::collections::BTreeMap;

use mvm_proto::{NodeId, Phase};

use super::FleetPool;
use super::filter::{Obstacle, UnplacedCause};
use super::placer::{Placer, Settling};
use super::queue::{Queue, Wishes};
use super::slab::{NodeNumber, PoolNumber, TenantNumber};
use super::spread::Domains;
use super::state::{PHASES, State, count};
use crate::usage::Usage;

/// The pools that are kept on one node together with the one that is placed.
struct Group {
    /// Where they are, if any is placed.
    home: Option<NodeNumber>,
    /// What all of them need, this one included.
    whole: Usage,
}

impl Placer {
    /// Places what a pool lacks in one phase, as far as there is quota and room. Says how many it placed.
    pub(super) fn grow(&mut self, settling: &mut Settling, number: PoolNumber, phase: Phase) -> u32 {
        let Some(entry) = self.state.pools.get(number) else { return 0 };
        let Some(pool) = &entry.declared else { return 0 };
        let lacking = pool.lacks(phase);
        if lacking == 0 {
            return 0;
        }
        let (need, spec, tenant) = (pool.need(phase), pool.spec.clone(), entry.tenant);
        let mut placed = 0;
        if entry.told.instances > 0 {
            for at in &entry.told.nodes {
                settling.note(&self.state, number, *at, phase);
            }
            placed = self.state.take_back(number, phase, lacking);
        }
        if placed == lacking {
            return placed;
        }
        let mut search = Search::new(&self.state, number, tenant, &spec, need, settling.lost(number));
        while placed < lacking && self.state.quota_allows(number, &Usage::default(), 0, &need).is_ok() {
            let Some(at) = search.next(&self.state) else { break };
            settling.note(&self.state, number, at, phase);
            self.state.add(number, at, phase, 1);
            placed += 1;
            if placed < lacking {
                search.took(&self.state, at);
            }
        }
        placed
    }

    /// What keeps a pool from having one more in this phase.
    pub(super) fn obstacle(&self, number: PoolNumber, phase: Phase) -> Option<(UnplacedCause, String)> {
        let (pool, tenant) = (self.state.pool(number)?, self.state.pools.get(number)?.tenant);
        let need = pool.need(phase);
        if let Err(reason) = self.state.quota_allows(number, &Usage::default(), 0, &need) {
            return Some((UnplacedCause::Quota, reason));
        }
        let mut search = Search::new(&self.state, number, tenant, &pool.spec, need, BTreeMap::new());
        if search.next(&self.state).is_some() {
            return None;
        }
        let name = |at: NodeNumber| self.state.nodes.get(at).map(|node| &node.name);
        let Usage { vcpus, mem_mib, disk_mib, .. } = need;
        let shape = format!("{vcpus} vcpus, {mem_mib} MiB of memory and {disk_mib} MiB of disk");
        let cause = search.obstacle.as_ref().map_or(UnplacedCause::NoNode, |(_, obstacle)| obstacle.into());
        let best = search.obstacle.and_then(|(at, obstacle)| Some(format!("; {}: {obstacle}", name(at)?)));
        let best = best.unwrap_or_default();
        Some(match search.group.and_then(|group| name(group.home?)) {
            Some(home) => (
                UnplacedCause::Group,
                format!("the pools of its group are on {home}, which does not take it{best}"),
            ),
            None => (cause, format!("no node takes an instance that needs {shape}{best}")),
        })
    }
}

/// The search for nodes for the instances of one pool in one phase.
pub(super) struct Search<'p> {
    pool: PoolNumber,
    spec: &'p FleetPool,
    need: Usage,
    group: Option<Group>,
    queue: Queue,
    domains: Option<Domains>,
    /// Nodes whose domain has too many for now.
    waiting: Vec<NodeNumber>,
    /// The best node that was refused, and why.
    obstacle: Option<(NodeNumber, Obstacle)>,
}

impl<'p> Search<'p> {
    pub(super) fn new(
        state: &State,
        pool: PoolNumber,
        tenant: TenantNumber,
        spec: &'p FleetPool,
        need: Usage,
        lost: BTreeMap<NodeNumber, u32>,
    ) -> Self {
        Self {
            pool,
            spec,
            need,
            group: state.group(tenant, spec),
            queue: Queue::new(state, Wishes::of(state, tenant, spec), spec, &need, lost),
            domains: Domains::of(state, pool, &spec.placement),
            waiting: Vec::new(),
            obstacle: None,
        }
    }

    /// The best node that takes one more.
    pub(super) fn next(&mut self, state: &State) -> Option<NodeNumber> {
        let accepts = |at: NodeNumber, need: &Usage, domains: &Option<Domains>| {
            state.accepts(self.pool, self.spec, at, need, domains.as_ref())
        };
        let mut need = self.need;
        if let Some(group) = &self.group {
            if let Some(home) = group.home {
                return match accepts(home, &need, &self.domains) {
                    Ok(()) => Some(home),
                    Err(obstacle) => {
                        self.obstacle = Some((home, obstacle));
                        None
                    }
                };
            }
            need = group.whole;
        }
        loop {
            let at = self.queue.pop(state)?;
            match accepts(at, &need, &self.domains) {
                Ok(()) => return Some(at),
                Err(obstacle) => {
                    if matches!(obstacle, Obstacle::Skew { .. }) {
                        self.waiting.push(at);
                    }
                    self.obstacle.get_or_insert((at, obstacle));
                }
            }
        }
    }

    /// Whether there is one node only that it may be on.
    pub(super) fn is_bound(&self) -> bool {
        self.group.as_ref().is_some_and(|group| group.home.is_some())
    }

    /// What the best node that was refused has against it.
    pub(super) fn refused(&self, name: impl Fn(NodeNumber) -> Option<NodeId>) -> Option<String> {
        let (at, obstacle) = self.obstacle.as_ref()?;
        let name = name(*at)?;
        Some(match self.is_bound() {
            true => format!("the pools of its group are on {name}, and stay together: {obstacle}"),
            false => format!("{name}: {obstacle}"),
        })
    }

    /// A node took one.
    fn took(&mut self, state: &State, at: NodeNumber) {
        self.queue.took(at);
        self.queue.push(state, at);
        if let (Some(domains), Some(node)) = (&mut self.domains, state.nodes.get(at))
            && domains.add(node)
        {
            self.waiting.drain(..).for_each(|at| self.queue.push(state, at));
        }
        if let Some(group) = &mut self.group {
            group.home = Some(at);
        }
    }
}

impl State {
    /// Whether a pool's instances have to be on the node where its group is already.
    pub(super) fn is_bound(&self, tenant: TenantNumber, spec: &FleetPool) -> bool {
        self.group(tenant, spec).is_some_and(|group| group.home.is_some())
    }

    /// The pools that have to be on one node with this one.
    fn group(&self, tenant: TenantNumber, spec: &FleetPool) -> Option<Group> {
        let name = spec.placement.colocate.as_ref()?;
        let pools = self.tenants.get(tenant).into_iter().flat_map(|tenant| tenant.pools.values());
        let members = pools.filter_map(|number| self.pool(*number));
        let mut group = Group { home: None, whole: Usage::default() };
        for member in members.filter(|member| member.spec.placement.colocate.as_ref() == Some(name)) {
            for phase in PHASES {
                let number = count(&member.spec.counts, phase);
                group.whole = group.whole.plus(member.need(phase).times(number));
            }
            group.home =
                group.home.into_iter().chain(member.nodes()).min_by_key(|at| self.numbers.place(*at));
        }
        Some(group)
    }
}
