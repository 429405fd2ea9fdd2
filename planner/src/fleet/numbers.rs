//! Numbers of nodes: what is asked of many nodes at once is kept in one small array, so that going through the nodes of a
//! pool costs the same however many nodes and pools there are.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::ops::Bound;

use mvm_proto::NodeId;

use super::state::NodeState;

/// A node, for as long as it is there. Says nothing of the order of nodes.
pub(super) type NodeNumber = u32;

/// How far apart the places of nodes are that come after all others.
const STEP: u64 = 1 << 32;

#[derive(Debug, Clone, Default)]
pub(super) struct Numbers {
    names: Vec<Option<NodeId>>,
    ranks: Vec<Rank>,
    unused: Vec<NodeNumber>,
    /// Where each node is in the order of names.
    places: BTreeMap<NodeId, (u64, NodeNumber)>,
}

#[derive(Debug, Clone, Copy, Default)]
struct Rank {
    /// Grows in the order of names.
    place: u64,
    score: u64,
    accepts: bool,
}

/// How gladly a pool gives up an instance on a node: the largest first.
pub(super) type Worth = (bool, Reverse<u64>, u64, NodeNumber);

impl Numbers {
    /// The number of a node, which is new or known.
    pub(super) fn number(&mut self, id: &NodeId) -> NodeNumber {
        if let Some((_, number)) = self.places.get(id) {
            return *number;
        }
        let number = self.unused.pop().unwrap_or_else(|| {
            self.names.push(None);
            self.ranks.push(Rank::default());
            NodeNumber::try_from(self.names.len() - 1).unwrap_or(NodeNumber::MAX)
        });
        let before = self.places.range(..id).next_back().map(|(_, (place, _))| *place);
        let after =
            self.places.range((Bound::Excluded(id), Bound::Unbounded)).next().map(|(_, (place, _))| *place);
        let place = place_between(before, after);
        self.places.insert(id.clone(), (place.unwrap_or(0), number));
        if place.is_none() {
            self.spread_places();
        }
        let place = self.places.get(id).map_or(0, |(place, _)| *place);
        if let Some((name, rank)) = self.entry(number) {
            *name = Some(id.clone());
            rank.place = place;
        }
        number
    }

    /// A node is gone.
    pub(super) fn forget(&mut self, id: &NodeId) {
        let Some((_, number)) = self.places.remove(id) else { return };
        if let Some((name, _)) = self.entry(number) {
            *name = None;
            self.unused.push(number);
        }
    }

    /// A node is as it is now.
    pub(super) fn update(&mut self, node: &NodeState) {
        let (score, accepts) = (node.score().total(), node.accepts());
        if let Some((_, rank)) = self.entry(node.number) {
            (rank.score, rank.accepts) = (score, accepts);
        }
    }

    pub(super) fn name(&self, number: NodeNumber) -> Option<&NodeId> {
        self.names.get(usize::try_from(number).ok()?)?.as_ref()
    }

    /// From nodes that take nothing new first, then from full ones.
    pub(super) fn worth(&self, number: NodeNumber) -> Option<Worth> {
        let Rank { place, score, accepts } = *self.ranks.get(usize::try_from(number).ok()?)?;
        Some((!accepts, Reverse(score), place, number))
    }

    fn entry(&mut self, number: NodeNumber) -> Option<(&mut Option<NodeId>, &mut Rank)> {
        let at = usize::try_from(number).ok()?;
        self.names.get_mut(at).zip(self.ranks.get_mut(at))
    }

    /// Gives all nodes new places, as there was none left between two of them.
    fn spread_places(&mut self) {
        for ((place, number), at) in self.places.values_mut().zip(1u64..) {
            *place = at.saturating_mul(STEP);
            if let Some(rank) = usize::try_from(*number).ok().and_then(|at| self.ranks.get_mut(at)) {
                rank.place = *place;
            }
        }
    }
}

fn place_between(before: Option<u64>, after: Option<u64>) -> Option<u64> {
    match (before, after) {
        (None, None) => Some(u64::MAX / 2),
        (Some(before), None) => before.checked_add(STEP),
        (None, Some(after)) => after.checked_sub(STEP),
        (Some(before), Some(after)) => Some(before + (after - before) / 2).filter(|place| *place > before),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Also where a new one always comes between the same two, which leaves no place there sooner or later.
    #[test]
    fn places_are_in_the_order_of_names_whatever_comes_when() {
        let mut numbers = Numbers::default();
        let names = (0..200u32).map(|at| format!("n-{}", if at % 2 == 0 { 1000 - at } else { at }));
        let ids: Vec<NodeId> = names
            .chain((0..100).map(|at| format!("m{}", "a".repeat(62 - at % 60))))
            .map(|n| n.parse().unwrap())
            .collect();
        for id in &ids {
            numbers.number(id);
        }
        for id in ids.iter().step_by(3) {
            numbers.forget(id);
        }
        for id in ids.iter().rev() {
            numbers.number(id);
        }
        let places: Vec<u64> = numbers.places.values().map(|(place, _)| *place).collect();
        assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
        for (id, (place, number)) in &numbers.places {
            assert_eq!((numbers.name(*number), numbers.worth(*number).unwrap().2), (Some(id), *place));
        }
    }
}
