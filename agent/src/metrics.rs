//! What Prometheus reads: names in base units, labels from closed sets only (a peer can't make new series).

mod network;
mod state;

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use mvm_host::network::{Dropped, NetworkFound, Traffic};
use mvm_proto::status::{Condition, ConditionKind, InstanceStatus, NodeStatus, PoolStatus};
use mvm_proto::{Phase, Timestamp, WakeKind};
use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::metrics::info::Info;
use prometheus_client::registry::Registry;

use mvm_telemetry::SpanCounters;
use network::NetworkCounters;
pub use state::NodeState;

use crate::execute::{StepEnd, StepOutcome, Wake};

/// The media type of the text that [`Metrics::render`] gives.
pub const MEDIA_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// From a pass that finds nothing to do to one that boots a full pool, in seconds.
const RECONCILE_BUCKETS: [f64; 9] = [0.001, 0.005, 0.02, 0.1, 0.5, 2.0, 10.0, 30.0, 120.0];

/// From a resume to a boot with a large image on a loaded machine without KVM, and what waits for a guest that hangs.
const STEP_BUCKETS: [f64; 10] = [0.005, 0.025, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0, 30.0, 120.0];

/// From a command that says one word to one that works for an hour.
const EXEC_BUCKETS: [f64; 10] = [0.005, 0.025, 0.1, 0.5, 1.0, 5.0, 30.0, 120.0, 600.0, 3600.0];

/// From a resume to a boot on a loaded machine without KVM, in seconds.
const WAKE_BUCKETS: [f64; 14] =
    [0.001, 0.002, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0];

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct KindLabel {
    kind: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct StepLabels {
    action: &'static str,
    outcome: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ResultLabel {
    result: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct PhaseLabel {
    phase: &'static str,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: &'static str,
    status: u16,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, EncodeLabelSet)]
struct BuildLabels {
    version: &'static str,
}

/// What became of a document.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum DocumentResult {
    Accepted,
    /// The document in force, again.
    Unchanged,
    Refused,
}

impl DocumentResult {
    pub(crate) fn label(self) -> &'static str {
        match self {
            Self::Accepted => "accepted",
            Self::Unchanged => "unchanged",
            Self::Refused => "refused",
        }
    }
}

/// What became of a command in a guest.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExecResult {
    /// It ended by itself, with whatever code.
    Exited,
    TimedOut,
    /// The caller left or asked for it.
    Cancelled,
    /// The guest refused it, or went away.
    Failed,
}

impl ExecResult {
    fn label(self) -> &'static str {
        match self {
            Self::Exited => "exited",
            Self::TimedOut => "timed_out",
            Self::Cancelled => "cancelled",
            Self::Failed => "failed",
        }
    }
}

/// The agent's own counters. Cheap to share behind an `Arc`; every method takes `&self`.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    documents: Family<ResultLabel, Counter>,
    requests: Family<RequestLabels, Counter>,
    instances: Family<PhaseLabel, Gauge>,
    reconcile: Histogram,
    wakes: Family<KindLabel, Histogram, fn() -> Histogram>,
    steps: Family<StepLabels, Histogram, fn() -> Histogram>,
    execs: Family<ResultLabel, Histogram, fn() -> Histogram>,
    session_connected: Gauge,
    resident_memory: Gauge,
    session_dials: Family<ResultLabel, Counter>,
    network: NetworkCounters,
    pub(crate) spans: SpanCounters,
}

impl Metrics {
    #[must_use]
    pub fn new(started_at: Timestamp) -> Self {
        let mut registry = Registry::default();
        let documents = Family::default();
        let requests = Family::default();
        let instances = Family::default();
        let reconcile = Histogram::new(RECONCILE_BUCKETS);
        let wakes = Family::new_with_constructor((|| Histogram::new(WAKE_BUCKETS)) as fn() -> Histogram);
        let steps = Family::new_with_constructor((|| Histogram::new(STEP_BUCKETS)) as fn() -> Histogram);
        let execs = Family::new_with_constructor((|| Histogram::new(EXEC_BUCKETS)) as fn() -> Histogram);
        let session_connected = Gauge::default();
        let resident_memory = Gauge::default();
        let session_dials = Family::default();
        let start_time: Gauge<f64, AtomicU64> = Gauge::default();
        #[allow(clippy::cast_precision_loss)] // Milliseconds since 1970 fit a double's 53 bits.
        start_time.set(started_at.unix_ms() as f64 / 1000.0);

        // The text format itself appends `_total` to counters and `_info` to infos.
        registry.register(
            "mvm_agent_documents",
            "Documents received, by what became of them",
            documents.clone(),
        );
        registry.register("mvm_agent_http_requests", "Requests answered by the API", requests.clone());
        registry.register("mvm_agent_instances", "Instances on this node, by phase", instances.clone());
        let help = "How long one pass of the reconcile loop took";
        registry.register("mvm_agent_reconcile_duration_seconds", help, reconcile.clone());
        let help = "How long instances took from the request to running, by how they came to run";
        registry.register("mvm_agent_wake_duration_seconds", help, wakes.clone());
        let help = "How long steps on instances took, planned or by request: create and start boot a guest";
        registry.register("mvm_agent_step_duration_seconds", help, steps.clone());
        let help = "How long commands in guests took from the request to their end";
        registry.register("mvm_agent_exec_duration_seconds", help, execs.clone());
        let help = "1 while a session to the coordinator is up";
        registry.register("mvm_agent_session_connected", help, session_connected.clone());
        let help = "Attempts to reach the coordinator, by outcome";
        registry.register("mvm_agent_session_dials", help, session_dials.clone());
        let help = "Resident memory of this process";
        registry.register("process_resident_memory_bytes", help, resident_memory.clone());
        let help = "When this process started, in seconds since 1970";
        registry.register("process_start_time_seconds", help, start_time);
        let spans = SpanCounters::default();
        let help = "Spans that the collector of --otlp-endpoint took";
        registry.register("mvm_agent_trace_spans_exported", help, spans.exported.clone());
        let help = "Spans that no collector took: the queue was full, or it was away or refused them";
        registry.register("mvm_agent_trace_spans_dropped", help, spans.dropped.clone());
        let network = NetworkCounters::default();
        registry.register_collector(Box::new(network.clone()));
        let build = Info::new(BuildLabels { version: env!("CARGO_PKG_VERSION") });
        registry.register("mvm_build", "What was built", build);

        Self {
            registry,
            documents,
            requests,
            instances,
            reconcile,
            wakes,
            steps,
            execs,
            session_connected,
            resident_memory,
            session_dials,
            network,
            spans,
        }
    }

    pub fn document(&self, result: DocumentResult) {
        self.documents.get_or_create(&ResultLabel { result: result.label() }).inc();
    }

    /// `route` is the pattern of a route, never a path that a peer wrote.
    pub fn request(&self, route: &'static str, status: u16) {
        self.requests.get_or_create(&RequestLabels { route, status }).inc();
    }

    pub fn reconciled(&self, took: Duration) {
        self.reconcile.observe(took.as_secs_f64());
    }

    pub fn woken(&self, wake: &Wake) {
        let kind = KindLabel { kind: wake.kind.as_str() };
        self.wakes.get_or_create(&kind).observe(wake.total.as_secs_f64());
    }

    pub fn step(&self, end: &StepEnd) {
        let labels = StepLabels { action: end.action.as_str(), outcome: end.outcome.as_str() };
        self.steps.get_or_create(&labels).observe(end.took.as_secs_f64());
    }

    pub fn executed(&self, result: ExecResult, took: Duration) {
        self.execs.get_or_create(&ResultLabel { result: result.label() }).observe(took.as_secs_f64());
    }

    pub fn session(&self, connected: bool) {
        self.session_connected.set(i64::from(connected));
    }

    pub fn dialled(&self, succeeded: bool) {
        let result = if succeeded { "connected" } else { "failed" };
        self.session_dials.get_or_create(&ResultLabel { result }).inc();
    }

    /// What the last look at the network found.
    pub fn network(&self, found: &NetworkFound) {
        self.network.set(found);
    }

    /// Phases without any instance are shown as 0, so that a graph falls instead of ending.
    fn count_instances(&self, instances: &[InstanceStatus]) {
        let mut counts = Phase::ALL.map(|phase| (phase, 0_i64));
        for instance in instances {
            if let Some((_, count)) = counts.iter_mut().find(|(phase, _)| phase.as_str() == instance.phase) {
                *count += 1;
            }
        }
        for (phase, count) in counts {
            self.instances.get_or_create(&PhaseLabel { phase: phase.as_str() }).set(count);
        }
    }

    /// All metrics as text. Instances are counted as they are now, not as the last pass saw them.
    #[must_use]
    pub fn render(&self, instances: &[InstanceStatus], state: &NodeState) -> String {
        self.count_instances(instances);
        self.resident_memory.set(resident_bytes().unwrap_or(0));
        let mut text = String::new();
        // Writing to a string can't fail.
        let _ = encode_registry(&mut text, &self.registry)
            .and_then(|()| encode_registry(&mut text, &state::registry(state)))
            .and_then(|()| encode_eof(&mut text));
        text
    }
}

/// The second number of `/proc/self/statm` is resident pages.
fn resident_bytes() -> Option<i64> {
    let statm = std::fs::read_to_string("/proc/self/statm").ok()?;
    let pages: i64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
    let page = nix::unistd::sysconf(nix::unistd::SysconfVar::PAGE_SIZE).ok()??;
    Some(pages * page)
}

/// All metrics with made-up values, each label at least once: what `docs/metrics.md` is made of.
#[doc(hidden)]
#[must_use]
pub fn example() -> String {
    let metrics = Metrics::new(Timestamp::from_unix_ms(1_500));
    metrics.document(DocumentResult::Refused);
    metrics.request("/v1/node/info", 200);
    metrics.dialled(false);
    metrics.reconciled(Duration::from_millis(3));
    metrics.woken(&Wake { kind: WakeKind::Woken, total: Duration::from_millis(60) });
    let (action, outcome) = (mvm_planner::Action::Start, StepOutcome::Failed);
    metrics.step(&StepEnd { action, outcome, took: Duration::from_secs(2) });
    metrics.executed(ExecResult::TimedOut, Duration::from_millis(20));
    let traffic = |instance: Option<&str>| Traffic {
        tenant: "acme".parse().expect("a tenant's id"),
        instance: instance.map(|id| id.parse().expect("an instance's id")),
        sent_packets: 1,
        sent_bytes: 7,
        received_packets: 2,
        received_bytes: 9,
    };
    metrics.network(&NetworkFound {
        dropped: vec![Dropped { reason: "to-host".to_owned(), packets: 5, bytes: 300 }],
        traffic: vec![traffic(None), traffic(Some("i-0000002a"))],
        ..NetworkFound::default()
    });
    let pool =
        PoolStatus { tenant_id: "acme".to_owned(), pool_id: "web".to_owned(), ..PoolStatus::default() };
    let converged =
        Condition::new(ConditionKind::Converged, true, "Converged", "", Timestamp::from_unix_ms(0));
    let status = NodeStatus { pools: vec![pool], conditions: vec![converged], ..NodeStatus::default() };
    let expiries = vec![("certificate", Timestamp::from_unix_ms(99_000))];
    let warm = InstanceStatus { phase: "warm".to_owned(), ..InstanceStatus::default() };
    metrics.render(&[warm], &NodeState { status, expiries, ..NodeState::default() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_that_dashboards_use_are_all_there() {
        let text = example();
        for line in [
            "mvm_agent_documents_total{result=\"refused\"} 1",
            "mvm_agent_http_requests_total{route=\"/v1/node/info\",status=\"200\"} 1",
            "mvm_agent_instances{phase=\"warm\"} 1",
            "mvm_agent_instances{phase=\"running\"} 0",
            "mvm_agent_session_connected 0",
            "mvm_agent_session_dials_total{result=\"failed\"} 1",
            "mvm_agent_expiry_timestamp_seconds{of=\"certificate\"} 99",
            "mvm_agent_reconcile_duration_seconds_count 1",
            "mvm_agent_wake_duration_seconds_bucket{le=\"0.1\",kind=\"woken\"} 1",
            "mvm_agent_wake_duration_seconds_bucket{le=\"0.05\",kind=\"woken\"} 0",
            "mvm_agent_step_duration_seconds_count{action=\"start\",outcome=\"failed\"} 1",
            "mvm_agent_exec_duration_seconds_bucket{le=\"0.025\",result=\"timed_out\"} 1",
            "mvm_tenant_network_bytes_total{tenant=\"acme\",direction=\"sent\"} 7",
            "mvm_instance_network_bytes_total{tenant=\"acme\",instance=\"i-0000002a\",direction=\"received\"} 9",
            "mvm_firewall_dropped_packets_total{reason=\"to-host\"} 5",
            "mvm_agent_condition{type=\"Converged\"} 1",
            "mvm_agent_pool_instances{tenant=\"acme\",pool=\"web\",state=\"running\"} 0",
            "process_start_time_seconds 1.5",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
        assert!(!text.contains("process_resident_memory_bytes 0"), "resident memory is measured");
    }
}
