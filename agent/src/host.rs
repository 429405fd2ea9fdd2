//! Everything the agent does to the machine it runs on, as values.
//!
//! An [`Operation`] is serialisable and idempotent: a small privileged helper can carry it out for an agent that has
//! no privileges, and doing it again after a crash does no harm. Nothing else in this crate starts or ends a process,
//! or makes and removes what belongs to an instance. Talking to a VMM over its own socket is no operation.

mod files;
mod jail;
mod local;
mod process;
mod spawn;
#[cfg(test)]
mod tests;

use std::future::Future;
use std::io;
use std::path::PathBuf;

use mvm_proto::InstanceId;
use serde::{Deserialize, Serialize};

pub(crate) use jail::JAIL;
pub use jail::{Jail, JailFile};
pub use local::LocalHost;
pub(crate) use process::boot_id;

/// Which process, beyond doubt: a pid is used again, a start time under one boot is not.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessIdentity {
    pub pid: u32,
    /// Field 22 of `/proc/PID/stat`: clock ticks since the boot.
    pub start_time: u64,
    pub boot_id: String,
}

/// What to run as an instance's VMM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SpawnVmm {
    pub instance: InstanceId,
    pub program: PathBuf,
    pub args: Vec<String>,
    /// Its working directory is the instance's run directory; this file in it takes what it prints.
    pub log: String,
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
    MakeRunDir { instance: InstanceId },
    /// That directory and all in it. Never while a process of the instance lives.
    RemoveRunDir { instance: InstanceId },
    /// One of its files, or a directory with all in it: a stale socket, a discarded snapshot.
    RemoveFile { instance: InstanceId, name: String },
    /// A small file in it, whole for whoever reads it; one that is there is replaced. Renaming makes it durable.
    WriteFile { instance: InstanceId, name: String, text: String },
    /// A directory in it, empty: one that is there is emptied.
    MakeDir { instance: InstanceId, name: String },
    /// Gives a file or directory in it another name, in place of what had that name, once all of it is on disk. One
    /// that already has the new name and not the old is done.
    Rename { instance: InstanceId, from: String, to: String },
    /// Cuts a log that others append to once it is longer than `max_bytes`: its end is kept beside it, in `<name>.old`.
    TrimLog { instance: InstanceId, name: String, max_bytes: u64 },
    /// A symbolic link in it to a shared file; one that is there is replaced.
    LinkFile { instance: InstanceId, source: PathBuf, name: String },
    /// A fresh jail with these files. Never while a process of the instance lives.
    MakeJail { jail: Jail, files: Vec<JailFile> },
    /// More files for a jail that is in use.
    ShareWithJail { jail: Jail, files: Vec<JailFile> },
    /// Takes names out of a jail that is in use; the files stay where they were shared from.
    UnshareFromJail { jail: Jail, names: Vec<String> },
    /// A jail with all in it, and the control groups that its jailer left. Never while a process of the instance lives.
    RemoveJail { jail: Jail },
    /// A sparse file in it, formatted as ext4; one that is there stays as it is.
    MakeDisk { instance: InstanceId, name: String, size_mib: u64 },
    /// Starts a VMM that outlives the agent, unless the instance already has one.
    SpawnVmm(SpawnVmm),
    /// Signals exactly this process; one that is gone is done.
    EndProcess { process: ProcessIdentity, signal: EndSignal },
}

/// What came of an operation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Outcome {
    Done,
    /// The VMM that runs now, whether it was just started or already there.
    Process(ProcessIdentity),
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

    /// Every VMM of this data directory, whoever started it: found by working directory and instance name, not by a
    /// file that a crash may have kept from being written.
    fn vmms(&self) -> impl Future<Output = Result<Vec<VmmProcess>, HostError>> + Send;

    /// Directories of instances, whether or not anything runs in them.
    fn run_dirs(&self) -> impl Future<Output = Result<Vec<InstanceId>, HostError>> + Send;

    fn run_dir(&self, instance: &InstanceId) -> PathBuf;

    /// Waits for the end of this very process; returns at once when it is gone.
    fn wait_end(&self, vmm: &VmmProcess) -> impl Future<Output = Result<ProcessEnd, HostError>> + Send;
}
