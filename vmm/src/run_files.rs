//! Reads files and connects to sockets in an instance's run directory, for the drivers. Goes through the host, which may
//! open what this process may not.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use futures::future::BoxFuture;
use mvm_host::{Access, Host, HostError};
use mvm_proto::InstanceId;
use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

/// Records and manifests are a few KiB; what is longer is cut.
const MAX_RECORD_BYTES: u64 = 1024 * 1024;

/// As the system said it, where it did.
pub(super) fn io_cause(error: HostError) -> io::Error {
    match error {
        HostError::Io { cause, .. } => cause,
        refused => io::Error::other(refused),
    }
}

/// A file to read; none when it is not there.
pub(super) async fn open(host: &impl Host, instance: &InstanceId, name: &str) -> io::Result<Option<File>> {
    host.open_file(instance, name, Access::Read).await.map_err(io_cause)
}

/// The same of a file that may have names elsewhere.
pub(super) async fn open_shared(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
) -> io::Result<Option<File>> {
    host.open_file(instance, name, Access::ReadShared).await.map_err(io_cause)
}

/// All of a small file; none when it is not there.
pub(super) async fn read(host: &impl Host, instance: &InstanceId, name: &str) -> io::Result<Option<Vec<u8>>> {
    let Some(file) = open(host, instance, name).await? else { return Ok(None) };
    let mut bytes = Vec::new();
    file.take(MAX_RECORD_BYTES).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// The end of a file, at most `max_bytes` of what was written behind `from`: nothing of one that is not there, and all
/// of one that is shorter by now.
pub(super) async fn tail_from(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
    from: u64,
    max_bytes: usize,
) -> io::Result<Vec<u8>> {
    let Some(mut file) = open(host, instance, name).await? else { return Ok(Vec::new()) };
    let length = file.metadata()?.len();
    let from = if from > length { 0 } else { from };
    file.seek(SeekFrom::Start(length.saturating_sub(max_bytes as u64).max(from)))?;
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(max_bytes as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

pub(super) async fn tail(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
    max_bytes: usize,
) -> io::Result<Vec<u8>> {
    tail_from(host, instance, name, 0, max_bytes).await
}

/// The end of a log, with that of what was cut off it where it is short.
pub(super) async fn log_tail(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
    max_bytes: usize,
) -> io::Result<Vec<u8>> {
    let new = tail(host, instance, name, max_bytes).await?;
    let mut whole = match max_bytes - new.len() {
        0 => Vec::new(),
        left => tail(host, instance, &format!("{name}.old"), left).await?,
    };
    whole.extend(new);
    Ok(whole)
}

/// Connects to one socket, as often as it is asked to.
#[derive(Clone)]
pub struct Dial(Arc<dyn Fn() -> BoxFuture<'static, io::Result<UnixStream>> + Send + Sync>);

impl fmt::Debug for Dial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Dial").finish_non_exhaustive()
    }
}

impl Dial {
    /// To a socket in the run directory or jail of an instance.
    pub fn through<H: Host>(host: &Arc<H>, instance: &InstanceId, name: &str) -> Self {
        let (host, instance, name) = (Arc::clone(host), instance.clone(), name.to_owned());
        Self(Arc::new(move || {
            let (host, instance, name) = (Arc::clone(&host), instance.clone(), name.clone());
            Box::pin(async move {
                let stream = host.connect(&instance, &name).await.map_err(io_cause)?;
                UnixStream::from_std(stream)
            })
        }))
    }

    /// To `dir/name`, opened by this process. A socket's name holds 107 bytes and a path may have more: the directory
    /// is named by a descriptor instead.
    #[must_use]
    pub fn directly(dir: &Path, name: &str) -> Self {
        let (dir, name) = (dir.to_owned(), name.to_owned());
        Self(Arc::new(move || {
            let (dir, name) = (dir.clone(), name.clone());
            Box::pin(async move {
                use std::os::fd::AsRawFd as _;
                let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
                let handle = rustix::fs::open(&dir, flags, Mode::empty())?;
                UnixStream::connect(format!("/proc/self/fd/{}/{name}", handle.as_raw_fd())).await
            })
        }))
    }

    pub async fn connect(&self) -> io::Result<UnixStream> {
        (self.0)().await
    }
}

#[cfg(test)]
mod tests {
    use mvm_host::{LocalHost, Operation};

    use super::*;

    #[tokio::test]
    async fn the_end_of_a_log_is_read_from_where_it_begins_to_be_this_process_s() {
        let (dir, id) = (tempfile::tempdir().unwrap(), InstanceId::from_bits(1));
        let host = LocalHost::new(dir.path());
        host.perform(&Operation::MakeRunDir { instance: id.clone() }).await.unwrap();
        let log = host.run_dir(&id).join("console.log");
        let name = "console.log";
        assert_eq!(tail(&host, &id, name, 4).await.unwrap(), b"");
        std::fs::write(&log, b"old new").unwrap();
        assert_eq!(tail(&host, &id, name, 5).await.unwrap(), b"d new");
        assert_eq!(tail_from(&host, &id, name, 4, 5).await.unwrap(), b"new");
        assert_eq!(tail_from(&host, &id, name, 7, 5).await.unwrap(), b"");
        // It was cut since.
        assert_eq!(tail_from(&host, &id, name, 8, 5).await.unwrap(), b"d new");
        std::fs::write(host.run_dir(&id).join("console.log.old"), b"older ").unwrap();
        assert_eq!(log_tail(&host, &id, name, 9).await.unwrap(), b"r old new");
        assert_eq!(log_tail(&host, &id, name, 3).await.unwrap(), b"new");
    }
}
