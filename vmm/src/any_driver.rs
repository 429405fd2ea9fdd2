//! The driver that was chosen at start, as one type: opens it, and delegates every call to it.

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_host::AnyHost;
use mvm_proto::{InstanceId, Timestamp};
use tokio::sync::broadcast;

use crate::firecracker::{FirecrackerDriver, FirecrackerSettings, FirecrackerUnavailable};
use crate::qemu::{BinaryError, QemuDriver, QemuSettings};
use crate::{
    Balloon, Compression, ConsolePiece, Driver, DriverError, DriverKind, FakeDriver, Forks, GuestStream,
    Lacking, Migration, SnapshotOptions, SnapshotRef, Vm, VmExit, VmSpec, VmmSettings,
};

/// Why a driver can't be used.
#[derive(Debug, thiserror::Error)]
pub enum DriverUnavailable {
    #[error(transparent)]
    Firecracker(#[from] FirecrackerUnavailable),
    #[error("this node runs microVMs by QEMU, and {0}")]
    NoQemu(String),
    #[error(transparent)]
    Qemu(#[from] BinaryError),
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
    pub fn open(
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
            DriverKind::Qemu => Ok(Self::Qemu(QemuDriver::with_host(host, data_dir, QemuSettings::new(vmm)))),
            DriverKind::Firecracker => Self::firecracker(host, vmm),
        }
    }

    fn firecracker(host: AnyHost, vmm: &VmmSettings) -> Result<Self, DriverUnavailable> {
        let settings = FirecrackerSettings::with_programs(vmm);
        Ok(Self::Firecracker(FirecrackerDriver::with_host(host, settings)?))
    }

    /// Opens it to look at only, for a dry run, which must leave no trace.
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

/// Asynchronous methods, each delegated to the driver.
macro_rules! delegate {
    ($($method:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {$(
        async fn $method(&self, $($argument: $type),*) -> Result<$answer, DriverError> {
            each!(self, driver => driver.$method($($argument),*).await)
        }
    )*};
}

impl Driver for AnyDriver {
    delegate! {
        list() -> Vec<Vm>;
        instances() -> Vec<InstanceId>;
        adopt(instance: &InstanceId) -> Option<Vm>;
        boot(spec: &VmSpec) -> ();
        pause(instance: &InstanceId) -> ();
        resume(instance: &InstanceId) -> ();
        snapshot(instance: &InstanceId, options: &SnapshotOptions) -> SnapshotRef;
        stop_snapshot(instance: &InstanceId) -> ();
        restore(spec: &VmSpec, snapshot: &SnapshotRef, options: &SnapshotOptions) -> ();
        discard_snapshot(instance: &InstanceId) -> ();
        stop(instance: &InstanceId, grace: Duration) -> ();
        kill(instance: &InstanceId) -> ();
        remove(instance: &InstanceId) -> ();
        guest(instance: &InstanceId) -> GuestStream;
        console(instance: &InstanceId, max_bytes: usize) -> Vec<u8>;
        console_from(instance: &InstanceId, from: u64, max_bytes: usize) -> ConsolePiece;
        console_since(instance: &InstanceId, since: Timestamp) -> u64;
    }

    fn kind(&self) -> DriverKind {
        each!(self, driver => driver.kind())
    }

    fn exits(&self) -> broadcast::Receiver<VmExit> {
        each!(self, driver => driver.exits())
    }

    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration> {
        each!(self, driver => driver.cpu_time(instance))
    }

    fn forks(&self) -> Result<&dyn Forks, Lacking> {
        each!(self, driver => driver.forks())
    }

    fn balloon(&self) -> Result<&dyn Balloon, Lacking> {
        each!(self, driver => driver.balloon())
    }

    fn compression(&self) -> Result<&dyn Compression, Lacking> {
        each!(self, driver => driver.compression())
    }

    fn encryption(&self) -> Result<(), Lacking> {
        each!(self, driver => driver.encryption())
    }

    fn migration(&self) -> Result<&dyn Migration, Lacking> {
        each!(self, driver => driver.migration())
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use crate::Capability;
    use crate::kind::UnknownDriver;

    #[test]
    fn a_driver_that_this_machine_lacks_is_refused_by_name_and_never_replaced() {
        let dir = tempfile::tempdir().unwrap();
        let kind = DriverKind::Firecracker;
        let vmm = VmmSettings { firecracker: Some(dir.path().join("firecracker")), ..VmmSettings::default() };
        let error = AnyDriver::open(kind, AnyHost::local(dir.path()), dir.path(), &vmm).unwrap_err();
        assert!(error.to_string().contains(kind.as_str()), "{error}");
        assert!(error.to_string().contains("install"), "{error}");
        assert_eq!("qemuu".parse::<DriverKind>(), Err(UnknownDriver));
    }

    #[tokio::test]
    async fn what_a_driver_lacks_is_told_with_the_reason() {
        let dir = tempfile::tempdir().unwrap();
        let lacking = |driver: &AnyDriver| -> Vec<&str> {
            let lacking = Capability::ALL.into_iter().filter_map(|it| driver.lacks(it));
            lacking.map(|lacking| lacking.capability.as_str()).collect()
        };
        let program = dir.path().join("firecracker");
        std::fs::write(&program, "#!/bin/sh\necho Firecracker v1.13.0\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        let vmm = VmmSettings { firecracker: Some(program), ..VmmSettings::default() };
        let open = |kind| AnyDriver::open(kind, AnyHost::local(dir.path()), dir.path(), &vmm).unwrap();
        assert_eq!(
            DriverKind::ALL.map(|kind| lacking(&open(kind))),
            [vec![], vec![], vec!["compression", "encryption", "moves"]]
        );
    }
}
