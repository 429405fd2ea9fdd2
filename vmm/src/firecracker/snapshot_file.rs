//! Reads and writes a snapshot's manifest: the digests of its two files, and the kind of host that may load them.
//!
//! The files lie in a directory named by their digest; `snapshot.json` names it and is written last, so that there is
//! a whole snapshot or none. No file is ever overwritten: a VM may still have the old memory mapped.

use std::fs::File;
use std::io::{self, Read};

use mvm_host::Host;
use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

use super::version::Version;
use crate::{SnapshotRef, run_files};

pub(super) const MANIFEST: &str = "snapshot.json";
/// What is being written.
pub(super) const NEW_DIR: &str = "snapshot.new";
/// What was written for its side effect alone.
pub(super) const THROWAWAY_DIR: &str = "snapshot.throwaway";
pub(super) const MEMORY: &str = "mem";
pub(super) const STATE: &str = "state";

const READ_BYTES: usize = 1 << 20;

/// What must be the same for a snapshot to be loaded.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct MadeOn {
    /// The format of the state changes with nearly every release.
    pub(super) firecracker: Version,
    pub(super) cpu_model: String,
    pub(super) host_kernel: String,
}

impl MadeOn {
    /// This host.
    pub(super) fn here(firecracker: Version) -> io::Result<Self> {
        let cpuinfo = std::fs::read_to_string("/proc/cpuinfo")?;
        let model = cpuinfo.lines().find_map(|line| line.strip_prefix("model name")?.split_once(": "));
        Ok(Self {
            firecracker,
            cpu_model: model.map_or_else(|| "unknown".to_owned(), |(_, name)| name.trim().to_owned()),
            host_kernel: rustix::system::uname().release().to_string_lossy().into_owned(),
        })
    }

    /// What differs, for people.
    pub(super) fn differs(&self, here: &Self) -> Option<String> {
        let pairs = [
            ("Firecracker", self.firecracker.to_string(), here.firecracker.to_string()),
            ("a processor", self.cpu_model.clone(), here.cpu_model.clone()),
            ("host kernel", self.host_kernel.clone(), here.host_kernel.clone()),
        ];
        let (what, there, here) = pairs.into_iter().find(|(_, there, here)| there != here)?;
        Some(format!("the snapshot was made on {what} {there}, this is {here}"))
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Part {
    pub(super) bytes: u64,
    pub(super) digest: Digest,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Manifest {
    pub(super) instance: InstanceId,
    pub(super) revision: Digest,
    /// The directory with the two files.
    pub(super) directory: String,
    pub(super) made_on: MadeOn,
    pub(super) memory: Part,
    pub(super) state: Part,
}

impl Manifest {
    pub(super) async fn read(host: &impl Host, instance: &InstanceId) -> io::Result<Option<Self>> {
        match run_files::read(host, instance, MANIFEST).await? {
            Some(bytes) => serde_json::from_slice(&bytes).map(Some).map_err(io::Error::other),
            None => Ok(None),
        }
    }

    pub(super) fn reference(&self) -> SnapshotRef {
        let (instance, revision) = (self.instance.clone(), self.revision);
        SnapshotRef { instance, revision, digest: whole_digest(&self.memory, &self.state) }
    }

    /// What is wrong with the files, if anything: then they are no snapshot any more.
    pub(super) async fn damage(&self, host: &impl Host, whole_memory: bool) -> io::Result<Option<String>> {
        for (name, part, hashed) in [(STATE, &self.state, true), (MEMORY, &self.memory, whole_memory)] {
            let path = format!("{}/{name}", self.directory);
            // The jails that use it have second names for it.
            let Some(file) = run_files::open_shared(host, &self.instance, &path).await? else {
                return Ok(Some(format!("the snapshot's {name} is gone")));
            };
            let found = file.metadata()?.len();
            if found != part.bytes {
                return Ok(Some(format!(
                    "the snapshot's {name} has {found} bytes instead of {}",
                    part.bytes
                )));
            }
            if hashed && measure(file, false).await? != *part {
                return Ok(Some(format!("the snapshot's {name} is not what was written")));
            }
        }
        Ok(None)
    }
}

/// The one digest of both files.
pub(super) fn whole_digest(memory: &Part, state: &Part) -> Digest {
    Digest::of(format!("firecracker snapshot\nmemory {}\nstate {}\n", memory.digest, state.digest).as_bytes())
}

/// A file's length and digest; with `sync`, it is on the disk afterwards.
pub(super) async fn measure(file: File, sync: bool) -> io::Result<Part> {
    tokio::task::spawn_blocking(move || read_whole(file, sync)).await.map_err(io::Error::other)?
}

fn read_whole(mut file: File, sync: bool) -> io::Result<Part> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut bytes = 0;
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            break;
        }
        hash.update(&buffer[..read]);
        bytes += read as u64;
    }
    if sync {
        file.sync_all()?;
    }
    Ok(Part { bytes, digest: Digest::from_bytes(hash.finalize().into()) })
}

/// Whether a name in a run directory belongs to some snapshot: the current one, an older one, or one that was never
/// finished.
pub(super) fn is_snapshot_name(name: &str) -> bool {
    name == NEW_DIR || name == THROWAWAY_DIR || name.starts_with("snapshot-")
}

#[cfg(test)]
#[path = "snapshot_file_tests.rs"]
mod tests;
