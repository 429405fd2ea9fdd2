//! The key of a tenant's encrypted snapshots: a file beside its secrets bundle, known to a snapshot by its id.
//!
//! It is read when it is needed and wiped after; its id tells one key from another, and nothing else about it.

use std::fmt;
use std::io::{self, Read as _};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use aws_lc_rs::hkdf;
use mvm_host::{Dir, OpenHow};
use mvm_proto::TenantId;
use serde::{Deserialize, Serialize};
use zeroize::{Zeroize as _, Zeroizing};

/// What a tenant's key is called in the secrets directory, after the tenant. No tenant's name has a dot, so that no
/// bundle is taken for a key.
pub const KEY_SUFFIX: &str = ".snapshot-key";

const KEY_BYTES: usize = 32;
/// As hex digits, and with the end of line that editors and shells leave.
const KEY_HEX: usize = 2 * KEY_BYTES;
const MAX_KEY_FILE_BYTES: u64 = KEY_HEX as u64 + 1;

const KEY_ID_BYTES: usize = 16;

const READABLE_BY_OTHERS: u32 = 0o077;

/// Why a tenant's key can't be used, in words for a person. What was encrypted stays as it is.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    #[error(
        "there is no snapshot key {}; put 32 random bytes or 64 hex digits there, for its owner alone to read",
        path.display()
    )]
    Missing { path: PathBuf },
    #[error("could not read the snapshot key {}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("the snapshot key {} {reason}", path.display())]
    Refused { path: PathBuf, reason: String },
    #[error("the snapshot key {} is {found}, and {needed} is needed; put that one back", path.display())]
    Other { path: PathBuf, found: KeyId, needed: KeyId },
    #[error("no tenant was named, and so no snapshot key")]
    NoTenant,
}

/// Tells one key from another.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct KeyId(String);

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// A tenant's key.
pub struct SnapshotKey(Zeroizing<[u8; KEY_BYTES]>);

impl fmt::Debug for SnapshotKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SnapshotKey").field(&self.id()).finish()
    }
}

struct IdLength;

impl hkdf::KeyType for IdLength {
    fn len(&self) -> usize {
        KEY_ID_BYTES
    }
}

impl SnapshotKey {
    #[must_use]
    pub fn new(bytes: [u8; KEY_BYTES]) -> Self {
        Self(Zeroizing::new(bytes))
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &*self.0
    }

    /// Derived from the key, which can't be had from it.
    #[must_use]
    pub fn id(&self) -> KeyId {
        let whole = hkdf::Salt::new(hkdf::HKDF_SHA256, b"mvm snapshot key id").extract(self.bytes());
        let mut id = [0; KEY_ID_BYTES];
        let derived = whole.expand(&[b"id"], IdLength).and_then(|derived| derived.fill(&mut id));
        // Only a length that no hash can give is an error there.
        debug_assert!(derived.is_ok());
        KeyId(id.iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// Where a tenant's key is found, each time that it is needed.
#[derive(Debug, Clone)]
pub struct TenantKey {
    dir: PathBuf,
    tenant: TenantId,
}

impl TenantKey {
    #[must_use]
    pub fn new(secrets_dir: &Path, tenant: &TenantId) -> Self {
        Self { dir: secrets_dir.to_owned(), tenant: tenant.clone() }
    }

    #[must_use]
    pub fn tenant(&self) -> &TenantId {
        &self.tenant
    }

    fn name(&self) -> String {
        format!("{}{KEY_SUFFIX}", self.tenant)
    }

    fn path(&self) -> PathBuf {
        self.dir.join(self.name())
    }

    pub fn read(&self) -> Result<SnapshotKey, KeyError> {
        let path = self.path();
        let refused = |reason: String| KeyError::Refused { path: path.clone(), reason };
        let unreadable = |cause: io::Error| match cause.kind() {
            io::ErrorKind::NotFound => KeyError::Missing { path: path.clone() },
            _ => KeyError::Unreadable { path: path.clone(), cause },
        };
        let opened = Dir::open_root(&self.dir).and_then(|dir| dir.open_file(self.name(), OpenHow::Read));
        let mut file = opened.map_err(|error| unreadable(error.into()))?;
        let meta = file.metadata().map_err(unreadable)?;
        if meta.mode() & READABLE_BY_OTHERS != 0 {
            return Err(refused(
                "can be read by others than its owner; forbid it with chmod 0400".to_owned(),
            ));
        }
        if meta.len() > MAX_KEY_FILE_BYTES {
            return Err(refused(shape(meta.len())));
        }
        // Of the right size from the beginning: one that grew would leave copies behind.
        let mut bytes = Zeroizing::new(vec![0; usize::try_from(meta.len()).unwrap_or(0)]);
        file.read_exact(&mut bytes).map_err(unreadable)?;
        parse(&bytes).ok_or_else(|| refused(shape(meta.len())))
    }

    /// The key, if it is the one that something was encrypted with.
    pub fn read_again(&self, needed: &KeyId) -> Result<SnapshotKey, KeyError> {
        let key = self.read()?;
        let found = key.id();
        if found != *needed {
            return Err(KeyError::Other { path: self.path(), found, needed: needed.clone() });
        }
        Ok(key)
    }
}

fn shape(found_bytes: u64) -> String {
    format!("is neither 32 bytes nor 64 hex digits, but of {found_bytes} bytes; write it anew")
}

fn parse(bytes: &[u8]) -> Option<SnapshotKey> {
    if let Ok(raw) = <[u8; KEY_BYTES]>::try_from(bytes) {
        return Some(SnapshotKey::new(raw));
    }
    let digits = bytes.strip_suffix(b"\n").unwrap_or(bytes);
    if digits.len() != KEY_HEX {
        return None;
    }
    let digit = |byte: u8| (byte as char).to_digit(16).and_then(|value| u8::try_from(value).ok());
    let mut raw = [0; KEY_BYTES];
    for (byte, pair) in raw.iter_mut().zip(digits.chunks_exact(2)) {
        match (digit(pair[0]), digit(pair[1])) {
            (Some(high), Some(low)) => *byte = high << 4 | low,
            _ => {
                raw.zeroize();
                return None;
            }
        }
    }
    let key = SnapshotKey::new(raw);
    raw.zeroize();
    Some(key)
}

#[cfg(test)]
mod tests {
    use std::fs::{self, Permissions};
    use std::os::unix::fs::PermissionsExt as _;

    use super::*;
    use mvm_proto::text::chain;

    #[test]
    fn a_key_is_32_bytes_or_64_digits_that_only_its_owner_reads() {
        let dir = tempfile::tempdir().unwrap();
        let keys = TenantKey::new(dir.path(), &"acme".parse().unwrap());
        let path = dir.path().join("acme.snapshot-key");
        let put = |bytes: &[u8], mode: u32| {
            let _ = fs::remove_file(&path);
            fs::write(&path, bytes).unwrap();
            fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
        };
        let refused = |what: &str| {
            let why = chain(&keys.read().unwrap_err());
            assert!(why.contains(what) && why.contains("acme.snapshot-key"), "{why}");
        };
        refused("there is no snapshot key");
        put(&[7; 32], 0o400);
        let id = keys.read().unwrap().id();
        for same in ["07".repeat(32), format!("{}\n", "07".repeat(32))] {
            put(same.as_bytes(), 0o600);
            assert_eq!(keys.read().unwrap().id(), id);
        }
        put(&[7; 32], 0o440);
        refused("chmod 0400");
        for (bad, length) in [(vec![], "0 bytes"), (vec![7; 31], "31 bytes"), (vec![7; 4096], "4096 bytes")] {
            put(&bad, 0o400);
            refused(length);
        }
        put("0g".repeat(32).as_bytes(), 0o400);
        refused("neither 32 bytes nor 64 hex digits");
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        refused("not a regular file");
    }

    #[test]
    fn another_key_is_told_from_the_one_that_is_needed() {
        let dir = tempfile::tempdir().unwrap();
        let keys = TenantKey::new(dir.path(), &"acme".parse().unwrap());
        let path = dir.path().join("acme.snapshot-key");
        fs::write(&path, [1; 32]).unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o400)).unwrap();
        let needed = SnapshotKey::new([2; 32]).id();
        let why = keys.read_again(&needed).unwrap_err();
        assert!(matches!(&why, KeyError::Other { .. }) && why.to_string().contains(&needed.to_string()));
        assert_eq!(keys.read_again(&SnapshotKey::new([1; 32]).id()).unwrap().bytes(), [1; 32]);
        assert!(!format!("{:?}", keys.read().unwrap()).contains("[1, 1"));
    }
}
