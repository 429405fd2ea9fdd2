//! What a node says of itself: the messages of [`crate::wire::node`] with what code needs to build them.

pub use crate::wire::node::v1::{
    Capability, Capacity, Condition, Counts, Event, InstanceStatus, Mark, NodeInfo, NodeStatus, PassedOver,
    PoolStatus, Usage, WakeTiming,
};

mod condition;
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
