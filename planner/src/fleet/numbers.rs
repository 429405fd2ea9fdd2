//! Nodes in the order of their names, by number: what is asked of many nodes at once is kept in small arrays, so that going
//! through the nodes of a pool costs the same however many nodes and pools there are.

use std::collections::BTreeMap;
use std::ops::Bound;

use mvm_proto::NodeId;

use super::slab::{NodeNumber, Number as _};

/// How far apart the places of nodes are that come after all others.
const STEP: u64 = 1 << 32;

/// How gladly a pool gives up an instance on a node: the largest first. Nodes that take nothing new, then full ones; of equal
/// ones, the last by name: see [`Numbers::place`].
pub(super) type Worth = u32;

/// The worth of a node that takes something new and has nothing free. No score is as large.
const FULL: Worth = 1 << 30;
/// By how much more a node is worth that takes nothing new.
const TAKES_NOTHING: Worth = 1 << 31;

#[derive(Debug, Clone, Default)]
pub(super) struct Numbers {
    /// Where each node is in the order of names.
    nodes: BTreeMap<NodeId, (u64, NodeNumber)>,
    /// The same by number: grows in the order of names.
    places: Vec<u64>,
    worths: Vec<Worth>,
}

impl Numbers {
    pub(super) fn number(&self, id: &NodeId) -> Option<NodeNumber> {
        self.nodes.get(id).map(|(_, number)| *number)
    }

    /// All nodes, in the order of their names.
    pub(super) fn nodes(&self) -> impl Iterator<Item = (&NodeId, NodeNumber)> {
        self.nodes.iter().map(|(id, (_, number))| (id, *number))
    }

    /// A node got a number.
    pub(super) fn join(&mut self, id: &NodeId, number: NodeNumber) {
        if self.places.len() <= number.at() {
            self.places.resize(number.at() + 1, 0);
            self.worths.resize(number.at() + 1, 0);
        }
        let before = self.nodes.range(..id).next_back().map(|(_, (place, _))| *place);
        let after =
            self.nodes.range((Bound::Excluded(id), Bound::Unbounded)).next().map(|(_, (place, _))| *place);
        let place = place_between(before, after);
        self.nodes.insert(id.clone(), (place.unwrap_or(0), number));
        match place {
            Some(place) => self.places[number.at()] = place,
            None => self.spread_places(),
        }
    }

    /// A node is gone.
    pub(super) fn leave(&mut self, id: &NodeId) {
        self.nodes.remove(id);
    }

    /// Of two nodes, the one whose name comes first has the smaller place. Places change when nodes join.
    pub(super) fn place(&self, number: NodeNumber) -> u64 {
        self.places.get(number.at()).copied().unwrap_or(0)
    }

    pub(super) fn worth(&self, number: NodeNumber) -> Worth {
        self.worths.get(number.at()).copied().unwrap_or(0)
    }

    /// A node has this score now, and takes something new or not.
    pub(super) fn update(&mut self, number: NodeNumber, score: u32, accepts: bool) {
        if let Some(worth) = self.worths.get_mut(number.at()) {
            *worth = FULL.saturating_sub(score) + if accepts { 0 } else { TAKES_NOTHING };
        }
    }

    /// Gives all nodes new places, as there was none left between two of them.
    fn spread_places(&mut self) {
        for ((place, number), at) in self.nodes.values_mut().zip(1u64..) {
            *place = at.saturating_mul(STEP);
            self.places[number.at()] = *place;
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
        for (at, id) in ids.iter().enumerate() {
            if numbers.number(id).is_none() {
                numbers.join(id, NodeNumber::of(at));
            }
        }
        for id in ids.iter().step_by(3) {
            numbers.leave(id);
        }
        for (at, id) in ids.iter().enumerate().rev() {
            if numbers.number(id).is_none() {
                numbers.join(id, NodeNumber::of(1000 + at));
            }
        }
        let places: Vec<u64> = numbers.nodes().map(|(_, number)| numbers.place(number)).collect();
        assert!(places.is_sorted_by(|a, b| a < b), "{places:?}");
        for (id, (place, number)) in &numbers.nodes {
            assert_eq!((numbers.number(id), numbers.place(*number)), (Some(*number), *place));
        }
    }

    #[test]
    fn instances_are_given_up_on_nodes_that_take_nothing_new_then_on_full_ones() {
        let mut numbers = Numbers::default();
        let worths = [(900_000, true), (10, true), (900_000, false), (10, false)].map(|(score, accepts)| {
            numbers.join(&"node".parse().unwrap(), NodeNumber::of(0));
            numbers.update(NodeNumber::of(0), score, accepts);
            numbers.worth(NodeNumber::of(0))
        });
        assert!(worths.is_sorted_by(|a, b| a < b), "{worths:?}");
    }
}
