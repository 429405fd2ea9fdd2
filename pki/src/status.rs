//! What a process's certificate looks like now, for people and for `--json`.

use mvm_proto::{Digest, Timestamp};
use rustls_pki_types::CertificateDer;
use serde::{Deserialize, Serialize};

use crate::certificate;
use crate::credential::{Anchors, Credential};
use crate::rotation;
use crate::trust::{TrustRole, TrustStore};

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertificateState {
    Valid,
    Expired,
    NotYetValid,
}

impl CertificateState {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Valid => "valid",
            Self::Expired => "expired",
            Self::NotYetValid => "not yet valid",
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateName {
    pub subject: String,
    pub fingerprint: Digest,
    pub not_after: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustKeyStatus {
    pub role: TrustRole,
    pub key_id: String,
    /// How many of the role's keys must sign.
    pub threshold: u32,
    /// When the role ends, or the root metadata that names it, whichever is first.
    pub expires_at: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateStatus {
    pub state: CertificateState,
    pub subject: String,
    pub identity: String,
    pub serial: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
    pub percent_of_life: u8,
    pub next_renewal: Timestamp,
    /// The leaf first.
    pub chain: Vec<CertificateName>,
    pub roots: Vec<CertificateName>,
    pub trust_keys: Vec<TrustKeyStatus>,
}

impl CertificateStatus {
    #[must_use]
    pub fn of(
        credential: &Credential,
        anchors: &Anchors,
        trust: Option<&TrustStore>,
        now: Timestamp,
    ) -> Self {
        let (not_before, not_after) = (credential.not_before(), credential.not_after());
        let jitter = rotation::jitter_of(&credential.fingerprint());
        Self {
            state: state_of(not_before, not_after, now),
            subject: credential.subject().to_owned(),
            identity: credential.identity().to_string(),
            serial: credential.serial_hex().to_owned(),
            not_before,
            not_after,
            percent_of_life: rotation::percent_of_life(not_before, not_after, now),
            next_renewal: rotation::renew_at(not_before, not_after, jitter),
            chain: names(credential.chain()),
            roots: names(anchors.certificates()),
            trust_keys: trust.map(trust_keys).unwrap_or_default(),
        }
    }
}

/// When what a process is known by and goes by ends, each with what it is: certificates of its chain and its roots, and
/// what the trust root says of keys and images. Of several of a kind, the first to end.
#[must_use]
pub fn expiries(
    credential: Option<&Credential>,
    anchors: Option<&Anchors>,
    trust: Option<&TrustStore>,
) -> Vec<(&'static str, Timestamp)> {
    let first =
        |certificates: &[CertificateDer<'_>]| names(certificates).iter().map(|name| name.not_after).min();
    let issuing = credential.and_then(|credential| first(credential.chain().get(1..).unwrap_or_default()));
    let mut found = vec![
        ("certificate", credential.map(Credential::not_after)),
        ("issuing_ca", issuing),
        ("root_ca", anchors.and_then(|anchors| first(anchors.certificates()))),
        ("trust_root", trust.map(|trust| trust.root().expires_at)),
        ("images", trust.and_then(TrustStore::images).map(|images| images.expires_at)),
    ];
    let role = |role| trust.and_then(|trust: &TrustStore| trust.root().role(role).expires_at);
    found.push(("director_keys", role(TrustRole::Director)));
    found.push(("image_keys", role(TrustRole::Image)));
    found.into_iter().filter_map(|(of, at)| Some((of, at?))).collect()
}

fn state_of(not_before: Timestamp, not_after: Timestamp, now: Timestamp) -> CertificateState {
    if now < not_before {
        CertificateState::NotYetValid
    } else if now > not_after {
        CertificateState::Expired
    } else {
        CertificateState::Valid
    }
}

fn names(certificates: &[CertificateDer<'_>]) -> Vec<CertificateName> {
    let name = |certificate| {
        let facts = certificate::facts(certificate).ok()?;
        let fingerprint = certificate::fingerprint(certificate);
        Some(CertificateName { subject: facts.subject, fingerprint, not_after: facts.not_after })
    };
    certificates.iter().filter_map(name).collect()
}

fn trust_keys(trust: &TrustStore) -> Vec<TrustKeyStatus> {
    let root = trust.root();
    let of_role = |role: TrustRole| {
        let keys = root.role(role);
        let expires_at = keys.expires_at.map_or(root.expires_at, |own| own.min(root.expires_at));
        keys.key_ids.iter().map(move |key_id| TrustKeyStatus {
            role,
            key_id: key_id.clone(),
            threshold: keys.threshold,
            expires_at,
        })
    };
    TrustRole::ALL.into_iter().flat_map(of_role).collect()
}
