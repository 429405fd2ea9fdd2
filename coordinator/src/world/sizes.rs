//! How large the nodes' documents are, so that a change that would make one too large is refused when it is asked for.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::fleet::PoolKey;
use mvm_proto::document::MAX_DOCUMENT_BYTES;
use mvm_proto::object::Object;
use mvm_proto::{ClusterId, DesiredState, NodeId, Timestamp};

use super::World;

/// What a document says beside what is desired: its numbers and times.
const PROVENANCE_BYTES: usize = 1024;

/// The bytes of each node's document, as it was made last.
#[derive(Debug, Clone, Default)]
pub(super) struct Sizes {
    of: BTreeMap<NodeId, usize>,
    ordered: BTreeSet<(usize, NodeId)>,
}

impl Sizes {
    fn set(&mut self, node: &NodeId, bytes: usize) {
        if self.of.get(node) == Some(&bytes) {
            return;
        }
        self.forget(node);
        self.of.insert(node.clone(), bytes);
        self.ordered.insert((bytes, node.clone()));
    }

    pub(super) fn forget(&mut self, node: &NodeId) {
        if let Some(bytes) = self.of.remove(node) {
            self.ordered.remove(&(bytes, node.clone()));
        }
    }

    fn largest(&self) -> usize {
        self.ordered.last().map_or(0, |(bytes, _)| *bytes)
    }
}

/// The bytes of a document that says this.
fn bytes_of(desired: &DesiredState) -> usize {
    // A document of strings, numbers and lists always serialises.
    serde_json::to_vec(desired).map_or(0, |text| text.len()) + PROVENANCE_BYTES
}

impl World {
    /// The document of a node has so many bytes, without its numbers and times.
    pub(crate) fn note_size(&mut self, node: &NodeId, bytes: usize) {
        self.sizes.set(node, bytes + PROVENANCE_BYTES);
    }

    /// Whether some node's document might be too large with so many bytes more.
    pub(crate) fn may_be_too_large(&self, more: usize) -> bool {
        self.sizes.largest().saturating_add(more) > MAX_DOCUMENT_BYTES
    }

    /// A node whose document would be too large if this object were declared, and its bytes: it is tried what would become of
    /// this world.
    pub(crate) fn too_large(
        self,
        object: &Object,
        cluster: &ClusterId,
        now: Timestamp,
    ) -> Option<(NodeId, usize)> {
        let mut next = self;
        next.declare(object);
        next.settle_and_store(now);
        let pool = super::pool_key(object).map(|key| key.pool);
        let tenant = object.metadata.tenant.clone().or_else(|| object.metadata.name.parse().ok())?;
        let pools = next.pools_of.get(&tenant).into_iter().flatten();
        let own = pools.filter(|name| pool.as_ref().is_none_or(|pool| pool == *name));
        let keys = own.map(|pool| PoolKey { tenant: tenant.clone(), pool: pool.clone() });
        let nodes: BTreeSet<NodeId> =
            keys.flat_map(|key| next.stored.nodes_of(&key).cloned().collect::<Vec<_>>()).collect();
        let sizes = nodes.into_iter().filter_map(|node| {
            let bytes = bytes_of(&next.render(cluster, &node)?);
            Some((node, bytes))
        });
        sizes.into_iter().find(|(_, bytes)| *bytes > MAX_DOCUMENT_BYTES)
    }
}
