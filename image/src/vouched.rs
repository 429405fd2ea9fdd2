//! Which images may start on this node, and what may be built here: what the cluster's image keys say.
//!
//! The acceptor publishes it when the agent starts and whenever the cluster's trust changes. [`Images`](super::Images) asks
//! it before every start and every build, so that an image that was revoked is not started again.
//!
//! Whether the statement has expired since is not asked here: without one in time no new document is accepted, and
//! what an accepted document asks for is kept (`plan_expired` of the planner), also when a clock was moved.

use std::collections::BTreeSet;

use mvm_pki::trust::{ImageSource, TrustStore};
use mvm_proto::Digest;
use tokio::sync::watch;

use super::{ImageError, ImageRef};

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum Vouched {
    /// A development cluster, or desired state from a local file that root wrote: nothing is checked.
    #[default]
    Everything,
    Only {
        images: BTreeSet<Digest>,
        /// What may be built or imported here, and what must come of it.
        sources: BTreeSet<ImageSource>,
    },
}

impl Vouched {
    /// Where nothing is checked, and that never changes.
    #[must_use]
    pub fn unchecked() -> watch::Receiver<Self> {
        watch::channel(Self::Everything).1
    }

    /// What the newest statement of images says.
    #[must_use]
    pub fn by(trust: &TrustStore) -> Self {
        if trust.is_dev() {
            return Self::Everything;
        }
        let (images, sources) = trust.images().map_or_else(Default::default, |statement| {
            (statement.digests.iter().copied().collect(), statement.sources.iter().cloned().collect())
        });
        Self::Only { images, sources }
    }

    /// Whether this image may start.
    pub fn check(&self, digest: &Digest) -> Result<(), ImageError> {
        match self {
            Self::Only { images, .. } if !images.contains(digest) => Err(ImageError::NotVouched(*digest)),
            _ => Ok(()),
        }
    }

    /// Whether what a pool asks for may start: outside a development cluster only what it names by digest.
    pub(super) fn check_asked(&self, image: &ImageRef) -> Result<(), ImageError> {
        match (self, &image.digest) {
            (Self::Everything, _) => Ok(()),
            (_, Some(digest)) => self.check(digest),
            (_, None) => Err(ImageError::NoDigest { reference: image.flake_ref.clone() }),
        }
    }

    /// Whether an image that is not there may be built or imported: only from a source that an image key names for it.
    pub(super) fn check_source(&self, image: &ImageRef) -> Result<(), ImageError> {
        self.check_asked(image)?;
        let (Self::Only { sources, .. }, Some(digest)) = (self, image.digest) else { return Ok(()) };
        let source = ImageSource { flake_ref: image.flake_ref.clone(), digest };
        if sources.contains(&source) {
            return Ok(());
        }
        Err(ImageError::SourceNotVouched { reference: source.flake_ref, digest })
    }
}
