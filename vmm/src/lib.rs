//! The seam to what runs microVMs.
//!
//! [`Driver`] is all that the rest of the agent knows of a VMM. [`AnyDriver`] is the choice made at start: a driver
//! that this build or this machine does not have is refused there by name, and never replaced by a weaker one.
//! Every implementation passes [`conformance::suite`].

pub mod at_rest;
mod capability;
pub mod choice;
pub mod conformance;
pub mod crash;
pub mod fake;
pub mod firecracker;
pub mod probe;
pub mod programs;
pub mod qemu;
pub mod run_files;
pub mod settings;
pub mod snapshot_key;

use std::fmt;
use std::fs::File;
use std::future::Future;
use std::io;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use mvm_host::cgroup::InstanceGroup;
use mvm_host::sandbox::{Demand, Filter};
use mvm_host::{AnyHost, HostError};
use mvm_image::BootImage;
use mvm_proto::document::Resources;
use mvm_proto::{Digest, InstanceId};
use serde::{Deserialize, Serialize};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::broadcast;

use crate::snapshot_key::KeyError;

pub use at_rest::{AtRest, Keeping};
pub use capability::Capability;
pub use fake::FakeDriver;
pub use firecracker::{FirecrackerDriver, FirecrackerSettings, FirecrackerUnavailable};
pub use qemu::{QemuDriver, QemuSettings};
pub use settings::{DriverChoice, UnknownDriverChoice, VmmSettings};

/// What a VMM forked is seen as its instance's only when the VMM is gone: ending one looks again this often at most.
const GENERATIONS: usize = 3;

/// What a VMM is told to boot. Everything in it is decided before the driver is called.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmSpec {
    pub instance: InstanceId,
    /// What the guest is made of; a snapshot of another revision is never restored.
    pub revision: Digest,
    pub resources: Resources,
    pub image: BootImage,
    /// What the VM is kept within.
    #[serde(default)]
    pub bounds: Bounds,
    #[serde(default)]
    pub purpose: Purpose,
}

/// What a VM is for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Purpose {
    /// To live.
    #[default]
    Instance,
    /// To be saved once and forked from: it is no one, and never runs after that.
    Template,
}

/// What a VM is kept within, and its only ways out.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Bounds {
    /// Absent: it has no network card.
    pub nic: Option<Nic>,
    /// The control group that its VMM is born in; absent: the agent's own.
    #[serde(default)]
    pub group: Option<InstanceGroup>,
    /// How its VMM is confined; absent: not at all, or by a jailer with settings of its own.
    #[serde(default)]
    pub jail: Option<VmmJail>,
    /// What it may do to the host's disk is limited: then its data disk goes past the host's page cache. What waits there is
    /// charged to who first had it in memory, and need not be this VMM.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub direct_disk: bool,
}

/// Who a VMM runs as, and what is left to it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct VmmJail {
    /// A user, and a group of the same number, that nobody else on this machine has.
    pub user: u32,
    pub filter: Filter,
    pub demand: Demand,
}

/// A network card, and the TAP behind it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Nic {
    pub tap: String,
    pub mac: String,
}

/// A stream to the program inside a guest, fresh and not yet greeted. At most one per guest is served at a time.
pub type GuestStream = Box<dyn GuestBytes>;

/// What a [`GuestStream`] can do.
pub trait GuestBytes: AsyncRead + AsyncWrite + Send + Unpin + 'static {}

impl<T: AsyncRead + AsyncWrite + Send + Unpin + 'static> GuestBytes for T {}

/// A VM ended that nobody asked to end, or one that was asked to: whoever follows knows which.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmExit {
    pub instance: InstanceId,
    /// For people: the exit code or signal as far as known, and the end of the VMM's own log.
    pub detail: String,
}

/// What a VM does now. There is none for an instance that has no VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum VmState {
    Running,
    Paused,
}

/// A live VM, as the driver sees it on this host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Vm {
    pub instance: InstanceId,
    pub revision: Digest,
    pub state: VmState,
}

/// Names a snapshot that was written whole.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SnapshotRef {
    pub instance: InstanceId,
    pub revision: Digest,
    /// Of this snapshot and no other, not even one of the same memory.
    pub digest: Digest,
}

/// One file of what an instance is while it sleeps, open to be read.
#[derive(Debug)]
pub struct Part {
    pub name: String,
    pub file: File,
}

#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    #[error("{instance} has no VM to {action}")]
    NoVm { instance: InstanceId, action: &'static str },
    #[error("{instance} is {found:?} and can't {action}")]
    WrongState { instance: InstanceId, action: &'static str, found: VmState },
    #[error("{instance} already runs revision {running}, not {asked}")]
    OtherRevision { instance: InstanceId, running: Digest, asked: Digest },
    #[error("{instance} has no snapshot {digest}")]
    NoSnapshot { instance: InstanceId, digest: Digest },
    /// It is there, and never will be of use here: damaged, or made for something else.
    #[error("the snapshot of {instance} can't be used: {reason}")]
    Unusable { instance: InstanceId, reason: String },
    /// It is there and may be whole: it can be used once the key is there.
    #[error("could not {action} {instance} without its tenant's key")]
    Key {
        instance: InstanceId,
        action: &'static str,
        #[source]
        cause: KeyError,
    },
    #[error("could not {action} {instance}")]
    Io {
        instance: InstanceId,
        action: &'static str,
        #[source]
        cause: io::Error,
    },
    #[error("{instance}: {reason}")]
    Vmm { instance: InstanceId, reason: String },
    /// The VMM's own socket did not answer in time: stuck, not gone.
    #[error("the VMM of {instance} did not answer {action} within {waited:?}")]
    Stuck { instance: InstanceId, action: &'static str, waited: Duration },
    #[error("could not look for VMs")]
    List {
        #[source]
        cause: HostError,
    },
    #[error("could not {action} {instance}")]
    Host {
        instance: InstanceId,
        action: &'static str,
        #[source]
        cause: HostError,
    },
}

/// Runs microVMs on this host. Every call is idempotent: asking twice is asking once.
///
/// Calls for different instances may overlap; the caller never overlaps calls for one instance.
pub trait Driver: Send + Sync + 'static {
    fn kind(&self) -> DriverKind;

    /// Every VM of this driver that lives on this host, whoever started it. One that it knew and that has ended is told by
    /// [`Self::exits`] before it is missing here.
    fn list(&self) -> impl Future<Output = Result<Vec<Vm>, DriverError>> + Send;

    /// Every instance of which this driver keeps anything on this host, with a VM or without.
    fn kept(&self) -> impl Future<Output = Result<Vec<InstanceId>, DriverError>> + Send;

    /// Takes over the VM of `instance` if it lives: after a restart of the agent, its VMs are there but not its handles.
    fn adopt(&self, instance: &InstanceId) -> impl Future<Output = Result<Option<Vm>, DriverError>> + Send;

    /// Boots a VM, or finds the one that already runs from the same revision. A paused one stays paused.
    fn boot(&self, spec: &VmSpec) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Stops the vCPUs; memory stays. The guest must already be drained.
    fn pause(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Lets the vCPUs run. A guest that gave memory back can have it again from then on.
    fn resume(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Asks a running guest to give back memory until it has `keep_mib` left, and waits for as long as it goes on doing so, at
    /// most `within`. Says what it has left then; absent: this guest can't give any back, as those of most drivers can't.
    fn reclaim(
        &self,
        _instance: &InstanceId,
        _keep_mib: u64,
        _within: Duration,
    ) -> impl Future<Output = Result<Option<u64>, DriverError>> + Send {
        std::future::ready(Ok(None))
    }

    /// Whether memory can be kept encrypted. Then none of it is ever on a disk in clear.
    fn can_encrypt(&self) -> bool {
        self.kind().lacks(Capability::Encryption).is_none()
    }

    /// Writes a paused guest's memory and device state, encrypted if that is asked for. The VM lives on, paused, until
    /// it is killed.
    fn snapshot(
        &self,
        instance: &InstanceId,
        keeping: &Keeping,
    ) -> impl Future<Output = Result<SnapshotRef, DriverError>> + Send;

    /// Has a snapshot that is being written end early, if it can: [`Self::snapshot`] then fails, and leaves nothing. The
    /// only call that may overlap another for the same instance. Where nothing is being written nothing is done.
    fn stop_snapshot(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// A paused VM made from a snapshot, which says itself how it was kept; the snapshot stays until it is discarded.
    /// Without its key it fails with [`DriverError::Key`].
    fn restore(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        keeping: &Keeping,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Whether VMs can be forked. Then every instance is.
    fn can_fork(&self) -> bool;

    /// A paused VM of `spec` made from another's snapshot, the template's: it shares the template's memory until it
    /// writes to it. The template's snapshot stays; once this is there it may go.
    fn fork(
        &self,
        spec: &VmSpec,
        template: &SnapshotRef,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Compresses an instance's snapshot if that is asked for, and notes what it hashes to, in the time it takes and
    /// unless it was done before. Ends early, and does no harm, when the snapshot is used or discarded meanwhile.
    fn seal_snapshot(
        &self,
        instance: &InstanceId,
        keeping: &Keeping,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Deletes the instance's snapshot, if there is one.
    fn discard_snapshot(&self, instance: &InstanceId)
    -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Why what sleeps can't be carried to another node; absent: it can.
    fn immovable(&self) -> Option<&'static str> {
        self.kind().lacks(Capability::Moves)
    }

    /// All files that a sleeping instance is made of, its data disk included: what another node needs to restore it.
    /// A snapshot that could not be restored here is not handed out.
    fn export(&self, snapshot: &SnapshotRef) -> impl Future<Output = Result<Vec<Part>, DriverError>> + Send;

    /// Makes a place for an instance that comes from another node, in place of whatever is left of one of its name.
    fn begin_import(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// A new file for a part of it, to be written. A name that no part can have is refused.
    fn import_part(
        &self,
        instance: &InstanceId,
        name: &str,
    ) -> impl Future<Output = Result<File, DriverError>> + Send;

    /// Makes the parts, written whole, the snapshot of an instance that sleeps here, if it fits what is here. `exported`
    /// names the snapshot where it was made; the answer names it here. Until then nothing of it can be restored, and
    /// [`Driver::remove`] takes all of it away. Without its key it fails with [`DriverError::Key`], and in clear it is
    /// refused where `keeping` asks for encryption.
    fn import(
        &self,
        spec: &VmSpec,
        exported: &SnapshotRef,
        keeping: &Keeping,
    ) -> impl Future<Output = Result<SnapshotRef, DriverError>> + Send;

    /// Asks the guest to shut down and waits up to `grace`, then kills. A paused guest is killed at once.
    fn stop(
        &self,
        instance: &InstanceId,
        grace: Duration,
    ) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Ends the VM now.
    fn kill(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// Removes everything the driver keeps for an instance: VM, snapshot, console, disk.
    fn remove(&self, instance: &InstanceId) -> impl Future<Output = Result<(), DriverError>> + Send;

    /// A stream to the guest's own program. Fails with [`DriverError::NoVm`] when there is no VM; a guest that is not
    /// up yet, or paused, is no error: what is sent waits.
    fn guest(&self, instance: &InstanceId) -> impl Future<Output = Result<GuestStream, DriverError>> + Send;

    /// Tells every VM's end, as it happens. One that is missed shows in [`Driver::list`].
    fn exits(&self) -> broadcast::Receiver<VmExit>;

    /// Processor time that the VMM of `instance` has taken since it was started; absent: it has none, or it is not known.
    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration>;

    /// The end of what the guest wrote to its console, at most `max_bytes`.
    fn console(
        &self,
        instance: &InstanceId,
        max_bytes: usize,
    ) -> impl Future<Output = Result<Vec<u8>, DriverError>> + Send;
}

/// Which driver is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverKind {
    /// In memory, with state and laws; runs no guest.
    #[default]
    Fake,
    Qemu,
    Firecracker,
}

impl DriverKind {
    pub const ALL: [DriverKind; 3] = [DriverKind::Fake, DriverKind::Qemu, DriverKind::Firecracker];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            DriverKind::Fake => "fake",
            DriverKind::Qemu => "qemu",
            DriverKind::Firecracker => "firecracker",
        }
    }

    /// Whether instances use the host's processors, memory and disk: then the host's size is the node's capacity.
    #[must_use]
    pub fn uses_host_resources(self) -> bool {
        self != DriverKind::Fake
    }
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no driver of this name; known are fake, qemu and firecracker")]
pub struct UnknownDriver;

impl FromStr for DriverKind {
    type Err = UnknownDriver;
    fn from_str(text: &str) -> Result<Self, UnknownDriver> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(UnknownDriver)
    }
}

/// Why a driver can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverUnavailable {
    #[error(transparent)]
    Firecracker(#[from] FirecrackerUnavailable),
    #[error(
        "could not open the driver's state {path}; if the file is damaged, move it away to start without VMs"
    )]
    State {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// The driver chosen at start.
#[derive(Debug)]
pub enum AnyDriver {
    Fake(FakeDriver),
    Qemu(QemuDriver<AnyHost>),
    Firecracker(FirecrackerDriver<AnyHost>),
}

/// Where the fake driver keeps its VMs, below the data directory.
const FAKE_DIR: &str = "fake-vms";

impl AnyDriver {
    /// Opens exactly the driver asked for, with its state under `data_dir`.
    pub fn open(kind: DriverKind, data_dir: &Path) -> Result<Self, DriverUnavailable> {
        Self::open_on(kind, AnyHost::local(data_dir), data_dir, &VmmSettings::default())
    }

    /// The same with programs that the operator named, by whoever may do things to this machine.
    pub fn open_on(
        kind: DriverKind,
        host: AnyHost,
        data_dir: &Path,
        vmm: &VmmSettings,
    ) -> Result<Self, DriverUnavailable> {
        match kind {
            DriverKind::Fake => {
                tracing::warn!("the fake driver runs no guests: instances exist on paper only");
                FakeDriver::open(&data_dir.join(FAKE_DIR)).map(|fake| Self::Fake(fake.with_forks()))
            }
            DriverKind::Qemu => Ok(Self::Qemu(QemuDriver::on(host, data_dir, QemuSettings::new(vmm)))),
            DriverKind::Firecracker => Self::firecracker(host, vmm),
        }
    }

    fn firecracker(host: AnyHost, vmm: &VmmSettings) -> Result<Self, DriverUnavailable> {
        let settings = FirecrackerSettings::with_programs(vmm);
        Ok(Self::Firecracker(FirecrackerDriver::with_host(host, settings)?))
    }

    /// The same without touching the host: for a dry run, which must leave no trace.
    pub fn peek(kind: DriverKind, data_dir: &Path, vmm: &VmmSettings) -> Result<Self, DriverUnavailable> {
        match kind {
            DriverKind::Fake => FakeDriver::peek(&data_dir.join(FAKE_DIR)).map(Self::Fake),
            // Looking at real VMs leaves no trace.
            DriverKind::Qemu => {
                Ok(Self::Qemu(QemuDriver::peek(AnyHost::local(data_dir), QemuSettings::new(vmm))))
            }
            DriverKind::Firecracker => Self::firecracker(AnyHost::local(data_dir), vmm),
        }
    }
}

/// The same call on whichever driver it is.
macro_rules! each {
    ($any:expr, $driver:ident => $call:expr) => {
        match $any {
            AnyDriver::Fake($driver) => $call,
            AnyDriver::Qemu($driver) => $call,
            AnyDriver::Firecracker($driver) => $call,
        }
    };
}

impl Driver for AnyDriver {
    fn kind(&self) -> DriverKind {
        each!(self, driver => driver.kind())
    }

    async fn list(&self) -> Result<Vec<Vm>, DriverError> {
        each!(self, driver => driver.list().await)
    }

    async fn kept(&self) -> Result<Vec<InstanceId>, DriverError> {
        each!(self, driver => driver.kept().await)
    }

    async fn adopt(&self, instance: &InstanceId) -> Result<Option<Vm>, DriverError> {
        each!(self, driver => driver.adopt(instance).await)
    }

    async fn boot(&self, spec: &VmSpec) -> Result<(), DriverError> {
        each!(self, driver => driver.boot(spec).await)
    }

    async fn pause(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.pause(instance).await)
    }

    async fn resume(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.resume(instance).await)
    }

    async fn reclaim(
        &self,
        instance: &InstanceId,
        keep_mib: u64,
        within: Duration,
    ) -> Result<Option<u64>, DriverError> {
        each!(self, driver => driver.reclaim(instance, keep_mib, within).await)
    }

    fn can_encrypt(&self) -> bool {
        each!(self, driver => driver.can_encrypt())
    }

    async fn snapshot(&self, instance: &InstanceId, keeping: &Keeping) -> Result<SnapshotRef, DriverError> {
        each!(self, driver => driver.snapshot(instance, keeping).await)
    }

    async fn stop_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.stop_snapshot(instance).await)
    }

    async fn restore(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        keeping: &Keeping,
    ) -> Result<(), DriverError> {
        each!(self, driver => driver.restore(spec, snapshot, keeping).await)
    }

    fn can_fork(&self) -> bool {
        each!(self, driver => driver.can_fork())
    }

    async fn fork(&self, spec: &VmSpec, template: &SnapshotRef) -> Result<(), DriverError> {
        each!(self, driver => driver.fork(spec, template).await)
    }

    async fn seal_snapshot(&self, instance: &InstanceId, keeping: &Keeping) -> Result<(), DriverError> {
        each!(self, driver => driver.seal_snapshot(instance, keeping).await)
    }

    async fn discard_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.discard_snapshot(instance).await)
    }

    async fn export(&self, snapshot: &SnapshotRef) -> Result<Vec<Part>, DriverError> {
        each!(self, driver => driver.export(snapshot).await)
    }

    async fn begin_import(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.begin_import(instance).await)
    }

    async fn import_part(&self, instance: &InstanceId, name: &str) -> Result<File, DriverError> {
        each!(self, driver => driver.import_part(instance, name).await)
    }

    async fn import(
        &self,
        spec: &VmSpec,
        exported: &SnapshotRef,
        keeping: &Keeping,
    ) -> Result<SnapshotRef, DriverError> {
        each!(self, driver => driver.import(spec, exported, keeping).await)
    }

    async fn stop(&self, instance: &InstanceId, grace: Duration) -> Result<(), DriverError> {
        each!(self, driver => driver.stop(instance, grace).await)
    }

    async fn kill(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.kill(instance).await)
    }

    async fn remove(&self, instance: &InstanceId) -> Result<(), DriverError> {
        each!(self, driver => driver.remove(instance).await)
    }

    async fn guest(&self, instance: &InstanceId) -> Result<GuestStream, DriverError> {
        each!(self, driver => driver.guest(instance).await)
    }

    fn exits(&self) -> broadcast::Receiver<VmExit> {
        each!(self, driver => driver.exits())
    }

    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration> {
        each!(self, driver => driver.cpu_time(instance))
    }

    async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, DriverError> {
        each!(self, driver => driver.console(instance, max_bytes).await)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_that_this_machine_lacks_is_refused_by_name_and_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let kind = DriverKind::Firecracker;
        let vmm = VmmSettings { firecracker: Some(dir.path().join("firecracker")), ..VmmSettings::default() };
        let error = AnyDriver::open_on(kind, AnyHost::local(dir.path()), dir.path(), &vmm).unwrap_err();
        assert!(error.to_string().contains(kind.as_str()), "{error}");
        assert!(error.to_string().contains("install"), "{error}");
        assert_eq!("qemuu".parse::<DriverKind>(), Err(UnknownDriver));
    }
}
