//! Puts a node's parts together, and brings it into agreement once for `mvm agent reconcile`.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use mvm_planner::{Deferred, Step};
use mvm_proto::status::Capacity;
use mvm_proto::{DesiredState, NodeId, Timestamp};
use serde::Serialize;

use crate::driver::DriverKind;

/// Where the time comes from; a test brings its own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    #[must_use]
    pub fn system() -> Self {
        Self::new(|| Timestamp::from(SystemTime::now()))
    }

    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

/// What a node is told at start.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    pub node_id: NodeId,
    /// Records and driver state are kept below it.
    pub data_dir: PathBuf,
    pub driver: DriverKind,
    pub capacity: Capacity,
    /// How often the node is compared with its desired state when nothing happens.
    pub interval: Duration,
    /// How many instances may be worked on at once.
    pub parallel_steps: usize,
    pub clock: Clock,
}

/// What one `mvm agent reconcile` did.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct Report {
    /// The node is as the document says, or (dry run) the document is valid.
    pub converged: bool,
    pub dry_run: bool,
    pub rounds: u32,
    /// Steps in the order in which they were planned.
    pub steps: Vec<Step>,
    /// What the last plan left undone, and why.
    pub deferred: Vec<Deferred>,
    pub errors: Vec<String>,
}

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("the document is for node {document}, this is {node}")]
    OtherNode { document: NodeId, node: NodeId },
    #[error(transparent)]
    Driver(#[from] crate::driver::DriverUnavailable),
}

/// Brings the node into agreement with a local document, once. A dry run plans one round and touches nothing.
pub async fn reconcile_once(
    desired: DesiredState,
    settings: NodeSettings,
    dry_run: bool,
) -> Result<Report, NodeError> {
    let _ = (desired, settings, dry_run);
    todo!()
}
