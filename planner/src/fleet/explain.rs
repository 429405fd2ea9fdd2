//! Why a pool is where it is: what each node has against one more of its instances, or how well it suits.

use mvm_proto::{NodeId, Phase};

use super::filter::Obstacle;
use super::placer::Placer;
use super::queue::Wishes;
use super::score::Score;
use super::slab::NodeNumber;
use super::spread::Domains;
use super::{Placed, PoolKey, Unplaced};
use crate::usage::Usage;

/// What placement has to say of one pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Explanation {
    pub placed: Placed,
    pub unplaced: Option<Unplaced>,
    /// The quota that keeps it from having one more.
    pub quota: Option<String>,
    /// For one more running instance: the nodes that take it, best first, then the others.
    pub nodes: Vec<NodeVerdict>,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NodeVerdict {
    pub node: NodeId,
    pub verdict: Verdict,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Verdict {
    Suits(Score),
    Refused(Obstacle),
}

impl Placer {
    /// Why a pool is where it is; none if there is no such pool.
    #[must_use]
    pub fn explain(&self, key: &PoolKey) -> Option<Explanation> {
        let state = &self.state;
        let number = state.pool_number(key)?;
        let (pool, tenant) = (state.pool(number)?, state.pools.get(number)?.tenant);
        let need: Usage = pool.need(Phase::Running);
        let wishes = Wishes::of(state, tenant, &pool.spec);
        let domains = Domains::of(state, number, &pool.spec.placement);
        let verdict = |at: NodeNumber| match state.accepts(number, &pool.spec, at, &need, domains.as_ref()) {
            Err(obstacle) => Verdict::Refused(obstacle),
            Ok(()) => Verdict::Suits(
                state.nodes.get(at).map_or_else(Score::default, |node| wishes.adjust(at, node)),
            ),
        };
        let nodes = state.numbers.nodes();
        let mut nodes: Vec<_> =
            nodes.map(|(id, at)| NodeVerdict { node: id.clone(), verdict: verdict(at) }).collect();
        nodes.sort_by_key(|node| match &node.verdict {
            Verdict::Suits(score) => (false, u64::MAX - score.total()),
            Verdict::Refused(_) => (true, 0),
        });
        let quota = state.quota_allows(number, &Usage::default(), 0, &need).err();
        let placed = state.placed(pool).clone();
        Some(Explanation { placed, unplaced: pool.unplaced.clone(), quota, nodes })
    }
}
