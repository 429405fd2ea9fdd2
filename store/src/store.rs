//! The seam: what a store promises, in the words of those who use it.

use std::future::Future;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;

use crate::LeaseId;
use crate::{StoreError, Transaction, Watch};

/// One key as it was at some revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub key: String,
    pub value: Bytes,
    /// The revision of the transaction that last wrote this key.
    pub version: u64,
}

/// All keys under a prefix, sorted, as they were at one revision.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listing {
    pub entries: Vec<Entry>,
    /// Watching after this revision continues where the listing ends.
    pub revision: u64,
}

/// The answer to a transaction that is durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Committed {
    /// The version of every key that the transaction wrote.
    pub revision: u64,
}

/// Versioned keys with transactions, watches and leases.
///
/// One revision counter counts the transactions that changed something. It never goes back, not even over a
/// restart. A transaction that changes nothing (guards only, or deletes of absent keys) does not raise it.
///
/// Every call may be dropped at any await; a commit that was dropped may have happened or not.
pub trait Store: Send + Sync + 'static {
    /// The key as last committed, or `None`. What it returns is durable.
    fn get(&self, key: &str) -> impl Future<Output = Result<Option<Entry>, StoreError>> + Send;

    /// Every key that starts with `prefix`, in byte order, all from one revision. An empty prefix lists all.
    fn list(&self, prefix: &str) -> impl Future<Output = Result<Listing, StoreError>> + Send;

    /// Writes all of `transaction`, or nothing of it. Durable once it returns `Ok`.
    ///
    /// [`StoreError::Conflict`] names the first guard that did not hold.
    fn commit(&self, transaction: Transaction) -> impl Future<Output = Result<Committed, StoreError>> + Send;

    /// The changes under `prefix` made after revision `after`, in order and without gaps, then those to come.
    fn watch(&self, prefix: &str, after: u64) -> Watch;

    /// A lease that ends `ttl` from now unless it is kept alive. After a restart it has its whole `ttl` again.
    fn grant_lease(&self, ttl: Duration) -> impl Future<Output = Result<LeaseId, StoreError>> + Send;

    /// Gives the lease its whole time again. [`StoreError::LeaseNotFound`] once it has ended.
    fn keep_alive(&self, lease: LeaseId) -> impl Future<Output = Result<(), StoreError>> + Send;

    /// Ends the lease now and deletes the keys attached to it, in one transaction.
    fn revoke(&self, lease: LeaseId) -> impl Future<Output = Result<(), StoreError>> + Send;
}

/// Shared stores are stores, so that callers may take `S: Store + Clone`.
impl<S: Store> Store for Arc<S> {
    fn get(&self, key: &str) -> impl Future<Output = Result<Option<Entry>, StoreError>> + Send {
        S::get(self, key)
    }

    fn list(&self, prefix: &str) -> impl Future<Output = Result<Listing, StoreError>> + Send {
        S::list(self, prefix)
    }

    fn commit(&self, transaction: Transaction) -> impl Future<Output = Result<Committed, StoreError>> + Send {
        S::commit(self, transaction)
    }

    fn watch(&self, prefix: &str, after: u64) -> Watch {
        S::watch(self, prefix, after)
    }

    fn grant_lease(&self, ttl: Duration) -> impl Future<Output = Result<LeaseId, StoreError>> + Send {
        S::grant_lease(self, ttl)
    }

    fn keep_alive(&self, lease: LeaseId) -> impl Future<Output = Result<(), StoreError>> + Send {
        S::keep_alive(self, lease)
    }

    fn revoke(&self, lease: LeaseId) -> impl Future<Output = Result<(), StoreError>> + Send {
        S::revoke(self, lease)
    }
}
