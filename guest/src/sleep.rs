//! Prepares the running guest for being paused and saved.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::protocol::{FailureCode, PrepareSleep, Readiness};
use crate::refusal::Refusal;
use crate::settings::Machine;
use crate::state::Guest;

/// The marker file: it appears before a sleep, and is removed when the sleep is over or was cancelled.
const MARKER: &str = "prepare-sleep";

/// The marker file under another name: a hard link to it costs less than creating a file.
const HIDDEN_MARKER: &str = ".prepare-sleep";

/// The kernel's caches, to be dropped. Opened early, like everything that is needed while a request waits.
static CACHES: OnceLock<File> = OnceLock::new();
const CACHES_PATH: &str = "/proc/sys/vm/drop_caches";

/// Does beforehand what every sleep needs.
pub(crate) fn get_ready(run_dir: &Path) {
    let _ = fs::write(run_dir.join(HIDDEN_MARKER), "");
    if let Ok(caches) = OpenOptions::new().write(true).open(CACHES_PATH) {
        // What booting left behind need not be in a template, nor be dropped by each of its forks.
        drop_caches(&caches);
        // Drops nothing, and has the kernel say nothing of it from now on.
        let _ = caches.write_all_at(b"4", 0);
        let _ = CACHES.set(caches);
    }
}

/// Announces a sleep that the request `number` prepares: a newer request to prepare takes the place of an older one.
///
/// By the reading thread, as [`cancel`] is: what was asked last counts, whenever the threads come to it.
pub(crate) fn announce(guest: &Guest, number: u64) -> Result<(), Refusal> {
    let _lock = lock_marker();
    guest.lock().announced = true;
    create_marker(&guest.0.settings.run_dir).map_err(|error| Refusal::io(MARKER, &error))?;
    guest.update(|state| state.preparing = Some(number));
    Ok(())
}

/// Removes the marker file of an earlier run of this program.
pub(crate) fn remove_old_marker(run_dir: &Path) {
    let _ = fs::remove_file(run_dir.join(MARKER));
}

fn create_marker(folder: &Path) -> io::Result<()> {
    let (hidden, marker) = (folder.join(HIDDEN_MARKER), folder.join(MARKER));
    match fs::hard_link(&hidden, &marker) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => {
            fs::write(&hidden, "").and_then(|()| fs::hard_link(&hidden, &marker))
        }
        // It is up already.
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        linked => linked,
    }
}

/// Waits until the workload is not busy and no exec runs; then everything is on the disk and memory is as small as it
/// gets. When the time is over the rest is done all the same, for the agent may decide to go on.
pub(crate) fn prepare(guest: &Guest, number: u64, request: &PrepareSleep) -> Result<(), Refusal> {
    let deadline = Instant::now() + Duration::from_secs(request.timeout_seconds.into());
    let mut state = guest.lock();
    let in_time = loop {
        let busy =
            state.readiness == Readiness::Busy || state.requests.execs().any(|exec| exec.exit.is_none());
        let now = Instant::now();
        if state.preparing != Some(number) {
            return Err(Refusal::new(FailureCode::Busy, "called off"));
        }
        if !busy || now >= deadline {
            break !busy;
        }
        state = guest.wait(state, Some(deadline - now));
    };
    state.preparing = None;
    drop(state);
    if guest.0.settings.machine == Machine::Own {
        rustix::fs::sync();
        // Memory that is only a copy of a disk would be saved with the rest.
        if let Some(caches) = CACHES.get() {
            drop_caches(caches);
        }
    }
    if in_time { Ok(()) } else { Err(Refusal::new(FailureCode::TimedOut, "work is still in progress")) }
}

fn drop_caches(caches: &File) {
    let _ = caches.write_all_at(droppable(rustix::system::uname().version().to_bytes()), 0);
}

/// What this kernel can be told to drop: all, or what is no page of a file.
///
/// Debian's 6.1.192-1 takes for granted that ext4's map of free blocks is in memory: once it was dropped, the next program that
/// needs a block of the data disk dies in the kernel, with the file system's locks in its hands.
fn droppable(kernel_version: &[u8]) -> &'static [u8] {
    const LOSES_EXT4: &[u8] = b"Debian 6.1.192-1 ";
    if kernel_version.windows(LOSES_EXT4.len()).any(|part| part == LOSES_EXT4) { b"2" } else { b"3" }
}

/// Takes back what was announced, if anything was.
pub(crate) fn cancel(guest: &Guest) {
    if call_off(guest) {
        remove_marker(guest);
    }
}

/// The same, but for the marker file: whether there is one to remove. A waiting request need not wait for that.
pub(crate) fn call_off(guest: &Guest) -> bool {
    guest.update(|state| {
        state.preparing = None;
        std::mem::take(&mut state.announced)
    })
}

/// Removes the marker file, unless another sleep was announced since.
pub(crate) fn remove_marker(guest: &Guest) {
    let _lock = lock_marker();
    if !guest.lock().announced {
        let _ = fs::remove_file(guest.0.settings.run_dir.join(MARKER));
    }
}

/// Held while the marker file is created, removed or checked.
fn lock_marker() -> MutexGuard<'static, ()> {
    static LOCK: Mutex<()> = Mutex::new(());
    LOCK.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    #[test]
    fn what_is_called_off_before_its_thread_begins_is_not_prepared() {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest::new(Settings::borrowed(folder.path())).unwrap();
        let request = PrepareSleep { timeout_seconds: 0 };
        announce(&guest, 7).unwrap();
        cancel(&guest);
        assert_eq!(prepare(&guest, 7, &request), Err(Refusal::new(FailureCode::Busy, "called off")));
        assert!(!folder.path().join("run").join(MARKER).exists());
        announce(&guest, 8).unwrap();
        announce(&guest, 9).unwrap();
        assert_eq!(
            prepare(&guest, 8, &request),
            Err(Refusal::new(FailureCode::Busy, "called off")),
            "9 is newer"
        );
        assert_eq!(prepare(&guest, 9, &request), Ok(()));
    }

    #[test]
    fn pages_of_files_stay_where_the_kernel_can_not_do_without_them() {
        assert_eq!(droppable(b"#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-1 (2026-11-14)"), b"2");
        assert_eq!(droppable(b"#1 SMP PREEMPT_DYNAMIC Debian 6.1.190-1 (2026-10-20)"), b"3");
        assert_eq!(droppable(b"#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-10 (2026-11-20)"), b"3");
    }
}
