//! The last accepted document and its place in the order: one file, durable before the first effect.

use std::sync::Arc;

use mvm_proto::status::Mark;
use mvm_proto::{DesiredState, Timestamp};

/// The ledger's file in the data directory.
pub const LEDGER_FILE: &str = "ledger.json";

/// The document in force. What the reconcile task is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct InForce {
    pub desired: DesiredState,
    /// Absent: the document came from a local file.
    pub mark: Option<Mark>,
    /// Past this the document stays in force, and a condition says that it is old.
    pub expires_at: Option<Timestamp>,
}

impl InForce {
    /// A document from a local file, which has no place in any order.
    #[must_use]
    pub fn local(desired: DesiredState) -> Arc<Self> {
        Arc::new(Self { desired, mark: None, expires_at: None })
    }
}
