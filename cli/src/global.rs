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
    /// How results are printed
    #[arg(short, long, global = true, value_enum, default_value = "table", help_heading = "Global options")]
    pub(crate) output: Format,
    /// Print only results and errors
    #[arg(short, long, global = true, help_heading = "Global options")]
    pub(crate) quiet: bool,
    /// How long to wait for answers
    #[arg(
        long, global = true, value_name = "TIME", default_value = "30s", value_parser = humantime::parse_duration,
        help_heading = "Global options"
    )]
    pub(crate) timeout: Duration,
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

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum LogFormat {
    Text,
    Json,
}
