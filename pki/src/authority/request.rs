//! Reading certificate requests from strangers: size, shape, key type and proof of possession, in this order.

use rcgen::{CertificateSigningRequestParams, PublicKeyData, SanType, SignatureAlgorithm};
use rustls_pki_types::CertificateSigningRequestDer;
use x509_parser::certification_request::X509CertificationRequest;
use x509_parser::oid_registry::{OID_EC_P256, OID_KEY_TYPE_EC_PUBLIC_KEY, OID_SIG_ED25519};
use x509_parser::prelude::FromDer as _;
use x509_parser::x509::SubjectPublicKeyInfo;

use super::{AuthorityError, MAX_CSR_BYTES};
use crate::credential::CsrNames;

/// An uncompressed point on P-256.
const P256_PUBLIC_BYTES: usize = 65;
const ED25519_PUBLIC_BYTES: usize = 32;

/// A public key whose owner has shown to hold the private one.
pub(super) struct ProvenKey {
    raw: Vec<u8>,
    algorithm: &'static SignatureAlgorithm,
}

impl ProvenKey {
    pub(super) fn of(csr_der: &[u8]) -> Result<Self, AuthorityError> {
        read(csr_der).map(|(key, _)| key)
    }
}

impl PublicKeyData for ProvenKey {
    fn der_bytes(&self) -> &[u8] {
        &self.raw
    }

    fn algorithm(&self) -> &'static SignatureAlgorithm {
        self.algorithm
    }
}

/// The DNS names and addresses that a proven request asks for. Whether it gets them is for the caller's policy.
pub fn requested_names(csr_der: &[u8]) -> Result<CsrNames, AuthorityError> {
    let (_, params) = read(csr_der)?;
    let mut names = CsrNames::default();
    for name in params.params.subject_alt_names {
        match name {
            SanType::DnsName(dns) => names.dns.push(dns.to_string()),
            SanType::IpAddress(ip) => names.ips.push(ip),
            _ => {}
        }
    }
    Ok(names)
}

fn read(csr_der: &[u8]) -> Result<(ProvenKey, CertificateSigningRequestParams), AuthorityError> {
    if csr_der.len() > MAX_CSR_BYTES {
        return Err(AuthorityError::RequestTooLarge { found: csr_der.len() });
    }
    let Ok(([], parsed)) = X509CertificationRequest::from_der(csr_der) else {
        return Err(AuthorityError::RequestUnreadable);
    };
    // rcgen takes the key's type from the signature's; the key itself says whether that is true.
    let key = &parsed.certification_request_info.subject_pki;
    let algorithm = key_algorithm(key).ok_or(AuthorityError::RequestKey)?;
    let raw = key.subject_public_key.data.to_vec();
    let proven = CertificateSigningRequestParams::from_der(&CertificateSigningRequestDer::from(csr_der));
    let proven = proven.map_err(|cause| match cause {
        rcgen::Error::InvalidCertificationRequestSignature => AuthorityError::RequestUnproven,
        _ => AuthorityError::RequestUnreadable,
    })?;
    if *proven.public_key.algorithm() != *algorithm {
        return Err(AuthorityError::RequestKey);
    }
    Ok((ProvenKey { raw, algorithm }, proven))
}

fn key_algorithm(key: &SubjectPublicKeyInfo<'_>) -> Option<&'static SignatureAlgorithm> {
    let length = key.subject_public_key.data.len();
    if key.algorithm.algorithm == OID_KEY_TYPE_EC_PUBLIC_KEY {
        let curve = key.algorithm.parameters.as_ref()?.as_oid().ok()?;
        (curve == OID_EC_P256 && length == P256_PUBLIC_BYTES).then_some(&rcgen::PKCS_ECDSA_P256_SHA256)
    } else {
        let is_ed25519 = key.algorithm.algorithm == OID_SIG_ED25519 && length == ED25519_PUBLIC_BYTES;
        is_ed25519.then_some(&rcgen::PKCS_ED25519)
    }
}
