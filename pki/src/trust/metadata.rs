//! What roots and image keys sign: strict JSON, lists and no maps, every rule checked on reading.

use std::collections::BTreeSet;
use std::time::Duration;

use mvm_proto::document::MAX_FLAKE_REF_BYTES;
use mvm_proto::envelope::{CheckSignatures as _, MAX_SIGNATURES, Payload};
use mvm_proto::{ClusterId, Digest, Envelope, Timestamp};
use serde::{Deserialize, Serialize};

use super::role::RoleCheck;
use super::{RoleKeys, Roles, TrustKey, TrustRole};
use crate::signing::{PublicKey, SigningKey, seal};

pub const ROOT_PAYLOAD_TYPE: &str = "application/vnd.mvm.root.v1+json";
pub const IMAGES_PAYLOAD_TYPE: &str = "application/vnd.mvm.images.v1+json";

/// The most sources in one statement: beyond what one cluster's images are built from, and a bound on what a node compares.
const MAX_SOURCES: usize = 4096;

/// The largest version: what every JSON reader can count to.
const MAX_VERSION: u64 = (1 << 53) - 1;

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MetadataError {
    #[error("not the expected JSON: {0}")]
    Json(String),
    #[error("{path}: {rule}")]
    Rule { path: String, rule: &'static str },
}

fn rule(holds: bool, path: &str, rule: &'static str) -> Result<(), MetadataError> {
    if holds { Ok(()) } else { Err(MetadataError::Rule { path: path.to_owned(), rule }) }
}

/// Who holds which role, from one version of the root to the next.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RootMetadata {
    pub cluster: ClusterId,
    pub version: u64,
    pub issued_at: Timestamp,
    pub expires_at: Timestamp,
    /// A cluster that makes and uses all keys itself; its images are not vouched for.
    pub dev: bool,
    /// Nodes forget their high-water marks when they move to this version: the way back after a stolen director
    /// key has signed a document with a very high generation.
    pub resets_high_water: bool,
    pub keys: Vec<TrustKey>,
    pub roles: Roles,
}

/// The keys that are to hold a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RoleSpec {
    pub keys: Vec<PublicKey>,
    pub threshold: u32,
    pub expires_at: Option<Timestamp>,
}

/// What a new version of the root is to say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RootSpec {
    pub cluster: ClusterId,
    pub expires_at: Timestamp,
    pub dev: bool,
    pub resets_high_water: bool,
    pub root: RoleSpec,
    pub director: RoleSpec,
    pub image: RoleSpec,
}

impl RoleSpec {
    /// One key, which alone is enough.
    #[must_use]
    pub fn single(key: PublicKey) -> Self {
        Self { keys: vec![key], threshold: 1, expires_at: None }
    }

    fn role_keys(&self) -> RoleKeys {
        RoleKeys {
            key_ids: self.keys.iter().map(PublicKey::key_id).collect(),
            threshold: self.threshold,
            expires_at: self.expires_at,
        }
    }
}

impl RootMetadata {
    /// Version 1.
    pub fn first(spec: &RootSpec, now: Timestamp) -> Result<Self, MetadataError> {
        Self::build(spec, 1, now)
    }

    /// The version after this one, to be signed by this one's root keys and by its own.
    pub fn next(&self, spec: &RootSpec, now: Timestamp) -> Result<Self, MetadataError> {
        rule(spec.cluster == self.cluster, "cluster", "a root can't move to another cluster")?;
        Self::build(spec, self.version + 1, now)
    }

    fn build(spec: &RootSpec, version: u64, now: Timestamp) -> Result<Self, MetadataError> {
        let roles = [&spec.root, &spec.director, &spec.image];
        let keys = roles.iter().flat_map(|role| &role.keys);
        let root = Self {
            cluster: spec.cluster.clone(),
            version,
            issued_at: now,
            expires_at: spec.expires_at,
            dev: spec.dev,
            resets_high_water: spec.resets_high_water,
            keys: keys.map(|key| TrustKey { key_id: key.key_id(), public: *key }).collect(),
            roles: Roles {
                root: spec.root.role_keys(),
                director: spec.director.role_keys(),
                image: spec.image.role_keys(),
            },
        };
        root.check()?;
        Ok(root)
    }

    /// What this version says, as the start for the next. A reset of high-water marks is not carried over.
    #[must_use]
    pub fn spec(&self) -> RootSpec {
        let role = |role| {
            let held = self.role(role);
            RoleSpec { keys: self.keys_of(role), threshold: held.threshold, expires_at: held.expires_at }
        };
        RootSpec {
            cluster: self.cluster.clone(),
            expires_at: self.expires_at,
            dev: self.dev,
            resets_high_water: false,
            root: role(TrustRole::Root),
            director: role(TrustRole::Director),
            image: role(TrustRole::Image),
        }
    }

    #[must_use]
    pub fn role(&self, role: TrustRole) -> &RoleKeys {
        match role {
            TrustRole::Root => &self.roles.root,
            TrustRole::Director => &self.roles.director,
            TrustRole::Image => &self.roles.image,
        }
    }

    /// The keys that hold a role.
    #[must_use]
    pub fn keys_of(&self, role: TrustRole) -> Vec<PublicKey> {
        let held = self.role(role);
        let of_role = |key: &&TrustKey| held.key_ids.contains(&key.key_id);
        self.keys.iter().filter(of_role).map(|key| key.public).collect()
    }

    pub(super) fn checker(&self, role: TrustRole) -> RoleCheck<'_> {
        RoleCheck { keys: &self.keys, role: self.role(role), batches: role == TrustRole::Director }
    }

    /// Whether enough of this version's image keys signed the statement.
    pub(super) fn verifies_images(&self, images: &Envelope) -> bool {
        let signed = self.checker(TrustRole::Image).check(&images.signed(), &images.signatures);
        signed.is_ok()
    }

    #[must_use]
    pub fn seal(&self, keys: &[&SigningKey]) -> Envelope {
        seal(ROOT_PAYLOAD_TYPE, payload_of(self), keys)
    }

    fn check(&self) -> Result<(), MetadataError> {
        check_version(self.version)?;
        rule(self.expires_at > self.issued_at, "expires_at", "must be after issued_at")?;
        let mut known = BTreeSet::new();
        for (at, key) in self.keys.iter().enumerate() {
            let path = format!("keys[{at}]");
            rule(key.key_id == key.public.key_id(), &path, "key_id must be the digest of the key")?;
            rule(known.insert(&key.key_id), &path, "a key must be listed once, and hold one role")?;
        }
        for role in TrustRole::ALL {
            self.check_role(role, &mut known)?;
        }
        rule(known.is_empty(), "keys", "every key must hold a role")
    }

    /// Takes the role's keys out of `free`, so that no other role can have them: roles share no key.
    fn check_role<'a>(
        &'a self,
        role: TrustRole,
        free: &mut BTreeSet<&'a String>,
    ) -> Result<(), MetadataError> {
        let held = self.role(role);
        let path = format!("roles.{role}");
        for key_id in &held.key_ids {
            rule(
                free.remove(key_id),
                &path,
                "each key must be listed in keys, appear once and hold no other role",
            )?;
        }
        rule(held.key_ids.len() <= MAX_SIGNATURES, &path, "more keys than an envelope can have signatures")?;
        let needed = usize::try_from(held.threshold).unwrap_or(usize::MAX);
        rule((1..=held.key_ids.len()).contains(&needed), &path, "threshold must be 1 to the number of keys")
    }
}

impl Payload for RootMetadata {
    const PAYLOAD_TYPE: &'static str = ROOT_PAYLOAD_TYPE;
    type Error = MetadataError;
    fn parse(bytes: &[u8]) -> Result<Self, MetadataError> {
        let root: Self = read(bytes)?;
        root.check()?;
        Ok(root)
    }
}

/// Which images exist, as the image keys say.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImagesMetadata {
    pub cluster: ClusterId,
    pub version: u64,
    pub issued_at: Timestamp,
    pub expires_at: Timestamp,
    pub digests: Vec<Digest>,
    /// What nodes may build or import themselves; absent: nothing. In order, each once, of listed digests only.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sources: Vec<ImageSource>,
}

/// A reference that a node may build or import, and the image that must come of it.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImageSource {
    /// As documents spell it.
    pub flake_ref: String,
    pub digest: Digest,
}

impl ImagesMetadata {
    /// A statement of these images. It replaces the one before: what it does not list does not exist.
    pub fn new(
        cluster: ClusterId,
        version: u64,
        digests: impl IntoIterator<Item = Digest>,
        now: Timestamp,
        life: Duration,
    ) -> Result<Self, MetadataError> {
        let digests = digests.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        let images =
            Self { cluster, version, issued_at: now, expires_at: now + life, digests, sources: Vec::new() };
        images.check()?;
        Ok(images)
    }

    /// The same with what nodes may build or import themselves.
    pub fn with_sources(self, sources: impl IntoIterator<Item = ImageSource>) -> Result<Self, MetadataError> {
        let sources = sources.into_iter().collect::<BTreeSet<_>>().into_iter().collect();
        let images = Self { sources, ..self };
        images.check()?;
        Ok(images)
    }

    #[must_use]
    pub fn seal(&self, keys: &[&SigningKey]) -> Envelope {
        seal(IMAGES_PAYLOAD_TYPE, payload_of(self), keys)
    }

    fn check(&self) -> Result<(), MetadataError> {
        check_version(self.version)?;
        rule(self.expires_at > self.issued_at, "expires_at", "must be after issued_at")?;
        let distinct: BTreeSet<_> = self.digests.iter().collect();
        rule(distinct.len() == self.digests.len(), "digests", "must be listed once each")?;
        rule(self.sources.len() <= MAX_SOURCES, "sources", "too many")?;
        let in_order = self.sources.is_sorted_by(|a, b| a < b);
        rule(in_order, "sources", "must be in order and listed once each")?;
        for (at, source) in self.sources.iter().enumerate() {
            let path = format!("sources[{at}]");
            let reference = &source.flake_ref;
            let is_printable = !reference.is_empty() && reference.bytes().all(|b| b.is_ascii_graphic());
            rule(is_printable, &path, "flake_ref must be printable ASCII without spaces")?;
            rule(reference.len() <= MAX_FLAKE_REF_BYTES, &path, "flake_ref is too long")?;
            rule(distinct.contains(&source.digest), &path, "its digest must be vouched for")?;
        }
        Ok(())
    }
}

impl Payload for ImagesMetadata {
    const PAYLOAD_TYPE: &'static str = IMAGES_PAYLOAD_TYPE;
    type Error = MetadataError;
    fn parse(bytes: &[u8]) -> Result<Self, MetadataError> {
        let images: Self = read(bytes)?;
        images.check()?;
        Ok(images)
    }
}

fn check_version(version: u64) -> Result<(), MetadataError> {
    rule((1..=MAX_VERSION).contains(&version), "version", "must be 1 to 2^53-1")
}

/// Structs only, so that unknown and repeated fields are both refused.
fn read<T: for<'de> Deserialize<'de>>(bytes: &[u8]) -> Result<T, MetadataError> {
    serde_json::from_slice(bytes).map_err(|cause| MetadataError::Json(cause.to_string()))
}

fn payload_of(metadata: &impl Serialize) -> Vec<u8> {
    // Structs of strings, numbers and lists always serialise.
    serde_json::to_vec(metadata).unwrap_or_default()
}
