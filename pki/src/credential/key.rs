//! A leaf's private key: made here, used for one certificate, wiped when dropped.

use std::fmt;
use std::net::IpAddr;
use std::sync::Arc;

use rcgen::{CertificateParams, DistinguishedName, KeyPair, SanType};
use rustls::sign::SigningKey;
use rustls_pki_types::{PrivateKeyDer, PrivatePkcs8KeyDer};
use zeroize::Zeroizing;

use super::CredentialError;

/// The names that a certificate request asks for; whether it gets them is for the authority's side to decide.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrNames {
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
}

/// A private key (P-256).
pub struct LeafKey {
    pkcs8: Zeroizing<Vec<u8>>,
}

impl LeafKey {
    pub fn generate() -> Result<Self, CredentialError> {
        let pair = KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map_err(CredentialError::Make)?;
        let pair = Zeroizing::new(pair);
        Ok(Self { pkcs8: Zeroizing::new(pair.serialized_der().to_vec()) })
    }

    pub(super) fn from_pkcs8(pkcs8: Zeroizing<Vec<u8>>) -> Self {
        Self { pkcs8 }
    }

    pub(super) fn pkcs8(&self) -> &[u8] {
        &self.pkcs8
    }

    /// A certificate request, signed by this key as proof that the requester holds it.
    pub fn csr_der(&self, names: &CsrNames) -> Result<Vec<u8>, CredentialError> {
        let pair = KeyPair::from_pkcs8_der_and_sign_algo(
            &PrivatePkcs8KeyDer::from(self.pkcs8()),
            &rcgen::PKCS_ECDSA_P256_SHA256,
        );
        let pair = Zeroizing::new(pair.map_err(CredentialError::Make)?);
        let mut params = CertificateParams::default();
        // Who the holder is, the authority decides; a request has no say in it.
        params.distinguished_name = DistinguishedName::new();
        for dns in &names.dns {
            let name = dns.clone().try_into().map_err(|_| CredentialError::Name(dns.clone()))?;
            params.subject_alt_names.push(SanType::DnsName(name));
        }
        params.subject_alt_names.extend(names.ips.iter().copied().map(SanType::IpAddress));
        let request = params.serialize_request(&*pair).map_err(CredentialError::Make)?;
        Ok(request.der().to_vec())
    }

    pub(super) fn tls_key(&self) -> Result<Arc<dyn SigningKey>, CredentialError> {
        let der = PrivateKeyDer::Pkcs8(PrivatePkcs8KeyDer::from(self.pkcs8()));
        rustls::crypto::aws_lc_rs::sign::any_supported_type(&der).map_err(CredentialError::Key)
    }
}

impl fmt::Debug for LeafKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("LeafKey(secret)")
    }
}
