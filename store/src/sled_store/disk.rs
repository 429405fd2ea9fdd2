//! The directory: opening it, writing to it, and saying what went wrong with it.
//!
//! Everything in here blocks and is called from `spawn_blocking` only. sled panics on some damaged files and on
//! some failed writes; no panic leaves this module.

use std::fs::{File, TryLockError};
use std::io;
use std::os::unix::fs::DirBuilderExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::Settings;
use super::load::{self, LoadError};
use super::state::State;
use super::tripwire::{Confirmed, Tripwire};
use crate::StoreError;

/// sled's own I/O threads may hold its lock for a moment after a close in the same process; and whatever a killed process
/// was about to start holds both locks until it becomes its program.
const LOCK_PATIENCE: Duration = Duration::from_secs(2);
const LOCK_PAUSE: Duration = Duration::from_millis(2);

/// An open directory. The order of fields is the order of drops: our lock goes last.
#[derive(Debug)]
pub(super) struct Disk {
    db: sled::Db,
    /// sled's log, opened a second time; see [`Disk::write`].
    log_file: File,
    tripwire: Tripwire,
    path: PathBuf,
    _lock: File,
}

impl Disk {
    pub(super) fn open(path: &Path, settings: &Settings) -> Result<(Self, State), StoreError> {
        let io = |action| move |cause| io_error(action, path, cause);
        let mut builder = std::fs::DirBuilder::new();
        builder.recursive(true).mode(0o700).create(path).map_err(io("create"))?;
        let lock = File::create(path.join("lock")).map_err(io("create the lock file in"))?;
        take(&lock, path)?;
        let confirmed = Tripwire::read(path).map_err(io("read"))?;
        let opened = catch_unwind(AssertUnwindSafe(|| open_sled(path, settings)));
        let db = opened.unwrap_or_else(|panic| Err(damaged(path, panic_text(&*panic))))?;
        let loaded = catch_unwind(AssertUnwindSafe(|| load::load(&db)));
        let loaded = loaded.unwrap_or_else(|panic| Err(LoadError::Damaged(panic_text(&*panic))));
        let state = match loaded {
            Ok(Some(state)) => state,
            Ok(None) if confirmed == Confirmed::Nothing => State::default(),
            Ok(None) => return Err(damaged(path, "it once held data and is now empty".into())),
            Err(LoadError::Damaged(reason)) => return Err(damaged(path, reason)),
            Err(LoadError::UnknownFormat { found, known }) => {
                return Err(StoreError::UnknownFormat { path: path.to_owned(), found, known });
            }
        };
        check_confirmed(path, confirmed, &state)?;
        let log_file = File::open(path.join("db")).map_err(io("open the log in"))?;
        if confirmed == Confirmed::Nothing {
            load::initialise(&db, &state).map_err(|error| sled_error(path, error))?;
            sync_new(path).map_err(io("sync"))?;
        }
        let tripwire = Tripwire::open(path, confirmed, state.revision).map_err(io("write to"))?;
        Ok((Self { db, log_file, tripwire, path: path.to_owned(), _lock: lock }, state))
    }

    /// Writes `batch` atomically. Durable when it returns `Ok`.
    ///
    /// On Linux sled's flush is `sync_file_range`, which leaves the file's length and the disk's own cache
    /// unwritten; it orders the log, and the fdatasync after it makes the log durable.
    pub(super) fn write(&self, batch: sled::Batch, revision: u64) -> Result<(), StoreError> {
        let written = catch_unwind(AssertUnwindSafe(|| -> Result<(), sled::Error> {
            self.db.apply_batch(batch)?;
            self.db.flush()?;
            self.log_file.sync_data()?;
            Ok(())
        }));
        let failed = |reason| StoreError::Failed { path: self.path.clone(), reason };
        match written {
            Ok(Ok(())) => {}
            Ok(Err(error)) => return Err(failed(error.to_string())),
            Err(panic) => return Err(failed(panic_text(&*panic))),
        }
        if let Err(error) = self.tripwire.confirm(revision) {
            tracing::warn!(%error, path = %self.path.display(), "could not note the confirmed revision");
        }
        Ok(())
    }

    /// Refuses while the file system has less than `needed` bytes left for us.
    pub(super) fn check_space(&self, needed: u64) -> Result<(), StoreError> {
        let Ok(found) = nix::sys::statvfs::statvfs(&self.path) else {
            // No reason to refuse: if the disk is really unwell, the write itself will say so.
            return Ok(());
        };
        let free = found.blocks_available().saturating_mul(found.fragment_size());
        if free < needed {
            return Err(StoreError::NoSpace { path: self.path.clone(), free, needed });
        }
        Ok(())
    }

    /// Frees the directory. sled flushes in its drop and panics if that fails.
    pub(super) fn close(self) {
        let Self { db, log_file, tripwire, path, _lock } = self;
        if let Err(panic) = catch_unwind(AssertUnwindSafe(|| drop(db))) {
            tracing::warn!(reason = panic_text(&*panic), path = %path.display(), "sled did not close cleanly");
        }
        drop((log_file, tripwire, _lock));
    }
}

fn take(lock: &File, path: &Path) -> Result<(), StoreError> {
    let patience_ends = Instant::now() + LOCK_PATIENCE;
    loop {
        match lock.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::WouldBlock) if Instant::now() < patience_ends => std::thread::sleep(LOCK_PAUSE),
            Err(TryLockError::WouldBlock) => return Err(StoreError::InUse { path: path.to_owned() }),
            Err(TryLockError::Error(cause)) => return Err(io_error("lock", path, cause)),
        }
    }
}

fn open_sled(path: &Path, settings: &Settings) -> Result<sled::Db, StoreError> {
    let patience_ends = Instant::now() + LOCK_PATIENCE;
    loop {
        let config = sled::Config::new()
            .path(path)
            .cache_capacity(settings.cache_bytes)
            // Flushes are ours alone, so that no write is on disk before the commit it belongs to asks for it.
            .flush_every_ms(None);
        match config.open() {
            Err(error) if is_lock_error(&error) && Instant::now() < patience_ends => {
                std::thread::sleep(LOCK_PAUSE);
            }
            opened => return opened.map_err(|error| sled_error(path, error)),
        }
    }
}

fn check_confirmed(path: &Path, confirmed: Confirmed, state: &State) -> Result<(), StoreError> {
    match confirmed {
        Confirmed::Revision(revision) if state.revision < revision => {
            let found = state.revision;
            Err(damaged(
                path,
                format!(
                    "revision {revision} was confirmed, but only {found} is left; to go on from {found} \
                     all the same, delete the file `{}` in it",
                    super::tripwire::FILE_NAME
                ),
            ))
        }
        _ => Ok(()),
    }
}

/// sled syncs neither its settings file nor the directory entries of what it creates. The entries in `path`
/// itself are synced with the tripwire.
fn sync_new(path: &Path) -> io::Result<()> {
    File::open(path.join("conf"))?.sync_all()?;
    File::open(path.join("db"))?.sync_all()?;
    match path.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => File::open(parent)?.sync_all(),
        _ => Ok(()),
    }
}

fn is_lock_error(error: &sled::Error) -> bool {
    matches!(error, sled::Error::Io(cause) if cause.to_string().contains("could not acquire lock"))
}

fn sled_error(path: &Path, error: sled::Error) -> StoreError {
    match error {
        error if is_lock_error(&error) => StoreError::InUse { path: path.to_owned() },
        sled::Error::Io(cause)
            if !matches!(cause.kind(), io::ErrorKind::UnexpectedEof | io::ErrorKind::InvalidData) =>
        {
            io_error("open", path, cause)
        }
        other => damaged(path, other.to_string()),
    }
}

fn io_error(action: &'static str, path: &Path, cause: io::Error) -> StoreError {
    StoreError::Io { action, path: path.to_owned(), cause: Arc::new(cause) }
}

fn damaged(path: &Path, reason: String) -> StoreError {
    StoreError::Damaged { path: path.to_owned(), reason }
}

/// The first line of a panic's message; sled's go on for pages.
fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str).or(panic.downcast_ref::<&str>().copied());
    text.and_then(|text| text.lines().next()).unwrap_or("an assertion in sled failed").to_owned()
}
