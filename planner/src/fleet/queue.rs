//! The nodes that one pool may be placed on, best first. It looks no further than the pool needs.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::sync::Arc;

use mvm_proto::{Digest, NodeId};

use super::filter::against_class;
use super::index::{ClassKey, Entry};
use super::score::{AFFINITY, IMAGE_PRESENT, STAYS, Score};
use super::state::State;
use super::{FleetPool, PoolKey};
use crate::usage::Usage;

/// Nodes by score; equals in the order of their names.
#[derive(Debug, Default)]
pub(super) struct Queue {
    heap: BinaryHeap<Candidate>,
    /// Nodes that have an entry of their own, because their score differs from the index's.
    singles: BTreeSet<NodeId>,
    /// Instances of this pool that a node just lost in another phase, and gets back first.
    lost: BTreeMap<NodeId, u32>,
    /// Nodes of pools that this one wants to be near.
    near: BTreeSet<NodeId>,
    image: Option<Digest>,
}

#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    score: u64,
    node: Reverse<NodeId>,
    list: List,
}

/// Where a candidate comes from, and its successor will.
#[derive(Debug, PartialEq, Eq)]
enum List {
    Single,
    /// The nodes of a class; only those with the pool's image, or all.
    Class {
        class: Arc<ClassKey>,
        rank: u64,
        with_image: bool,
    },
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.score, &self.node).cmp(&(other.score, &other.node))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Queue {
    /// For instances of a pool that each need `need`.
    pub(super) fn new(
        state: &State,
        key: &PoolKey,
        pool: &FleetPool,
        need: &Usage,
        lost: Option<&BTreeMap<NodeId, u32>>,
    ) -> Self {
        let near = pool.placement.affinity.iter().flat_map(|other| {
            let other = PoolKey { tenant: key.tenant.clone(), pool: other.clone() };
            state.pool(&other).into_iter().flat_map(|other| other.placed.keys().cloned())
        });
        let mut queue = Self {
            near: near.collect(),
            lost: lost.cloned().unwrap_or_default(),
            image: pool.image,
            ..Self::default()
        };
        let own: Vec<_> = queue.near.iter().chain(queue.lost.keys()).cloned().collect();
        let is_eligible = |id: &NodeId| {
            let node = state.nodes.get(id);
            node.is_some_and(|node| {
                node.accepts() && against_class(&pool.placement, &node.spec.labels, &node.spec.taints).is_ok()
            })
        };
        for id in own.iter().filter(|id| is_eligible(id)) {
            queue.push(state, id);
        }
        queue.singles.extend(own);
        for (class, nodes) in state.index.classes() {
            if nodes.may_fit(need) && against_class(&pool.placement, &class.labels, &class.taints).is_ok() {
                queue.advance(state, class, false, None);
                if queue.image.is_some() {
                    queue.advance(state, class, true, None);
                }
            }
        }
        queue
    }

    /// The best node that is left.
    pub(super) fn pop(&mut self, state: &State) -> Option<NodeId> {
        let Candidate { node: Reverse(node), list, .. } = self.heap.pop()?;
        if let List::Class { class, rank, with_image } = list {
            self.advance(state, &class, with_image, Some(&(Reverse(rank), node.clone())));
        }
        Some(node)
    }

    /// Puts a node back, with the score that it has now.
    pub(super) fn push(&mut self, state: &State, id: &NodeId) {
        let Some(node) = state.nodes.get(id) else { return };
        let score = self.adjust(id, node.score(), &node.spec.images);
        let stays = if self.lost.get(id).is_some_and(|lost| *lost > 0) { STAYS } else { 0 };
        let score = score.total() + stays;
        self.singles.insert(id.clone());
        self.heap.push(Candidate { score, node: Reverse(id.clone()), list: List::Single });
    }

    /// A node got one: what it lost before is made good by it.
    pub(super) fn took(&mut self, id: &NodeId) {
        if let Some(lost) = self.lost.get_mut(id) {
            *lost = lost.saturating_sub(1);
        }
    }

    pub(super) fn adjust(&self, id: &NodeId, score: Score, images: &BTreeSet<Digest>) -> Score {
        let image = self.image.as_ref().is_some_and(|image| images.contains(image));
        Score {
            image: if image { IMAGE_PRESENT } else { 0 },
            affinity: if self.near.contains(id) { AFFINITY } else { 0 },
            ..score
        }
    }

    /// Adds the next node of a class that has no entry of its own.
    fn advance(&mut self, state: &State, key: &Arc<ClassKey>, with_image: bool, after: Option<&Entry>) {
        let Some(class) = state.index.class(key) else { return };
        let image = self.image.as_ref().filter(|_| with_image);
        let mut after = after;
        while let Some(entry) = class.next(image, after) {
            let (Reverse(rank), node) = entry;
            after = Some(entry);
            let has_image = || {
                state
                    .nodes
                    .get(node)
                    .is_some_and(|node| self.image.iter().any(|i| node.spec.images.contains(i)))
            };
            // A node with the image comes from that list, with the score that it earns.
            if self.singles.contains(node) || (!with_image && self.image.is_some() && has_image()) {
                continue;
            }
            let bonus = if with_image { IMAGE_PRESENT } else { 0 };
            let list = List::Class { class: Arc::clone(key), rank: *rank, with_image };
            self.heap.push(Candidate { score: rank + bonus, node: Reverse(node.clone()), list });
            return;
        }
    }
}
