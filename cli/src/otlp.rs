//! Where the spans of a coordinator or an agent go: flags of both.

use std::path::PathBuf;

use clap::Args;
use mvm_telemetry::OtlpSettings;

#[derive(Debug, Args)]
pub(crate) struct OtlpArgs {
    /// Export traces over OTLP (HTTP, protobuf) to this collector; spans go to /v1/traces below the URL (docs/tracing.md)
    #[arg(long, value_name = "URL")]
    otlp_endpoint: Option<String>,
    /// A file with headers for the collector, NAME: VALUE a line, such as a token; only its owner may read it
    #[arg(long, value_name = "FILE", requires = "otlp_endpoint")]
    otlp_headers_file: Option<PathBuf>,
    /// The authority of the collector's certificate, as PEM; https needs it
    #[arg(long, value_name = "FILE", requires = "otlp_endpoint")]
    otlp_ca: Option<PathBuf>,
    /// How many of the traces that no caller records are recorded: from 0 (none) to 1 (all)
    #[arg(long, value_name = "RATIO", default_value = "1")]
    otlp_sampling_ratio: f64,
    /// The service's name in traces [default: mvm-coordinator, mvm-agent]
    #[arg(long, value_name = "NAME", requires = "otlp_endpoint")]
    otlp_service_name: Option<String>,
}

impl OtlpArgs {
    pub(crate) fn settings(self) -> Option<OtlpSettings> {
        Some(OtlpSettings {
            endpoint: self.otlp_endpoint?,
            headers_file: self.otlp_headers_file,
            ca_file: self.otlp_ca,
            ratio: self.otlp_sampling_ratio,
            service_name: self.otlp_service_name,
        })
    }
}
