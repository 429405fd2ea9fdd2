//! Opens a snapshot for the VMM that loads it: the file itself, or a pipe into which it is decoded meanwhile.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::{Digest, InstanceId};
use parking_lot::Mutex;
use sha2::Digest as _;
use tokio::task::{JoinHandle, spawn_blocking};

use super::compress::Source;
use crate::DriverError;
use crate::encoding::{self, StreamKey};

/// The file of a snapshot, and what it takes to read it.
#[derive(Debug)]
pub(super) struct Saved {
    pub(super) file: File,
    pub(super) source: Source,
    pub(super) key: Option<StreamKey>,
}

/// Hashes a file while it is read: a changed byte may decode to something, and even to what it should.
struct Summed {
    file: File,
    sum: Arc<Mutex<sha2::Sha256>>,
}

impl Summed {
    /// The same, from wherever the other has come to.
    fn again(&self) -> io::Result<Self> {
        Ok(Self { file: self.file.try_clone()?, sum: Arc::clone(&self.sum) })
    }

    /// Reads what is left, and compares all of it.
    fn check(mut self, expected: Digest) -> io::Result<()> {
        io::copy(&mut self, &mut io::sink())?;
        let sum = std::mem::take(&mut *self.sum.lock());
        if Digest::from_bytes(sum.finalize().into()) == expected {
            return Ok(());
        }
        Err(io::Error::new(io::ErrorKind::InvalidData, "it does not hash to what it was compressed to"))
    }
}

impl Read for Summed {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let read = self.file.read(buffer)?;
        self.sum.lock().update(&buffer[..read]);
        Ok(read)
    }
}

/// What feeds a VMM.
#[derive(Debug)]
pub(super) struct Feed(Option<JoinHandle<io::Result<()>>>);

impl Saved {
    /// Begins to decode it, if need be: what is no such stream at all is told before a VMM is started for it.
    pub(super) async fn open(
        self,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<(OwnedFd, Feed), DriverError> {
        let Self { file, source, key } = self;
        if source.encoding.is_plain() {
            return Ok((file.into(), Feed(None)));
        }
        let unread = |cause| unread(instance, action, cause);
        let compression = source.encoding.compression;
        let opened = match source.digest.filter(|_| key.is_none()) {
            Some(expected) => {
                let summed = Summed { file, sum: Arc::default() };
                let rest = summed.again().map_err(unread)?;
                let decoded = spawn_blocking(move || encoding::decode(summed, compression, None)).await;
                decoded.map(|from| from.map(|from| (from, Some((rest, expected)))))
            }
            // What is encrypted is sure of itself.
            None => {
                let decoded = spawn_blocking(move || encoding::decode(file, compression, key.as_ref())).await;
                decoded.map(|from| from.map(|from| (from, None)))
            }
        };
        let (from, whole) = opened.map_err(io::Error::other).and_then(|opened| opened).map_err(unread)?;
        let (state, into) = encoding::pipe().map_err(unread)?;
        let feed = spawn_blocking(move || {
            encoding::feed(from, into, source.plain_bytes)?;
            whole.map_or(Ok(()), |(rest, expected)| rest.check(expected))
        });
        Ok((state, Feed(Some(feed))))
    }
}

impl Feed {
    /// Waits until all of it was read, and found to be what was saved. Its VMM must have loaded what it wants, or be
    /// gone.
    pub(super) async fn over(
        self,
        instance: &InstanceId,
        action: &'static str,
        within: Duration,
    ) -> Result<(), DriverError> {
        let Some(feed) = self.0 else { return Ok(()) };
        let stuck = |_| DriverError::Stuck { instance: instance.clone(), action, waited: within };
        let fed = tokio::time::timeout(within, feed).await.map_err(stuck)?;
        fed.map_err(io::Error::other).and_then(|fed| fed).map_err(|cause| unread(instance, action, cause))
    }
}

/// A stream that can't be read is damaged, unless it is the disk that can't be read now.
fn unread(instance: &InstanceId, action: &'static str, cause: io::Error) -> DriverError {
    let instance = instance.clone();
    if encoding::is_damage(&cause) {
        return DriverError::Unusable { instance, reason: cause.to_string() };
    }
    DriverError::Io { instance, action, cause }
}
