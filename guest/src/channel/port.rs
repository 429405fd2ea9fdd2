//! The virtio-serial port: one file that stays while agents come and go.
//!
//! Reading tells that no agent is there by an end of file, at once and every time. A thread that waits for the next agent by
//! reading again never rests; poll reports the same. But the port wakes those who wait for it whenever an agent comes or
//! goes, and an edge-triggered epoll reports just that.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::protocol::SERIAL_PORT;
use crate::state::Guest;

/// That an agent went and another came reaches the guest on another way than their bytes: the new one's hello may be
/// read first. So an end of file counts when it lasts; one that does not must not void what the new agent said.
const FLICKER: Duration = Duration::from_millis(100);

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
    let mut port = Port::open(path)?;
    loop {
        let writer = port.file.try_clone()?;
        // An error is the end of this agent, too; if the port is gone, waiting says so.
        let _ = crate::serve::serve(&mut port, writer, guest);
        port.wait_for_change(None)?;
    }
}

struct Port {
    file: File,
    changes: OwnedFd,
}

impl Port {
    fn open(path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).open(path)?;
        let changes = epoll::create(CreateFlags::CLOEXEC)?;
        let any = EventFlags::IN | EventFlags::OUT | EventFlags::HUP | EventFlags::RDHUP | EventFlags::ET;
        epoll::add(&changes, &file, EventData::new_u64(0), any)?;
        Ok(Self { file, changes })
    }

    /// Blocks until something about the port changed since the last time, or the time is over.
    fn wait_for_change(&self, most: Option<Duration>) -> io::Result<()> {
        let mut events = Vec::with_capacity(1);
        let most = most.and_then(|most| Timespec::try_from(most).ok());
        loop {
            match epoll::wait(&self.changes, rustix::buffer::spare_capacity(&mut events), most.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return Ok(()),
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn has_agent(&self) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.file, PollFlags::IN)];
        poll(&mut fds, Some(&Timespec::default()))?;
        Ok(!fds[0].revents().contains(PollFlags::HUP))
    }
}

impl Read for &mut Port {
    /// Ends when no agent has been there for a while.
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        loop {
            let length = self.file.read(buffer)?;
            if length > 0 {
                return Ok(length);
            }
            let deadline = Instant::now() + FLICKER;
            while !self.has_agent()? {
                let left = deadline.saturating_duration_since(Instant::now());
                if left.is_zero() {
                    return Ok(0);
                }
                self.wait_for_change(Some(left))?;
            }
        }
    }
}
