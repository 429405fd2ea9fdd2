//! Laws about VMMs on a faulty host: they leave their control groups, or their end is reported late.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use mvm_host::cgroup::InstanceGroup;
use mvm_host::{Access, Host, HostError, LocalHost, Operation, Outcome, ProcessEnd, SpawnVmm, VmmProcess};
use mvm_proto::InstanceId;
use tokio::sync::watch;

use super::{Broken, Held, Subject, done, same, spec};
use crate::{Driver, VmSpec};

/// The numbers of the laws here.
const LEFT: u32 = 42;
const LATE: u32 = 43;

/// This machine, on which no VMM stays in its control group, and where the end of one may be reported only after a list
/// that lacks it.
#[derive(Debug)]
pub struct FaultyHost {
    local: LocalHost,
    late: bool,
    looks: watch::Sender<Looks>,
}

/// Pids of VMMs that were there at some look, and of those that were not any more at a later one.
#[derive(Debug, Default)]
struct Looks {
    seen: BTreeSet<u32>,
    missed: BTreeSet<u32>,
}

impl FaultyHost {
    /// One that VMMs leave their groups on.
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self { local: LocalHost::new(data_dir), late: false, looks: watch::Sender::default() }
    }

    /// The same with ends that are known late.
    #[must_use]
    pub fn late(data_dir: &Path) -> Self {
        Self { late: true, ..Self::new(data_dir) }
    }
}

impl Host for FaultyHost {
    async fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        match operation {
            Operation::SpawnVmm(vmm) => {
                let vmm = SpawnVmm { group: None, ..vmm.clone() };
                self.local.perform(&Operation::SpawnVmm(vmm)).await
            }
            Operation::ConfirmGroup { process, .. } => {
                Err(HostError::Refused(format!("process {} is in another control group", process.pid)))
            }
            other => self.local.perform(other).await,
        }
    }

    async fn vmms(&self) -> Result<Vec<VmmProcess>, HostError> {
        let vmms = self.local.vmms().await?;
        let there: BTreeSet<u32> = vmms.iter().map(|vmm| vmm.process.pid).collect();
        self.looks.send_modify(|looks| {
            looks.missed.extend(looks.seen.difference(&there));
            looks.seen.extend(there);
        });
        Ok(vmms)
    }

    async fn run_dirs(&self) -> Result<Vec<InstanceId>, HostError> {
        self.local.run_dirs().await
    }

    fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.local.run_dir(instance)
    }

    async fn wait_end(&self, vmm: &VmmProcess) -> Result<ProcessEnd, HostError> {
        let end = self.local.wait_end(vmm).await?;
        if self.late {
            let mut looks = self.looks.subscribe();
            // The sender is this host's own.
            let _ = looks.wait_for(|looks| looks.missed.contains(&vmm.process.pid)).await;
        }
        Ok(end)
    }

    async fn open_file(
        &self,
        instance: &InstanceId,
        name: &str,
        access: Access,
    ) -> Result<Option<File>, HostError> {
        self.local.open_file(instance, name, access).await
    }

    async fn connect(&self, instance: &InstanceId, name: &str) -> Result<UnixStream, HostError> {
        self.local.connect(instance, name).await
    }

    async fn names(&self, instance: &InstanceId) -> Result<Vec<String>, HostError> {
        self.local.names(instance).await
    }

    async fn jail_root(&self, instance: &InstanceId) -> Result<Option<PathBuf>, HostError> {
        self.local.jail_root(instance).await
    }
}

/// For a driver on a [`FaultyHost`].
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
    let told = mvm_proto::text::chain(&error);
    same(LAW, told.contains("is in another control group"), true)?;
    same(LAW, done(LAW, driver.list().await)?, Vec::new())?;
    done(LAW, driver.remove(&grouped.instance).await)
}

/// For a driver on a [`FaultyHost`].
pub async fn an_end_is_told_before_the_vm_is_missed<D: Driver>(
    driver: &D,
    subject: &Subject,
    end: impl AsyncFn(&InstanceId),
) -> Held {
    const LAW: &str = "how a VM ended is told before it is missing in the list";
    let spec = spec(subject, LATE);
    let mut exits = driver.exits();
    done(LAW, driver.boot(&spec).await)?;
    same(LAW, done(LAW, driver.list().await)?.len(), 1)?;
    end(&spec.instance).await;
    same(LAW, done(LAW, driver.list().await)?, Vec::new())?;
    let told = exits.try_recv().map(|exit| exit.instance);
    same(LAW, told.ok(), Some(spec.instance.clone()))?;
    done(LAW, driver.remove(&spec.instance).await)
}
