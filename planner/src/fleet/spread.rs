//! How many instances of a pool each domain has: each node, or all nodes with the same value of a label.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::placement::{Placement, Spread};

use super::filter::{Obstacle, against_class};
use super::nodes::NodeState;
use super::slab::PoolNumber;
use super::state::{PHASES, State};

const BY_NODE: &str = "node";

#[derive(Debug)]
pub(super) struct Domains {
    spread: Spread,
    counts: BTreeMap<String, u64>,
    /// How many of the domains that could take an instance have how many: the emptiest is the first.
    open: BTreeMap<u64, usize>,
    is_open: BTreeSet<String>,
}

impl Domains {
    pub(super) fn of(state: &State, number: PoolNumber, placement: &Placement) -> Option<Self> {
        let spread = placement.spread.clone()?;
        let mut domains =
            Self { spread, counts: BTreeMap::new(), open: BTreeMap::new(), is_open: BTreeSet::new() };
        let pool = state.pool(number).into_iter();
        for (at, count) in pool.flat_map(|pool| PHASES.into_iter().flat_map(|phase| pool.on(phase).iter())) {
            if let Some(domain) = state.nodes.get(at).and_then(|node| domains.domain(node)) {
                *domains.counts.entry(domain).or_default() += u64::from(count);
            }
        }
        for (_, class) in state.index.classes() {
            let Some(ranking) = state.index.ranking(class.ranking).filter(|all| all.top().is_some()) else {
                continue;
            };
            if against_class(placement, &class.key.labels, &class.key.taints).is_err() {
                continue;
            }
            if domains.spread.by == BY_NODE {
                let nodes = ranking.open().filter_map(|at| state.nodes.get(at));
                domains.is_open.extend(nodes.map(|node| node.name.to_string()));
            } else {
                domains.is_open.extend(class.key.labels.get(&domains.spread.by).cloned());
            }
        }
        for domain in &domains.is_open {
            let count = domains.counts.get(domain).copied().unwrap_or(0);
            *domains.open.entry(count).or_default() += 1;
        }
        Some(domains)
    }

    fn domain(&self, node: &NodeState) -> Option<String> {
        if self.spread.by == BY_NODE {
            Some(node.name.to_string())
        } else {
            node.spec.labels.get(&self.spread.by).cloned()
        }
    }

    /// How many the node's domain has.
    pub(super) fn count(&self, node: &NodeState) -> u64 {
        self.domain(node).and_then(|domain| self.counts.get(&domain).copied()).unwrap_or(0)
    }

    fn least(&self) -> u64 {
        self.open.keys().next().copied().unwrap_or(0)
    }

    /// Whether one more on this node keeps the skew.
    pub(super) fn allows(&self, node: &NodeState) -> Result<(), Obstacle> {
        let Spread { by, max_skew } = &self.spread;
        if self.domain(node).is_none() {
            return Err(Obstacle::NoDomain { key: by.clone() });
        }
        if self.count(node) + 1 > self.least() + u64::from(*max_skew) {
            return Err(Obstacle::Skew { by: by.clone(), max_skew: *max_skew });
        }
        Ok(())
    }

    /// Counts one more; true where the emptiest domain now has more, so that others may take one again.
    pub(super) fn add(&mut self, node: &NodeState) -> bool {
        let before = self.least();
        self.shift(node, 1);
        self.least() > before
    }

    pub(super) fn remove(&mut self, node: &NodeState) {
        self.shift(node, -1);
    }

    fn shift(&mut self, node: &NodeState, by: i64) {
        let Some(domain) = self.domain(node) else { return };
        let count = self.counts.entry(domain.clone()).or_default();
        let before = *count;
        *count = before.saturating_add_signed(by);
        let after = *count;
        if self.is_open.contains(&domain) {
            if let Some(domains) = self.open.get_mut(&before) {
                *domains -= 1;
                if *domains == 0 {
                    self.open.remove(&before);
                }
            }
            *self.open.entry(after).or_default() += 1;
        }
    }
}
