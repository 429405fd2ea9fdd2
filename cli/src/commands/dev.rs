//! `mvm dev`: a cluster on this machine to try things out. One coordinator and one agent, on loopback alone, in one directory.
//!
//! [`up`] makes or continues it, [`status`] shows it, [`down`] takes it away. The two processes are ordinary `mvm coordinator
//! serve` and `mvm agent serve`, started by [`process`]; what else the cluster is lies in the directory ([`dir`], [`state`]).
//! Every step can be repeated, and is found done or undone by what is on the disk and which processes live.

mod claim;
mod context;
mod declare;
mod dir;
mod down;
mod image;
mod isolation;
mod members;
mod ports;
mod process;
mod state;
mod status;
mod up;

use std::ffi::OsString;
use std::path::PathBuf;

use clap::{Args, Subcommand};
use mvm_agent::isolation::NetworkMode;
use mvm_vmm::DriverChoice;

use crate::commands::agent::absolute_path;
use crate::commands::block_on;
use crate::exit::Run;
use crate::global::Global;

#[derive(Debug, Subcommand)]
pub(crate) enum DevCommand {
    /// Make the cluster, or go on with it; does nothing when all of it runs
    #[command(after_help = UP_EXAMPLES)]
    Up(UpArgs),
    /// What runs, and where its logs are; exit code 0 when it runs, 1 when not
    #[command(after_help = "Examples:\n  mvm dev status\n  mvm dev status -o json")]
    Status(DirArgs),
    /// Destroy the cluster with its instances; images stay, so that the next `up` is quick
    #[command(after_help = DOWN_EXAMPLES)]
    Down(DownArgs),
    /// Becomes a process of the cluster; `up` starts it itself
    #[command(hide = true)]
    Exec(ExecArgs),
}

const UP_EXAMPLES: &str = "\
Examples:
  mvm dev up
  mvm get nodes,pools -A
  mvm instance list
  mvm instance exec i-0123abcd -- uname -a      an id from the list
  mvm dev down

The first time, the image builtin:busybox is made of Debian packages. After a reboot, or when a process was killed,
`mvm dev up` goes on with the same cluster and the same instances. As root, tenants get networks, limits and jails as
far as this machine can hold them; without root nothing keeps tenants apart. What is left out is said, with the reason.";

const DOWN_EXAMPLES: &str = "\
Examples:
  mvm dev down            nothing is left but images
  mvm dev down --keep     instances go; keys and declared objects stay for the next `mvm dev up`
  mvm dev down --purge    images go, too";

#[derive(Debug, Clone, Args)]
pub(crate) struct DirArgs {
    /// Directory of the cluster [default: $XDG_STATE_HOME/mvm/dev, else ~/.local/state/mvm/dev]
    #[arg(long, value_name = "DIR", env = "MVM_DEV_DIR", value_parser = absolute_path())]
    dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct UpArgs {
    #[command(flatten)]
    dir: DirArgs,
    /// The VMM driver: auto (the strongest that works here), firecracker, qemu, or fake (runs no guest) [default: as before, else auto]
    #[arg(long, value_name = "DRIVER", value_parser = driver)]
    driver: Option<DriverChoice>,
    /// How instances are connected: bridges (needs root) or none [default: bridges where this machine can hold them]
    #[arg(long, value_name = "MODE")]
    network: Option<NetworkMode>,
    /// Directory with images [default: as before, else images/ in the cluster's directory]
    #[arg(long, value_name = "DIR", value_parser = absolute_path())]
    images_dir: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct DownArgs {
    #[command(flatten)]
    dir: DirArgs,
    /// Keep keys, certificates and declared objects: the next `up` makes their instances anew
    #[arg(long)]
    keep: bool,
    /// Remove the images in the cluster's directory, too
    #[arg(long, conflicts_with = "keep")]
    purge: bool,
}

#[derive(Debug, Args)]
pub(crate) struct ExecArgs {
    /// Where the process writes which one it is
    pid_file: PathBuf,
    /// What follows `mvm`
    #[arg(last = true, required = true)]
    command: Vec<OsString>,
}

fn driver(text: &str) -> Result<DriverChoice, String> {
    text.parse::<DriverChoice>().map_err(|error| error.to_string())
}

pub(crate) fn run(global: &Global, command: DevCommand) -> Run {
    match command {
        DevCommand::Up(args) => block_on(up::run(global, args)),
        DevCommand::Status(args) => block_on(status::run(global, args)),
        DevCommand::Down(args) => block_on(down::run(global, args)),
        // Before there is a thread or a runtime: this process becomes another program.
        DevCommand::Exec(args) => process::become_recorded(&args.pid_file, &args.command),
    }
}
