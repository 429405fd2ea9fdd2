//! How drivers name a snapshot, and the files of one that is migrated.

use std::fs::File;

use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};

/// Names a snapshot that was written whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRef {
    pub instance: InstanceId,
    pub revision: Digest,
    /// Of this snapshot and no other, not even one of the same memory.
    pub digest: Digest,
}

/// One file of what an instance is while it sleeps, open to be read.
#[derive(Debug)]
pub struct Part {
    pub name: String,
    pub file: File,
}
