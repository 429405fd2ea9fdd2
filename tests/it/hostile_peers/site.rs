//! One coordinator with an honest agent and an operator, and what an attack on it costs.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use mvm_client::{ControlClient, connect};
use mvm_pki::{Anchors, Credential, ExpectedPeer, LiveAnchors, LiveCredential, Role};
use mvm_proto::ClusterId;
use mvm_proto::status::NodeInfo;
use mvm_proto::wire::control::v1::{GetNodeRequest, ListInstancesRequest};
use mvm_proto::wire::session::v1::{AgentFrame, Hello, agent_frame, coordinator_frame};
use mvm_tests::{Cluster, PATIENCE, wait_until};
use mvm_transport::{ALPN_H3, ALPN_SESSION, ClientSession, ConnectError, Limits, Target, dial_session};
use tokio::runtime::Runtime;

/// Answers that a median is taken of.
const ANSWERS: usize = 25;
/// A measurement under attack is repeated this often when it is too slow: the machine itself may be busy.
const TRIES: usize = 4;
/// Added to twice the quiet median: one turn of the scheduler on a busy machine.
const FLOOR: Duration = Duration::from_millis(60);
/// How long a peer may take to use up what it may send at once, before it is held to its pace.
const BURST: Duration = Duration::from_secs(8);
/// After that an attack goes on for this long at least, and is then stopped.
const ATTACK: Duration = Duration::from_millis(2500);

/// What an attack may cost the coordinator.
#[derive(Clone, Copy)]
pub(crate) struct Ceilings {
    /// Above the most that it had before.
    pub(crate) memory_bytes: u64,
    /// Of one processor, once the peer is held to its pace. The binary under test is a debug build.
    pub(crate) processors: f64,
    pub(crate) log_lines: usize,
    pub(crate) log_bytes: u64,
}

impl Default for Ceilings {
    fn default() -> Self {
        Self { memory_bytes: 48 << 20, processors: 1.2, log_lines: 300, log_bytes: 128 * 1024 }
    }
}

/// What an attacker and the test tell each other.
#[derive(Default)]
pub(crate) struct Signals {
    /// Everything that the attack opens is open.
    in_place: AtomicBool,
    stop: AtomicBool,
}

impl Signals {
    pub(crate) fn mark_in_place(&self) {
        self.in_place.store(true, Ordering::Relaxed);
    }

    pub(crate) fn stopped(&self) -> bool {
        self.stop.load(Ordering::Relaxed)
    }
}

pub(crate) type Stop = Arc<Signals>;

pub(crate) struct Site {
    pub(crate) cluster: Cluster,
    pub(crate) runtime: Runtime,
    operator: ControlClient,
}

/// A node's credential in the hands of an attacker.
#[derive(Clone)]
pub(crate) struct Peer {
    pub(crate) name: String,
    pub(crate) credential: Option<LiveCredential>,
    pub(crate) anchors: LiveAnchors,
    pub(crate) address: SocketAddr,
}

pub(crate) fn cluster_id() -> ClusterId {
    "test".parse().expect("a name")
}

fn coordinator() -> ExpectedPeer {
    ExpectedPeer { cluster: cluster_id(), role: Role::Coordinator, name: None, check_host: true }
}

impl Peer {
    pub(crate) async fn dial(&self) -> Result<ClientSession, ConnectError> {
        let tls = mvm_pki::tls::client_config(
            self.credential.as_ref(),
            &self.anchors,
            coordinator(),
            &[ALPN_SESSION],
        );
        dial_session(self.address, "127.0.0.1", tls.expect("settings"), &Limits::default()).await
    }

    /// An HTTP/3 connection, as one without a certificate may have.
    pub(crate) async fn http(&self) -> Result<mvm_transport::Client, ConnectError> {
        let tls =
            mvm_pki::tls::client_config(self.credential.as_ref(), &self.anchors, coordinator(), &[ALPN_H3]);
        let tls = tls.expect("settings");
        mvm_transport::Client::connect(self.address, "127.0.0.1", tls, &Limits::default()).await
    }

    /// A session whose hello was sent.
    pub(crate) async fn greet(&self) -> Option<ClientSession> {
        let mut session = self.dial().await.ok()?;
        let info = NodeInfo { node_id: self.name.clone(), ..NodeInfo::default() };
        let hello = Hello { protocol: 1, info: Some(info), ..Hello::default() };
        let frame = AgentFrame { body: Some(agent_frame::Body::Hello(hello)) };
        session.frames_out.send(&frame).await.ok()?;
        Some(session)
    }

    /// A session that was welcomed, as an honest node wants it.
    pub(crate) async fn welcomed(&self) -> ClientSession {
        let mut session = self.greet().await.expect("a session");
        let first = tokio::time::timeout(PATIENCE, session.frames_in.recv()).await.expect("in time");
        let body = first.expect("a frame").and_then(|frame| frame.body);
        assert!(matches!(body, Some(coordinator_frame::Body::Welcome(_))), "{body:?}");
        session
    }
}

impl Site {
    pub(crate) fn start() -> Self {
        let mut cluster = Cluster::start();
        cluster.join("honest");
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        let runtime = runtime.expect("a runtime");
        let dir = cluster.coordinator_dir().join("operator");
        let credential =
            LiveCredential::new(Credential::load(&dir.join("operator.pem")).expect("a credential"));
        let anchors = LiveAnchors::new(Anchors::load(&dir.join("ca.crt")).expect("roots"));
        let (target, id) = (target(&cluster), cluster_id());
        let operator = connect(&target, &credential, &anchors, &id, PATIENCE);
        let operator = runtime.block_on(operator).expect("the operator connects");
        Self { cluster, runtime, operator }
    }

    pub(crate) fn target(&self) -> Target {
        target(&self.cluster)
    }

    pub(crate) fn enrol(&self, name: &str) -> Peer {
        self.cluster.enrol(name);
        let certs = self.cluster.agent_dir(name).join("certs");
        let credential = Credential::load(&certs.join("node.pem")).expect("a credential");
        Peer { name: name.to_owned(), credential: Some(LiveCredential::new(credential)), ..self.anonymous() }
    }

    pub(crate) fn anonymous(&self) -> Peer {
        let ca = self.cluster.coordinator_dir().join("operator/ca.crt");
        Peer {
            name: String::new(),
            credential: None,
            anchors: LiveAnchors::new(Anchors::load(&ca).expect("roots")),
            address: SocketAddr::from(([127, 0, 0, 1], self.cluster.port)),
        }
    }

    /// Whether the coordinator says that a node is connected.
    pub(crate) fn is_connected(&self, node: &str) -> bool {
        self.cluster.node(node).is_some_and(|info| info["connected"] == true)
    }

    pub(crate) fn under<A>(&mut self, what: &str, ceilings: Ceilings, attack: impl FnOnce(Stop) -> A)
    where
        A: Future<Output = u64> + Send + 'static,
    {
        self.under_then(what, ceilings, attack, |_| {});
    }

    /// Attacks, and holds what it costs against the ceilings; `meanwhile` is done while the attack goes on.
    #[allow(clippy::print_stdout, reason = "the figures belong where a test's output is read")]
    pub(crate) fn under_then<A>(
        &mut self,
        what: &str,
        ceilings: Ceilings,
        attack: impl FnOnce(Stop) -> A,
        meanwhile: impl FnOnce(&mut Self),
    ) where
        A: Future<Output = u64> + Send + 'static,
    {
        let quiet = self.median();
        let before = self.usage();
        let stop = Stop::default();
        let attacking = self.runtime.spawn(attack(Arc::clone(&stop)));
        let begun = Instant::now();
        wait_until("the attack to be in place", PATIENCE, || stop.in_place.load(Ordering::Relaxed));
        let limit = 2 * quiet + FLOOR;
        let mut attacked = self.median();
        for _ in 1..TRIES {
            if attacked <= limit {
                break;
            }
            attacked = attacked.min(self.median());
        }
        meanwhile(self);
        while begun.elapsed() < BURST {
            self.median();
        }
        // The operator asks nothing now: what the processor does is for the attacker.
        let (paced, paced_since) = (self.usage(), Instant::now());
        while paced_since.elapsed() < ATTACK {
            std::thread::park_timeout(ATTACK - paced_since.elapsed());
        }
        let (after, paced_for) = (self.usage(), paced_since.elapsed());
        stop.stop.store(true, Ordering::Relaxed);
        let done = self.runtime.block_on(async { tokio::time::timeout(PATIENCE, attacking).await });
        let done = done.expect("the attack stops").expect("the attack does not fail");

        let memory = after.peak_bytes.saturating_sub(before.peak_bytes);
        let processors = (after.processor - paced.processor).as_secs_f64() / paced_for.as_secs_f64();
        let (lines, bytes) = (after.log_lines - before.log_lines, after.log_bytes - before.log_bytes);
        let told = format!(
            "{what}: {done} done; answers {quiet:?}, then {attacked:?}; {} MiB, {processors:.2} processors, \
             {lines} lines of {bytes} bytes",
            memory >> 20
        );
        println!("{told}");
        assert!(done > 0, "nothing was attacked: {told}");
        assert!(attacked <= limit, "the operator waits: {told}");
        assert!(memory <= ceilings.memory_bytes, "memory: {told}");
        assert!(processors <= ceilings.processors, "processor time: {told}");
        assert!(lines <= ceilings.log_lines && bytes <= ceilings.log_bytes, "the log: {told}");
        assert!(self.is_connected("honest"), "the honest agent lost its session");
    }

    /// How long an answer takes that the coordinator must ask the honest agent for.
    fn median(&mut self) -> Duration {
        let mut times: Vec<_> = (0..ANSWERS)
            .map(|_| {
                let begun = Instant::now();
                let asked = ListInstancesRequest { node_id: "honest".into(), ..Default::default() };
                let node = GetNodeRequest { node_id: "honest".into() };
                self.runtime.block_on(async {
                    self.operator.get_node(node).await.expect("the operator is answered");
                    self.operator.list_instances(asked).await.expect("the honest agent is asked");
                });
                begun.elapsed()
            })
            .collect();
        times.sort_unstable();
        times[ANSWERS / 2]
    }

    fn usage(&self) -> Usage {
        let process = self.cluster.coordinator.as_ref().expect("the coordinator runs");
        let read = |file: &str| {
            std::fs::read_to_string(format!("/proc/{}/{file}", process.pid())).expect("the process is there")
        };
        let status = read("status");
        let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).expect("a peak");
        let peak_kib: u64 = peak.trim().trim_end_matches(" kB").parse().expect("a number");
        let stat = read("stat");
        // After the name in brackets: utime and stime are the 12th and 13th.
        let fields: Vec<_> = stat.rsplit(')').next().expect("fields").split_whitespace().collect();
        let ticks: u64 = fields[11..13].iter().map(|ticks| ticks.parse::<u64>().expect("a number")).sum();
        let log = process.log();
        Usage {
            peak_bytes: peak_kib * 1024,
            // Linux counts in hundredths of a second for every program.
            processor: Duration::from_millis(ticks * 10),
            log_lines: log.lines().count(),
            log_bytes: log.len() as u64,
        }
    }
}

fn target(cluster: &Cluster) -> Target {
    cluster.url().parse().expect("a target")
}

struct Usage {
    peak_bytes: u64,
    processor: Duration,
    log_lines: usize,
    log_bytes: u64,
}
