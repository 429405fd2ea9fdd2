//! Requests that are made once however often they are sent: by the caller's `Idempotency-Key`.
//!
//! ```text
//! idempotency/<digest of caller and key>   the object that was made, and the digest of what was asked
//! ```

use std::time::Duration;

use mvm_proto::{Digest, Problem, Timestamp};
use mvm_store::{MAX_CHANGES, Store, Transaction};
use serde::{Deserialize, Serialize};

use crate::stored::{Backend, StateError, encode, load, load_all};

const ONCE: &str = "idempotency/";
const KEPT: Duration = Duration::from_secs(3600);
const MAX_KEY_BYTES: usize = 256;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct OnceRecord {
    at: Timestamp,
    asked: Digest,
    uid: String,
}

/// A request that has a key.
pub(super) struct Once {
    key: String,
    asked: Digest,
}

impl Once {
    pub(super) fn new(caller: &str, key: &str, asked: &str) -> Result<Self, Problem> {
        if key.is_empty() || key.len() > MAX_KEY_BYTES {
            let detail = format!("an idempotency key has 1 to {MAX_KEY_BYTES} bytes");
            return Err(crate::refuse::bad_request(detail));
        }
        let digest = Digest::of(format!("{caller}\0{key}").as_bytes()).to_string();
        let key = format!("{ONCE}{}", digest.rsplit(':').next().unwrap_or(&digest));
        Ok(Self { key, asked: Digest::of(asked.as_bytes()) })
    }

    /// The uid of what the same request made before.
    pub(super) async fn made(&self, store: &Backend, now: Timestamp) -> Result<Option<String>, Problem> {
        let Some(found) = load::<OnceRecord>(store, &self.key).await? else { return Ok(None) };
        if now.since(found.value.at) >= KEPT {
            return Ok(None);
        }
        if found.value.asked == self.asked {
            return Ok(Some(found.value.uid));
        }
        let detail = "this idempotency key was used for another request within the last hour";
        Err(Problem::new(422, "idempotency_key_reused", detail, "Use a new key for a new request."))
    }

    /// Notes what the request made, in the transaction that makes it.
    pub(super) fn note(&self, txn: Transaction, uid: &str, now: Timestamp) -> Transaction {
        let record = OnceRecord { at: now, asked: self.asked, uid: uid.to_owned() };
        txn.put(self.key.as_str(), encode(&record))
    }
}

/// Drops the records of requests that are over an hour old.
pub(crate) async fn forget_old(store: &Backend, now: Timestamp) -> Result<(), StateError> {
    let records = load_all::<OnceRecord>(store, ONCE).await?;
    let old: Vec<_> = records.into_iter().filter(|(_, record)| now.since(record.value.at) >= KEPT).collect();
    for some in old.chunks(MAX_CHANGES) {
        let txn = some.iter().fold(Transaction::new(), |txn, (name, _)| txn.delete(format!("{ONCE}{name}")));
        store.commit(txn).await?;
    }
    Ok(())
}
