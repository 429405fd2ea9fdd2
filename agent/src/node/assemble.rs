//! Puts a node's parts together.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use mvm_host::AnyHost;
use mvm_image::{ImageError, ImageSettings, Images, Vouched, find_guest};
use mvm_proto::status::Capacity;
use mvm_proto::{NodeId, Timestamp};
use mvm_store::{Settings, SledStore};
use mvm_vmm::VmmSettings;
use mvm_vmm::choice;
use mvm_vmm::{AnyDriver, Driver, DriverKind, DriverUnavailable};
use tokio::sync::watch;

use crate::clock::Clock;
use crate::execute::StepError;
use crate::execute::recover::{Hands, Recovered, recover};
use crate::instance::records::{Records, StateError};
use crate::isolation::IsolationSettings;
use crate::persist::SessionLimits;

/// Where records are kept, below the data directory.
pub(crate) const STATE_DIR: &str = "state";

/// A node's records are small and all in memory: sled's cache needs little.
const CACHE_BYTES: u64 = 1024 * 1024;

/// How often a node is compared with its desired state when nothing happens.
pub const DEFAULT_INTERVAL: Duration = Duration::from_secs(30);

/// Enough to hide one slow boot behind others without starving the host's processors.
pub const DEFAULT_PARALLEL_STEPS: usize = 4;

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
    let driver = Arc::new(AnyDriver::open(kind, host, data_dir, vmm)?);
    choice::remember(kind, data_dir)
        .map_err(|cause| NodeError::DataDir { path: data_dir.to_owned(), cause })?;
    Ok((driver, records))
}

/// The images that a driver of this kind boots from.
pub(crate) fn open_images(
    kind: DriverKind,
    data_dir: &Path,
    dir: &Path,
    vmm: &VmmSettings,
    vouched: watch::Receiver<Vouched>,
) -> Result<Images, NodeError> {
    if kind == DriverKind::Fake {
        return Ok(Images::imagined_by(vouched));
    }
    let beside = || find_guest(&std::env::current_exe().ok()?);
    let guest = vmm.guest.clone().or_else(beside);
    let owner = Some(data_dir.to_owned());
    let settings = ImageSettings { owner, guest, vouched, ..ImageSettings::default() };
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
        tracing::info!(
            resolved,
            unfinished,
            unresolved,
            "recovered the steps that an earlier agent left unfinished"
        );
    }
    recovered
}
