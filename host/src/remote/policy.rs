//! What the helper does for its agent, and what it refuses: decided here, from the limits that were set while the
//! agent was still trusted. A compromised agent can ask for anything; it gets what an honest one could have asked for.
//!
//! [`Policy::admit`] looks at an operation's arguments alone. What a name leads to is found out where it is used, once:
//! that an image is one (`images.rs`), that a file is what it must be (`files/`), that a process is a VMM of this data
//! directory (`process.rs`).
//!
//! Names keep jails and everything else in a run directory apart. A jail lies in a directory that is named after its
//! program, `<program>/<instance>/root`, and the jailer starts only a program with `firecracker` in its name. No other
//! operation takes a name with that word in it or that is an instance, and none but a snapshot's directory may be in
//! front of a `/`. So no part of a jail can be given a name that operations take, nor anything else a name that jails
//! have. What is in a jail's root is opened to read, and connected to, as `jail/NAME`, whatever its name.

use std::path::{Component, Path, PathBuf};

use mvm_proto::InstanceId;
use mvm_proto::document::IoLimits;
use serde::{Deserialize, Serialize};

use super::programs;
use super::vmm_args::{self, Line};
use crate::cgroup::CgroupSettings;
use crate::data_dir::VMS_DIR;
use crate::jail::JAILERS_OWN;
use crate::network::{MAX_NET_ID, Port, place_of_tap};
use crate::sandbox::Demand;
use crate::{Access, Confinement, HostError, JAIL, Jail, JailFile, Operation, SpawnVmm};

/// Records, configuration and manifests are a few KiB.
const MAX_TEXT_BYTES: usize = 256 * 1024;

/// No disk of a microVM is larger than 16 TiB.
const MAX_DISK_MIB: u64 = 16 * 1024 * 1024;

/// A name in a run directory; its longest is the name of a snapshot with its digest.
const MAX_NAME_BYTES: usize = 128;

/// Kernel, initial RAM disk, disks and snapshot of one VMM are a handful.
const MAX_JAIL_FILES: usize = 32;

/// What the directory of a snapshot begins with. There are no other directories in a run directory but jails'.
const SNAPSHOT: &str = "snapshot";

/// The memory of a template, in the directory of its snapshot.
const MEMORY: &str = "memory";

/// What is in the name of every program that a jailer starts, and so in that of the directory that jails are in.
const JAILED: &str = "firecracker";

/// As the kernel has it.
const MAX_LINK_NAME_BYTES: usize = 15;

/// Tenants whose networks one probe tries to reach: each takes a tenth of a second, for which other networks wait.
const MAX_PROBED: usize = 8;

/// A VMM's command line has some dozens.
const MAX_ARGS: usize = 256;
const MAX_ARG_BYTES: usize = 16 * 1024;

/// What a program is, which says what it may be told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmmProgram {
    Qemu,
    Firecracker,
    /// Starts a Firecracker of this list.
    Jailer,
}

/// The limits of one helper.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Policy {
    pub data_dir: PathBuf,
    /// Where images are; nothing else is shared with VMMs.
    pub images_dir: PathBuf,
    /// Every program that may be started as a VMM, by the very path that it is asked for by.
    pub programs: Vec<(PathBuf, VmmProgram)>,
    /// Where jails are, besides in run directories.
    pub jail_base: Option<PathBuf>,
    /// Who the agent runs as. Images are its own.
    pub agent_uid: u32,
    /// Every group that it is in.
    pub agent_gids: Vec<u32>,
    /// Users that VMMs may run as, from first to last: none may own anything else on this machine.
    pub vmm_ids: Vec<(u32, u32)>,
    /// How well VMMs must be confined, as the operator said: QEMU by this helper, Firecracker by its jailer. Absent: not
    /// at all, and then an attacker who controls a VMM has this helper's rights.
    pub demand: Option<Demand>,
    pub groups: Option<CgroupSettings>,
}

pub(super) fn refused<T>(reason: impl Into<String>) -> Result<T, HostError> {
    Err(HostError::Refused(reason.into()))
}

/// A name that needs no second look: no `..`, nothing hidden, nothing that means anything to anyone.
pub(super) fn is_plain(name: &str) -> bool {
    let letter = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'.' | b'_' | b'-' | b':');
    let fits = !name.is_empty() && name.len() <= MAX_NAME_BYTES;
    fits && !name.starts_with(['.', '-']) && name.bytes().all(letter)
}

/// An absolute path without detours.
pub(super) fn is_straight(path: &Path) -> bool {
    let mut parts = path.components();
    let rooted = parts.next() == Some(Component::RootDir);
    // What was left out by reading it as components was there for no honest reason.
    rooted
        && parts.clone().all(|part| matches!(part, Component::Normal(_)))
        && path.as_os_str().len() <= 4096
        && path.components().collect::<PathBuf>().as_os_str() == path.as_os_str()
}

impl Policy {
    pub(super) fn run_dir(&self, instance: &InstanceId) -> PathBuf {
        self.data_dir.join(VMS_DIR).join(instance.as_str())
    }

    /// A name in a run directory, or in the directory of a snapshot in it; never a part of a jail.
    pub(super) fn name(&self, name: &str) -> Result<(), HostError> {
        let fits = match name.split('/').collect::<Vec<_>>()[..] {
            [name] => is_own(name),
            [dir, name] => is_snapshot(dir) && is_own(name),
            _ => false,
        };
        if fits { Ok(()) } else { refused(format!("{name:?} is not a name in a run directory")) }
    }

    /// A name that a file or socket is opened by: such a one, or to read or connect to, one in the root of the jail.
    pub(super) fn opened(&self, name: &str, access: Option<Access>) -> Result<(), HostError> {
        match name.split_once('/') {
            Some((JAIL, inside)) if access != Some(Access::Create) && is_plain(inside) => Ok(()),
            _ => self.name(name),
        }
    }

    /// Whether these arguments are any that an honest agent could have sent. Every operation is here by name.
    pub fn admit(&self, operation: &Operation) -> Result<(), HostError> {
        match operation {
            Operation::MakeRunDir { instance: _ }
            | Operation::RemoveRunDir { instance: _ }
            | Operation::MeasureDisk { instance: _ } => Ok(()),
            // Only VMMs of this data directory are looked at, and there are no more of them than there are.
            Operation::MeasureMemory { instances: _ } => Ok(()),
            Operation::RemoveFile { instance: _, name } => self.name(name),
            Operation::MakeDir { instance: _, name } => {
                if is_snapshot(name) {
                    return Ok(());
                }
                refused(format!("{name:?} is not the directory of a snapshot"))
            }
            Operation::WriteFile { instance: _, name, text } => {
                self.name(name)?;
                if text.len() > MAX_TEXT_BYTES {
                    return refused(format!("a text of {} bytes is too long", text.len()));
                }
                Ok(())
            }
            Operation::Rename { instance: _, from, to } => {
                self.name(from)?;
                self.name(to)
            }
            Operation::TrimLog { instance: _, name, max_bytes: _ } => self.name(name),
            Operation::PunchLog { instance: _, name, max_bytes: _ } => self.opened(name, Some(Access::Read)),
            Operation::MakeReadOnly { instance: _, name } => match name.split_once('/') {
                Some((dir, file)) if is_snapshot(dir) && is_own(file) => Ok(()),
                _ => refused(format!("{name:?} is no file of a snapshot")),
            },
            Operation::LinkFile { instance: _, source, name } => {
                self.name(name)?;
                if self.demand.is_some() {
                    // Only a Firecracker without a jail follows one.
                    return refused("no VMM here is given a link to an image");
                }
                self.image(source)
            }
            Operation::MakeJail { jail, files } | Operation::ShareWithJail { jail, files } => {
                self.jail(jail)?;
                if files.len() > MAX_JAIL_FILES {
                    return refused(format!("{} files are too many for a jail", files.len()));
                }
                files.iter().try_for_each(|file| self.jail_file(jail, file))
            }
            Operation::UnshareFromJail { jail, names } => {
                self.jail(jail)?;
                if names.len() > MAX_JAIL_FILES {
                    return refused(format!("{} files are too many for a jail", names.len()));
                }
                names.iter().try_for_each(|name| jail_name(name))
            }
            Operation::RemoveJail { jail } => self.jail(jail),
            Operation::MakeDisk { instance: _, name, size_mib } => {
                self.name(name)?;
                if *size_mib == 0 || *size_mib > MAX_DISK_MIB {
                    return refused(format!("a disk of {size_mib} MiB is above the limit"));
                }
                Ok(())
            }
            Operation::DigHoles { instance: _, name } => self.name(name),
            // Whose template it is, is the agent's to know: it could read and write either one itself.
            Operation::ShareMemory { instance, template, memory, name } => {
                if instance == template {
                    return refused("an instance is not its own template");
                }
                let dir = memory.split_once('/').filter(|(_, file)| *file == MEMORY).map(|(dir, _)| dir);
                if !dir.is_some_and(is_snapshot) {
                    return refused(format!("{memory:?} is no memory of a snapshot"));
                }
                self.name(name)
            }
            Operation::SpawnVmm(spawn) => self.spawn(spawn),
            // Whether the process is one of ours is found out where processes can be looked at.
            Operation::EndProcess { process: _, signal: _ } => Ok(()),
            Operation::AdmitVmm { instance: _, user, files } => {
                self.vmm_id(*user)?;
                files.iter().try_for_each(|name| self.name(name))
            }
            // Ids are all that they are made of, and limits of one's own tenants are the agent's to set. Which disk is
            // limited is not: that is looked up here.
            Operation::EnsureGroup { group: _, limits } => io_limits(limits.io.as_ref()),
            Operation::LimitIo { group: _, limits } => io_limits(limits.as_ref()),
            Operation::EnsureTenantGroup { .. }
            | Operation::RemoveTenantGroup { .. }
            | Operation::RemoveGroup { .. }
            // Where a process is, anyone on this machine may read.
            | Operation::ConfirmGroup { .. }
            | Operation::LookAtGroups
            | Operation::TryNetwork => Ok(()),
            // What is whose in it is checked where it is put into the firewall.
            Operation::EnsureNet { net } | Operation::RemoveNet { net } => net_id(net.net_id),
            Operation::EnsurePort { net, port } => {
                net_id(net.net_id)?;
                self.port(port)
            }
            Operation::OpenPort { port } | Operation::RemovePort { port } => self.port(port),
            Operation::RemoveLink { name } => link_name(name),
            Operation::ProbeNet { net, port, others } => {
                net_id(net.net_id)?;
                if others.len() > MAX_PROBED {
                    return refused(format!("{} networks are too many for one probe", others.len()));
                }
                others.iter().try_for_each(|other| net_id(other.net_id))?;
                self.port(port)
            }
            Operation::KeepNetwork { wanted } => {
                wanted.nets.iter().try_for_each(|net| net_id(net.net_id))?;
                wanted.ports.iter().try_for_each(|port| self.port(port))?;
                wanted.hands_off.iter().try_for_each(|name| link_name(name))
            }
        }
    }

    /// A path in the image store. Which file that is, is found out where it is used.
    pub(super) fn image(&self, path: &Path) -> Result<(), HostError> {
        let inside = path.strip_prefix(&self.images_dir).is_ok_and(|inside| !inside.as_os_str().is_empty());
        if inside && is_straight(path) {
            return Ok(());
        }
        refused(format!("{} is not in the image store", path.display()))
    }

    /// Whether VMMs may run as this user or group.
    pub fn vmm_id(&self, id: u32) -> Result<(), HostError> {
        let known = self.vmm_ids.iter().any(|(first, last)| (*first..=*last).contains(&id));
        if id != 0 && id != self.agent_uid && known {
            return Ok(());
        }
        refused(format!("VMMs do not run as user or group {id}"))
    }

    /// `<run directory or base>/<program>/<instance>/root`, whatever its owner.
    fn jail(&self, jail: &Jail) -> Result<(), HostError> {
        self.vmm_id(jail.uid)?;
        self.vmm_id(jail.gid)?;
        let own = Path::new(jail.instance.as_str()).join("root");
        let run_dir = self.run_dir(&jail.instance);
        let below = |base: &Path| {
            let rest = jail.root.strip_prefix(base).ok()?.strip_prefix(rest_head(base, &jail.root)?).ok()?;
            (rest == own).then_some(())
        };
        let known = below(&run_dir).or_else(|| self.jail_base.as_deref().and_then(below));
        if is_straight(&jail.root) && known.is_some() {
            return Ok(());
        }
        refused(format!("{} is not a jail of {}", jail.root.display(), jail.instance))
    }

    fn jail_file(&self, jail: &Jail, file: &JailFile) -> Result<(), HostError> {
        jail_name(&file.name)?;
        if let Ok(own) = file.source.strip_prefix(self.run_dir(&jail.instance)) {
            return self.name(own.to_str().unwrap_or_default());
        }
        if file.writable {
            return refused(format!("{} is not the instance's to write", file.source.display()));
        }
        if let Ok(saved) = file.source.strip_prefix(self.data_dir.join(VMS_DIR)) {
            // A template's: an instance, and a file of its snapshot.
            let parts = saved.to_str().map(|saved| saved.split('/').collect::<Vec<_>>()).unwrap_or_default();
            return match parts[..] {
                [id, dir, name] if is_instance(id) && is_snapshot(dir) && is_own(name) => Ok(()),
                _ => refused(format!("{} is no file of a template", file.source.display())),
            };
        }
        self.image(&file.source)
    }

    /// Nothing in it may be weaker than the usual, but for the filter and what a machine can't do.
    fn confinement(&self, asked: &Confinement) -> Result<(), HostError> {
        self.vmm_id(asked.uid)?;
        let usual = Confinement::qemu(asked.uid, asked.uid);
        let usual = Confinement {
            images: asked.images.clone(),
            kvm: asked.kvm,
            filter: asked.filter,
            // What the operator was content with, the agent may ask for; more always.
            demand: match self.demand {
                Some(Demand::BestEffort) | None => asked.demand,
                Some(Demand::All) => Demand::All,
            },
            ..usual
        };
        if *asked != usual {
            return refused("a VMM is confined in the usual way or not started");
        }
        asked.images.iter().try_for_each(|image| self.image(image))
    }

    fn port(&self, port: &Port) -> Result<(), HostError> {
        net_id(port.net_id)?;
        self.vmm_id(port.owner_uid)
    }

    fn spawn(&self, spawn: &SpawnVmm) -> Result<(), HostError> {
        self.name(&spawn.log)?;
        if let Some(tap) = spawn.tap.as_deref().filter(|tap| place_of_tap(tap).is_none()) {
            return refused(format!("{tap:?} is no TAP of an instance"));
        }
        let program =
            self.programs.iter().find(|(program, _)| program.as_os_str() == spawn.program.as_os_str());
        let Some((_, kind)) = program else {
            return refused(format!("{} is no VMM that was named at start", spawn.program.display()));
        };
        match (kind, &spawn.confine) {
            (VmmProgram::Qemu, Some(confine)) => self.confinement(confine)?,
            // It confines what it starts.
            (VmmProgram::Jailer, None) => {}
            (VmmProgram::Qemu | VmmProgram::Firecracker, None) if self.demand.is_none() => {}
            (VmmProgram::Qemu, None) => return refused("QEMU is not started unconfined here"),
            (VmmProgram::Firecracker, _) => {
                return refused(
                    "Firecracker is started through its jailer here; install it beside Firecracker",
                );
            }
            (VmmProgram::Jailer, Some(_)) => return refused("the jailer is not confined itself"),
        }
        programs::check(&spawn.program, self)?;
        let long = spawn.args.iter().any(|arg| arg.len() > MAX_ARG_BYTES || arg.contains('\0'));
        if long || spawn.args.len() > MAX_ARGS {
            return refused("the command line is not one of a VMM");
        }
        let instance = &spawn.instance;
        if spawn.group.as_ref().is_some_and(|group| group.instance != *instance) {
            return refused(format!("{instance} is started in no other instance's control group"));
        }
        vmm_args::check(*kind, &Line { policy: self, instance, args: &spawn.args })
    }
}

/// As a document may say: less would leave a VMM that can't be ended while its writes wait.
fn io_limits(limits: Option<&IoLimits>) -> Result<(), HostError> {
    match limits {
        Some(limits) if !limits.is_sensible() => refused(format!("no document limits a disk to {limits:?}")),
        _ => Ok(()),
    }
}

fn net_id(id: u16) -> Result<(), HostError> {
    if id <= MAX_NET_ID { Ok(()) } else { refused(format!("there is no network {id}")) }
}

/// A name that a link of ours may have or may have been given. Whether it is ours is its tag's word.
fn link_name(name: &str) -> Result<(), HostError> {
    if is_plain(name) && name.len() <= MAX_LINK_NAME_BYTES {
        return Ok(());
    }
    refused(format!("{name:?} is no link"))
}

fn is_instance(name: &str) -> bool {
    name.parse::<InstanceId>().is_ok()
}

/// A plain name that no part of a jail has.
fn is_own(name: &str) -> bool {
    is_plain(name) && name != JAIL && !name.contains(JAILED) && !is_instance(name)
}

/// The directory of a snapshot.
fn is_snapshot(name: &str) -> bool {
    is_own(name) && name.starts_with(SNAPSHOT)
}

/// What the jailer puts there itself has the program's name in it, or one of these.
fn jail_name(name: &str) -> Result<(), HostError> {
    if is_own(name) && !JAILERS_OWN.contains(&name) {
        Ok(())
    } else {
        refused(format!("{name:?} is not a name in a jail"))
    }
}

/// The directory that the jailer names after its program.
fn rest_head<'a>(base: &Path, root: &'a Path) -> Option<&'a str> {
    let head = root.strip_prefix(base).ok()?.components().next()?.as_os_str().to_str()?;
    (is_plain(head) && head.contains(JAILED)).then_some(head)
}

#[cfg(test)]
#[path = "policy_tests.rs"]
mod tests;
