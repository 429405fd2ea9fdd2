//! Taking away what a pool has beyond its counts.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use mvm_proto::Phase;

use super::placer::{Placer, Settling};
use super::slab::{NodeNumber, PoolNumber};
use super::spread::Domains;
use super::state::{PHASES, PoolState, State};

impl Placer {
    /// Takes away what a pool has beyond its counts: from nodes that take nothing new, then from full ones.
    pub(super) fn shrink(&mut self, settling: &mut Settling, number: PoolNumber) {
        for phase in PHASES {
            let Some(pool) = self.state.pool(number) else { return };
            let surplus = pool.surplus(phase);
            if surplus == 0 {
                continue;
            }
            match Domains::of(&self.state, number, &pool.spec.placement) {
                Some(domains) => self.shrink_domains(settling, number, phase, surplus, domains),
                None => self.shrink_nodes(settling, number, phase, surplus),
            }
        }
    }

    fn shrink_nodes(&mut self, settling: &mut Settling, number: PoolNumber, phase: Phase, surplus: u32) {
        let Some(pool) = self.state.pool(number) else { return };
        let worth = |state: &State, at: NodeNumber| (state.numbers.worth(at), state.numbers.place(at), at);
        let mut heap: BinaryHeap<_> =
            most_worth(&self.state, pool, phase, surplus).map(|at| worth(&self.state, at)).collect();
        for _ in 0..surplus {
            let Some((.., at)) = heap.pop() else { break };
            self.give_up(settling, number, at, phase);
            // Only this node's worth is another now.
            if self.has_some(number, at, phase) {
                heap.push(worth(&self.state, at));
            }
        }
    }

    /// From the domains that have most, then as from nodes.
    fn shrink_domains(
        &mut self,
        settling: &mut Settling,
        number: PoolNumber,
        phase: Phase,
        surplus: u32,
        mut domains: Domains,
    ) {
        let worth = |state: &State, domains: &Domains, at: NodeNumber| {
            let node = state.nodes.get(at)?;
            let crowd = domains.count(node);
            Some((!node.accepts(), crowd, Reverse(node.score.room()), state.numbers.place(at), at))
        };
        let on = self.state.pool(number).into_iter().flat_map(|pool| pool.on(phase).iter());
        let mut heap: BinaryHeap<_> = on.filter_map(|(at, _)| worth(&self.state, &domains, at)).collect();
        let mut left = surplus;
        while left > 0 {
            let Some(top) = heap.pop() else { break };
            let at = top.4;
            // Others of its domain may have given something up meanwhile.
            let current = worth(&self.state, &domains, at);
            if current != Some(top) {
                heap.extend(current);
                continue;
            }
            self.give_up(settling, number, at, phase);
            if let Some(node) = self.state.nodes.get(at) {
                domains.remove(node);
            }
            left -= 1;
            if self.has_some(number, at, phase) {
                heap.extend(worth(&self.state, &domains, at));
            }
        }
    }

    fn has_some(&self, number: PoolNumber, at: NodeNumber, phase: Phase) -> bool {
        self.state.pool(number).is_some_and(|pool| pool.on(phase).of(at) > 0)
    }

    /// Takes one off a node because the pool has too many.
    fn give_up(&mut self, settling: &mut Settling, number: PoolNumber, at: NodeNumber, phase: Phase) {
        settling.note(&self.state, number, at, phase);
        self.state.remove(number, at, phase, 1);
        settling.lose(number, at);
    }
}

/// The nodes that may be among the `surplus` ones that give something up: the worth of a node that gave one up is less than
/// before, so none of the others has its turn.
fn most_worth<'a>(
    state: &'a State,
    pool: &'a PoolState,
    phase: Phase,
    surplus: u32,
) -> impl Iterator<Item = NodeNumber> + 'a {
    let worths = pool.on(phase).iter().map(|(at, _)| state.numbers.worth(at));
    let mut sorted: Vec<_>;
    let least = if surplus == 1 {
        worths.max()
    } else {
        sorted = worths.collect();
        let at = sorted.len().checked_sub(usize::try_from(surplus).unwrap_or(usize::MAX));
        Some(at.map_or(0, |at| *sorted.select_nth_unstable(at).1))
    };
    let on = pool.on(phase).iter().map(|(at, _)| at);
    on.filter(move |at| least.is_some_and(|least| state.numbers.worth(*at) >= least))
}
