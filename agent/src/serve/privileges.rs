//! Drops root: an agent that was started as root keeps one small privileged helper and continues as another user.
//!
//! [`give_up`] runs before there is a runtime or a second thread: it starts the helper first, then drops everything else. The
//! node's conditions show what is left. See `docs/privileges.md`.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::sync::Arc;

use mvm_vmm::programs::find_program;

pub use mvm_host::{HELPER_THREADS, run_helper};

use mvm_host::cgroup::CgroupSettings;
use mvm_host::network::VMM_USERS;
use mvm_host::privileges::{Account, drop_to};
use mvm_host::sandbox::Demand;
use mvm_host::{AnyHost, Handover, HostError, Policy, RemoteHost, VmmProgram, hand_over, start_helper};
use mvm_proto::Timestamp;
use mvm_proto::status::{Condition, ConditionKind};
use tracing::{info, warn};

use crate::isolation::{Effort, Machine};
use crate::serve::AgentError;
use crate::serve::settings::AgentSettings;
use mvm_vmm::DriverChoice;
use mvm_vmm::choice;
use mvm_vmm::firecracker::settings::DEFAULT_JAIL_USER;
use mvm_vmm::{DriverKind, FirecrackerSettings};

/// The user that an agent switches to if this machine has it and none was given.
pub const DEFAULT_USER: &str = "mvm";

pub(super) const ROOT: &str = "root";

/// What became of root's privileges.
#[derive(Debug, Clone, Default)]
pub enum Privileges {
    /// There were none: this process does what its user may.
    #[default]
    None,
    /// They are still there, in the process that speaks to the network.
    Kept { meant: bool },
    /// A helper has them, at the other end of this socket.
    Dropped { helper: Arc<OwnedFd>, user: String, machine: Machine },
}

impl Privileges {
    /// For `node info`; nothing where there was nothing to drop.
    #[must_use]
    pub fn condition(&self, now: Timestamp) -> Option<Condition> {
        let condition = |dropped, reason: &str, message| {
            Some(Condition::new(ConditionKind::PrivilegesDropped, dropped, reason, message, now))
        };
        match self {
            Self::None => None,
            Self::Kept { meant: true } => condition(false, "AsAsked", "started with --user root".to_owned()),
            Self::Kept { meant: false } => {
                let message = format!(
                    "there is no user {DEFAULT_USER}; the process that speaks to the network is root"
                );
                condition(false, "NoUser", message)
            }
            Self::Dropped { user, .. } => condition(true, "Helper", format!("runs as {user}, with a helper")),
        }
    }

    /// What root found of this machine before its rights were given up.
    pub(crate) fn looked(&self) -> Option<&Machine> {
        match self {
            Self::None | Self::Kept { .. } => None,
            Self::Dropped { machine, .. } => Some(machine),
        }
    }

    /// The host through which this agent changes the machine. Needs a runtime.
    pub(crate) fn host(&self, data_dir: &std::path::Path, groups: CgroupSettings) -> io::Result<AnyHost> {
        match self {
            Self::None | Self::Kept { .. } => Ok(AnyHost::local_with_groups(data_dir, groups)),
            Self::Dropped { helper, .. } => {
                let host = RemoteHost::new(helper.try_clone()?, data_dir)?;
                Ok(AnyHost::Remote(Arc::new(host)))
            }
        }
    }
}

/// Starts the helper and makes this process an ordinary one, if it is root's. `helper_args` are what this very program
/// takes to be the helper. Must come before any thread.
pub fn give_up(
    settings: &mut AgentSettings,
    user: Option<&str>,
    helper_args: &[&str],
) -> Result<(), AgentError> {
    settings.privileges = match (nix::unistd::geteuid().is_root(), user) {
        (false, None) => Privileges::None,
        (false, Some(user)) => return Err(AgentError::NotRoot { user: user.to_owned() }),
        (true, Some(ROOT)) => Privileges::Kept { meant: true },
        (true, _) => {
            let name = user.unwrap_or(DEFAULT_USER);
            let account = Account::find(name).map_err(AgentError::Privileges)?;
            match (account, user) {
                (Some(account), _) => drop_with_helper(settings, &account, helper_args)?,
                (None, Some(user)) => return Err(AgentError::NoUser { user: user.to_owned() }),
                (None, None) => {
                    warn!(
                        "there is no user {DEFAULT_USER}: this agent stays root; make one, or name one by --user (root \
                         to stay so without this warning)"
                    );
                    Privileges::Kept { meant: false }
                }
            }
        }
    };
    if !matches!(settings.privileges, Privileges::Dropped { .. }) {
        name_without_detours(settings);
    }
    Ok(())
}

/// Names the directories that an operator chose by paths on which no link lies: a confined VMM sees them by these.
fn name_without_detours(settings: &mut AgentSettings) {
    for dir in [&mut settings.images_dir, &mut settings.sessions_dir] {
        let real = dir.parent().and_then(|parent| parent.canonicalize().ok()).zip(dir.file_name());
        if let Some(real) = real.map(|(parent, name)| parent.join(name)) {
            *dir = real;
        }
    }
}

fn drop_with_helper(
    settings: &mut AgentSettings,
    account: &Account,
    helper_args: &[&str],
) -> Result<Privileges, AgentError> {
    let mut own =
        vec![settings.certs_dir.clone(), settings.images_dir.clone(), settings.sessions_dir.clone()];
    // A directory for the socket alone is made; one that is there is its owner's to open.
    own.extend(settings.socket.parent().filter(|dir| !dir.exists()).map(PathBuf::from));
    hand_over(&Handover { data_dir: &settings.data_dir, own }, account).map_err(AgentError::Privileges)?;
    // Only now: until the way there was looked at, links on it may have been the agent's.
    name_without_detours(settings);
    let policy = policy(settings, account).map_err(AgentError::Privileges)?;
    let program = std::env::current_exe().map_err(AgentError::Helper)?;
    let machine = Machine::look();
    let (child, socket) = start_helper(&program, helper_args, &policy).map_err(AgentError::Helper)?;
    drop_to(account).map_err(AgentError::Privileges)?;
    info!(user = account.name, helper = child.id(), "dropped all privileges");
    Ok(Privileges::Dropped { helper: Arc::new(socket), user: account.name.clone(), machine })
}

/// The helper's limits. Programs are found now, while it is sure who looks, and named for the rest of this life by paths
/// without links: those of the driver that the operator chose, or of each that may yet be.
fn policy(settings: &mut AgentSettings, account: &Account) -> Result<Policy, HostError> {
    let demand = demand(settings.isolation.jail);
    let (driver, vmm) = (settings.driver, &mut settings.vmm);
    let may_be = |kind| matches!(driver, DriverChoice::Auto) || driver == DriverChoice::Only(kind);
    let path = std::env::var_os("PATH");
    let find = |named: &mut Option<PathBuf>, name| {
        let found = find_program(named.as_deref(), name, path.as_deref()).ok()?;
        *named = Some(found.canonicalize().ok()?);
        named.clone()
    };
    let qemu = find(&mut vmm.qemu, choice::QEMU).filter(|_| may_be(DriverKind::Qemu));
    let jailer = FirecrackerSettings::with_programs(vmm).jailer;
    // One that is not there stays as it was named.
    let real = |program: &PathBuf| program.canonicalize().unwrap_or_else(|_| program.clone());
    vmm.jailer = jailer.as_ref().map(|jailer| real(&jailer.program));
    vmm.jailed = demand.is_some();
    // Without a jailer it is of no use where VMMs are confined.
    let usable = may_be(DriverKind::Firecracker) && (vmm.jailer.is_some() || demand.is_none());
    let firecracker = find(&mut vmm.firecracker, choice::FIRECRACKER).filter(|_| usable);
    let programs = [
        (qemu, VmmProgram::Qemu),
        (vmm.jailer.clone().filter(|_| firecracker.is_some()), VmmProgram::Jailer),
        (firecracker, VmmProgram::Firecracker),
    ];
    Ok(Policy {
        data_dir: settings.data_dir.clone(),
        images_dir: settings.images_dir.clone(),
        programs: programs.into_iter().filter_map(|(path, kind)| Some((path?, kind))).collect(),
        jail_base: jailer.and_then(|jailer| jailer.chroot_base),
        agent_uid: account.uid,
        agent_gids: account.groups()?,
        vmm_ids: vec![(DEFAULT_JAIL_USER, DEFAULT_JAIL_USER), VMM_USERS],
        demand,
        groups: Some(settings.isolation.groups()),
    })
}

/// What the operator demands of VMMs' confinement. Who says nothing has real guests confined by all there is.
fn demand(said: Option<Effort>) -> Option<Demand> {
    match said {
        None | Some(Effort::Required) => Some(Demand::All),
        Some(Effort::BestEffort) => Some(Demand::BestEffort),
        Some(Effort::None) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    fn kinds(driver: DriverChoice, jail: Option<Effort>, jailer: bool) -> (Vec<VmmProgram>, Option<Demand>) {
        let dir = tempfile::tempdir().unwrap();
        // As versions of a program are often installed: by a link to the one that is used.
        let program = |name: &str| {
            let (path, link) = (dir.path().join(format!("{name}-1.2")), dir.path().join(name));
            std::fs::write(&path, "#!/bin/sh\n").unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            std::os::unix::fs::symlink(&path, &link).unwrap();
            Some(link)
        };
        let mut settings = AgentSettings::new(dir.path());
        settings.driver = driver;
        settings.isolation.jail = jail;
        (settings.vmm.qemu, settings.vmm.firecracker) = (program("qemu"), program("firecracker"));
        settings.vmm.jailer = jailer.then(|| program("jailer")).flatten();
        let account = Account { name: "nobody".to_owned(), uid: 65_534, gid: 65_534 };
        let policy = policy(&mut settings, &account).unwrap();
        assert_eq!(policy.agent_gids, [65_534]);
        for (program, kind) in &policy.programs {
            assert!(program.to_str().unwrap().ends_with("-1.2"), "{}", program.display());
            let named = match kind {
                VmmProgram::Qemu => &settings.vmm.qemu,
                VmmProgram::Firecracker => &settings.vmm.firecracker,
                VmmProgram::Jailer => &settings.vmm.jailer,
            };
            assert_eq!(
                named.as_ref(),
                Some(program),
                "the driver asks for it by the path that the helper has"
            );
        }
        assert_eq!(settings.vmm.jailed, policy.demand.is_some());
        (policy.programs.into_iter().map(|(_, kind)| kind).collect(), policy.demand)
    }

    #[test]
    fn a_helper_knows_the_programs_of_its_driver_and_firecracker_only_with_its_jailer() {
        use VmmProgram::{Firecracker, Jailer, Qemu};
        let (qemu, firecracker) =
            (DriverChoice::Only(DriverKind::Qemu), DriverChoice::Only(DriverKind::Firecracker));
        let auto = DriverChoice::Auto;
        let (all, best) = (Some(Demand::All), Some(Demand::BestEffort));
        assert_eq!(kinds(auto, None, true), (vec![Qemu, Jailer, Firecracker], all));
        assert_eq!(kinds(qemu, Some(Effort::Required), true), (vec![Qemu], all));
        assert_eq!(kinds(firecracker, Some(Effort::BestEffort), true), (vec![Jailer, Firecracker], best));
        assert_eq!(kinds(DriverChoice::Only(DriverKind::Fake), None, true), (vec![], all));
        // One in PATH would be taken where it can work.
        if mvm_needs::can_run(&[mvm_needs::Need::NoProgram("jailer")]) {
            assert_eq!(kinds(auto, Some(Effort::Required), false), (vec![Qemu], all));
            assert_eq!(kinds(firecracker, Some(Effort::BestEffort), false), (vec![], best));
            assert_eq!(kinds(auto, Some(Effort::None), false), (vec![Qemu, Firecracker], None));
        }
    }
}
