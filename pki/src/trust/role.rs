//! Roles: which keys hold them, and whether a set of signatures is enough.

use std::collections::BTreeSet;
use std::fmt;

use mvm_proto::Timestamp;
use mvm_proto::envelope::{CheckSignatures, MAX_SIGNATURES, Signature, Signed};
use serde::{Deserialize, Serialize};

use crate::batch;
use crate::signing::PublicKey;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum TrustRole {
    /// Says who holds the roles.
    Root,
    /// Says what a node runs.
    Director,
    /// Says which images exist.
    Image,
}

impl TrustRole {
    pub const ALL: [Self; 3] = [Self::Root, Self::Director, Self::Image];
}

impl fmt::Display for TrustRole {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Root => "root",
            Self::Director => "director",
            Self::Image => "image",
        })
    }
}

/// A key that a root names.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrustKey {
    pub key_id: String,
    /// Base64 of the raw key.
    pub public: PublicKey,
}

/// Who holds a role.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RoleKeys {
    pub key_ids: Vec<String>,
    /// How many different ones of them must sign.
    pub threshold: u32,
    /// When the role ends, if before the root that names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expires_at: Option<Timestamp>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Roles {
    pub root: RoleKeys,
    pub director: RoleKeys,
    pub image: RoleKeys,
}

/// Counts the different keys of one role that signed.
pub(super) struct RoleCheck<'a> {
    pub(super) keys: &'a [TrustKey],
    pub(super) role: &'a RoleKeys,
    /// Whether a signature may be of a batch. Directors sign for whole fleets; what the other roles sign is few.
    pub(super) batches: bool,
}

/// How many signatures were good, out of those needed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct TooFew {
    pub(super) needed: u32,
    pub(super) found: u32,
}

impl CheckSignatures for RoleCheck<'_> {
    type Error = TooFew;

    /// A signature by a key outside the role, a second one by the same key and a wrong one all count for nothing.
    fn check(&self, signed: &Signed<'_>, signatures: &[Signature]) -> Result<(), TooFew> {
        let mut signers = BTreeSet::new();
        for signature in signatures.iter().take(MAX_SIGNATURES) {
            let key_id = &signature.key_id;
            if !self.role.key_ids.contains(key_id) || signers.contains(key_id) {
                continue;
            }
            let key = self.keys.iter().find(|key| key.key_id == *key_id);
            let is_taken = self.batches || !batch::is_of_batch(&signature.bytes);
            if is_taken && key.is_some_and(|key| key.public.vouches_for(signed, &signature.bytes)) {
                signers.insert(key_id);
            }
        }
        let found = u32::try_from(signers.len()).unwrap_or(u32::MAX);
        let needed = self.role.threshold;
        // A threshold of 0 never passes the checks on metadata; here it would not be enough either.
        if needed > 0 && found >= needed { Ok(()) } else { Err(TooFew { needed, found }) }
    }
}
