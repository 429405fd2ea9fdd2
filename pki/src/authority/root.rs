//! The root: signs issuing authorities and nothing else. Its key lives in one file, which may be taken away.

use std::path::Path;

use mvm_proto::{ClusterId, Digest, Timestamp};
use rcgen::Issuer;
use rustls_pki_types::CertificateDer;

use super::{
    Authority, AuthorityError, ISSUING_LIFE, ROOT_LIFE, SKEW, Signer, authority_params, date, new_key,
};
use crate::certificate;
use crate::credential::Anchors;

#[derive(Debug)]
pub struct RootAuthority {
    signer: Signer,
}

impl RootAuthority {
    /// A new root with a new key, valid for ten years.
    pub fn create(cluster: &ClusterId, now: Timestamp) -> Result<Self, AuthorityError> {
        let key = new_key()?;
        let mut params = authority_params(cluster, "root", 1)?;
        params.not_before = date(now - SKEW);
        params.not_after = date(now + ROOT_LIFE);
        let certificate = params.self_signed(&*key).map_err(AuthorityError::Make)?.der().clone();
        Ok(Self { signer: Signer::new(certificate, key, Path::new("the new root"))? })
    }

    /// Reads `ca.crt` and `ca.key` from `dir`.
    pub fn load(dir: &Path) -> Result<Self, AuthorityError> {
        Signer::load(dir).map(|signer| Self { signer })
    }

    /// Writes `ca.crt` and `ca.key` (0600) to `dir`; the key may then be taken away.
    pub fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        self.signer.save(dir)
    }

    #[must_use]
    pub fn certificate(&self) -> &CertificateDer<'static> {
        &self.signer.certificate
    }

    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        certificate::fingerprint(&self.signer.certificate)
    }

    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.signer.cluster
    }

    #[must_use]
    pub fn not_after(&self) -> Timestamp {
        self.signer.facts.not_after
    }

    /// This root as the only one to trust.
    #[must_use]
    pub fn anchors(&self) -> Anchors {
        Anchors::of_root(self.signer.certificate.clone(), self.signer.cluster.clone())
    }

    /// Makes an issuing authority with a new key, valid for a year and not beyond this root.
    pub fn create_issuing(&self, now: Timestamp) -> Result<Authority, AuthorityError> {
        self.signer.check_alive(now)?;
        let key = new_key()?;
        let mut params = authority_params(&self.signer.cluster, "issuing", 0)?;
        params.not_before = date((now - SKEW).max(self.signer.facts.not_before));
        params.not_after = date((now + ISSUING_LIFE).min(self.signer.facts.not_after));
        let issuer = Issuer::from_ca_cert_der(&self.signer.certificate, &*self.signer.key)
            .map_err(AuthorityError::Make)?;
        let certificate = params.signed_by(&*key, &issuer).map_err(AuthorityError::Make)?.der().clone();
        Signer::new(certificate, key, Path::new("the new issuing authority")).map(Authority::from_signer)
    }
}
