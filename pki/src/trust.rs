//! Whose documents a node obeys.

use std::path::Path;

use mvm_proto::{
    ClusterId, DesiredState, Digest, Envelope, FieldError, SignedDocument, Timestamp, Unverified, Verified,
};
use serde::{Deserialize, Serialize};

use crate::signing::{PublicKey, SigningKey};

pub const ROOT_PAYLOAD_TYPE: &str = "application/vnd.mvm.root.v1+json";
pub const IMAGES_PAYLOAD_TYPE: &str = "application/vnd.mvm.images.v1+json";

#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("images")]
    Images(Vec<FieldError>),
}

impl TrustError {
    /// A stable word for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        todo!()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrustRole {
    Root,
    Director,
    Image,
}

/// The keys that are to hold a role, for building root metadata.
#[derive(Debug, Clone)]
pub struct RoleSpec {
    pub keys: Vec<PublicKey>,
    pub threshold: u32,
    pub expires_at: Option<Timestamp>,
}

#[derive(Debug, Clone)]
pub struct RootSpec {
    pub cluster: ClusterId,
    pub expires_at: Timestamp,
    pub dev: bool,
    pub resets_high_water: bool,
    pub root: RoleSpec,
    pub director: RoleSpec,
    pub image: RoleSpec,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootMetadata {}

impl RootMetadata {
    /// Version 1.
    pub fn first(spec: &RootSpec, now: Timestamp) -> Result<Self, TrustError> {
        let _ = (spec, now);
        todo!()
    }

    /// The version after this one.
    pub fn next(&self, spec: &RootSpec, now: Timestamp) -> Result<Self, TrustError> {
        let _ = (spec, now);
        todo!()
    }

    #[must_use]
    pub fn seal(&self, keys: &[&SigningKey]) -> Envelope {
        let _ = keys;
        todo!()
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImagesMetadata {
    pub cluster: ClusterId,
    pub version: u64,
    pub issued_at: Timestamp,
    pub expires_at: Timestamp,
    pub digests: Vec<Digest>,
}

impl ImagesMetadata {
    #[must_use]
    pub fn seal(&self, keys: &[&SigningKey]) -> Envelope {
        let _ = keys;
        todo!()
    }
}

/// What moving to the next root changed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RootChange {
    pub from: u64,
    pub to: u64,
    /// The ledger's high-water mark is to be forgotten.
    pub resets_high_water: bool,
    /// The images statement was not signed by the new root's image keys and is gone.
    pub images_dropped: bool,
}

/// Everything that another party needs to come to the same trust: the roots from the first on, the images statement.
/// Serialises as `{"roots":[envelope...],"images":[envelope?]}`. Self-verifying; holds no secret.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TrustBundle {
    pub roots: Vec<Envelope>,
    pub images: Option<Envelope>,
}

impl Serialize for TrustBundle {
    fn serialize<S: serde::Serializer>(&self, _: S) -> Result<S::Ok, S::Error> {
        todo!()
    }
}

impl<'de> Deserialize<'de> for TrustBundle {
    fn deserialize<D: serde::Deserializer<'de>>(_: D) -> Result<Self, D::Error> {
        todo!()
    }
}

/// What is trusted now: the verified chain of roots and the newest images statement.
#[derive(Debug, Clone)]
pub struct TrustStore {}

impl TrustStore {
    pub fn pin(first_root: Envelope, now: Timestamp) -> Result<Self, TrustError> {
        let _ = (first_root, now);
        todo!()
    }

    /// Pins the bundle's first root and follows the rest.
    pub fn pin_bundle(bundle: &TrustBundle, now: Timestamp) -> Result<Self, TrustError> {
        let _ = (bundle, now);
        todo!()
    }

    pub fn load(path: &Path) -> Result<Self, TrustError> {
        let _ = path;
        todo!()
    }

    pub fn save(&self, path: &Path) -> Result<(), TrustError> {
        let _ = path;
        todo!()
    }

    #[must_use]
    pub fn bundle(&self) -> TrustBundle {
        todo!()
    }

    pub fn advance_root(&mut self, next: Envelope, now: Timestamp) -> Result<RootChange, TrustError> {
        let _ = (next, now);
        todo!()
    }

    /// Takes a newer images statement; `false` when it is the one already held.
    pub fn advance_images(&mut self, images: Envelope, now: Timestamp) -> Result<bool, TrustError> {
        let _ = (images, now);
        todo!()
    }

    /// Follows a bundle from wherever this store is: older roots are passed over.
    pub fn update(&mut self, bundle: &TrustBundle, now: Timestamp) -> Result<Vec<RootChange>, TrustError> {
        let _ = (bundle, now);
        todo!()
    }

    pub fn verify_document(
        &self,
        document: Unverified<SignedDocument>,
        now: Timestamp,
    ) -> Result<Verified<SignedDocument>, TrustError> {
        let _ = (document, now);
        todo!()
    }

    pub fn check_images(&self, desired: &DesiredState, now: Timestamp) -> Result<(), TrustError> {
        let _ = (desired, now);
        todo!()
    }

    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        todo!()
    }

    #[must_use]
    pub fn root(&self) -> &RootMetadata {
        todo!()
    }

    #[must_use]
    pub fn root_version(&self) -> u64 {
        todo!()
    }

    /// 0: no statement is held.
    #[must_use]
    pub fn images_version(&self) -> u64 {
        todo!()
    }

    #[must_use]
    pub fn is_dev(&self) -> bool {
        todo!()
    }

    /// The keys that hold a role now.
    #[must_use]
    pub fn keys(&self, role: TrustRole) -> Vec<PublicKey> {
        let _ = role;
        todo!()
    }

    #[must_use]
    pub fn root_envelopes(&self) -> &[Envelope] {
        todo!()
    }

    #[must_use]
    pub fn images_envelope(&self) -> Option<&Envelope> {
        todo!()
    }
}
