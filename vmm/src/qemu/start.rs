//! Starts VMMs, to boot a guest or to load one from a snapshot. A start that fails leaves no process.

use std::fs::File;
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use futures::future::BoxFuture;
use mvm_host::sandbox::Demand;
use mvm_host::{Confinement, Host, Operation, Outcome, SpawnVmm, VmmProcess};
use mvm_proto::InstanceId;
use serde_json::json;

use super::args::{self, Accelerator, Begin, Memory, Setup};
use super::live::{Live, RECORD, Record, Short};
use super::qmp::{Qmp, QmpError};
use super::save::capabilities;
use super::saved::Saved;
use super::snapshot::{FileStamp, Fit, Found, MEMORY, MadeOn, Manifest, SNAPSHOT};
use super::{Binary, QemuDriver, VMM_LOG, tsc};
use crate::error::same_revision;
use crate::{DriverError, DriverKind, Forks, Purpose, SnapshotOptions, SnapshotRef, VmSpec, run_files};

/// For loading memory: what any disk can do, and some time to begin.
const LOAD_BASE: Duration = Duration::from_secs(30);
pub(super) const SLOWEST_MIB_PER_SECOND: u64 = 20;

/// A binary that was asked what it is, and the file it was then.
#[derive(Debug)]
pub(super) struct Examined {
    modified: Option<SystemTime>,
    binary: Binary,
}

/// Marks an instance as being started: other calls leave its VMM alone while this exists.
struct Starting<'a, H: Host> {
    driver: &'a QemuDriver<H>,
    instance: &'a InstanceId,
}

impl<H: Host> Drop for Starting<'_, H> {
    fn drop(&mut self) {
        self.driver.inner.starting.lock().remove(self.instance);
    }
}

impl<H: Host> Forks for QemuDriver<H> {
    fn fork<'a>(
        &'a self,
        spec: &'a VmSpec,
        template: &'a SnapshotRef,
    ) -> BoxFuture<'a, Result<(), DriverError>> {
        Box::pin(async move {
            same_revision(&spec.instance, template.revision, spec.revision)?;
            match self.live(&spec.instance, "fork").await? {
                Some(live) => same_revision(&spec.instance, live.revision(), spec.revision),
                None => self.start_forking(spec, template).await,
            }
        })
    }
}

impl<H: Host> QemuDriver<H> {
    /// The QEMU to run, asked again when its file was replaced.
    pub(super) async fn binary(&self, instance: &InstanceId) -> Result<Binary, DriverError> {
        let program = &self.inner.settings.program;
        let modified = std::fs::metadata(program).and_then(|meta| meta.modified()).ok();
        let mut known = self.inner.binary.lock().await;
        if let Some(examined) = known.as_ref().filter(|examined| examined.modified == modified) {
            return Ok(examined.binary.clone());
        }
        let examined = Binary::examine(program).await;
        let binary = examined.map_err(|cause| DriverError::Vmm {
            instance: instance.clone(),
            reason: mvm_proto::text::chain(&cause),
        })?;
        *known = Some(Examined { modified, binary: binary.clone() });
        Ok(binary)
    }

    pub(super) async fn start_booting(&self, spec: &VmSpec) -> Result<(), DriverError> {
        const ACTION: &str = "boot";
        check_image(spec)?;
        let _starting = self.starting(&spec.instance);
        let accelerator = self.chosen_accelerator().await;
        let binary = self.binary(&spec.instance).await?;
        self.make_place(spec, ACTION).await?;
        let memory = match spec.purpose {
            Purpose::Instance => Memory::Anonymous,
            Purpose::Template => {
                // What an earlier guest left in it would be this one's memory.
                self.remove_file(&spec.instance, ACTION, args::TEMPLATE_MEMORY).await?;
                Memory::Template
            }
        };
        let machine = Machine { accelerator, balloon: holds_template(spec), short: false };
        self.start(spec, &binary, machine, Begin::Boot, memory, ACTION).await.map(|_| ())
    }

    /// The run directory, and the data disk if there is to be one.
    async fn make_place(&self, spec: &VmSpec, action: &'static str) -> Result<(), DriverError> {
        let instance = &spec.instance;
        self.perform(instance, action, Operation::MakeRunDir { instance: instance.clone() }).await?;
        let size_mib = spec.resources.data_disk_mib;
        if size_mib > 0 {
            let (instance, name) = (instance.clone(), args::DATA_DISK.to_owned());
            let disk = Operation::MakeDisk { instance, name, size_mib };
            self.perform(&spec.instance, action, disk).await?;
        }
        Ok(())
    }

    pub(super) async fn start_restoring(
        &self,
        spec: &VmSpec,
        wanted: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> Result<(), DriverError> {
        const ACTION: &str = "restore";
        let _starting = self.starting(&spec.instance);
        let (saved, manifest, binary) = self.usable(spec, wanted, options, ACTION).await?;
        let io = |cause| DriverError::Io { instance: spec.instance.clone(), action: ACTION, cause };
        let disk = FileStamp::of_disk(&*self.inner.host, &spec.instance).await.map_err(io)?;
        if disk != manifest.disk {
            let reason = "its data disk moved on since it was made".to_owned();
            return Err(DriverError::Unusable { instance: spec.instance.clone(), reason });
        }
        self.start_loading(spec, &binary, saved, &manifest, Memory::Anonymous, ACTION).await
    }

    async fn start_forking(&self, spec: &VmSpec, template: &SnapshotRef) -> Result<(), DriverError> {
        const ACTION: &str = "fork";
        let _starting = self.starting(&spec.instance);
        let (saved, manifest, binary) =
            self.usable(spec, template, &SnapshotOptions::plain(), ACTION).await?;
        if manifest.balloon && !holds_template(spec) {
            let reason =
                "its guests can give memory back, which takes a filter on the VMM's system calls".to_owned();
            return Err(DriverError::Unusable { instance: template.instance.clone(), reason });
        }
        self.make_place(spec, ACTION).await?;
        let share = Operation::ShareMemory {
            instance: spec.instance.clone(),
            template: template.instance.clone(),
            memory: format!("{SNAPSHOT}/{MEMORY}"),
            name: args::BASE_MEMORY.to_owned(),
        };
        self.perform(&spec.instance, ACTION, share).await?;
        self.start_loading(spec, &binary, saved, &manifest, Memory::Fork, ACTION).await?;
        // It is mapped: the name has done its service, and would count as the instance's own.
        self.remove_file(&spec.instance, ACTION, args::BASE_MEMORY).await
    }

    /// Starts a VMM that waits, and has it load what was saved.
    async fn start_loading(
        &self,
        spec: &VmSpec,
        binary: &Binary,
        saved: Saved,
        manifest: &Manifest,
        memory: Memory,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let instance = &spec.instance;
        let (balloon, short) = (manifest.balloon, manifest.short);
        let machine = Machine { accelerator: manifest.accelerator.clone(), balloon, short };
        let (state, feed) = saved.open(instance, action).await?;
        let (live, qmp) = self.start(spec, binary, machine, Begin::Incoming, memory, action).await?;
        let mib = manifest.state.bytes / 1024 / 1024;
        let within = LOAD_BASE + Duration::from_secs(mib / SLOWEST_MIB_PER_SECOND);
        match load(&qmp, state, manifest.memory.is_some(), self.answer_within(), within).await {
            // What was loaded is right only if the rest of it is: nothing of it has run yet.
            Ok(()) => match feed.over(instance, action, within).await {
                Ok(()) => Ok(()),
                Err(error) => {
                    self.end_processes(instance, action).await?;
                    Err(error)
                }
            },
            Err(cause) => {
                let cause = live.explain(action, cause).await;
                let reason = match live.end_detail() {
                    Some(said) => format!("could not load its snapshot: {said}"),
                    None => format!("could not load its snapshot: {}", mvm_proto::text::chain(&cause)),
                };
                self.end_processes(instance, action).await?;
                // What it was fed is why, if that was not what was saved.
                feed.over(instance, action, within).await?;
                Err(DriverError::Vmm { instance: instance.clone(), reason })
            }
        }
    }

    fn starting<'a>(&'a self, instance: &'a InstanceId) -> Starting<'a, H> {
        self.inner.starting.lock().insert(instance.clone());
        Starting { driver: self, instance }
    }

    /// The state of a snapshot, if it is the one wanted, as it was left, and fits what is here.
    async fn usable(
        &self,
        spec: &VmSpec,
        wanted: &SnapshotRef,
        options: &SnapshotOptions,
        action: &'static str,
    ) -> Result<(Saved, Manifest, Binary), DriverError> {
        let saved = &wanted.instance;
        let unusable = |reason: String| DriverError::Unusable { instance: saved.clone(), reason };
        let io = |cause| DriverError::Io { instance: saved.clone(), action, cause };
        let host = &*self.inner.host;
        self.stop_compression(saved).await;
        let found = Found::read(host, saved).await.map_err(io)?.transpose().map_err(unusable)?;
        let Some(found) = found.filter(|found| found.digest == wanted.digest) else {
            return Err(DriverError::NoSnapshot { instance: saved.clone(), digest: wanted.digest });
        };
        let manifest = &found.manifest;
        let binary = self.binary(&spec.instance).await?;
        let here = Fit {
            image: spec.image.digest,
            qemu: &binary.version,
            hardware: args::hardware_digest(spec, &manifest.accelerator, manifest.balloon),
            host: MadeOn::here().await,
        };
        if let Some(reason) = manifest.misfit(&here) {
            return Err(unusable(reason));
        }
        let source = self.source(saved, &found).await.map_err(io)?;
        if let Some(reason) = options.refuses(&source.encoding) {
            return Err(unusable(reason));
        }
        if let Some(reason) = self.damage(saved, &found, &source).await.map_err(io)? {
            return Err(unusable(reason));
        }
        let file = run_files::open(host, saved, &format!("{SNAPSHOT}/{}", source.name)).await.map_err(io)?;
        let file = file.ok_or_else(|| unusable(format!("its {} is gone", source.name)))?;
        let locked = options.key_to_restore(&source.encoding, saved, manifest.revision);
        let key = locked.map_err(|cause| DriverError::Key { instance: saved.clone(), action, cause })?;
        Ok((Saved { file, source, key }, found.manifest, binary))
    }

    /// Starts the process and waits for its first answer.
    async fn start(
        &self,
        spec: &VmSpec,
        binary: &Binary,
        machine: Machine,
        begin: Begin,
        memory: Memory,
        action: &'static str,
    ) -> Result<(Arc<Live>, Arc<Qmp>), DriverError> {
        let instance = &spec.instance;
        let Machine { accelerator, balloon, short } = machine;
        let tsc_khz = match accelerator {
            Accelerator::Tcg => tsc::khz().await,
            Accelerator::Kvm { .. } => None,
        };
        let setup = Setup {
            accelerator: accelerator.clone(),
            tsc_khz,
            sandbox: binary.sandbox,
            begin,
            memory,
            balloon,
        };
        for name in [args::QMP_SOCKET, args::GUEST_SOCKET, VMM_LOG] {
            self.remove_file(instance, action, name).await?;
        }
        let record = Record {
            driver: DriverKind::Qemu.to_string(),
            spec: spec.clone(),
            qemu: binary.version.clone(),
            accelerator,
            balloon,
        };
        let text = serde_json::to_string_pretty(&record).map_err(|cause| DriverError::Io {
            instance: instance.clone(),
            action,
            cause: cause.into(),
        })?;
        let write = Operation::WriteFile { instance: instance.clone(), name: RECORD.to_owned(), text };
        self.perform(instance, action, write).await?;
        let confine = confinement(spec, &setup.accelerator);
        if let Some(confine) = &confine {
            let files = [args::DATA_DISK, args::CONSOLE].map(str::to_owned).to_vec();
            let admit = Operation::AdmitVmm { instance: instance.clone(), user: confine.uid, files };
            self.perform(instance, action, admit).await?;
        }
        let spawn = Operation::SpawnVmm(SpawnVmm {
            instance: instance.clone(),
            program: binary.program.clone(),
            args: args::command_line(spec, &setup),
            log: VMM_LOG.to_owned(),
            tap: spec.bounds.nic.as_ref().map(|nic| nic.tap.clone()),
            group: spec.bounds.group.clone(),
            confine,
        });
        let Outcome::Process(process) = self.perform(instance, action, spawn).await? else {
            let reason = "the host started no process".to_owned();
            return Err(DriverError::Vmm { instance: instance.clone(), reason });
        };
        let live = self.register(&VmmProcess { instance: instance.clone(), process }).await;
        live.set_short(if short { Short::Yes } else { Short::No });
        match self.first_answer(&live, begin).await {
            Ok(qmp) => {
                if let Some(group) = spec.bounds.group.clone() {
                    let process = live.vmm.process.clone();
                    let confirm = Operation::ConfirmGroup { group, process };
                    if let Err(error) = self.perform(instance, action, confirm).await {
                        self.end_processes(instance, action).await?;
                        return Err(error);
                    }
                }
                Ok((live, qmp))
            }
            Err(cause) => {
                let cause = live.explain(action, cause).await;
                let said = live.end_detail();
                self.end_processes(instance, action).await?;
                let instance = instance.clone();
                Err(said.map_or(cause, |reason| DriverError::Vmm { instance, reason }))
            }
        }
    }

    /// The connection of a VMM that has just been started, once it does what it was started for.
    async fn first_answer(&self, live: &Live, begin: Begin) -> Result<Arc<Qmp>, QmpError> {
        let mut ended = live.ended.clone();
        let qmp = tokio::select! {
            qmp = live.qmp(self.inner.settings.start_within) => qmp?,
            _ = ended.wait_for(Option::is_some) => return Err(QmpError::Closed),
        };
        // For a moment after its first answer it may still be setting up its processors.
        let reached = |run: &str| match begin {
            Begin::Boot => run != "prelaunch",
            Begin::Incoming => run == "inmigrate",
        };
        while !reached(&qmp.query_run(self.answer_within()).await?) {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        Ok(qmp)
    }
}

/// What of the machine is not said by its spec.
struct Machine {
    accelerator: Accelerator,
    balloon: bool,
    /// Its guest was saved without some of its memory.
    short: bool,
}

/// Whether a guest that gives memory back leaves its template whole: its VMM's filter on system calls sees to that. A jail
/// that may be weaker may be one without that filter, which is known only when a VMM starts: too late for its template.
fn holds_template(spec: &VmSpec) -> bool {
    spec.bounds.jail.as_ref().is_some_and(|jail| jail.demand == Demand::All)
}

/// What the VMM may see and do: its image to read, its run directory to work in, and nothing else.
fn confinement(spec: &VmSpec, accelerator: &Accelerator) -> Option<Confinement> {
    let jail = spec.bounds.jail.as_ref()?;
    let image = &spec.image;
    Some(Confinement {
        images: [Some(&image.kernel), image.initrd.as_ref(), image.rootfs.as_ref()]
            .into_iter()
            .flatten()
            .cloned()
            .collect(),
        kvm: matches!(accelerator, Accelerator::Kvm { .. }),
        filter: jail.filter,
        demand: jail.demand,
        ..Confinement::qemu(jail.user, jail.user)
    })
}

/// Tells a waiting VMM to load what was saved from this file or pipe, and waits until it has.
async fn load(
    qmp: &Qmp,
    state: OwnedFd,
    memory_apart: bool,
    answer_within: Duration,
    within: Duration,
) -> Result<(), QmpError> {
    qmp.command("migrate-set-capabilities", capabilities(memory_apart), answer_within).await?;
    qmp.give("state", state.as_fd(), answer_within).await?;
    // The VMM has its own copy. With this one closed, a writer to the pipe gets an error once the VMM has closed its.
    drop(state);
    let mut migration = qmp.migration();
    qmp.command("migrate-incoming", json!({ "uri": "fd:state" }), answer_within).await?;
    let over = migration.wait_for(|status| matches!(status.as_str(), "completed" | "failed" | "closed"));
    let silent = |_| QmpError::Silent { command: "migrate-incoming", waited: within };
    let status =
        tokio::time::timeout(within, over).await.map_err(silent)?.map_err(|_| QmpError::Closed)?.clone();
    if status != "completed" {
        return Err(QmpError::Closed);
    }
    while qmp.query_run(answer_within).await? == "inmigrate" {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    Ok(())
}

/// Refuses what can't be a kernel before a machine is made for it: QEMU would run any bytes as a boot sector.
fn check_image(spec: &VmSpec) -> Result<(), DriverError> {
    let wrong = |reason: String| DriverError::Vmm { instance: spec.instance.clone(), reason };
    let kernel = &spec.image.kernel;
    let shown = kernel.display();
    let mut head = Vec::new();
    let read = File::open(kernel).and_then(|file| file.take(KERNEL_HEAD_BYTES).read_to_end(&mut head));
    read.map_err(|cause| wrong(format!("could not read the kernel {shown}: {cause}")))?;
    let elf = head.starts_with(b"\x7fELF");
    let compressed = head.get(BZIMAGE_MAGIC_AT..).is_some_and(|rest| rest.starts_with(b"HdrS"));
    if !elf && !compressed {
        return Err(wrong(format!("{shown} is not a kernel")));
    }
    for path in spec.image.initrd.iter().chain(&spec.image.rootfs) {
        readable(path).map_err(|cause| wrong(format!("could not read {}: {cause}", path.display())))?;
    }
    Ok(())
}

const KERNEL_HEAD_BYTES: u64 = 1024;
const BZIMAGE_MAGIC_AT: usize = 0x202;

fn readable(path: &Path) -> io::Result<()> {
    File::open(path).map(|_| ())
}

#[cfg(test)]
mod tests {
    use mvm_host::sandbox::Filter;
    use mvm_proto::Digest;
    use mvm_proto::document::Resources;

    use super::*;
    use crate::{Bounds, VmmJail};
    use mvm_image::BootImage;

    #[test]
    fn a_guest_gives_memory_back_only_where_no_vmm_starts_without_its_filter() {
        let holds = |demand: Option<Demand>| {
            let jail = demand.map(|demand| VmmJail { user: 61_000, filter: Filter::Strict, demand });
            holds_template(&VmSpec {
                instance: InstanceId::from_bits(1),
                revision: Digest::of(b"start"),
                resources: Resources { vcpus: 1, mem_mib: 128, data_disk_mib: 0 },
                image: BootImage::imagined("path:/image"),
                bounds: Bounds { jail, ..Bounds::default() },
                purpose: Purpose::Instance,
            })
        };
        assert_eq!([Some(Demand::All), Some(Demand::BestEffort), None].map(holds), [true, false, false]);
    }
}
