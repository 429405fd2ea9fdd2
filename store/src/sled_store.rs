//! The embedded store: sled on disk, the durable state in memory.
//!
//! `writer_task` is the only one that writes, in groups (`group.rs` decides, `disk.rs` writes). `lease_task`
//! ends leases. Reads and watches are answered from [`state::State`], which holds exactly what is durable.
//!
//! A write that fails makes the store *failed*: sled is dropped at once, commits are refused with the reason,
//! reads go on with the last durable state, and opening the directory again starts from what is on disk. The
//! transactions that got the error may or may not be part of that, each wholly.

mod disk;
mod group;
mod lease_task;
mod load;
mod record;
mod schema;
mod state;
mod tripwire;
mod watching;
mod writer_task;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::{mpsc, oneshot, watch};

use self::disk::Disk;
use self::lease_task::{Deadlines, lease_task};
use self::state::State;
use self::writer_task::{QUEUE_REQUESTS, Request, writer_task};
use crate::{
    Committed, Entry, LeaseId, Listing, Store, StoreError, Transaction, Watch, check_key, check_prefix,
};

/// etcd counts leases in whole seconds, and a shorter one would end in any hiccup of the disk.
pub const MIN_LEASE_TTL: Duration = Duration::from_secs(1);

/// Far above any use; keeps deadlines within what clocks can count.
pub const MAX_LEASE_TTL: Duration = Duration::from_secs(30 * 24 * 3600);

/// What can be chosen when opening. `Settings::default()` suits an agent and a small coordinator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// sled's page cache. Reads don't use it, so that it only serves the pages being rewritten.
    pub cache_bytes: u64,
    /// How much of the past a watch can go back to, in bytes of keys and values; held in memory and on disk.
    pub log_bytes: usize,
    /// The prefixes of what can be watched. Changes under no other one are in the log, so that however much is written
    /// there, no watcher falls behind for it.
    pub watched: Vec<String>,
    /// Commits are refused while less than this is free on the file system, because sled does not survive a
    /// disk that fills up under it. 0 turns the check off.
    pub reserve_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            cache_bytes: 8 * 1024 * 1024,
            log_bytes: 1024 * 1024,
            watched: vec![String::new()],
            reserve_bytes: 8 * 1024 * 1024,
        }
    }
}

/// What tasks, readers and watchers share.
#[derive(Debug)]
struct Shared {
    path: PathBuf,
    state: RwLock<State>,
    progress: watch::Sender<Progress>,
    deadlines: Deadlines,
    /// See [`Settings::watched`].
    watched: Vec<String>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Progress {
    revision: u64,
    closed: bool,
}

impl Shared {
    fn read(&self) -> RwLockReadGuard<'_, State> {
        self.state.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }

    fn publish(&self, revision: u64) {
        self.progress.send_modify(|progress| progress.revision = revision);
    }

    fn close(&self) {
        self.progress.send_modify(|progress| progress.closed = true);
    }

    fn check_open(&self) -> Result<(), StoreError> {
        if self.progress.borrow().closed { Err(StoreError::Closed) } else { Ok(()) }
    }
}

/// A store in a directory of this host, for one process. Cheap to clone.
#[derive(Debug, Clone)]
pub struct SledStore {
    shared: Arc<Shared>,
    writer: mpsc::Sender<Request>,
}

impl SledStore {
    /// Opens the store in `path`, and makes it if there is none. Needs a tokio runtime.
    pub async fn open(path: impl AsRef<Path>, settings: Settings) -> Result<Self, StoreError> {
        let path = path.as_ref().to_owned();
        let opening = {
            let (path, settings) = (path.clone(), settings.clone());
            tokio::task::spawn_blocking(move || Disk::open(&path, &settings))
        };
        let (disk, state) = opening.await.unwrap_or(Err(StoreError::Closed))?;
        let progress = watch::Sender::new(Progress { revision: state.revision, closed: false });
        let deadlines = Deadlines::default();
        for (lease, ttl) in &state.leases {
            deadlines.start(*lease, *ttl);
        }
        let watched = settings.watched.clone();
        let shared = Arc::new(Shared { path, state: RwLock::new(state), progress, deadlines, watched });
        let (writer, queue) = mpsc::channel(QUEUE_REQUESTS);
        tokio::spawn(writer_task(queue, disk, Arc::clone(&shared), settings));
        tokio::spawn(lease_task(Arc::clone(&shared), writer.downgrade()));
        Ok(Self { shared, writer })
    }

    /// Finishes what is queued and frees the directory; all clones then answer [`StoreError::Closed`].
    pub async fn close(&self) {
        let (done, closed) = oneshot::channel();
        if self.writer.send(Request::Close { done }).await.is_ok() {
            // An error means that the writer is gone already, which is what was asked for.
            let _ = closed.await;
        }
    }

    async fn ask<T>(
        &self,
        request: impl FnOnce(oneshot::Sender<Result<T, StoreError>>) -> Request,
    ) -> Result<T, StoreError> {
        let (reply, answer) = oneshot::channel();
        self.writer.send(request(reply)).await.map_err(|_| StoreError::Closed)?;
        answer.await.unwrap_or(Err(StoreError::Closed))
    }
}

impl Store for SledStore {
    async fn get(&self, key: &str) -> Result<Option<Entry>, StoreError> {
        check_key(key)?;
        self.shared.check_open()?;
        Ok(self.shared.read().get(key))
    }

    async fn list(&self, prefix: &str) -> Result<Listing, StoreError> {
        check_prefix(prefix)?;
        self.shared.check_open()?;
        Ok(self.shared.read().list(prefix))
    }

    async fn commit(&self, transaction: Transaction) -> Result<Committed, StoreError> {
        transaction.check()?;
        self.ask(|reply| Request::Commit { transaction, reply }).await
    }

    fn watch(&self, prefix: &str, after: u64) -> Watch {
        watching::watch(Arc::clone(&self.shared), prefix, after)
    }

    async fn grant_lease(&self, ttl: Duration) -> Result<LeaseId, StoreError> {
        if !(MIN_LEASE_TTL..=MAX_LEASE_TTL).contains(&ttl) {
            return Err(StoreError::InvalidTtl { ttl, least: MIN_LEASE_TTL, most: MAX_LEASE_TTL });
        }
        self.ask(|reply| Request::Grant { ttl, reply }).await
    }

    async fn keep_alive(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.shared.check_open()?;
        self.shared.deadlines.keep_alive(lease)
    }

    async fn revoke(&self, lease: LeaseId) -> Result<(), StoreError> {
        self.ask(|reply| Request::End { lease, reply }).await
    }
}
