//! What machines are lacking and which are not needed: for an autoscaler.

use std::collections::BTreeMap;

use mvm_proto::NodeId;
use mvm_proto::document::DesiredCounts;
use mvm_proto::placement::Labels;
use serde::Serialize;

use super::placer::Placer;
use super::slab::{PoolNumber, TenantNumber};
use super::state::{PHASES, PoolEntry, PoolState, count_mut};
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
        let mut ranked: Vec<_> = self.lacking().collect();
        ranked.sort_by(|(_, one), (_, other)| self.order(one, other));
        // What the demand counted so far would use.
        let mut tenants: BTreeMap<TenantNumber, Usage> = BTreeMap::new();
        let mut pools: BTreeMap<PoolNumber, u64> = BTreeMap::new();
        let mut shapes: BTreeMap<(u32, u64, &Labels), DesiredCounts> = BTreeMap::new();
        for phase in PHASES {
            for (number, entry) in &ranked {
                let bound = |pool: &&PoolState| state.is_bound(entry.tenant, &pool.spec);
                let Some(pool) = entry.declared.as_ref().filter(|pool| !bound(pool)) else {
                    continue;
                };
                let need = pool.need(phase);
                let used = tenants.entry(entry.tenant).or_default();
                let has = pools.entry(*number).or_default();
                let mut lacking = 0;
                while lacking < pool.lacks(phase) && state.quota_allows(*number, used, *has, &need).is_ok() {
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
        let nodes = self.state.numbers.nodes();
        let nodes = nodes.filter_map(|(id, at)| Some((id, self.state.nodes.get(at)?)));
        let is_empty = nodes.filter(|(_, node)| {
            node.pools.is_empty() && node.told.is_empty() && node.spec.away_since.is_none()
        });
        is_empty.map(|(id, node)| EmptyNode { node: id.clone(), cordoned: node.spec.cordoned }).collect()
    }

    /// Pools that lack something, as far as it was concluded.
    fn lacking(&self) -> impl Iterator<Item = (PoolNumber, &PoolEntry)> {
        let open = self.open().filter_map(|number| Some((number, self.state.pools.get(number)?)));
        open.filter(|(_, entry)| {
            let lacks = |pool: &PoolState| PHASES.iter().any(|phase| pool.lacks(*phase) > 0);
            entry.declared.as_ref().is_some_and(lacks)
        })
    }
}
