//! The audit log: who changed which declared object, from where, and from which content to which; and who reached into which
//! guest, and what for. The two are kept apart, so that no number of programs that are run drives a change out.

use std::collections::BTreeMap;

use mvm_proto::object::Outcome;
use mvm_proto::{Digest, Timestamp};
use mvm_store::{MAX_CHANGES, Store, Transaction};
use serde::{Deserialize, Serialize};

use super::access::Caller;
use crate::stored::{Backend, StateError, encode};

const AUDIT: &str = "audit/";
/// What was done in guests.
const ENTRIES: &str = "audit-guests/";
/// How many entries of each are kept: the newest, and of no caller so many that those of others go for them.
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
        if entries.len() <= KEPT {
            continue;
        }
        let by: Vec<String> = entries.iter().map(by).collect();
        for some in surplus(&by, KEPT).chunks(MAX_CHANGES) {
            let keys = some.iter().filter_map(|at| entries.get(*at));
            let txn = keys.fold(Transaction::new(), |txn, entry| txn.delete(entry.key.as_str()));
            store.commit(txn).await?;
        }
    }
    Ok(())
}

/// Whose entry it is; none of one that can't be read.
fn by(entry: &mvm_store::Entry) -> String {
    serde_json::from_slice::<AuditRecord>(&entry.value).map(|record| record.by).unwrap_or_default()
}

/// Which entries go so that `kept` are left, where each is by whom it names, oldest first: the oldest of those callers that have
/// most. So one that writes without end drops its own and not those of others.
fn surplus(by: &[String], kept: usize) -> Vec<usize> {
    let mut counts: BTreeMap<&str, usize> = BTreeMap::new();
    for name in by {
        *counts.entry(name).or_default() += 1;
    }
    // The most that each may keep: what those with fewer leave is shared by the others.
    let mut sizes: Vec<usize> = counts.values().copied().collect();
    sizes.sort_unstable();
    let (mut left, mut callers, mut most) = (kept, sizes.len(), kept);
    for size in sizes {
        most = left.div_ceil(callers.max(1));
        if size > most {
            break;
        }
        (left, callers) = (left - size, callers - 1);
        most = usize::MAX;
    }
    let mut surplus = Vec::new();
    for (at, name) in by.iter().enumerate() {
        if let Some(count) = counts.get_mut(name.as_str()).filter(|count| **count > most) {
            *count -= 1;
            surplus.push(at);
        }
    }
    surplus
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_caller_that_writes_without_end_drops_its_own_entries_and_no_others() {
        let mut by: Vec<String> = ["a", "b", "a", "a"].map(str::to_owned).into();
        by.extend(std::iter::repeat_n("flood".to_owned(), 100));
        let gone = surplus(&by, 10);
        assert_eq!(gone, (4..98).collect::<Vec<_>>());
    }

    proptest! {
        #[test]
        fn about_as_many_are_left_as_are_kept_and_no_caller_with_few_loses_any(
            by in proptest::collection::vec("[a-e]", 0..200),
            kept in 1..100_usize,
        ) {
            let gone = surplus(&by, kept);
            let left = by.len() - gone.len();
            let callers = by.iter().collect::<std::collections::BTreeSet<_>>().len();
            prop_assert!(left <= kept + callers && left + callers >= kept.min(by.len()), "{} of {}", left, kept);
            for name in &by {
                let had = by.iter().filter(|other| *other == name).count();
                let lost = gone.iter().filter(|at| by[**at] == *name).count();
                prop_assert!(had > kept / callers || lost == 0, "{} had {} and lost {}", name, had, lost);
            }
        }
    }
}
