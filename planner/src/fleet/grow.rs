//! Placing what a pool lacks, one instance after the other, on the best node that takes it.

use std::collections::BTreeMap;

use mvm_proto::{NodeId, Phase};

use super::filter::{Obstacle, UnplacedCause};
use super::placer::{Placer, Settling};
use super::queue::Queue;
use super::spread::Domains;
use super::state::{PHASES, State, count};
use super::{FleetPool, PoolKey};
use crate::usage::Usage;

/// The pools that are kept on one node together with the one that is placed.
struct Group {
    /// Where they are, if any is placed.
    home: Option<NodeId>,
    /// What all of them need, this one included.
    whole: Usage,
}

impl Placer {
    /// Places what a pool lacks in one phase, as far as there is quota and room. Says how many it placed.
    pub(super) fn grow(&mut self, settling: &mut Settling, key: &PoolKey, phase: Phase) -> u32 {
        let Some(pool) = self.state.pool(key) else { return 0 };
        let lacking = pool.lacks(phase);
        if lacking == 0 {
            return 0;
        }
        let (need, spec) = (pool.need(phase), pool.spec.clone());
        let told = self.state.beyond.get(key).filter(|told| told.instances > 0);
        for id in told.iter().flat_map(|told| &told.nodes) {
            settling.note(&self.state, key, id);
        }
        let mut placed = self.state.take_back(key, phase, lacking);
        if placed == lacking {
            return placed;
        }
        let lost = settling.lost.get(key);
        let mut search = Search::new(&self.state, key, &spec, need, lost);
        while placed < lacking && self.state.quota_allows(key, &Usage::default(), 0, &need).is_ok() {
            let Some(id) = search.next(&self.state) else { break };
            settling.note(&self.state, key, &id);
            self.state.add(key, &id, phase, 1);
            search.took(&self.state, &id);
            placed += 1;
        }
        placed
    }

    /// What keeps a pool from having one more in this phase.
    pub(super) fn obstacle(&self, key: &PoolKey, phase: Phase) -> Option<(UnplacedCause, String)> {
        let pool = self.state.pool(key)?;
        let need = pool.need(phase);
        if let Err(reason) = self.state.quota_allows(key, &Usage::default(), 0, &need) {
            return Some((UnplacedCause::Quota, reason));
        }
        let mut search = Search::new(&self.state, key, &pool.spec, need, None);
        if search.next(&self.state).is_some() {
            return None;
        }
        let Usage { vcpus, mem_mib, disk_mib, .. } = need;
        let shape = format!("{vcpus} vcpus, {mem_mib} MiB of memory and {disk_mib} MiB of disk");
        let cause = search.obstacle.as_ref().map_or(UnplacedCause::NoNode, |(_, obstacle)| obstacle.into());
        let best = search.obstacle.map_or_else(String::new, |(id, obstacle)| format!("; {id}: {obstacle}"));
        Some(match search.group.and_then(|group| group.home) {
            Some(home) => (
                UnplacedCause::Group,
                format!("the pools of its group are on {home}, which does not take it{best}"),
            ),
            None => (cause, format!("no node takes an instance that needs {shape}{best}")),
        })
    }
}

/// The search for nodes for the instances of one pool in one phase.
struct Search<'p> {
    key: &'p PoolKey,
    spec: &'p FleetPool,
    need: Usage,
    group: Option<Group>,
    queue: Queue,
    domains: Option<Domains>,
    /// Nodes whose domain has too many for now.
    waiting: Vec<NodeId>,
    /// The best node that was refused, and why.
    obstacle: Option<(NodeId, Obstacle)>,
}

impl<'p> Search<'p> {
    fn new(
        state: &State,
        key: &'p PoolKey,
        spec: &'p FleetPool,
        need: Usage,
        lost: Option<&BTreeMap<NodeId, u32>>,
    ) -> Self {
        Self {
            key,
            spec,
            need,
            group: state.group(key, spec),
            queue: Queue::new(state, key, spec, &need, lost),
            domains: Domains::of(state, key, &spec.placement),
            waiting: Vec::new(),
            obstacle: None,
        }
    }

    /// The best node that takes one more.
    fn next(&mut self, state: &State) -> Option<NodeId> {
        let accepts = |id: &NodeId, need: &Usage, domains: &Option<Domains>| {
            state.accepts(self.key, self.spec, id, need, domains.as_ref())
        };
        let mut need = self.need;
        if let Some(group) = &self.group {
            if let Some(home) = &group.home {
                return match accepts(home, &need, &self.domains) {
                    Ok(()) => Some(home.clone()),
                    Err(obstacle) => {
                        self.obstacle = Some((home.clone(), obstacle));
                        None
                    }
                };
            }
            need = group.whole;
        }
        loop {
            let id = self.queue.pop(state)?;
            match accepts(&id, &need, &self.domains) {
                Ok(()) => return Some(id),
                Err(obstacle) => {
                    if matches!(obstacle, Obstacle::Skew { .. }) {
                        self.waiting.push(id.clone());
                    }
                    self.obstacle.get_or_insert((id, obstacle));
                }
            }
        }
    }

    /// A node took one.
    fn took(&mut self, state: &State, id: &NodeId) {
        self.queue.took(id);
        self.queue.push(state, id);
        let labels = state.nodes.get(id).map(|node| &node.spec.labels);
        if let (Some(domains), Some(labels)) = (&mut self.domains, labels)
            && domains.add(id, labels)
        {
            self.waiting.drain(..).for_each(|id| self.queue.push(state, &id));
        }
        if let Some(group) = &mut self.group {
            group.home = Some(id.clone());
        }
    }
}

impl State {
    /// Whether a pool's instances have to be on the node where its group is already.
    pub(super) fn is_bound(&self, key: &PoolKey, spec: &FleetPool) -> bool {
        self.group(key, spec).is_some_and(|group| group.home.is_some())
    }

    /// The pools that have to be on one node with this one.
    fn group(&self, key: &PoolKey, spec: &FleetPool) -> Option<Group> {
        let name = spec.placement.colocate.as_ref()?;
        let pools = self.tenants.get(&key.tenant).into_iter().flat_map(|tenant| &tenant.pools);
        let keys = pools.map(|pool| PoolKey { tenant: key.tenant.clone(), pool: pool.clone() });
        let members = keys.filter_map(|key| self.pool(&key));
        let mut group = Group { home: None, whole: Usage::default() };
        for member in members.filter(|member| member.spec.placement.colocate.as_ref() == Some(name)) {
            for phase in PHASES {
                let number = count(&member.spec.counts, phase);
                group.whole = group.whole.plus(member.need(phase).times(number));
            }
            let at = member.placed.keys().next();
            if at.is_some_and(|at| group.home.as_ref().is_none_or(|home| at < home)) {
                group.home = at.cloned();
            }
        }
        Some(group)
    }
}
