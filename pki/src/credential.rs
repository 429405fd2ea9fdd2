//! What a process holds to prove itself (key and chain) and to judge others (anchors).

use std::net::IpAddr;
use std::path::{Path, PathBuf};

use mvm_proto::{ClusterId, Digest, Timestamp};
use rustls_pki_types::CertificateDer;

use crate::identity::Identity;

#[derive(Debug, thiserror::Error)]
pub enum CredentialError {
    #[error("could not use {path}")]
    File {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
}

/// The names that a certificate request asks for; whether it gets them is the authority's caller's decision.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CsrNames {
    pub dns: Vec<String>,
    pub ips: Vec<IpAddr>,
}

/// A leaf's private key (P-256).
#[derive(Debug)]
pub struct LeafKey {}

impl LeafKey {
    pub fn generate() -> Result<Self, CredentialError> {
        todo!()
    }

    /// A certificate request signed by this key.
    pub fn csr_der(&self, names: &CsrNames) -> Result<Vec<u8>, CredentialError> {
        let _ = names;
        todo!()
    }
}

/// A key with its certificate chain.
#[derive(Debug)]
pub struct Credential {}

impl Credential {
    /// Joins a key with the chain that was issued for it; refused when they do not belong together.
    pub fn new(key: LeafKey, chain: Vec<CertificateDer<'static>>) -> Result<Self, CredentialError> {
        let _ = (key, chain);
        todo!()
    }

    /// As [`Credential::new`], from the chain as PEM.
    pub fn with_chain_pem(key: LeafKey, chain_pem: &str) -> Result<Self, CredentialError> {
        let _ = (key, chain_pem);
        todo!()
    }

    /// Reads key and chain from one text.
    pub fn from_pem(combined: &str) -> Result<Self, CredentialError> {
        let _ = combined;
        todo!()
    }

    #[must_use]
    pub fn to_pem(&self) -> zeroize::Zeroizing<String> {
        todo!()
    }

    pub fn load(path: &Path) -> Result<Self, CredentialError> {
        let _ = path;
        todo!()
    }

    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let _ = path;
        todo!()
    }

    #[must_use]
    pub fn identity(&self) -> &Identity {
        todo!()
    }

    #[must_use]
    pub fn not_before(&self) -> Timestamp {
        todo!()
    }

    #[must_use]
    pub fn not_after(&self) -> Timestamp {
        todo!()
    }

    #[must_use]
    pub fn serial_hex(&self) -> &str {
        todo!()
    }

    #[must_use]
    pub fn chain(&self) -> &[CertificateDer<'static>] {
        todo!()
    }
}

/// The root certificates that are trusted; several while one root takes over from another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anchors {}

impl Anchors {
    pub fn new(roots: Vec<CertificateDer<'static>>) -> Result<Self, CredentialError> {
        let _ = roots;
        todo!()
    }

    pub fn from_pem(text: &str) -> Result<Self, CredentialError> {
        let _ = text;
        todo!()
    }

    /// The one root among `text`'s that has this fingerprint; for a download that a join token pins.
    pub fn pinned(text: &str, fingerprint: &Digest) -> Result<Self, CredentialError> {
        let _ = (text, fingerprint);
        todo!()
    }

    #[must_use]
    pub fn to_pem(&self) -> String {
        todo!()
    }

    pub fn load(path: &Path) -> Result<Self, CredentialError> {
        let _ = path;
        todo!()
    }

    pub fn save(&self, path: &Path) -> std::io::Result<()> {
        let _ = path;
        todo!()
    }

    #[must_use]
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        todo!()
    }

    #[must_use]
    pub fn fingerprints(&self) -> Vec<Digest> {
        todo!()
    }

    #[must_use]
    pub fn contains(&self, fingerprint: &Digest) -> bool {
        let _ = fingerprint;
        todo!()
    }

    /// The cluster that these roots belong to.
    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        todo!()
    }

    /// Trusts one more root of the same cluster.
    pub fn add(&mut self, root: CertificateDer<'static>) -> Result<(), CredentialError> {
        let _ = root;
        todo!()
    }

    /// Trusts this root no longer; the last one stays.
    pub fn retire(&mut self, fingerprint: &Digest) -> Result<(), CredentialError> {
        let _ = fingerprint;
        todo!()
    }
}
