//! The virtio-serial port: one file that stays while agents come and go.
//!
//! Reading tells that no agent is there by an end of file, at once and every time. Whoever waits for the next agent by
//! reading again never rests; poll reports the same. But the port wakes those who wait for it whenever an agent comes or
//! goes, and an edge-triggered epoll reports just that.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};

use crate::guest::{self, Guest};
use crate::protocol::SERIAL_PORT;

/// The device of the port that is ours.
#[must_use]
pub fn find() -> Option<PathBuf> {
    let ports = fs::read_dir("/sys/class/virtio-ports").ok()?;
    let ours =
        |path: &Path| fs::read_to_string(path.join("name")).is_ok_and(|name| name.trim() == SERIAL_PORT);
    let port = ports.flatten().find(|entry| ours(&entry.path()))?;
    Some(Path::new("/dev").join(port.file_name())).filter(|device| device.exists())
}

/// Serves one agent after the other. Returns only when the port itself is gone.
pub fn serve(path: &Path, guest: &Guest) -> io::Result<()> {
    let port = OpenOptions::new().read(true).write(true).open(path)?;
    let changes = Changes::of(&port)?;
    loop {
        // An error is the end of this agent, too; if the port is gone, waiting says so.
        let _ = guest::serve(port.try_clone()?, port.try_clone()?, guest);
        changes.wait()?;
    }
}

struct Changes(std::os::fd::OwnedFd);

impl Changes {
    fn of(port: &File) -> io::Result<Self> {
        let epoll = epoll::create(CreateFlags::CLOEXEC)?;
        let any = EventFlags::IN | EventFlags::OUT | EventFlags::HUP | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&epoll, port, EventData::new_u64(0), any)?;
        Ok(Self(epoll))
    }

    /// Blocks until something about the port changed since the last time.
    fn wait(&self) -> io::Result<()> {
        let mut events = Vec::with_capacity(1);
        loop {
            match epoll::wait(&self.0, rustix::buffer::spare_capacity(&mut events), None) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(0) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }
}
