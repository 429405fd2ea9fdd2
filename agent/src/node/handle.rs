//! What other tasks than the reconcile task hold of the node. Requests on an instance are in [`actions`](super::actions)
//! and [`moves`](super::migration).

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::HostError;
use mvm_host::network::NetworkFound;
use mvm_planner::{NodePlan, Observation, plan_node};
use mvm_proto::status::{InstanceStatus, NodeStatus, TenantRemoval};
use mvm_proto::{DesiredState, Digest, InstanceId, NodeId, PoolId, TenantId};
use mvm_vmm::Driver;
use tokio::sync::{Notify, broadcast, watch};
use zeroize::Zeroizing;

use crate::events::Events;
use crate::execute::{StepEnd, Wake};
use crate::guest::GuestLinks;
use crate::instance::record::Record;
use crate::instance::records::Records;
use crate::isolation::NetworkReport;
use crate::node::CurrentDocument;
use crate::node::actor::{Actor, Place};
use crate::node::error::ActionError;
use crate::node::export::{Export, export};
use crate::persist::Sessions;
use crate::secrets::{BundleSet, SecretsNotKept};

/// The end of a console: what is given unless asked otherwise, and the most that is given.
pub const DEFAULT_LOG_BYTES: usize = 64 * 1024;
pub const MAX_LOG_BYTES: usize = 1024 * 1024;

/// How many passes and plans were made, and how long the last pass took.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Pass {
    pub count: u64,
    /// Passes in which something had changed, so that the planner was asked.
    pub plans: u64,
    pub took: Duration,
}

/// What the rest of the agent sees of the node. Cheap to clone.
#[derive(Clone)]
pub struct NodeHandle {
    pub(super) shared: Arc<Shared>,
}

pub(super) struct Shared {
    pub(super) actor: Actor,
    pub(super) status: watch::Sender<NodeStatus>,
    pub(super) passes: watch::Sender<Pass>,
    pub(super) trigger: Notify,
    pub(super) current_document: watch::Sender<Option<Arc<CurrentDocument>>>,
    /// What the last pass found that can't be started now.
    pub(super) blocked: watch::Sender<Vec<mvm_planner::Blocked>>,
    pub(super) network: watch::Receiver<NetworkFound>,
    pub(super) lacking_secrets: watch::Receiver<BundleSet>,
    /// How far the removal of tenants is.
    pub(super) removals: watch::Sender<Vec<TenantRemoval>>,
    /// Whether memory is short on this machine.
    pub(super) pressed: watch::Sender<bool>,
}

impl std::fmt::Debug for NodeHandle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("NodeHandle").field("node_id", self.node_id()).finish_non_exhaustive()
    }
}

impl NodeHandle {
    #[must_use]
    pub fn node_id(&self) -> &NodeId {
        &self.shared.actor.node_id
    }

    #[must_use]
    pub fn status(&self) -> watch::Receiver<NodeStatus> {
        self.shared.status.subscribe()
    }

    #[must_use]
    pub fn events(&self) -> &Events {
        &self.shared.actor.executor.events
    }

    /// Every wake that ended well, on demand or by hand.
    #[must_use]
    pub fn wakes(&self) -> broadcast::Receiver<Wake> {
        self.shared.actor.executor.wakes.subscribe()
    }

    /// Every step that ended, one way or the other.
    #[must_use]
    pub fn step_ends(&self) -> broadcast::Receiver<StepEnd> {
        self.shared.actor.executor.ends.subscribe()
    }

    /// What the last look at the tenants' networks found.
    #[must_use]
    pub fn network(&self) -> watch::Receiver<NetworkFound> {
        self.shared.network.clone()
    }

    /// The bundles of secrets that the document in force names and that are not here.
    #[must_use]
    pub fn lacking_secrets(&self) -> watch::Receiver<BundleSet> {
        self.shared.lacking_secrets.clone()
    }

    /// Keeps a bundle that was delivered, and looks what can be started with it.
    pub async fn keep_secrets(
        &self,
        tenant: TenantId,
        digest: Digest,
        bytes: Zeroizing<Vec<u8>>,
    ) -> Result<(), SecretsNotKept> {
        let secrets = Arc::clone(&self.shared.actor.executor.secrets);
        let path = || std::path::PathBuf::from(tenant.as_str());
        let of = tenant.clone();
        let kept = tokio::task::spawn_blocking(move || secrets.keep(&of, &digest, &bytes)).await;
        kept.map_err(|cause| SecretsNotKept::Unwritable { path: path(), cause: cause.into() })??;
        self.trigger();
        Ok(())
    }

    #[must_use]
    pub fn passes(&self) -> watch::Receiver<Pass> {
        self.shared.passes.subscribe()
    }

    /// Where it is said whether memory is short on this machine.
    pub(crate) fn pressed(&self) -> &watch::Sender<bool> {
        &self.shared.pressed
    }

    pub(crate) fn records(&self) -> &Arc<Records> {
        self.shared.actor.records()
    }

    pub(crate) fn sessions(&self) -> &Arc<Sessions> {
        &self.shared.actor.executor.sessions
    }

    /// The links to the programs inside this node's instances.
    #[must_use]
    pub fn guests(&self) -> &GuestLinks {
        &self.shared.actor.executor.links
    }

    /// How an instance is, with what is known of its session.
    #[must_use]
    pub fn status_of(&self, record: &Record) -> InstanceStatus {
        let mut status = record.status();
        self.sessions().show(record, &mut status);
        status
    }

    /// All instances, or one tenant's.
    #[must_use]
    pub fn instances(&self, tenant: Option<&TenantId>) -> Vec<InstanceStatus> {
        let mut found = Vec::new();
        self.records().for_each(|record, _| {
            if tenant.is_none_or(|tenant| record.tenant == *tenant) {
                found.push(self.status_of(record));
            }
        });
        found
    }

    /// One instance, whatever tenant it belongs to.
    #[must_use]
    pub fn instance(&self, id: &InstanceId) -> Option<InstanceStatus> {
        self.records().get(id).map(|record| self.status_of(&record))
    }

    /// One tenant's and pool's instance.
    pub fn find(
        &self,
        tenant: &TenantId,
        pool: &PoolId,
        instance: &InstanceId,
    ) -> Result<InstanceStatus, ActionError> {
        let place = Place { tenant: tenant.clone(), pool: pool.clone(), instance: instance.clone() };
        self.shared.actor.find(&place).map(|record| self.status_of(&record))
    }

    /// Tenants with instances here or named by the document in force.
    #[must_use]
    pub fn tenants(&self) -> Vec<TenantId> {
        let mut tenants: BTreeSet<TenantId> = self.records().tenants();
        if let Some(current_document) = self.desired() {
            tenants.extend(current_document.desired.tenants.iter().map(|tenant| tenant.tenant_id.clone()));
        }
        tenants.into_iter().collect()
    }

    /// The document in force.
    #[must_use]
    pub fn desired(&self) -> Option<Arc<CurrentDocument>> {
        self.shared.current_document.borrow().clone()
    }

    /// What this node would do next if this were its document.
    #[must_use]
    pub fn plan(&self, desired: &DesiredState) -> NodePlan {
        plan_node(desired, &self.observation(), self.shared.actor.executor.clock.now())
    }

    /// What the planner would be told now.
    #[must_use]
    pub fn observation(&self) -> Observation {
        Observation {
            capacity: self.shared.actor.capacity,
            instances: self.records().observed(),
            blocked: self.shared.blocked.borrow().clone(),
            memory_pressure: *self.shared.pressed.borrow(),
        }
    }

    /// A document that asks for what runs here.
    #[must_use]
    pub fn export(&self) -> Export {
        let current_document = self.desired();
        let desired = current_document.as_ref().map(|current_document| &current_document.desired);
        export(self.node_id(), desired, &self.records().all())
    }

    /// What holds of the tenants' networks, by looking and, if `deep`, by trying.
    pub async fn verify_network(&self, deep: bool) -> Result<NetworkReport, HostError> {
        let current_document = self.desired();
        let desired = current_document.as_ref().map(|current_document| &current_document.desired);
        self.shared.actor.executor.isolation.verify(desired, self.records(), deep).await
    }

    /// The end of what an instance wrote to its console.
    pub async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, ActionError> {
        let tail = self.shared.actor.executor.driver.console(instance, max_bytes).await;
        tail.map_err(|cause| ActionError::NoConsole { instance: instance.clone(), cause })
    }

    /// Leaves a line in the tenant's audit log on what was asked of a guest.
    pub(crate) fn audit(
        &self,
        instance: &InstanceId,
        actor: &str,
        action: &str,
        reason: String,
        outcome: Result<&str, String>,
    ) {
        // One that is gone has its end in the log.
        if let Some(record) = self.records().get(instance) {
            let at = self.shared.actor.executor.clock.now();
            self.shared.actor.executor.audit.append_for(&record, at, actor, action, reason, outcome);
        }
    }

    /// Asks for a pass now.
    pub fn trigger(&self) {
        self.shared.trigger.notify_one();
    }

    /// Asks for a pass once what is being done to this instance is over: the request may have been answered before.
    pub(super) fn trigger_after(&self, instance: InstanceId) {
        let handle = self.clone();
        tokio::spawn(async move {
            handle.records().wait_released(&instance).await;
            handle.trigger();
        });
    }
}
