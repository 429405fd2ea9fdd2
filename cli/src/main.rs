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

fn main() -> ExitCode {
    let command = match settings::layered_command() {
        Ok(command) => command,
        Err(error) => return exit::report(&Outcome::Usage(error)),
    };
    let cli = match command.try_get_matches().and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli,
        // clap words its own errors, help and version, and knows their exit codes (0 or 2).
        Err(error) => error.exit(),
    };
    logging::start(&cli.global);
    exit::report(&commands::run(cli))
}
