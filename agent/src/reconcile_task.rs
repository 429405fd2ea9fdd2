//! Keeps this node in agreement with its desired state.

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::status::{Event, InstanceStatus, NodeStatus};
use mvm_proto::{InstanceId, PoolId, Problem, TenantId};
use tokio::sync::{broadcast, watch};
use tokio_util::sync::CancellationToken;

use crate::ledger::InForce;
use crate::reconcile::{NodeError, NodeSettings};

/// How many passes were made and how long the last one took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pass {
    pub count: u64,
    pub took: Duration,
}

/// A node that is open but not yet running: give it to [`reconcile_task`].
#[derive(Debug)]
pub struct Node {}

impl Node {
    /// Opens records and driver, adopts the VMs that live, and resolves what an earlier agent left half-done.
    pub async fn open(settings: NodeSettings) -> Result<(Node, NodeHandle), NodeError> {
        let _ = settings;
        todo!()
    }
}

/// What the rest of the agent sees of the node. Cheap to clone.
#[derive(Debug, Clone)]
pub struct NodeHandle {}

impl NodeHandle {
    #[must_use]
    pub fn status(&self) -> watch::Receiver<NodeStatus> {
        todo!()
    }

    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        todo!()
    }

    #[must_use]
    pub fn passes(&self) -> watch::Receiver<Pass> {
        todo!()
    }

    /// Says something to everyone who follows this node's events.
    pub fn publish(&self, kind: &str, subject: &str, message: &str) {
        let _ = (kind, subject, message);
        todo!()
    }

    /// All instances, or one tenant's.
    #[must_use]
    pub fn instances(&self, tenant: Option<&TenantId>) -> Vec<InstanceStatus> {
        let _ = tenant;
        todo!()
    }

    /// Tenants with instances here or named by the document in force.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantId> {
        todo!()
    }

    /// Brings a sleeping or warm instance to running for a request; one that runs is left as it is.
    pub async fn wake(&self, tenant: &TenantId, pool: &PoolId, instance: &InstanceId) -> Result<(), Problem> {
        let _ = (tenant, pool, instance);
        todo!()
    }

    /// Asks for a pass now.
    pub fn trigger(&self) {
        todo!()
    }
}

/// Runs until `shutdown`. Steps that are under way are finished; instances are left as they are.
pub async fn reconcile_task(
    node: Node,
    desired: watch::Receiver<Option<Arc<InForce>>>,
    shutdown: CancellationToken,
) {
    let _ = (node, desired, shutdown);
    todo!()
}
