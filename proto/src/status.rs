//! What a node says of itself: the messages of [`crate::wire::node`] with what code needs to build them.

pub use crate::wire::node::v1::{
    Capability, Capacity, Condition, Counts, Event, GuestSession, InstanceStatus, Mark, NodeInfo, NodeStatus,
    PassedOver, PoolStatus, TenantAddresses, TenantRemoval, Usage, WakeTiming,
};

mod condition;
pub mod delta;
pub mod fit;

pub use condition::{ConditionKind, ConditionStatus, cause_of, set_condition};

use crate::Digest;
use crate::named::named;

named! {
    /// Where a node's desired state comes from.
    pub enum DesiredSource {
        /// Its coordinator.
        Session = "session",
        File = "file",
    }
}

named! {
    /// What an agent understands beyond the schema version of its documents: it refuses a document with what it does not
    /// know, so a coordinator uses nothing that the node does not name.
    pub enum Feature {
        /// `removed_tenants` in documents, and `removals` in the status.
        RemovedTenants = "removed-tenants",
        /// Requests to list and to delete guest sessions.
        GuestSessions = "guest-sessions",
        /// `update` of pools in documents, and `serving`, `outdated`, `surge` and `failing` of pools in the status.
        RolloutLimits = "rollout-limits",
        /// Orders of moves on the session, and streams of archives on the tunnel.
        Moves = "moves",
    }
}

impl NodeInfo {
    #[must_use]
    pub fn has(&self, feature: Feature) -> bool {
        self.features.iter().any(|name| name == feature.as_str())
    }
}

impl Mark {
    #[must_use]
    pub fn new(epoch: u64, generation: u64, digest: Digest) -> Self {
        Self { epoch, generation, digest: digest.to_string() }
    }

    /// The order in which documents replace each other.
    #[must_use]
    pub fn order(&self) -> (u64, u64) {
        (self.epoch, self.generation)
    }
}
