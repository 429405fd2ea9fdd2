//! Tenants' secrets bundles: one file per tenant below the secrets directory, known to a document by its digest.
//!
//! A bundle is hashed when its file changed since the last look, and never read for anything else here.

use std::collections::BTreeMap;
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mvm_host::{Dir, OpenHow};
use mvm_proto::{Digest, TenantId};
use zeroize::Zeroizing;

/// No bundle of secrets is larger; hashing more would hold up the pass that asks.
const MAX_BUNDLE_BYTES: u64 = 4 * 1024 * 1024;

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
    known: BTreeMap<TenantId, (Version, Digest)>,
}

impl Secrets {
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self { dir: dir.to_owned(), known: BTreeMap::new() }
    }

    /// Whether the tenant's bundle is the one that the document means; if not, why, in words for a person.
    pub fn check(&mut self, tenant: &TenantId, expected: &Digest) -> Result<(), String> {
        let path = self.dir.join(tenant.as_str());
        let found = self.digest(tenant).map_err(|error| match error.kind() {
            io::ErrorKind::NotFound => format!("there is no secrets bundle {}", path.display()),
            _ => format!(
                "could not read the secrets bundle {}: {}",
                path.display(),
                crate::text::chain(&error)
            ),
        })?;
        if found == *expected {
            return Ok(());
        }
        Err(format!("the secrets bundle {} is {found}, not {expected}", path.display()))
    }

    fn digest(&mut self, tenant: &TenantId) -> io::Result<Digest> {
        let mut file = Dir::open_root(&self.dir)?.open_file(tenant.as_str(), OpenHow::Read)?;
        let meta = file.metadata()?;
        if meta.len() > MAX_BUNDLE_BYTES {
            return Err(io::Error::other(format!("longer than {MAX_BUNDLE_BYTES} bytes")));
        }
        let version = Version {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        };
        if let Some((known, digest)) = self.known.get(tenant)
            && *known == version
        {
            return Ok(*digest);
        }
        // One buffer of the right size: one that grew would leave copies behind. It is wiped when it is dropped.
        let mut bytes = Zeroizing::new(vec![0; usize::try_from(meta.len()).unwrap_or(0)]);
        file.read_exact(&mut bytes)?;
        let digest = Digest::of(&bytes);
        self.known.insert(tenant.clone(), (version, digest));
        Ok(digest)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_bundle_is_ready_when_it_is_the_one_that_was_meant() {
        let dir = tempfile::tempdir().unwrap();
        let tenant: TenantId = "acme".parse().unwrap();
        let mut secrets = Secrets::new(dir.path());
        let meant = Digest::of(b"first");
        assert!(secrets.check(&tenant, &meant).unwrap_err().contains("there is no secrets bundle"));
        fs::write(dir.path().join("acme"), b"first").unwrap();
        assert_eq!(secrets.check(&tenant, &meant), Ok(()));
        fs::write(dir.path().join("acme"), b"second").unwrap();
        assert!(secrets.check(&tenant, &meant).unwrap_err().contains("not sha256:"));
        fs::remove_file(dir.path().join("acme")).unwrap();
        fs::create_dir(dir.path().join("acme")).unwrap();
        assert!(secrets.check(&tenant, &meant).unwrap_err().contains("not a regular file"));
    }
}
