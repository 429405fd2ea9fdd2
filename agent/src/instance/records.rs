//! The records of this node's instances: in memory for every reader, in sled for the next start.
//!
//! A record is changed only by the holder of the instance's [`Lease`], so no instance is acted on twice at once.
//! [`Records::save`] is durable when it returns; [`Records::set`] is for what the driver can be asked again.

mod cancel;
mod hold;
pub(crate) mod templates;

use std::collections::{BTreeMap, BTreeSet};
use std::net::Ipv4Addr;
use std::sync::Arc;

use mvm_planner::ObservedInstance;
use mvm_proto::document::{Network, Restart};
use mvm_proto::{Digest, InstanceId, Phase, PoolId, TenantId, Timestamp};
use mvm_store::{SledStore, Store, StoreError, Transaction};
use parking_lot::{Mutex, MutexGuard};
use serde::de::DeserializeOwned;
use tokio::sync::Notify;
use tokio::sync::futures::Notified;

use crate::instance::PoolSpec;
use crate::instance::SessionMark;
use crate::instance::record::{Net, Record};
use crate::instance::template::Template;

pub use cancel::CancelSignal;
pub use hold::Hold;
pub(crate) use hold::Usable;

const PREFIX: &str = "instance/";

/// Random ids collide once in a while among thousands; this many tries never all do.
const ID_TRIES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub enum StateError {
    #[error("could not open or write the records of this node's instances")]
    Store(#[from] StoreError),
    #[error("the record {key} is damaged; move the state directory away to start without records")]
    Damaged {
        key: String,
        #[source]
        cause: serde_json::Error,
    },
    #[error("subnet {subnet} of tenant {tenant} has no free address{share}")]
    NoAddress { tenant: TenantId, subnet: String, share: &'static str },
    #[error("could not find a free instance id")]
    NoId,
    #[error("this agent is shutting down")]
    Closing,
    #[error("instance {0} already exists on this node")]
    Exists(InstanceId),
    #[error("{holder} already has address {address} of tenant {tenant} on this node")]
    AddressTaken { tenant: TenantId, address: Ipv4Addr, holder: InstanceId },
}

#[derive(Debug)]
pub struct Records {
    store: Option<SledStore>,
    inner: Mutex<Inner>,
    released: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    records: BTreeMap<InstanceId, Record>,
    /// Whose instances these are. An instance never changes its pool.
    by_pool: BTreeMap<(TenantId, PoolId), BTreeSet<InstanceId>>,
    /// What is being worked on.
    leased: BTreeMap<InstanceId, LeaseState>,
    /// How many streams keep an instance from being put to rest by policy.
    held: BTreeMap<InstanceId, usize>,
    /// How many leases were released in all, and which of them was the last of each instance.
    releases: u64,
    last_release: BTreeMap<InstanceId, u64>,
    templates: BTreeMap<(TenantId, PoolId), Template>,
    template_turns: BTreeMap<(TenantId, PoolId), Arc<tokio::sync::Mutex<()>>>,
    /// Why the last write failed; absent: it did not.
    write_error: Option<String>,
    /// No further lease is given.
    closing: bool,
    /// What pools whose source changes under one reference boot from now.
    images: BTreeMap<(TenantId, PoolId), Digest>,
}

/// What becomes of an instance that is being worked on.
#[derive(Debug, Clone)]
struct LeaseState {
    to: Phase,
    /// A request wants it: from here on it is no count's, also before its record says so.
    on_demand: bool,
    /// The count that a request has it from; absent: the one that its phase is of.
    home: Option<Phase>,
    /// For requests that want it back; absent: it can't be called off.
    cancel: Option<CancelSignal>,
}

impl LeaseState {
    fn to(to: Phase) -> Self {
        Self { to, on_demand: false, home: None, cancel: None }
    }
}

/// The right to act on one instance. Ends when dropped.
#[derive(Debug)]
pub struct Lease {
    records: Arc<Records>,
    id: InstanceId,
    cancel: CancelSignal,
}

impl Lease {
    #[must_use]
    pub fn id(&self) -> &InstanceId {
        &self.id
    }

    /// Whether the step that this is for is wanted to go on.
    pub(crate) fn cancel(&self) -> &CancelSignal {
        &self.cancel
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        self.records.lock().release(&self.id);
        self.records.released.notify_waiters();
    }
}

impl Inner {
    fn insert(&mut self, record: Record) {
        let pool = (record.tenant.clone(), record.pool.clone());
        self.by_pool.entry(pool).or_default().insert(record.id.clone());
        self.records.insert(record.id.clone(), record);
    }

    fn release(&mut self, id: &InstanceId) {
        self.leased.remove(id);
        self.releases += 1;
        if self.records.contains_key(id) {
            self.last_release.insert(id.clone(), self.releases);
        } else {
            self.last_release.remove(id);
        }
    }

    fn remove(&mut self, id: &InstanceId) {
        let Some(record) = self.records.remove(id) else { return };
        let pool = (record.tenant, record.pool);
        if let Some(ids) = self.by_pool.get_mut(&pool) {
            ids.remove(id);
            if ids.is_empty() {
                self.by_pool.remove(&pool);
            }
        }
    }

    /// The first address that this node may give and that no instance of the tenant has, at an offset that no instance in a
    /// network of this number has: who a VMM runs as follows from both, and a document may give one tenant's number to
    /// another while the first one's instances are still there.
    fn free_address(&self, tenant: &TenantId, network: &Network) -> Result<(u32, Ipv4Addr), StateError> {
        let (net_id, subnet) = (network.tenant_net_id, network.ipv4_subnet);
        let near = self.records.values().filter(|record| record.tenant == *tenant || record.net_id == net_id);
        let taken: BTreeSet<u32> = near.map(|record| record.offset).collect();
        let mut free = network.offsets().filter(|offset| !taken.contains(offset));
        let found = free.find_map(|offset| Some((offset, subnet.instance_address(offset)?)));
        found.ok_or_else(|| StateError::NoAddress {
            tenant: tenant.clone(),
            subnet: subnet.to_string(),
            share: if network.is_whole() { "" } else { " in what this node may give" },
        })
    }
}

impl Records {
    /// Reads every record. One that can't be read is an error: forgetting it would leak its VM.
    pub async fn open(store: SledStore) -> Result<Arc<Self>, StateError> {
        let records: Vec<Record> = read_all(&store, PREFIX).await?;
        let templates = read_all(&store, templates::PREFIX).await?;
        let place = |template: &Template| (template.tenant.clone(), template.pool.clone());
        let templates = templates.into_iter().map(|template| (place(&template), template)).collect();
        let mut inner = Inner { templates, ..Inner::default() };
        records.into_iter().for_each(|record| inner.insert(record));
        Ok(Arc::new(Self { store: Some(store), inner: Mutex::new(inner), released: Notify::new() }))
    }

    /// No records, and nowhere to keep any: for a dry run on a node that never ran.
    #[must_use]
    pub fn empty() -> Arc<Self> {
        Arc::new(Self { store: None, inner: Mutex::default(), released: Notify::new() })
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        self.inner.lock()
    }

    #[must_use]
    pub fn get(&self, id: &InstanceId) -> Option<Record> {
        self.lock().records.get(id).cloned()
    }

    /// Calls `each` for every record and the phase that its lease brings it to, in the order of ids.
    pub fn for_each(&self, mut each: impl FnMut(&Record, Option<Phase>)) {
        let inner = self.lock();
        for (id, record) in &inner.records {
            each(record, inner.leased.get(id).map(|state| state.to));
        }
    }

    /// A moment in the order of what is done to instances.
    #[must_use]
    pub(crate) fn releases(&self) -> u64 {
        self.lock().releases
    }

    /// Calls `each` for every record, and says whether it is leased or was since that moment.
    pub(crate) fn for_each_since(&self, moment: u64, mut each: impl FnMut(&Record, bool)) {
        let inner = self.lock();
        for (id, record) in &inner.records {
            let acted = inner.last_release.get(id).is_some_and(|release| *release > moment);
            each(record, acted || inner.leased.contains_key(id));
        }
    }

    /// Whether a lease of `id` was released since that moment.
    #[must_use]
    pub(crate) fn acted_since(&self, id: &InstanceId, moment: u64) -> bool {
        self.lock().last_release.get(id).is_some_and(|release| *release > moment)
    }

    /// Every instance as the planner sees it, those of a pool together: it looks at them so.
    #[must_use]
    pub fn observed(&self) -> Vec<ObservedInstance> {
        let inner = self.lock();
        let records = inner.by_pool.values().flatten().filter_map(|id| inner.records.get(id));
        let observed = records.map(|record| {
            let leased = inner.leased.get(&record.id);
            let mut observed = record.observed(leased.map(|state| state.to));
            let now = inner.images.get(&(record.tenant.clone(), record.pool.clone()));
            if let (Some(now), Some(own)) = (now, record.image)
                && own != *now
            {
                // The document's revision does not tell one state of a folder from the next: it is an older one all the same.
                observed.revision = Digest::of(own.as_bytes());
            }
            if let Some(state) = leased.filter(|state| state.on_demand) {
                observed.on_demand = true;
                observed.home.get_or_insert(state.home.unwrap_or(record.phase));
            }
            observed
        });
        observed.collect()
    }

    /// What these pools boot from now. Instances of another image are seen as of an older revision from then on.
    pub(crate) fn set_images(&self, images: BTreeMap<(TenantId, PoolId), Digest>) {
        self.lock().images = images;
    }

    #[must_use]
    pub fn all(&self) -> Vec<Record> {
        self.lock().records.values().cloned().collect()
    }

    #[must_use]
    pub fn write_error(&self) -> Option<String> {
        self.lock().write_error.clone()
    }

    /// The right to act on `id`, unless someone else has it.
    #[must_use]
    pub fn lease(self: &Arc<Self>, id: &InstanceId, moving_to: Phase) -> Option<Lease> {
        self.lease_as(id, LeaseState::to(moving_to))
    }

    fn lease_as(self: &Arc<Self>, id: &InstanceId, state: LeaseState) -> Option<Lease> {
        self.lease_unless(id, state, |_| false)
    }

    fn lease_unless(
        self: &Arc<Self>,
        id: &InstanceId,
        state: LeaseState,
        is_refused: impl FnOnce(&Inner) -> bool,
    ) -> Option<Lease> {
        let mut inner = self.lock();
        if inner.closing || inner.leased.contains_key(id) || is_refused(&inner) {
            return None;
        }
        let cancel = state.cancel.clone().unwrap_or_default();
        inner.leased.insert(id.clone(), state);
        Some(Lease { records: Arc::clone(self), id: id.clone(), cancel })
    }

    /// Waits for the right to act on `id`.
    pub async fn wait_lease(self: &Arc<Self>, id: &InstanceId, moving_to: Phase) -> Lease {
        loop {
            let released = self.released();
            tokio::pin!(released);
            // Registered before looking, so that a release in between is not missed.
            released.as_mut().enable();
            if let Some(lease) = self.lease(id, moving_to) {
                return lease;
            }
            released.await;
        }
    }

    /// Waits until `id` is not leased.
    pub(crate) async fn wait_released(&self, id: &InstanceId) {
        loop {
            let released = self.released();
            tokio::pin!(released);
            // Registered before looking, so that a release in between is not missed.
            released.as_mut().enable();
            if !self.is_leased(id) {
                return;
            }
            released.await;
        }
    }

    /// The right to bring `id` up for a request, unless someone else acts on it.
    pub(crate) fn lease_on_demand(self: &Arc<Self>, id: &InstanceId) -> Option<Lease> {
        self.lease_as(id, LeaseState { on_demand: true, ..LeaseState::to(Phase::Running) })
    }

    /// Waits until someone gives a lease back.
    pub(crate) fn released(&self) -> Notified<'_> {
        self.released.notified()
    }

    /// Makes a new instance, in memory only: its id and address are taken from here on.
    pub fn reserve(
        self: &Arc<Self>,
        tenant: &TenantId,
        pool: &PoolId,
        spec: &PoolSpec,
        staging: Option<Phase>,
        now: Timestamp,
    ) -> Result<(Record, Lease), StateError> {
        let mut inner = self.lock();
        if inner.closing {
            return Err(StateError::Closing);
        }
        let templates: BTreeSet<_> = inner.templates.values().map(|template| template.id.clone()).collect();
        let free = |id: &InstanceId| !inner.records.contains_key(id) && !templates.contains(id);
        let id = (0..ID_TRIES).map(|_| InstanceId::from_bits(fastrand::u32(..))).find(free);
        let id = id.ok_or(StateError::NoId)?;
        let (offset, address) = inner.free_address(tenant, &spec.network)?;
        let record = Record {
            tenant: tenant.clone(),
            pool: pool.clone(),
            id: id.clone(),
            offset,
            address,
            net: None,
            net_id: spec.network.tenant_net_id,
            seccomp: spec.seccomp,
            phase: Phase::Created,
            since: now,
            reason: "created".to_owned(),
            revision: spec.revision,
            resources: spec.resources,
            flake_ref: spec.flake_ref.clone(),
            image_digest: spec.image_digest,
            image: None,
            generation: 0,
            snapshot: None,
            secrets: spec.secrets,
            own_secrets: spec.own_secrets,
            at_rest: spec.at_rest,
            secrets_wiped: false,
            disk_used_bytes: 0,
            memory_used_bytes: 0,
            last_used_at: None,
            idle_since: None,
            override_until: None,
            claimed: false,
            on_demand: false,
            home: None,
            staging,
            failures: 0,
            retry_not_before: None,
            persist: spec.persist.clone(),
            warmup: spec.warmup.clone(),
            io_limits: spec.io_limits.clone(),
            restart: spec.restart,
            health: spec.health.clone(),
            workload_override: spec.workload_override.clone(),
            workload: None,
            session: Some(SessionMark::Fresh),
            came_from: None,
            came_through: Vec::new(),
            exported_at: None,
            transfer: None,
            intent: None,
        };
        inner.insert(record.clone());
        inner.leased.insert(id.clone(), LeaseState::to(Phase::Running));
        drop(inner);
        Ok((record, Lease { records: Arc::clone(self), id, cancel: CancelSignal::default() }))
    }

    /// Takes in an instance of another node, in memory only: its id and address are taken from here on.
    pub fn admit(self: &Arc<Self>, record: Record) -> Result<Lease, StateError> {
        let mut inner = self.lock();
        let id = record.id.clone();
        if inner.closing {
            return Err(StateError::Closing);
        }
        let template = inner.templates.values().any(|template| template.id == id);
        if template || inner.records.contains_key(&id) || inner.leased.contains_key(&id) {
            return Err(StateError::Exists(id));
        }
        let near = |other: &Record| other.tenant == record.tenant || other.net_id == record.net_id;
        let same = |other: &&Record| near(other) && other.offset == record.offset;
        if let Some(other) = inner.records.values().find(same) {
            let (tenant, holder) = (record.tenant.clone(), other.id.clone());
            return Err(StateError::AddressTaken { tenant, address: record.address, holder });
        }
        inner.insert(record);
        inner.leased.insert(id.clone(), LeaseState::to(Phase::Sleeping));
        drop(inner);
        Ok(Lease { records: Arc::clone(self), id, cancel: CancelSignal::default() })
    }

    /// Puts an instance that is about to start into `net`: it keeps its address, also one that this node does not give any
    /// more, unless that is of another subnet, or its place in a network of this number is another's.
    pub fn place(&self, record: &mut Record, spec: &PoolSpec, net: Option<Net>) -> Result<(), StateError> {
        let mut inner = self.lock();
        let net_id = spec.network.tenant_net_id;
        let is_other =
            |other: &Record| other.id != record.id && other.net_id == net_id && other.offset == record.offset;
        let elsewhere = spec.network.ipv4_subnet.instance_address(record.offset) != Some(record.address);
        if elsewhere || inner.records.values().any(is_other) {
            (record.offset, record.address) = inner.free_address(&record.tenant, &spec.network)?;
        }
        (record.net, record.net_id, record.seccomp) = (net, net_id, spec.seccomp);
        // Taken from here on, whatever becomes of the step.
        if let Some(kept) = inner.records.get_mut(&record.id) {
            (kept.offset, kept.address, kept.net_id) = (record.offset, record.address, record.net_id);
        }
        Ok(())
    }

    /// Makes `record` durable, then visible. On an error the last durable one stays visible.
    pub async fn save(&self, record: &Record) -> Result<(), StateError> {
        // Ids, numbers and strings always serialise.
        let value = serde_json::to_vec(record).unwrap_or_default();
        self.commit(Transaction::new().put(key(&record.id), value)).await?;
        self.set(record.clone());
        Ok(())
    }

    /// Notes what a guest says of itself; its record needs no disk for that.
    pub fn set_idle(&self, id: &InstanceId, idle_since: Option<Timestamp>) {
        if let Some(record) = self.lock().records.get_mut(id) {
            record.idle_since = idle_since;
        }
    }

    /// What its pool says of its program now. On disk with its record's next write.
    pub fn set_restart(&self, id: &InstanceId, restart: Restart) {
        if let Some(record) = self.lock().records.get_mut(id) {
            record.restart = restart;
        }
    }

    /// Notes that the session of an instance, which came as `arrived` says, bears this node's name. On disk with its record's
    /// next write: until then an old name too many does no harm.
    pub fn set_arrived(&self, arrived: &Record) {
        if let Some(record) = self.lock().records.get_mut(&arrived.id)
            && (&record.came_from, &record.came_through) == (&arrived.came_from, &arrived.came_through)
        {
            record.has_arrived();
        }
    }

    /// Notes what an instance was measured to have on disk.
    pub fn set_disk_used(&self, id: &InstanceId, bytes: u64) {
        if let Some(record) = self.lock().records.get_mut(id) {
            record.disk_used_bytes = bytes;
        }
    }

    /// Notes what an instance's VMM was measured to cost in memory.
    pub fn set_memory_used(&self, id: &InstanceId, bytes: u64) {
        if let Some(record) = self.lock().records.get_mut(id) {
            record.memory_used_bytes = bytes;
        }
    }

    /// What a tenant's instances were last measured to have on disk.
    #[must_use]
    pub fn disk_used(&self, tenant: &TenantId) -> u64 {
        let inner = self.lock();
        let mine = inner.records.values().filter(|record| record.tenant == *tenant);
        mine.fold(0, |sum, record| sum.saturating_add(record.disk_used_bytes))
    }

    /// Whether someone acts on it now.
    #[must_use]
    pub fn is_leased(&self, id: &InstanceId) -> bool {
        self.lock().leased.contains_key(id)
    }

    /// Every image that an instance or a template here was booted from.
    #[must_use]
    pub fn images(&self) -> BTreeSet<Digest> {
        let mut images = self.template_images();
        images.extend(self.lock().records.values().filter_map(|record| record.image));
        images
    }

    /// Makes `record` visible only.
    pub fn set(&self, record: Record) {
        self.lock().insert(record);
    }

    /// Forgets an instance: from here on its address may be given again.
    pub async fn delete(&self, id: &InstanceId) -> Result<(), StateError> {
        self.commit(Transaction::new().delete(key(id))).await?;
        self.forget(id);
        Ok(())
    }

    /// Forgets one that was never made durable.
    pub fn forget(&self, id: &InstanceId) {
        self.lock().remove(id);
    }

    async fn commit(&self, transaction: Transaction) -> Result<(), StateError> {
        let result = match &self.store {
            Some(store) => store.commit(transaction).await.map(|_| ()),
            None => Err(StoreError::Closed),
        };
        self.lock().write_error = result.as_ref().err().map(ToString::to_string);
        Ok(result?)
    }

    /// Tenants that have instances here.
    #[must_use]
    pub fn tenants(&self) -> BTreeSet<TenantId> {
        self.lock().by_pool.keys().map(|(tenant, _)| tenant.clone()).collect()
    }

    /// How many instances of a pool there are.
    #[must_use]
    pub fn count(&self, tenant: &TenantId, pool: &PoolId) -> usize {
        self.lock().by_pool.get(&(tenant.clone(), pool.clone())).map_or(0, BTreeSet::len)
    }

    /// Gives no more leases, and waits until the last one is back.
    pub async fn wait_idle(&self) {
        loop {
            let released = self.released.notified();
            tokio::pin!(released);
            // Registered before looking, so that a release in between is not missed.
            released.as_mut().enable();
            {
                let mut inner = self.lock();
                inner.closing = true;
                if inner.leased.is_empty() {
                    return;
                }
            }
            released.await;
        }
    }

    /// Finishes what is queued and frees the directory.
    pub async fn close(&self) {
        if let Some(store) = &self.store {
            store.close().await;
        }
    }
}

async fn read_all<T: DeserializeOwned>(store: &SledStore, prefix: &str) -> Result<Vec<T>, StateError> {
    let listing = store.list(prefix).await?;
    let read = listing.entries.into_iter().map(|entry| {
        serde_json::from_slice(&entry.value).map_err(|cause| StateError::Damaged { key: entry.key, cause })
    });
    read.collect()
}

fn key(id: &InstanceId) -> String {
    format!("{PREFIX}{id}")
}

#[cfg(test)]
mod tests;
