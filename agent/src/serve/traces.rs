//! What an agent records its spans with, as its settings ask for. Called once, at the start.

use mvm_proto::status::NodeInfo;
use mvm_telemetry::{Exporter, Resource, Tracer};

use super::error::AgentError;
use super::settings::AgentSettings;
use crate::metrics::Metrics;

/// What begins spans, and what exports them where there is a collector.
pub(super) fn tracing_of(
    settings: &AgentSettings,
    info: &NodeInfo,
    metrics: &Metrics,
) -> Result<(Tracer, Option<Exporter>), AgentError> {
    let Some(otlp) = &settings.otlp else { return Ok((Tracer::default(), None)) };
    let resource = Resource {
        service: "mvm-agent",
        instance: info.node_id.clone(),
        version: env!("CARGO_PKG_VERSION"),
        cluster: info.cluster.clone(),
    };
    let (tracer, exporter) =
        Tracer::start(otlp, &resource, metrics.spans.clone()).map_err(AgentError::Traces)?;
    Ok((tracer, Some(exporter)))
}
