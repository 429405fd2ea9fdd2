//! The fake driver's VMs, and their files.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};

use super::super::encoding::Encoding;
use super::super::{SnapshotRef, VmState};

/// What exists of one instance.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Entry {
    pub(super) vm: Option<FakeVm>,
    pub(super) snapshot: Option<SnapshotRef>,
    /// What the snapshot holds.
    #[serde(default)]
    pub(super) asleep: Option<FakeVm>,
    /// How it is encoded.
    #[serde(default, rename = "form")]
    pub(super) encoding: Encoding,
    #[serde(default)]
    pub(super) damaged: bool,
    pub(super) console: String,
    /// Others are forked from it.
    #[serde(default)]
    pub(super) template: bool,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct FakeVm {
    pub(super) revision: Digest,
    pub(super) state: VmState,
    /// How often its vCPUs were started again: stands for what is in its memory.
    pub(super) runs: u64,
    /// It was given its identity since it booted or was restored.
    #[serde(default)]
    pub(super) reborn: bool,
    /// The newest identity that it was given; 0: none since it booted.
    #[serde(default)]
    pub(super) generation: u64,
}

#[derive(Debug, Default)]
pub(super) struct World {
    entries: BTreeMap<InstanceId, Entry>,
    /// Absent: nothing is kept.
    dir: Option<PathBuf>,
    pub(super) boots: u64,
}

impl World {
    pub(super) fn load(dir: &Path, keep: bool) -> io::Result<Self> {
        let mut world = Self { dir: keep.then(|| dir.to_owned()), ..Self::default() };
        let files = match fs::read_dir(dir) {
            Ok(files) => files,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(world),
            Err(error) => return Err(error),
        };
        for file in files {
            let path = file?.path();
            let id = path.file_name().and_then(|name| name.to_str()?.strip_suffix(".json")?.parse().ok());
            // A temporary file of a write that never finished is no VM.
            let Some(id) = id else { continue };
            let damaged = |cause: &dyn std::fmt::Display| {
                io::Error::new(io::ErrorKind::InvalidData, format!("{}: {cause}", path.display()))
            };
            let bytes = fs::read(&path).map_err(|cause| damaged(&cause))?;
            world.entries.insert(id, serde_json::from_slice(&bytes).map_err(|cause| damaged(&cause))?);
        }
        Ok(world)
    }

    pub(super) fn get(&self, instance: &InstanceId) -> Option<Entry> {
        self.entries.get(instance).cloned()
    }

    pub(super) fn entries(&self) -> impl Iterator<Item = (&InstanceId, &Entry)> {
        self.entries.iter()
    }

    /// Replaces one entry, on disk first. No fsync: these VMs must outlive the agent, not the machine, as real ones do.
    pub(super) fn put(&mut self, instance: &InstanceId, entry: Option<Entry>) -> io::Result<()> {
        if let Some(dir) = &self.dir {
            let path = dir.join(format!("{instance}.json"));
            match &entry {
                Some(entry) => {
                    let temporary = dir.join(format!("{instance}.tmp"));
                    fs::write(&temporary, serde_json::to_vec(entry)?)?;
                    fs::rename(&temporary, &path)?;
                }
                None => match fs::remove_file(&path) {
                    Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
                    _ => {}
                },
            }
        }
        match entry {
            Some(entry) => self.entries.insert(instance.clone(), entry),
            None => self.entries.remove(instance),
        };
        Ok(())
    }
}
