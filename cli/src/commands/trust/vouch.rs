//! `mvm trust vouch`: the next statement of images.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use mvm_pki::{ImagesMetadata, TrustStore};
use mvm_proto::{Digest, Timestamp};

use super::difference::View;
use super::signing::{Place, start};
use super::statements::read_keys;
use crate::args::Global;
use crate::exit::Run;

#[derive(Debug, Args)]
pub(crate) struct VouchArgs {
    /// An image's digest (repeatable)
    #[arg(long = "digest", value_name = "SHA256", required = true)]
    digests: Vec<Digest>,
    /// A private image key (repeatable, up to the threshold)
    #[arg(long = "image-key", value_name = "FILE", required = true)]
    keys: Vec<PathBuf>,
    /// Vouch for these digests only, instead of adding them
    #[arg(long)]
    replace: bool,
    /// How long the statement holds
    #[arg(long, value_name = "TIME", default_value = "90days", value_parser = humantime::parse_duration)]
    life: Duration,
    #[command(flatten)]
    place: Place,
}

pub(super) async fn run(global: &Global, args: VouchArgs) -> Run {
    let mut start = start(global, &args.place, &args.keys).await?;
    start.require_images()?;
    let now = Timestamp::from(SystemTime::now());
    let statement = next_statement(&start.store, &args, now)?;
    let keys = read_keys(&args.keys)?;
    start.confirm(global, &args.place, View { root: start.store.root(), images: Some(&statement) })?;
    let envelope = statement.seal(&keys.iter().collect::<Vec<_>>());
    start.finish(global, &args.place, |store| store.advance_images(envelope, now).map(|_| ())).await
}

fn next_statement(store: &TrustStore, args: &VouchArgs, now: Timestamp) -> anyhow::Result<ImagesMetadata> {
    let kept = store.images().filter(|_| !args.replace).into_iter().flat_map(|held| &held.digests);
    let digests = kept.chain(&args.digests).copied();
    let version = store.images_version() + 1;
    Ok(ImagesMetadata::new(store.cluster().clone(), version, digests, now, args.life)?)
}
