//! Finds, follows and ends the VMM processes of this driver, and removes what they leave behind.

use std::collections::HashMap;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mvm_host::{EndSignal, Host, HostError, Operation, ProcessIdentity, VmmProcess};
use mvm_proto::InstanceId;
use parking_lot::{Mutex, MutexGuard};
use serde::Deserialize;
use tokio::sync::{broadcast, watch};
use tokio::time::timeout;

use super::http::{ApiClient, ApiError};
use super::logs::explain;
use super::paths::{API_SOCKET, Paths, VSOCK_SOCKET};
use super::request::{BadRequest, Request};
use super::settings::FirecrackerSettings;
use super::version::Version;
use super::vmm_file::VmmFile;
use crate::driver::GENERATIONS;
use crate::run_files::Dial;
use crate::{DriverError, SnapshotRef, VmExit, VmState};

/// A killed process is gone within milliseconds, unless the kernel waits for a disk.
const DEATH_LIMIT: Duration = Duration::from_secs(30);

/// From the end of a VMM until it is told how it ended: a few small files are read.
const TELL_LIMIT: Duration = Duration::from_secs(5);

/// What this driver holds for its caller.
#[derive(Debug)]
pub(super) struct Vmms<H> {
    pub(super) host: Arc<H>,
    pub(super) settings: FirecrackerSettings,
    pub(super) program: PathBuf,
    pub(super) exits: broadcast::Sender<VmExit>,
    known: Mutex<HashMap<InstanceId, Known>>,
    /// Changes with each end that was told.
    told: watch::Sender<()>,
}

/// What is remembered of a live VMM, and lost without harm when the agent restarts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    process: ProcessIdentity,
    /// Its end is waited for.
    followed: bool,
    /// What it was last told or seen to do; absent: it was never seen to run anything.
    pub(super) state: Option<VmState>,
    /// It writes a snapshot: it is paused, and does not answer until that is over.
    pub(super) writing: bool,
    /// The snapshot taken since the pause: memory has not changed, so taking it again would give the same.
    pub(super) snapshot: Option<SnapshotRef>,
    /// A snapshot of any kind was taken since the pause, or the VM was loaded and never ran.
    pub(super) resumes_safely: bool,
    /// The guest's vsock answered before the pause, so that it must answer after it.
    pub(super) answered: bool,
}

impl Known {
    fn nothing_of(process: &ProcessIdentity) -> Self {
        Self {
            process: process.clone(),
            followed: false,
            state: None,
            writing: false,
            snapshot: None,
            resumes_safely: false,
            answered: false,
        }
    }
}

/// While this exists, its VMM is known to write a snapshot.
#[derive(Debug)]
pub(super) struct Writing<'a, H: Host> {
    vmms: &'a Vmms<H>,
    vmm: &'a VmmProcess,
}

impl<H: Host> Drop for Writing<'_, H> {
    fn drop(&mut self) {
        self.vmms.note(self.vmm, |known| known.writing = false);
    }
}

/// A live VMM of ours.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) vmm: VmmProcess,
    pub(super) file: VmmFile,
    pub(super) paths: Paths,
}

/// What a VMM says of itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Described {
    /// Absent: it was started and never told to run anything.
    pub(super) state: Option<VmState>,
    pub(super) version: Version,
}

#[derive(Deserialize)]
struct InstanceInfo {
    id: String,
    state: String,
    vmm_version: String,
}

impl<H: Host> Vmms<H> {
    pub(super) fn new(
        host: H,
        settings: FirecrackerSettings,
        program: PathBuf,
        exits: broadcast::Sender<VmExit>,
    ) -> Self {
        Self {
            host: Arc::new(host),
            settings,
            program,
            exits,
            known: Mutex::default(),
            told: watch::Sender::new(()),
        }
    }

    pub(super) async fn paths(&self, instance: &InstanceId) -> Result<Paths, HostError> {
        let run_dir = self.host.run_dir(instance);
        let jailer = self.settings.jailer.as_ref();
        let there = if jailer.is_some() { self.host.jail_root(instance).await? } else { None };
        Ok(Paths::new(instance, run_dir, &self.program, jailer, there))
    }

    /// The way to a socket of a live VMM.
    pub(super) fn dial(&self, live: &Live, name: &str) -> Dial {
        Dial::through(&self.host, &live.vmm.instance, &live.paths.inside(name))
    }

    fn known(&self) -> MutexGuard<'_, HashMap<InstanceId, Known>> {
        self.known.lock()
    }

    pub(super) fn recall(&self, vmm: &VmmProcess) -> Known {
        let known = self.known().get(&vmm.instance).filter(|known| known.process == vmm.process).cloned();
        known.unwrap_or_else(|| Known::nothing_of(&vmm.process))
    }

    pub(super) fn cpu_time(&self, instance: &InstanceId) -> Option<Duration> {
        let process = self.known().get(instance)?.process.clone();
        self.host.cpu_time(&process)
    }

    pub(super) fn remember(&self, vmm: &VmmProcess, change: impl FnOnce(&mut Known)) {
        let mut recalled = self.recall(vmm);
        change(&mut recalled);
        self.known().insert(vmm.instance.clone(), recalled);
    }

    /// Remembers something of a VMM that is followed, and nothing of one that has ended.
    pub(super) fn note(&self, vmm: &VmmProcess, change: impl FnOnce(&mut Known)) {
        if let Some(known) = self.known().get_mut(&vmm.instance).filter(|known| known.process == vmm.process)
        {
            change(known);
        }
    }

    pub(super) fn writing<'a>(&'a self, vmm: &'a VmmProcess) -> Writing<'a, H> {
        self.note(vmm, |known| (known.state, known.writing) = (Some(VmState::Paused), true));
        Writing { vmms: self, vmm }
    }

    /// There is no snapshot any more that asking again could mean.
    pub(super) fn forget_snapshot(&self, instance: &InstanceId) {
        if let Some(known) = self.known().get_mut(instance) {
            known.snapshot = None;
        }
    }

    /// Performs one operation on the host.
    pub(super) async fn perform(
        &self,
        instance: &InstanceId,
        action: &'static str,
        operation: Operation,
    ) -> Result<mvm_host::Outcome, DriverError> {
        self.host.perform(&operation).await.map_err(|cause| host_error(instance, action, cause))
    }

    /// Every live VMM of this driver.
    pub(super) async fn all(self: &Arc<Self>) -> Result<Vec<Live>, HostError> {
        let found = self.host.vmms().await?;
        self.until_told(&found).await?;
        let mut all = Vec::new();
        for vmm in found {
            // Left out it would pass for one that ended.
            all.extend(self.ours(vmm).await?);
        }
        for live in &all {
            self.follow(live);
        }
        Ok(all)
    }

    /// Waits until the end of each VMM was told that is followed and not among those that were found.
    async fn until_told(&self, found: &[VmmProcess]) -> Result<(), HostError> {
        let missing = |found: &[VmmProcess], (instance, known): (&InstanceId, &Known)| {
            known.followed
                && !found.iter().any(|vmm| vmm.instance == *instance && vmm.process == known.process)
        };
        let gone = |found: &[VmmProcess]| -> Vec<VmmProcess> {
            let known = self.known();
            let gone = known.iter().filter(|entry| missing(found, *entry));
            gone.map(|(id, known)| VmmProcess { instance: id.clone(), process: known.process.clone() })
                .collect()
        };
        let mut ended = gone(found);
        if ended.is_empty() {
            return Ok(());
        }
        // One that was started since that look is not gone.
        let again = self.host.vmms().await?;
        ended.retain(|vmm| !again.contains(vmm));
        let is_told = || {
            let known = self.known();
            let followed =
                |vmm: &VmmProcess| known.get(&vmm.instance).is_some_and(|it| it.process == vmm.process);
            !ended.iter().any(followed)
        };
        let mut told = self.told.subscribe();
        if timeout(TELL_LIMIT, told.wait_for(|()| is_told())).await.is_err() {
            tracing::warn!("how a VMM ended is not known yet");
        }
        Ok(())
    }

    async fn ours(&self, vmm: VmmProcess) -> Result<Option<Live>, HostError> {
        let attempt = format!("read what {} runs", vmm.instance);
        let paths = self.paths(&vmm.instance).await?;
        let file = VmmFile::read(&*self.host, &vmm.instance).await;
        let file = file.map_err(|cause| HostError::Io { attempt, cause })?;
        Ok(file.map(|file| {
            let paths = paths.run_as(file.user);
            Live { vmm, file, paths }
        }))
    }

    /// The instance's VMM, if it lives and is ours.
    pub(super) async fn find(
        self: &Arc<Self>,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<Option<Live>, DriverError> {
        let found = self.host.vmms().await.map_err(|cause| host_error(instance, action, cause))?;
        let Some(vmm) = found.into_iter().find(|vmm| vmm.instance == *instance) else { return Ok(None) };
        let pid = vmm.process.pid;
        let Some(live) = self.ours(vmm).await.map_err(|cause| host_error(instance, action, cause))? else {
            let reason = format!("process {pid} runs it, and is no Firecracker of this driver");
            return Err(DriverError::Vmm { instance: instance.clone(), reason });
        };
        self.follow(&live);
        Ok(Some(live))
    }

    /// A connection to a VMM that should have been up for a while.
    pub(super) async fn connect(&self, live: &Live, action: &'static str) -> Result<ApiClient, DriverError> {
        let api = self.dial(live, API_SOCKET);
        let connecting = ApiClient::connect(&api);
        let limit = self.settings.limits.call;
        let stuck = || stuck(&live.vmm.instance, action, limit);
        let connected = timeout(limit, connecting).await.map_err(|_| stuck())?;
        connected.map_err(|error| api_error(&live.vmm.instance, action, error))
    }

    /// Asks a VMM what it does.
    pub(super) async fn describe(
        &self,
        client: &mut ApiClient,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<Described, DriverError> {
        let body = client.send(&Request::describe(), self.settings.limits.call).await;
        let body = body.map_err(|error| api_error(instance, action, error))?;
        let nonsense = |what: String| DriverError::Vmm { instance: instance.clone(), reason: what };
        let info: InstanceInfo = serde_json::from_slice(&body)
            .map_err(|error| nonsense(format!("its VMM describes itself badly: {error}")))?;
        if info.id != instance.as_str() {
            return Err(nonsense(format!("its VMM says that it is {:?}", info.id)));
        }
        let state = match info.state.as_str() {
            "Not started" => None,
            "Running" => Some(VmState::Running),
            "Paused" => Some(VmState::Paused),
            other => return Err(nonsense(format!("its VMM is {other:?}"))),
        };
        let version = info.vmm_version.parse::<Version>().map_err(|error| nonsense(error.to_string()))?;
        Ok(Described { state, version })
    }

    /// The state of a VMM that could not be asked, as far as it is known. One that does not listen and was never seen to
    /// run anything was left behind half started, and runs nothing.
    pub(super) fn assumed(&self, vmm: &VmmProcess, error: &DriverError) -> Option<VmState> {
        let known = self.recall(vmm).state;
        match error {
            DriverError::Io { cause, .. }
                if matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused) =>
            {
                known
            }
            _ => Some(known.unwrap_or(VmState::Running)),
        }
    }

    /// Tells the end of this process when it comes. Once for each.
    pub(super) fn follow(self: &Arc<Self>, live: &Live) {
        {
            let mut known = self.known();
            let entry = known.entry(live.vmm.instance.clone());
            let known = entry.or_insert_with(|| Known::nothing_of(&live.vmm.process));
            if known.process != live.vmm.process {
                *known = Known::nothing_of(&live.vmm.process);
            }
            if std::mem::replace(&mut known.followed, true) {
                return;
            }
        }
        let (vmms, live) = (Arc::clone(self), live.clone());
        tokio::spawn(async move {
            let end = vmms.end_of(&live).await;
            let detail = explain(&*vmms.host, &end, &live).await;
            {
                // Told before it is forgotten: a list waits for the ends of those that are known.
                let mut known = vmms.known();
                // Without a listener it shows in the list.
                let _ = vmms.exits.send(VmExit { instance: live.vmm.instance.clone(), detail });
                if known.get(&live.vmm.instance).is_some_and(|known| known.process == live.vmm.process) {
                    known.remove(&live.vmm.instance);
                }
            }
            vmms.told.send_replace(());
        });
    }

    /// Ends a VMM and waits until it is gone; what it leaves on the disk goes too.
    pub(super) async fn end(&self, live: &Live, action: &'static str) -> Result<(), DriverError> {
        let instance = &live.vmm.instance;
        let failed = |cause| host_error(instance, action, cause);
        let mut next = Some(live.vmm.clone());
        for _ in 0..GENERATIONS {
            let Some(vmm) = next else { break };
            let operation = Operation::EndProcess { process: vmm.process.clone(), signal: EndSignal::Kill };
            self.perform(instance, action, operation).await?;
            let ended = timeout(DEATH_LIMIT, self.host.wait_end(&vmm)).await;
            ended.map_err(|_| stuck(instance, action, DEATH_LIMIT))?.map_err(failed)?;
            next = self.host.vmms().await.map_err(failed)?.into_iter().find(|vmm| vmm.instance == *instance);
        }
        self.remove_leftovers(instance, action).await
    }

    /// Removes what a VMM leaves behind when it ends: its sockets, and its jail.
    pub(super) async fn remove_leftovers(
        &self,
        instance: &InstanceId,
        action: &'static str,
    ) -> Result<(), DriverError> {
        for name in [API_SOCKET, VSOCK_SOCKET] {
            let operation = Operation::RemoveFile { instance: instance.clone(), name: name.to_owned() };
            self.perform(instance, action, operation).await?;
        }
        let paths = self.paths(instance).await.map_err(|cause| host_error(instance, action, cause))?;
        if let Some(jail) = paths.jail {
            self.perform(instance, action, Operation::RemoveJail { jail }).await?;
        }
        Ok(())
    }
}

pub(super) fn stuck(instance: &InstanceId, action: &'static str, waited: Duration) -> DriverError {
    DriverError::Stuck { instance: instance.clone(), action, waited }
}

pub(super) fn host_error(instance: &InstanceId, action: &'static str, cause: HostError) -> DriverError {
    DriverError::Host { instance: instance.clone(), action, cause }
}

pub(super) fn io_error(instance: &InstanceId, action: &'static str, cause: io::Error) -> DriverError {
    DriverError::Io { instance: instance.clone(), action, cause }
}

pub(super) fn api_error(instance: &InstanceId, action: &'static str, error: ApiError) -> DriverError {
    match error {
        ApiError::TimedOut { waited, .. } | ApiError::NoSocket(waited) => stuck(instance, action, waited),
        ApiError::Connect(cause) => io_error(instance, action, cause),
        broken @ ApiError::Broken { .. } => io_error(instance, action, io::Error::other(broken)),
        refused => DriverError::Vmm { instance: instance.clone(), reason: refused.to_string() },
    }
}

pub(super) fn bad_request(instance: &InstanceId, error: &BadRequest) -> DriverError {
    DriverError::Vmm { instance: instance.clone(), reason: error.to_string() }
}
