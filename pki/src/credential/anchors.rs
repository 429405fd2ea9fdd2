//! The root certificates that are trusted: one, or several while one root takes over from another.
//!
//! A rollover is A, then A and B, then B. Everyone learns of B with its next renewal; A is retired once every leaf
//! issued under it has been renewed under B.

use std::io;
use std::path::Path;

use mvm_proto::{ClusterId, Digest};
use rustls_pki_types::CertificateDer;

use super::CredentialError;
use crate::certificate;
use crate::{files, pem};

/// Never empty, and all of one cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Anchors {
    roots: Vec<CertificateDer<'static>>,
    cluster: ClusterId,
}

impl Anchors {
    pub fn new(roots: Vec<CertificateDer<'static>>) -> Result<Self, CredentialError> {
        let mut roots = roots.into_iter();
        let first = roots.next().ok_or(CredentialError::NoCertificate)?;
        let cluster = cluster_of_root(&first)?;
        let mut anchors = Self::of_root(first, cluster);
        for root in roots {
            anchors.add(root)?;
        }
        Ok(anchors)
    }

    pub(crate) fn of_root(root: CertificateDer<'static>, cluster: ClusterId) -> Self {
        Self { roots: vec![root], cluster }
    }

    pub fn from_pem(text: &str) -> Result<Self, CredentialError> {
        Self::new(pem::read_certificates(text).ok_or(CredentialError::NoCertificate)?)
    }

    /// The one root among `text`'s that has this fingerprint; for a download that a join token pins.
    pub fn pinned(text: &str, fingerprint: &Digest) -> Result<Self, CredentialError> {
        let roots = pem::read_certificates(text).ok_or(CredentialError::NoCertificate)?;
        let root = roots.into_iter().find(|root| certificate::fingerprint(root) == *fingerprint);
        Self::new(vec![root.ok_or(CredentialError::NotPinned { expected: *fingerprint })?])
    }

    #[must_use]
    pub fn to_pem(&self) -> String {
        pem::certificates(&self.roots)
    }

    pub fn load(path: &Path) -> Result<Self, CredentialError> {
        let text = std::fs::read_to_string(path)
            .map_err(|cause| CredentialError::File { path: path.to_owned(), cause })?;
        Self::from_pem(&text)
            .map_err(|cause| CredentialError::Content { path: path.to_owned(), cause: Box::new(cause) })
    }

    pub fn save(&self, path: &Path) -> io::Result<()> {
        files::write_public(path, self.to_pem().as_bytes())
    }

    #[must_use]
    pub fn certificates(&self) -> &[CertificateDer<'static>] {
        &self.roots
    }

    #[must_use]
    pub fn fingerprints(&self) -> Vec<Digest> {
        self.roots.iter().map(certificate::fingerprint).collect()
    }

    #[must_use]
    pub fn contains(&self, fingerprint: &Digest) -> bool {
        self.fingerprints().contains(fingerprint)
    }

    /// The cluster that these roots belong to.
    #[must_use]
    pub fn cluster(&self) -> &ClusterId {
        &self.cluster
    }

    /// Trusts one more root of the same cluster. One that is already trusted changes nothing.
    pub fn add(&mut self, root: CertificateDer<'static>) -> Result<(), CredentialError> {
        if cluster_of_root(&root)? != self.cluster {
            return Err(CredentialError::MixedClusters);
        }
        if !self.roots.contains(&root) {
            self.roots.push(root);
        }
        Ok(())
    }

    /// Trusts this root no longer; the last one stays.
    pub fn retire(&mut self, fingerprint: &Digest) -> Result<(), CredentialError> {
        if !self.contains(fingerprint) {
            return Err(CredentialError::UnknownRoot(*fingerprint));
        }
        if self.roots.len() == 1 {
            return Err(CredentialError::LastRoot);
        }
        self.roots.retain(|root| certificate::fingerprint(root) != *fingerprint);
        Ok(())
    }
}

fn cluster_of_root(root: &CertificateDer<'_>) -> Result<ClusterId, CredentialError> {
    let parsed = certificate::parse(root).map_err(|_| CredentialError::Unreadable)?;
    let usable = parsed.is_ca()
        && parsed.subject() == parsed.issuer()
        && webpki::anchor_from_trusted_cert(root).is_ok();
    let cluster = usable.then(|| certificate::cluster_of_authority(root)).flatten();
    cluster.ok_or(CredentialError::NotARoot)
}
