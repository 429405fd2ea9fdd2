//! Puts a node's parts together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mvm_host::AnyHost;
use mvm_image::{ImageError, ImageSettings, Images, Vouched, find_guest};
use mvm_proto::status::{Capability, Capacity, NodeStatus};
use mvm_proto::{NodeId, Timestamp};
use mvm_store::{Settings, SledStore};
use mvm_telemetry::Tracer;
use mvm_vmm::choice;
use mvm_vmm::{AnyDriver, DriverKind, DriverUnavailable, VmmSettings};
use tokio::sync::{Notify, Semaphore, broadcast, watch};

use crate::audit::{AuditLog, AuditSettings};
use crate::clock::Clock;
use crate::events::Events;
use crate::execute::recover::{Recovered, Recovery, recover};
use crate::execute::{Executor, StepError, Writing};
use crate::guest::GuestLinks;
use crate::instance::records::{Records, StateError};
use crate::isolation::{Isolation, IsolationSettings, Machine, Unavailable, machine};
use crate::node::actor::Actor;
use crate::node::engine::{Engine, EngineSettings};
use crate::node::handle::{NodeHandle, Pass, Shared};
use crate::node::info::capabilities;
use crate::node::wake::UnderWay;
use crate::persist::{SessionLimits, SessionSettings, Sessions};
use crate::secrets::Secrets;

/// Where records are kept, below the data directory.
pub(crate) const STATE_DIR: &str = "state";

/// A node's records are small and all in memory: sled's cache needs little.
const CACHE_BYTES: u64 = 1024 * 1024;

/// How often a node is compared with its desired state when nothing happens.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(30);

/// Enough to hide one slow boot behind others without starving the host's processors.
pub const DEFAULT_PARALLEL_STEPS: usize = 4;

/// A receiver of wakes, or of ended steps, that is this many behind loses the oldest ones.
const WAKES_KEPT: usize = 256;

/// What a node is told at start.
#[derive(Debug, Clone)]
pub struct NodeSettings {
    pub node_id: NodeId,
    /// Records and driver state are kept below it.
    pub data_dir: PathBuf,
    /// Who does things to this machine; absent: this process itself.
    pub host: Option<AnyHost>,
    pub driver: DriverKind,
    pub vmm: VmmSettings,
    pub images_dir: PathBuf,
    /// Which images may start.
    pub vouched: watch::Receiver<Vouched>,
    pub secrets_dir: PathBuf,
    /// Sessions that are kept on this machine.
    pub sessions_dir: PathBuf,
    pub session_limits: SessionLimits,
    /// How long an orphan (a VM or directory without a record) is kept before it is removed.
    pub sweep_after: Duration,
    /// How long a guest may take from boot to ready.
    pub boot_deadline: Duration,
    pub capacity: Capacity,
    pub isolation: IsolationSettings,
    /// How often the node is compared with its desired state when nothing happens.
    pub interval: Duration,
    /// How many instances may be worked on at once.
    pub parallel_steps: usize,
    /// What records the steps of documents that belong to a trace.
    pub tracer: Tracer,
    pub clock: Clock,
}

#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    #[error("the document is for node {document}, this is {node}")]
    OtherNode { document: NodeId, node: NodeId },
    #[error(
        "only root can keep tenants apart ({needs}); start the agent as root, or say that nothing does: --network none \
         --cgroups none --jail none"
    )]
    NeedsRoot { needs: &'static str },
    #[error(transparent)]
    Unavailable(#[from] Unavailable),
    #[error(transparent)]
    Driver(#[from] DriverUnavailable),
    #[error("could not open the node's state")]
    State(#[from] StateError),
    #[error("could not recover the steps that an earlier agent left unfinished")]
    Recover(#[from] StepError),
    #[error("could not open the images of this node")]
    Images(#[from] ImageError),
    #[error("could not prepare the data directory {path}")]
    DataDir {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
}

impl NodeError {
    /// What to do next, where the error's text does not say it.
    #[must_use]
    pub fn remediation(&self) -> Option<String> {
        match self {
            Self::Unavailable(lack) => Some(lack.remedy.clone()),
            Self::Driver(DriverUnavailable::NoQemu(_) | DriverUnavailable::Qemu(_)) => Some(
                "Install it (apt-get install --no-install-recommends qemu-system-x86), name another by --qemu, or leave \
                 --driver out where there is a Firecracker. `mvm doctor` says what there is."
                    .to_owned(),
            ),
            _ => None,
        }
    }
}

pub(super) fn planner_capacity(capacity: &Capacity) -> mvm_planner::Capacity {
    mvm_planner::Capacity {
        vcpus: capacity.vcpus,
        mem_mib: capacity.mem_mib,
        disk_mib: capacity.disk_mib,
        max_instances: capacity.max_instances,
    }
}

/// A node that is open but not yet running: give it to [`reconcile_task`].
#[derive(Debug)]
pub struct Node {
    pub(super) engine: Engine,
    pub(super) interval: Duration,
    pub(super) handle: NodeHandle,
}

impl Node {
    /// Opens records and driver, adopts the VMs that live, and resolves what an earlier agent left half-done.
    pub async fn open(settings: NodeSettings) -> Result<(Node, NodeHandle), NodeError> {
        let (driver, records) =
            open(&settings.data_dir, settings.host.clone(), settings.driver, &settings.vmm).await?;
        let vouched = settings.vouched.clone();
        let images =
            open_images(settings.driver, &settings.data_dir, &settings.images_dir, &settings.vmm, vouched)?;
        Ok(Self::with(&settings, driver, records, images).await)
    }

    /// What its instances boot from.
    pub(crate) fn images(&self) -> Images {
        self.engine.executor.images.clone()
    }

    /// What its driver can do, as `mvm node get` shows it.
    pub(crate) fn capabilities(&self) -> Vec<Capability> {
        capabilities(&*self.engine.driver)
    }

    /// The same with parts that are already open.
    pub async fn with(
        settings: &NodeSettings,
        driver: Arc<AnyDriver>,
        records: Arc<Records>,
        images: Images,
    ) -> (Node, NodeHandle) {
        let recovered = adopt(&driver, &records, Recovery::Act, settings.clock.now()).await;
        let clock = settings.clock.clone();
        let capacity = planner_capacity(&settings.capacity);
        let events = Events::new(clock.clone());
        let host = settings.host.clone().unwrap_or_else(|| AnyHost::local(&settings.data_dir));
        let links = GuestLinks::new(Arc::clone(&driver), clock.clone());
        let sessions = SessionSettings {
            node: settings.node_id.clone(),
            sessions_dir: settings.sessions_dir.clone(),
            secrets_dir: settings.secrets_dir.clone(),
            limits: settings.session_limits,
        };
        let executor = Arc::new(Executor {
            driver,
            records,
            links: links.clone(),
            images,
            isolation: Arc::new(Isolation::new(host, settings.driver, settings.isolation.clone())),
            background: Arc::new(Semaphore::new(1)),
            sessions: Arc::new(Sessions::new(sessions, links, clock.clone(), events.clone())),
            boot_deadline: settings.boot_deadline,
            events,
            wakes: broadcast::Sender::new(WAKES_KEPT),
            ends: broadcast::Sender::new(WAKES_KEPT),
            audit: AuditLog::open(&settings.data_dir, AuditSettings::default(), clock.clone()),
            secrets: Arc::new(Secrets::new(&settings.secrets_dir)),
            writing: Writing::default(),
            tracer: settings.tracer.clone(),
            clock,
        });
        let pressed = watch::Sender::new(false);
        let engine = Engine::new(
            Arc::clone(&executor),
            EngineSettings {
                capacity,
                slots: settings.parallel_steps,
                sweep_after: settings.sweep_after,
                interval: settings.interval,
                recovered,
                pressed: pressed.subscribe(),
            },
        );
        let (current_document, blocked) = (watch::Sender::new(None), watch::Sender::default());
        let actor = Actor {
            executor,
            node_id: settings.node_id.clone(),
            capacity,
            gate: Arc::clone(&engine.gate),
            current_document: current_document.subscribe(),
            blocked: blocked.subscribe(),
            under_way: UnderWay::default(),
            tickets: Arc::default(),
        };
        let status = NodeStatus { node_id: settings.node_id.to_string(), ..NodeStatus::default() };
        let shared = Shared {
            actor,
            status: watch::Sender::new(status),
            passes: watch::Sender::new(Pass::default()),
            trigger: Notify::new(),
            current_document,
            blocked,
            network: engine.network_check.found.subscribe(),
            lacking_secrets: engine.lacking_secrets.subscribe(),
            removals: watch::Sender::default(),
            pressed,
        };
        let handle = NodeHandle { shared: Arc::new(shared) };
        (Node { engine, interval: settings.interval, handle: handle.clone() }, handle)
    }
}

/// Refuses what could only fail later, and one instance at a time: bounds that are required, where this process has no
/// right to them or this machine can't hold them. `looked`: what a process that gave up root's rights found before.
pub(crate) async fn check_bounds(
    isolation: &IsolationSettings,
    driver: DriverKind,
    host: &AnyHost,
    looked: Option<&Machine>,
) -> Result<(), NodeError> {
    let privileged = nix::unistd::geteuid().is_root() || matches!(host, AnyHost::Remote(_));
    if let Some(needs) = isolation.needs_root().filter(|_| !privileged) {
        return Err(NodeError::NeedsRoot { needs });
    }
    match looked {
        Some(machine) => machine.check(isolation, driver)?,
        None => Machine::look().check(isolation, driver)?,
    }
    machine::check_networks(isolation, host).await?;
    Ok(machine::check_groups(isolation, host).await?)
}

/// Opens driver and records in `data_dir`. The records first: their lock keeps a second agent away from the first
/// one's VMs.
async fn open(
    data_dir: &Path,
    host: Option<AnyHost>,
    kind: DriverKind,
    vmm: &VmmSettings,
) -> Result<(Arc<AnyDriver>, Arc<Records>), NodeError> {
    mvm_pki::files::create_private_dir(data_dir)
        .map_err(|cause| NodeError::DataDir { path: data_dir.to_owned(), cause })?;
    let records = open_records(&data_dir.join(STATE_DIR)).await?;
    let host = host.unwrap_or_else(|| AnyHost::local(data_dir));
    let driver = Arc::new(AnyDriver::open(kind, host, data_dir, vmm)?);
    choice::remember(kind, data_dir)
        .map_err(|cause| NodeError::DataDir { path: data_dir.to_owned(), cause })?;
    Ok((driver, records))
}

/// The images that a driver of this kind boots from.
fn open_images(
    kind: DriverKind,
    data_dir: &Path,
    dir: &Path,
    vmm: &VmmSettings,
    vouched: watch::Receiver<Vouched>,
) -> Result<Images, NodeError> {
    if kind == DriverKind::Fake {
        return Ok(Images::imagined(vouched));
    }
    let beside = || find_guest(&std::env::current_exe().ok()?);
    let guest = vmm.guest.clone().or_else(beside);
    let owner = Some(data_dir.to_owned());
    let settings = ImageSettings { owner, guest, vouched, ..ImageSettings::default() };
    Ok(Images::open(dir, settings)?)
}

pub(super) async fn open_records(path: &Path) -> Result<Arc<Records>, NodeError> {
    let settings = Settings { cache_bytes: CACHE_BYTES, ..Settings::default() };
    let store = SledStore::open(path, settings).await.map_err(StateError::from)?;
    Ok(Records::open(store).await?)
}

/// Adopts what lives and resolves what was left half-done, as far as that needs no guest.
pub(super) async fn adopt(
    driver: &AnyDriver,
    records: &Arc<Records>,
    mode: Recovery,
    now: Timestamp,
) -> Recovered {
    let recovered = recover(driver, records, mode, now).await;
    if recovered != Recovered::default() {
        let Recovered { resolved, unfinished, unresolved } = &recovered;
        let (unfinished, unresolved) = (unfinished.len(), unresolved.len());
        tracing::info!(
            resolved,
            unfinished,
            unresolved,
            "recovered the steps that an earlier agent left unfinished"
        );
    }
    recovered
}
