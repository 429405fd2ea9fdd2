//! Why a peer's certificate is refused: one reason each, with a text for people and a code for programs.
//!
//! Our verifiers put the reason into the TLS error ([`Refusal::into_tls_error`]), where TLS has an alert of its own
//! as that alert, and [`refusal_of`] finds it again. QUIC passes only the error's text on, also to the other side
//! as the reason for closing; [`refusal_in_text`] finds the reason in that text.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::{ClusterId, Timestamp};
use rustls::{CertificateError, OtherError};
use rustls_pki_types::UnixTime;
use serde::{Deserialize, Serialize};

use crate::identity::Role;

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Refusal {
    #[error("the certificate expired at {not_after}")]
    Expired { not_after: Timestamp },
    #[error("the certificate is not valid before {not_before}")]
    NotYetValid { not_before: Timestamp },
    #[error("the certificate's issuer is not trusted")]
    ForeignAuthority,
    #[error("the certificate is for cluster {found}, not for {expected}")]
    WrongCluster { expected: ClusterId, found: ClusterId },
    #[error("the certificate is for the role {found}, not {expected}")]
    WrongRole { expected: Role, found: Role },
    #[error("the certificate is not for {expected}, but for {}", listed(presented))]
    WrongName { expected: String, presented: Vec<String> },
    #[error("the certificate carries no usable identity: {0}")]
    NoIdentity(String),
    #[error("a signature does not fit the certificate")]
    BadSignature,
    #[error("no certificate was presented")]
    NoCertificate,
    #[error("the certificate can't be used: {0}")]
    Unusable(String),
}

fn listed(names: &[String]) -> String {
    if names.is_empty() { "no name at all".to_owned() } else { names.join(", ") }
}

/// Opens the machine-readable part of a refusal's text.
const MARK: &str = "[mvm-refusal ";

/// A refusal as the cause inside a TLS error. TLS shows it by `Debug`, so that is where both texts are.
struct Refused(Refusal);

impl fmt::Debug for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let data = serde_json::to_string(&self.0).map_err(|_| fmt::Error)?;
        write!(f, "{} {MARK}{data}]", self.0)
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(&self.0, f)
    }
}

impl std::error::Error for Refused {}

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

    /// What to do about it, for people.
    #[must_use]
    pub fn remediation(&self) -> &'static str {
        match self {
            Self::Expired { .. } => {
                "renew the certificate; a node past its expiry enrols again with a new token"
            }
            Self::NotYetValid { .. } => "compare the clocks of both machines",
            Self::ForeignAuthority => "compare the fingerprints of the trusted roots on both sides",
            Self::WrongCluster { .. } => "use a credential of this cluster",
            Self::WrongRole { .. } => "use a credential of the role that this call needs",
            Self::WrongName { .. } => "check the address, or issue a certificate that carries this name",
            Self::NoCertificate => "enrol first, or give the credential to use",
            Self::NoIdentity(_) | Self::BadSignature | Self::Unusable(_) => {
                "issue a new certificate from this cluster's authority"
            }
        }
    }

    /// This refusal as a verifier reports it, with TLS's own alert where there is one.
    pub(crate) fn into_tls_error(self, now: UnixTime) -> rustls::Error {
        let certificate = match &self {
            Self::Expired { not_after } => {
                CertificateError::ExpiredContext { time: now, not_after: unix_time(*not_after) }
            }
            Self::NotYetValid { not_before } => {
                CertificateError::NotValidYetContext { time: now, not_before: unix_time(*not_before) }
            }
            Self::ForeignAuthority => CertificateError::UnknownIssuer,
            Self::BadSignature => CertificateError::BadSignature,
            _ => CertificateError::Other(OtherError(Arc::new(Refused(self)))),
        };
        rustls::Error::InvalidCertificate(certificate)
    }

    pub(crate) fn of_webpki(error: &webpki::Error) -> Self {
        match error {
            webpki::Error::CertExpired { not_after, .. } => {
                Self::Expired { not_after: timestamp(*not_after) }
            }
            webpki::Error::CertNotValidYet { not_before, .. } => {
                Self::NotYetValid { not_before: timestamp(*not_before) }
            }
            webpki::Error::UnknownIssuer => Self::ForeignAuthority,
            webpki::Error::InvalidSignatureForPublicKey => Self::BadSignature,
            other => Self::Unusable(other.to_string()),
        }
    }
}

fn timestamp(time: UnixTime) -> Timestamp {
    Timestamp::from_unix_ms(i64::try_from(time.as_secs().saturating_mul(1000)).unwrap_or(i64::MAX))
}

fn unix_time(time: Timestamp) -> UnixTime {
    UnixTime::since_unix_epoch(Duration::from_secs(u64::try_from(time.unix_secs()).unwrap_or(0)))
}

/// The refusal inside a TLS error that our own verifier caused; `None` for every other error.
#[must_use]
pub fn refusal_of(error: &rustls::Error) -> Option<Refusal> {
    match error {
        rustls::Error::NoCertificatesPresented => Some(Refusal::NoCertificate),
        rustls::Error::InvalidCertificate(cause) => match cause {
            CertificateError::ExpiredContext { not_after, .. } => {
                Some(Refusal::Expired { not_after: timestamp(*not_after) })
            }
            CertificateError::NotValidYetContext { not_before, .. } => {
                Some(Refusal::NotYetValid { not_before: timestamp(*not_before) })
            }
            CertificateError::UnknownIssuer => Some(Refusal::ForeignAuthority),
            CertificateError::BadSignature => Some(Refusal::BadSignature),
            CertificateError::Other(other) => other.0.downcast_ref::<Refused>().map(|found| found.0.clone()),
            _ => None,
        },
        _ => None,
    }
}

/// The refusal that a TLS error's text tells of, ours or the other side's. The text may be hostile: nothing with
/// control characters comes out of it.
#[must_use]
pub fn refusal_in_text(text: &str) -> Option<Refusal> {
    let refusal = marked(text).or_else(|| worded(text))?;
    (!refusal.to_string().chars().any(char::is_control)).then_some(refusal)
}

fn marked(text: &str) -> Option<Refusal> {
    let data = &text[text.find(MARK)? + MARK.len()..];
    serde_json::Deserializer::from_str(data).into_iter().next()?.ok()
}

/// By rustls's own words for the refusals that have an alert of their own; a test holds them to these.
fn worded(text: &str) -> Option<Refusal> {
    let number = |after: &str| {
        let rest = &text[text.find(after)? + after.len()..];
        let digits = &rest[..rest.find(|c: char| !c.is_ascii_digit()).unwrap_or(rest.len())];
        digits.parse().ok().map(|secs: i64| Timestamp::from_unix_ms(secs.saturating_mul(1000)))
    };
    if text.contains("certificate expired: ") {
        return number("is not valid after ").map(|not_after| Refusal::Expired { not_after });
    }
    if text.contains("certificate not valid yet: ") {
        return number("is not valid before ").map(|not_before| Refusal::NotYetValid { not_before });
    }
    if text.ends_with("invalid peer certificate: UnknownIssuer") {
        return Some(Refusal::ForeignAuthority);
    }
    if text.ends_with("invalid peer certificate: BadSignature") {
        return Some(Refusal::BadSignature);
    }
    text.ends_with("peer sent no certificates").then_some(Refusal::NoCertificate)
}

/// A TLS alert in words, for an error that the other side caused. `code` is the alert's number.
#[must_use]
pub fn alert_in_words(code: u8) -> &'static str {
    match code {
        40 => "the peer found no TLS parameters in common with us",
        42 => "the peer could not read our certificate",
        43 => "the peer does not accept our kind of certificate",
        44 => "the peer says that our certificate is revoked",
        45 => "the peer says that our certificate has expired or is not valid yet",
        46 => "the peer refused our certificate",
        48 => "the peer does not trust the authority that issued our certificate",
        49 => "the peer denied us access",
        51 => "the peer found a wrong signature in the handshake",
        70 => "the peer speaks no TLS 1.3",
        80 => "the peer failed",
        112 => "the peer does not know the server name that we asked for",
        116 => "the peer wants a client certificate, and we gave none",
        120 => "the peer speaks none of the protocols that we offered",
        _ => "the peer aborted the TLS handshake",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn every_refusal() -> Vec<Refusal> {
        let time = Timestamp::from_unix_ms(1_700_000_000_000);
        vec![
            Refusal::Expired { not_after: time },
            Refusal::NotYetValid { not_before: time },
            Refusal::ForeignAuthority,
            Refusal::WrongCluster { expected: "a".parse().unwrap(), found: "b".parse().unwrap() },
            Refusal::WrongRole { expected: Role::Coordinator, found: Role::Node },
            Refusal::WrongName { expected: "a]\"".into(), presented: vec!["b".into(), "c".into()] },
            Refusal::NoIdentity("none".into()),
            Refusal::BadSignature,
            Refusal::NoCertificate,
            Refusal::Unusable("odd".into()),
        ]
    }

    #[test]
    fn every_refusal_has_its_own_text_and_code() {
        use std::collections::BTreeSet;
        let all = every_refusal();
        let texts: BTreeSet<_> = all.iter().map(ToString::to_string).collect();
        let codes: BTreeSet<_> = all.iter().map(Refusal::code).collect();
        assert_eq!((texts.len(), codes.len()), (all.len(), all.len()));
    }

    #[test]
    fn every_refusal_is_found_again_in_its_tls_error_and_in_that_errors_text() {
        for refusal in every_refusal() {
            let error = match refusal {
                Refusal::NoCertificate => rustls::Error::NoCertificatesPresented,
                _ => refusal.clone().into_tls_error(UnixTime::now()),
            };
            assert_eq!(refusal_of(&error), Some(refusal.clone()));
            let text = format!("the cryptographic handshake failed: error 46: {error}");
            assert_eq!(refusal_in_text(&text), Some(refusal), "{text}");
        }
    }

    #[test]
    fn a_text_from_a_hostile_peer_brings_no_control_characters_and_no_panic() {
        for hostile in [
            "[mvm-refusal {\"unusable\":\"\\u001b[2J\"}]",
            "[mvm-refusal ",
            "[mvm-refusal {\"wrong_cluster\":{\"expected\":\"../..\",\"found\":\"b\"}}]",
            "certificate expired: is not valid after ",
            "é certificate expired: is not valid after 99999999999999999999",
        ] {
            assert_eq!(refusal_in_text(hostile), None, "{hostile}");
        }
    }
}
