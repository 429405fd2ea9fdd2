//! `mvm trust vouch`: the next statement of images.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use mvm_pki::ImagesMetadata;
use mvm_proto::{Digest, Timestamp};

use super::signing::{Place, current, finish};
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
    let store = current(global, &args.place).await?;
    let now = Timestamp::from(SystemTime::now());
    let mut digests =
        if args.replace { Vec::new() } else { store.images().map(|m| m.digests.clone()).unwrap_or_default() };
    digests.extend(args.digests);
    let version = store.images_version() + 1;
    let statement = ImagesMetadata::new(store.cluster().clone(), version, digests, now, args.life)
        .map_err(anyhow::Error::new)?;
    let keys = read_keys(&args.keys)?;
    let envelope = statement.seal(&keys.iter().collect::<Vec<_>>());
    finish(global, &args.place, store, |store| store.advance_images(envelope, now).map(|_| ())).await
}
