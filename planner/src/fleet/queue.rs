//! The nodes that one pool may be placed on, best first. It looks no further than the pool needs.

use std::cmp::{Ordering, Reverse};
use std::collections::{BTreeMap, BTreeSet, BinaryHeap};
use std::ops::Range;

use mvm_proto::{Digest, PoolId};

use super::FleetPool;
use super::filter::against_class;
use super::nodes::NodeState;
use super::score::{AFFINITY, IMAGE_PRESENT, STAYS, Score};
use super::slab::{NodeNumber, RankingNumber, TenantNumber};
use super::state::State;
use crate::usage::Usage;

/// What a pool would like its nodes to have.
#[derive(Debug, Default)]
pub(super) struct Wishes {
    image: Option<Digest>,
    /// Nodes of pools that this one wants to be near.
    near: BTreeSet<NodeNumber>,
}

/// Nodes by score; equals in the order of their names.
#[derive(Debug, Default)]
pub(super) struct Queue {
    wishes: Wishes,
    heap: BinaryHeap<Candidate>,
    /// The part of a ranking whose best node was taken last: what is left of it is looked at when it is needed.
    open: Option<(Part, usize)>,
    /// Nodes that have an entry of their own, because their score differs from the index's.
    singles: BTreeSet<NodeNumber>,
    /// Instances of this pool that a node just lost in another phase, and gets back first.
    lost: BTreeMap<NodeNumber, u32>,
}

#[derive(Debug, PartialEq, Eq)]
struct Candidate {
    score: u64,
    place: Reverse<u64>,
    node: NodeNumber,
    /// The part of a ranking that it is the best of, and its position there.
    part: Option<(Part, usize)>,
}

/// A part of the nodes of a class: of all, or of those with the pool's image.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Part {
    ranking: RankingNumber,
    positions: Range<usize>,
    with_image: bool,
}

impl Ord for Candidate {
    fn cmp(&self, other: &Self) -> Ordering {
        (self.score, self.place).cmp(&(other.score, other.place))
    }
}

impl PartialOrd for Candidate {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Wishes {
    pub(super) fn of(state: &State, tenant: TenantNumber, pool: &FleetPool) -> Self {
        let tenant = state.tenants.get(tenant);
        let number = |other: &PoolId| tenant?.pools.get(other).copied();
        let others = pool.placement.affinity.iter().filter_map(number);
        let near = others.filter_map(|other| state.pool(other)).flat_map(|other| other.nodes());
        Self { image: pool.image, near: near.collect() }
    }

    /// A node's score with what the pool would like.
    pub(super) fn adjust(&self, at: NodeNumber, node: &NodeState) -> Score {
        Score {
            image: if self.image_is_on(node) { IMAGE_PRESENT } else { 0 },
            affinity: if self.near.contains(&at) { AFFINITY } else { 0 },
            ..node.score
        }
    }

    fn image_is_on(&self, node: &NodeState) -> bool {
        self.image.as_ref().is_some_and(|image| node.spec.images.contains(image))
    }
}

impl Queue {
    /// For instances of a pool that each need `need`.
    pub(super) fn new(
        state: &State,
        wishes: Wishes,
        pool: &FleetPool,
        need: &Usage,
        lost: BTreeMap<NodeNumber, u32>,
    ) -> Self {
        let mut queue = Self { wishes, lost, ..Self::default() };
        let own: Vec<_> = queue.wishes.near.iter().chain(queue.lost.keys()).copied().collect();
        let is_eligible = |at: &NodeNumber| {
            let node = state.nodes.get(*at);
            node.is_some_and(|node| {
                node.accepts() && against_class(&pool.placement, &node.spec.labels, &node.spec.taints).is_ok()
            })
        };
        for at in own.iter().filter(|at| is_eligible(at)) {
            queue.push(state, *at);
        }
        queue.singles.extend(own);
        let with_image = pool.image.as_ref().and_then(|image| state.index.with_image(image));
        for (number, class) in state.index.classes() {
            let suits = against_class(&pool.placement, &class.key.labels, &class.key.taints).is_ok();
            if suits && class.may_fit(need) {
                queue.offer_all(state, class.ranking, false);
                let of_image = with_image.and_then(|by_class| by_class.get(&number));
                of_image.into_iter().for_each(|ranking| queue.offer_all(state, *ranking, true));
            }
        }
        queue
    }

    /// The best node that is left.
    pub(super) fn pop(&mut self, state: &State) -> Option<NodeNumber> {
        loop {
            if let Some((Part { ranking, positions, with_image }, taken)) = self.open.take() {
                self.offer(state, Part { ranking, positions: positions.start..taken, with_image });
                self.offer(state, Part { ranking, positions: taken + 1..positions.end, with_image });
            }
            let Candidate { node, part, .. } = self.heap.pop()?;
            let Some((part, position)) = part else { return Some(node) };
            let with_image = part.with_image;
            self.open = Some((part, position));
            // A node with the image comes from that ranking, with the score that it earns.
            let is_elsewhere = self.singles.contains(&node)
                || !with_image && state.nodes.get(node).is_some_and(|node| self.wishes.image_is_on(node));
            if !is_elsewhere {
                return Some(node);
            }
        }
    }

    /// Puts a node back, with the score that it has now.
    pub(super) fn push(&mut self, state: &State, at: NodeNumber) {
        let Some(node) = state.nodes.get(at) else { return };
        let stays = if self.lost.get(&at).is_some_and(|lost| *lost > 0) { STAYS } else { 0 };
        let score = self.wishes.adjust(at, node).total() + stays;
        self.singles.insert(at);
        let place = Reverse(state.numbers.place(at));
        self.heap.push(Candidate { score, place, node: at, part: None });
    }

    /// A node got one: what it lost before is made good by it.
    pub(super) fn took(&mut self, at: NodeNumber) {
        if let Some(lost) = self.lost.get_mut(&at) {
            *lost = lost.saturating_sub(1);
        }
    }

    fn offer_all(&mut self, state: &State, number: RankingNumber, with_image: bool) {
        let Some(ranking) = state.index.ranking(number) else { return };
        let part = Part { ranking: number, positions: 0..ranking.len(), with_image };
        self.add(state, ranking.top(), part);
    }

    fn offer(&mut self, state: &State, part: Part) {
        let best = state.index.ranking(part.ranking).and_then(|ranking| ranking.best(part.positions.clone()));
        self.add(state, best, part);
    }

    fn add(&mut self, state: &State, best: Option<super::index::Ranked>, part: Part) {
        let Some(best) = best else { return };
        let bonus = if part.with_image { IMAGE_PRESENT } else { 0 };
        let place = Reverse(state.numbers.place(best.node));
        let score = u64::from(best.score) + bonus;
        self.heap.push(Candidate { score, place, node: best.node, part: Some((part, best.position)) });
    }
}
