//! What every command takes.

use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};

use crate::output::Format;

#[derive(Debug, Clone, Args)]
pub(crate) struct Global {
    /// Settings file
    #[arg(long, global = true, value_name = "FILE", env = "MVM_CONFIG", help_heading = "Global options")]
    pub(crate) config: Option<PathBuf>,
    /// The context to use, of those that `mvm context list` shows [default: the current one]
    #[arg(long, global = true, value_name = "CONTEXT", env = "MVM_CONTEXT", help_heading = "Global options")]
    pub(crate) context: Option<String>,
    /// How results are printed
    #[arg(short, long, global = true, value_enum, default_value = "table", help_heading = "Global options")]
    pub(crate) output: Format,
    /// Print only results and errors
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// How long to wait for answers [default: 30s; push: as long as the document's own times ask for]
    #[arg(
        long = "timeout", id = "timeout", global = true, value_name = "TIME",
        value_parser = humantime::parse_duration, help_heading = "Global options"
    )]
    pub(crate) chosen_timeout: Option<Duration>,
    /// Least level to log: error, warn, info, debug, trace, or a filter such as info,mvm_agent=debug
    #[arg(
        long,
        global = true,
        value_name = "LEVEL",
        default_value = "warn,mvm_agent=info,mvm_coordinator=info,mvm_image=info,mvm_vmm=info",
        help_heading = "Global options"
    )]
    pub(crate) log_level: String,
    /// Format of log lines
    #[arg(long, global = true, value_enum, default_value = "text", help_heading = "Global options")]
    pub(crate) log_format: LogFormat,
}

/// How long to wait for answers where nothing else was asked for.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(30);

impl Global {
    pub(crate) fn timeout(&self) -> Duration {
        self.chosen_timeout.unwrap_or(DEFAULT_TIMEOUT)
    }

    /// The same for a stream to a guest to be opened, as its header says it.
    pub(crate) fn open_within_ms(&self) -> u32 {
        u32::try_from(self.timeout().as_millis()).unwrap_or(u32::MAX)
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}
