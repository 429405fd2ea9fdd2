//! The host that an agent uses: this process itself, or a privileged helper beside it.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::Arc;

use mvm_proto::InstanceId;

use super::cgroup::CgroupSettings;
use super::{Access, Host, HostError, LocalHost, Operation, Outcome, ProcessEnd, RemoteHost, VmmProcess};

/// Clones share one.
#[derive(Debug, Clone)]
pub enum AnyHost {
    Local(Arc<LocalHost>),
    Remote(Arc<RemoteHost>),
}

impl AnyHost {
    /// This process, with the rights that it has.
    #[must_use]
    pub fn local(data_dir: &std::path::Path) -> Self {
        Self::Local(Arc::new(LocalHost::new(data_dir)))
    }

    /// The same with control groups.
    #[must_use]
    pub fn local_with_groups(data_dir: &std::path::Path, groups: CgroupSettings) -> Self {
        Self::Local(Arc::new(LocalHost::with_groups(data_dir, groups)))
    }
}

/// The same call on whichever host it is.
macro_rules! each {
    ($any:expr, $host:ident => $call:expr) => {
        match $any {
            AnyHost::Local($host) => $call,
            AnyHost::Remote($host) => $call,
        }
    };
}

impl Host for AnyHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        each!(self, host => host.perform(operation).await)
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        each!(self, host => host.vmms().await)
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        each!(self, host => host.run_dirs().await)
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        each!(self, host => host.run_dir(instance))
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        each!(self, host => host.wait_end(vmm).await)
    }

    async fn open_file(
        &self,
        instance: &InstanceId,
        name: &str,
        access: Access,
    ) -> Result<Option<File>, HostError> {
        each!(self, host => host.open_file(instance, name, access).await)
    }

    async fn connect(&self, instance: &InstanceId, name: &str) -> Result<UnixStream, HostError> {
        each!(self, host => host.connect(instance, name).await)
    }

    async fn names(&self, instance: &InstanceId) -> Result<Vec<String>, HostError> {
        each!(self, host => host.names(instance).await)
    }

    async fn jail_root(&self, instance: &InstanceId) -> Result<Option<PathBuf>, HostError> {
        each!(self, host => host.jail_root(instance).await)
    }
}
