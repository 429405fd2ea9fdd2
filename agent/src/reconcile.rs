//! Puts a node's parts together, and brings it into agreement once for `mvm agent reconcile`.

pub(crate) mod engine;
pub(crate) mod gate;
mod needs;
mod once;
pub(crate) mod status;
pub(crate) mod wake;
mod work;

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use mvm_host::AnyHost;
use mvm_proto::status::Capacity;
use mvm_proto::{NodeId, Timestamp};
use mvm_store::{Settings, SledStore};

use crate::driver::{AnyDriver, Driver, DriverKind, DriverUnavailable};
use crate::driver_choice;
use crate::execute::StepError;
use crate::execute::recover::{Hands, Recovered, recover};
use crate::image::{ImageError, ImageSettings, Images, find_guest};
use crate::isolation::IsolationSettings;
use crate::persist::SessionLimits;
use crate::settings::VmmSettings;
use crate::state::{Records, StateError};

pub use once::{OnceSettings, Report, peek, reconcile_once};

/// Where records are kept, below the data directory.
const STATE_DIR: &str = "state";

/// A node's records are small and all in memory: sled's cache needs little.
const CACHE_BYTES: u64 = 1024 * 1024;

/// Where the time comes from; a test brings its own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    #[must_use]
    pub fn system() -> Self {
        Self::new(|| Timestamp::from(SystemTime::now()))
    }

    /// Begins at `start` and goes with tokio's time, which a test may pause.
    #[must_use]
    pub fn starting_at(start: Timestamp) -> Self {
        let begun = tokio::time::Instant::now();
        Self::new(move || start + begun.elapsed())
    }

    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}

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
    pub secrets_dir: PathBuf,
    /// Sessions that are kept on this machine.
    pub sessions_dir: PathBuf,
    pub session_limits: SessionLimits,
    /// How long something on the host that no record owns is left alone before it is swept.
    pub sweep_after: Duration,
    /// How long a guest may take from boot to ready.
    pub boot_deadline: Duration,
    pub capacity: Capacity,
    pub isolation: IsolationSettings,
    /// How often the node is compared with its desired state when nothing happens.
    pub interval: Duration,
    /// How many instances may be worked on at once.
    pub parallel_steps: usize,
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
    Driver(#[from] DriverUnavailable),
    #[error("could not open the node's state")]
    State(#[from] StateError),
    #[error("could not resolve what an earlier agent left half-done")]
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

pub(crate) fn planner_capacity(capacity: &Capacity) -> mvm_planner::Capacity {
    mvm_planner::Capacity {
        vcpus: capacity.vcpus,
        mem_mib: capacity.mem_mib,
        disk_mib: capacity.disk_mib,
        max_instances: capacity.max_instances,
    }
}

/// Refuses what could only fail later, and one instance at a time.
pub(crate) fn check_rights(isolation: &IsolationSettings, host: Option<&AnyHost>) -> Result<(), NodeError> {
    let privileged = nix::unistd::geteuid().is_root() || matches!(host, Some(AnyHost::Remote(_)));
    match isolation.needs_root() {
        Some(needs) if !privileged => Err(NodeError::NeedsRoot { needs }),
        _ => Ok(()),
    }
}

/// Opens driver and records in `data_dir`. The records first: their lock keeps a second agent away from the first
/// one's VMs.
pub(crate) async fn open(
    data_dir: &Path,
    host: Option<AnyHost>,
    kind: DriverKind,
    vmm: &VmmSettings,
) -> Result<(Arc<AnyDriver>, Arc<Records>), NodeError> {
    mvm_pki::files::create_private_dir(data_dir)
        .map_err(|cause| NodeError::DataDir { path: data_dir.to_owned(), cause })?;
    let records = open_records(&data_dir.join(STATE_DIR)).await?;
    let host = host.unwrap_or_else(|| AnyHost::local(data_dir));
    let driver = Arc::new(AnyDriver::open_on(kind, host, data_dir, vmm)?);
    driver_choice::remember(kind, data_dir)
        .map_err(|cause| NodeError::DataDir { path: data_dir.to_owned(), cause })?;
    Ok((driver, records))
}

/// The images that a driver of this kind boots from.
pub(crate) fn open_images(
    kind: DriverKind,
    data_dir: &Path,
    dir: &Path,
    vmm: &VmmSettings,
) -> Result<Images, NodeError> {
    if kind == DriverKind::Fake {
        return Ok(Images::imagined());
    }
    let beside = || find_guest(&std::env::current_exe().ok()?);
    let guest = vmm.guest.clone().or_else(beside);
    let settings = ImageSettings { owner: Some(data_dir.to_owned()), guest, ..ImageSettings::default() };
    Ok(Images::open(dir, settings)?)
}

pub(crate) async fn open_records(path: &Path) -> Result<Arc<Records>, NodeError> {
    let settings = Settings { cache_bytes: CACHE_BYTES, ..Settings::default() };
    let store = SledStore::open(path, settings).await.map_err(StateError::from)?;
    Ok(Records::open(store).await?)
}

/// Adopts what lives and resolves what was left half-done, as far as that needs no guest.
pub(crate) async fn adopt<D: Driver>(
    driver: &D,
    records: &Arc<Records>,
    hands: Hands,
    now: Timestamp,
) -> Recovered {
    let recovered = recover(driver, records, hands, now).await;
    if recovered != Recovered::default() {
        let Recovered { resolved, unfinished, unresolved } = &recovered;
        let (unfinished, unresolved) = (unfinished.len(), unresolved.len());
        tracing::info!(resolved, unfinished, unresolved, "resolved what an earlier agent left open");
    }
    recovered
}
