//! MicroVMs by QEMU: one process per instance, which outlives the agent.
//!
//! All that belongs to an instance lies in its run directory. `vmm.json` is written before the process is started and
//! the process is found by looking for it, so that a crash between any two steps leaves nothing unexplained. One task
//! per VMM waits for its end; one control connection per VMM stays open ([`qmp`]).
//!
//! A VMM that waits for memory to load (`inmigrate`) and that is not being loaded was left by an agent that died in the
//! middle of a restore. Its guest never ran, so it is ended wherever it is found.

mod args;
mod balloon;
mod binary;
mod checksums;
mod compress;
mod live;
mod migrate;
pub mod qmp;
mod save;
mod saved;
mod settings;
mod snapshot;
mod start;
mod tsc;
mod watch;

use std::collections::{HashMap, HashSet};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::future::join_all;
use mvm_proto::{InstanceId, Timestamp};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::broadcast;

use crate::driver::GENERATIONS;
use crate::error::same_revision;
use crate::probe::Probe;
use crate::run_files::Dial;
use crate::{
    Balloon, Compression, ConsolePiece, Driver, DriverError, DriverKind, Forks, GuestStream, Lacking,
    Migration, SnapshotOptions, SnapshotRef, Vm, VmExit, VmSpec, VmState, run_files,
};
pub use args::Accelerator;
pub use binary::{Binary, BinaryError};
use live::{Live, Record, Short};
use mvm_host::{EndSignal, Host, LocalHost, Operation, Outcome, VmmProcess};
pub use settings::{AcceleratorChoice, QemuSettings};
use watch::{VMM_LOG, watch_vmm};

/// A follower that is further behind looks at the whole list anyway.
const EXITS_KEPT: usize = 1024;

/// For asking a VMM its state: one that is stuck must not hold up the others.
const LOOK_WITHIN: Duration = Duration::from_secs(1);

/// From the end of a VMM until it is told how it ended.
const TELL_WITHIN: Duration = Duration::from_secs(5);

/// Between SIGTERM, at which QEMU flushes its disks and ends, and SIGKILL.
const TERMINATE_WITHIN: Duration = Duration::from_secs(2);

/// For the kernel to end a killed process: it frees the guest's memory, and may wait for a disk.
const GONE_WITHIN: Duration = Duration::from_secs(30);

/// MicroVMs on QEMU's machine `microvm`.
#[derive(Debug)]
pub struct QemuDriver<H: Host = LocalHost> {
    inner: Arc<Inner<H>>,
}

#[derive(Debug)]
struct Inner<H: Host> {
    host: Arc<H>,
    settings: QemuSettings,
    /// Absent when the accelerator was named.
    probe: Option<Probe>,
    binary: tokio::sync::Mutex<Option<start::Examined>>,
    lives: Mutex<HashMap<InstanceId, Arc<Live>>>,
    /// Those that this driver is starting now: what they look like is not to be judged by others.
    starting: Mutex<HashSet<InstanceId>>,
    /// The instances whose snapshots are being compressed or hashed.
    work: Mutex<HashMap<InstanceId, checksums::BackgroundWork>>,
    exits: broadcast::Sender<VmExit>,
}

impl QemuDriver<LocalHost> {
    /// VMs below `data_dir` on this machine.
    #[must_use]
    pub fn open(data_dir: &Path, settings: QemuSettings) -> Self {
        Self::with_host(LocalHost::new(data_dir), data_dir, settings)
    }
}

impl<H: Host> QemuDriver<H> {
    /// VMs below `data_dir`, started and ended through `host`.
    #[must_use]
    pub fn with_host(host: H, data_dir: &Path, settings: QemuSettings) -> Self {
        let probed = settings.accelerator == AcceleratorChoice::Probed;
        let probe = probed.then(|| Probe::start(data_dir, &settings.program));
        Self::new(host, settings, probe)
    }

    /// VMs to be looked at: without a probe, which leaves a trace.
    #[must_use]
    pub fn peek(host: H, settings: QemuSettings) -> Self {
        Self::new(host, settings, None)
    }

    fn new(host: H, settings: QemuSettings, probe: Option<Probe>) -> Self {
        let exits = broadcast::Sender::new(EXITS_KEPT);
        let inner = Inner {
            host: Arc::new(host),
            settings,
            probe,
            binary: tokio::sync::Mutex::default(),
            lives: Mutex::default(),
            starting: Mutex::default(),
            work: Mutex::default(),
            exits,
        };
        Self { inner: Arc::new(inner) }
    }

    /// What a guest that boots now runs on. Waits for the probe: VMs of one node should not differ by when they began.
    async fn chosen_accelerator(&self) -> Accelerator {
        match (&self.inner.settings.accelerator, &self.inner.probe) {
            (AcceleratorChoice::Only(accelerator), _) => accelerator.clone(),
            (AcceleratorChoice::Probed, Some(probe)) => probe.settled().await.accelerator(),
            (AcceleratorChoice::Probed, None) => Accelerator::Tcg,
        }
    }

    fn answer_within(&self) -> Duration {
        self.inner.settings.answer_within
    }

    async fn perform(
        &self,
        instance: &InstanceId,
        action: &'static str,
        operation: Operation,
    ) -> Result<Outcome, DriverError> {
        let performed = self.inner.host.perform(&operation).await;
        performed.map_err(|cause| DriverError::Host { instance: instance.clone(), action, cause })
    }

    async fn remove_file(
        &self,
        instance: &InstanceId,
        action: &'static str,
        name: &str,
    ) -> Result<(), DriverError> {
        let remove = Operation::RemoveFile { instance: instance.clone(), name: name.to_owned() };
        self.perform(instance, action, remove).await.map(|_| ())
    }

    /// The processes of one instance: one, or none, or more if something went wrong that must be put right.
    async fn processes(
        &self,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<Vec<VmmProcess>, DriverError> {
        let vmms = self.inner.host.vmms().await;
        let vmms = vmms.map_err(|cause| DriverError::Host { instance: instance.clone(), action, cause })?;
        Ok(vmms.into_iter().filter(|vmm| vmm.instance == *instance).collect())
    }

    /// The VMM of an instance, taken over if this driver does not know it yet.
    async fn live(
        &self,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<Option<Arc<Live>>, DriverError> {
        let known = self.inner.lives.lock().get(instance).cloned();
        if let Some(live) = known.filter(|live| !live.has_ended()) {
            return Ok(Some(live));
        }
        let Some(vmm) = self.processes(instance, action).await?.into_iter().next() else { return Ok(None) };
        let live = self.register(&vmm).await;
        if self.was_left_loading(&live, &live.run(LOOK_WITHIN).await).await {
            self.end_processes(instance, action).await?;
            return Ok(None);
        }
        Ok(Some(live))
    }

    async fn living(&self, instance: &InstanceId, action: &'static str) -> Result<Arc<Live>, DriverError> {
        let live = self.live(instance, action).await?;
        live.ok_or_else(|| DriverError::NoVm { instance: instance.clone(), action })
    }

    /// Asks again once no start is under way: the earlier answer may have been of a load that is over by now.
    async fn was_left_loading(&self, live: &Live, run: &str) -> bool {
        const LOADING: &str = "inmigrate";
        let nobody_starts = || !self.inner.starting.lock().contains(live.instance());
        if run != LOADING || !nobody_starts() {
            return false;
        }
        let again = async { live.qmp(LOOK_WITHIN).await?.query_run(LOOK_WITHIN).await };
        again.await.is_ok_and(|run| run == LOADING) && nobody_starts()
    }

    /// Remembers a process and waits for its end.
    async fn register(&self, vmm: &VmmProcess) -> Arc<Live> {
        if let Some(known) = self.known(vmm) {
            return known;
        }
        let host = &self.inner.host;
        let record = Record::read(&**host, &vmm.instance).await;
        let mut lives = self.inner.lives.lock();
        // Another task may have been quicker.
        if let Some(known) = lives.get(&vmm.instance).filter(|known| known.vmm == *vmm) {
            return Arc::clone(known);
        }
        let (tell, ended) = tokio::sync::watch::channel(None);
        let weak = Arc::downgrade(&self.inner);
        let watcher = tokio::spawn(watch_vmm(weak, Arc::clone(host), vmm.clone(), tell)).abort_handle();
        let control = Dial::through(host, &vmm.instance, args::QMP_SOCKET);
        let live = Arc::new(Live::new(vmm.clone(), record, control, ended, watcher));
        // Found by a look that took long, it may be older than the one that was started meanwhile.
        let newer =
            |known: &Arc<Live>| !known.has_ended() && known.vmm.process.start_time > vmm.process.start_time;
        if !lives.get(&vmm.instance).is_some_and(newer) {
            lives.insert(vmm.instance.clone(), Arc::clone(&live));
        }
        live
    }

    /// Waits until the end of each VMM was told that this driver follows and that is not among those that were found.
    async fn until_told(&self, found: &[VmmProcess]) -> Result<(), DriverError> {
        let lives: Vec<Arc<Live>> = self.inner.lives.lock().values().cloned().collect();
        let mut ended: Vec<Arc<Live>> =
            lives.into_iter().filter(|live| !live.has_ended() && !found.contains(&live.vmm)).collect();
        if ended.is_empty() {
            return Ok(());
        }
        // One that was started since that look is not gone.
        let again = self.inner.host.vmms().await.map_err(|cause| DriverError::List { cause })?;
        ended.retain(|live| !again.contains(&live.vmm));
        for live in ended {
            if self.gone(&live, TELL_WITHIN, "list").await.is_err() {
                tracing::warn!(instance = %live.instance(), "how a VMM ended is not known yet");
            }
        }
        Ok(())
    }

    fn known(&self, vmm: &VmmProcess) -> Option<Arc<Live>> {
        self.inner.lives.lock().get(&vmm.instance).filter(|known| known.vmm == *vmm).cloned()
    }

    /// One command on an instance's control connection.
    async fn command(
        &self,
        instance: &InstanceId,
        action: &'static str,
        command: &'static str,
    ) -> Result<(), DriverError> {
        let live = self.living(instance, action).await?;
        let within = self.answer_within();
        let asked = async { live.qmp(within).await?.command(command, Value::Null, within).await };
        match asked.await {
            Ok(_) => Ok(()),
            Err(cause) => Err(live.explain(action, cause).await),
        }
    }

    /// Ends every process of an instance and waits until they are gone.
    async fn end_processes(&self, instance: &InstanceId, action: &'static str) -> Result<(), DriverError> {
        for _ in 0..GENERATIONS {
            let left = self.processes(instance, action).await?;
            if left.is_empty() {
                break;
            }
            for vmm in left {
                let live = self.register(&vmm).await;
                self.signal(&vmm, EndSignal::Kill, action).await?;
                self.gone(&live, GONE_WITHIN, action).await?;
            }
        }
        // Gone from `/proc` is not yet reported: after this call it must be known as ended.
        let known = self.inner.lives.lock().get(instance).cloned();
        if let Some(live) = known {
            self.gone(&live, GONE_WITHIN, action).await?;
        }
        Ok(())
    }

    async fn signal(
        &self,
        vmm: &VmmProcess,
        signal: EndSignal,
        action: &'static str,
    ) -> Result<(), DriverError> {
        let end = Operation::EndProcess { process: vmm.process.clone(), signal };
        self.perform(&vmm.instance, action, end).await.map(|_| ())
    }

    async fn gone(&self, live: &Live, within: Duration, action: &'static str) -> Result<(), DriverError> {
        let mut ended = live.ended.clone();
        let gone = tokio::time::timeout(within, ended.wait_for(Option::is_some)).await;
        let stuck = |_| DriverError::Stuck { instance: live.instance().clone(), action, waited: within };
        gone.map(|_| ()).map_err(stuck)
    }
}

fn no_console(instance: &InstanceId, cause: std::io::Error) -> DriverError {
    DriverError::Io { instance: instance.clone(), action: "read the console of", cause }
}

impl<H: Host> Driver for QemuDriver<H> {
    fn kind(&self) -> DriverKind {
        DriverKind::Qemu
    }

    async fn list(&self) -> Result<Vec<Vm>, DriverError> {
        let vmms = self.inner.host.vmms().await.map_err(|cause| DriverError::List { cause })?;
        self.until_told(&vmms).await?;
        let lives = join_all(vmms.iter().map(|vmm| self.register(vmm))).await;
        let runs = join_all(lives.iter().map(|live| live.run(LOOK_WITHIN))).await;
        let mut found = Vec::with_capacity(lives.len());
        for (live, run) in lives.iter().zip(runs) {
            if self.was_left_loading(live, &run).await {
                self.end_processes(live.instance(), "end the unfinished restore of").await?;
            } else if !live.has_ended() {
                let vm = live.as_vm(&run);
                // An earlier agent may have ended before it could.
                if vm.state == VmState::Running && live.short() == Short::Unknown {
                    self.give_back(live);
                }
                found.push(vm);
            }
        }
        Ok(found)
    }

    async fn instances(&self) -> Result<Vec<InstanceId>, DriverError> {
        self.inner.host.run_dirs().await.map_err(|cause| DriverError::List { cause })
    }

    async fn adopt(&self, instance: &InstanceId) -> Result<Option<Vm>, DriverError> {
        let Some(live) = self.live(instance, "adopt").await? else { return Ok(None) };
        let run = live.run(LOOK_WITHIN).await;
        Ok((!live.has_ended()).then(|| live.as_vm(&run)))
    }

    async fn boot(&self, spec: &VmSpec) -> Result<(), DriverError> {
        match self.live(&spec.instance, "boot").await? {
            Some(live) => same_revision(&spec.instance, live.revision(), spec.revision),
            None => self.start_booting(spec).await,
        }
    }

    async fn pause(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.command(instance, "pause", "stop").await
    }

    async fn resume(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.command(instance, "resume", "cont").await?;
        if let Some(live) = self.inner.lives.lock().get(instance) {
            self.give_back(live);
        }
        Ok(())
    }

    async fn snapshot(
        &self,
        instance: &InstanceId,
        options: &SnapshotOptions,
    ) -> Result<SnapshotRef, DriverError> {
        self.save(instance, options).await
    }

    async fn stop_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        // Asked of one that is not saving, it does nothing.
        self.command(instance, "stop the snapshot of", "migrate_cancel").await
    }

    async fn restore(
        &self,
        spec: &VmSpec,
        snapshot: &SnapshotRef,
        options: &SnapshotOptions,
    ) -> Result<(), DriverError> {
        same_revision(&spec.instance, snapshot.revision, spec.revision)?;
        match self.live(&spec.instance, "restore").await? {
            Some(live) => same_revision(&spec.instance, live.revision(), spec.revision),
            None => self.start_restoring(spec, snapshot, options).await,
        }
    }

    async fn discard_snapshot(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.stop_compression(instance).await;
        for name in [snapshot::SNAPSHOT, snapshot::UNFINISHED] {
            self.remove_file(instance, "discard the snapshot of", name).await?;
        }
        Ok(())
    }

    async fn stop(&self, instance: &InstanceId, grace: Duration) -> Result<(), DriverError> {
        const ACTION: &str = "stop";
        let Some(live) = self.live(instance, ACTION).await? else { return Ok(()) };
        if live.as_vm(&live.run(LOOK_WITHIN).await).state == VmState::Running {
            // The caller has asked the guest itself; a guest that ends takes its VMM with it.
            if self.gone(&live, grace, ACTION).await.is_ok() {
                return Ok(());
            }
            self.signal(&live.vmm, EndSignal::Terminate, ACTION).await?;
            if self.gone(&live, TERMINATE_WITHIN, ACTION).await.is_ok() {
                return Ok(());
            }
        }
        self.end_processes(instance, ACTION).await
    }

    async fn kill(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.end_processes(instance, "kill").await
    }

    async fn remove(&self, instance: &InstanceId) -> Result<(), DriverError> {
        self.end_processes(instance, "remove").await?;
        self.stop_compression(instance).await;
        let remove = Operation::RemoveRunDir { instance: instance.clone() };
        self.perform(instance, "remove", remove).await.map(|_| ())
    }

    async fn guest(&self, instance: &InstanceId) -> Result<GuestStream, DriverError> {
        const ACTION: &str = "reach";
        let live = self.living(instance, ACTION).await?;
        match Dial::through(&self.inner.host, instance, args::GUEST_SOCKET).connect().await {
            Ok(stream) => Ok(Box::new(stream)),
            Err(cause) => Err(live.explain(ACTION, cause.into()).await),
        }
    }

    fn exits(&self) -> broadcast::Receiver<VmExit> {
        self.inner.exits.subscribe()
    }

    fn cpu_time(&self, instance: &InstanceId) -> Option<Duration> {
        let live = self.inner.lives.lock().get(instance).cloned()?;
        self.inner.host.cpu_time(&live.vmm.process)
    }

    async fn console(&self, instance: &InstanceId, max_bytes: usize) -> Result<Vec<u8>, DriverError> {
        let read = run_files::log_tail(&*self.inner.host, instance, args::CONSOLE, max_bytes).await;
        read.map_err(|cause| no_console(instance, cause))
    }

    async fn console_from(
        &self,
        instance: &InstanceId,
        from: u64,
        max_bytes: usize,
    ) -> Result<ConsolePiece, DriverError> {
        let read = run_files::log_from(&*self.inner.host, instance, args::CONSOLE, from, max_bytes).await;
        read.map_err(|cause| no_console(instance, cause))
    }

    async fn console_since(&self, instance: &InstanceId, since: Timestamp) -> Result<u64, DriverError> {
        let found = run_files::log_since(&*self.inner.host, instance, args::CONSOLE, since).await;
        found.map_err(|cause| no_console(instance, cause))
    }

    fn forks(&self) -> Result<&dyn Forks, Lacking> {
        Ok(self)
    }

    fn balloon(&self) -> Result<&dyn Balloon, Lacking> {
        Ok(self)
    }

    fn compression(&self) -> Result<&dyn Compression, Lacking> {
        Ok(self)
    }

    fn encryption(&self) -> Result<(), Lacking> {
        Ok(())
    }

    fn migration(&self) -> Result<&dyn Migration, Lacking> {
        Ok(self)
    }
}
