//! Control groups as operations: opened at first use, each change in a thread for it, for the kernel may take its time.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

use super::cgroup::{CgroupError, CgroupSettings, Cgroups, InstanceGroup, Observed};
use super::{HostError, Operation, Outcome, process};

/// For the kernel to end what is left in a group: it frees a guest's memory, and may wait for a disk.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// What there is of control groups.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupsFound {
    pub observed: Observed,
    /// What can't be limited on this machine, in words.
    pub missing: Vec<String>,
}

/// The groups of this host, if it is to have any.
#[derive(Debug, Default)]
pub(super) struct Groups {
    /// With where instances are kept.
    settings: Option<(CgroupSettings, PathBuf)>,
    open: Mutex<Option<Arc<Cgroups>>>,
}

#[allow(clippy::needless_pass_by_value, reason = "for map_err")]
fn failed(cause: CgroupError) -> HostError {
    HostError::Groups { reason: mvm_proto::text::chain(&cause) }
}

impl Groups {
    pub(super) fn new(settings: CgroupSettings, vms_dir: PathBuf) -> Self {
        Self { settings: Some((settings, vms_dir)), open: Mutex::default() }
    }

    fn opened(&self) -> Result<Arc<Cgroups>, HostError> {
        let mut open = self.open.lock();
        if let Some(open) = &*open {
            return Ok(Arc::clone(open));
        }
        let opened = match &self.settings {
            Some((settings, vms_dir)) => {
                Cgroups::open(settings).map_err(failed)?.with_disk_of(vms_dir.clone())
            }
            None => Cgroups::absent("cgroups are disabled"),
        };
        Ok(Arc::clone(open.insert(Arc::new(opened))))
    }

    /// The open directory of the group in which a VMM is to be born.
    pub(super) fn birthplace(
        &self,
        group: &InstanceGroup,
    ) -> Result<Option<std::os::fd::OwnedFd>, HostError> {
        self.opened()?.instance_dir_fd(group).map_err(failed)
    }

    /// Never in a thread that others wait for.
    pub(super) fn perform(&self, operation: &Operation) -> Result<Outcome, HostError> {
        let groups = self.opened()?;
        match operation {
            Operation::EnsureTenantGroup { tenant, limits } => {
                groups.ensure_tenant(tenant, limits).map_err(failed)?;
            }
            Operation::RemoveTenantGroup { tenant } => {
                groups.remove_tenant(tenant).map_err(failed)?;
            }
            Operation::EnsureGroup { group, limits } => {
                groups.clear_instance(group).map_err(failed)?;
                groups.ensure_pool(&group.tenant, &group.pool).map_err(failed)?;
                groups.ensure_instance(group, limits).map_err(failed)?;
                let found = groups.usage(&group.clone().into()).map(|usage| usage.io);
                let disk_limited = limits.io.is_some() && found.is_some_and(|io| io.is(limits.io.as_ref()));
                return Ok(Outcome::Grouped { disk_limited });
            }
            Operation::ConfirmGroup { group, process } => {
                let elsewhere = |cause: CgroupError| HostError::Refused(mvm_proto::text::chain(&cause));
                groups.confirm(group, process.pid).map_err(elsewhere)?;
                // Only now is it sure that this was said of that process, and not of a later one with its pid.
                let lives = process::lives(process).map_err(|cause| {
                    let attempt = format!("look at process {}", process.pid);
                    HostError::Io { attempt, cause }
                })?;
                if !lives {
                    let why = format!("process {} of {} has ended", process.pid, group.instance);
                    return Err(HostError::Refused(why));
                }
            }
            Operation::LimitIo { group, limits } => {
                groups.ensure_io(group, limits.as_ref()).map_err(failed)?;
            }
            Operation::RemoveGroup { group } => {
                groups.remove_instance(group, GONE_WITHIN).map_err(failed)?;
                match groups.remove_pool(&group.tenant, &group.pool) {
                    Ok(_) | Err(CgroupError::InUse { .. }) => {}
                    Err(cause) => return Err(failed(cause)),
                }
            }
            Operation::LookAtGroups => {
                let observed = groups.observe().map_err(failed)?;
                return Ok(Outcome::Groups(GroupsFound { observed, missing: groups.missing() }));
            }
            other => return Err(HostError::Refused(format!("{other:?} is not a cgroup operation"))),
        }
        Ok(Outcome::Done)
    }
}
