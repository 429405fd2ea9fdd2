//! Whose documents a node obeys: Uptane's shape, not "a signature".
//!
//! An offline **root** names the **director** keys, which say what a node runs, and the **image** keys, which say
//! what artifacts exist; each role has its own keys, threshold and expiry. An attacker with a director's key can
//! then not run unknown code, and one with an image key can't tell a node to run it. A root is replaced
//! only by the version after it, signed by the old set and the new one.
//!
//! Coordinators and agents each hold a [`TrustStore`]. It keeps every root since the first pinned one, so that a
//! node that missed several can follow. Nothing here reads a clock.

mod bundle;
mod metadata;
mod pin;
mod role;
mod store;

use std::path::PathBuf;
use std::time::Duration;

use mvm_proto::document::DocumentErrors;
use mvm_proto::envelope::EnvelopeError;
use mvm_proto::{ClusterId, Digest, FieldError, Problem, Timestamp};

pub use bundle::TrustBundle;
pub use metadata::{
    IMAGES_PAYLOAD_TYPE, ImageSource, ImagesMetadata, MetadataError, ROOT_PAYLOAD_TYPE, RoleSpec,
    RootMetadata, RootSpec,
};
pub use pin::{PIN_FILE, Supplied, root_digest};
pub use role::{RoleKeys, Roles, TrustKey, TrustRole};
pub use store::{Followed, RootChange, TrustStore};

/// How long root metadata is valid unless its maker says otherwise. A reminder to rotate, not an emergency: agents keep what
/// they run past it.
pub const ROOT_METADATA_LIFE: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How far ahead of our clock something may say that it was made.
pub const MAX_SKEW: Duration = Duration::from_secs(5 * 60);
/// The longest chain of roots that is followed: centuries of yearly replacements, and a bound on a stranger's bundle.
pub const MAX_ROOTS: usize = 1024;

#[derive(Debug, thiserror::Error)]
pub enum TrustError {
    #[error("could not use the trust file {path}")]
    File {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("the trust file {path} is damaged; enrol again to pin the trust anew")]
    Damaged {
        path: PathBuf,
        #[source]
        cause: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the trust bundle has no root")]
    NoRoot,
    #[error("none of the roots has the digest {digest}")]
    OtherRoot { digest: Digest },
    #[error("more than {MAX_ROOTS} roots")]
    TooManyRoots,
    #[error("the envelope can't be read")]
    Envelope(#[from] EnvelopeError),
    #[error("the envelope holds {found:?}, not {expected}")]
    WrongType { expected: &'static str, found: String },
    #[error("{found} valid signatures by {role} keys, {needed} needed")]
    NotEnoughSignatures { role: TrustRole, needed: u32, found: u32 },
    #[error("the {role} metadata is not valid")]
    Metadata {
        role: TrustRole,
        #[source]
        cause: MetadataError,
    },
    #[error("the document is not valid")]
    Document(#[source] DocumentErrors),
    #[error("the {role} metadata is for cluster {found}, not for {expected}")]
    WrongCluster { role: TrustRole, expected: ClusterId, found: ClusterId },
    #[error("version {found} of the {role} metadata is older than the stored version {held}")]
    Rollback { role: TrustRole, held: u64, found: u64 },
    #[error("version {found} of the {role} metadata differs from the stored version {found}")]
    Conflict { role: TrustRole, found: u64 },
    #[error("root version {found} can't follow; version {expected} comes next")]
    SkippedVersion { expected: u64, found: u64 },
    #[error("the {role} metadata was issued at {issued_at}, which is in the future")]
    FromTheFuture { role: TrustRole, issued_at: Timestamp },
    #[error("root version {version} expired at {expired_at}; only its successor is accepted")]
    RootExpired { version: u64, expired_at: Timestamp },
    #[error("the {role} keys expired at {expired_at}")]
    RoleExpired { role: TrustRole, expired_at: Timestamp },
    #[error("no image key has signed a statement of images")]
    NoImages,
    #[error("version {version} of the statement of images expired at {expired_at}")]
    ImagesExpired { version: u64, expired_at: Timestamp },
    #[error("{} image(s) in the document are not vouched for", .0.len())]
    UnknownImages(Vec<FieldError>),
}

impl TrustError {
    /// A stable word for programs.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::File { .. } => "trust_file",
            Self::Damaged { .. } => "trust_damaged",
            Self::NoRoot => "trust_no_root",
            Self::OtherRoot { .. } => "trust_root_other",
            Self::TooManyRoots => "trust_too_many_roots",
            Self::Envelope(_) | Self::WrongType { .. } => "bad_envelope",
            Self::NotEnoughSignatures { .. } => "signature_insufficient",
            Self::Metadata { .. } => "trust_metadata_invalid",
            Self::Document(_) => "document_invalid",
            Self::WrongCluster { .. } => "trust_wrong_cluster",
            Self::Rollback { .. } => "trust_rollback",
            Self::Conflict { .. } => "trust_conflict",
            Self::SkippedVersion { .. } => "trust_version_skipped",
            Self::FromTheFuture { .. } => "trust_from_the_future",
            Self::RootExpired { .. } => "trust_root_expired",
            Self::RoleExpired { .. } => "trust_role_expired",
            Self::NoImages => "images_missing",
            Self::ImagesExpired { .. } => "images_expired",
            Self::UnknownImages(_) => "images_unknown",
        }
    }

    /// Whether this was right once: senders can't always know what their receiver has seen since.
    #[must_use]
    pub fn is_stale(&self) -> bool {
        matches!(
            self,
            Self::Rollback { .. }
                | Self::ImagesExpired { .. }
                | Self::RoleExpired { .. }
                | Self::RootExpired { .. }
        )
    }

    /// What to do about it, for people.
    #[must_use]
    pub fn remediation(&self) -> &'static str {
        match self {
            Self::NotEnoughSignatures { .. } => "sign with the keys that the newest root names for this role",
            Self::RootExpired { .. } | Self::RoleExpired { .. } => {
                "publish the next root version, signed by the root keys"
            }
            Self::SkippedVersion { .. } => "send every root version in between, oldest first",
            Self::NoImages | Self::ImagesExpired { .. } | Self::UnknownImages(_) => {
                "publish a statement of images that lists these digests, signed by the image keys"
            }
            Self::OtherRoot { .. } => {
                "compare the digest with another operator's `mvm trust get`; if it is right, the coordinator is not"
            }
            Self::FromTheFuture { .. } => "compare the clocks of both machines",
            Self::File { .. } | Self::Damaged { .. } | Self::NoRoot => "enrol again",
            _ => "send what was signed, unchanged",
        }
    }

    /// This error as an answer to the sender of the document or the metadata.
    #[must_use]
    pub fn to_problem(&self) -> Problem {
        if let Self::Document(errors) = self {
            return errors.clone().into();
        }
        let status = match self {
            Self::File { .. } | Self::Damaged { .. } | Self::NoRoot => 500,
            Self::Envelope(_) | Self::WrongType { .. } => 400,
            Self::Metadata { .. } | Self::UnknownImages(_) => 422,
            Self::Rollback { .. } | Self::Conflict { .. } | Self::SkippedVersion { .. } => 409,
            _ => 403,
        };
        let detail = match std::error::Error::source(self) {
            Some(cause) => format!("{self}: {cause}"),
            None => self.to_string(),
        };
        let errors = match self {
            Self::UnknownImages(errors) => errors.clone(),
            _ => Vec::new(),
        };
        Problem::new(status, self.code(), detail, self.remediation()).with_errors(errors)
    }
}
