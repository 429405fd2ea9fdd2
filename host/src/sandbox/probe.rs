//! What this machine can do to keep a VMM apart. Tried, not looked up: a kernel may have what a filter around this
//! process forbids.

use std::fmt;

use nix::libc;
use rustix::thread::CapabilitySet;
use serde::{Deserialize, Serialize};

use crate::spawn::sys;
use crate::spawn_into;

/// What a process can have of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Namespace {
    Mount,
    Pid,
    Ipc,
    Uts,
    Network,
    Cgroup,
}

impl Namespace {
    pub const ALL: [Self; 6] = [Self::Mount, Self::Pid, Self::Ipc, Self::Uts, Self::Network, Self::Cgroup];

    pub(super) fn flag(self) -> u64 {
        let flag = match self {
            Self::Mount => libc::CLONE_NEWNS,
            Self::Pid => libc::CLONE_NEWPID,
            Self::Ipc => libc::CLONE_NEWIPC,
            Self::Uts => libc::CLONE_NEWUTS,
            Self::Network => libc::CLONE_NEWNET,
            Self::Cgroup => libc::CLONE_NEWCGROUP,
        };
        u64::from(flag.cast_unsigned())
    }
}

impl fmt::Display for Namespace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Mount => "mount",
            Self::Pid => "pid",
            Self::Ipc => "ipc",
            Self::Uts => "uts",
            Self::Network => "network",
            Self::Cgroup => "cgroup",
        })
    }
}

/// What there is to confine a VMM with.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Capabilities {
    /// Rights that this process lacks; with none missing it can give a VMM a user and a root of its own.
    pub missing: Vec<String>,
    pub namespaces: Vec<Namespace>,
    /// The version of Landlock, if it is switched on.
    pub landlock: Option<u32>,
    pub seccomp: bool,
}

const NEEDED: [(CapabilitySet, &str); 6] = [
    (CapabilitySet::SYS_ADMIN, "CAP_SYS_ADMIN"),
    (CapabilitySet::SETUID, "CAP_SETUID"),
    (CapabilitySet::SETGID, "CAP_SETGID"),
    (CapabilitySet::SETPCAP, "CAP_SETPCAP"),
    (CapabilitySet::MKNOD, "CAP_MKNOD"),
    (CapabilitySet::CHOWN, "CAP_CHOWN"),
];

/// Tries it all out. Takes some milliseconds: ask once and keep the answer.
#[must_use]
pub fn probe() -> Capabilities {
    let held = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    let missing = NEEDED.iter().filter(|(right, _)| !held.contains(*right));
    let missing: Vec<_> = missing.map(|(_, name)| (*name).to_owned()).collect();
    let all = Namespace::ALL.iter().fold(0, |flags, namespace| flags | namespace.flag());
    let namespaces = if !missing.is_empty() {
        Vec::new()
    } else if spawn_into::is_possible(all) {
        Namespace::ALL.to_vec()
    } else {
        Namespace::ALL.into_iter().filter(|namespace| spawn_into::is_possible(namespace.flag())).collect()
    };
    Capabilities { missing, namespaces, landlock: sys::landlock_abi(), seccomp: sys::can_filter() }
}
