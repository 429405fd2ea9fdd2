//! What a process holds to prove itself (a key and its chain) and to judge others (root certificates).
//!
//! A [`LeafKey`] is made where it is used and never leaves the process but for its own 0600 file. Joined with the
//! chain that an authority issued for it, it is a [`Credential`]; both lie in one file, so that no crash can pair a
//! key with another key's chain.

mod anchors;
mod key;

use std::fmt;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use mvm_proto::{Digest, Timestamp};
use rustls::sign::CertifiedKey;
use rustls_pki_types::CertificateDer;
use zeroize::Zeroizing;

pub use anchors::Anchors;
pub use key::{CsrNames, LeafKey};

use crate::certificate::{self, Facts};
use crate::identity::{Identity, IdentityError, identity_of};
use crate::{files, pem};

/// A leaf and the authorities between it and a root; ours have one.
const MAX_CHAIN: usize = 4;

#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error("could not use {path}")]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("{path} is not usable")]
    Content {
        path: PathBuf,
        #[source]
        cause: Box<CredentialError>,
    },
    #[error("the text holds no readable certificate")]
    NoCertificate,
    #[error("the text must hold exactly one private key (PKCS#8)")]
    NotOneKey,
    #[error("the chain holds {found} certificates, the limit is {MAX_CHAIN}")]
    ChainTooLong { found: usize },
    #[error("a certificate can't be read")]
    Unreadable,
    #[error("the certificate carries no usable identity")]
    Identity(#[source] IdentityError),
    #[error("the key does not belong to the certificate")]
    KeyMismatch,
    #[error("the key can't be used")]
    Key(#[source] rustls::Error),
    #[error("could not create a key or a certificate request")]
    Make(#[source] rcgen::Error),
    #[error("{0:?} can't be a name in a certificate request")]
    Name(String),
    #[error("the certificate is not that of a root authority of one cluster")]
    NotARoot,
    #[error("the roots are of different clusters")]
    MixedClusters,
    #[error("none of the roots has the fingerprint {expected}; do not trust their sender")]
    NotPinned { expected: Digest },
    #[error("the last trusted root can't be retired; add its successor first")]
    LastRoot,
    #[error("none of the roots {} is trusted, or endorsed by one that is", listed(.0))]
    NotEndorsed(Vec<Digest>),
    #[error("there are more roots or endorsements than any change of roots has")]
    TooManyRoots,
    #[error("no trusted root has the fingerprint {0}")]
    UnknownRoot(Digest),
}

fn listed(roots: &[Digest]) -> String {
    roots.iter().map(Digest::to_string).collect::<Vec<_>>().join(", ")
}

/// A key with its certificate chain.
pub struct Credential {
    key: LeafKey,
    certified: Arc<CertifiedKey>,
    identity: Identity,
    facts: Facts,
}

impl Credential {
    /// Joins a key with the chain that was issued for it; refused when they do not belong together.
    pub fn new(key: LeafKey, chain: Vec<CertificateDer<'static>>) -> Result<Self, CredentialError> {
        let leaf = chain.first().ok_or(CredentialError::NoCertificate)?;
        if chain.len() > MAX_CHAIN {
            return Err(CredentialError::ChainTooLong { found: chain.len() });
        }
        let identity = identity_of(leaf).map_err(CredentialError::Identity)?;
        let facts = certificate::facts(leaf).map_err(|_| CredentialError::Unreadable)?;
        let certified = CertifiedKey::new(chain, key.tls_key()?);
        certified.keys_match().map_err(|_| CredentialError::KeyMismatch)?;
        Ok(Self { key, certified: Arc::new(certified), identity, facts })
    }

    /// As [`Credential::new`], from the chain as PEM.
    pub fn with_chain_pem(key: LeafKey, chain_pem: &str) -> Result<Self, CredentialError> {
        let chain = pem::read_certificates(chain_pem).ok_or(CredentialError::NoCertificate)?;
        Self::new(key, chain)
    }

    /// Reads key and chain from one text.
    pub fn from_pem(combined: &str) -> Result<Self, CredentialError> {
        let key = pem::read_private_key(combined).ok_or(CredentialError::NotOneKey)?;
        Self::with_chain_pem(LeafKey::from_pkcs8(key), combined)
    }

    /// Key and chain in one text.
    #[must_use]
    pub fn to_pem(&self) -> Zeroizing<String> {
        let mut text = Zeroizing::new(String::new());
        pem::push(&mut text, pem::PRIVATE_KEY, self.key.pkcs8());
        let chain = pem::certificates(self.chain());
        let mut whole = Zeroizing::new(String::with_capacity(text.len() + chain.len()));
        whole.push_str(&text);
        whole.push_str(&chain);
        whole
    }

    /// Reads what [`Credential::save`] wrote; refused when others could have read it.
    pub fn load(path: &Path) -> Result<Self, CredentialError> {
        let bytes = files::read_private(path)
            .map_err(|cause| CredentialError::File { path: path.to_owned(), cause })?;
        let text = std::str::from_utf8(&bytes).map_err(|_| CredentialError::NotOneKey);
        text.and_then(Self::from_pem)
            .map_err(|cause| CredentialError::Content { path: path.to_owned(), cause: Box::new(cause) })
    }

    /// Writes one 0600 file, at once or not at all.
    pub fn save(&self, path: &Path) -> io::Result<()> {
        files::write_private(path, self.to_pem().as_bytes())
    }

    #[must_use]
    pub fn identity(&self) -> &Identity {
        &self.identity
    }

    #[must_use]
    pub fn not_before(&self) -> Timestamp {
        self.facts.not_before
    }

    #[must_use]
    pub fn not_after(&self) -> Timestamp {
        self.facts.not_after
    }

    #[must_use]
    pub fn serial_hex(&self) -> &str {
        &self.facts.serial_hex
    }

    #[must_use]
    pub fn subject(&self) -> &str {
        &self.facts.subject
    }

    /// The leaf, then the authorities up to, but without, the root.
    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        &self.certified.cert
    }

    /// The digest of the leaf.
    #[must_use]
    pub fn fingerprint(&self) -> Digest {
        // A credential is never made of an empty chain.
        self.chain().first().map_or_else(|| Digest::of(&[]), certificate::fingerprint)
    }

    /// The DNS names and addresses in the leaf: what a renewal asks for again.
    #[must_use]
    pub fn hosts(&self) -> Vec<String> {
        self.chain().first().map(certificate::hosts).unwrap_or_default()
    }

    pub(crate) fn certified(&self) -> &Arc<CertifiedKey> {
        &self.certified
    }
}

impl fmt::Debug for Credential {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credential")
            .field("identity", &self.identity)
            .field("serial", &self.facts.serial_hex)
            .field("not_after", &self.facts.not_after)
            .finish_non_exhaustive()
    }
}
