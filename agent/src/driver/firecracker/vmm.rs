//! The VMM processes of this driver: which there are, in which state, how they end, and what is left of them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use mvm_proto::{Digest, InstanceId};
use serde::Deserialize;
use tokio::sync::broadcast;
use tokio::time::timeout;

use super::http::{ApiClient, ApiError};
use super::metrics::Metrics;
use super::place::{API_SOCKET, CONSOLE, METRICS, Place, VMM_LOG, VSOCK_SOCKET};
use super::request::{BadRequest, Request};
use super::settings::FirecrackerSettings;
use super::version::Version;
use super::vmm_file::VmmFile;
use crate::driver::{DriverError, SnapshotRef, VmExit, VmState};
use crate::host::{EndSignal, Host, HostError, Operation, ProcessEnd, ProcessIdentity, VmmProcess};

/// A killed process is gone within milliseconds, unless the kernel waits for a disk.
const DEATH_LIMIT: Duration = Duration::from_secs(30);

/// How much of a log explains an end.
const LOG_TAIL_BYTES: usize = 2048;
const LOG_TAIL_LINES: usize = 4;

/// What a guest's kernel says last, wherever it is configured to go on from there.
const PANIC: &str = "Kernel panic";

/// What this driver holds for its caller.
#[derive(Debug)]
pub(super) struct Vmms<H> {
    pub(super) host: H,
    pub(super) settings: FirecrackerSettings,
    pub(super) program: PathBuf,
    pub(super) exits: broadcast::Sender<VmExit>,
    known: Mutex<HashMap<InstanceId, Known>>,
}

/// What is remembered of a live VMM, and lost without harm when the agent restarts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Known {
    process: ProcessIdentity,
    /// The snapshot taken since the pause: memory has not changed, so taking it again would give the same.
    pub(super) frozen: Option<SnapshotRef>,
    /// A snapshot of any kind was taken since the pause, or the VM was loaded and never ran.
    pub(super) resumes_safely: bool,
    /// The guest's vsock answered before the pause, so that it must answer after it.
    pub(super) answered: bool,
}

/// A live VMM of ours.
#[derive(Debug, Clone)]
pub(super) struct Live {
    pub(super) vmm: VmmProcess,
    pub(super) file: VmmFile,
    pub(super) place: Place,
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
        Self { host, settings, program, exits, known: Mutex::default() }
    }

    pub(super) fn place(&self, instance: &InstanceId) -> Place {
        let run_dir = self.host.run_dir(instance);
        Place::new(instance, run_dir, &self.program, self.settings.jailer.as_ref())
    }

    fn known(&self) -> MutexGuard<'_, HashMap<InstanceId, Known>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn recall(&self, vmm: &VmmProcess) -> Known {
        let known = self.known().get(&vmm.instance).filter(|known| known.process == vmm.process).cloned();
        known.unwrap_or_else(|| Known {
            process: vmm.process.clone(),
            frozen: None,
            resumes_safely: false,
            answered: false,
        })
    }

    pub(super) fn remember(&self, vmm: &VmmProcess, change: impl FnOnce(&mut Known)) {
        let mut recalled = self.recall(vmm);
        change(&mut recalled);
        self.known().insert(vmm.instance.clone(), recalled);
    }

    /// There is no snapshot any more that asking again could mean.
    pub(super) fn thaw(&self, instance: &InstanceId) {
        if let Some(known) = self.known().get_mut(instance) {
            known.frozen = None;
        }
    }

    /// Carries out one effect.
    pub(super) async fn perform(
        &self,
        instance: &InstanceId,
        action: &'static str,
        operation: Operation,
    ) -> Result<crate::host::Outcome, DriverError> {
        self.host.perform(&operation).await.map_err(|cause| host_error(instance, action, cause))
    }

    /// Every live VMM of this driver.
    pub(super) async fn all(self: &Arc<Self>) -> Result<Vec<Live>, HostError> {
        let found = self.host.vmms().await?;
        let live: Vec<_> = found.into_iter().filter_map(|vmm| self.ours(vmm)).collect();
        for vmm in &live {
            self.follow(vmm);
        }
        Ok(live)
    }

    fn ours(&self, vmm: VmmProcess) -> Option<Live> {
        let place = self.place(&vmm.instance);
        let file = VmmFile::read(&place.run_dir).ok().flatten()?;
        Some(Live { vmm, file, place })
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
        let Some(live) = self.ours(vmm) else {
            let reason = format!("process {pid} runs it, and is no Firecracker of this driver");
            return Err(DriverError::Vmm { instance: instance.clone(), reason });
        };
        self.follow(&live);
        Ok(Some(live))
    }

    /// A connection to a VMM that should have been up for a while.
    pub(super) async fn connect(&self, live: &Live, action: &'static str) -> Result<ApiClient, DriverError> {
        let connecting = ApiClient::connect(live.place.dir(), API_SOCKET);
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

    /// Tells the end of this process when it comes. Once for each.
    pub(super) fn follow(self: &Arc<Self>, live: &Live) {
        {
            let mut known = self.known();
            if known.get(&live.vmm.instance).is_some_and(|known| known.process == live.vmm.process) {
                return;
            }
            let fresh = Known {
                process: live.vmm.process.clone(),
                frozen: None,
                resumes_safely: false,
                answered: false,
            };
            known.insert(live.vmm.instance.clone(), fresh);
        }
        let (vmms, live) = (Arc::clone(self), live.clone());
        tokio::spawn(async move {
            let Ok(end) = vmms.host.wait_end(&live.vmm).await else { return };
            {
                let mut known = vmms.known();
                if known.get(&live.vmm.instance).is_some_and(|known| known.process == live.vmm.process) {
                    known.remove(&live.vmm.instance);
                }
            }
            let detail = explain(&end, &live.place);
            // Nobody may be listening, and then it shows in the list.
            let _ = vmms.exits.send(VmExit { instance: live.vmm.instance, detail });
        });
    }

    /// Ends a VMM and waits until it is gone; what it leaves on the disk goes too.
    pub(super) async fn end(&self, live: &Live, action: &'static str) -> Result<(), DriverError> {
        let instance = &live.vmm.instance;
        let operation = Operation::EndProcess { process: live.vmm.process.clone(), signal: EndSignal::Kill };
        self.perform(instance, action, operation).await?;
        let ended = timeout(DEATH_LIMIT, self.host.wait_end(&live.vmm)).await;
        ended
            .map_err(|_| stuck(instance, action, DEATH_LIMIT))?
            .map_err(|cause| host_error(instance, action, cause))?;
        self.sweep(instance, action).await
    }

    /// Removes what a VMM leaves behind when it ends: its sockets, and its jail.
    pub(super) async fn sweep(&self, instance: &InstanceId, action: &'static str) -> Result<(), DriverError> {
        for name in [API_SOCKET, VSOCK_SOCKET] {
            let operation = Operation::RemoveFile { instance: instance.clone(), name: name.to_owned() };
            self.perform(instance, action, operation).await?;
        }
        if let Some(jail) = self.place(instance).jail {
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
        ApiError::Connect(cause) | ApiError::Broken { cause, .. } => io_error(instance, action, cause),
        refused => DriverError::Vmm { instance: instance.clone(), reason: refused.to_string() },
    }
}

pub(super) fn bad_request(instance: &InstanceId, error: &BadRequest) -> DriverError {
    DriverError::Vmm { instance: instance.clone(), reason: error.to_string() }
}

pub(super) fn same_revision(
    instance: &InstanceId,
    running: Digest,
    asked: Digest,
) -> Result<(), DriverError> {
    if running == asked {
        return Ok(());
    }
    Err(DriverError::OtherRevision { instance: instance.clone(), running, asked })
}

/// How a VMM ended, for people. Firecracker exits with 0 when its guest shut down and when it panicked alike, so the
/// code alone says little: what the guest and the VMM wrote last says more.
pub(super) fn explain(end: &ProcessEnd, place: &Place) -> String {
    let mut parts = vec![match (end.signal, end.exit_code) {
        (Some(signal), _) => format!("ended by signal {signal}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended".to_owned(),
    }];
    let text = |dir: &Path, name: &str, bytes: usize| {
        String::from_utf8_lossy(&tail(&dir.join(name), bytes).unwrap_or_default()).into_owned()
    };
    let console = text(&place.run_dir, CONSOLE, LOG_TAIL_BYTES);
    if let Some(line) = console.lines().rev().find(|line| line.contains(PANIC)) {
        parts.push(format!("the guest panicked: {}", line.trim()));
    }
    if let Some(metrics) = Metrics::newest(&text(place.dir(), METRICS, 64 * 1024)) {
        parts.extend(metrics.troubles());
    }
    let log = text(place.dir(), VMM_LOG, LOG_TAIL_BYTES);
    let last: Vec<_> = log.lines().rev().take(LOG_TAIL_LINES).map(str::trim).collect();
    if !last.is_empty() {
        parts.push(last.into_iter().rev().collect::<Vec<_>>().join(" | "));
    }
    parts.join("; ")
}

/// The end of a file; nothing when there is none.
pub(super) fn tail(path: &Path, max_bytes: usize) -> io::Result<Vec<u8>> {
    let mut file = match File::open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
    };
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(max_bytes as u64)))?;
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(max_bytes as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}
