//! A driver without a VMM: microVMs as entries, with state and laws, for tests, demonstrations and scale.
//!
//! Booting twice is one VM; a snapshot needs a pause; a snapshot never meets another revision. With a directory, each
//! instance is one small file that is replaced atomically, so that the VMs outlive the agent as real ones do.
//! Latency and failures are set by the test through [`Faults`]. A guest is a small script that speaks the guest
//! protocol; it exists only while a connection to it is open.

mod faults;
mod guest;
mod life;
mod migrate;
mod program;
mod world;

use std::collections::BTreeMap;
use std::fs::File;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use mvm_proto::document::SnapshotCompression;
use mvm_proto::guest::{Health, Readiness, WorkloadOverride};
use mvm_proto::{Digest, InstanceId, Timestamp};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::broadcast;
use tokio::time::Instant;

use crate::encoding::Encoding;
use crate::error::same_revision;
use crate::{
    Balloon, Capability, Compression, ConsolePiece, Driver, DriverError, DriverKind, DriverUnavailable,
    Forks, GuestStream, Lacking, Migration, Purpose, SnapshotOptions, SnapshotRef, Vm, VmExit, VmSpec,
    VmState,
};
pub use faults::{Fault, Faults, Manner};
use life::Host;
use world::{Entry, FakeVm, World};

use crate::snapshot_key::KeyError;

/// What is on its way to or from a fake guest.
const STREAM_BYTES: usize = 4096;

/// MicroVMs in memory, with state and laws. Clones are of the same VMs.
#[derive(Debug, Clone)]
pub struct FakeDriver {
    host: Arc<Host>,
    pub faults: Arc<Faults>,
    forks: bool,
    encrypts: bool,
    /// What tests make VMMs burn: since when, and which share of a core.
    burning: Arc<Mutex<BTreeMap<InstanceId, (Instant, u32)>>>,
    /// Snapshots that are to end early.
    stops: broadcast::Sender<InstanceId>,
    /// What is being written of instances that come from elsewhere.
    incoming: Arc<Mutex<BTreeMap<InstanceId, File>>>,
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
        let world = World::load(dir, true).map_err(state)?;
        Ok(Self { faults: Arc::new(Faults::asked()), ..Self::with(world) })
    }

    /// What lives in `dir` now, without touching it: nothing done to these VMs is kept.
    pub fn peek(dir: &Path) -> Result<Self, DriverUnavailable> {
        let state = |cause| DriverUnavailable::State { path: dir.to_owned(), cause };
        World::load(dir, false).map(Self::with).map_err(state)
    }

    fn with(world: World) -> Self {
        Self {
            host: Arc::new(Host::new(world)),
            faults: Arc::default(),
            forks: false,
            encrypts: true,
            burning: Arc::default(),
            stops: broadcast::Sender::new(64),
            incoming: Arc::default(),
        }
    }

    /// The same with forks, as real ones have them.
    #[must_use]
    pub fn with_forks(self) -> Self {
        Self { forks: true, ..self }
    }

    /// The same for one that can't encrypt, as not every real one can.
    #[must_use]
    pub fn without_encryption(self) -> Self {
        Self { encrypts: false, ..self }
    }

    /// Tells an end that is not its VM's: that of a process which it had before, found late.
    pub fn tell_earlier_end(&self, instance: &InstanceId) {
        self.host.tell_earlier_end(instance);
    }

    /// Ends a VM as a crash would: its snapshot and disk stay.
    pub fn crash(&self, instance: &InstanceId) {
        self.host.end(instance, "crashed");
    }

    /// Changes what an instance's snapshot holds, as a disk that fails does.
    pub fn damage_snapshot(&self, instance: &InstanceId) {
        let damaged = self.host.apply(instance, "damage", |entry, _| {
            entry.damaged = true;
            Ok(())
        });
        debug_assert!(damaged.is_ok());
    }

    /// How often the guest's program was started again, and how it is checked.
    #[must_use]
    pub fn workload(&self, instance: &InstanceId) -> (u32, Option<Health>) {
        self.host.workload(instance)
    }

    /// What a guest was told to run in place of what its image says.
    pub fn workload_override(&self, instance: &InstanceId) -> Option<WorkloadOverride> {
        self.host.instead(instance)
    }

    /// Makes a guest say that it is idle, busy or has failed.
    pub fn guest_says(&self, instance: &InstanceId, readiness: Readiness) {
        self.host.signal(instance, readiness);
    }

    /// Makes the VMM of an instance take this share of a core from now on, as if it had just been started.
    pub fn vmm_burns(&self, instance: &InstanceId, percent: u32) {
        self.burning().insert(instance.clone(), (Instant::now(), percent));
    }

    fn incoming(&self) -> MutexGuard<'_, BTreeMap<InstanceId, File>> {
        self.incoming.lock()
    }

    fn burning(&self) -> MutexGuard<'_, BTreeMap<InstanceId, (Instant, u32)>> {
        self.burning.lock()
    }

    /// How many times a VM was really booted or restored: asking twice must not count twice.
    #[must_use]
    pub fn boots(&self) -> u64 {
        self.host.world().boots
    }

    /// VMs that run without an identity since they booted or were restored.
    #[must_use]
    pub fn unborn(&self) -> Vec<InstanceId> {
        let world = self.host.world();
        let unborn = world.entries().filter(|(_, entry)| entry.vm.as_ref().is_some_and(|vm| !vm.reborn));
        unborn.map(|(id, _)| id.clone()).collect()
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
        let answer = self.host.apply(instance, action, change)?;
        self.faults.after(fault).await;
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

    async fn list(&self) -> Result<Vec<Vm>, DriverError> {
        let vm = |(id, entry): (&InstanceId, &Entry)| Some(vm_of(id, entry.vm.as_ref()?));
        let listed = self.host.world().entries().filter_map(vm).collect();
        self.faults.grow_old().await;
        Ok(listed)
    }

    async fn instances(&self) -> Result<Vec<InstanceId>, DriverError> {
        Ok(self.host.world().entries().map(|(id, _)| id.clone()).collect())
    }

    async fn adopt(&self, instance: &InstanceId) -> Result<Option<Vm>, DriverError> {
        let fault = self.faults.of("adopt", instance, None);
        self.faults.before(fault, "adopt", instance).await?;
        Ok(self.host.world().get(instance).and_then(|entry| Some(vm_of(instance, entry.vm.as_ref()?))))
    }

    async fn boot(&self, spec: &VmSpec) -> Result<(), DriverError> {
        let instance = &spec.instance;
        self.change_of(instance, "boot", spec.image.kernel.to_str(), |entry, boots| match &entry.vm {
            Some(vm) => same_revision(instance, vm.revision, spec.revision),
            None => {
                *boots += 1;
                entry.vm = Some(FakeVm {
                    revision: spec.revision,
                    state: VmState::Running,
                    runs: 0,
                    reborn: false,
                    generation: 0,
                });
                entry.template = spec.purpose == Purpose::Template;
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

    async fn snapshot(
        &self,
        instance: &InstanceId,
        options: &SnapshotOptions,
    ) -> Result<SnapshotRef, DriverError> {
        let revision = self.host.world().get(instance).and_then(|entry| Some(entry.vm?.revision));
        let key = revision.map_or(Ok(None), |revision| options.key_to_save(instance, revision));
        let key = key.map_err(|cause| key_error(instance, "snapshot", cause))?;
        let encoding = Encoding {
            compression: SnapshotCompression::default(),
            key: key.as_ref().map(|key| key.tenant_key.id()),
        };
        let secrets = self.host.life(instance).is_some_and(|life| life.has_secrets());
        let mut stops = self.stops.subscribe();
        let stopped = async { while stops.recv().await.as_ref() != Ok(instance) {} };
        let written = self.change(instance, "snapshot", |entry, _| {
            let vm = alive(entry, instance, "snapshot")?;
            if vm.state != VmState::Paused {
                let (instance, found) = (instance.clone(), vm.state);
                return Err(DriverError::WrongState { instance, action: "be snapshotted", found });
            }
            let digest = Digest::of(format!("{instance} {} {}", vm.revision, vm.runs).as_bytes());
            let snapshot = SnapshotRef { instance: instance.clone(), revision: vm.revision, digest };
            entry.asleep = Some(vm.clone());
            entry.snapshot = Some(snapshot.clone());
            (entry.encoding, entry.damaged) = (encoding, false);
            entry.console.push_str(if secrets { "saved with secrets\n" } else { "saved\n" });
            Ok(snapshot)
        });
        tokio::select! {
            written = written => written,
            () = stopped => {
                Err(DriverError::Vmm { instance: instance.clone(), reason: "its snapshot was stopped".to_owned() })
            }
        }
    }

    async fn stop_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        // Without a listener nothing is being written.
        let _ = self.stops.send(instance.clone());
        Ok(())
    }

    async fn restore(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> Result<(), DriverError> {
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
            if let Some(reason) = options.refuses(&entry.encoding) {
                return Err(DriverError::Unusable { instance: instance.clone(), reason });
            }
            let opened = options.key_to_restore(&entry.encoding, instance, snapshot.revision);
            opened.map_err(|cause| key_error(instance, "restore", cause))?;
            if entry.damaged {
                let reason = "it is damaged".to_owned();
                return Err(DriverError::Unusable { instance: instance.clone(), reason });
            }
            *boots += 1;
            entry.vm = entry.asleep.clone().map(|vm| FakeVm { reborn: false, ..vm });
            entry.console.push_str("restored\n");
            Ok(())
        })
        .await
    }

    async fn discard_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.change(instance, "discard the snapshot of", |entry, _| {
            entry.snapshot = None;
            entry.asleep = None;
            (entry.encoding, entry.damaged) = (Encoding::default(), false);
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
        let Some(life) = self.host.life(instance) else {
            return Err(DriverError::NoVm { instance: instance.clone(), action: "reach" });
        };
        let (theirs, ours) = tokio::io::duplex(STREAM_BYTES);
        let (host, faults) = (Arc::clone(&self.host), Arc::clone(&self.faults));
        tokio::spawn(guest::serve(host, faults, instance.clone(), life, theirs));
        Ok(Box::new(ours))
    }

    fn exits(&self) -> broadcast::Receiver<VmExit> {
        self.host.exits()
    }

    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration> {
        self.host.world().get(instance)?.vm?;
        let burnt = |(since, percent): &(Instant, u32)| since.elapsed() * *percent / 100;
        Some(self.burning().get(instance).map(burnt).unwrap_or_default())
    }

    async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, DriverError> {
        let text = self.host.world().get(instance).map(|entry| entry.console).unwrap_or_default();
        let bytes = text.into_bytes();
        Ok(bytes[bytes.len().saturating_sub(max_bytes)..].to_vec())
    }

    async fn console_from(
        &self,
        instance: &InstanceId,
        from: u64,
        max_bytes: usize,
    ) -> Result<ConsolePiece, DriverError> {
        let text = self.host.world().get(instance).map(|entry| entry.console).unwrap_or_default();
        let at = text.len().min(usize::try_from(from).unwrap_or(usize::MAX));
        let data = text.as_bytes()[at..text.len().min(at.saturating_add(max_bytes))].to_vec();
        Ok(ConsolePiece { offset: from, data, end: text.len() as u64 })
    }

    /// It keeps no times.
    async fn console_since(&self, _: &InstanceId, _: Timestamp) -> Result<u64, DriverError> {
        Ok(0)
    }

    fn forks(&self) -> Result<&dyn Forks, Lacking> {
        if self.forks { Ok(self) } else { Err(lacking(Capability::Forks)) }
    }

    fn balloon(&self) -> Result<&dyn Balloon, Lacking> {
        Ok(self)
    }

    fn compression(&self) -> Result<&dyn Compression, Lacking> {
        Ok(self)
    }

    fn encryption(&self) -> Result<(), Lacking> {
        if self.encrypts { Ok(()) } else { Err(lacking(Capability::Encryption)) }
    }

    fn migration(&self) -> Result<&dyn Migration, Lacking> {
        Ok(self)
    }
}

fn lacking(capability: Capability) -> Lacking {
    Lacking { driver: DriverKind::Fake, capability, reason: "it was opened without" }
}

impl Forks for FakeDriver {
    fn fork<'a>(
        &'a self,
        spec: &'a VmSpec,
        template: &'a SnapshotRef,
    ) -> BoxFuture<'a, Result<(), DriverError>> {
        Box::pin(async move {
            let instance = &spec.instance;
            let of_template = self.host.world().get(&template.instance);
            self.change(instance, "fork", |entry, boots| {
                same_revision(instance, template.revision, spec.revision)?;
                if let Some(vm) = &entry.vm {
                    return same_revision(instance, vm.revision, spec.revision);
                }
                let saved = of_template.filter(|saved| saved.snapshot.as_ref() == Some(template));
                let Some(vm) = saved.and_then(|saved| saved.asleep) else {
                    let (instance, digest) = (template.instance.clone(), template.digest);
                    return Err(DriverError::NoSnapshot { instance, digest });
                };
                *boots += 1;
                entry.vm = Some(FakeVm { reborn: false, ..vm });
                entry.console.push_str("forked\n");
                Ok(())
            })
            .await
        })
    }
}

impl Balloon for FakeDriver {
    fn reclaim<'a>(
        &'a self,
        _instance: &'a InstanceId,
        keep_mib: u64,
        _within: Duration,
    ) -> BoxFuture<'a, Result<Option<u64>, DriverError>> {
        Box::pin(std::future::ready(Ok(Some(keep_mib))))
    }
}

impl Compression for FakeDriver {
    fn compress_snapshot<'a>(
        &'a self,
        instance: &'a InstanceId,
        options: &'a SnapshotOptions,
    ) -> BoxFuture<'a, Result<(), DriverError>> {
        Box::pin(async move {
            const ACTION: &str = "compress the snapshot of";
            self.host.apply(instance, ACTION, |entry, _| {
                let Some(snapshot) = &entry.snapshot else { return Ok(()) };
                if entry.encoding.compression == options.policy.compression {
                    return Ok(());
                }
                let opened = options.key_to_restore(&entry.encoding, instance, snapshot.revision);
                opened.map_err(|cause| key_error(instance, ACTION, cause))?;
                entry.encoding.compression = options.policy.compression;
                Ok(())
            })
        })
    }
}

fn alive<'a>(
    entry: &'a mut Entry,
    instance: &InstanceId,
    action: &'static str,
) -> Result<&'a mut FakeVm, DriverError> {
    entry.vm.as_mut().ok_or_else(|| DriverError::NoVm { instance: instance.clone(), action })
}

fn key_error(instance: &InstanceId, action: &'static str, cause: KeyError) -> DriverError {
    DriverError::Key { instance: instance.clone(), action, cause }
}

#[cfg(test)]
mod tests {
    use super::super::conformance;
    use super::*;

    #[tokio::test]
    async fn the_fake_in_memory_passes_the_suite() {
        let driver = FakeDriver::in_memory().with_forks();
        conformance::suite(&driver, &conformance::Subject::imagined()).await.unwrap();
    }

    #[tokio::test]
    async fn vms_in_a_directory_outlive_the_driver_and_pass_the_suite() {
        let dir = tempfile::tempdir().unwrap();
        let subject = conformance::Subject::imagined();
        conformance::suite(&FakeDriver::open(dir.path()).unwrap(), &subject).await.unwrap();
        let open = async || FakeDriver::open(dir.path()).unwrap();
        conformance::outlives_its_owner(open, &subject).await.unwrap();
    }

    #[tokio::test]
    async fn the_fake_keeps_the_laws_of_compression_and_encryption() {
        let keys = tempfile::tempdir().unwrap();
        let (driver, subject) = (FakeDriver::in_memory(), conformance::Subject::imagined());
        let damage = async |instance: &InstanceId| driver.damage_snapshot(instance);
        conformance::encoding_suite(&driver, &subject, keys.path(), damage).await.unwrap();
    }

    #[tokio::test]
    async fn what_sleeps_on_paper_moves_as_real_ones_do() {
        let (one, other) = (FakeDriver::in_memory(), FakeDriver::in_memory());
        conformance::migration_suite(&one, &other, &conformance::Subject::imagined()).await.unwrap();
    }

    #[test]
    fn a_damaged_file_is_an_error_that_names_it() {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("i-00000001.json"), b"{\"vm\":").unwrap();
        let error = FakeDriver::open(dir.path()).unwrap_err();
        assert!(mvm_proto::text::chain(&error).contains("i-00000001.json"), "{error}");
    }
}
