//! Certificate authorities: a root, whose key can be kept offline, and the issuing authority that it signs.
//!
//! The coordinator holds an [`Authority`] and issues a leaf for every proven request. What a leaf says is decided by
//! the coordinator ([`LeafProfile`]) and never by the request: of a request only the key is used. The root's key is
//! needed again only to make the next issuing authority, so it may lie in a safe. Every authority carries the name of
//! its cluster, and issues for no other.

mod issuing;
mod request;
mod root;

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use aws_lc_rs::rand;
use mvm_proto::{ClusterId, Timestamp};
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, IsCa, KeyPair, KeyUsagePurpose, SanType,
    SerialNumber,
};
use rustls_pki_types::{CertificateDer, PrivatePkcs8KeyDer};
use time::OffsetDateTime;
use zeroize::Zeroizing;

pub use issuing::Authority;
pub use request::requested_names;
pub use root::RootAuthority;

use crate::certificate::{self, Facts, SCHEME};
use crate::identity::Identity;
use crate::{files, pem};

/// How long a leaf lives unless its profile says otherwise.
pub const LEAF_LIFE: Duration = Duration::from_secs(24 * 60 * 60);
/// How long an issuing authority lives; never longer than its root.
pub const ISSUING_LIFE: Duration = Duration::from_secs(365 * 24 * 60 * 60);
/// How long a root lives.
pub const ROOT_LIFE: Duration = Duration::from_secs(10 * 365 * 24 * 60 * 60);
/// How far a new certificate is backdated, for peers whose clocks are behind. At most a tenth of a leaf's life, so
/// that half the life of a very short one still lies ahead.
pub const SKEW: Duration = Duration::from_secs(60);
/// The largest certificate request that is looked at. An honest one is under 1 KiB.
pub const MAX_CSR_BYTES: usize = 8 * 1024;
/// The most DNS names and addresses in one leaf.
pub const MAX_NAMES: usize = 32;

const CERTIFICATE_FILE: &str = "ca.crt";
const KEY_FILE: &str = "ca.key";
/// RFC 5280 allows 20 bytes; 16 random ones never meet again.
const SERIAL_BYTES: usize = 16;

#[derive(Debug, thiserror::Error)]
pub enum AuthorityError {
    #[error("could not use {path}")]
    File {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("the authority's key is not at {path}; bring it back there for as long as it is needed")]
    KeyAway { path: PathBuf },
    #[error("{path} does not hold what an authority needs: {what}")]
    Content { path: PathBuf, what: &'static str },
    #[error("the authority was valid until {not_after}; make a new one with the key that signed it")]
    Expired { not_after: Timestamp },
    #[error("the authority issues for cluster {authority}, not for {asked}")]
    WrongCluster { authority: ClusterId, asked: ClusterId },
    #[error("the certificate request is {found} bytes long, the limit is {MAX_CSR_BYTES}")]
    RequestTooLarge { found: usize },
    #[error("the certificate request can't be read")]
    RequestUnreadable,
    #[error("the certificate request is not signed by its own key")]
    RequestUnproven,
    #[error("the certificate request's key must be P-256 or Ed25519")]
    RequestKey,
    #[error("{0:?} can't be a name in a certificate")]
    Name(String),
    #[error("{found} names are asked for, the limit is {MAX_NAMES}")]
    TooManyNames { found: usize },
    #[error("a certificate must live for at least a second")]
    NoLife,
    #[error("could not read random bytes from the system")]
    Random,
    #[error("could not create the certificate")]
    Make(#[source] rcgen::Error),
}

/// What a leaf is to say. Decided by the caller, never by the request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeafProfile {
    pub identity: Identity,
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
    pub life: Duration,
}

/// A new leaf with its chain.
#[derive(Debug, Clone, PartialEq, Eq)]
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
        pem::certificates(&self.chain)
    }
}

/// An authority's certificate with its key: what root and issuing authority have in common.
struct Signer {
    certificate: CertificateDer<'static>,
    cluster: ClusterId,
    facts: Facts,
    key: Zeroizing<KeyPair>,
}

impl Signer {
    fn new(
        certificate: CertificateDer<'static>,
        key: Zeroizing<KeyPair>,
        path: &Path,
    ) -> Result<Self, AuthorityError> {
        let content = |what| AuthorityError::Content { path: path.to_owned(), what };
        let facts = certificate::facts(&certificate).map_err(|_| content("a readable certificate"))?;
        let cluster = certificate::cluster_of_authority(&certificate)
            .ok_or_else(|| content("the name of a cluster"))?;
        if !facts.is_authority {
            return Err(content("the certificate of an authority"));
        }
        if facts.public_key != key.public_key_raw() {
            return Err(content("a key and a certificate that belong together"));
        }
        Ok(Self { certificate, cluster, facts, key })
    }

    fn load(dir: &Path) -> Result<Self, AuthorityError> {
        let (certificate_path, key_path) = (dir.join(CERTIFICATE_FILE), dir.join(KEY_FILE));
        let content = |path: &Path, what| AuthorityError::Content { path: path.to_owned(), what };
        let text = std::fs::read_to_string(&certificate_path)
            .map_err(|cause| AuthorityError::File { path: certificate_path.clone(), cause })?;
        let secret = files::read_private(&key_path).map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotFound => AuthorityError::KeyAway { path: key_path.clone() },
            _ => AuthorityError::File { path: key_path.clone(), cause },
        })?;
        let der = std::str::from_utf8(&secret).ok().and_then(pem::read_private_key);
        let der = der.ok_or_else(|| content(&key_path, "exactly one PKCS#8 key"))?;
        let key = KeyPair::from_pkcs8_der_and_sign_algo(
            &PrivatePkcs8KeyDer::from(der.as_slice()),
            &rcgen::PKCS_ECDSA_P256_SHA256,
        );
        let key = key.map_err(|_| content(&key_path, "a P-256 key"))?;
        // The first root's key lies beside the list of all roots, so the certificate is found by its key.
        let certificates = pem::read_certificates(&text)
            .ok_or_else(|| content(&certificate_path, "readable certificates"))?;
        let certificate = certificates
            .into_iter()
            .find(|found| certificate::facts(found).is_ok_and(|it| it.public_key == key.public_key_raw()))
            .ok_or_else(|| content(dir, "a key and a certificate that belong together"))?;
        Self::new(certificate, Zeroizing::new(key), dir)
    }

    /// The key first: a certificate without its key is of no use, a key without its certificate is not noticed.
    fn save(&self, dir: &Path) -> Result<(), AuthorityError> {
        let mut text = Zeroizing::new(String::new());
        pem::push(&mut text, pem::PRIVATE_KEY, self.key.serialized_der());
        let certificate = pem::certificates(std::slice::from_ref(&self.certificate));
        let at = |path: PathBuf| move |cause| AuthorityError::File { path, cause };
        let (certificate_path, key_path) = (dir.join(CERTIFICATE_FILE), dir.join(KEY_FILE));
        files::write_private(&key_path, text.as_bytes()).map_err(at(key_path))?;
        files::write_public(&certificate_path, certificate.as_bytes()).map_err(at(certificate_path))
    }

    fn check_alive(&self, now: Timestamp) -> Result<(), AuthorityError> {
        let not_after = self.facts.not_after;
        if now >= not_after { Err(AuthorityError::Expired { not_after }) } else { Ok(()) }
    }
}

impl std::fmt::Debug for Signer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Signer").field("subject", &self.facts.subject).finish_non_exhaustive()
    }
}

fn new_key() -> Result<Zeroizing<KeyPair>, AuthorityError> {
    KeyPair::generate_for(&rcgen::PKCS_ECDSA_P256_SHA256).map(Zeroizing::new).map_err(AuthorityError::Make)
}

/// What the certificates of root and issuing authority have in common.
fn authority_params(
    cluster: &ClusterId,
    kind: &str,
    path_length: u8,
) -> Result<CertificateParams, AuthorityError> {
    let mut params = CertificateParams::default();
    let serial = random_serial()?;
    // A part of the serial number in the name keeps two authorities apart while one takes over from the other.
    let name = format!("mvm {kind} {}", mvm_proto::digest::hex(&serial[..4]));
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::OrganizationName, cluster.as_str());
    params.distinguished_name.push(DnType::CommonName, name);
    params.serial_number = Some(SerialNumber::from_slice(&serial));
    params.subject_alt_names = vec![uri(format!("{SCHEME}{cluster}"))?];
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(path_length));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign, KeyUsagePurpose::CrlSign];
    params.use_authority_key_identifier_extension = true;
    Ok(params)
}

fn uri(text: String) -> Result<SanType, AuthorityError> {
    text.clone().try_into().map(SanType::URI).map_err(|_| AuthorityError::Name(text))
}

/// 16 random bytes that read as a positive number without a leading zero, as RFC 5280 wants.
fn random_serial() -> Result<[u8; SERIAL_BYTES], AuthorityError> {
    let mut serial = [0; SERIAL_BYTES];
    rand::fill(&mut serial).map_err(|_| AuthorityError::Random)?;
    serial[0] = serial[0] & 0x7f | 0x40;
    Ok(serial)
}

/// Certificates count in whole seconds.
fn date(time: Timestamp) -> OffsetDateTime {
    OffsetDateTime::from_unix_timestamp(time.unix_secs()).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}
