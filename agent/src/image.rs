//! What guests boot from: built or imported once, named by content, sealed, shared read-only.

use std::path::{Path, PathBuf};

use mvm_proto::{Digest, ProfileId};

use crate::driver::BootImage;

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
    /// Being built or fetched; asked again later.
    Working {
        message: String,
    },
    /// Not to be had as things are; tried again after a while. `reason` is CamelCase for programs.
    Unavailable {
        reason: &'static str,
        message: String,
    },
}

#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    #[error("there is no image {0} on this node")]
    Missing(Digest),
}

/// The images of one node.
#[derive(Debug)]
pub struct Images {
    directory: Option<PathBuf>,
}

impl Images {
    /// No files at all: for the fake driver, whose guests need none. Everything is ready.
    #[must_use]
    pub fn imagined() -> Self {
        Self { directory: None }
    }

    /// The images below `directory`.
    pub fn open(directory: &Path) -> Result<Self, ImageError> {
        Ok(Self { directory: Some(directory.to_owned()) })
    }

    /// Whether the image is there; begins to get it in the background when it is not. Never waits.
    pub fn resolve(&self, image: &ImageRef) -> Resolution {
        match &self.directory {
            None => Resolution::Ready(BootImage::imagined(&image.flake_ref).digest),
            Some(_) => Resolution::Working { message: "not built yet".to_owned() },
        }
    }

    /// The files of an image that is there.
    pub fn boot_image(&self, digest: &Digest, flake_ref: &str) -> Result<BootImage, ImageError> {
        match &self.directory {
            None => Ok(BootImage::imagined(flake_ref)),
            Some(_) => Err(ImageError::Missing(*digest)),
        }
    }
}
