//! What a snapshot gives a VMM that loads it: the file itself, or a pipe into which it is decoded meanwhile.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::time::Duration;

use mvm_proto::InstanceId;
use tokio::task::{JoinHandle, spawn_blocking};

use super::pack::Source;
use crate::driver::DriverError;
use crate::driver::at_rest::{self, Lock};

/// The file of a snapshot, and what it takes to read it.
#[derive(Debug)]
pub(super) struct Saved {
    pub(super) file: File,
    pub(super) source: Source,
    pub(super) lock: Option<Lock>,
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
        let Self { file, source, lock } = self;
        if source.form.is_plain() {
            return Ok((file.into(), Feed(None)));
        }
        let unread = |cause| unread(instance, action, cause);
        let compression = source.form.compression;
        let opened = spawn_blocking(move || at_rest::decode(file, compression, lock.as_ref())).await;
        let from = opened.map_err(io::Error::other).and_then(|opened| opened).map_err(unread)?;
        let (state, into) = at_rest::pipe().map_err(unread)?;
        let feed = spawn_blocking(move || at_rest::feed(from, into, source.plain_bytes));
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
    if at_rest::is_damage(&cause) {
        return DriverError::Unusable { instance, reason: cause.to_string() };
    }
    DriverError::Io { instance, action, cause }
}
