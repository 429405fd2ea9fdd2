//! A VMM that is not where its limits are: on a host whose VMMs leave their control groups.

use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use mvm_host::cgroup::InstanceGroup;
use mvm_host::{Access, Host, HostError, LocalHost, Operation, Outcome, ProcessEnd, SpawnVmm, VmmProcess};
use mvm_proto::InstanceId;

use super::{Broken, Held, Subject, done, same, spec};
use crate::driver::{Driver, VmSpec};

/// The number of the law here.
const LEFT: u32 = 41;

/// This machine, on which no VMM stays in its control group.
#[derive(Debug)]
pub struct AwayHost(LocalHost);

impl AwayHost {
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self(LocalHost::new(data_dir))
    }
}

impl Host for AwayHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        match operation {
            Operation::SpawnVmm(vmm) => {
                let vmm = SpawnVmm { group: None, ..vmm.clone() };
                self.0.perform(&Operation::SpawnVmm(vmm)).await
            }
            Operation::ConfirmGroup { process, .. } => {
                Err(HostError::Refused(format!("process {} is in another control group", process.pid)))
            }
            other => self.0.perform(other).await,
        }
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        self.0.vmms().await
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        self.0.run_dirs().await
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.0.run_dir(instance)
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        self.0.wait_end(vmm).await
    }

    async fn open_file(
        &self,
        instance: &InstanceId,
        name: &str,
        access: Access,
    ) -> Result<Option<File>, HostError> {
        self.0.open_file(instance, name, access).await
    }

    async fn connect(&self, instance: &InstanceId, name: &str) -> Result<UnixStream, HostError> {
        self.0.connect(instance, name).await
    }

    async fn names(&self, instance: &InstanceId) -> Result<Vec<String>, HostError> {
        self.0.names(instance).await
    }

    async fn jail_root(&self, instance: &InstanceId) -> Result<Option<PathBuf>, HostError> {
        self.0.jail_root(instance).await
    }
}

/// For a driver on an [`AwayHost`].
pub async fn a_vmm_outside_its_group_is_ended<D: Driver>(driver: &D, subject: &Subject) -> Held {
    const LAW: &str = "a VMM that is not in its control group is ended, and its start fails with the reason";
    let mut grouped: VmSpec = spec(subject, LEFT);
    let group = || -> Result<_, Box<dyn std::error::Error>> {
        let (tenant, pool) = ("acme".parse()?, "web".parse()?);
        Ok(InstanceGroup { tenant, pool, instance: grouped.instance.clone() })
    };
    grouped.bounds.group = Some(done(LAW, group())?);
    let error = match driver.boot(&grouped).await {
        Err(error) => error,
        Ok(()) => return Err(Broken { law: LAW, found: "it started".to_owned() }),
    };
    let told = crate::text::chain(&error);
    same(LAW, told.contains("is in another control group"), true)?;
    same(LAW, done(LAW, driver.list().await)?, Vec::new())?;
    done(LAW, driver.remove(&grouped.instance).await)
}
