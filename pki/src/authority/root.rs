//! The root: signs issuing authorities and nothing else. Its key lives in one file, which may be taken away.

use std::path::{Path, PathBuf};

use mvm_proto::{ClusterId, Digest, Timestamp};
use rcgen::{
    CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer, PublicKeyData,
    SerialNumber, SignatureAlgorithm,
};
use rustls_pki_types::CertificateDer;

use super::{
    Authority, AuthorityError, ISSUING_LIFE, ROOT_LIFE, SKEW, Signer, authority_params, date, new_key,
    random_serial, uri,
};
use crate::certificate;
use crate::credential::Anchors;
use crate::endorsement::{self, ENDORSEMENT_LIFE};

/// The public key of another root. All roots have P-256 keys.
struct RootKey(Vec<u8>);

impl PublicKeyData for RootKey {
    fn der_bytes(&self) -> &[u8] {
        &self.0
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &rcgen::PKCS_ECDSA_P256_SHA256
    }
}

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

    /// Vouches for another root of the same cluster: who trusts this one may trust that one too. See [`endorsement`].
    pub fn endorse(
        &self,
        other: &CertificateDer<'_>,
        now: Timestamp,
    ) -> Result<CertificateDer<'static>, AuthorityError> {
        self.signer.check_alive(now)?;
        let unreadable = || AuthorityError::Content {
            path: PathBuf::from("the other root"),
            what: "the certificate of a root",
        };
        let cluster = certificate::cluster_of_authority(other).ok_or_else(unreadable)?;
        if cluster != self.signer.cluster {
            let authority = self.signer.cluster.clone();
            return Err(AuthorityError::WrongCluster { authority, asked: cluster });
        }
        let key = RootKey(certificate::facts(other).map_err(|_| unreadable())?.public_key);
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::OrganizationName, cluster.as_str());
        params.distinguished_name.push(DnType::CommonName, "mvm endorsement of a root");
        params.serial_number = Some(SerialNumber::from_slice(&random_serial()?));
        params.subject_alt_names = vec![uri(endorsement::name(&cluster, &certificate::fingerprint(other)))?];
        params.is_ca = IsCa::ExplicitNoCa;
        params.extended_key_usages = vec![ExtendedKeyUsagePurpose::Other(endorsement::PURPOSE.to_vec())];
        params.use_authority_key_identifier_extension = true;
        params.not_before = date((now - SKEW).max(self.signer.facts.not_before));
        params.not_after = date((now + ENDORSEMENT_LIFE).min(self.signer.facts.not_after));
        let issuer = Issuer::from_ca_cert_der(&self.signer.certificate, &*self.signer.key)
            .map_err(AuthorityError::Make)?;
        Ok(params.signed_by(&key, &issuer).map_err(AuthorityError::Make)?.der().clone())
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
