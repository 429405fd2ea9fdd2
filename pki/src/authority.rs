//! Certificate authorities.

use std::net::IpAddr;
use std::path::Path;
use std::time::Duration;

use mvm_proto::{ClusterId, Digest, Timestamp};
use rustls_pki_types::CertificateDer;

use crate::credential::{Anchors, CredentialError};
use crate::identity::Identity;

/// How long a leaf lives unless its profile says otherwise.
pub const LEAF_LIFE: Duration = Duration::from_secs(24 * 60 * 60);

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("the authority")]
    Todo(#[source] CredentialError),
}

/// The root: signs issuing authorities and nothing else.
#[derive(Debug)]
pub struct RootAuthority {}

/// The issuing authority: turns proven certificate requests into leaves.
#[derive(Debug)]
pub struct Authority {}

/// What a leaf is to say. Decided by the caller, never by the request.
#[derive(Debug, Clone)]
pub struct LeafProfile {
    pub identity: Identity,
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
    pub life: Duration,
}

/// A new leaf with its chain.
#[derive(Debug, Clone)]
pub struct Issued {
    /// The leaf, then the issuing authority.
    pub chain: Vec<CertificateDer<'static>>,
    pub serial_hex: String,
    pub not_before: Timestamp,
    pub not_after: Timestamp,
}

impl Issued {
    #[must_use]
    pub fn chain_pem(&self) -> String {
        todo!()
    }
}

impl RootAuthority {
    pub fn create(cluster: &ClusterId, now: Timestamp) -> Result<Self, AuthorityError> {
        let _ = (cluster, now);
        todo!()
    }

    /// Reads `ca.crt` and `ca.key` from `dir`.
    pub fn load(dir: &Path) -> Result<Self, AuthorityError> {
        let _ = dir;
        todo!()
    }

    /// Writes `ca.crt` and `ca.key` to `dir`; the key may then be taken away.
    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        let _ = dir;
        todo!()
    }

    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        todo!()
    }

    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        todo!()
    }

    #[must_use]
    pub fn anchors(&self) -> Anchors {
        todo!()
    }

    /// Makes an issuing authority with a new key.
    pub fn create_issuing(&self, now: Timestamp) -> Result<Authority, AuthorityError> {
        let _ = now;
        todo!()
    }
}

impl Authority {
    /// Reads `ca.crt` and `ca.key` from `dir`.
    pub fn load(dir: &Path) -> Result<Self, AuthorityError> {
        let _ = dir;
        todo!()
    }

    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        let _ = dir;
        todo!()
    }

    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        todo!()
    }

    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        todo!()
    }

    #[must_use]
    pub fn not_after(&self) -> Timestamp {
        todo!()
    }

    /// Issues a leaf to whoever proves to hold the request's key.
    pub fn issue(
        &self,
        csr_der: &[u8],
        profile: &LeafProfile,
        now: Timestamp,
    ) -> Result<Issued, AuthorityError> {
        let _ = (csr_der, profile, now);
        todo!()
    }
}

/// The DNS names and addresses that a request asks for, once its signature is proven. For the caller's policy.
pub fn requested_names(csr_der: &[u8]) -> Result<crate::CsrNames, AuthorityError> {
    let _ = csr_der;
    todo!()
}
