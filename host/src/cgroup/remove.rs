//! Ends what is in a group and removes it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mvm_proto::{PoolId, TenantId};
use rustix::process::{Pid, Signal, kill_process};

use super::Cgroups;
use super::error::{CgroupError, failed};
use super::file;
use super::group::{Group, InstanceGroup};
use super::usage::Usage;

/// How long a kernel may still call a group busy after its last process went, before it is asked again.
const SETTLE: Duration = Duration::from_millis(1);

/// How long those that were killed one by one get before the rest, and what they made meanwhile, are killed.
const KILL_AGAIN: Duration = Duration::from_millis(10);

impl Cgroups {
    /// Kills every process of an instance at once, those that are just being made and those that are frozen included.
    /// Says whether there was a group.
    pub fn kill_instance(&self, instance: &InstanceGroup, patience: Duration) -> Result<bool, CgroupError> {
        let Some(directory) = self.directory(&instance.clone().into()) else { return Ok(false) };
        if !directory.is_dir() {
            return Ok(false);
        }
        let deadline = Instant::now() + patience;
        let attempt = || failed(format!("kill what is in {instance}"));
        match kill(&directory, deadline).map_err(attempt())? {
            true => Ok(true),
            false => {
                let group = instance.to_string();
                Err(CgroupError::TooLong {
                    group,
                    what: "empty after all in it was killed",
                    waited: patience,
                })
            }
        }
    }

    /// Kills what is in an instance's group, waits until it is gone, and removes the group with any that were made
    /// below it. Returns its last figures, which can't be read afterwards; none when there was no group.
    pub fn remove_instance(
        &self,
        instance: &InstanceGroup,
        patience: Duration,
    ) -> Result<Option<Usage>, CgroupError> {
        let began = Instant::now();
        let was_there = self.kill_instance(instance, patience)?;
        self.unheld_now().remove(instance);
        if !was_there {
            return Ok(None);
        }
        let group = Group::Instance(instance.clone());
        let (Some(directory), Some(last)) = (self.directory(&group), self.usage(&group)) else {
            return Ok(None);
        };
        remove_tree(&directory, began + patience).map_err(|cause| busy_or(&group, cause))?;
        Ok(Some(last))
    }

    /// Makes room for a new group under the same name, if nothing lives in the old one. For before something is born in
    /// it: kernels count how often a group was killed, and some (6.1 of 2025 and later among them) kill whatever
    /// `clone3` puts into one that ever was. Says whether there was one.
    pub fn clear_instance(&self, instance: &InstanceGroup) -> Result<bool, CgroupError> {
        match self.remove_empty(&instance.clone().into()) {
            Err(CgroupError::InUse(_)) => Ok(false),
            cleared => cleared,
        }
    }

    /// Only when no instance is in it. Says whether there was one.
    pub fn remove_pool(&self, tenant: &TenantId, pool: &PoolId) -> Result<bool, CgroupError> {
        self.remove_empty(&Group::Pool(tenant.clone(), pool.clone()))
    }

    /// Only when no pool is in it. Says whether there was one.
    pub fn remove_tenant(&self, tenant: &TenantId) -> Result<bool, CgroupError> {
        self.remove_empty(&Group::Tenant(tenant.clone()))
    }

    fn remove_empty(&self, group: &Group) -> Result<bool, CgroupError> {
        let Some(directory) = self.directory(group) else { return Ok(false) };
        match fs::remove_dir(&directory) {
            Ok(()) => Ok(true),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(false),
            Err(cause) => Err(busy_or(group, cause)),
        }
    }
}

fn busy_or(group: &Group, cause: io::Error) -> CgroupError {
    match cause.kind() {
        io::ErrorKind::ResourceBusy | io::ErrorKind::DirectoryNotEmpty => {
            CgroupError::InUse(group.to_string())
        }
        _ => failed(format!("remove the group {group}"))(cause),
    }
}

/// Says whether nothing is left before the deadline.
fn kill(group: &Path, deadline: Instant) -> io::Result<bool> {
    match file::write(&group.join("cgroup.kill"), "1") {
        Ok(()) => file::wait_event(group, "populated", 0, deadline),
        // Kernels before 5.14 have no such file.
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => kill_one_by_one(group, deadline),
        Err(cause) => Err(cause),
    }
}

fn kill_one_by_one(group: &Path, deadline: Instant) -> io::Result<bool> {
    loop {
        for pid in pids_in(group)? {
            // One that is gone is done.
            let _ = kill_process(pid, Signal::KILL);
        }
        let again = deadline.min(Instant::now() + KILL_AGAIN);
        if file::wait_event(group, "populated", 0, again)? {
            return Ok(true);
        }
        if Instant::now() >= deadline {
            return Ok(false);
        }
    }
}

/// Every process in a group and below.
fn pids_in(group: &Path) -> io::Result<Vec<Pid>> {
    let text = match fs::read_to_string(group.join("cgroup.procs")) {
        Ok(text) => text,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
    };
    let mut pids: Vec<_> = text.lines().filter_map(|line| Pid::from_raw(line.parse().ok()?)).collect();
    for child in groups_in(group)? {
        pids.extend(pids_in(&child)?);
    }
    Ok(pids)
}

/// The groups right below one, in order. None when it is gone.
pub(super) fn groups_in(group: &Path) -> io::Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(group) {
        Ok(entries) => entries,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            found.push(entry.path());
        }
    }
    found.sort();
    Ok(found)
}

fn remove_tree(group: &Path, deadline: Instant) -> io::Result<()> {
    for child in groups_in(group)? {
        remove_tree(&child, deadline)?;
    }
    loop {
        match fs::remove_dir(group) {
            Ok(()) => return Ok(()),
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(cause) if cause.kind() == io::ErrorKind::ResourceBusy && Instant::now() < deadline => {
                std::thread::sleep(SETTLE);
            }
            Err(cause) => return Err(cause),
        }
    }
}
