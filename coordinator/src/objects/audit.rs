//! The audit log: who changed which declared object, from where, and from which content to which; and who reached into which
//! guest, and what for. The two are kept apart, so that no number of programs that are run drives a change out.

use mvm_proto::object::Outcome;
use mvm_proto::{Digest, Timestamp};
use mvm_store::{MAX_CHANGES, Store, Transaction};
use serde::{Deserialize, Serialize};

use super::access::Caller;
use crate::stored::{Backend, StateError, encode};

const AUDIT: &str = "audit/";
/// What was done in guests.
const ENTRIES: &str = "audit-guests/";
/// How many entries of each are kept: the newest.
const KEPT: usize = 10_000;

/// One write.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct AuditRecord {
    pub(crate) at: Timestamp,
    pub(crate) by: String,
    pub(crate) from: String,
    pub(crate) object: String,
    /// Absent: nothing was written, and `action` says what was done.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) outcome: Option<Outcome>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) action: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) before: Option<Digest>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) after: Option<Digest>,
}

impl AuditRecord {
    pub(super) fn new(caller: &Caller, object: String, outcome: Outcome, now: Timestamp) -> Self {
        let (by, from) = (caller.name.clone(), caller.address.clone());
        let outcome = Some(outcome);
        Self { at: now, by, from, object, outcome, action: None, before: None, after: None }
    }
}

/// A stream to a guest that is about to be opened.
pub(crate) struct Entering {
    pub(crate) what: String,
    /// The instance and its node.
    pub(crate) on: String,
    pub(crate) at: Timestamp,
}

/// Records, durably, that a caller reaches into a guest.
pub(crate) async fn note_entry(
    store: &Backend,
    caller: &Caller,
    entering: Entering,
) -> Result<(), StateError> {
    let Entering { what, on, at } = entering;
    let record = AuditRecord {
        at,
        by: caller.name.clone(),
        from: caller.address.clone(),
        object: on,
        outcome: None,
        action: Some(what),
        before: None,
        after: None,
    };
    store.commit(Transaction::new().put(key(ENTRIES, at), encode(&record))).await?;
    Ok(())
}

/// Keys grow with time, so that the log reads in order.
fn key(log: &str, at: Timestamp) -> String {
    format!("{log}{:013}-{:016x}", at.unix_ms().max(0), fastrand::u64(..))
}

/// Adds an entry to a transaction.
pub(super) fn note(txn: Transaction, record: &AuditRecord) -> Transaction {
    txn.put(key(AUDIT, record.at), encode(record))
}

/// Drops the oldest entries beyond what is kept.
pub(crate) async fn trim_audit(store: &Backend) -> Result<(), StateError> {
    for log in [AUDIT, ENTRIES] {
        let entries = store.list(log).await?.entries;
        let surplus = entries.len().saturating_sub(KEPT);
        for some in entries[..surplus].chunks(MAX_CHANGES) {
            let txn = some.iter().fold(Transaction::new(), |txn, entry| txn.delete(entry.key.as_str()));
            store.commit(txn).await?;
        }
    }
    Ok(())
}

/// The newest entries, the newest last.
pub(crate) async fn newest(store: &Backend, limit: usize) -> Result<Vec<AuditRecord>, StateError> {
    let read = |entry: &mvm_store::Entry| {
        serde_json::from_slice::<AuditRecord>(&entry.value)
            .map_err(|cause| StateError::Unreadable { key: entry.key.clone(), cause })
    };
    let mut all = Vec::new();
    for log in [AUDIT, ENTRIES] {
        let entries = store.list(log).await?.entries;
        let skipped = entries.len().saturating_sub(limit);
        for entry in &entries[skipped..] {
            all.push(read(entry)?);
        }
    }
    // Those of one moment stay as they are.
    all.sort_by_key(|record| record.at);
    let skipped = all.len().saturating_sub(limit);
    Ok(all.split_off(skipped))
}
