//! `mvm-benches`: measures, prints one table, writes one JSON file.

#![allow(clippy::print_stdout, clippy::print_stderr, reason = "the table is the product")]

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Result;
use clap::Parser;
use mvm_benches::authority::now;
use mvm_benches::effort::Effort;
use mvm_benches::machine::{MAX_OUTSIDE_LOAD, Machine, outside_load};
use mvm_benches::report::{Report, profile};
use mvm_benches::row::{Subject, Verdict};
use mvm_benches::{rows, table};

const RESULTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../target/bench/results.json");
/// How long others are watched before the start.
const LOAD_SPAN: Duration = Duration::from_secs(2);

/// Measures mvm beside its peers and floors.
#[derive(Debug, Parser)]
struct Args {
    /// A few samples of everything, to see that it runs; the figures mean little
    #[arg(long)]
    quick: bool,
    /// Measure only this (repeatable)
    #[arg(long, value_name = "ROW", value_enum)]
    only: Vec<Subject>,
    /// Where to write the figures
    #[arg(long, value_name = "PATH", default_value = RESULTS)]
    json: PathBuf,
    /// Measure although others keep the machine busy
    #[arg(long)]
    force: bool,
}

fn main() -> Result<ExitCode> {
    let args = Args::parse();
    let load = outside_load(LOAD_SPAN)?;
    if load > MAX_OUTSIDE_LOAD && !args.force {
        eprintln!(
            "others keep {load:.2} cores busy, and above {MAX_OUTSIDE_LOAD} figures are worthless; wait, or insist with --force"
        );
        return Ok(ExitCode::FAILURE);
    }
    if profile() == "debug" {
        eprintln!("this is a debug build: its figures mean nothing");
    }
    let effort = if args.quick { Effort::quick() } else { Effort::full() };
    let wanted = if args.only.is_empty() { rows::ALL.to_vec() } else { args.only };
    let taken_at = now();
    let rows = rows::measure(&wanted, effort, |subject| eprintln!("measuring {subject:?} ..."));
    let report = Report {
        taken_at,
        machine: Machine::here(),
        profile: profile(),
        quick: args.quick,
        outside_load: load,
        rows,
    };
    report.write(&args.json)?;

    let machine = &report.machine;
    println!("{}", table::table(&report.rows));
    println!(
        "\n{} x {}, {} MiB, Linux {}; {} build{}; others kept {load:.2} cores busy before the start; written to {}",
        machine.cores,
        machine.cpu,
        machine.memory_mib,
        machine.kernel,
        report.profile,
        if report.quick { ", quick" } else { "" },
        args.json.display()
    );
    let failed = report.rows.iter().any(|row| row.verdict == Verdict::Failed);
    Ok(if failed { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
