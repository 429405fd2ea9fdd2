//! What Prometheus reads, and the loopback listener that serves it with health and readiness.

mod fleet;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};

use axum::Router;
use axum::extract::State;
use axum::response::IntoResponse;
use axum::routing::get;
pub(crate) use fleet::FleetState;
use http::{StatusCode, header};
use mvm_planner::fleet::UnplacedCause;
use mvm_telemetry::SpanCounters;
use parking_lot::Mutex;
use prometheus_client::encoding::text::{encode_eof, encode_registry};
use prometheus_client::encoding::{EncodeLabelSet, EncodeLabelValue};
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

/// From a loopback push (below a millisecond) to a node that was asleep for a minute.
const PUSH_BUCKETS: [f64; 13] =
    [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0, 15.0, 60.0];

/// From one changed pool (microseconds) to a whole fleet from nothing.
const SCHEDULE_BUCKETS: [f64; 10] = [0.000_1, 0.000_5, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0];

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct Outcome {
    pub(crate) outcome: OutcomeKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, EncodeLabelValue)]
#[allow(non_camel_case_types)]
pub(crate) enum OutcomeKind {
    ok,
    refused,
}

impl From<bool> for Outcome {
    fn from(ok: bool) -> Self {
        Self { outcome: if ok { OutcomeKind::ok } else { OutcomeKind::refused } }
    }
}

/// What a record of the store is of: the beginning of its key.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct WriteOf {
    of: &'static str,
}

impl WriteOf {
    const KNOWN: [&str; 16] = [
        "assigned",
        "audit",
        "envelopes",
        "events",
        "idempotency",
        "meta",
        "nodes",
        "objects",
        "operators",
        "placed",
        "rollouts",
        "scaled",
        "secrets",
        "secrets_of",
        "status",
        "tokens",
    ];

    pub(crate) fn key(key: &str) -> Self {
        let first = key.split('/').next().unwrap_or_default();
        Self { of: Self::KNOWN.into_iter().find(|known| *known == first).unwrap_or("other") }
    }
}

/// What keeps instances from their place.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub(crate) struct FailedFor {
    reason: &'static str,
}

impl From<UnplacedCause> for FailedFor {
    fn from(cause: UnplacedCause) -> Self {
        Self { reason: cause.as_str() }
    }
}

#[derive(Debug)]
pub(crate) struct Metrics {
    pub(crate) sessions: Gauge,
    pub(crate) documents_pushed: Counter,
    pub(crate) documents_reissued: Counter,
    pub(crate) documents_refused: Counter,
    pub(crate) push_to_accepted: Histogram,
    pub(crate) enrolments: Family<Outcome, Counter>,
    pub(crate) renewals: Family<Outcome, Counter>,
    pub(crate) tokens_created: Counter,
    pub(crate) grpc_handshakes_failed: Counter,
    pub(crate) documents_sent: Counter,
    pub(crate) secrets_delivered: Counter,
    pub(crate) document_deltas_sent: Counter,
    pub(crate) store_writes: Family<WriteOf, Counter>,
    pub(crate) streams: Gauge,
    pub(crate) streams_refused: Counter,
    pub(crate) placement_wakes: Counter,
    pub(crate) schedule_duration: Histogram,
    pub(crate) scheduling_failures: Family<FailedFor, Counter>,
    pub(crate) placement_errors: Counter,
    pub(crate) webhooks: Family<Outcome, Counter>,
    pub(crate) spans: SpanCounters,
    epoch: Gauge<i64, AtomicI64>,
    ready: AtomicBool,
    registry: Mutex<Registry>,
}

impl Metrics {
    pub(crate) fn new() -> Self {
        let metrics = Self {
            sessions: Gauge::default(),
            documents_pushed: Counter::default(),
            documents_reissued: Counter::default(),
            documents_refused: Counter::default(),
            push_to_accepted: Histogram::new(PUSH_BUCKETS),
            enrolments: Family::default(),
            renewals: Family::default(),
            tokens_created: Counter::default(),
            grpc_handshakes_failed: Counter::default(),
            documents_sent: Counter::default(),
            secrets_delivered: Counter::default(),
            document_deltas_sent: Counter::default(),
            store_writes: Family::default(),
            streams: Gauge::default(),
            streams_refused: Counter::default(),
            placement_wakes: Counter::default(),
            schedule_duration: Histogram::new(SCHEDULE_BUCKETS),
            scheduling_failures: Family::default(),
            placement_errors: Counter::default(),
            webhooks: Family::default(),
            spans: SpanCounters::default(),
            epoch: Gauge::default(),
            ready: AtomicBool::new(false),
            registry: Mutex::new(Registry::with_prefix("mvm_coordinator")),
        };
        metrics.register();
        metrics
    }

    fn register(&self) {
        let mut registry = self.registry.lock();
        let r = &mut *registry;
        r.register("sessions", "Nodes connected now", self.sessions.clone());
        r.register("documents_pushed", "Documents stored for operators", self.documents_pushed.clone());
        r.register("documents_reissued", "Documents issued again", self.documents_reissued.clone());
        r.register("documents_refused", "Documents that agents refused", self.documents_refused.clone());
        r.register_with_unit(
            "push_to_accepted",
            "From a stored document to the agent's word that it is durable there",
            Unit::Seconds,
            self.push_to_accepted.clone(),
        );
        r.register("enrolments", "Requests to enrol", self.enrolments.clone());
        r.register("renewals", "Requests to renew a certificate", self.renewals.clone());
        r.register("tokens_created", "Join tokens made", self.tokens_created.clone());
        r.register(
            "grpc_handshakes_failed",
            "TLS handshakes on TCP that did not succeed",
            self.grpc_handshakes_failed.clone(),
        );
        r.register("documents_sent", "Documents sent to nodes", self.documents_sent.clone());
        let about = "Bundles of secrets that nodes asked for and got";
        r.register("secrets_delivered", about, self.secrets_delivered.clone());
        r.register(
            "document_deltas_sent",
            "Of the documents sent, those sent as what changed of the one before",
            self.document_deltas_sent.clone(),
        );
        r.register(
            "store_writes",
            "Records written to the store, by what they are of",
            self.store_writes.clone(),
        );
        r.register("streams", "Streams to guests that are relayed now", self.streams.clone());
        r.register("streams_refused", "Streams to guests that were not opened", self.streams_refused.clone());
        r.register(
            "placement_wakes",
            "How often placement looked what is to be done",
            self.placement_wakes.clone(),
        );
        r.register_with_unit(
            "schedule_duration",
            "How long placement took to decide where instances go, where something was to be decided",
            Unit::Seconds,
            self.schedule_duration.clone(),
        );
        r.register(
            "scheduling_failures",
            "How often it was found that something of a pool has no place, by what is in the way; tries that find the same are not counted",
            self.scheduling_failures.clone(),
        );
        r.register(
            "placement_errors",
            "How often a decided placement could not be stored or made into documents",
            self.placement_errors.clone(),
        );
        r.register(
            "trace_spans_exported",
            "Spans that the collector of --otlp-endpoint took",
            self.spans.exported.clone(),
        );
        r.register(
            "trace_spans_dropped",
            "Spans that no collector took: the queue was full, or it was away or refused them",
            self.spans.dropped.clone(),
        );
        r.register("demand_webhooks", "Posts of the demand to --demand-webhook", self.webhooks.clone());
        r.register("epoch", "The fencing number of this process", self.epoch.clone());
    }

    pub(crate) fn set_epoch(&self, epoch: u64) {
        self.epoch.set(i64::try_from(epoch).unwrap_or(i64::MAX));
    }

    pub(crate) fn set_ready(&self, ready: bool) {
        self.ready.store(ready, Ordering::Release);
    }

    fn text(&self, fleet: &FleetState) -> Result<String, std::fmt::Error> {
        let registry = self.registry.lock();
        let mut text = String::new();
        encode_registry(&mut text, &registry)?;
        encode_registry(&mut text, &fleet.registry())?;
        encode_eof(&mut text)?;
        Ok(text)
    }
}

/// Looks at the fleet anew for each scrape.
pub(crate) type FleetOf = Arc<dyn Fn() -> FleetState + Send + Sync>;

/// The routes of the loopback listener.
pub(crate) fn router(metrics: Arc<Metrics>, fleet: FleetOf) -> Router {
    let measured =
        Router::new().route("/metrics", get(serve_metrics)).with_state((Arc::clone(&metrics), fleet));
    let asked = Router::new()
        .route("/healthz", get(|| async { "ok\n" }))
        .route("/readyz", get(serve_ready))
        .with_state(metrics);
    measured.merge(asked)
}

async fn serve_metrics(State((metrics, fleet)): State<(Arc<Metrics>, FleetOf)>) -> impl IntoResponse {
    match metrics.text(&fleet()) {
        Ok(text) => {
            let media = "application/openmetrics-text; version=1.0.0; charset=utf-8";
            ([(header::CONTENT_TYPE, media)], text).into_response()
        }
        Err(_) => StatusCode::INTERNAL_SERVER_ERROR.into_response(),
    }
}

async fn serve_ready(State(metrics): State<Arc<Metrics>>) -> (StatusCode, &'static str) {
    if metrics.ready.load(Ordering::Acquire) {
        (StatusCode::OK, "ready\n")
    } else {
        (StatusCode::SERVICE_UNAVAILABLE, "not ready\n")
    }
}

/// All metrics with made-up values, each label at least once: what `docs/metrics.md` is made of.
pub(crate) fn example() -> String {
    let metrics = Metrics::new();
    metrics.sessions.set(3);
    metrics.enrolments.get_or_create(&Outcome::from(true)).inc();
    metrics.renewals.get_or_create(&Outcome::from(true)).inc();
    metrics.webhooks.get_or_create(&Outcome::from(true)).inc();
    metrics.push_to_accepted.observe(0.004);
    metrics.store_writes.get_or_create(&WriteOf::key("status/n1")).inc();
    metrics.scheduling_failures.get_or_create(&UnplacedCause::Quota.into()).inc();
    let at = mvm_proto::Timestamp::from_unix_ms(99_000);
    let fleet = FleetState::new(vec![("root_ca", at)], vec![("alice".to_owned(), at)]);
    // Writing to a string can't fail.
    metrics.text(&fleet).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_carry_their_names_and_base_units() {
        let text = example();
        for line in [
            "mvm_coordinator_sessions 3",
            "mvm_coordinator_documents_pushed_total 0",
            "mvm_coordinator_push_to_accepted_seconds_count 1",
            "mvm_coordinator_scheduling_failures_total{reason=\"quota\"} 1",
            "mvm_coordinator_enrolments_total{outcome=\"ok\"} 1",
            "mvm_coordinator_expiry_timestamp_seconds{of=\"root_ca\"} 99",
        ] {
            assert!(text.contains(line), "{line} is missing in\n{text}");
        }
    }
}
