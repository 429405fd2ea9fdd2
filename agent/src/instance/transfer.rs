//! The mark of an instance that is on its way between two nodes, by the coordinator's order.
//!
//! It is durable before anything leaves and with everything that arrives. An instance with the mark runs nowhere: the source
//! gave it up until the move is given up, and at the target it begins to be one when the source has removed it.

use std::fmt;

use mvm_proto::{NodeId, Phase};
use serde::{Deserialize, Serialize};

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transfer {
    /// The same at both ends, and of no other move.
    pub move_id: String,
    pub side: Side,
    /// The node at the other end.
    pub peer: NodeId,
    /// The count in which it has its place, at both ends.
    pub counts: Phase,
}

/// Which end of a move this node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Side {
    Source,
    Target,
}

impl fmt::Display for Transfer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let way = if self.side == Side::Source { "to" } else { "from" };
        write!(f, "{way} {}", self.peer)
    }
}
