//! Pinning: how a party that holds no root comes to its first one, and how an operator's pin judges what a coordinator
//! supplies.
//!
//! A root is named by the digest of what is signed. A person or a join token carries that digest past the coordinator,
//! so that a coordinator can't introduce a root of its own. Offline keys sign only on top of a pin.

use mvm_proto::{Digest, Envelope, Timestamp};

use super::metadata::RootMetadata;
use super::store::{Followed, check_not_future, claimed_root};
use super::{TrustBundle, TrustError, TrustRole, TrustStore};

/// The name of a pin: in an operator's directory, and beside keys that are kept offline.
pub const PIN_FILE: &str = "trust.json";

/// What a pin found in a bundle that it followed.
#[derive(Debug, Default)]
#[must_use]
pub struct Supplied {
    /// The bundle's newest root, when the pin holds a newer one; 0: the bundle holds none.
    pub root_behind: Option<u64>,
    /// The version of the bundle's statement of images, when the pin holds a newer one; 0: the bundle holds none.
    pub images_behind: Option<u64>,
    /// Why the bundle's statement of images was not taken.
    pub images_refused: Option<TrustError>,
}

impl TrustBundle {
    /// The root that has this digest, of whatever version.
    pub fn root(&self, digest: Digest) -> Result<&Envelope, TrustError> {
        let found = self.roots.iter().find(|root| root_digest(root) == digest);
        found.ok_or(TrustError::OtherRoot { digest })
    }
}

impl TrustStore {
    /// Pins the root of the bundle that has this digest, which may have expired, and follows the bundle from there to one
    /// that has not.
    pub fn pin_digest(
        bundle: &TrustBundle,
        digest: Digest,
        now: Timestamp,
    ) -> Result<(Self, Followed), TrustError> {
        let mut store = Self::start(bundle.root(digest)?.clone())?;
        check_not_future(TrustRole::Root, store.root().issued_at, now)?;
        let followed = store.update(bundle, now)?;
        store.check_root_alive(now)?;
        Ok((store, followed))
    }

    /// The digest of the root in force.
    #[must_use]
    pub fn root_digest(&self) -> Digest {
        // A store holds one root at least.
        self.root_envelopes().last().map_or(Digest::from_bytes([0; 32]), root_digest)
    }

    /// Follows what someone supplies who may not be trusted. As [`TrustStore::update`], and: another root under a version
    /// that this store holds is refused, and where the bundle lags behind this store is told. An expired statement of
    /// images is taken too, because the next one is numbered above it. When it fails nothing has changed.
    pub fn follow_supplied(&mut self, bundle: &TrustBundle, now: Timestamp) -> Result<Supplied, TrustError> {
        let newest_shown = self.check_same_roots(bundle)?;
        let _ = self.update(&TrustBundle { roots: bundle.roots.clone(), images: None }, now)?;
        let mut supplied = Supplied {
            root_behind: Some(newest_shown).filter(|shown| *shown < self.root_version()),
            ..Supplied::default()
        };
        match &bundle.images {
            None => supplied.images_behind = (self.images_version() > 0).then_some(0),
            Some(envelope) => match self.take_images(envelope, now) {
                Ok(behind) => supplied.images_behind = behind,
                Err(cause) => supplied.images_refused = Some(cause),
            },
        }
        Ok(supplied)
    }

    /// The newest version in the bundle, if no root in it contradicts one that this store holds.
    fn check_same_roots(&self, bundle: &TrustBundle) -> Result<u64, TrustError> {
        let first_held = self.root_version() + 1 - self.root_envelopes().len() as u64;
        let mut newest = 0;
        for shown in &bundle.roots {
            let version = claimed_root(shown)?.version;
            newest = newest.max(version);
            let at = version.checked_sub(first_held).and_then(|at| usize::try_from(at).ok());
            let held = at.and_then(|at| self.root_envelopes().get(at));
            if held.is_some_and(|held| held.payload != shown.payload) {
                return Err(TrustError::Conflict { role: TrustRole::Root, found: version });
            }
        }
        Ok(newest)
    }

    /// Takes a statement that is newer than the held one; gives the version of one that is older.
    fn take_images(&mut self, envelope: &Envelope, now: Timestamp) -> Result<Option<u64>, TrustError> {
        let shown = self.verify_images(envelope.clone())?;
        check_not_future(TrustRole::Image, shown.metadata.issued_at, now)?;
        let (held, found) = (self.images_version(), shown.metadata.version);
        if found > held {
            self.images = Some(shown);
        } else if found < held {
            return Ok(Some(found));
        } else if self.images_envelope().is_some_and(|held| held.payload != shown.envelope.payload) {
            return Err(TrustError::Conflict { role: TrustRole::Image, found });
        }
        Ok(None)
    }

    /// Whether the statement of images that is held would still count under `next`.
    #[must_use]
    pub fn images_hold_under(&self, next: &RootMetadata) -> bool {
        self.images_envelope().is_some_and(|held| next.verifies_images(held))
    }
}

/// The digest of what is signed, independent of the signer.
#[must_use]
pub fn root_digest(root: &Envelope) -> Digest {
    Digest::of(&root.payload)
}
