//! Signing: ed25519 over DSSE's pre-authentication encoding of type and payload.
//!
//! Directors sign documents, image keys sign statements of digests, root keys sign who those are; [`crate::trust`]
//! decides what a signature is worth. A key's id is the digest of the key itself, so an id can't be claimed.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;

use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_proto::envelope::{Signature, Signed, pre_authentication_encoding};
use mvm_proto::{Digest, Envelope};
use serde::{Deserialize, Serialize};
use zeroize::Zeroizing;

use crate::{batch, files, pem};

const PUBLIC_KEY_BYTES: usize = 32;

#[derive(Debug, thiserror::Error)]
pub enum SigningError {
    #[error("could not use the signing key {path}")]
    File {
        path: PathBuf,
        #[source]
        cause: std::io::Error,
    },
    #[error("{path} does not hold one Ed25519 key (PKCS#8)")]
    Content { path: PathBuf },
    #[error("could not create a signing key")]
    Generate,
    #[error("a public key is {PUBLIC_KEY_BYTES} bytes of Ed25519 in base64")]
    PublicKey,
}

/// A private ed25519 key.
pub struct SigningKey {
    pkcs8: Zeroizing<Vec<u8>>,
    pair: Ed25519KeyPair,
    public: PublicKey,
    /// Of the public key: worked out once, because it goes with every signature.
    key_id: String,
}

/// A public ed25519 key; as text it is base64.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PublicKey([u8; PUBLIC_KEY_BYTES]);

impl SigningKey {
    pub fn generate() -> Result<Self, SigningError> {
        let pair = Ed25519KeyPair::generate().map_err(|_| SigningError::Generate)?;
        // Version 1 of PKCS#8 is what every other tool reads.
        let document = pair.to_pkcs8v1().map_err(|_| SigningError::Generate)?;
        Self::from_pkcs8(Zeroizing::new(document.as_ref().to_vec())).ok_or(SigningError::Generate)
    }

    fn from_pkcs8(pkcs8: Zeroizing<Vec<u8>>) -> Option<Self> {
        let pair = Ed25519KeyPair::from_pkcs8(&pkcs8).ok()?;
        let public = PublicKey(pair.public_key().as_ref().try_into().ok()?);
        Some(Self { pkcs8, pair, public, key_id: public.key_id() })
    }

    /// Reads what [`SigningKey::to_file`] wrote; refused when others could have read it.
    pub fn from_file(path: &Path) -> Result<Self, SigningError> {
        let bytes =
            files::read_private(path).map_err(|cause| SigningError::File { path: path.to_owned(), cause })?;
        let key = std::str::from_utf8(&bytes).ok().and_then(pem::read_private_key);
        key.and_then(Self::from_pkcs8).ok_or_else(|| SigningError::Content { path: path.to_owned() })
    }

    /// Writes the key as PKCS#8 PEM, 0600.
    pub fn to_file(&self, path: &Path) -> Result<(), SigningError> {
        let mut text = Zeroizing::new(String::new());
        pem::push(&mut text, pem::PRIVATE_KEY, &self.pkcs8);
        files::write_private(path, text.as_bytes())
            .map_err(|cause| SigningError::File { path: path.to_owned(), cause })
    }

    #[must_use]
    pub fn public(&self) -> PublicKey {
        self.public
    }

    #[must_use]
    pub fn key_id(&self) -> String {
        self.key_id.clone()
    }

    #[must_use]
    pub fn sign(&self, payload_type: &str, payload: &[u8]) -> Signature {
        let signed = pre_authentication_encoding(payload_type, payload);
        Signature { key_id: self.key_id(), bytes: self.pair.sign(&signed).as_ref().to_vec() }
    }

    /// Signs payloads of one type together: a signature for each of these digests, in their order.
    #[must_use]
    pub fn sign_batch(&self, payload_type: &str, digests: &[Digest]) -> Vec<Signature> {
        let signatures = batch::sign(payload_type, digests, |root| self.pair.sign(root).as_ref().to_vec());
        signatures.into_iter().map(|bytes| Signature { key_id: self.key_id(), bytes }).collect()
    }
}

impl fmt::Debug for SigningKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SigningKey").field("public", &self.public).finish_non_exhaustive()
    }
}

impl PublicKey {
    /// The hexadecimal SHA-256 of the raw key.
    #[must_use]
    pub fn key_id(&self) -> String {
        Digest::of(&self.0).hex()
    }

    #[must_use]
    pub fn verifies(&self, signed: &[u8], signature: &[u8]) -> bool {
        UnparsedPublicKey::new(&ED25519, &self.0).verify(signed, signature).is_ok()
    }

    /// Whether the key signed this, by itself or in a batch.
    #[must_use]
    pub fn vouches_for(&self, signed: &Signed<'_>, signature: &[u8]) -> bool {
        if batch::is_of_batch(signature) {
            batch::verifies(signed, signature, |root, bytes| self.verifies(root, bytes))
        } else {
            self.verifies(&signed.encoding(), signature)
        }
    }
}

impl fmt::Display for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&STANDARD.encode(self.0))
    }
}

impl fmt::Debug for PublicKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for PublicKey {
    type Err = SigningError;
    fn from_str(text: &str) -> Result<Self, SigningError> {
        let bytes = STANDARD.decode(text).map_err(|_| SigningError::PublicKey)?;
        bytes.try_into().map(Self).map_err(|_| SigningError::PublicKey)
    }
}

impl TryFrom<String> for PublicKey {
    type Error = SigningError;
    fn try_from(text: String) -> Result<Self, SigningError> {
        text.parse()
    }
}

impl From<PublicKey> for String {
    fn from(key: PublicKey) -> String {
        key.to_string()
    }
}

/// An envelope of this payload, signed by each of `keys`.
#[must_use]
pub fn seal(payload_type: &str, payload: Vec<u8>, keys: &[&SigningKey]) -> Envelope {
    let signatures = keys.iter().map(|key| key.sign(payload_type, &payload)).collect();
    Envelope { payload_type: payload_type.to_owned(), payload, signatures }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_of_one_key_one_type_and_one_payload() {
        let (key, other) = (SigningKey::generate().unwrap(), SigningKey::generate().unwrap());
        let signature = key.sign("type", b"payload");
        let encoded = pre_authentication_encoding("type", b"payload");
        assert!(key.public().verifies(&encoded, &signature.bytes));
        assert!(!other.public().verifies(&encoded, &signature.bytes));
        for (kind, payload) in [("type", b"payloae"), ("typf", b"payload")] {
            assert!(!key.public().verifies(&pre_authentication_encoding(kind, payload), &signature.bytes));
        }
    }

    #[test]
    fn a_key_reads_back_from_its_0600_file() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("signing/director.key");
        let key = SigningKey::generate().unwrap();
        key.to_file(&path).unwrap();
        assert_eq!(SigningKey::from_file(&path).unwrap().public(), key.public());
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        std::fs::write(&path, "nonsense").unwrap();
        assert!(matches!(SigningKey::from_file(&path), Err(SigningError::Content { .. })));
    }

    #[test]
    fn a_public_key_reads_back_from_its_text_and_from_nothing_looser() {
        let key = SigningKey::generate().unwrap().public();
        assert_eq!(key.to_string().parse::<PublicKey>().unwrap(), key);
        for bad in [String::new(), format!("{key}="), format!(" {key}"), "AAAA".to_owned()] {
            assert!(bad.parse::<PublicKey>().is_err(), "{bad}");
        }
    }
}
