//! The embedded store.

use std::path::Path;
use std::time::Duration;

use crate::{Committed, Entry, LeaseId, Listing, Store, StoreError, Transaction, Watch};

/// What can be chosen when opening. `Settings::default()` suits an agent and a small coordinator.
#[derive(Debug, Clone)]
pub struct Settings {
    /// sled's page cache.
    pub cache_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self { cache_bytes: 8 * 1024 * 1024 }
    }
}

/// A store in a directory of this host, for one process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SledStore {}

impl SledStore {
    /// Opens the store in `path`, and makes it if there is none. Needs a tokio runtime.
    pub async fn open(_path: impl AsRef<Path>, _settings: Settings) -> Result<Self, StoreError> {
        todo!()
    }

    /// Finishes what is queued and frees the directory; other clones then get [`StoreError::Closed`].
    pub async fn close(&self) {
        todo!()
    }
}

impl Store for SledStore {
    async fn get(&self, _key: &str) -> Result<Option<Entry>, StoreError> {
        todo!()
    }

    async fn list(&self, _prefix: &str) -> Result<Listing, StoreError> {
        todo!()
    }

    async fn commit(&self, _transaction: Transaction) -> Result<Committed, StoreError> {
        todo!()
    }

    fn watch(&self, _prefix: &str, _after: u64) -> Watch {
        todo!()
    }

    async fn grant_lease(&self, _ttl: Duration) -> Result<LeaseId, StoreError> {
        todo!()
    }

    async fn keep_alive(&self, _lease: LeaseId) -> Result<(), StoreError> {
        todo!()
    }

    async fn revoke(&self, _lease: LeaseId) -> Result<(), StoreError> {
        todo!()
    }
}
