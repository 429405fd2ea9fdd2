//! What a VMM finds once a hostile guest has taken it over: nothing.
//!
//! A [`Confinement`] says who a VMM runs as and what it may see; it is a value, part of the operation that starts the
//! VMM. The layers do not lean on each other, so that a hole in one is no way out:
//!
//! - a user of its own, without any capability and with no way to one;
//! - namespaces of its own: no processes, no network, no shared memory; its TAP is an open file;
//! - a root directory with its program, libraries, firmware and images to read, its run directory to write, and four
//!   devices. No `/proc`, no `/sys`, no shell, and nothing that can be executed from where it can write;
//! - Landlock, which says the same of files once more, by what they are and not by what is mounted where;
//! - a filter on system calls (`filter.rs` says which);
//! - limits on files, threads, locked memory and dumps.
//!
//! [`probe`] tells what of this the machine can do. What it can't is refused, or with [`Demand::BestEffort`] left out
//! and named: a VMM is never weaker in silence.
//!
//! One program is executed, once. After that the filter forbids it: `execve` altogether, and `execveat` but from one
//! descriptor whose number is at the limit of open files, so that no process can ever have it again; and Landlock lets
//! nothing be executed but that same program and its loader. So the filter can be there before the program is, and
//! nothing of it depends on what the program does.

pub(crate) mod enter;
mod filter;
mod filter_lists;
mod landlock;
mod loader;
mod measures;
mod prepare;
mod probe;
mod root;

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

pub(crate) use measures::Measures;
pub(crate) use prepare::{Prepared, Seen, prepare};
pub use probe::{Capabilities, Namespace, probe};

/// Where Debian and others keep what QEMU needs: libraries with their cache, and firmware. What is not there is left out.
const QEMU_NEEDS: [&str; 7] =
    ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/qemu", "/usr/share/seabios", "/etc/ld.so.cache"];

/// How a VMM is kept apart.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Confinement {
    /// Its own: of no other instance and no other process on the machine. Never 0.
    pub uid: u32,
    /// The agent's group: with a umask of 0007 it reaches the VMM's sockets and files by it.
    pub gid: u32,
    pub umask: u32,
    /// Files to read, seen under their own paths. They must be readable by `uid` or `gid`.
    pub images: Vec<PathBuf>,
    /// Libraries and firmware to read, seen under their own paths; absent ones are left out.
    pub needs: Vec<PathBuf>,
    /// Whether it sees `/dev/kvm`.
    pub kvm: bool,
    pub filter: Filter,
    pub limits: Limits,
    /// Who goes first when memory is short: from -1000 (never) to 1000.
    pub oom_score: i16,
    pub demand: Demand,
}

impl Confinement {
    /// As a QEMU of this user needs it, with everything that there is.
    #[must_use]
    pub fn qemu(uid: u32, gid: u32) -> Self {
        Self {
            uid,
            gid,
            umask: 0o007,
            images: Vec::new(),
            needs: QEMU_NEEDS.map(PathBuf::from).to_vec(),
            kvm: false,
            filter: Filter::Strict,
            limits: Limits::default(),
            oom_score: 500,
            demand: Demand::All,
        }
    }
}

/// Which system calls are left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Filter {
    /// All but what no VMM needs.
    Baseline,
    /// What QEMU was seen to use, from boot to the end; any other ends the process.
    Strict,
}

/// What comes of the holes that a VMM makes in files. Not the agent's to say: it follows from the command line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Holes {
    /// They are holes.
    Made,
    /// It is told so, and the files stay as they are.
    Pretended,
}

/// What happens where the machine can't do all of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Demand {
    /// The VMM is not started.
    All,
    /// It is started with what there is, and what is missing is told.
    BestEffort,
}

/// What it may take. A limit that is above this process's own is cut to that.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Limits {
    pub open_files: u64,
    /// Of one file: at least its largest disk. No limit when absent.
    pub file_bytes: Option<u64>,
    /// Threads, of all processes of its user.
    pub threads: u64,
    pub locked_bytes: u64,
}

impl Default for Limits {
    fn default() -> Self {
        // Threads: processors, and up to 64 for disks. TCG and KVM lock no memory.
        Self { open_files: 1024, file_bytes: None, threads: 512, locked_bytes: 64 * 1024 }
    }
}

/// What a VMM was started without.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case")]
pub enum Weaker {
    #[error(
        "it has the user, the files and the namespaces of the agent: that one is not privileged ({missing})"
    )]
    Unprivileged { missing: String },
    #[error("the VMM shares the host's {0} namespace: this kernel can't create a new one")]
    Namespace(Namespace),
    #[error("Landlock is not enabled in this kernel")]
    NoLandlock,
    #[error("Landlock version {abi} of this kernel can't restrict {without}")]
    OldLandlock { abi: u32, without: String },
    #[error("this kernel does not filter system calls")]
    NoFilter,
}

impl Weaker {
    /// Whether another layer does the same; then it is told, and no reason to refuse.
    #[must_use]
    pub fn is_minor(&self) -> bool {
        matches!(self, Self::OldLandlock { .. })
    }
}
