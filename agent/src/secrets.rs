//! Tenants' secrets bundles: one file per tenant below the secrets directory, known to a document by its digest.
//!
//! A bundle is opaque here. It is hashed when its file changed since the last look, and read once more for each guest
//! that is given it, into a buffer that is wiped. The key of a tenant's snapshots lies beside it ([`mvm_vmm::snapshot_key`]).

use std::collections::BTreeMap;
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mvm_host::{Dir, OpenHow};
use mvm_proto::guest::MAX_SECRETS_BYTES;
use mvm_proto::{Digest, TenantId};
use mvm_vmm::snapshot_key::TenantKey;
use nix::sys::statfs::{FsType, TMPFS_MAGIC, statfs};
use parking_lot::Mutex;
use zeroize::Zeroizing;

/// Why a tenant's bundle can't be used, in words for a person.
#[derive(Debug, thiserror::Error)]
pub enum SecretsError {
    #[error("there is no secrets bundle {}", path.display())]
    Missing { path: PathBuf },
    #[error("could not read the secrets bundle {}", path.display())]
    Unreadable {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("the secrets bundle {} is {found}, not {expected}", path.display())]
    Other { path: PathBuf, found: Digest, expected: Digest },
}

/// What tells one version of a file from another without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

#[derive(Debug)]
pub struct Secrets {
    dir: PathBuf,
    known: Mutex<BTreeMap<TenantId, (Version, Digest)>>,
}

impl Secrets {
    /// A folder on a disk is said, and used: it is the operator's to choose.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        if is_on_a_disk(dir) {
            let fix = "mount -t tmpfs -o mode=0700,noswap tmpfs DIR";
            tracing::warn!(dir = %dir.display(), fix, "tenants' secrets are on a disk; keep them in memory");
        }
        Self { dir: dir.to_owned(), known: Mutex::default() }
    }

    /// Whether the tenant's bundle is the one that the document means.
    pub fn check(&self, tenant: &TenantId, expected: &Digest) -> Result<(), SecretsError> {
        let found = self.digest(tenant).map_err(|cause| self.unreadable(tenant, cause))?;
        self.compare(tenant, found, expected)
    }

    /// The tenant's bundle, if it is the one that is meant.
    pub fn read(&self, tenant: &TenantId, expected: &Digest) -> Result<Zeroizing<Vec<u8>>, SecretsError> {
        let read = self.open(tenant).and_then(|(mut file, meta)| read_wiped(&mut file, &meta));
        let bytes = read.map_err(|cause| self.unreadable(tenant, cause))?;
        self.compare(tenant, Digest::of(&bytes), expected)?;
        Ok(bytes)
    }

    /// Where the key of the tenant's snapshots is.
    #[must_use]
    pub fn snapshot_key(&self, tenant: &TenantId) -> TenantKey {
        TenantKey::new(&self.dir, tenant)
    }

    fn path(&self, tenant: &TenantId) -> PathBuf {
        self.dir.join(tenant.as_str())
    }

    fn unreadable(&self, tenant: &TenantId, cause: io::Error) -> SecretsError {
        let path = self.path(tenant);
        match cause.kind() {
            io::ErrorKind::NotFound => SecretsError::Missing { path },
            _ => SecretsError::Unreadable { path, cause },
        }
    }

    fn compare(&self, tenant: &TenantId, found: Digest, expected: &Digest) -> Result<(), SecretsError> {
        if found == *expected {
            return Ok(());
        }
        Err(SecretsError::Other { path: self.path(tenant), found, expected: *expected })
    }

    fn open(&self, tenant: &TenantId) -> io::Result<(File, Metadata)> {
        let file = Dir::open_root(&self.dir)?.open_file(tenant.as_str(), OpenHow::Read)?;
        let meta = file.metadata()?;
        // Hashing more would hold up the pass that asks, and no guest takes more.
        if meta.len() > MAX_SECRETS_BYTES {
            return Err(io::Error::other(format!("longer than {MAX_SECRETS_BYTES} bytes")));
        }
        Ok((file, meta))
    }

    fn digest(&self, tenant: &TenantId) -> io::Result<Digest> {
        let (mut file, meta) = self.open(tenant)?;
        let version = Version {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        };
        let mut all_known = self.known.lock();
        if let Some((known, digest)) = all_known.get(tenant)
            && *known == version
        {
            return Ok(*digest);
        }
        let digest = Digest::of(&read_wiped(&mut file, &meta)?);
        all_known.insert(tenant.clone(), (version, digest));
        Ok(digest)
    }
}

fn is_on_a_disk(dir: &Path) -> bool {
    const RAMFS_MAGIC: FsType = FsType(0x8584_58f6);
    statfs(dir).is_ok_and(|found| ![TMPFS_MAGIC, RAMFS_MAGIC].contains(&found.filesystem_type()))
}

/// Into one buffer of the right size: one that grew would leave copies behind.
fn read_wiped(file: &mut File, meta: &Metadata) -> io::Result<Zeroizing<Vec<u8>>> {
    let mut bytes = Zeroizing::new(vec![0; usize::try_from(meta.len()).unwrap_or(0)]);
    file.read_exact(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use mvm_proto::text::chain;

    #[test]
    fn a_bundle_is_ready_when_it_is_the_one_that_was_meant() {
        let dir = tempfile::tempdir().unwrap();
        let tenant: TenantId = "acme".parse().unwrap();
        let secrets = Secrets::new(dir.path());
        let meant = Digest::of(b"first");
        // Looking and reading agree.
        let refused = || {
            let why = chain(&secrets.check(&tenant, &meant).unwrap_err());
            assert_eq!(chain(&secrets.read(&tenant, &meant).unwrap_err()), why);
            why
        };
        assert!(refused().contains("there is no secrets bundle"));
        fs::write(dir.path().join("acme"), b"first").unwrap();
        secrets.check(&tenant, &meant).unwrap();
        assert_eq!(**secrets.read(&tenant, &meant).unwrap(), *b"first");
        fs::write(dir.path().join("acme"), b"second").unwrap();
        assert!(refused().contains("not sha256:"));
        fs::write(dir.path().join("acme"), vec![0; 4 * 1024 * 1024 + 1]).unwrap();
        assert!(refused().contains("longer than"));
        fs::remove_file(dir.path().join("acme")).unwrap();
        fs::create_dir(dir.path().join("acme")).unwrap();
        assert!(refused().contains("not a regular file"));
    }
}
