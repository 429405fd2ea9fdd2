//! The keys that Secrets are encrypted with: `secrets.keys` in the data folder, one of 64 hex digits on each line. The first one
//! encrypts; the others decrypt what was encrypted with them before. Made by `init`, or at the first start without it.

use std::fmt;
use std::io;

use aws_lc_rs::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use aws_lc_rs::{hkdf, hmac};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_pki::files::{read_private, write_private};
use mvm_proto::Digest;
use mvm_proto::digest::{from_hex, hex};
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize as _, Zeroizing};

use super::SecretsError;
use crate::error::{BoxError, CoordinatorError};
use crate::paths::DataDir;

const KEY_BYTES: usize = 32;
const KEY_ID_BYTES: usize = 8;
const TAG_BYTES: usize = 16;
/// One that encrypts, and more than are ever needed to be read.
const MAX_KEYS: usize = 16;

/// What only the coordinator can read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Encrypted {
    /// The key's id.
    key: String,
    nonce: String,
    text: String,
}

struct Key {
    id: String,
    bytes: Zeroizing<[u8; KEY_BYTES]>,
}

/// The keys, the newest first. There is always one.
pub(crate) struct SecretKeys {
    newest: Key,
    older: Vec<Key>,
}

impl fmt::Debug for SecretKeys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretKeys {{ {} and {} older }}", self.newest.id, self.older.len())
    }
}

/// A length of key material.
struct Length(usize);

impl hkdf::KeyType for Length {
    fn len(&self) -> usize {
        self.0
    }
}

impl Key {
    fn new(bytes: Zeroizing<[u8; KEY_BYTES]>) -> Self {
        let mut id = [0; KEY_ID_BYTES];
        derive(&bytes, b"id", &mut id);
        Self { id: hex(&id), bytes }
    }

    fn make() -> Result<Self, SecretsError> {
        let mut bytes = Zeroizing::new([0; KEY_BYTES]);
        mvm_pki::random_bytes(&mut *bytes).map_err(|_| SecretsError::Random)?;
        Ok(Self::new(bytes))
    }

    fn cipher(&self) -> Result<LessSafeKey, SecretsError> {
        let key = UnboundKey::new(&AES_256_GCM, &*self.bytes).map_err(|_| SecretsError::Encrypt)?;
        Ok(LessSafeKey::new(key))
    }
}

/// Something derived from a key, which can't be had from it.
fn derive(key: &[u8; KEY_BYTES], label: &[u8], into: &mut [u8]) {
    let whole = hkdf::Salt::new(hkdf::HKDF_SHA256, b"mvm secrets key").extract(key);
    let derived = whole.expand(&[label], Length(into.len())).and_then(|derived| derived.fill(into));
    // Only a length that no hash can give is an error there.
    debug_assert!(derived.is_ok());
}

impl SecretKeys {
    /// The keys of the data folder, or a new one. To be called while the store's lock is held, so that two processes never make
    /// two.
    pub(crate) fn load_or_make(data: &DataDir) -> Result<Self, CoordinatorError> {
        let load =
            |cause| CoordinatorError::Load { what: "the keys of Secrets", path: data.secret_keys(), cause };
        match read_private(data.secret_keys()) {
            Ok(bytes) => Self::parse(&bytes).map_err(|cause| load(cause.into())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Self::make_file(data).map_err(load),
            Err(error) => Err(load(error.into())),
        }
    }

    /// A new key in a new file.
    pub(crate) fn make_file(data: &DataDir) -> Result<Self, BoxError> {
        let newest = Key::make()?;
        let mut line = Zeroizing::new(String::with_capacity(2 * KEY_BYTES + 1));
        push_hex(&mut line, &*newest.bytes);
        line.push('\n');
        write_private(data.secret_keys(), line.as_bytes())?;
        Ok(Self { newest, older: Vec::new() })
    }

    fn parse(bytes: &[u8]) -> Result<Self, String> {
        let rule = || format!("it must have 1 to {MAX_KEYS} lines, each of {} hex digits", 2 * KEY_BYTES);
        let text = std::str::from_utf8(bytes).map_err(|_| rule())?;
        let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
        let mut keys =
            lines.map(|line| from_hex(line).map(|bytes| Key::new(Zeroizing::new(bytes))).ok_or_else(rule));
        let newest = keys.next().ok_or_else(rule)??;
        let older: Vec<Key> = keys.collect::<Result<_, _>>()?;
        if older.len() >= MAX_KEYS {
            return Err(rule());
        }
        Ok(Self { newest, older })
    }

    pub(super) fn encrypt(&self, binding: &[u8], plain: &[u8]) -> Result<Encrypted, SecretsError> {
        let mut nonce = [0; NONCE_LEN];
        // 96 random bits: after a billion writes under one key, two are the same once in ten billion times.
        mvm_pki::random_bytes(&mut nonce).map_err(|_| SecretsError::Random)?;
        // Of its full size at once: a buffer that grows leaves copies behind.
        let mut text = Vec::with_capacity(plain.len() + TAG_BYTES);
        text.extend_from_slice(plain);
        let cipher = self.newest.cipher()?;
        let done = cipher.seal_in_place_append_tag(
            Nonce::assume_unique_for_key(nonce),
            Aad::from(binding),
            &mut text,
        );
        if done.is_err() {
            text.zeroize();
            return Err(SecretsError::Encrypt);
        }
        let (nonce, text) = (STANDARD.encode(nonce), STANDARD.encode(text));
        Ok(Encrypted { key: self.newest.id.clone(), nonce, text })
    }

    pub(super) fn decrypt(
        &self,
        binding: &[u8],
        encrypted: &Encrypted,
    ) -> Result<Zeroizing<Vec<u8>>, SecretsError> {
        let mut keys = std::iter::once(&self.newest).chain(&self.older);
        let key = keys
            .find(|key| key.id == encrypted.key)
            .ok_or_else(|| SecretsError::NoKey { key: encrypted.key.clone() })?;
        let nonce = STANDARD.decode(&encrypted.nonce).map_err(|_| SecretsError::Damaged)?;
        let nonce = Nonce::try_assume_unique_for_key(&nonce).map_err(|_| SecretsError::Damaged)?;
        let text = STANDARD.decode(&encrypted.text).map_err(|_| SecretsError::Damaged)?;
        let mut text = Zeroizing::new(text);
        let plain = key.cipher()?.open_in_place(nonce, Aad::from(binding), &mut text);
        let length = plain.map_err(|_| SecretsError::Damaged)?.len();
        text.truncate(length);
        Ok(text)
    }

    /// Whether it was encrypted with the key that encrypts now.
    pub(super) fn is_newest(&self, encrypted: &Encrypted) -> bool {
        encrypted.key == self.newest.id
    }

    /// A digest of something that may be guessed, for records that others may read: without the key no guess can be tried.
    pub(crate) fn tag(&self, of: &[u8]) -> Digest {
        let mut key = Zeroizing::new([0; KEY_BYTES]);
        derive(&self.newest.bytes, b"tags", &mut *key);
        let tag = hmac::sign(&hmac::Key::new(hmac::HMAC_SHA256, &*key), of);
        Digest::of(tag.as_ref())
    }
}

pub(super) fn push_hex(text: &mut String, bytes: &[u8]) {
    const DIGITS: &[u8; 16] = b"0123456789abcdef";
    for byte in bytes {
        text.push(char::from(DIGITS[usize::from(byte >> 4)]));
        text.push(char::from(DIGITS[usize::from(byte & 15)]));
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;

    #[test]
    fn the_file_is_made_once_and_only_its_owner_reads_it() {
        let dir = tempfile::tempdir().unwrap();
        let data = DataDir::new(dir.path());
        let made = SecretKeys::load_or_make(&data).unwrap();
        let encrypted = made.encrypt(b"a", b"hunter2").unwrap();
        let again = SecretKeys::load_or_make(&data).unwrap();
        assert_eq!(**again.decrypt(b"a", &encrypted).unwrap(), *b"hunter2");
        let mode = std::fs::metadata(data.secret_keys()).unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o600);
        assert!(!format!("{made:?}{encrypted:?}").contains("hunter2"));
        std::fs::set_permissions(data.secret_keys(), std::fs::Permissions::from_mode(0o644)).unwrap();
        let error = SecretKeys::load_or_make(&data).unwrap_err();
        assert!(mvm_proto::text::chain(&error).contains("chmod 600"));
    }

    #[test]
    fn the_first_key_encrypts_and_all_decrypt() {
        let (old, new) = ("11".repeat(32), "22".repeat(32));
        let keys = |lines: &[&str]| SecretKeys::parse(lines.join("\n").as_bytes()).unwrap();
        let encrypted = keys(&[&old]).encrypt(b"a", b"x").unwrap();
        let both = keys(&[&new, "", &old]);
        assert_eq!(**both.decrypt(b"a", &encrypted).unwrap(), *b"x");
        assert!(!both.is_newest(&encrypted) && both.is_newest(&both.encrypt(b"a", b"x").unwrap()));
        let missing = keys(&[&new]).decrypt(b"a", &encrypted).unwrap_err();
        assert!(matches!(missing, SecretsError::NoKey { .. }), "{missing}");
        for damaged in ["", "11", &format!("{old}0"), &"gg".repeat(32), &[old.as_str(); 17].join("\n")] {
            assert!(SecretKeys::parse(damaged.as_bytes()).is_err(), "{damaged}");
        }
    }

    #[test]
    fn what_was_changed_or_belongs_elsewhere_is_not_decrypted() {
        let keys = SecretKeys::parse("11".repeat(32).as_bytes()).unwrap();
        let encrypted = keys.encrypt(b"here", b"value").unwrap();
        assert_ne!(encrypted, keys.encrypt(b"here", b"value").unwrap(), "never twice the same");
        let refused = |binding: &[u8], encrypted: &Encrypted| {
            matches!(keys.decrypt(binding, encrypted), Err(SecretsError::Damaged))
        };
        assert!(refused(b"there", &encrypted));
        for at in 0..STANDARD.decode(&encrypted.text).unwrap().len() {
            let mut text = STANDARD.decode(&encrypted.text).unwrap();
            text[at] ^= 1;
            assert!(refused(b"here", &Encrypted { text: STANDARD.encode(text), ..encrypted.clone() }));
        }
        for text in ["", "AA==", "no base64"] {
            assert!(refused(b"here", &Encrypted { text: text.to_owned(), ..encrypted.clone() }));
            assert!(refused(b"here", &Encrypted { nonce: text.to_owned(), ..encrypted.clone() }));
        }
    }
}
