//! The audit log of declared objects: who changed what, from where, and from which content to which.

use mvm_proto::object::Outcome;
use mvm_proto::{Digest, Timestamp};
use mvm_store::{MAX_CHANGES, Store, Transaction};
use serde::{Deserialize, Serialize};

use super::access::Caller;
use crate::stored::{Backend, StateError, encode};

const AUDIT: &str = "audit/";
/// How many entries are kept: the newest.
const KEPT: usize = 10_000;

/// One write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AuditRecord {
    pub(crate) at: Timestamp,
    pub(crate) by: String,
    pub(crate) from: String,
    pub(crate) object: String,
    pub(crate) outcome: Outcome,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) before: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) after: Option<Digest>,
}

impl AuditRecord {
    pub(super) fn new(caller: &Caller, object: String, outcome: Outcome, now: Timestamp) -> Self {
        let (by, from) = (caller.name.clone(), caller.address.clone());
        Self { at: now, by, from, object, outcome, before: None, after: None }
    }
}

/// Adds an entry to a transaction. Keys grow with time, so that the log reads in order.
pub(super) fn note(txn: Transaction, record: &AuditRecord) -> Transaction {
    let key = format!("{AUDIT}{:013}-{:016x}", record.at.unix_ms().max(0), fastrand::u64(..));
    txn.put(key, encode(record))
}

/// Drops the oldest entries beyond what is kept.
pub(crate) async fn trim_audit(store: &Backend) -> Result<(), StateError> {
    let entries = store.list(AUDIT).await?.entries;
    let surplus = entries.len().saturating_sub(KEPT);
    for some in entries[..surplus].chunks(MAX_CHANGES) {
        let txn = some.iter().fold(Transaction::new(), |txn, entry| txn.delete(entry.key.as_str()));
        store.commit(txn).await?;
    }
    Ok(())
}

/// The newest entries, the newest last.
pub(crate) async fn newest(store: &Backend, limit: usize) -> Result<Vec<AuditRecord>, StateError> {
    let entries = store.list(AUDIT).await?.entries;
    let skipped = entries.len().saturating_sub(limit);
    let read = |entry: &mvm_store::Entry| {
        serde_json::from_slice(&entry.value)
            .map_err(|cause| StateError::Unreadable { key: entry.key.clone(), cause })
    };
    entries[skipped..].iter().map(read).collect()
}
