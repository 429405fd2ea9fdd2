//! Control groups: what keeps one tenant, and one instance, from taking what is another's.
//!
//! `<mount>/[parent/]mvm/<tenant>/<pool>/<instance>`: limits of a tenant's quota on the first, of a microVM on the last.
//! Processes are in the last only, and are born there (see [`spawn_into`](crate::spawn_into)). Every call can be
//! repeated: it makes what is missing, puts right what differs and says so. What was written is read back, since a
//! limit that the kernel did not take is none.
//!
//! All calls block, mostly for microseconds; lowering a limit and removing a group can take longer. Version 1 of the
//! interface is not used: with it a group of processes can neither be killed nor joined at birth.

mod confirm;
mod disk;
mod ensure;
mod error;
mod events;
#[doc(hidden)]
pub mod fake;
mod file;
mod group;
mod hierarchy;
mod io_max;
mod limits;
mod pressure;
mod remove;
mod usage;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mvm_proto::text::chain;
use parking_lot::{Mutex, MutexGuard};
use rustix::fs::{Access, Mode as FileMode, OFlags};
use serde::{Deserialize, Serialize};

pub use disk::{Disk, Machine};
pub use error::CgroupError;
pub use events::CgroupEvents;
pub use group::{Group, InstanceGroup, Repair};
pub use io_max::IoFound;
pub use limits::{CPU_PERIOD_US, InstanceLimits, Setting, TenantLimits, VmmCost, VmmKind};
pub use pressure::{NODE_MEMORY_PRESSURE, Pressure, PressureWatch, Stall, parse_pressure, read_pressure};
pub use usage::{Limit, LimitEvent, Usage, Usages, changes};

use error::failed;
use hierarchy::{Controllers, NEEDED, WELCOME};

/// What our topmost group is called, unless a setting says otherwise.
pub const DEFAULT_NAME: &str = "mvm";

/// What to do on a machine that can't hold every limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Mode {
    /// Refuse to run there.
    #[default]
    Required,
    /// Hold those that can be held, and tell which can't.
    BestEffort,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CgroupSettings {
    pub mode: Mode,
    /// Where cgroup v2 is mounted; found from `/proc/self/mountinfo` when absent.
    pub mount: Option<PathBuf>,
    /// A group below the mount that ours lies in, such as a slice; the top of the hierarchy when absent. It must hold
    /// no processes and must not be the agent's own unit or below it.
    pub parent: Option<PathBuf>,
    pub name: String,
    /// Where disks are looked up.
    #[serde(default)]
    pub machine: Machine,
}

impl Default for CgroupSettings {
    fn default() -> Self {
        Self {
            mode: Mode::default(),
            mount: None,
            parent: None,
            name: DEFAULT_NAME.to_owned(),
            machine: Machine::default(),
        }
    }
}

/// This machine's groups of ours.
#[derive(Debug)]
pub struct Cgroups {
    mode: Mode,
    /// Absent where nothing can be limited: every call then does nothing and succeeds.
    tree: Option<Tree>,
    missing: Mutex<BTreeSet<String>>,
    /// Instances whose disk should be limited and is not, each with the reason.
    unheld: Mutex<BTreeMap<InstanceGroup, String>>,
    /// The directory whose disk instances are limited on.
    disk_of: Option<PathBuf>,
    machine: Machine,
    page_size: u64,
}

#[derive(Debug)]
struct Tree {
    mount: PathBuf,
    /// Our topmost group, below the mount.
    below: PathBuf,
    /// The same as a whole path.
    root: PathBuf,
    /// Those that can limit what is in our groups.
    controllers: Controllers,
}

impl Tree {
    fn directory(&self, group: &Group) -> PathBuf {
        self.root.join(group.path())
    }
}

/// What is there, for the sweep.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Observed {
    #[serde(with = "usage::as_pairs")]
    pub groups: Usages,
    /// Groups among ours that no id of ours names.
    pub orphans: Vec<PathBuf>,
}

/// What is right below a group.
#[derive(Debug, Default)]
struct Below {
    groups: Vec<Group>,
    orphans: Vec<PathBuf>,
}

/// Where the hierarchy is mounted, if it is, and the path of our topmost group below that.
fn find(settings: &CgroupSettings) -> Result<(Option<PathBuf>, PathBuf), CgroupError> {
    let own = fs::read_to_string("/proc/self/cgroup").unwrap_or_default();
    let below =
        hierarchy::below_mount(settings.parent.as_deref(), &settings.name, hierarchy::own_group(&own))?;
    if settings.mount.is_some() {
        return Ok((settings.mount.clone(), below));
    }
    let mounts = fs::read_to_string("/proc/self/mountinfo").map_err(failed("read the list of mounts"))?;
    Ok((hierarchy::mount_point(&mounts), below))
}

impl Cgroups {
    /// Finds the hierarchy and hands the controllers down to our topmost group.
    pub fn open(settings: &CgroupSettings) -> Result<Self, CgroupError> {
        let (mount, below) = find(settings)?;
        let page_size = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok().flatten();
        let page_size = page_size.and_then(|size| u64::try_from(size).ok()).unwrap_or(4096);
        let mut cgroups = Self {
            mode: settings.mode,
            tree: None,
            missing: Mutex::default(),
            unheld: Mutex::default(),
            disk_of: None,
            machine: settings.machine.clone(),
            page_size,
        };
        let Some(mount) = mount else {
            cgroups.do_without(CgroupError::NotMounted)?;
            return Ok(cgroups);
        };
        match cgroups.delegated(mount, below) {
            Ok(tree) => cgroups.tree = tree,
            // Mounted read-only, as in a container, or not ours to change.
            Err(cause) => cgroups.do_without(cause)?,
        }
        Ok(cgroups)
    }

    /// Whether every limit could be held, by looking alone: where, and with which controllers.
    pub fn look(settings: &CgroupSettings) -> Result<String, CgroupError> {
        let mount = find(settings)?.0.ok_or(CgroupError::NotMounted)?;
        let available = hierarchy::available(&mount)
            .map_err(failed(format!("read the controllers of {}", mount.display())))?;
        let missing = NEEDED.into_iter().filter(|name| !available.contains(*name));
        let controllers: Vec<_> = missing.map(str::to_owned).collect();
        if !controllers.is_empty() {
            return Err(CgroupError::Unavailable { controllers, group: mount });
        }
        rustix::fs::access(mount.join(hierarchy::HANDED_DOWN), Access::WRITE_OK).map_err(|errno| {
            failed(format!("change the control groups at {}", mount.display()))(errno.into())
        })?;
        let names: Vec<_> = available.iter().map(String::as_str).collect();
        Ok(format!("{} has {}", mount.display(), names.join(", ")))
    }

    /// For a machine where none are to be used; the reason is told as all that is missing.
    #[must_use]
    pub fn absent(reason: impl Into<String>) -> Self {
        let missing = Mutex::new(BTreeSet::from([reason.into()]));
        Self {
            mode: Mode::BestEffort,
            tree: None,
            missing,
            unheld: Mutex::default(),
            disk_of: None,
            machine: Machine::default(),
            page_size: 4096,
        }
    }

    /// The same with instances kept in this directory: what they do to its disk can be limited.
    #[must_use]
    pub fn with_disk_of(self, directory: PathBuf) -> Self {
        Self { disk_of: Some(directory), ..self }
    }

    fn delegated(&self, mount: PathBuf, below: PathBuf) -> Result<Option<Tree>, CgroupError> {
        let available = hierarchy::available(&mount)
            .map_err(failed(format!("read the controllers of {}", mount.display())))?;
        if NEEDED.iter().all(|name| !available.contains(*name)) {
            // What is mounted is there for someone else's bookkeeping: nothing is touched.
            let controllers = NEEDED.map(str::to_owned).to_vec();
            self.do_without(CgroupError::Unavailable { controllers, group: mount })?;
            return Ok(None);
        }
        let welcome = WELCOME.into_iter().filter(|name| available.contains(*name));
        let wanted: Controllers = NEEDED.into_iter().chain(welcome).map(str::to_owned).collect();
        let mut lost = Vec::new();
        let (controllers, _) = hierarchy::delegate(&mount, &below, &wanted, &mut lost)?;
        self.do_without_all(lost)?;
        let root = mount.join(&below);
        // Others may have kept all of them from being handed down.
        let useful = NEEDED.iter().any(|name| controllers.contains(*name));
        Ok(useful.then_some(Tree { mount, below, root, controllers }))
    }

    /// Goes on without what failed where that is allowed, and remembers it.
    fn do_without(&self, cause: CgroupError) -> Result<(), CgroupError> {
        match self.mode {
            Mode::Required => Err(cause),
            Mode::BestEffort => {
                self.missing_now().insert(chain(&cause));
                Ok(())
            }
        }
    }

    fn do_without_all(&self, lost: Vec<CgroupError>) -> Result<(), CgroupError> {
        let welcome_only = |cause: &CgroupError| {
            matches!(cause, CgroupError::NotDelegated { controllers, .. }
                if controllers.iter().all(|name| WELCOME.contains(&name.as_str())))
        };
        lost.into_iter().filter(|cause| !welcome_only(cause)).try_for_each(|cause| self.do_without(cause))
    }

    fn missing_now(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.missing.lock()
    }

    fn unheld_now(&self) -> MutexGuard<'_, BTreeMap<InstanceGroup, String>> {
        self.unheld.lock()
    }

    /// What can't be held on this machine, in words; empty unless [`Mode::BestEffort`] had to do without something.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        let mut missing = self.missing_now().clone();
        missing.extend(self.unheld_now().values().cloned());
        missing.into_iter().collect()
    }

    /// Where our topmost group is.
    #[must_use]
    pub fn root(&self) -> Option<&Path> {
        self.tree.as_ref().map(|tree| tree.root.as_path())
    }

    /// A group's directory, whether it is there or not.
    #[must_use]
    pub fn directory(&self, group: &Group) -> Option<PathBuf> {
        self.tree.as_ref().map(|tree| tree.directory(group))
    }

    /// What to start an instance's VMM in. None where there are no groups.
    pub fn instance_dir_fd(&self, instance: &InstanceGroup) -> Result<Option<OwnedFd>, CgroupError> {
        let Some(directory) = self.directory(&instance.clone().into()) else { return Ok(None) };
        let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let opened = rustix::fs::open(&directory, flags, FileMode::empty()).map_err(io::Error::from);
        opened.map(Some).map_err(failed(format!("open the group {instance}")))
    }

    /// Every group of ours with its figures.
    pub fn observe(&self) -> Result<Observed, CgroupError> {
        let mut observed = Observed::default();
        let mut found = self.below(None)?;
        while let Some(group) = found.groups.pop() {
            observed.groups.extend(self.usage(&group).map(|usage| (group.clone(), usage)));
            // What is below an instance is its VMM's own.
            if !matches!(group, Group::Instance(_)) {
                let below = self.below(Some(&group))?;
                found.groups.extend(below.groups);
                found.orphans.extend(below.orphans);
            }
        }
        found.orphans.sort();
        observed.orphans = found.orphans;
        Ok(observed)
    }

    /// The groups right below one, or below the topmost. What goes away meanwhile is not there.
    fn below(&self, group: Option<&Group>) -> Result<Below, CgroupError> {
        let mut found = Below::default();
        let Some(tree) = &self.tree else { return Ok(found) };
        let directory = group.map_or_else(|| tree.root.clone(), |group| tree.directory(group));
        let attempt = || failed(format!("list the groups in {}", directory.display()));
        for path in remove::groups_in(&directory).map_err(attempt())? {
            match path.file_name().and_then(|name| Group::child(group, name.to_str()?)) {
                Some(child) => found.groups.push(child),
                None => found.orphans.push(path),
            }
        }
        Ok(found)
    }

    /// One group's figures; none when it is not there.
    #[must_use]
    pub fn usage(&self, group: &Group) -> Option<Usage> {
        let directory = self.directory(group).filter(|directory| directory.is_dir())?;
        let mut usage = Usage::read(&directory);
        if let Group::Instance(instance) = group
            && self.unheld_now().contains_key(instance)
        {
            usage.io = IoFound::Unheld;
        }
        Some(usage)
    }

    /// Stops every process of an instance where it is, until [`Cgroups::thaw`]. One that could not be stopped in time
    /// goes on.
    pub fn freeze(&self, instance: &InstanceGroup, patience: Duration) -> Result<(), CgroupError> {
        let stopped = self.set_frozen(instance, true, patience);
        if stopped.is_err() {
            let _ = self.set_frozen(instance, false, Duration::ZERO);
        }
        stopped
    }

    pub fn thaw(&self, instance: &InstanceGroup, patience: Duration) -> Result<(), CgroupError> {
        self.set_frozen(instance, false, patience)
    }

    fn set_frozen(
        &self,
        instance: &InstanceGroup,
        frozen: bool,
        patience: Duration,
    ) -> Result<(), CgroupError> {
        let Some(directory) = self.directory(&instance.clone().into()) else { return Ok(()) };
        let (verb, what) = if frozen { ("freeze", "frozen") } else { ("thaw", "thawed") };
        let attempt = || failed(format!("{verb} {instance}"));
        let (value, deadline) = (u64::from(frozen), Instant::now() + patience);
        file::write(&directory.join("cgroup.freeze"), &value.to_string()).map_err(attempt())?;
        match file::wait_event(&directory, "frozen", value, deadline).map_err(attempt())? {
            true => Ok(()),
            false => Err(CgroupError::TooLong { group: instance.to_string(), what, waited: patience }),
        }
    }
}

#[cfg(test)]
mod tests;
