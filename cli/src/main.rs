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
use rustix::process::{Resource, Rlimit};

use crate::args::Cli;
use crate::exit::Outcome;

/// By the whole grammar.
fn read_command_line() -> anyhow::Result<Cli> {
    let read = settings::layered_command()?.try_get_matches();
    // clap words its own errors, help and version, and knows their exit codes (0 or 2).
    Ok(read.and_then(|matches| Cli::from_arg_matches(&matches)).unwrap_or_else(|error| error.exit()))
}

/// Processes of mvm have keys and values of Secrets in memory: no crash writes them anywhere. Where cores are piped to a program, as
/// systemd has it, only a limit of 1 is kept (core(5)), and so it is 1. One that is 0 stays so.
fn dump_no_core() {
    let limit = Rlimit { current: Some(1), maximum: Some(1) };
    let _ = rustix::process::setrlimit(Resource::Core, limit);
}

fn main() -> ExitCode {
    dump_no_core();
    let cli = match settings::agent_serve().map_or_else(read_command_line, Ok) {
        Ok(cli) => cli,
        Err(error) => return exit::report(&Outcome::Usage(error)),
    };
    logging::start(&cli.global);
    exit::report(&commands::run(cli))
}
