//! What machines are lacking and which are not needed: for an autoscaler.

use std::collections::BTreeMap;

use mvm_proto::NodeId;
use mvm_proto::document::DesiredCounts;
use mvm_proto::placement::Labels;
use serde::Serialize;

use super::PoolKey;
use super::placer::Placer;
use super::state::{PHASES, count_mut};
use crate::usage::Usage;

/// Instances of one shape that more nodes would make room for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Demand {
    pub vcpus: u32,
    pub mem_mib: u64,
    /// What a node has to carry to take them.
    pub node_labels: Labels,
    pub counts: DesiredCounts,
}

/// A node that could be taken away.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct EmptyNode {
    pub node: NodeId,
    pub cordoned: bool,
}

impl Placer {
    /// What has no place for want of nodes, by shape. What a quota forbids is left out, and so is what has to be beside
    /// a group that is placed already: no new node would help.
    #[must_use]
    pub fn demand(&self) -> Vec<Demand> {
        let state = &self.state;
        let mut ranked: Vec<_> = self.lacking().filter_map(|key| Some((self.rank(key)?, key))).collect();
        ranked.sort();
        // What the demand counted so far would use.
        let mut tenants: BTreeMap<_, Usage> = BTreeMap::new();
        let mut pools: BTreeMap<&PoolKey, u64> = BTreeMap::new();
        let mut shapes: BTreeMap<(u32, u64, &Labels), DesiredCounts> = BTreeMap::new();
        for phase in PHASES {
            for (_, key) in &ranked {
                let Some(pool) = state.pool(key).filter(|pool| !state.is_bound(key, &pool.spec)) else {
                    continue;
                };
                let need = pool.need(phase);
                let used = tenants.entry(&key.tenant).or_default();
                let has = pools.entry(key).or_default();
                let mut lacking = 0;
                while lacking < pool.lacks(phase) && state.quota_allows(key, used, *has, &need).is_ok() {
                    *used = used.plus(need);
                    *has += 1;
                    lacking += 1;
                }
                if lacking > 0 {
                    let shape = (
                        pool.spec.resources.vcpus,
                        pool.spec.resources.mem_mib,
                        &pool.spec.placement.node_labels,
                    );
                    let counts = count_mut(shapes.entry(shape).or_default(), phase);
                    *counts = counts.saturating_add(lacking);
                }
            }
        }
        let demand = |((vcpus, mem_mib, labels), counts): ((u32, u64, &Labels), DesiredCounts)| Demand {
            vcpus,
            mem_mib,
            node_labels: labels.clone(),
            counts,
        };
        shapes.into_iter().map(demand).collect()
    }

    /// The nodes that are there and have nothing: nothing placed, nothing claimed, nothing left of what was.
    #[must_use]
    pub fn empty_nodes(&self) -> Vec<EmptyNode> {
        let nodes = self.state.nodes.iter();
        let is_empty = nodes.filter(|(_, node)| {
            node.pools.is_empty() && node.spec.beyond.is_empty() && node.spec.away_since.is_none()
        });
        is_empty.map(|(id, node)| EmptyNode { node: id.clone(), cordoned: node.spec.cordoned }).collect()
    }

    /// Pools that lack something, as far as it was concluded.
    fn lacking(&self) -> impl Iterator<Item = &PoolKey> {
        self.open().filter(|key| {
            self.state.pool(key).is_some_and(|pool| PHASES.iter().any(|phase| pool.lacks(*phase) > 0))
        })
    }
}
