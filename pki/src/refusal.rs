//! Why a peer's certificate is refused: one reason each, with a text for people and a code for programs.

use mvm_proto::{ClusterId, Timestamp};

use crate::identity::{IdentityError, Role};

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("the certificate expired at {not_after}")]
    Expired { not_after: Timestamp },
    #[error("the certificate is not valid before {not_before}")]
    NotYetValid { not_before: Timestamp },
    #[error("the certificate was issued by an authority that is not trusted here")]
    ForeignAuthority,
    #[error("the certificate is of cluster {found}, not of {expected}")]
    WrongCluster { expected: ClusterId, found: ClusterId },
    #[error("the certificate is for the role {found}, not {expected}")]
    WrongRole { expected: Role, found: Role },
    #[error("the certificate is not for {expected}; it is for {}", presented.join(", "))]
    WrongName { expected: String, presented: Vec<String> },
    #[error("the certificate carries no usable identity: {0}")]
    NoIdentity(IdentityError),
    #[error("the signature does not fit the certificate")]
    BadSignature,
    #[error("no certificate was presented")]
    NoCertificate,
    #[error("the certificate can not be used: {0}")]
    Unusable(String),
}

impl Refusal {
    /// A stable word for programs and metrics.
    #[must_use]
    pub fn code(&self) -> &'static str {
        match self {
            Self::Expired { .. } => "expired",
            Self::NotYetValid { .. } => "not_yet_valid",
            Self::ForeignAuthority => "foreign_authority",
            Self::WrongCluster { .. } => "wrong_cluster",
            Self::WrongRole { .. } => "wrong_role",
            Self::WrongName { .. } => "wrong_name",
            Self::NoIdentity(_) => "no_identity",
            Self::BadSignature => "bad_signature",
            Self::NoCertificate => "no_certificate",
            Self::Unusable(_) => "unusable",
        }
    }
}

/// The refusal inside a TLS error that our own verifier caused; `None` for every other error.
#[must_use]
pub fn refusal_of(error: &rustls::Error) -> Option<Refusal> {
    let _ = error;
    todo!()
}

/// A TLS alert in words, for an error that the other side caused. `code` is the alert's number.
#[must_use]
pub fn alert_in_words(code: u8) -> &'static str {
    let _ = code;
    todo!()
}
