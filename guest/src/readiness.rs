//! What the workload says about itself, by touching files in the run folder.

use std::fs;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::{Arc, Weak};

use rustix::fs::inotify::{self, CreateFlags, ReadFlags, WatchFlags};

use crate::protocol::Readiness;
use crate::state::{Guest, Shared, spawn};

const FILES: [(&str, Readiness); 3] =
    [("worker-ready", Readiness::Ready), ("worker-idle", Readiness::Idle), ("worker-busy", Readiness::Busy)];

/// Room for many events with the longest of names.
const EVENT_BYTES: usize = 4096;

/// Watches from now on. What an earlier run of this program saw still counts: the file touched last.
pub(crate) fn watch(guest: &Guest) -> io::Result<()> {
    let folder = &guest.0.settings.run_dir;
    let watched = inotify::init(CreateFlags::CLOEXEC)?;
    let touched = WatchFlags::CREATE | WatchFlags::CLOSE_WRITE | WatchFlags::ATTRIB | WatchFlags::MOVED_TO;
    let gone = WatchFlags::DELETE | WatchFlags::MOVED_FROM;
    inotify::add_watch(&watched, folder, touched | gone | WatchFlags::DELETE_SELF)?;
    look(guest);
    let weak = Arc::downgrade(&guest.0);
    spawn("readiness", move || follow(&watched, &weak))?;
    Ok(())
}

fn follow(watched: &OwnedFd, guest: &Weak<Shared>) {
    let mut buffer = [MaybeUninit::uninit(); EVENT_BYTES];
    let mut events = inotify::Reader::new(watched, &mut buffer);
    loop {
        let event = match events.next() {
            Ok(event) => event,
            Err(rustix::io::Errno::INTR) => continue,
            Err(_) => return,
        };
        // The folder is gone, and with it all that the workload says.
        if event.events().intersects(ReadFlags::IGNORED | ReadFlags::DELETE_SELF) {
            return;
        }
        let Some(guest) = guest.upgrade().map(Guest) else { return };
        if event.events().contains(ReadFlags::QUEUE_OVERFLOW) {
            look(&guest);
        }
        let name = event.file_name().and_then(|name| name.to_str().ok()).unwrap_or_default();
        let Some((_, said)) = FILES.iter().find(|(file, _)| *file == name) else { continue };
        let path = guest.0.settings.run_dir.join(name);
        let is_there = guest.update(|state| {
            // Heard of late, it may be gone again. Looked at under the lock: a workload that starts looks, too.
            let is_there = path.exists();
            if is_there {
                state.hear(*said);
            }
            is_there
        });
        if !is_there {
            take_back(&guest);
        }
    }
}

/// A file is gone. A file that is gone before the workload was started says nothing; later, what
/// was said stays said.
fn take_back(guest: &Guest) {
    let waits = guest.lock().workload.said.take().is_some();
    if waits {
        look(guest);
    }
}

/// Takes away what was said.
pub(crate) fn forget(folder: &Path) {
    for (file, _) in FILES {
        let _ = fs::remove_file(folder.join(file));
    }
}

/// Hears what the files say that are there.
pub(crate) fn look(guest: &Guest) {
    if let Some(said) = last_said(&guest.0.settings.run_dir) {
        guest.update(|state| state.hear(said));
    }
}

/// What the files say that are there: the one touched last.
pub(crate) fn last_said(folder: &Path) -> Option<Readiness> {
    let touched = |(file, said): (&str, Readiness)| {
        let modified = fs::metadata(folder.join(file)).and_then(|metadata| metadata.modified()).ok()?;
        Some((modified, said))
    };
    let last = FILES.into_iter().filter_map(touched).max_by_key(|(modified, _)| *modified);
    last.map(|(_, said)| said)
}
