//! `mvm trust vouch`: the next statement of images.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use mvm_pki::trust::ImageSource;
use mvm_pki::{ImagesMetadata, TrustStore};
use mvm_proto::{Digest, Timestamp};

use super::difference::View;
use super::signing::{Place, start};
use super::statements::read_keys;
use crate::exit::Run;
use crate::global::Global;

#[derive(Debug, Args)]
pub(crate) struct VouchArgs {
    /// An image's digest (repeatable)
    #[arg(long = "digest", value_name = "SHA256", required_unless_present = "sources")]
    digests: Vec<Digest>,
    /// A reference that nodes may build or import themselves, and the digest of the image that must come of it
    /// (repeatable); vouches for the digest too
    #[arg(long = "source", value_name = "REF=SHA256", value_parser = read_source)]
    sources: Vec<ImageSource>,
    /// A private image key (repeatable, up to the threshold)
    #[arg(long = "image-key", value_name = "FILE", required = true)]
    keys: Vec<PathBuf>,
    /// Vouch for these digests and sources only, instead of adding them
    #[arg(long)]
    replace: bool,
    /// How long the statement is valid
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
    let held = store.images().filter(|_| !args.replace);
    let (mut digests, mut sources) =
        held.map(|held| (held.digests.clone(), held.sources.clone())).unwrap_or_default();
    digests.extend(&args.digests);
    digests.extend(args.sources.iter().map(|source| source.digest));
    sources.extend(args.sources.iter().cloned());
    let version = next_version(store.images_version(), store.root_version(), now);
    let statement = ImagesMetadata::new(store.cluster().clone(), version, digests, now, args.life)?;
    Ok(statement.with_sources(sources)?)
}

/// One more than what is held. Where nothing is held any more, because a root took the keys of what was, the numbers go on
/// by the clock: a statement from before, whose keys may come back one day, must not count as newer.
fn next_version(held: u64, root_version: u64, now: Timestamp) -> u64 {
    let may_have_dropped = held == 0 && root_version > 1;
    let clock = u64::try_from(now.unix_secs()).unwrap_or(0);
    if may_have_dropped { clock } else { held + 1 }
}

/// A digest has no `=`; a reference may.
fn read_source(text: &str) -> Result<ImageSource, String> {
    let (flake_ref, digest) = text.rsplit_once('=').ok_or("must be REF=SHA256")?;
    let digest = digest.parse().map_err(|error| format!("{digest}: {error}"))?;
    Ok(ImageSource { flake_ref: flake_ref.to_owned(), digest })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_never_begin_again_after_a_root_dropped_a_statement() {
        let at = |text: &str| text.parse::<Timestamp>().unwrap();
        let (early, later) = (at("2026-11-18T00:00:00Z"), at("2026-11-18T00:00:05Z"));
        assert_eq!(next_version(0, 1, early), 1);
        assert_eq!(next_version(4, 3, early), 5);
        let after = next_version(0, 2, early);
        assert!(after > 1_000_000, "more than anyone numbered one by one: {after}");
        assert!(next_version(0, 4, later) > next_version(after, 3, early), "and again after the next drop");
    }

    #[test]
    fn a_source_is_a_reference_which_may_have_an_equals_sign_and_a_digest() {
        let digest = Digest::of(b"image");
        let source = read_source(&format!("github:org/repo?rev=12ab={digest}")).unwrap();
        assert_eq!(source, ImageSource { flake_ref: "github:org/repo?rev=12ab".to_owned(), digest });
        assert!(read_source("github:org/repo?rev=12ab").is_err());
        assert!(read_source("github:org/repo").is_err());
    }
}
