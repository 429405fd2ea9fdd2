//! Audit logs: one per tenant, with every action, its actor and its reason, in which later tampering shows.
//!
//! Callers use [`AuditLog::append`], which never waits; one task ([`writer`]) writes `<data>/tenants/<tenant>/audit.log` and
//! rotates it ([`file`]). Each line carries the hash of the line before ([`line`]), so [`verify`] finds lines that were
//! changed, removed, reordered or cut off. The chain makes tampering evident, it does not prevent it: an attacker who can
//! write all files can write a new chain, so a copy of the head kept elsewhere proves more.

mod file;
mod line;
mod verify;
mod writer;

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use mvm_proto::{InstanceId, PoolId, TenantId, Timestamp};
use parking_lot::Mutex;
use tokio::sync::{mpsc, oneshot};
use writer::{Message, Writer};

use crate::clock::Clock;
use crate::instance::record::Record;

pub use file::Mark;
pub use line::{Line, LineError, beginning};
pub use verify::{Broken, Kind, Note, Report, lines_of, tenants, verify_files, verify_tenant};

/// How many entries may wait for the writer: many times what a node does in the second that a slow disk may take.
const QUEUE_ENTRIES: usize = 8192;

/// What was done, or tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Entry {
    pub at: Timestamp,
    pub tenant: TenantId,
    pub pool: Option<PoolId>,
    pub instance: Option<InstanceId>,
    /// Who decided: `reconcile`, `request`, or the name of the caller.
    pub actor: String,
    /// One word: `create`, `sleep`, `exec` ...
    pub action: String,
    pub reason: String,
    /// `done`, `failed: ` and why, or what an exec came to.
    pub outcome: String,
}

#[derive(Debug, Clone, Copy)]
pub struct AuditSettings {
    /// A file that has grown to this size is rotated.
    pub max_bytes: u64,
    /// How many rotated files a tenant keeps beside the one being written.
    pub keep_files: u32,
}

impl Default for AuditSettings {
    fn default() -> Self {
        Self { max_bytes: 10 * 1024 * 1024, keep_files: 8 }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum AuditError {
    #[error("could not write the audit log of {tenant}")]
    Write {
        tenant: TenantId,
        #[source]
        cause: std::io::Error,
    },
    #[error("could not sync audit entries to disk: {0}")]
    Unwritten(String),
    #[error("the audit log's writer has ended")]
    Ended,
}

/// How the logs fare, for metrics and conditions.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct AuditHealth {
    pub written: u64,
    /// Entries that could not be kept. Each log says how many of its own, once it can be written again.
    pub dropped: u64,
    /// Why the last write or sync did not succeed; absent: it did.
    pub failing: Option<String>,
}

/// What handles and the writer share.
#[derive(Debug, Default)]
pub(crate) struct Shared(Mutex<(AuditHealth, BTreeMap<TenantId, u64>)>);

impl Shared {
    fn with<T>(&self, change: impl FnOnce(&mut (AuditHealth, BTreeMap<TenantId, u64>)) -> T) -> T {
        change(&mut self.0.lock())
    }

    fn drop_one(&self, tenant: TenantId) {
        self.with(|(health, dropped)| {
            health.dropped += 1;
            *dropped.entry(tenant).or_default() += 1;
        });
    }

    fn take_dropped(&self) -> BTreeMap<TenantId, u64> {
        self.with(|(_, dropped)| std::mem::take(dropped))
    }

    fn count_dropped(&self, count: u64) {
        self.with(|(health, _)| health.dropped += count);
    }

    fn count_written(&self, count: usize) {
        self.with(|(health, _)| health.written += count as u64);
    }

    fn set_failing(&self, failing: Option<String>) {
        let changed = self.with(|(health, _)| {
            let changed = health.failing != failing;
            health.failing.clone_from(&failing);
            changed
        });
        match failing {
            Some(error) if changed => tracing::error!(%error, "could not write the audit log"),
            None if changed => tracing::info!("the audit log is written again"),
            _ => {}
        }
    }
}

/// A handle to the node's audit logs; clones share one writer.
#[derive(Debug, Clone)]
pub struct AuditLog {
    queue: mpsc::Sender<Message>,
    shared: Arc<Shared>,
}

impl AuditLog {
    /// Starts the writer; call it inside a tokio runtime. A tenant's log is opened at its first entry.
    #[must_use]
    pub fn open(data_dir: &Path, settings: AuditSettings, clock: Clock) -> Self {
        let (queue, receiver) = mpsc::channel(QUEUE_ENTRIES);
        let shared = Arc::new(Shared::default());
        let writer = Writer::new(data_dir.to_owned(), settings, clock, Arc::clone(&shared));
        tokio::spawn(writer.run(receiver));
        Self { queue, shared }
    }

    /// Hands an entry to the writer. It never waits and never fails: what the queue can't take is counted, and the
    /// log itself says how many entries it lacks.
    pub fn append(&self, entry: Entry) {
        match self.queue.try_send(Message::Entry(entry)) {
            Ok(()) => {}
            Err(mpsc::error::TrySendError::Full(message) | mpsc::error::TrySendError::Closed(message)) => {
                if let Message::Entry(entry) = message {
                    self.shared.drop_one(entry.tenant);
                }
            }
        }
    }

    /// The same for what was done to an instance: what came of it, or why nothing did.
    pub(crate) fn append_for(
        &self,
        record: &Record,
        at: Timestamp,
        actor: &str,
        action: &str,
        reason: String,
        outcome: Result<&str, String>,
    ) {
        self.append(Entry {
            at,
            tenant: record.tenant.clone(),
            pool: Some(record.pool.clone()),
            instance: Some(record.id.clone()),
            actor: actor.to_owned(),
            action: action.to_owned(),
            reason,
            outcome: outcome.map_or_else(|why| format!("failed: {why}"), str::to_owned),
        });
    }

    /// Waits until everything appended before is on the disk.
    pub async fn flush(&self) -> Result<(), AuditError> {
        let (answer, done) = oneshot::channel();
        self.queue.send(Message::Flush(answer)).await.map_err(|_| AuditError::Ended)?;
        done.await.map_err(|_| AuditError::Ended)?
    }

    #[must_use]
    pub fn health(&self) -> AuditHealth {
        self.shared.with(|(health, _)| health.clone())
    }
}
