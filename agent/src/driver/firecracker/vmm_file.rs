//! What is written down about a VMM before it is started, in the instance's run directory: what its API can't tell.

use std::io;
use std::path::Path;

use mvm_proto::Digest;
use mvm_proto::document::Resources;
use serde::{Deserialize, Serialize};

pub(super) const VMM_FILE: &str = "vmm.json";
const OURS: &str = "firecracker";

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct VmmFile {
    /// Another driver's VMM in the same place is not ours to speak to.
    driver: String,
    pub(super) revision: Digest,
    pub(super) resources: Resources,
    /// Where its console begins in a file that earlier VMMs wrote to.
    #[serde(default)]
    pub(super) console_from: u64,
}

impl VmmFile {
    pub(super) fn new(revision: Digest, resources: Resources, console_from: u64) -> Self {
        Self { driver: OURS.to_owned(), revision, resources, console_from }
    }

    /// Absent: there is none, or it is another driver's.
    pub(super) fn read(run_dir: &Path) -> io::Result<Option<Self>> {
        match std::fs::read(run_dir.join(VMM_FILE)) {
            Ok(bytes) => {
                let parsed = serde_json::from_slice::<Self>(&bytes).ok();
                Ok(parsed.filter(|file| file.driver == OURS))
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(cause) => Err(cause),
        }
    }
}
