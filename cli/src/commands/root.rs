//! `mvm coordinator root`: replacing the root certificate without anyone noticing.

use std::path::PathBuf;
use std::time::SystemTime;

use clap::{Args, Subcommand};
use mvm_proto::{Digest, Timestamp};

use crate::exit::Run;
use crate::global::Global;
use crate::output;
use crate::paths::default_data_dir;
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum RootCommand {
    /// The roots that the cluster trusts
    List(ListArgs),
    /// Make a new root and trust it beside the old
    Add(AddArgs),
    /// Make a new issuing authority under a root that everybody trusts already
    Switch(SwitchArgs),
    /// Stop trusting a root
    Retire(RetireArgs),
}

#[derive(Debug, Args)]
pub(crate) struct Folder {
    /// The coordinator's data folder
    #[arg(long, value_name = "DIR", default_value_os_t = default_data_dir("coordinator"))]
    data_dir: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct AddArgs {
    /// Folder for the new root's key and certificate; take it away afterwards
    #[arg(long, value_name = "DIR")]
    root_key_dir: PathBuf,
    /// Folder with ca.crt and ca.key of a root that is trusted now: it endorses the new one to nodes and operators [default: pki/root in the data folder]
    #[arg(long, value_name = "DIR")]
    signed_by: Option<PathBuf>,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct SwitchArgs {
    /// Folder with the root's ca.crt and ca.key
    #[arg(long, value_name = "DIR")]
    root_key_dir: PathBuf,
    #[command(flatten)]
    folder: Folder,
}

#[derive(Debug, Args)]
pub(crate) struct RetireArgs {
    /// The root's fingerprint, as `list` shows it
    fingerprint: Digest,
    #[command(flatten)]
    folder: Folder,
}

/// What every step ends with.
const NEXT: &str = "restart the coordinator, then wait for one life of a certificate before the next step: 24 h for nodes, 7 days for \
     operators, by default";

pub(crate) fn run(global: &Global, command: RootCommand) -> Run {
    let now = Timestamp::from(SystemTime::now());
    let progress = Progress::new(global.quiet);
    match command {
        RootCommand::List(args) => {
            let roots =
                mvm_coordinator::trusted_roots(&args.folder.data_dir, now).map_err(anyhow::Error::new)?;
            output::show(global.output, &roots, |_| {
                let mut table = output::table(["ROOT", "ISSUING"]);
                for root in &roots {
                    table.add_row([
                        root.fingerprint.to_string(),
                        if root.issuing { "yes" } else { "no" }.to_owned(),
                    ]);
                }
                table
            })?;
        }
        RootCommand::Add(args) => {
            let root = mvm_coordinator::add_root(
                &args.folder.data_dir,
                &args.root_key_dir,
                args.signed_by.as_deref(),
                now,
            )
            .map_err(anyhow::Error::new)?;
            progress.say(format!("{root} is trusted beside the others; {NEXT}"));
        }
        RootCommand::Switch(args) => {
            let root = mvm_coordinator::switch_issuing(&args.folder.data_dir, &args.root_key_dir, now)
                .map_err(anyhow::Error::new)?;
            progress.say(format!("certificates are issued under {root}; {NEXT}"));
        }
        RootCommand::Retire(args) => {
            mvm_coordinator::retire_root(&args.folder.data_dir, &args.fingerprint, now)
                .map_err(anyhow::Error::new)?;
            progress.say(format!("{} is trusted no longer; restart the coordinator", args.fingerprint));
        }
    }
    Ok(())
}
