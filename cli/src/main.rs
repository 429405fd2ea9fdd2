//! `mvm`: one binary for coordinators, node agents and operators.
//!
//! Here settings are read (flag, then environment, then file), logging starts, the command runs on a runtime that
//! fits it, and its outcome becomes an exit code. What commands do lives in the crates below and in `commands/`.

mod agent_client;
mod args;
mod client;
mod commands;
mod confirm;
mod contexts;
mod endpoint;
mod exit;
mod global;
mod instances;
mod logging;
#[cfg(test)]
mod metrics_page;
#[cfg(test)]
mod monitoring;
mod objects;
mod otlp;
mod output;
mod paths;
mod progress;
mod settings;
mod terminal;
mod trace;
mod user;

use std::process::ExitCode;

use clap::FromArgMatches;

use crate::args::Cli;
use crate::exit::Outcome;

/// By the whole grammar.
fn read_command_line() -> anyhow::Result<Cli> {
    let read = settings::layered_command()?.try_get_matches();
    // clap words its own errors, help and version, and knows their exit codes (0 or 2).
    Ok(read.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| error.exit()))
}

fn main() -> ExitCode {
    let cli = match settings::agent_serve().map_or_else(read_command_line, Ok) {
        Ok(cli) => cli,
        Err(error) => return exit::report(&Outcome::Usage(error)),
    };
    logging::start(&cli.global);
    exit::report(&commands::run(cli))
}
