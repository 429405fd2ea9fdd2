//! Builds, imports, stores and removes the images that guests boot from: named by content, sealed (read-only), shared.
//!
//! The agent asks [`Images`], which answers at once and builds what is missing in one background thread. [`Store`] is the
//! folder on disk, for the agent and the command line alike. An image is hashed when it is made and by
//! `mvm image verify`; a boot only checks that its files are the ones that were sealed, and that the cluster's image keys
//! still vouch for it ([`Vouched`]).

mod boot_image;
mod build;
mod busybox;
mod collect;
mod compression;
mod cpio;
mod debian;
mod disk_image;
mod elf;
mod error;
mod flake;
mod folder;
mod guest_program;
mod kernel;
mod manifest;
mod modules;

mod refs;
mod requests;
mod staging;
mod stamp;
mod store;
#[cfg(test)]
mod tests;
mod vouched;
mod work;

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use mvm_proto::{Digest, ProfileId};
use requests::Requests;
use tokio::sync::watch;

pub use boot_image::BootImage;
pub use build::{ImageSettings, build};
pub use collect::{Collected, KeepRules, Kept, collect, remove};
pub use error::ImageError;
pub use flake::NixSettings;
pub use guest_program::find_guest;
pub use manifest::{FileEntry, Manifest, Part};
pub use refs::Built;
pub use stamp::Stamp;
pub use store::Store;
pub use vouched::Vouched;
pub use work::Work;

/// What a pool asks for.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ImageRef {
    pub flake_ref: String,
    pub profile: ProfileId,
    /// What it must turn out to be.
    pub digest: Option<Digest>,
}

/// Whether a pool's image is there.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Resolution {
    Ready(Digest),
    /// There is one, of how its source was before: it is used on, for the newer one can't be had. `reason` is CamelCase for
    /// programs.
    Outdated {
        digest: Digest,
        reason: &'static str,
        message: String,
    },
    /// Being built or fetched; asked again later.
    Working {
        message: String,
    },
    /// Not to be had as things are; tried again after a while, and told until it is there. `reason` is CamelCase for programs.
    Unavailable {
        reason: &'static str,
        message: String,
    },
}

impl Resolution {
    fn refused(error: &ImageError) -> Self {
        Self::Unavailable { reason: error.reason(), message: error.to_string() }
    }
}

/// The images of one node. Clones share everything; a build is cancelled when the last one is dropped.
#[derive(Debug, Clone)]
pub struct Images {
    /// None: images are imagined.
    requests: Option<Arc<Requests>>,
    changed: watch::Receiver<u64>,
    vouched: watch::Receiver<Vouched>,
}

impl Images {
    /// No files at all: for the fake driver, whose guests need none. Everything that is vouched for is ready.
    #[must_use]
    pub fn imagined(vouched: watch::Receiver<Vouched>) -> Self {
        Self { requests: None, changed: watch::channel(0).1, vouched }
    }

    /// The images below `directory`.
    pub fn open(directory: &Path, settings: ImageSettings) -> Result<Self, ImageError> {
        let vouched = settings.vouched.clone();
        let requests = Requests::new(Store::open(directory)?, settings);
        Ok(Self { changed: requests.changed(), requests: Some(Arc::new(requests)), vouched })
    }

    /// Whether the image is there and may start; begins to get it in the background when it is not there and may be
    /// built. Never waits, and touches no file once the image is known to be there, but for the times of a `path:` folder
    /// that no digest pins.
    pub fn resolve(&self, image: &ImageRef) -> Resolution {
        if let Err(error) = self.vouched.borrow().check_asked(image) {
            return Resolution::refused(&error);
        }
        match &self.requests {
            None => {
                let imagined = || BootImage::imagined(&image.flake_ref).digest;
                Resolution::Ready(image.digest.unwrap_or_else(imagined))
            }
            Some(requests) => requests.resolve(image),
        }
    }

    /// Whether an instance of this image may start now.
    pub fn check(&self, digest: &Digest) -> Result<(), ImageError> {
        self.vouched.borrow().check(digest)
    }

    /// What may start here, now and whenever that changes.
    #[must_use]
    pub fn vouched(&self) -> watch::Receiver<Vouched> {
        self.vouched.clone()
    }

    /// The files of an image that is there and may start.
    pub fn boot_image(&self, digest: &Digest, flake_ref: &str) -> Result<BootImage, ImageError> {
        self.check(digest)?;
        match &self.requests {
            None => Ok(BootImage::imagined(flake_ref)),
            Some(requests) => requests.boot_image(digest),
        }
    }

    /// Changes whenever a build ends, well or not. Something waiting for an image can ask again then.
    #[must_use]
    pub fn changed(&self) -> watch::Receiver<u64> {
        self.changed.clone()
    }

    /// Writes down which images the instances on this node need, so that none is removed. Costs nothing when it
    /// is the same as before. What was resolved lately is kept besides.
    pub fn set_in_use(&self, referenced: &BTreeSet<Digest>) -> Result<(), ImageError> {
        self.requests.as_ref().map_or(Ok(()), |requests| requests.set_in_use(referenced))
    }

    /// Removes the images that nothing needs: no instance in `referenced`, no reference that `rules` keep.
    pub fn collect(&self, referenced: &BTreeSet<Digest>, rules: &KeepRules) -> Result<Collected, ImageError> {
        match &self.requests {
            None => Ok(Collected::default()),
            Some(requests) => requests.collect(referenced, rules),
        }
    }
}
