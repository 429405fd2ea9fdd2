//! What every request on an instance needs: the instance, its lease, room for it, and an image that may start.
//!
//! A request takes the same lease, quotas and steps as the planner's own. [`wake`](super::wake) and
//! [`actions`](super::actions) change an instance's phase, [`moves`](super::migration) takes it to another node.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use mvm_planner::{Action, Blocked, Capacity, Observation, check_move};
use mvm_proto::{InstanceId, NodeId, Phase, PoolId, TenantId};
use tokio::sync::watch;

use crate::execute::gate::Gate;
use crate::execute::{Executor, bundle_of};
use crate::instance::PoolSpec;
use crate::instance::record::Record;
use crate::instance::records::{Lease, Records};
use crate::node::CurrentDocument;
use crate::node::error::ActionError;
use crate::node::transfer::Tickets;
use crate::node::wake::UnderWay;
use crate::secrets::{BundleOf, SecretsError};

/// How long a request waits for a step that is under way on the instance.
const LEASE_PATIENCE: Duration = Duration::from_secs(20);

/// An instance by its full name.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub tenant: TenantId,
    pub pool: PoolId,
    pub instance: InstanceId,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}/{}", self.tenant, self.pool, self.instance)
    }
}

/// Acts on instances for requests. Cheap to clone.
#[derive(Debug, Clone)]
pub(crate) struct Actor {
    pub(crate) executor: Arc<Executor>,
    pub(crate) node_id: NodeId,
    pub(crate) capacity: Capacity,
    pub(crate) gate: Arc<Gate>,
    pub(crate) current_document: watch::Receiver<Option<Arc<CurrentDocument>>>,
    /// What can't be started now: neither by a count nor by hand.
    pub(crate) blocked: watch::Receiver<Vec<Blocked>>,
    pub(crate) under_way: UnderWay,
    /// What streams of moves have to show.
    pub(crate) tickets: Arc<Tickets>,
}

impl Actor {
    pub(crate) fn records(&self) -> &Arc<Records> {
        &self.executor.records
    }

    /// The record of an instance that is of this tenant and pool.
    pub(crate) fn find(&self, place: &Place) -> Result<Record, ActionError> {
        let record = self.records().get(&place.instance);
        let record = record.filter(|record| record.tenant == place.tenant && record.pool == place.pool);
        record.ok_or_else(|| ActionError::Unknown(place.clone()))
    }

    /// The right to act on an instance that is to become `to`.
    pub(crate) async fn lease(&self, id: &InstanceId, to: Phase) -> Result<Lease, ActionError> {
        let lease = tokio::time::timeout(LEASE_PATIENCE, self.records().wait_lease(id, to));
        lease.await.map_err(|_| ActionError::Busy(id.clone()))
    }

    /// The right to bring an instance up. What is putting it to rest is called off, if it still can be. Whether it was.
    pub(crate) async fn lease_to_wake(&self, id: &InstanceId) -> Result<(Lease, bool), ActionError> {
        let mut kept = false;
        let lease = async {
            loop {
                let released = self.records().released();
                tokio::pin!(released);
                // Registered before looking, so that a release in between is not missed.
                released.as_mut().enable();
                if let Some(lease) = self.records().lease_on_demand(id) {
                    return lease;
                }
                kept |= self.cancel_rest(id);
                released.await;
            }
        };
        let lease = tokio::time::timeout(LEASE_PATIENCE, lease).await;
        Ok((lease.map_err(|_| ActionError::Busy(id.clone()))?, kept))
    }

    /// Its place among those that run may be another's by now: then it rests first, and is woken if there is room.
    fn cancel_rest(&self, id: &InstanceId) -> bool {
        if !self.records().can_cancel(id) {
            return false;
        }
        let gate = self.gate.close();
        if self.has_room(id, Phase::Running).is_err() {
            return false;
        }
        let cancelled = self.records().cancel_rest(id);
        if cancelled {
            gate.admit();
        }
        cancelled
    }

    /// Whether an image key still vouches for what an instance that rests would run.
    pub(crate) fn check_image(&self, record: &Record) -> Result<(), ActionError> {
        let refused = |cause| ActionError::NotVouched { instance: record.id.clone(), cause };
        self.executor.check_image(record).map_err(refused)
    }

    /// Whether the secrets that a step needs are there: those of the document in force, and for one whose memory is restored
    /// those that it was started with.
    pub(crate) fn check_secrets(&self, record: &Record, step: Action) -> Result<(), ActionError> {
        let current_document = self.current_document.borrow().clone();
        let tenant = current_document.as_ref().and_then(|current_document| {
            current_document.desired.tenants.iter().find(|tenant| tenant.tenant_id == record.tenant)
        });
        let pool = tenant.and_then(|tenant| tenant.pools.iter().find(|pool| pool.pool_id == record.pool));
        let own = pool.and_then(|pool| pool.secrets_hash);
        let current = BundleOf { own: own.is_some(), ..bundle_of(record) };
        let now = own.or_else(|| tenant.and_then(|tenant| tenant.secrets_hash)).map(|hash| (current, hash));
        let before = record.secrets.filter(|_| step == Action::Wake).map(|hash| (bundle_of(record), hash));
        for (bundle, expected) in now.into_iter().chain(before) {
            let instance = record.id.clone();
            self.executor.secrets.check(bundle, &expected).map_err(|cause| match cause {
                SecretsError::Other { .. } => ActionError::SecretsChanged { instance, cause },
                SecretsError::Missing { .. } | SecretsError::Unreadable { .. } => {
                    ActionError::SecretsMissing { instance, cause }
                }
            })?;
        }
        Ok(())
    }

    /// Whether quotas and capacity have room for an instance in phase `to`. The caller has its lease.
    pub(crate) fn check_room(&self, id: &InstanceId, to: Phase) -> Result<(), ActionError> {
        let gate = self.gate.close();
        self.has_room(id, to)?;
        gate.admit();
        Ok(())
    }

    /// The caller has closed the gate.
    fn has_room(&self, id: &InstanceId, to: Phase) -> Result<(), ActionError> {
        let Some(current_document) = self.current_document.borrow().clone() else { return Ok(()) };
        let blocked = self.blocked.borrow().clone();
        let instances = self.records().observed();
        let observation =
            Observation { capacity: self.capacity, blocked, instances, ..Observation::default() };
        if to == Phase::Running
            && let Some(record) = self.records().get(id)
            && let Some(blocked) = observation.blocked.iter().find(|blocked| {
                let pool = blocked.pool.as_ref();
                blocked.tenant == record.tenant && pool.is_none_or(|pool| *pool == record.pool)
            })
        {
            return Err(ActionError::NotReady { instance: id.clone(), reason: blocked.reason.clone() });
        }
        check_move(&current_document.desired, &observation, id, to).map_err(|reason| ActionError::NoRoom {
            instance: id.clone(),
            to,
            reason,
        })
    }

    /// What the document in force says of a pool.
    pub(crate) fn spec(&self, tenant: &TenantId, pool: &PoolId) -> Option<PoolSpec> {
        let current_document = self.current_document.borrow().clone()?;
        let mut pools = current_document.desired.pools();
        pools
            .find(|(t, p)| t.tenant_id == *tenant && p.pool_id == *pool)
            .map(|(tenant, pool)| PoolSpec::of(tenant, pool))
    }
}
