//! Where log lines go: stderr, as text or as one JSON object a line. Standard output is for results only.

use std::io::IsTerminal;

use clap::ValueEnum;
use tracing_subscriber::EnvFilter;

use crate::args::Global;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}

pub(crate) fn start(global: &Global) {
    let filter = EnvFilter::try_new(&global.log_level).unwrap_or_else(|_| EnvFilter::new("info"));
    let color = std::io::stderr().is_terminal() && std::env::var_os("NO_COLOR").is_none_or(|v| v.is_empty());
    let builder =
        tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).with_ansi(color);
    // Starting twice can only happen in tests of this module; the first one stays.
    let _ = match global.log_format {
        LogFormat::Text => builder.try_init(),
        LogFormat::Json => builder.json().flatten_event(true).try_init(),
    };
}
