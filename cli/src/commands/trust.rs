//! `mvm trust`: who may sign documents and images.
//!
//! `vouch` and `next-root` sign with keys that are kept offline, on top of the trust that this operator has pinned: they
//! follow what was signed since, from a coordinator or from a file that `mvm trust get --out` wrote, show what changes,
//! and hand back what they signed or write it to a file to be carried over.

mod difference;
mod next_root;
pub(crate) mod pin;
mod signing;
mod statements;
mod vouch;

use std::path::PathBuf;
use std::time::SystemTime;

use anyhow::{Context, anyhow};
use clap::{Args, Subcommand};
use mvm_pki::trust::{Supplied, root_digest};
use mvm_pki::{SigningKey, TrustBundle};
use mvm_proto::Timestamp;
use mvm_proto::wire::control::v1::TrustState;
use pin::{Pins, in_operator_dir};
use serde::Serialize;
use statements::{bundle_of, fetch, hand_over, read_bundle, write_bundle};

use crate::client::Operator;
use crate::exit::Run;
use crate::global::Global;
use crate::output::{self, or_dash};
use crate::progress::Progress;

#[derive(Debug, Subcommand)]
pub(crate) enum TrustCommand {
    /// The keys, their roles and expiry, and how many images are vouched for
    #[command(aliases = ["show", "info", "inspect"])]
    Get(GetArgs),
    /// Pin the cluster's trust root by its digest: what offline keys will sign on top of
    Pin(pin::PinArgs),
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
pub(crate) struct GetArgs {
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
        TrustCommand::Get(args) => {
            let state = fetch(global, &args.operator).await?;
            if let Some(path) = &args.out {
                write_bundle(path, &bundle_of(&state)?)?;
            }
            show(global, &args.operator, &state)
        }
        TrustCommand::Pin(args) => pin::run(global, args).await,
        TrustCommand::Keygen(args) => keygen(global, &args),
        TrustCommand::Vouch(args) => vouch::run(global, args).await,
        TrustCommand::NextRoot(args) => next_root::run(global, args).await,
        TrustCommand::Update(args) => {
            let bundle = read_bundle(&args.file)?;
            update(global, &args.operator, &bundle).await
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

/// Hands statements over that were signed elsewhere; a pin that there is follows them first.
async fn update(global: &Global, operator: &Operator, bundle: &TrustBundle) -> Run {
    let Some(pins) = Pins::load(&[in_operator_dir(operator)])? else {
        return hand_over(global, operator, bundle).await;
    };
    let mut next = pins.held.clone();
    let followed = next.follow_supplied(bundle, Timestamp::from(SystemTime::now()));
    let supplied = followed.context("not handed over: this does not follow from the pinned trust")?;
    if let Some(refused) = supplied.images_refused {
        let refused = anyhow::Error::new(refused).context("the images statement is refused");
        if next.root_version() == pins.held.root_version() {
            return Err(refused.context("not handed over").into());
        }
        // A root may be urgent; the coordinator and the nodes judge the statement by themselves.
        Progress::new(false).say(format!("! {refused:#}; the root is handed over"));
    }
    pins.advance(&next)?;
    hand_over(global, operator, bundle).await
}

/// What `show` and whatever changes the trust print.
#[derive(Debug, Serialize)]
pub(crate) struct TrustOutput<'a> {
    #[serde(flatten)]
    pub(crate) state: &'a TrustState,
    /// Of the root in force, as this program computed it: for comparing with other operators.
    pub(crate) root_digest: String,
    pub(crate) pinned: &'static str,
}

fn show(global: &Global, operator: &Operator, state: &TrustState) -> Run {
    let bundle = bundle_of(state)?;
    let pinned = match Pins::load(&[in_operator_dir(operator)])? {
        None => "no",
        Some(mut pins) => match pins.held.follow_supplied(&bundle, Timestamp::from(SystemTime::now())) {
            Ok(Supplied { images_refused: None, root_behind: None, images_behind: None }) => "yes",
            Ok(Supplied { images_refused: None, .. }) => "yes, and the coordinator is behind",
            Ok(_) | Err(_) => "NO: the coordinator contradicts the pinned trust",
        },
    };
    let root_digest = bundle.roots.last().map(|root| root_digest(root).to_string()).unwrap_or_default();
    let shown = TrustOutput { state, root_digest, pinned };
    Ok(output::show(global.output, &shown, |_| table(&shown))?)
}

pub(crate) fn table(shown: &TrustOutput<'_>) -> output::Table {
    let state = shown.state;
    let mut rows = vec![
        ("root version", state.root_version.to_string()),
        ("root digest", shown.root_digest.clone()),
        ("pinned", shown.pinned.to_owned()),
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
