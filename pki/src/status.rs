//! What a process's certificate looks like now, for people and for `--json`.

use mvm_proto::{Digest, Timestamp};
use serde::{Deserialize, Serialize};

use crate::credential::{Anchors, Credential};
use crate::trust::TrustStore;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CertificateState {
    Valid,
    Expired,
    NotYetValid,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CertificateName {
    pub subject: String,
    pub fingerprint: Digest,
    pub not_after: Timestamp,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrustKeyStatus {
    pub role: String,
    pub key_id: String,
    pub threshold: u32,
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
        let _ = (credential, anchors, trust, now);
        todo!()
    }
}
