//! Reads and writes `vmm.json`, the driver's record of a VMM: what its API can't tell. Written before the start.

use std::io;

use mvm_host::Host;
use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};

use crate::run_files;

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
    /// The user that it runs as; absent: that of the settings.
    #[serde(default)]
    pub(super) user: Option<u32>,
}

impl VmmFile {
    pub(super) fn new(revision: Digest, resources: Resources, console_from: u64, user: Option<u32>) -> Self {
        Self { driver: OURS.to_owned(), revision, resources, console_from, user }
    }

    /// Absent: there is none, or it is another driver's.
    pub(super) async fn read(host: &impl Host, instance: &InstanceId) -> io::Result<Option<Self>> {
        let Some(bytes) = run_files::read(host, instance, VMM_FILE).await? else { return Ok(None) };
        let parsed = serde_json::from_slice::<Self>(&bytes).ok();
        Ok(parsed.filter(|file| file.driver == OURS))
    }
}
