//! What is trusted now, and the only ways in which that changes.

use std::collections::BTreeSet;
use std::path::Path;

use mvm_proto::envelope::{CheckSignatures as _, Payload, VerifyError};
use mvm_proto::{
    ClusterId, DesiredState, Digest, Envelope, FieldError, SignedDocument, Timestamp, Unverified, Verified,
};

use super::metadata::{ImagesMetadata, MetadataError, ROOT_PAYLOAD_TYPE, RootMetadata};
use super::role::TooFew;
use super::{MAX_ROOTS, MAX_SKEW, TrustBundle, TrustError, TrustRole};
use crate::files;
use crate::signing::PublicKey;

/// What moving to the next root changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootChange {
    pub from: u64,
    pub to: u64,
    /// Ledgers are to forget their high-water marks.
    pub resets_high_water: bool,
    /// The statement of images was not signed by the new root's image keys, and is gone.
    pub images_dropped: bool,
}

/// What following a bundle did.
#[derive(Debug, Default)]
#[must_use]
pub struct Followed {
    /// Oldest first; empty when the root in force stayed.
    pub roots: Vec<RootChange>,
    /// Why the bundle's statement of images was not taken. The roots were followed all the same.
    pub images_refused: Option<TrustError>,
}

/// The verified chain of roots and the newest statement of images. Every method that fails changes nothing.
#[derive(Debug, Clone)]
pub struct TrustStore {
    /// From the first pinned root to the one in force, without gaps.
    roots: Vec<Envelope>,
    root: RootMetadata,
    pub(super) images: Option<Images>,
}

#[derive(Debug, Clone)]
pub(super) struct Images {
    pub(super) envelope: Envelope,
    pub(super) metadata: ImagesMetadata,
    digests: BTreeSet<Digest>,
}

impl TrustStore {
    /// Trusts a first root on delivery, by `init` or by enrolment over a pinned connection. It must be signed by its
    /// own root keys, to their threshold, and must not have expired.
    pub fn pin(first_root: Envelope, now: Timestamp) -> Result<Self, TrustError> {
        let store = Self::start(first_root)?;
        check_not_future(TrustRole::Root, store.root.issued_at, now)?;
        store.check_root_alive(now)?;
        Ok(store)
    }

    pub(super) fn start(first_root: Envelope) -> Result<Self, TrustError> {
        // The one place where a payload is read before it is verified: the keys to verify it with are inside.
        let claimed = RootMetadata::parse(&first_root.payload).map_err(invalid_root)?;
        let root = verify::<RootMetadata>(first_root, &claimed, TrustRole::Root)?;
        Ok(Self { roots: vec![root.envelope().clone()], root: root.into_inner(), images: None })
    }

    /// Reads what [`TrustStore::save`] wrote and verifies it all again, from the first pinned root on. What has
    /// expired since is still read, so that its successor can be accepted.
    pub fn load(path: &Path) -> Result<Self, TrustError> {
        let bytes = std::fs::read(path).map_err(|cause| TrustError::File { path: path.to_owned(), cause })?;
        let damaged = |cause| TrustError::Damaged { path: path.to_owned(), cause };
        let bundle: TrustBundle = serde_json::from_slice(&bytes).map_err(|cause| damaged(Box::new(cause)))?;
        Self::replay(bundle).map_err(|cause| damaged(Box::new(cause)))
    }

    fn replay(bundle: TrustBundle) -> Result<Self, TrustError> {
        let mut roots = bundle.roots.into_iter();
        let mut store = Self::start(roots.next().ok_or(TrustError::NoRoot)?)?;
        for next in roots {
            store.follow(next)?;
        }
        if let Some(envelope) = bundle.images {
            store.images = Some(store.verify_images(envelope)?);
        }
        Ok(store)
    }

    /// Writes one file, at once or not at all.
    pub fn save(&self, path: &Path) -> Result<(), TrustError> {
        let failed = |cause| TrustError::File { path: path.to_owned(), cause };
        let text = serde_json::to_vec(&self.bundle()).map_err(|cause| failed(cause.into()))?;
        files::write_public(path, &text).map_err(failed)
    }

    #[must_use]
    pub fn bundle(&self) -> TrustBundle {
        TrustBundle { roots: self.roots.clone(), images: self.images_envelope().cloned() }
    }

    /// Moves to the next root: version exactly one higher, signed by the old root keys and by its own. An expired
    /// root still names its successor.
    pub fn advance_root(&mut self, next: Envelope, now: Timestamp) -> Result<RootChange, TrustError> {
        let mut moved = self.clone();
        let change = moved.follow(next)?;
        check_not_future(TrustRole::Root, moved.root.issued_at, now)?;
        *self = moved;
        Ok(change)
    }

    fn follow(&mut self, next: Envelope) -> Result<RootChange, TrustError> {
        let next = verify::<RootMetadata>(next, &self.root, TrustRole::Root)?;
        let (held, found) = (self.root.version, next.get().version);
        if found <= held {
            return Err(TrustError::Rollback { role: TrustRole::Root, held, found });
        }
        if found != held + 1 {
            return Err(TrustError::SkippedVersion { expected: held + 1, found });
        }
        self.check_cluster(TrustRole::Root, &next.get().cluster)?;
        let envelope = next.envelope();
        next.get()
            .checker(TrustRole::Root)
            .check(&envelope.signed(), &envelope.signatures)
            .map_err(|few| too_few(TrustRole::Root, few))?;
        if self.roots.len() >= MAX_ROOTS {
            return Err(TrustError::TooManyRoots);
        }
        self.roots.push(envelope.clone());
        self.root = next.into_inner();
        // Stolen image keys are replaced by a new root: what only they vouched for must go with them.
        let held_images = self.images.take();
        let had_images = held_images.is_some();
        self.images = held_images.and_then(|images| self.verify_images(images.envelope).ok());
        Ok(RootChange {
            from: held,
            to: found,
            resets_high_water: self.root.resets_high_water,
            images_dropped: had_images && self.images.is_none(),
        })
    }

    /// Takes a newer statement of images; `false` when it is the one already held.
    pub fn advance_images(&mut self, images: Envelope, now: Timestamp) -> Result<bool, TrustError> {
        self.check_root_alive(now)?;
        self.check_role_alive(TrustRole::Image, now)?;
        let next = self.verify_images(images)?;
        check_not_future(TrustRole::Image, next.metadata.issued_at, now)?;
        let (held, found) = (self.images_version(), next.metadata.version);
        if let Some(current) = self.images.as_ref().filter(|_| found <= held) {
            return match () {
                () if found < held => Err(TrustError::Rollback { role: TrustRole::Image, held, found }),
                () if current.envelope.payload != next.envelope.payload => {
                    Err(TrustError::Conflict { role: TrustRole::Image, found })
                }
                () => Ok(false),
            };
        }
        check_images_alive(&next.metadata, now)?;
        self.images = Some(next);
        Ok(true)
    }

    pub(super) fn verify_images(&self, envelope: Envelope) -> Result<Images, TrustError> {
        let verified = verify::<ImagesMetadata>(envelope, &self.root, TrustRole::Image)?;
        self.check_cluster(TrustRole::Image, &verified.get().cluster)?;
        let envelope = verified.envelope().clone();
        let metadata = verified.into_inner();
        let digests = metadata.digests.iter().copied().collect();
        Ok(Images { envelope, metadata, digests })
    }

    /// Follows a bundle from wherever this store is; older roots and a stale statement are passed over. When
    /// it fails nothing has changed.
    ///
    /// A statement of images that is refused keeps no root back: a root is replaced in a hurry when keys were stolen,
    /// and a thief with an image key must not be able to prevent that. What was held is judged under the new root.
    pub fn update(&mut self, bundle: &TrustBundle, now: Timestamp) -> Result<Followed, TrustError> {
        let mut moved = self.clone();
        let mut followed = Followed::default();
        for next in &bundle.roots {
            // Before it is verified the version only says whether to look: a lie here leads to a refusal or to nothing.
            if claimed_root(next)?.version > moved.root.version {
                followed.roots.push(moved.advance_root(next.clone(), now)?);
            }
        }
        *self = moved;
        if let Some(images) = &bundle.images {
            let refused = self.advance_images(images.clone(), now).err();
            followed.images_refused = refused.filter(|error| !error.is_stale());
        }
        Ok(followed)
    }

    /// Verifies that live director keys signed this document, to their threshold, under a root that has not expired.
    /// Whether it is for this node, in order and in time is for the ledger to judge.
    pub fn verify_document(
        &self,
        document: Unverified<SignedDocument>,
        now: Timestamp,
    ) -> Result<Verified<SignedDocument>, TrustError> {
        self.check_root_alive(now)?;
        self.check_role_alive(TrustRole::Director, now)?;
        document.verify(&self.root.checker(TrustRole::Director)).map_err(|error| match error {
            VerifyError::PayloadType { expected, found } => TrustError::WrongType { expected, found },
            VerifyError::Signatures(few) => too_few(TrustRole::Director, few),
            VerifyError::Payload(errors) => TrustError::Document(errors),
        })
    }

    /// Whether what this one key signs now is a document to those who hold this trust: the root and the director's role are
    /// alive, the role names the key, and no second signature is needed.
    pub fn check_director(&self, key: &PublicKey, now: Timestamp) -> Result<(), TrustError> {
        self.check_root_alive(now)?;
        self.check_role_alive(TrustRole::Director, now)?;
        let needed = self.root.role(TrustRole::Director).threshold;
        let found = u32::from(self.keys(TrustRole::Director).contains(key));
        if found == 0 || needed > 1 {
            return Err(too_few(TrustRole::Director, TooFew { needed, found }));
        }
        Ok(())
    }

    /// Checks that image keys vouch for every image in the document. A dev cluster, which says so in its root,
    /// vouches for everything.
    pub fn check_images(&self, desired: &DesiredState, now: Timestamp) -> Result<(), TrustError> {
        if self.is_dev() || desired.tenants.iter().all(|tenant| tenant.pools.is_empty()) {
            return Ok(());
        }
        self.check_root_alive(now)?;
        self.check_role_alive(TrustRole::Image, now)?;
        let images = self.images.as_ref().ok_or(TrustError::NoImages)?;
        check_images_alive(&images.metadata, now)?;
        let errors = unknown_images(desired, &images.digests);
        if errors.is_empty() { Ok(()) } else { Err(TrustError::UnknownImages(errors)) }
    }

    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.root.cluster
    }

    /// The root in force.
    #[must_use]
    pub fn root(&self) -> &RootMetadata {
        &self.root
    }

    #[must_use]
    pub fn root_version(&self) -> u64 {
        self.root.version
    }

    /// 0: no statement is held.
    #[must_use]
    pub fn images_version(&self) -> u64 {
        self.images().map_or(0, |images| images.version)
    }

    /// The statement of images in force.
    #[must_use]
    pub fn images(&self) -> Option<&ImagesMetadata> {
        self.images.as_ref().map(|images| &images.metadata)
    }

    #[must_use]
    pub fn is_dev(&self) -> bool {
        self.root.dev
    }

    /// The keys that hold a role now.
    #[must_use]
    pub fn keys(&self, role: TrustRole) -> Vec<PublicKey> {
        self.root.keys_of(role)
    }

    /// Every root since the first pinned one, oldest first.
    #[must_use]
    pub fn root_envelopes(&self) -> &[Envelope] {
        &self.roots
    }

    #[must_use]
    pub fn images_envelope(&self) -> Option<&Envelope> {
        self.images.as_ref().map(|images| &images.envelope)
    }

    fn check_cluster(&self, role: TrustRole, found: &ClusterId) -> Result<(), TrustError> {
        let expected = self.cluster();
        if found == expected {
            return Ok(());
        }
        Err(TrustError::WrongCluster { role, expected: expected.clone(), found: found.clone() })
    }

    /// Whether the root in force has not expired.
    pub fn check_root_alive(&self, now: Timestamp) -> Result<(), TrustError> {
        let (version, expired_at) = (self.root.version, self.root.expires_at);
        if now >= expired_at {
            return Err(TrustError::RootExpired { version, expired_at });
        }
        self.check_role_alive(TrustRole::Root, now)
    }

    fn check_role_alive(&self, role: TrustRole, now: Timestamp) -> Result<(), TrustError> {
        match self.root.role(role).expires_at {
            Some(expired_at) if now >= expired_at => Err(TrustError::RoleExpired { role, expired_at }),
            _ => Ok(()),
        }
    }
}

/// What an envelope says that it is, before anyone verified it.
pub(super) fn claimed_root(envelope: &Envelope) -> Result<RootMetadata, TrustError> {
    if envelope.payload_type != ROOT_PAYLOAD_TYPE {
        let (expected, found) = (ROOT_PAYLOAD_TYPE, envelope.payload_type.clone());
        return Err(TrustError::WrongType { expected, found });
    }
    RootMetadata::parse(&envelope.payload).map_err(invalid_root)
}

pub(super) fn check_not_future(
    role: TrustRole,
    issued_at: Timestamp,
    now: Timestamp,
) -> Result<(), TrustError> {
    if issued_at > now + MAX_SKEW { Err(TrustError::FromTheFuture { role, issued_at }) } else { Ok(()) }
}

fn verify<T: Payload<Error = MetadataError>>(
    envelope: Envelope,
    by: &RootMetadata,
    role: TrustRole,
) -> Result<Verified<T>, TrustError> {
    Unverified::<T>::new(envelope).verify(&by.checker(role)).map_err(|error| match error {
        VerifyError::PayloadType { expected, found } => TrustError::WrongType { expected, found },
        VerifyError::Signatures(few) => too_few(role, few),
        VerifyError::Payload(cause) => TrustError::Metadata { role, cause },
    })
}

fn too_few(role: TrustRole, few: TooFew) -> TrustError {
    TrustError::NotEnoughSignatures { role, needed: few.needed, found: few.found }
}

fn invalid_root(cause: MetadataError) -> TrustError {
    TrustError::Metadata { role: TrustRole::Root, cause }
}

fn check_images_alive(images: &ImagesMetadata, now: Timestamp) -> Result<(), TrustError> {
    let (version, expired_at) = (images.version, images.expires_at);
    if now < expired_at { Ok(()) } else { Err(TrustError::ImagesExpired { version, expired_at }) }
}

fn unknown_images(desired: &DesiredState, known: &BTreeSet<Digest>) -> Vec<FieldError> {
    let mut errors = Vec::new();
    for (t, tenant) in desired.tenants.iter().enumerate() {
        for (p, pool) in tenant.pools.iter().enumerate() {
            if pool.image_digest.is_some_and(|digest| known.contains(&digest)) {
                continue;
            }
            errors.push(FieldError {
                path: format!("tenants[{t}].pools[{p}].image_digest"),
                expected: "must be a digest that an image key vouches for".to_owned(),
                found: pool.image_digest.map_or_else(|| "nothing".to_owned(), |digest| digest.to_string()),
            });
        }
    }
    errors
}
