//! How many instances of a pool each domain has: each node, or all nodes with the same value of a label.

use std::collections::{BTreeMap, BTreeSet};

use mvm_proto::NodeId;
use mvm_proto::placement::{Labels, Placement, Spread};

use super::PoolKey;
use super::filter::{Obstacle, against_class};
use super::state::{State, instances};

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
    pub(super) fn of(state: &State, key: &PoolKey, placement: &Placement) -> Option<Self> {
        let spread = placement.spread.clone()?;
        let mut domains =
            Self { spread, counts: BTreeMap::new(), open: BTreeMap::new(), is_open: BTreeSet::new() };
        for (id, counts) in state.pool(key).into_iter().flat_map(|pool| &pool.placed) {
            let Some(node) = state.nodes.get(id) else { continue };
            if let Some(domain) = domains.domain(id, &node.spec.labels) {
                *domains.counts.entry(domain).or_default() += instances(counts);
            }
        }
        for (class, nodes) in state.index.classes() {
            if nodes.len() == 0 || against_class(placement, &class.labels, &class.taints).is_err() {
                continue;
            }
            if domains.spread.by == BY_NODE {
                domains.is_open.extend(nodes.nodes().map(ToString::to_string));
            } else {
                domains.is_open.extend(class.labels.get(&domains.spread.by).cloned());
            }
        }
        for domain in &domains.is_open {
            let count = domains.counts.get(domain).copied().unwrap_or(0);
            *domains.open.entry(count).or_default() += 1;
        }
        Some(domains)
    }

    fn domain(&self, id: &NodeId, labels: &Labels) -> Option<String> {
        if self.spread.by == BY_NODE { Some(id.to_string()) } else { labels.get(&self.spread.by).cloned() }
    }

    /// How many the node's domain has.
    pub(super) fn count(&self, id: &NodeId, labels: &Labels) -> u64 {
        self.domain(id, labels).and_then(|domain| self.counts.get(&domain).copied()).unwrap_or(0)
    }

    fn least(&self) -> u64 {
        self.open.keys().next().copied().unwrap_or(0)
    }

    /// Whether one more on this node keeps the skew.
    pub(super) fn allows(&self, id: &NodeId, labels: &Labels) -> Result<(), Obstacle> {
        let Spread { by, max_skew } = &self.spread;
        if self.domain(id, labels).is_none() {
            return Err(Obstacle::NoDomain { key: by.clone() });
        }
        if self.count(id, labels) + 1 > self.least() + u64::from(*max_skew) {
            return Err(Obstacle::Skew { by: by.clone(), max_skew: *max_skew });
        }
        Ok(())
    }

    /// Counts one more; true where the emptiest domain now has more, so that others may take one again.
    pub(super) fn add(&mut self, id: &NodeId, labels: &Labels) -> bool {
        let before = self.least();
        self.shift(id, labels, 1);
        self.least() > before
    }

    pub(super) fn remove(&mut self, id: &NodeId, labels: &Labels) {
        self.shift(id, labels, -1);
    }

    fn shift(&mut self, id: &NodeId, labels: &Labels, by: i64) {
        let Some(domain) = self.domain(id, labels) else { return };
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
