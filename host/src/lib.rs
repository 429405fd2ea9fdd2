//! Everything the agent does to the machine it runs on, as values.
//!
//! An [`Operation`] is serialisable and idempotent: a small privileged helper can carry it out for an agent that has
//! no privileges, and doing it again after a crash does no harm. Nothing else in this crate starts or ends a process,
//! or makes and removes what belongs to an instance. Talking to a VMM over its own socket is no operation.

mod access;
mod any;
pub mod cgroup;
pub mod crash;
mod data_dir;
#[cfg(feature = "network")]
mod fabric;
mod files;
#[cfg(feature = "network")]
pub mod firewall;
mod groups;
mod images;
mod jail;
#[cfg(feature = "network")]
pub mod links;
mod local;
mod memory;
pub mod network;
mod ownership;
pub mod privileges;
mod process;
mod remote;
pub mod sandbox;
mod spawn;
mod spawn_into;
#[cfg(test)]
mod tests;

use std::fs::File;
use std::future::Future;
use std::io;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use mvm_proto::document::IoLimits;
use mvm_proto::{InstanceId, TenantId};
use serde::{Deserialize, Serialize};

pub use access::{Access, JAIL};
pub use any::AnyHost;
use cgroup::{InstanceGroup, InstanceLimits, TenantLimits};
#[cfg(feature = "network")]
pub use fabric::{remove_firewall, try_network};
pub use files::{Dir, LogMarks, MARKS_SUFFIX, OpenHow, Owner, QuotaExceeded, fits, free_space};
pub use groups::GroupsFound;
pub use jail::{Jail, JailFile};
pub use local::LocalHost;
use network::{NetworkFound, NetworkWanted, Port, Probe, TenantNet};
pub use ownership::{Handover, can_be_handed_over, hand_over};
pub use process::boot_id;
pub use remote::{
    HELPER_THREADS, HelperError, Policy, RemoteHost, VmmProgram, run_helper, serve_helper, start_helper,
};
pub use sandbox::Confinement;
pub use spawn_into::{Child, spawn_into};

/// Which process, beyond doubt: a pid is used again, a start time under one boot is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks since the boot.
    pub start_time: u64,
    pub boot_id: String,
}

impl ProcessIdentity {
    /// The process that has this pid now, if any.
    pub fn of(pid: u32) -> io::Result<Option<Self>> {
        process::identify(pid)
    }

    /// Whether exactly this process lives. One that has ended but was not waited for does not.
    pub fn lives(&self) -> io::Result<bool> {
        process::lives(self)
    }

    /// Signals exactly this process. Whether it was there.
    pub fn signal(&self, signal: EndSignal) -> io::Result<bool> {
        process::signal(self, signal)
    }
}

/// The number under which a VMM finds the TAP that it was given.
pub const TAP_FD: i32 = 3;

/// What to run as an instance's VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnVmm {
    pub instance: InstanceId,
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Its working directory is the instance's run directory; this file in it takes what it prints.
    pub log: String,
    /// The TAP of its port, which it gets as the open file [`TAP_FD`].
    #[serde(default)]
    pub tap: Option<String>,
    /// The control group in which it is born.
    #[serde(default)]
    pub group: Option<InstanceGroup>,
    /// How it is kept apart; absent for what confines itself, as a jailer does.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub confine: Option<Confinement>,
}

/// How to end a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum EndSignal {
    Terminate,
    Kill,
}

/// One effect on the host. Names are of what lies in a run directory: `data.img`, `snapshot/memory`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", tag = "operation")]
pub enum Operation {
    /// The directory of an instance, with mode 0700. All of an instance's files lie in it.
    MakeRunDir {
        instance: InstanceId,
    },
    /// That directory and all in it. Never while a process of the instance lives.
    RemoveRunDir {
        instance: InstanceId,
    },
    /// One of its files, or a directory with all in it: a stale socket, a discarded snapshot.
    RemoveFile {
        instance: InstanceId,
        name: String,
    },
    /// A small file in it, whole for its readers; an existing one is replaced. Renaming makes it durable.
    WriteFile {
        instance: InstanceId,
        name: String,
        text: String,
    },
    /// A directory in it, empty: one that is there is emptied.
    MakeDir {
        instance: InstanceId,
        name: String,
    },
    /// Gives a file or directory in it another name, in place of what had that name, once all of it is on disk. One
    /// that already has the new name and not the old is done.
    Rename {
        instance: InstanceId,
        from: String,
        to: String,
    },
    /// Cuts a log that others append to once it is longer than `max_bytes`: its end is kept beside it, in `<name>.old`; and in
    /// `<name>.marks` how much was cut, and when it was how long.
    TrimLog {
        instance: InstanceId,
        name: String,
        max_bytes: u64,
    },
    /// Gives back to the disk all but the end of a log, in it or in its jail, whose writer keeps its own place in it: once
    /// more than `max_bytes` of it are on the disk. It stays as long as it is.
    PunchLog {
        instance: InstanceId,
        name: String,
        max_bytes: u64,
    },
    /// Takes a file of a snapshot from the VMM that wrote it: root's from here on, where root does this, and no other user's to
    /// write.
    MakeReadOnly {
        instance: InstanceId,
        name: String,
    },
    /// A symbolic link in it to a shared file; one that is there is replaced.
    LinkFile {
        instance: InstanceId,
        source: PathBuf,
        name: String,
    },
    /// A fresh jail with these files. Never while a process of the instance lives.
    MakeJail {
        jail: Jail,
        files: Vec<JailFile>,
    },
    /// More files for a jail that is in use.
    ShareWithJail {
        jail: Jail,
        files: Vec<JailFile>,
    },
    /// Takes names out of a jail that is in use; the files stay where they were shared from.
    UnshareFromJail {
        jail: Jail,
        names: Vec<String>,
    },
    /// A jail with all in it. Never while a process of the instance lives.
    RemoveJail {
        jail: Jail,
    },
    /// A sparse file in it, formatted as ext4; one that is there stays as it is.
    MakeDisk {
        instance: InstanceId,
        name: String,
        size_mib: u64,
    },
    /// Gives back to the disk what is nothing but zeros in a file of it.
    DigHoles {
        instance: InstanceId,
        name: String,
    },
    /// The memory of a template, under a second name in the run directory of an instance that is to be forked from it.
    /// From here on no one VMM owns it.
    ShareMemory {
        instance: InstanceId,
        template: InstanceId,
        memory: String,
        name: String,
    },
    /// What an instance has on disk, and how much more its file system can hold.
    MeasureDisk {
        instance: InstanceId,
    },
    /// What the VMMs of these instances cost this machine in memory. Dear: the kernel walks all of it.
    MeasureMemory {
        instances: Vec<InstanceId>,
    },
    /// Lets a VMM that runs as this user work in the run directory: make files of its own there, write these, and take
    /// away or replace none that is not its own.
    AdmitVmm {
        instance: InstanceId,
        user: u32,
        files: Vec<String>,
    },
    /// Starts a VMM that outlives the agent, unless the instance already has one.
    SpawnVmm(SpawnVmm),
    /// Signals exactly this process; one that is gone is done.
    EndProcess {
        process: ProcessIdentity,
        signal: EndSignal,
    },
    /// A tenant's control group with the sums of its quotas.
    EnsureTenantGroup {
        tenant: TenantId,
        limits: TenantLimits,
    },
    /// Gone afterwards. Never while an instance is left in it.
    RemoveTenantGroup {
        tenant: TenantId,
    },
    /// An instance's control group, in which its VMM is started.
    EnsureGroup {
        group: InstanceGroup,
        limits: InstanceLimits,
    },
    /// What an instance may do to the disk that it is kept on, from now on; absent: all. A group that is not there has
    /// nothing to limit. The operation does not name the disk: it is looked up where this is carried out.
    LimitIo {
        group: InstanceGroup,
        limits: Option<IoLimits>,
    },
    /// Fails unless this process is in the instance's control group, or in one below it. Where there are no control
    /// groups there is nothing to confirm.
    ConfirmGroup {
        group: InstanceGroup,
        process: ProcessIdentity,
    },
    /// Ends whatever is left in it, and removes it; its pool's too if that was the last.
    RemoveGroup {
        group: InstanceGroup,
    },
    /// What all groups have used, and which are there.
    LookAtGroups,
    /// Fails where the kernel can't make a tenant's network. Tried in a network namespace that is thrown away.
    TryNetwork,
    /// A tenant's bridge, and the firewall's knowledge of it.
    EnsureNet {
        net: TenantNet,
    },
    /// Both are gone afterwards. Never while a port is left in it.
    RemoveNet {
        net: TenantNet,
    },
    /// An instance's TAP in its tenant's bridge, known to the firewall and shut: nothing passes until it is opened.
    EnsurePort {
        net: TenantNet,
        port: Port,
    },
    /// From here on packets pass.
    OpenPort {
        port: Port,
    },
    RemovePort {
        port: Port,
    },
    /// A bridge or TAP that bears our tag and that no record owns.
    RemoveLink {
        name: String,
    },
    /// Sends packets as a hostile guest of the network would, from a port that is made for it and removed again.
    ProbeNet {
        net: TenantNet,
        port: Port,
        others: Vec<TenantNet>,
    },
    /// Looks at every link and rule of ours, and repairs what is not as it should be.
    KeepNetwork {
        wanted: NetworkWanted,
    },
}

/// What came of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Done,
    /// The VMM that runs now, whether it was just started or already there.
    Process(ProcessIdentity),
    /// What was found of the network, and what was repaired.
    Network(NetworkFound),
    Probed(Vec<Probe>),
    /// What there is of control groups, and what can't be limited on this machine.
    Groups(GroupsFound),
    /// The instance's control group is there; whether what it does to the disk is limited.
    Grouped {
        disk_limited: bool,
    },
    /// Absent: the instance has no run directory, and nothing on disk.
    Disk(Option<DiskUse>),
    /// Of those that have a VMM, in the order of ids.
    Memory(Vec<MemoryUse>),
}

/// What an instance's VMM costs in memory: its own pages whole, and of each that others map too its share.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MemoryUse {
    pub instance: InstanceId,
    pub bytes: u64,
}

/// What lies in a run directory, as blocks and not as lengths, and what its file system can still hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUse {
    pub used_bytes: u64,
    pub free_bytes: u64,
}

#[derive(Debug, thiserror::Error)]
pub enum HostError {
    #[error("could not {attempt}")]
    Io {
        attempt: String,
        #[source]
        cause: io::Error,
    },
    #[error("{program} was not found; install it or name it by setting")]
    ProgramMissing { program: PathBuf },
    #[error("refused: {0}")]
    Refused(String),
    #[error("could not change the network: {reason}")]
    Network { reason: String },
    #[error("could not change cgroups: {reason}")]
    Groups { reason: String },
}

/// A process that belongs to an instance of this data directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmProcess {
    pub instance: InstanceId,
    pub process: ProcessIdentity,
}

/// How a VMM ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessEnd {
    pub instance: InstanceId,
    pub process: ProcessIdentity,
    /// Known only for processes that this agent started itself.
    pub exit_code: Option<i32>,
    pub signal: Option<i32>,
}

/// Carries out operations on this machine and says what is there.
pub trait Host: Send + Sync + 'static {
    fn perform(&self, operation: &Operation) -> impl Future<Output = Result<Outcome, HostError>> + Send;

    /// Every VMM of this data directory, also of an earlier agent: found by working directory and instance name, not by a
    /// file that a crash may have kept from being written.
    fn vmms(&self) -> impl Future<Output = Result<Vec<VmmProcess>, HostError>> + Send;

    /// Processor time that exactly this process has taken; none: it is gone. Everyone may see that, and no helper is
    /// asked for it.
    fn cpu_time(&self, process: &ProcessIdentity) -> Option<Duration> {
        process::cpu_time(process)
    }

    /// Directories of instances, whether or not anything runs in them.
    fn run_dirs(&self) -> impl Future<Output = Result<Vec<InstanceId>, HostError>> + Send;

    fn run_dir(&self, instance: &InstanceId) -> PathBuf;

    /// Waits for the end of this very process; returns at once when it is gone.
    fn wait_end(&self, vmm: &VmmProcess) -> impl Future<Output = Result<ProcessEnd, HostError>> + Send;

    /// A file in a run directory, or in the jail there (`jail/NAME`), by a user that may open it. To read: none when it is
    /// not there. Links are not followed, and nothing but a regular file is opened.
    fn open_file(
        &self,
        instance: &InstanceId,
        name: &str,
        access: Access,
    ) -> impl Future<Output = Result<Option<File>, HostError>> + Send;

    /// A connection, not blocking, to a socket that a VMM listens on in its run directory or jail. A VMM that has no
    /// time for it now is [`io::ErrorKind::WouldBlock`].
    fn connect(
        &self,
        instance: &InstanceId,
        name: &str,
    ) -> impl Future<Output = Result<UnixStream, HostError>> + Send;

    /// What lies in a run directory, by name.
    fn names(&self, instance: &InstanceId) -> impl Future<Output = Result<Vec<String>, HostError>> + Send;

    /// Where the jail of an instance is, if it has one.
    fn jail_root(
        &self,
        instance: &InstanceId,
    ) -> impl Future<Output = Result<Option<PathBuf>, HostError>> + Send;
}
