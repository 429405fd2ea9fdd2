//! Connecting to a socket whose path may be longer than a socket's name can be.

use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// Connects to `dir/name`. A socket's name holds 107 bytes, a data directory's path may have more: the directory is
/// named by a descriptor instead.
pub(crate) async fn connect(dir: &Path, name: &str) -> io::Result<UnixStream> {
    let handle = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
    UnixStream::connect(format!("/proc/self/fd/{}/{name}", handle.as_raw_fd())).await
}
