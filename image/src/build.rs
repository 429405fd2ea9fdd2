//! Builds or imports the image of one reference.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime};

use mvm_proto::document::ImageSource;
use mvm_proto::{Digest, Timestamp};
use tokio::sync::watch;

use super::debian::megabytes;
use super::error::ImageError;
use super::flake::{self, NixSettings};
use super::folder::{self, Links};
use super::refs::Built;
use super::stamp::Look;
use super::store::Store;
use super::work::Work;
use super::{ImageRef, Vouched, busybox};

/// What building needs to know of this machine.
#[derive(Debug, Clone)]
pub struct ImageSettings {
    /// The data folder of the agent whose instances use the images, which may share them with others.
    pub owner: Option<PathBuf>,
    /// The static guest program that goes into built-in images.
    pub guest: Option<PathBuf>,
    /// Where downloaded packages are kept; without it, `cache` in the store.
    pub cache: Option<PathBuf>,
    pub nix: NixSettings,
    /// What the agent may start and build; what the command line builds is not checked.
    pub vouched: watch::Receiver<Vouched>,
    /// The wait after a first failure; each further one doubles it.
    pub first_retry: Duration,
    /// A `path:` folder that changed is imported again once nothing in it changed for this long.
    pub folder_quiet: Duration,
    pub longest_retry: Duration,
}

impl Default for ImageSettings {
    fn default() -> Self {
        Self {
            owner: None,
            guest: None,
            cache: None,
            nix: NixSettings::default(),
            vouched: Vouched::unchecked(),
            first_retry: Duration::from_secs(5),
            folder_quiet: Duration::from_secs(3),
            longest_retry: Duration::from_secs(600),
        }
    }
}

/// Builds or imports what `image` asks for, and writes down what it turned out to be.
///
/// Takes as long as it takes. A digest that was asked for and not met leaves the reference as it was.
pub fn build(
    store: &Store,
    image: &ImageRef,
    settings: &ImageSettings,
    work: &Work<'_>,
) -> Result<Built, ImageError> {
    let began = Instant::now();
    let source = source_of(&image.flake_ref)?;
    let mut staging = store.begin()?;
    // Before it is read: what changes meanwhile is noticed afterwards.
    let stamp = match &source {
        ImageSource::Folder(path) => Look::at(Path::new(path)).map(|look| look.stamp),
        _ => None,
    };
    let made_of = match source {
        ImageSource::Busybox => {
            let cache = settings.cache.clone().unwrap_or_else(|| store.root().join("cache"));
            busybox::build(&cache, settings.guest.as_deref(), &mut staging, work)?
        }
        ImageSource::Folder(path) => {
            folder::import(Path::new(&path), &Links::Inside, &mut staging, work)?;
            Vec::new()
        }
        ImageSource::Flake(flake) => flake::build(&flake, &image.profile, &settings.nix, &mut staging, work)?,
    };
    // From here to the reference nothing may collect the image.
    let lock = store.lock()?;
    let (digest, manifest) = staging.finish(&store.images())?;
    let size = megabytes(manifest.size());
    work.say(format!("sealed {digest} ({size:.1} MB, {:.1} s in all)", began.elapsed().as_secs_f32()));
    expect(image, digest)?;
    let before = store.reference(&image.flake_ref, &image.profile)?;
    let built = Built {
        reference: image.flake_ref.clone(),
        profile: image.profile.clone(),
        digest,
        built_at: Timestamp::from(SystemTime::now()),
        stamp,
        made_of,
        pinned: before.is_some_and(|before| before.pinned),
    };
    store.set_reference(&lock, &built)?;
    Ok(built)
}

pub(super) fn source_of(reference: &str) -> Result<ImageSource, ImageError> {
    let refuse = |rule| ImageError::NoSource { reference: reference.to_owned(), rule };
    ImageSource::parse(reference).map_err(refuse)
}

/// An image other than the one asked for is kept until it is collected, and never used for this.
pub(super) fn expect(image: &ImageRef, found: Digest) -> Result<(), ImageError> {
    match image.digest {
        Some(expected) if expected != found => {
            Err(ImageError::DigestMismatch { reference: image.flake_ref.clone(), expected, found })
        }
        _ => Ok(()),
    }
}
