//! What `serve` is told. Parsed and defaulted by the cli; checked once, here.

use std::fmt;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use mvm_telemetry::OtlpSettings;
use mvm_transport::Limits;

use crate::crash::CrashPoints;

/// People are not renewed in the background as nodes are: a week bridges holidays, and the cli renews on use.
pub const OPERATOR_LIFE: Duration = Duration::from_secs(7 * 24 * 3600);

/// UDP for QUIC and TCP for gRPC share this number.
pub const DEFAULT_PORT: u16 = 4433;
/// UDP for tunnels, where agents and operators are on [`DEFAULT_PORT`].
pub const DEFAULT_TUNNEL_PORT: u16 = 4435;
/// Metrics and health, on loopback only.
pub const DEFAULT_METRICS_PORT: u16 = 9433;
/// How long a document may be acted on; issued again at half of it.
pub const DOCUMENT_LIFE: Duration = Duration::from_secs(24 * 3600);
/// How often an agent must be heard; a session is given up after [`SILENT_INTERVALS`] of these.
pub const HEARTBEAT: Duration = Duration::from_secs(10);
/// How long a node may be away before what was placed on it is placed elsewhere: longer than a reboot takes.
pub(crate) const NODE_GRACE: Duration = mvm_planner::fleet::AWAY_GRACE;
/// One lost heartbeat is weather, two are bad luck, three are an absence.
pub const SILENT_INTERVALS: u32 = 3;
/// Operators are people with a laptop: more than these at once is a mistake or an attack.
pub const MAX_GRPC_CONNECTIONS: usize = 256;
/// Enrolments per second and address in the long run. A whole rack behind one NAT still enrols in minutes.
pub const ENROL_PER_SECOND: f64 = 2.0;
/// At once. Guessing a 256-bit secret is hopeless at any rate; this bounds the work of refusing it.
pub const ENROL_BURST: f64 = 50.0;

/// Called once with the bound addresses, so that tests and supervisors can use port 0.
pub type OnReady = Arc<dyn Fn(&Addresses) + Send + Sync>;

/// Called every few seconds for as long as the coordinator can read and write its store, so that a supervisor sees one
/// that hangs.
pub type OnBeat = Arc<dyn Fn() + Send + Sync>;

/// Where a running coordinator listens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Addresses {
    pub quic: SocketAddr,
    pub grpc: SocketAddr,
    /// `None` when metrics are switched off.
    pub metrics: Option<SocketAddr>,
    /// UDP.
    pub tunnels: SocketAddr,
}

/// A program that is told what the fleet lacks.
#[derive(Debug, Clone)]
pub struct WebhookSettings {
    pub url: String,
    /// The key that both share; only its owner may read the file.
    pub key_file: PathBuf,
    /// The authority of the program's certificate.
    pub ca_file: Option<PathBuf>,
}

#[derive(Clone)]
pub struct CoordinatorSettings {
    /// Made by `init`.
    pub data_dir: PathBuf,
    /// UDP and TCP. With port 0 the system picks the UDP port and TCP gets the same one.
    pub listen: SocketAddr,
    /// UDP for tunnels. `None`: the same address, with port 4435 where `listen` has its default port, else with one of the
    /// system's choice; nodes are told which.
    pub tunnel_listen: Option<SocketAddr>,
    /// `None`: no metrics, no health endpoint.
    pub metrics_listen: Option<SocketAddr>,
    pub document_life: Duration,
    /// Of the certificates issued to nodes and to the coordinator itself.
    pub leaf_life: Duration,
    /// Of the certificates that operators renew.
    pub operator_life: Duration,
    pub heartbeat: Duration,
    /// How long a node may be away before what was placed on it is placed elsewhere.
    pub node_grace: Duration,
    /// Of the QUIC endpoint.
    pub limits: Limits,
    pub max_grpc_connections: usize,
    /// Enrolments from one address: per second in the long run, and at once.
    pub enrol_per_second: f64,
    pub enrol_burst: f64,
    /// Names of the coordinator's own certificate besides those chosen at `init`.
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
    /// Which program is told what the fleet lacks.
    pub demand_webhook: Option<WebhookSettings>,
    /// Which collector the spans go to.
    pub otlp: Option<OtlpSettings>,
    pub on_ready: Option<OnReady>,
    pub on_beat: Option<OnBeat>,
    /// Where a test makes it end.
    #[doc(hidden)]
    pub crash: CrashPoints,
}

impl CoordinatorSettings {
    #[must_use]
    pub fn new(data_dir: impl Into<PathBuf>) -> Self {
        Self {
            data_dir: data_dir.into(),
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, DEFAULT_PORT)),
            tunnel_listen: None,
            metrics_listen: Some(SocketAddr::from((Ipv4Addr::LOCALHOST, DEFAULT_METRICS_PORT))),
            document_life: DOCUMENT_LIFE,
            leaf_life: mvm_pki::LEAF_LIFE,
            operator_life: OPERATOR_LIFE,
            heartbeat: HEARTBEAT,
            node_grace: NODE_GRACE,
            limits: Limits::default(),
            max_grpc_connections: MAX_GRPC_CONNECTIONS,
            enrol_per_second: ENROL_PER_SECOND,
            enrol_burst: ENROL_BURST,
            dns: Vec::new(),
            ips: Vec::new(),
            demand_webhook: None,
            otlp: None,
            on_ready: None,
            on_beat: None,
            crash: CrashPoints::default(),
        }
    }
}

impl CoordinatorSettings {
    /// Where tunnels are listened for.
    #[must_use]
    pub fn tunnel_address(&self) -> SocketAddr {
        let port = if self.listen.port() == DEFAULT_PORT { DEFAULT_TUNNEL_PORT } else { 0 };
        self.tunnel_listen.unwrap_or_else(|| SocketAddr::new(self.listen.ip(), port))
    }
}

impl fmt::Debug for CoordinatorSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CoordinatorSettings")
            .field("data_dir", &self.data_dir)
            .field("listen", &self.listen)
            .field("metrics_listen", &self.metrics_listen)
            .field("document_life", &self.document_life)
            .field("leaf_life", &self.leaf_life)
            .field("heartbeat", &self.heartbeat)
            .field("node_grace", &self.node_grace)
            .finish_non_exhaustive()
    }
}
