//! Signing: ed25519 over DSSE's pre-authentication encoding.

use std::path::{Path, PathBuf};

use mvm_proto::Envelope;
use mvm_proto::envelope::Signature;

#[derive(Debug, thiserror::Error)]
pub enum SigningError {
    #[error("could not use the signing key {path}")]
    File {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
}

/// A private ed25519 key.
#[derive(Debug)]
pub struct SigningKey {}

/// A public ed25519 key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PublicKey([u8; 32]);

impl SigningKey {
    pub fn generate() -> Result<Self, SigningError> {
        todo!()
    }

    pub fn from_file(path: &Path) -> Result<Self, SigningError> {
        let _ = path;
        todo!()
    }

    /// Writes the key as PKCS#8 PEM, 0600.
    pub fn to_file(&self, path: &Path) -> Result<(), SigningError> {
        let _ = path;
        todo!()
    }

    #[must_use]
    pub fn public(&self) -> PublicKey {
        todo!()
    }

    #[must_use]
    pub fn key_id(&self) -> String {
        self.public().key_id()
    }

    #[must_use]
    pub fn sign(&self, payload_type: &str, payload: &[u8]) -> Signature {
        let _ = (payload_type, payload);
        todo!()
    }
}

impl PublicKey {
    /// The hexadecimal SHA-256 of the raw key.
    #[must_use]
    pub fn key_id(&self) -> String {
        todo!()
    }

    #[must_use]
    pub fn verifies(&self, signed: &[u8], signature: &[u8]) -> bool {
        let _ = (signed, signature);
        todo!()
    }
}

/// An envelope of this payload, signed by each of `keys`.
#[must_use]
pub fn seal(payload_type: &str, payload: Vec<u8>, keys: &[&SigningKey]) -> Envelope {
    let _ = (payload_type, payload, keys);
    todo!()
}
