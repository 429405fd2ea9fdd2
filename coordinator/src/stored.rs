//! Typed access to what a coordinator stores.

mod backend;

use mvm_proto::Problem;
use mvm_store::{Guard, Store, StoreError};
use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::records::EPOCH_KEY;
use crate::refuse;

pub(crate) use crate::clock::now;
pub(crate) use backend::Backend;

/// How often a transaction that lost a race is tried again before the caller is told. Each try means that someone
/// else's transaction on the same key succeeded, so only a storm on one key gets there.
pub(crate) const MAX_TRIES: usize = 64;

#[derive(Debug, thiserror::Error)]
pub(crate) enum StateError {
    #[error("the store did not do what it was asked")]
    Store(#[from] StoreError),
    #[error("the record {key} can't be read")]
    Unreadable {
        key: String,
        #[source]
        cause: serde_json::Error,
    },
}

impl From<StateError> for Problem {
    fn from(error: StateError) -> Self {
        let unwritable = |cause: &StoreError, help| {
            tracing::error!(error = %cause, "the store refuses writes");
            Problem::new(503, "store_unwritable", format!("nothing was changed: {cause}"), help)
        };
        match &error {
            StateError::Store(cause @ StoreError::NoSpace { .. }) => unwritable(
                cause,
                "Free some space or replace the disk on the coordinator's machine, then try again.",
            ),
            // Whether this one write reached the disk is known when the store is opened again.
            StateError::Store(cause @ StoreError::Failed { .. }) => unwritable(
                cause,
                "The coordinator stops: repair the disk on its machine, restart the coordinator, then check \
                 whether the change is there.",
            ),
            _ => refuse::internal(&error),
        }
    }
}

/// A record and the guard that holds as long as it is unchanged.
#[derive(Debug)]
pub(crate) struct Versioned<T> {
    pub(crate) value: T,
    pub(crate) version: u64,
}

pub(crate) async fn load<T: DeserializeOwned>(
    store: &Backend,
    key: &str,
) -> Result<Option<Versioned<T>>, StateError> {
    let Some(entry) = store.get(key).await? else { return Ok(None) };
    let value = decode(key, &entry.value)?;
    Ok(Some(Versioned { value, version: entry.version }))
}

/// Every record under a prefix, with the last part of its key.
pub(crate) async fn load_all<T: DeserializeOwned>(
    store: &Backend,
    prefix: &str,
) -> Result<Vec<(String, Versioned<T>)>, StateError> {
    let listing = store.list(prefix).await?;
    let read = |entry: mvm_store::Entry| {
        let value = decode(&entry.key, &entry.value)?;
        let name = entry.key.strip_prefix(prefix).unwrap_or(&entry.key).to_owned();
        Ok((name, Versioned { value, version: entry.version }))
    };
    listing.entries.into_iter().map(read).collect()
}

fn decode<T: DeserializeOwned>(key: &str, bytes: &[u8]) -> Result<T, StateError> {
    serde_json::from_slice(bytes).map_err(|cause| StateError::Unreadable { key: key.to_owned(), cause })
}

/// Records are structs of strings, numbers and lists, which always serialise.
pub(crate) fn encode<T: Serialize>(record: &T) -> Vec<u8> {
    serde_json::to_vec(record).unwrap_or_default()
}

/// The guard for "as I read it".
pub(crate) fn unchanged<T>(read: Option<&Versioned<T>>) -> Guard {
    read.map_or(Guard::Absent, |found| Guard::Version(found.version))
}

/// Takes the next epoch: one more than any process before took from this store. With it comes the version of its record,
/// which guards what only the newest process may write.
///
/// The epoch is the leader's fencing number, so it is raised whenever a process opens the store, and never otherwise:
/// what an earlier process still has in flight is then below everything that this one signs, and agents refuse it.
/// Generations keep growing across epochs, so that people see one row of numbers per node.
pub(crate) async fn take_epoch(store: &Backend) -> Result<(u64, u64), StateError> {
    loop {
        let last = load::<u64>(store, EPOCH_KEY).await?;
        let next = last.as_ref().map_or(0, |last| last.value) + 1;
        let txn = mvm_store::Transaction::new().guard(EPOCH_KEY, unchanged(last.as_ref()));
        match store.commit(txn.put(EPOCH_KEY, encode(&next))).await {
            Ok(committed) => return Ok((next, committed.revision)),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
}
