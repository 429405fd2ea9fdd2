//! What the store has of placements, found by pool and by node: a change costs what it touches, never what exists.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::{Placed, PoolKey};
use mvm_proto::NodeId;
use mvm_proto::document::DesiredCounts;

/// How many instances of each pool each node is to have. A count of zero is of a pool that is being deleted.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct Placements {
    pools: BTreeMap<PoolKey, Placed>,
    nodes: BTreeMap<NodeId, BTreeSet<PoolKey>>,
}

impl Placements {
    pub(crate) fn new(pools: BTreeMap<PoolKey, Placed>) -> Self {
        let mut nodes: BTreeMap<NodeId, BTreeSet<PoolKey>> = BTreeMap::new();
        for (key, placed) in &pools {
            for node in placed.keys() {
                nodes.entry(node.clone()).or_default().insert(key.clone());
            }
        }
        Self { pools, nodes }
    }

    pub(crate) fn get(&self, key: &PoolKey) -> Option<&Placed> {
        self.pools.get(key)
    }

    /// The nodes that a pool is placed on.
    pub(crate) fn nodes_of(&self, key: &PoolKey) -> impl Iterator<Item = &NodeId> {
        self.pools.get(key).into_iter().flat_map(BTreeMap::keys)
    }

    /// The pools that are placed on a node.
    pub(crate) fn pools_on(&self, node: &NodeId) -> impl Iterator<Item = &PoolKey> {
        self.nodes.get(node).into_iter().flatten()
    }

    /// What is placed on a node, pool by pool.
    pub(crate) fn counts_on<'a>(
        &'a self,
        node: &'a NodeId,
    ) -> impl Iterator<Item = (&'a PoolKey, DesiredCounts)> {
        self.pools_on(node).filter_map(|key| Some((key, *self.pools.get(key)?.get(node)?)))
    }

    pub(crate) fn keys(&self) -> impl Iterator<Item = &PoolKey> {
        self.pools.keys()
    }

    pub(crate) fn all(&self) -> &BTreeMap<PoolKey, Placed> {
        &self.pools
    }

    /// A pool is placed like this now; what it had before.
    pub(crate) fn set(&mut self, key: &PoolKey, placed: Placed) -> Placed {
        let before = self.pools.remove(key).unwrap_or_default();
        for node in before.keys().filter(|node| !placed.contains_key(*node)) {
            if let Some(keys) = self.nodes.get_mut(node) {
                keys.remove(key);
                if keys.is_empty() {
                    self.nodes.remove(node);
                }
            }
        }
        for node in placed.keys().filter(|node| !before.contains_key(*node)) {
            self.nodes.entry(node.clone()).or_default().insert(key.clone());
        }
        if !placed.is_empty() {
            self.pools.insert(key.clone(), placed);
        }
        before
    }

    /// A pool is placed nowhere any more; what it had before.
    pub(crate) fn remove(&mut self, key: &PoolKey) -> Option<Placed> {
        let before = self.set(key, Placed::new());
        (!before.is_empty()).then_some(before)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Whatever is set in whatever order, a node finds what a look at all pools finds.
        #[test]
        fn a_node_finds_its_pools_whatever_changed(changes in proptest::collection::vec((0u8..5, proptest::collection::btree_map(0u8..6, 0u32..3, 0..5)), 0..40)) {
            let mut placements = Placements::default();
            for (pool, placed) in changes {
                let key = PoolKey { tenant: "acme".parse().unwrap(), pool: format!("p{pool}").parse().unwrap() };
                let counts = |running| DesiredCounts { running, warm: 0, sleeping: 0 };
                let node = |at: u8| -> NodeId { format!("n{at}").parse().unwrap() };
                let placed = placed.into_iter().map(|(at, running)| (node(at), counts(running))).collect();
                placements.set(&key, placed);
            }
            prop_assert_eq!(&Placements::new(placements.pools.clone()), &placements);
        }
    }
}
