//! What a coordinator records its spans with, as its settings ask for. Called once, at the start.

use mvm_telemetry::{Exporter, Resource, Tracer};

use crate::error::CoordinatorError;
use crate::init::ClusterFile;
use crate::metrics::Metrics;
use crate::settings::CoordinatorSettings;

/// What begins spans, and what exports them where there is a collector.
pub(super) fn tracing_of(
    settings: &CoordinatorSettings,
    cluster: &ClusterFile,
    metrics: &Metrics,
) -> Result<(Tracer, Option<Exporter>), CoordinatorError> {
    let Some(otlp) = &settings.otlp else { return Ok((Tracer::default(), None)) };
    let resource = Resource {
        service: "mvm-coordinator",
        instance: cluster.name.clone(),
        version: env!("CARGO_PKG_VERSION"),
        cluster: cluster.cluster.to_string(),
    };
    let started = Tracer::start(otlp, &resource, metrics.spans.clone()).map_err(|error| {
        CoordinatorError::Settings(format!("the collector of traces: {}", mvm_proto::text::chain(&error)))
    })?;
    Ok((started.0, Some(started.1)))
}
