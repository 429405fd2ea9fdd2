//! The one task that writes audit logs: takes what was appended, writes it in batches, syncs once a second at most.
//!
//! What can't be written is kept and tried again, up to a bound; what is given up is counted, and a line tells how
//! many as soon as the log can be written again.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::TenantId;
use mvm_proto::text::chain;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;

use super::file::{DROPPED, TenantLog};
use super::{AuditError, AuditSettings, Entry, Shared};
use crate::clock::Clock;

/// Lines may be this long in the system's memory alone before they are forced to the disk.
const SYNC_EVERY: Duration = Duration::from_secs(1);
/// How many entries are written at once.
const BATCH: usize = 256;
/// How many entries of a tenant are kept while its log can't be written.
const KEPT_ENTRIES: usize = 1024;
/// How many logs are held open between writes.
const OPEN_LOGS: usize = 128;

#[derive(Debug)]
pub(crate) enum Message {
    Entry(Entry),
    Flush(oneshot::Sender<Result<(), AuditError>>),
}

#[derive(Debug)]
pub(crate) struct Writer {
    pub(crate) data_dir: PathBuf,
    pub(crate) settings: AuditSettings,
    pub(crate) clock: Clock,
    pub(crate) shared: Arc<Shared>,
    logs: BTreeMap<TenantId, TenantLog>,
    backlog: BTreeMap<TenantId, Backlog>,
}

#[derive(Debug, Default)]
struct Backlog {
    entries: Vec<Entry>,
    dropped: u64,
}

impl Writer {
    pub(crate) fn new(data_dir: PathBuf, settings: AuditSettings, clock: Clock, shared: Arc<Shared>) -> Self {
        Self { data_dir, settings, clock, shared, logs: BTreeMap::new(), backlog: BTreeMap::new() }
    }

    /// Runs until every handle is gone, then syncs and ends.
    pub(crate) async fn run(mut self, mut queue: mpsc::Receiver<Message>) {
        let mut sync_at: Option<Instant> = None;
        loop {
            let first = match sync_at {
                None => queue.recv().await.map(Some),
                Some(at) => tokio::select! {
                    message = queue.recv() => message.map(Some),
                    () = tokio::time::sleep_until(at) => Some(None),
                },
            };
            let ends = first.is_none();
            let (mut entries, mut flushes) = (Vec::new(), Vec::new());
            let mut next = first.flatten();
            while let Some(message) = next.take() {
                match message {
                    Message::Entry(entry) => entries.push(entry),
                    Message::Flush(answer) => flushes.push(answer),
                }
                if entries.len() < BATCH {
                    next = queue.try_recv().ok();
                }
            }
            let due = ends || !flushes.is_empty() || sync_at.is_some_and(|at| at <= Instant::now());
            let worked = tokio::task::spawn_blocking(move || {
                let done = self.work(entries, due);
                (self, done)
            });
            // The blocking part does not panic and is not cancelled; if it were, nothing could be written any more.
            let Ok((writer, done)) = worked.await else { return };
            self = writer;
            let failure = done.as_ref().err().map(|error| chain(error));
            for answer in flushes {
                let again = match &failure {
                    None => Ok(()),
                    Some(text) => Err(AuditError::Unwritten(text.clone())),
                };
                // The caller may have stopped waiting.
                let _ = answer.send(again);
            }
            if ends {
                return;
            }
            if due || sync_at.is_none() {
                sync_at = self.is_pending().then(|| Instant::now() + SYNC_EVERY);
            }
        }
    }

    fn is_pending(&self) -> bool {
        !self.backlog.is_empty() || self.logs.values().any(|log| !log.is_synced())
    }

    /// Writes what it can, and syncs if asked. The error is the last of those that happened.
    fn work(&mut self, entries: Vec<Entry>, sync: bool) -> Result<(), AuditError> {
        for (tenant, count) in self.shared.take_dropped() {
            self.backlog.entry(tenant).or_default().dropped += count;
        }
        let fresh = !entries.is_empty();
        for entry in entries {
            let backlog = self.backlog.entry(entry.tenant.clone()).or_default();
            if backlog.entries.len() >= KEPT_ENTRIES {
                backlog.dropped += 1;
                self.shared.count_dropped(1);
            } else {
                backlog.entries.push(entry);
            }
        }
        let mut outcome = Ok(());
        if fresh || sync {
            for (tenant, backlog) in std::mem::take(&mut self.backlog) {
                if let Err(cause) = self.write(&tenant, backlog) {
                    outcome = Err(AuditError::Write { tenant, cause });
                }
            }
        }
        if sync {
            for (tenant, log) in &mut self.logs {
                if let Err(cause) = log.sync() {
                    outcome = Err(AuditError::Write { tenant: tenant.clone(), cause });
                }
            }
        }
        if self.logs.len() > OPEN_LOGS {
            self.logs.retain(|_, log| !log.is_synced());
        }
        if sync || outcome.is_err() {
            self.shared.set_failing(outcome.as_ref().err().map(|error| chain(error)));
        }
        outcome
    }

    fn write(&mut self, tenant: &TenantId, mut backlog: Backlog) -> std::io::Result<()> {
        let now = self.clock.now();
        let log = match self.logs.entry(tenant.clone()) {
            std::collections::btree_map::Entry::Occupied(open) => open.into_mut(),
            std::collections::btree_map::Entry::Vacant(closed) => {
                match TenantLog::open(&self.data_dir, tenant, self.settings, now) {
                    Ok(log) => closed.insert(log),
                    Err(cause) => {
                        self.backlog.insert(tenant.clone(), backlog);
                        return Err(cause);
                    }
                }
            }
        };
        let result = match log.append(&backlog.entries) {
            Ok(()) => {
                self.shared.count_written(backlog.entries.len());
                backlog.entries.clear();
                let dropped = std::mem::take(&mut backlog.dropped);
                if dropped == 0 {
                    return Ok(());
                }
                let why =
                    format!("dropped {dropped} entries, because the log could not be written for too long");
                log.note_as(now, DROPPED, why).inspect_err(|_| backlog.dropped = dropped)
            }
            Err((written, cause)) => {
                self.shared.count_written(written);
                backlog.entries.drain(..written);
                Err(cause)
            }
        };
        if result.is_err() {
            self.backlog.insert(tenant.clone(), backlog);
        }
        result
    }
}
