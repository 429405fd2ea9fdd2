//! What lies in an instance's `snapshot` directory, and when it may be used.
//!
//! Memory and device state are one file, written by QEMU itself. The manifest beside it says what the file hashes to
//! and what it fits: revision, QEMU, machine, and the data disk as it was. The directory gets its name once all of it
//! is on disk, so that a snapshot is whole or absent.

use std::io;
use std::os::unix::fs::MetadataExt as _;

use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};
use sha2::Digest as _;

use super::args::{Accelerator, DATA_DISK};
use crate::driver::run_files;
use mvm_host::{Host, ProcessIdentity};

pub(super) const SNAPSHOT: &str = "snapshot";
pub(super) const UNFINISHED: &str = "snapshot.tmp";
pub(super) const MEMORY: &str = "memory";
pub(super) const MANIFEST: &str = "manifest.json";
/// In an unfinished snapshot: whose memory is being written.
pub(super) const OWNER: &str = "owner.json";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) revision: Digest,
    pub(super) image: Digest,
    pub(super) qemu: String,
    pub(super) accelerator: Accelerator,
    /// Of all that the guest sees of the machine.
    pub(super) hardware: Digest,
    /// Of the memory file.
    pub(super) memory: Digest,
    pub(super) memory_bytes: u64,
    pub(super) disk: Option<DiskStamp>,
    /// Who was saved: as long as it has not run since, this is its snapshot.
    pub(super) process: ProcessIdentity,
}

/// A data disk as it was when the memory was saved. Memory that meets a disk that moved on destroys it silently.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct DiskStamp {
    bytes: u64,
    inode: u64,
    modified_s: i64,
    modified_ns: i64,
}

impl DiskStamp {
    /// Of an instance's data disk, if there is one, with what was written to it made durable.
    pub(super) async fn take(host: &impl Host, instance: &InstanceId) -> io::Result<Option<Self>> {
        let Some(file) = run_files::open(host, instance, DATA_DISK).await? else { return Ok(None) };
        let taken = tokio::task::spawn_blocking(move || {
            file.sync_all()?;
            let meta = file.metadata()?;
            Ok(Some(Self {
                bytes: meta.len(),
                inode: meta.ino(),
                modified_s: meta.mtime(),
                modified_ns: meta.mtime_nsec(),
            }))
        });
        taken.await.map_err(io::Error::other)?
    }
}

/// What a snapshot must fit.
#[derive(Debug)]
pub(super) struct Fit<'a> {
    pub(super) image: Digest,
    pub(super) qemu: &'a str,
    pub(super) hardware: Digest,
    pub(super) disk: Option<DiskStamp>,
}

impl Manifest {
    /// The manifest of an instance's finished snapshot.
    pub(super) async fn read(host: &impl Host, instance: &InstanceId) -> io::Result<Option<Self>> {
        match run_files::read(host, instance, &format!("{SNAPSHOT}/{MANIFEST}")).await? {
            Some(text) => serde_json::from_slice(&text).map(Some).map_err(io::Error::from),
            None => Ok(None),
        }
    }

    /// Why this snapshot can't be restored on what is here, if it can't.
    pub(super) fn misfit(&self, here: &Fit<'_>) -> Option<String> {
        if self.image != here.image {
            return Some(format!("its snapshot is of image {}, not {}", self.image, here.image));
        }
        if self.qemu != here.qemu {
            return Some(format!("its snapshot was made by QEMU {}, and here is {}", self.qemu, here.qemu));
        }
        if self.hardware != here.hardware {
            return Some("its snapshot is of a machine with other devices or resources".to_owned());
        }
        if self.disk != here.disk {
            return Some("its data disk moved on since its snapshot was made".to_owned());
        }
        None
    }
}

/// Hashes a file of any size.
pub(super) fn digest_of(mut file: impl io::Read) -> io::Result<(Digest, u64)> {
    let mut hash = sha2::Sha256::new();
    let mut buffer = vec![0; 1024 * 1024];
    let mut bytes = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok((Digest::from_bytes(hash.finalize().into()), bytes));
        }
        hash.update(&buffer[..read]);
        bytes += read as u64;
    }
}
