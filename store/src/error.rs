//! Everything that a store may answer instead of doing what it was asked.

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use crate::LeaseId;

/// Why a store did not do what it was asked.
///
/// Cloneable, because one failed flush is the answer to every transaction that shared it.
#[derive(Debug, Clone, thiserror::Error)]
pub enum StoreError {
    /// A guard did not hold, and nothing was written. Read the key again and decide anew.
    #[error("{key} is not in the state that the transaction expected")]
    Conflict { key: String },

    #[error("invalid key {key:?}: {reason}")]
    InvalidKey { key: String, reason: &'static str },

    #[error("invalid transaction: {reason}")]
    InvalidTransaction { reason: String },

    #[error("the value of {key} has {bytes} bytes, more than the {limit} that a value may have")]
    ValueTooLarge { key: String, bytes: usize, limit: usize },

    #[error("lease {lease} does not exist or has ended")]
    LeaseNotFound { lease: LeaseId },

    #[error("a lease of {ttl:?} is outside of {least:?} to {most:?}")]
    InvalidTtl { ttl: Duration, least: Duration, most: Duration },

    /// The changes right after `after` are no longer kept. List again and watch from the listing's revision.
    #[error(
        "changes after revision {after} are no longer kept (the oldest kept follow {oldest}); list again"
    )]
    Compacted { after: u64, oldest: u64 },

    #[error(
        "the state in {} is damaged ({reason}); stop mvm, move this directory away and restore it from a \
         backup, or start with an empty one", path.display()
    )]
    Damaged { path: PathBuf, reason: String },

    #[error("the state in {} is in use by another process; only one may open it", path.display())]
    InUse { path: PathBuf },

    #[error(
        "the state in {} has format {found}, and this program knows only format {known}; use the mvm \
         version that wrote it", path.display()
    )]
    UnknownFormat { path: PathBuf, found: u32, known: u32 },

    #[error("could not {action} {}", path.display())]
    Io {
        action: &'static str,
        path: PathBuf,
        #[source]
        cause: Arc<io::Error>,
    },

    /// Refused before anything was written. Commits work again as soon as there is space.
    #[error(
        "not committed: {free} bytes are free on the file system of {}, and {needed} must be; free some space",
        path.display()
    )]
    NoSpace { path: PathBuf, free: u64, needed: u64 },

    /// A write did not reach the disk. Reads go on with what is durable; commits are refused until reopened.
    #[error(
        "not committed: a write to {} failed ({reason}); the last durable state is still served, and nothing \
         is written any more until the store is opened again", path.display()
    )]
    Failed { path: PathBuf, reason: String },

    #[error("the store is closed")]
    Closed,
}
