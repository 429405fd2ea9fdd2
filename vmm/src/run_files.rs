//! Reads files and connects to sockets in an instance's run directory, for the drivers. Goes through the host, which may
//! open what this process may not.

use std::fmt;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::path::Path;
use std::sync::Arc;

use futures::future::BoxFuture;
use mvm_host::{Access, Host, HostError, LogMarks, MARKS_SUFFIX};
use mvm_proto::{InstanceId, Timestamp};
use rustix::fs::{Mode, OFlags};
use tokio::net::UnixStream;

use crate::ConsolePiece;

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

/// What is kept of a log from a byte of all that was ever written to it on, at most `max_bytes`. Nothing while it is being
/// cut: then where anything is changes.
pub(super) async fn log_from(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
    from: u64,
    max_bytes: usize,
) -> io::Result<ConsolePiece> {
    let before = marks(host, instance, name).await?;
    let piece = piece_of(host, instance, name, before.cut, from, max_bytes).await?;
    let after = marks(host, instance, name).await?;
    if before.cutting.is_some() || (after.cut, after.cutting) != (before.cut, before.cutting) {
        return Ok(ConsolePiece { offset: from, data: Vec::new(), end: from });
    }
    Ok(piece)
}

async fn piece_of(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
    cut: u64,
    from: u64,
    max_bytes: usize,
) -> io::Result<ConsolePiece> {
    let length = |file: &File| Ok::<_, io::Error>(file.metadata()?.len());
    let log = open(host, instance, name).await?;
    let end = cut + log.as_ref().map_or(Ok(0), length)?;
    let (file, begins) = if from < cut {
        let old = open(host, instance, &format!("{name}.old")).await?;
        let kept = old.as_ref().map_or(Ok(0), length)?;
        if kept == 0 { (log, cut) } else { (old, cut.saturating_sub(kept)) }
    } else {
        (log, cut)
    };
    // What is asked for may be gone, or not be there yet.
    let mut offset = from.max(begins);
    let mut data = Vec::new();
    if let Some(mut file) = file.filter(|_| offset < end) {
        // Of a log whose writer keeps its own place in it, what is gone is a hole.
        let there = rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(offset - begins));
        offset = there.map_or(offset, |there| begins + there);
        file.seek(SeekFrom::Start(offset - begins))?;
        file.take(max_bytes as u64).read_to_end(&mut data)?;
    }
    Ok(ConsolePiece { offset, data, end })
}

/// From which byte on a log was written since this time, as far as that is remembered; never too late a one.
pub(super) async fn log_since(
    host: &impl Host,
    instance: &InstanceId,
    name: &str,
    since: Timestamp,
) -> io::Result<u64> {
    Ok(marks(host, instance, name).await?.since(since.unix_ms()))
}

async fn marks(host: &impl Host, instance: &InstanceId, name: &str) -> io::Result<LogMarks> {
    let read = read(host, instance, &format!("{name}{MARKS_SUFFIX}")).await?;
    Ok(LogMarks::read(&read.unwrap_or_default()))
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

    #[tokio::test]
    async fn a_log_is_read_by_the_bytes_that_were_ever_written_to_it_whatever_was_cut() {
        let (dir, id) = (tempfile::tempdir().unwrap(), InstanceId::from_bits(1));
        let host = LocalHost::new(dir.path());
        host.perform(&Operation::MakeRunDir { instance: id.clone() }).await.unwrap();
        let name = "console.log";
        let put = |suffix: &str, text: &str| {
            std::fs::write(host.run_dir(&id).join(format!("{name}{suffix}")), text).unwrap();
        };
        let from = async |from, most| {
            let piece = log_from(&host, &id, name, from, most).await.unwrap();
            (piece.offset, String::from_utf8(piece.data).unwrap(), piece.end)
        };
        let is = |offset, data: &str, end| (offset, data.to_owned(), end);
        assert_eq!(from(0, 9).await, is(0, "", 0));
        put("", "0123456789");
        assert_eq!(from(3, 4).await, is(3, "3456", 10));
        assert_eq!(from(10, 4).await, is(10, "", 10));
        assert_eq!(from(15, 4).await, is(15, "", 10));
        // Cut at 10, of which the last four are kept.
        put(".old", "6789");
        put("", "abc");
        put(".marks", "cut 10\n1000 10\n");
        assert_eq!(from(0, 9).await, is(6, "6789", 13));
        assert_eq!(from(8, 1).await, is(8, "8", 13));
        assert_eq!(from(10, 9).await, is(10, "abc", 13));
        assert_eq!(log_since(&host, &id, name, Timestamp::from_unix_ms(1001)).await.unwrap(), 10);
        std::fs::remove_file(host.run_dir(&id).join("console.log.old")).unwrap();
        assert_eq!(from(0, 9).await, is(10, "abc", 13));
        put(".marks", "cut 10\ncutting 3\n");
        assert_eq!(from(11, 9).await, is(11, "", 11));
    }
}
