//! The store, and the signal that it has failed.
//!
//! After one failed write the store refuses all further ones until it is opened again. The caller of that transaction gets the
//! error. `serve` waits for the signal and ends the process, because a coordinator that can't write can neither issue documents
//! nor renew certificates; a restart opens the store again.

use std::sync::Arc;
use std::time::Duration;

use mvm_store::{Committed, Entry, LeaseId, Listing, SledStore, Store, StoreError, Transaction, Watch};
use tokio::sync::watch;

use crate::crash::{CrashPoints, written};
use crate::metrics::{Metrics, WriteOf};

/// The trait's futures are not object-safe, so a second implementation makes the inner store an enum.
#[derive(Debug, Clone)]
pub(crate) struct Backend {
    store: SledStore,
    failure: Arc<watch::Sender<Option<StoreError>>>,
    metrics: Arc<Metrics>,
    crash: CrashPoints,
}

impl Backend {
    pub(crate) fn new(store: SledStore, metrics: Arc<Metrics>, crash: CrashPoints) -> Self {
        Self { store, failure: Arc::new(watch::Sender::new(None)), metrics, crash }
    }

    pub(crate) async fn close(&self) {
        self.store.close().await;
    }

    /// Waits until a write failed for good; most processes end without that.
    pub(crate) async fn failure(&self) -> StoreError {
        let mut failure = self.failure.subscribe();
        let found = failure.wait_for(Option::is_some).await.ok().and_then(|found| found.clone());
        // `self` holds the sender, so the wait ends by a failure only.
        found.unwrap_or(StoreError::Closed)
    }

    fn noted<T>(&self, result: Result<T, StoreError>) -> Result<T, StoreError> {
        if let Err(error @ StoreError::Failed { .. }) = &result {
            self.failure.send_if_modified(|failure| {
                let first = failure.is_none();
                failure.get_or_insert_with(|| error.clone());
                first
            });
        }
        result
    }
}

impl Store for Backend {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        self.store.get(key).await
    }

    async fn list(&self, prefix: &str) -> Result<Listing, StoreError> {
        self.store.list(prefix).await
    }

    async fn commit(&self, transaction: Transaction) -> Result<Committed, StoreError> {
        let writes: Vec<_> = transaction.changes().iter().map(|change| WriteOf::key(change.key())).collect();
        let what = if cfg!(debug_assertions) { written(&transaction) } else { String::new() };
        self.crash.before(|| what.clone()).await;
        let committed = self.noted(self.store.commit(transaction).await)?;
        self.crash.after(|| what).await;
        for of in writes {
            self.metrics.store_writes.get_or_create(&of).inc();
        }
        Ok(committed)
    }

    fn watch(&self, prefix: &str, after: u64) -> Watch {
        self.store.watch(prefix, after)
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        self.noted(self.store.grant_lease(ttl).await)
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.store.keep_alive(lease).await
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.noted(self.store.revoke(lease).await)
    }
}
