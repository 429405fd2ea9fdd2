//! `mvm trust next-root`: the root after the one in force.

use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use clap::Args;
use mvm_pki::trust::RoleSpec;
use mvm_pki::{PublicKey, SigningKey};
use mvm_proto::Timestamp;

use super::difference::View;
use super::signing::{Place, start};
use super::statements::{read_keys, read_public_keys};
use crate::exit::Run;
use crate::global::Global;

#[derive(Debug, Args)]
pub(crate) struct NextRootArgs {
    /// A private key of the current root (repeatable, up to the threshold)
    #[arg(long = "root-key", value_name = "FILE", required = true)]
    root_keys: Vec<PathBuf>,
    /// A private key of the next root, when it changes (repeatable)
    #[arg(long = "new-root-key", value_name = "FILE")]
    new_root_keys: Vec<PathBuf>,
    /// A public director key, when they change (repeatable)
    #[arg(long = "director", value_name = "FILE.pub")]
    directors: Vec<PathBuf>,
    /// A public image key, when they change (repeatable)
    #[arg(long = "image", value_name = "FILE.pub")]
    images: Vec<PathBuf>,
    /// How many root keys must sign [default: as before]
    #[arg(long, value_name = "K")]
    root_threshold: Option<u32>,
    /// How many image keys must sign [default: as before]
    #[arg(long, value_name = "K")]
    image_threshold: Option<u32>,
    /// Let nodes forget the highest document number they saw, after a key was stolen and numbers were burnt
    #[arg(long)]
    reset_high_water: bool,
    /// How long the root is valid
    #[arg(long, value_name = "TIME", default_value = "1year", value_parser = humantime::parse_duration)]
    life: Duration,
    #[command(flatten)]
    place: Place,
}

pub(super) async fn run(global: &Global, args: NextRootArgs) -> Run {
    let keys = [&args.root_keys[..], &args.new_root_keys].concat();
    let start = start(global, &args.place, &keys).await?;
    let now = Timestamp::from(SystemTime::now());
    let old_keys = read_keys(&args.root_keys)?;
    let new_keys = read_keys(&args.new_root_keys)?;
    let change = |role: &mut RoleSpec, keys: Vec<PublicKey>, threshold: Option<u32>| {
        if !keys.is_empty() {
            role.keys = keys;
        }
        role.threshold = threshold.unwrap_or(role.threshold);
    };
    let mut spec = start.store.root().spec();
    spec.expires_at = now + args.life;
    spec.resets_high_water = args.reset_high_water;
    change(&mut spec.root, new_keys.iter().map(SigningKey::public).collect(), args.root_threshold);
    change(&mut spec.director, read_public_keys(&args.directors)?, None);
    change(&mut spec.image, read_public_keys(&args.images)?, args.image_threshold);
    let next = start.store.root().next(&spec, now).map_err(anyhow::Error::new)?;
    let images = start.store.images().filter(|_| start.store.images_hold_under(&next));
    start.confirm(global, &args.place, View { root: &next, images })?;
    let envelope = next.seal(&old_keys.iter().chain(&new_keys).collect::<Vec<_>>());
    start.finish(global, &args.place, |store| store.advance_root(envelope, now).map(|_| ())).await
}
