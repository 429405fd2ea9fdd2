//! Starts VMMs: from an image or from a snapshot.
//!
//! Everything that can be refused is refused before the spawn; whatever fails after it takes the process with it, so
//! that a VMM either runs a guest or is not there.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use mvm_host::{Host, JailFile, Operation, Outcome, SpawnVmm, VmmProcess};
use mvm_proto::InstanceId;
use tokio::time::{Instant, sleep};

use super::http::ApiClient;
use super::logs::explain;
use super::paths::{
    API_SOCKET, CONSOLE, DATA_DISK, INITRD, KERNEL, METRICS, ROOTFS, VMM_LOG, VSOCK_SOCKET, jailer_args,
    vmm_args,
};
use super::request::{
    Action, BadRequest, Balloon, BootSource, CacheType, Drive, MachineConfig, NIC, NetworkInterface,
    NetworkOverride, Request, SnapshotLoad, Vsock, entropy, metrics, serial,
};
use super::snapshot_file::{MEMORY, Manifest, STATE};
use super::version::{OLDEST, Version};
use super::vmm::{Live, Vmms, api_error, bad_request, host_error, stuck};
use super::vmm_file::{VMM_FILE, VmmFile};
use crate::{DriverError, VmSpec, VmState, run_files};

/// The guest's address on its own vsock; every VM has one to itself. 0 to 2 are the hypervisor, the loopback and the host.
const GUEST_CID: u32 = 3;

/// The console is the serial port; a panic or reboot ends the process; an image's own words come after and win.
const BOOT_ARGS: &str = "console=ttyS0 reboot=k panic=-1";

const RETRY: std::time::Duration = std::time::Duration::from_millis(5);

/// More than the longest pid has.
const PID_FILE_BYTES: usize = 32;

/// What a guest is made from.
pub(super) enum Origin<'a> {
    Image,
    Snapshot(&'a Manifest),
}

impl<H: Host> Vmms<H> {
    /// Starts a VMM for an instance that has none.
    pub(super) async fn launch(
        self: &Arc<Self>,
        spec: &VmSpec,
        origin: &Origin<'_>,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let instance = &spec.instance;
        let file = self.prepare(spec, origin, action).await?;
        let live = self.spawn(spec, file, action).await?;
        match self.bring_up(spec, origin, &live, action).await {
            Ok(()) => {
                self.follow(&live);
                let loaded = matches!(origin, Origin::Snapshot(_));
                let state = if loaded { VmState::Paused } else { VmState::Running };
                self.remember(&live.vmm, |known| {
                    (known.resumes_safely, known.state) = (loaded, Some(state));
                });
                Ok(())
            }
            Err(error) => {
                let error = self.why(&live, error).await;
                if let Err(failed) = self.end(&live, action).await {
                    tracing::warn!(%instance, error = %mvm_proto::text::chain(&failed), "could not end a failed VMM");
                }
                Err(error)
            }
        }
    }

    /// Everything that must be there before the process, and nothing that would be taken for its own.
    async fn prepare(
        &self,
        spec: &VmSpec,
        origin: &Origin<'_>,
        action: &'static str,
    ) -> Result<VmmFile, DriverError> {
        let instance = &spec.instance;
        self.perform(instance, action, Operation::MakeRunDir { instance: instance.clone() }).await?;
        self.remove_leftovers(instance, action).await?;
        // Only now: an older jail may have had another place.
        let paths = self
            .paths(instance)
            .await
            .map_err(|cause| host_error(instance, action, cause))?
            .run_as(user_of(spec));
        for name in [METRICS, VMM_LOG] {
            let remove = Operation::RemoveFile { instance: instance.clone(), name: name.to_owned() };
            self.perform(instance, action, remove).await?;
        }
        if spec.resources.data_disk_mib > 0 {
            let (name, size_mib) = (DATA_DISK.to_owned(), spec.resources.data_disk_mib);
            let disk = Operation::MakeDisk { instance: instance.clone(), name, size_mib };
            self.perform(instance, action, disk).await?;
        }
        match &paths.jail {
            Some(jail) => {
                let files = jail_files(spec, origin, &paths.run_dir, |saved| self.host.run_dir(saved));
                let operation = Operation::MakeJail { jail: jail.clone(), files };
                self.perform(instance, action, operation).await?;
            }
            None => {
                if let Some(rootfs) = &spec.image.rootfs {
                    // A snapshot remembers the path of each drive: a name in the run directory is the same anywhere.
                    let (source, name) = (rootfs.clone(), ROOTFS.to_owned());
                    let link = Operation::LinkFile { instance: instance.clone(), source, name };
                    self.perform(instance, action, link).await?;
                }
            }
        }
        // The console goes on for as long as there is the instance.
        let console = run_files::open(&*self.host, instance, CONSOLE).await.ok().flatten();
        let console_from = console.and_then(|file| file.metadata().ok()).map_or(0, |meta| meta.len());
        let file = VmmFile::new(spec.revision, spec.resources, console_from, user_of(spec));
        let text = serde_json::to_string(&file)
            .map_err(|error| DriverError::Vmm { instance: instance.clone(), reason: error.to_string() })?;
        let write = Operation::WriteFile { instance: instance.clone(), name: VMM_FILE.to_owned(), text };
        self.perform(instance, action, write).await?;
        Ok(file)
    }

    async fn spawn(&self, spec: &VmSpec, file: VmmFile, action: &'static str) -> Result<Live, DriverError> {
        let instance = &spec.instance;
        let paths = self
            .paths(instance)
            .await
            .map_err(|cause| host_error(instance, action, cause))?
            .run_as(user_of(spec));
        let (program, args) = match &self.settings.jailer {
            Some(jailer) => {
                (&jailer.program, jailer_args(instance, &paths.run_dir, &self.program, jailer, user_of(spec)))
            }
            None => (&self.program, vmm_args(instance)),
        };
        let spawn = SpawnVmm {
            instance: instance.clone(),
            program: program.clone(),
            args,
            log: CONSOLE.to_owned(),
            tap: None,
            group: spec.bounds.group.clone(),
            confine: None,
        };
        let outcome = self.perform(instance, action, Operation::SpawnVmm(spawn)).await?;
        let Outcome::Process(process) = outcome else {
            let reason = "the host started its VMM and does not say which it is".to_owned();
            return Err(DriverError::Vmm { instance: instance.clone(), reason });
        };
        let mut live = Live { vmm: VmmProcess { instance: instance.clone(), process }, file, paths };
        if self.settings.jailer.as_ref().is_some_and(super::settings::JailerSettings::forks) {
            live.vmm = self.forked(&live, action).await?;
        }
        Ok(live)
    }

    /// The process that a jailer left behind when it ended: the one whose pid it wrote down.
    async fn forked(&self, live: &Live, action: &'static str) -> Result<VmmProcess, DriverError> {
        let instance = &live.vmm.instance;
        let name = self.program.file_name().unwrap_or_default().to_string_lossy();
        let pid_file = live.paths.inside(&format!("{name}.pid"));
        let limit = self.settings.limits.socket;
        let deadline = Instant::now() + limit;
        loop {
            let written = run_files::tail(&*self.host, instance, &pid_file, PID_FILE_BYTES).await;
            let written = written.ok().and_then(|text| String::from_utf8(text).ok());
            let pid = written.and_then(|text| text.trim().parse::<u32>().ok());
            let found = self.host.vmms().await.map_err(|cause| host_error(instance, action, cause))?;
            let mut ours = found.into_iter().filter(|vmm| vmm.instance == *instance);
            if let Some(vmm) = ours.find(|vmm| Some(vmm.process.pid) == pid) {
                return Ok(vmm);
            }
            if Instant::now() > deadline {
                return Err(stuck(instance, action, limit));
            }
            sleep(RETRY).await;
        }
    }

    /// Brings a fresh process to the point where its guest runs, or is loaded and paused.
    async fn bring_up(
        &self,
        spec: &VmSpec,
        origin: &Origin<'_>,
        live: &Live,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let instance = &spec.instance;
        let limits = &self.settings.limits;
        let fault = |error| api_error(instance, action, error);
        let api = self.dial(live, API_SOCKET);
        let connecting = ApiClient::connect_when_up(&api, limits.socket);
        let mut client = tokio::select! {
            connected = connecting => connected.map_err(fault)?,
            end = self.host.wait_end(&live.vmm) => {
                let end = end.map_err(|cause| host_error(instance, action, cause))?;
                let reason = format!("its VMM did not come up: {}", explain(&*self.host, &end, live).await);
                return Err(DriverError::Vmm { instance: instance.clone(), reason });
            }
        };
        let described = self.describe(&mut client, instance, action).await?;
        if let Some(group) = spec.bounds.group.clone() {
            // A jailer may have moved itself before it became the VMM.
            let process = live.vmm.process.clone();
            self.perform(instance, action, Operation::ConfirmGroup { group, process }).await?;
        }
        if described.version < OLDEST {
            let reason = format!("Firecracker {} is too old; install {OLDEST} or newer", described.version);
            return Err(DriverError::Vmm { instance: instance.clone(), reason });
        }
        let bad = |error: BadRequest| bad_request(instance, &error);
        let daemon = self.settings.jailer.as_ref().is_some_and(|jailer| jailer.daemonize);
        match origin {
            Origin::Image => {
                let mut calls = observing(daemon).map_err(bad)?;
                calls.extend(configuring(spec, described.version, live.paths.jail.is_some()).map_err(bad)?);
                for call in &calls {
                    client.send(call, limits.call).await.map_err(fault)?;
                }
                let start = Action::InstanceStart.request().map_err(bad)?;
                client.send(&start, limits.start).await.map_err(fault)?;
            }
            Origin::Snapshot(manifest) => {
                if let Some(reason) = self.unlike(manifest, described.version, instance)? {
                    return Err(DriverError::Unusable { instance: manifest.instance.clone(), reason });
                }
                // A snapshot carries no metrics; that is the only call allowed before a load. The console is this process's own
                // output either way.
                for call in &observing(false).map_err(bad)? {
                    client.send(call, limits.call).await.map_err(fault)?;
                }
                let jailed = live.paths.jail.is_some();
                let directory = self.host.run_dir(&manifest.instance).join(&manifest.directory);
                let name = |file| {
                    if jailed { file_in_jail(file) } else { directory.join(file).display().to_string() }
                };
                let track = described.version.loses_vsock_after_a_bare_resume();
                let mut load = SnapshotLoad::paused(&name(STATE), &name(MEMORY), track);
                // Said again although it is the same: a snapshot would take whatever TAP it was made with.
                load.network_overrides.extend(
                    spec.bounds.nic.as_ref().map(|nic| NetworkOverride {
                        iface_id: NIC.to_owned(),
                        host_dev_name: nic.tap.clone(),
                    }),
                );
                let load = load.request().map_err(bad)?;
                if let Err(error) = client.send(&load, limits.start).await {
                    if error.ends_the_process() {
                        // It ends by itself, and so says more in its log than one that is killed.
                        let _ = tokio::time::timeout(limits.call, self.host.wait_end(&live.vmm)).await;
                    }
                    return Err(fault(error));
                }
            }
        }
        Ok(())
    }

    /// A failure in better words, if the process ended of it and said why.
    async fn why(&self, live: &Live, error: DriverError) -> DriverError {
        let broken = matches!(error, DriverError::Io { .. });
        if !broken {
            return error;
        }
        let ended = tokio::time::timeout(self.settings.limits.call, self.host.wait_end(&live.vmm)).await;
        let Ok(Ok(end)) = ended else { return error };
        let reason =
            format!("its VMM ended while it was brought up: {}", explain(&*self.host, &end, live).await);
        DriverError::Vmm { instance: live.vmm.instance.clone(), reason }
    }
}

/// The files of a snapshot by the names they have in a jail.
fn file_in_jail(file: &str) -> String {
    format!("snapshot.{file}")
}

fn jail_files(
    spec: &VmSpec,
    origin: &Origin<'_>,
    run_dir: &Path,
    run_dir_of: impl Fn(&InstanceId) -> PathBuf,
) -> Vec<JailFile> {
    let read_only = |source: &Path, name: &str| JailFile {
        source: source.to_owned(),
        name: name.to_owned(),
        writable: false,
    };
    let mut files = Vec::new();
    match origin {
        Origin::Image => {
            files.push(read_only(&spec.image.kernel, KERNEL));
            files.extend(spec.image.initrd.iter().map(|initrd| read_only(initrd, INITRD)));
        }
        Origin::Snapshot(manifest) => {
            let dir = run_dir_of(&manifest.instance).join(&manifest.directory);
            files.extend([MEMORY, STATE].map(|file| read_only(&dir.join(file), &file_in_jail(file))));
        }
    }
    files.extend(spec.image.rootfs.iter().map(|rootfs| read_only(rootfs, ROOTFS)));
    if spec.resources.data_disk_mib > 0 {
        files.push(JailFile { source: run_dir.join(DATA_DISK), name: DATA_DISK.to_owned(), writable: true });
    }
    files
}

/// Metrics; and the console, where the process has no output of its own.
fn observing(daemon: bool) -> Result<Vec<Request>, BadRequest> {
    let mut calls = vec![metrics(METRICS)?];
    if daemon {
        calls.push(serial(CONSOLE)?);
    }
    Ok(calls)
}

/// The user that the VMM runs as, where it is not that of the settings.
fn user_of(spec: &VmSpec) -> Option<u32> {
    spec.bounds.jail.as_ref().map(|jail| jail.user)
}

/// The machine, in the order in which it is told.
fn configuring(spec: &VmSpec, version: Version, jailed: bool) -> Result<Vec<Request>, BadRequest> {
    let image = &spec.image;
    let path = |path: &Path, in_jail: &str| {
        if jailed { in_jail.to_owned() } else { path.display().to_string() }
    };
    let machine = MachineConfig {
        vcpu_count: spec.resources.vcpus,
        mem_size_mib: spec.resources.mem_mib,
        // Makes the throw-away snapshot of each pause small: 11 to 31 ms instead of 296 to 505 for 128 MiB.
        track_dirty_pages: version.loses_vsock_after_a_bare_resume(),
    };
    let source = BootSource {
        kernel_image_path: path(&image.kernel, KERNEL),
        initrd_path: image.initrd.as_deref().map(|initrd| path(initrd, INITRD)),
        boot_args: format!("{BOOT_ARGS} {}", image.cmdline).trim_end().to_owned(),
    };
    let drive = |id: &str, file: &str, root: bool| Drive {
        drive_id: id.to_owned(),
        path_on_host: file.to_owned(),
        is_root_device: root,
        is_read_only: root,
        // What is only read has nothing to flush.
        cache_type: if root { CacheType::Unsafe } else { CacheType::Writeback },
    };
    let mut calls = vec![machine.request()?, source.request()?];
    if image.rootfs.is_some() {
        calls.push(drive("rootfs", ROOTFS, true).request()?);
    }
    if spec.resources.data_disk_mib > 0 {
        calls.push(drive("data", DATA_DISK, false).request()?);
    }
    if let Some(nic) = &spec.bounds.nic {
        let interface = NetworkInterface { host_dev_name: nic.tap.clone(), guest_mac: nic.mac.clone() };
        calls.push(interface.request()?);
    }
    calls.push(Vsock { guest_cid: GUEST_CID, uds_path: VSOCK_SOCKET.to_owned() }.request()?);
    calls.push(entropy()?);
    // Empty until the guest is asked. What it gave back and needs after all it takes, before it ends a program.
    let balloon = Balloon { amount_mib: 0, deflate_on_oom: true, stats_polling_interval_s: 1 };
    calls.push(balloon.request()?);
    Ok(calls)
}

impl<H: Host> Vmms<H> {
    fn unlike(
        &self,
        manifest: &Manifest,
        version: Version,
        instance: &InstanceId,
    ) -> Result<Option<String>, DriverError> {
        let here = super::snapshot_file::MadeOn::here(version)
            .map_err(|cause| super::vmm::io_error(instance, "look at the host of", cause))?;
        Ok(manifest.made_on.differs(&here))
    }
}
