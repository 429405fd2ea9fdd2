//! The node's disk space that sessions take: a tenant's folders of sessions count towards its `max_disk_gib`, together
//! with what its instances have on disk.
//!
//! The figure of a store is measured once, grows with what is written, and is measured again before anything is refused:
//! what was removed meanwhile is noticed then.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;

use mvm_host::fits;
use mvm_proto::TenantId;
use parking_lot::{Mutex, MutexGuard};

use super::PersistError;

/// What a file system takes at least for an object.
const BLOCK_BYTES: u64 = 4096;

/// What sessions leave of a disk, for the agent's own records are on it as well.
const KEEP_FREE_BYTES: u64 = 256 * 1024 * 1024;

/// What all sessions on this node's disk take.
#[derive(Debug, Default)]
pub(super) struct SessionSpace(Mutex<BTreeMap<TenantId, TenantUse>>);

#[derive(Debug, Default)]
struct TenantUse {
    /// Absent: the document in force does not say.
    quota_bytes: Option<u64>,
    /// What its instances have on disk.
    instances_bytes: u64,
    /// Its sessions in each store, as far as that was measured.
    stores: BTreeMap<String, u64>,
}

impl TenantUse {
    fn sessions_bytes(&self) -> u64 {
        self.stores.values().fold(0, |sum, bytes| sum.saturating_add(*bytes))
    }
}

impl SessionSpace {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<TenantId, TenantUse>> {
        self.0.lock()
    }

    /// What a tenant's sessions were last found to take.
    pub(super) fn used(&self, tenant: &TenantId) -> u64 {
        self.lock().get(tenant).map_or(0, TenantUse::sessions_bytes)
    }

    /// What a tenant has in this store is not known any more: some of it was deleted.
    pub(super) fn forget(&self, tenant: &TenantId, store: &str) {
        if let Some(noted) = self.lock().get_mut(tenant) {
            noted.stores.remove(store);
        }
    }

    /// What a tenant may have on disk, and what its instances have there.
    pub(super) fn note(&self, tenant: &TenantId, quota_bytes: Option<u64>, instances_bytes: u64) {
        let mut all = self.lock();
        let noted = all.entry(tenant.clone()).or_default();
        (noted.quota_bytes, noted.instances_bytes) = (quota_bytes, instances_bytes);
    }
}

/// One tenant's space in one store that is a folder of this machine.
#[derive(Debug, Clone)]
pub(crate) struct TenantSpace {
    pub(super) all: Arc<SessionSpace>,
    pub(super) tenant: TenantId,
    pub(super) store: String,
    pub(super) folder: PathBuf,
}

/// What an object of this length takes on a disk.
pub(super) fn object_bytes(length: u64) -> u64 {
    length.max(1).div_ceil(BLOCK_BYTES).saturating_mul(BLOCK_BYTES)
}

impl TenantSpace {
    pub(super) fn is_measured(&self) -> bool {
        self.all.lock().get(&self.tenant).is_some_and(|noted| noted.stores.contains_key(&self.store))
    }

    pub(super) fn set_measured(&self, bytes: u64) {
        self.all.lock().entry(self.tenant.clone()).or_default().stores.insert(self.store.clone(), bytes);
    }

    /// Counts what is to be written, if it fits.
    pub(super) fn take(&self, bytes: u64) -> Result<(), PersistError> {
        let wanted_bytes = object_bytes(bytes);
        let mut all = self.all.lock();
        let noted = all.entry(self.tenant.clone()).or_default();
        if let Some(quota_bytes) = noted.quota_bytes {
            let used_bytes = noted.instances_bytes.saturating_add(noted.sessions_bytes());
            let tenant = self.tenant.clone();
            fits(quota_bytes, used_bytes, wanted_bytes)
                .map_err(|exceeded| PersistError::OverQuota { tenant, exceeded })?;
        }
        let free_bytes = self.free_bytes();
        if free_bytes < wanted_bytes.saturating_add(KEEP_FREE_BYTES) {
            return Err(PersistError::NoRoom { free_bytes, keep_bytes: KEEP_FREE_BYTES });
        }
        let stored = noted.stores.entry(self.store.clone()).or_default();
        *stored = stored.saturating_add(wanted_bytes);
        Ok(())
    }

    /// A disk that can't be asked says so when it is written to.
    fn free_bytes(&self) -> u64 {
        nix::sys::statvfs::statvfs(&self.folder)
            .map_or(u64::MAX, |disk| disk.blocks_available().saturating_mul(disk.fragment_size()))
    }
}
