//! A driver without a VMM: microVMs as entries, with state and laws, for tests, demonstrations and scale.
//!
//! Booting twice is one VM; a snapshot needs a pause; a snapshot never meets another revision. With a directory, each
//! instance is one small file that is replaced atomically, so that the VMs outlive the agent as real ones do.
//! Latency and failures are set by the test through [`Faults`].

mod faults;
mod world;

use std::path::Path;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mvm_proto::{Digest, InstanceId};

use tokio::sync::broadcast;

use super::{
    Driver, DriverError, DriverKind, DriverUnavailable, GuestStream, SnapshotRef, Vm, VmExit, VmSpec, VmState,
};
pub use faults::{Fault, Faults};
use world::{Entry, FakeVm, World};

/// A follower that is further behind looks at the whole list anyway.
const EXITS_KEPT: usize = 1024;

/// MicroVMs in memory, with state and laws.
#[derive(Debug)]
pub struct FakeDriver {
    world: Mutex<World>,
    pub faults: Faults,
    exits: broadcast::Sender<VmExit>,
}

impl FakeDriver {
    /// VMs that live as long as this value.
    #[must_use]
    pub fn in_memory() -> Self {
        Self::with(World::default())
    }

    /// VMs that live in `dir`, beyond this process.
    pub fn open(dir: &Path) -> Result<Self, DriverUnavailable> {
        let state = |cause| DriverUnavailable::State { path: dir.to_owned(), cause };
        mvm_pki::files::create_private_dir(dir).map_err(state)?;
        World::load(dir, true).map(Self::with).map_err(state)
    }

    /// What lives in `dir` now, without touching it: nothing done to these VMs is kept.
    pub fn peek(dir: &Path) -> Result<Self, DriverUnavailable> {
        let state = |cause| DriverUnavailable::State { path: dir.to_owned(), cause };
        World::load(dir, false).map(Self::with).map_err(state)
    }

    fn with(world: World) -> Self {
        Self {
            world: Mutex::new(world),
            faults: Faults::default(),
            exits: broadcast::Sender::new(EXITS_KEPT),
        }
    }

    /// Ends a VM as a crash would: its snapshot and disk stay.
    pub fn crash(&self, instance: &InstanceId) {
        let mut world = self.lock();
        if let Some(mut entry) = world.get(instance) {
            entry.vm = None;
            // A test's crash has no one to report to.
            let _ = world.put(instance, Some(entry));
            let _ = self.exits.send(VmExit { instance: instance.clone(), detail: "crashed".to_owned() });
        }
    }

    /// How many times a VM was really booted or restored: asking twice must not count twice.
    #[must_use]
    pub fn boots(&self) -> u64 {
        self.lock().boots
    }

    fn lock(&self) -> MutexGuard<'_, World> {
        self.world.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits and fails as the test said, then changes one entry under the lock.
    async fn change<T>(
        &self,
        instance: &InstanceId,
        action: &'static str,
        change: impl FnOnce(&mut Entry, &mut u64) -> Result<T, DriverError> + Send,
    ) -> Result<T, DriverError> {
        self.change_of(instance, action, None, change).await
    }

    async fn change_of<T>(
        &self,
        instance: &InstanceId,
        action: &'static str,
        image: Option<&str>,
        change: impl FnOnce(&mut Entry, &mut u64) -> Result<T, DriverError> + Send,
    ) -> Result<T, DriverError> {
        let fault = self.faults.of(action, instance, image);
        self.faults.before(fault, action, instance).await?;
        let answer = self.apply(instance, action, change)?;
        self.faults.after(fault).await;
        Ok(answer)
    }

    fn apply<T>(
        &self,
        instance: &InstanceId,
        action: &'static str,
        change: impl FnOnce(&mut Entry, &mut u64) -> Result<T, DriverError>,
    ) -> Result<T, DriverError> {
        let mut world = self.lock();
        let before = world.get(instance);
        let mut entry = before.clone().unwrap_or_default();
        let mut boots = world.boots;
        let answer = change(&mut entry, &mut boots)?;
        world.boots = boots;
        if before.as_ref() != Some(&entry) {
            let kept = (entry != Entry::default()).then_some(entry);
            world.put(instance, kept).map_err(|cause| DriverError::Io {
                instance: instance.clone(),
                action,
                cause,
            })?;
        }
        Ok(answer)
    }
}

fn vm_of(instance: &InstanceId, vm: &FakeVm) -> Vm {
    Vm { instance: instance.clone(), revision: vm.revision, state: vm.state }
}

impl Driver for FakeDriver {
    fn kind(&self) -> DriverKind {
        DriverKind::Fake
    }

    fn accelerator(&self) -> &'static str {
        "none"
    }

    async fn list(&self) -> Result<Vec<Vm>, DriverError> {
        Ok(self.lock().entries().filter_map(|(id, entry)| Some(vm_of(id, entry.vm.as_ref()?))).collect())
    }

    async fn adopt(&self, instance: &InstanceId) -> Result<Option<Vm>, DriverError> {
        Ok(self.lock().get(instance).and_then(|entry| Some(vm_of(instance, entry.vm.as_ref()?))))
    }

    async fn boot(&self, spec: &VmSpec) -> Result<(), DriverError> {
        let instance = &spec.instance;
        self.change_of(instance, "boot", spec.image.kernel.to_str(), |entry, boots| match &entry.vm {
            Some(vm) => same_revision(instance, vm.revision, spec.revision),
            None => {
                *boots += 1;
                entry.vm = Some(FakeVm { revision: spec.revision, state: VmState::Running, runs: 0 });
                entry.console.push_str("booted\n");
                Ok(())
            }
        })
        .await
    }

    async fn pause(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "pause", |entry, _| {
            alive(entry, instance, "pause")?.state = VmState::Paused;
            Ok(())
        })
        .await
    }

    async fn resume(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "resume", |entry, _| {
            let vm = alive(entry, instance, "resume")?;
            if vm.state == VmState::Paused {
                vm.state = VmState::Running;
                // Memory moves on: the next snapshot is another one.
                vm.runs += 1;
            }
            Ok(())
        })
        .await
    }

    async fn snapshot(&self, instance: &InstanceId) -> Result<SnapshotRef, DriverError> {
        self.change(instance, "snapshot", |entry, _| {
            let vm = alive(entry, instance, "snapshot")?;
            if vm.state != VmState::Paused {
                let (instance, found) = (instance.clone(), vm.state);
                return Err(DriverError::WrongState { instance, action: "be snapshotted", found });
            }
            let digest = Digest::of(format!("{instance} {} {}", vm.revision, vm.runs).as_bytes());
            let snapshot = SnapshotRef { instance: instance.clone(), revision: vm.revision, digest };
            entry.snapshot = Some(snapshot.clone());
            Ok(snapshot)
        })
        .await
    }

    async fn restore(&self, spec: &VmSpec, snapshot: &SnapshotRef) -> Result<(), DriverError> {
        let instance = &spec.instance;
        self.change(instance, "restore", |entry, boots| {
            same_revision(instance, snapshot.revision, spec.revision)?;
            if let Some(vm) = &entry.vm {
                return same_revision(instance, vm.revision, spec.revision);
            }
            if entry.snapshot.as_ref() != Some(snapshot) {
                let (instance, digest) = (instance.clone(), snapshot.digest);
                return Err(DriverError::NoSnapshot { instance, digest });
            }
            *boots += 1;
            entry.vm = Some(FakeVm { revision: snapshot.revision, state: VmState::Paused, runs: 0 });
            entry.console.push_str("restored\n");
            Ok(())
        })
        .await
    }

    async fn discard_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "discard the snapshot of", |entry, _| {
            entry.snapshot = None;
            Ok(())
        })
        .await
    }

    async fn stop(&self, instance: &InstanceId, _grace: Duration) -> Result<(), DriverError> {
        self.change(instance, "stop", |entry, _| {
            if entry.vm.take().is_some() {
                entry.console.push_str("stopped\n");
            }
            Ok(())
        })
        .await
    }

    async fn kill(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "kill", |entry, _| {
            entry.vm = None;
            Ok(())
        })
        .await
    }

    async fn remove(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "remove", |entry, _| {
            *entry = Entry::default();
            Ok(())
        })
        .await
    }

    async fn guest(&self, instance: &InstanceId) -> Result<GuestStream, DriverError> {
        if self.lock().get(instance).is_none_or(|entry| entry.vm.is_none()) {
            return Err(DriverError::NoVm { instance: instance.clone(), action: "reach" });
        }
        let (_guest, host) = tokio::io::duplex(64 * 1024);
        Ok(Box::new(host))
    }

    fn exits(&self) -> broadcast::Receiver<VmExit> {
        self.exits.subscribe()
    }

    async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, DriverError> {
        let text = self.lock().get(instance).map(|entry| entry.console).unwrap_or_default();
        let bytes = text.into_bytes();
        Ok(bytes[bytes.len().saturating_sub(max_bytes)..].to_vec())
    }
}

fn alive<'a>(
    entry: &'a mut Entry,
    instance: &InstanceId,
    action: &'static str,
) -> Result<&'a mut FakeVm, DriverError> {
    entry.vm.as_mut().ok_or_else(|| DriverError::NoVm { instance: instance.clone(), action })
}

fn same_revision(instance: &InstanceId, running: Digest, asked: Digest) -> Result<(), DriverError> {
    if running == asked {
        return Ok(());
    }
    Err(DriverError::OtherRevision { instance: instance.clone(), running, asked })
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[tokio::test]
    async fn the_fake_in_memory_passes_the_suite() {
        conformance::suite(&FakeDriver::in_memory()).await.unwrap();
    }

    #[tokio::test]
    async fn vms_in_a_directory_outlive_the_driver_and_pass_the_suite() {
        let dir = tempfile::tempdir().unwrap();
        conformance::suite(&FakeDriver::open(dir.path()).unwrap()).await.unwrap();
        conformance::outlives_its_owner(async || FakeDriver::open(dir.path()).unwrap()).await.unwrap();
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("i-00000001.json"), b"{\"vm\":").unwrap();
        let error = FakeDriver::open(dir.path()).unwrap_err();
        assert!(crate::text::chain(&error).contains("i-00000001.json"), "{error}");
    }
}
