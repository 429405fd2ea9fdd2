//! A request's way to an instance that rests: the same lease, quotas and steps as the planner's own.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt as _;
use futures::future::{BoxFuture, Shared};
use mvm_planner::{Action, Blocked, Capacity, Observation, check_move};
use mvm_proto::status::WakeTiming;
use mvm_proto::text::chain;
use mvm_proto::{InstanceId, Phase, PoolId, Problem, TenantId};
use mvm_vmm::Driver;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::watch;
use tokio::time::Instant;

use crate::execute::gate::Gate;
use crate::execute::timing::{Stage, millis};
use crate::execute::{Executor, Order, Stopwatch, WakeKind};
use crate::instance::records::{Lease, Records};
use crate::node::InForce;

/// How long a request waits for a step that is under way on the instance.
pub(crate) const LEASE_PATIENCE: Duration = Duration::from_secs(20);

/// The document in force, for those who are not the reconcile task.
pub(crate) type Shown = Arc<Mutex<Option<Arc<InForce>>>>;

pub(crate) fn show(shown: &Shown, in_force: Option<Arc<InForce>>) {
    *shown.lock() = in_force;
}

pub(crate) fn shown(shown: &Shown) -> Option<Arc<InForce>> {
    shown.lock().clone()
}

/// Wakes instances, whatever the driver.
pub(crate) trait Wakes: Send + Sync {
    fn wake(
        &self,
        tenant: TenantId,
        pool: PoolId,
        id: InstanceId,
    ) -> BoxFuture<'static, Result<WakeTiming, Problem>>;
}

/// What all who ask meanwhile wait for.
type UnderWay = Shared<BoxFuture<'static, Result<WakeTiming, Problem>>>;
type Wakings = Arc<Mutex<BTreeMap<InstanceId, UnderWay>>>;

fn lock(wakings: &Wakings) -> MutexGuard<'_, BTreeMap<InstanceId, UnderWay>> {
    wakings.lock()
}

/// Takes a wake off the list when it is over, however it ended.
struct Listed(Wakings, InstanceId);

impl Drop for Listed {
    fn drop(&mut self) {
        lock(&self.0).remove(&self.1);
    }
}

#[derive(Debug)]
pub(crate) struct Waker<D> {
    pub(crate) executor: Arc<Executor<D>>,
    pub(crate) records: Arc<Records>,
    pub(crate) capacity: Capacity,
    pub(crate) gate: Arc<Gate>,
    pub(crate) in_force: Shown,
    /// What can't be started now: neither by a count nor by hand.
    pub(crate) blocked: watch::Receiver<Vec<Blocked>>,
    /// A thousand requests for one instance are one wake.
    pub(crate) under_way: Wakings,
}

impl<D> Clone for Waker<D> {
    fn clone(&self) -> Self {
        Self {
            executor: Arc::clone(&self.executor),
            records: Arc::clone(&self.records),
            capacity: self.capacity,
            gate: Arc::clone(&self.gate),
            in_force: Arc::clone(&self.in_force),
            blocked: self.blocked.clone(),
            under_way: Arc::clone(&self.under_way),
        }
    }
}

impl<D: Driver> Wakes for Waker<D> {
    fn wake(
        &self,
        tenant: TenantId,
        pool: PoolId,
        id: InstanceId,
    ) -> BoxFuture<'static, Result<WakeTiming, Problem>> {
        // Before it joins another: whose instance it is, is asked for each request.
        if let Err(problem) = self.find(&tenant, &pool, &id) {
            return Box::pin(std::future::ready(Err(problem)));
        }
        let mut under_way = lock(&self.under_way);
        if let Some(other) = under_way.get(&id).cloned() {
            return joined(other);
        }
        let (this, listed) = (self.clone(), Listed(Arc::clone(&self.under_way), id.clone()));
        let place = id.clone();
        let (watch, up) = Stopwatch::watched();
        // Runs on even when the caller goes away: half a wake helps nobody.
        let task = tokio::spawn(async move {
            let _listed = listed;
            this.bring_up(&tenant, &pool, &id, watch).await
        });
        let wake = async move {
            match up.await {
                Ok(timing) => Ok(timing),
                Err(_) => task.await.unwrap_or_else(|error| Err(failed(&error.to_string()))),
            }
        };
        let wake = wake.boxed().shared();
        under_way.insert(place, wake.clone());
        wake.boxed()
    }
}

/// Another's wake, for one who came while it was under way.
fn joined(other: UnderWay) -> BoxFuture<'static, Result<WakeTiming, Problem>> {
    let asked = Instant::now();
    Box::pin(async move {
        let timing = other.await?;
        Ok(WakeTiming { joined: true, waited_ms: millis(asked.elapsed()), ..timing })
    })
}

impl<D: Driver> Waker<D> {
    /// The wake of this instance that is under way, for whoever wants it up too.
    pub(crate) fn under_way(
        &self,
        id: &InstanceId,
    ) -> Option<BoxFuture<'static, Result<WakeTiming, Problem>>> {
        lock(&self.under_way).get(id).cloned().map(joined)
    }

    async fn bring_up(
        &self,
        tenant: &TenantId,
        pool: &PoolId,
        id: &InstanceId,
        mut watch: Stopwatch,
    ) -> Result<WakeTiming, Problem> {
        self.find(tenant, pool, id)?;
        let (lease, kept) = self.lease(id).await?;
        // What was waited for may have changed it, or ended it.
        let phase = self.find(tenant, pool, id)?;
        let action = match phase {
            Phase::Running | Phase::Warm => Action::Resume,
            Phase::Sleeping => Action::Wake,
            other => return Err(not_resting(id, other)),
        };
        if phase == Phase::Running {
            watch.is(if kept { WakeKind::Kept } else { WakeKind::Running });
        } else {
            self.check_image(id)?;
            self.check_room(id, Phase::Running)?;
        }
        let reason = "woken on demand".to_owned();
        let order = Order { action, staging: None, reason, spec: None, on_demand: true, asked_by: None };
        watch.lap(Stage::Queued);
        let done = self.executor.execute_timed(&lease, &order, &mut watch).await;
        done.map_err(|error| failed(&chain(&error)))?;
        Ok(watch.read())
    }

    pub(crate) fn find(&self, tenant: &TenantId, pool: &PoolId, id: &InstanceId) -> Result<Phase, Problem> {
        let record = self.records.get(id).filter(|r| r.tenant == *tenant && r.pool == *pool);
        record.map(|record| record.phase).ok_or_else(|| {
            let detail = format!("there is no instance {tenant}/{pool}/{id} on this node");
            Problem::new(404, "unknown_instance", detail, "list the tenant's instances")
        })
    }

    /// The right to bring an instance up. What is putting it to rest is called off, if it still can be. Whether it was.
    pub(crate) async fn lease(&self, id: &InstanceId) -> Result<(Lease, bool), Problem> {
        let mut kept = false;
        let lease = async {
            loop {
                let released = self.records.released();
                tokio::pin!(released);
                // Registered before looking, so that a release in between is not missed.
                released.as_mut().enable();
                if let Some(lease) = self.records.lease_on_demand(id) {
                    return lease;
                }
                kept |= self.call_off_rest(id);
                released.await;
            }
        };
        let lease = tokio::time::timeout(LEASE_PATIENCE, lease).await.map_err(|_| busy(id))?;
        Ok((lease, kept))
    }

    /// Its place among those that run may be another's by now: then it rests first, and is woken if there is room.
    fn call_off_rest(&self, id: &InstanceId) -> bool {
        if !self.records.can_call_off(id) {
            return false;
        }
        let gate = self.gate.close();
        if self.has_room(id, Phase::Running).is_err() {
            return false;
        }
        let called_off = self.records.call_off_rest(id);
        if called_off {
            gate.admit();
        }
        called_off
    }

    /// Whether an image key still vouches for what an instance that rests would run.
    pub(crate) fn check_image(&self, id: &InstanceId) -> Result<(), Problem> {
        let Some(record) = self.records.get(id) else { return Ok(()) };
        self.executor.check_image(&record).map_err(|error| {
            let detail = format!("{id} is not started again: {error}");
            let remediation = "Vouch for the image again, or push a document with another one.";
            Problem::new(409, "image_not_vouched", detail, remediation)
        })
    }

    /// Whether quotas and capacity have room for an instance in phase `to`. For whoever has its lease.
    pub(crate) fn check_room(&self, id: &InstanceId, to: Phase) -> Result<(), Problem> {
        let gate = self.gate.close();
        self.has_room(id, to)?;
        gate.admit();
        Ok(())
    }

    /// For whoever has closed the gate.
    fn has_room(&self, id: &InstanceId, to: Phase) -> Result<(), Problem> {
        let Some(in_force) = shown(&self.in_force) else { return Ok(()) };
        let blocked = self.blocked.borrow().clone();
        let instances = self.records.observed();
        let observation =
            Observation { capacity: self.capacity, blocked, instances, ..Observation::default() };
        check_move(&in_force.desired, &observation, id, to).map_err(|reason| {
            let detail = format!("{id} can't become {to}: {reason}");
            Problem::new(409, "no_room", detail, "free some of it first")
        })
    }
}

pub(crate) fn busy(id: &InstanceId) -> Problem {
    Problem::new(503, "instance_busy", format!("another step on {id} is still under way"), "try again")
}

fn not_resting(id: &InstanceId, phase: Phase) -> Problem {
    let detail = format!("{id} is {phase}; only sleeping and warm instances are woken");
    Problem::new(409, "not_resting", detail, "start it through the desired counts")
}

fn failed(reason: &str) -> Problem {
    Problem::new(503, "wake_failed", format!("could not wake the instance: {reason}"), "try again later")
}
