//! The operations, carried out by this process itself.

use std::path::{Path, PathBuf};

use mvm_proto::InstanceId;

use super::{Host, HostError, Operation, Outcome, ProcessEnd, VmmProcess};

/// Run directories of instances, below the data directory.
const VMS_DIR: &str = "vms";

/// Acts with the rights that this process has.
#[derive(Debug)]
pub struct LocalHost {
    vms_dir: PathBuf,
}

impl LocalHost {
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self { vms_dir: data_dir.join(VMS_DIR) }
    }
}

impl Host for LocalHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        Err(HostError::Refused(format!("not built yet: {operation:?}")))
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        Ok(Vec::new())
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        Ok(Vec::new())
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.vms_dir.join(instance.as_str())
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        Err(HostError::Refused(format!("not built yet: {vmm:?}")))
    }
}
