//! Taking away what a pool has beyond its counts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use mvm_proto::document::DesiredCounts;
use mvm_proto::{NodeId, Phase};

use super::PoolKey;
use super::numbers::Worth;
use super::placer::{Placer, Settling};
use super::spread::Domains;
use super::state::{PHASES, State, count};

impl Placer {
    /// Takes away what a pool has beyond its counts: from nodes that take nothing new, then from full ones.
    pub(super) fn shrink(&mut self, settling: &mut Settling, key: &PoolKey) {
        for phase in PHASES {
            let Some(pool) = self.state.pool(key) else { return };
            let surplus = pool.surplus(phase);
            match Domains::of(&self.state, key, &pool.spec.placement) {
                _ if surplus == 0 => {}
                Some(domains) => self.shrink_domains(settling, key, phase, surplus, domains),
                None => self.shrink_nodes(settling, key, phase, surplus),
            }
        }
    }

    fn shrink_nodes(&mut self, settling: &mut Settling, key: &PoolKey, phase: Phase, surplus: u32) {
        let has_some = |counts: &DesiredCounts| count(counts, phase) > 0;
        let numbered = self.state.pool(key).into_iter().flat_map(|pool| &pool.numbered);
        let on = numbered.filter(|(_, counts)| has_some(counts));
        let mut heap: BinaryHeap<Worth> =
            on.filter_map(|(number, _)| self.state.numbers.worth(*number)).collect();
        for _ in 0..surplus {
            let Some((.., number)) = heap.pop() else { break };
            let Some(id) = self.state.numbers.name(number).cloned() else { continue };
            self.give_up(settling, key, &id, phase);
            // Only this node's worth is another now.
            let left = self.state.pool(key).and_then(|pool| pool.numbered.get(&number));
            if left.is_some_and(has_some) {
                heap.extend(self.state.numbers.worth(number));
            }
        }
    }

    /// From the domains that have most, then as from nodes.
    fn shrink_domains(
        &mut self,
        settling: &mut Settling,
        key: &PoolKey,
        phase: Phase,
        surplus: u32,
        mut domains: Domains,
    ) {
        let worth = |state: &State, domains: &Domains, id: &NodeId| {
            let node = state.nodes.get(id)?;
            let crowd = domains.count(id, &node.spec.labels);
            Some((!node.accepts(), crowd, Reverse(node.score().total()), id.clone()))
        };
        let has_some = |counts: &DesiredCounts| count(counts, phase) > 0;
        let placed = self.state.pool(key).into_iter().flat_map(|pool| &pool.placed);
        let on = placed.filter(|(_, counts)| has_some(counts));
        let mut heap: BinaryHeap<_> = on.filter_map(|(id, _)| worth(&self.state, &domains, id)).collect();
        let mut left = surplus;
        while left > 0 {
            let Some(top) = heap.pop() else { break };
            let id = top.3.clone();
            // Others of its domain may have given something up meanwhile.
            let current = worth(&self.state, &domains, &id);
            if current.as_ref() != Some(&top) {
                heap.extend(current);
                continue;
            }
            self.give_up(settling, key, &id, phase);
            if let Some(node) = self.state.nodes.get(&id) {
                domains.remove(&id, &node.spec.labels);
            }
            left -= 1;
            if self.state.pool(key).and_then(|pool| pool.placed.get(&id)).is_some_and(has_some) {
                heap.extend(worth(&self.state, &domains, &id));
            }
        }
    }

    /// Takes one off a node because the pool has too many.
    fn give_up(&mut self, settling: &mut Settling, key: &PoolKey, id: &NodeId, phase: Phase) {
        settling.note(&self.state, key, id);
        self.state.remove(key, id, phase, 1);
        *settling.lost.entry(key.clone()).or_default().entry(id.clone()).or_default() += 1;
    }
}
