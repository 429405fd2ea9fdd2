//! The settings of an agent: one typed value, filled by the command line (flag > environment > file).
//!
//! No code below reads the environment or a configuration file; each task gets its part of this struct.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_pki::credential::CsrNames;
use mvm_proto::NodeId;
use mvm_telemetry::OtlpSettings;
use mvm_transport::{Limits, Target};
use mvm_vmm::{DriverChoice, VmmSettings};

use crate::intake::api::RateSettings;
use crate::isolation::IsolationFlags;
use crate::node::assemble::{DEFAULT_INTERVAL, DEFAULT_PARALLEL_STEPS};
use crate::node::info::CapacityCaps;
use crate::persist::SessionLimits;
use crate::serve::privileges::Privileges;

/// The agent's own HTTP/3 API.
pub const DEFAULT_API_PORT: u16 = 4434;
/// Metrics and health, on loopback only.
pub const DEFAULT_METRICS_PORT: u16 = 9434;

/// Where tenants' secrets bundles are; a place in memory, for they must never reach a disk.
pub const DEFAULT_SECRETS_DIR: &str = "/run/mvm/secrets";
/// Long enough that a step of an agent that was just replaced has left its record.
pub const DEFAULT_SWEEP_AFTER: Duration = Duration::from_secs(60);
/// A distribution's kernel on a loaded host without KVM takes tens of seconds; anything longer hangs.
pub const DEFAULT_BOOT_DEADLINE: Duration = Duration::from_secs(90);

const CERTS_DIR: &str = "certs";
const IMAGES_DIR: &str = "images";
const SESSIONS_DIR: &str = "sessions";
const SOCKET_FILE: &str = "agent.sock";

#[derive(Debug, Clone)]
pub struct AgentSettings {
    /// Default: the certificate's; without a certificate, the host name's.
    pub node_id: Option<NodeId>,
    pub data_dir: PathBuf,
    pub certs_dir: PathBuf,
    /// Default: the coordinator that issued the certificate, as remembered at enrolment.
    pub coordinator: Option<Target>,
    /// Whether to dial the coordinator at all; off, the agent is reached only through its own API.
    pub session: bool,
    pub listen: SocketAddr,
    pub metrics_listen: SocketAddr,
    pub socket: PathBuf,
    pub interval: Duration,
    /// Desired state from this file instead of from a coordinator.
    pub desired_file: Option<PathBuf>,
    pub driver: DriverChoice,
    /// What instances are kept within.
    pub isolation: IsolationFlags,
    pub vmm: VmmSettings,
    /// Content-addressed images, shared read-only by all instances.
    pub images_dir: PathBuf,
    /// The secrets bundles of tenants and pools, and the keys of snapshots.
    pub secrets_dir: PathBuf,
    /// Sessions that are kept on this machine; a document names no other folder but those below it.
    pub sessions_dir: PathBuf,
    /// How much one session may take, and how long one copy of it.
    pub session_limits: SessionLimits,
    /// Sessions that were not used for so long are deleted. Absent: none is.
    pub session_retention: Option<Duration>,
    /// How long an orphan (a VM or directory without a record) is kept before it is removed.
    pub sweep_after: Duration,
    /// Whether idle instances stay as they are when this machine is short of memory.
    pub ignore_memory_pressure: bool,
    /// How long a guest may take from boot to ready.
    pub boot_deadline: Duration,
    pub rate: RateSettings,
    pub limits: Limits,
    pub capacity: CapacityCaps,
    /// DNS names and addresses to ask for in the certificate, for peers that call this node's API.
    pub names: CsrNames,
    /// How many instances may be worked on at once.
    pub parallel_steps: usize,
    /// What became of root's privileges before anything else began.
    pub privileges: Privileges,
    /// Which collector the spans go to.
    pub otlp: Option<OtlpSettings>,
}

impl AgentSettings {
    /// The defaults for an agent that keeps its state in `data_dir`.
    #[must_use]
    pub fn new(data_dir: &Path) -> Self {
        Self {
            node_id: None,
            data_dir: data_dir.to_owned(),
            certs_dir: default_certs_dir(data_dir),
            coordinator: None,
            session: true,
            listen: SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), DEFAULT_API_PORT),
            metrics_listen: SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), DEFAULT_METRICS_PORT),
            socket: default_socket(data_dir),
            interval: DEFAULT_INTERVAL,
            desired_file: None,
            driver: DriverChoice::default(),
            isolation: IsolationFlags::default(),
            vmm: VmmSettings::default(),
            images_dir: default_images_dir(data_dir),
            secrets_dir: PathBuf::from(DEFAULT_SECRETS_DIR),
            sessions_dir: default_sessions_dir(data_dir),
            session_limits: SessionLimits::default(),
            session_retention: None,
            sweep_after: DEFAULT_SWEEP_AFTER,
            ignore_memory_pressure: false,
            boot_deadline: DEFAULT_BOOT_DEADLINE,
            rate: RateSettings::default(),
            limits: Limits::default(),
            capacity: CapacityCaps::default(),
            names: CsrNames::default(),
            parallel_steps: DEFAULT_PARALLEL_STEPS,
            privileges: Privileges::default(),
            otlp: None,
        }
    }
}

/// Where certificates live when no directory was named.
#[must_use]
pub fn default_certs_dir(data_dir: &Path) -> PathBuf {
    data_dir.join(CERTS_DIR)
}

/// Where images live when no directory was named.
#[must_use]
pub fn default_images_dir(data_dir: &Path) -> PathBuf {
    data_dir.join(IMAGES_DIR)
}

/// Where sessions are kept when no directory was named.
#[must_use]
pub fn default_sessions_dir(data_dir: &Path) -> PathBuf {
    data_dir.join(SESSIONS_DIR)
}

/// Where the agent of this data directory answers the local operator.
#[must_use]
pub fn default_socket(data_dir: &Path) -> PathBuf {
    data_dir.join(SOCKET_FILE)
}
