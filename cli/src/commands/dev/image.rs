//! The image that the first pool boots: made once, before anything is started, so that what is missing for it is told at once.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use anyhow::Context as _;
use mvm_image::{ImageRef, ImageSettings, Store, Work};
use mvm_proto::{Digest, ProfileId};

use crate::progress::Progress;

pub(super) const REFERENCE: &str = "builtin:busybox";
/// Of which guest program the image in a directory of ours was made.
const MADE_WITH: &str = "made-with";

/// Makes the image if it is not there. `is_ours`: the directory is the cluster's own, so that an image with another guest
/// program than this version's is made anew.
pub(super) fn ensure(images: &Path, is_ours: bool, progress: Progress) -> anyhow::Result<()> {
    let settings = ImageSettings { guest: own_guest(), ..ImageSettings::default() };
    let program = settings
        .guest
        .as_deref()
        .map(std::fs::read)
        .transpose()
        .context("could not read the guest program")?;
    let program = program.map(|bytes| Digest::of(&bytes).to_string());
    let store = Store::open(images).with_context(|| {
        format!("could not open the images in {}\nname another directory: --images-dir DIR", images.display())
    })?;
    let made_with = images.join(MADE_WITH);
    let is_current = || {
        let before = std::fs::read_to_string(&made_with).ok();
        // Without a guest program none can be made; what is there is taken.
        !is_ours || program.is_none() || before == program
    };
    let profile: ProfileId = "default".parse().context("could not name the image")?;
    let found = store.reference(REFERENCE, &profile)?;
    if found.is_some_and(|built| store.manifest(&built.digest).is_ok()) && is_current() {
        return Ok(());
    }
    progress.say(format!(
        "making the image {REFERENCE}, once: it takes some seconds, and more while packages are downloaded"
    ));
    let tell = |line: &str| progress.say(format!("  {line}"));
    let never = AtomicBool::new(false);
    let asked = ImageRef { flake_ref: REFERENCE.to_owned(), profile, digest: None };
    mvm_image::build(&store, &asked, &settings, &Work::new(&tell, &never)).with_context(|| {
        format!(
            "could not make the image {REFERENCE} in {}\nwhen that is mended, run `mvm dev up` again; images that were made \
             elsewhere are used with --images-dir DIR",
            images.display()
        )
    })?;
    if let (true, Some(program)) = (is_ours, program) {
        mvm_pki::files::write_private(made_with, program.as_bytes())
            .context("could not note how the image was made")?;
    }
    Ok(())
}

fn own_guest() -> Option<std::path::PathBuf> {
    mvm_image::find_guest(&std::env::current_exe().ok()?)
}
