//! `mvm trust`: who may sign documents and images.
//!
//! `vouch` and `next-root` sign with keys that are kept offline: they read the current state from a coordinator or from
//! a file that `mvm trust show --out` wrote, and hand back what they signed or write it to a file to be carried over.

mod next_root;
mod signing;
mod statements;
mod vouch;

use std::path::PathBuf;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use mvm_pki::SigningKey;
use mvm_proto::wire::control::v1::TrustState;

use crate::args::Global;
use crate::client::Operator;
use crate::exit::Run;
use crate::output::{self, or_dash};
use crate::progress::Progress;
use statements::{bundle_of, fetch, hand_over, read_bundle, write_bundle};

#[derive(Debug, Subcommand)]
pub(crate) enum TrustCommand {
    /// The keys, their roles and expiry, and how many images are vouched for
    Show(ShowArgs),
    /// Make a signing key, for a role that the next root gives it
    Keygen(KeygenArgs),
    /// Vouch for images by their digests, with an image key
    Vouch(vouch::VouchArgs),
    /// Make the next root: other keys, later expiry; signed by the old root keys and the new
    NextRoot(next_root::NextRootArgs),
    /// Hand a root or an images statement that was signed elsewhere to the coordinator
    Update(UpdateArgs),
}

#[derive(Debug, Args)]
pub(crate) struct ShowArgs {
    /// Also write the signed statements to this file, for signing on a machine that is offline
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    #[command(flatten)]
    operator: Operator,
}

#[derive(Debug, Args)]
pub(crate) struct KeygenArgs {
    /// File for the private key (0600); the public key goes beside it as FILE.pub
    file: PathBuf,
}

#[derive(Debug, Args)]
pub(crate) struct UpdateArgs {
    /// What `vouch --out` or `next-root --out` wrote
    #[arg(short, long = "file", value_name = "FILE")]
    file: PathBuf,
    #[command(flatten)]
    operator: Operator,
}

pub(crate) async fn run(global: &Global, command: TrustCommand) -> Run {
    match command {
        TrustCommand::Show(args) => {
            let state = fetch(global, &args.operator).await?;
            if let Some(path) = &args.out {
                write_bundle(path, &bundle_of(&state)?)?;
            }
            Ok(output::show(global.output, &state, |_| table(&state))?)
        }
        TrustCommand::Keygen(args) => keygen(global, &args),
        TrustCommand::Vouch(args) => vouch::run(global, args).await,
        TrustCommand::NextRoot(args) => next_root::run(global, args).await,
        TrustCommand::Update(args) => {
            let bundle = read_bundle(&args.file)?;
            hand_over(global, &args.operator, &bundle).await
        }
    }
}

fn keygen(global: &Global, args: &KeygenArgs) -> Run {
    let key = SigningKey::generate().map_err(anyhow::Error::new)?;
    if args.file.exists() {
        return Err(anyhow!("{} exists; a key is never overwritten", args.file.display()).into());
    }
    key.to_file(&args.file).map_err(anyhow::Error::new)?;
    let public = args.file.with_added_extension("pub");
    std::fs::write(&public, format!("{}\n", key.public()))
        .with_context(|| format!("could not write {}", public.display()))?;
    Progress::new(global.quiet).say(format!("key {} is in {}", key.public().key_id(), args.file.display()));
    Ok(())
}

fn table(state: &TrustState) -> comfy_table::Table {
    let mut rows = vec![
        ("root version", state.root_version.to_string()),
        ("root until", or_dash(&state.root_expires_at)),
        (
            "development",
            if state.dev_cluster { "yes: the coordinator holds all keys" } else { "no" }.to_owned(),
        ),
        ("images version", state.images_version.to_string()),
        ("images vouched for", state.image_digests.to_string()),
        ("images until", or_dash(&state.images_expires_at)),
    ];
    rows.extend(state.keys.iter().map(|key| {
        (
            "key",
            format!(
                "{:8} {} (threshold {}, until {})",
                key.role,
                key.key_id,
                key.threshold,
                or_dash(&key.expires_at)
            ),
        )
    }));
    output::properties(rows)
}
