//! Secrets bundles: one file per tenant below the secrets directory, and one for each pool that has its own, known to a
//! document by their digests. An operator puts these there. What the coordinator delivers is beside them, by its digest.
//!
//! A bundle is opaque here. It is hashed when its file changed since the last look, and read once more for each guest
//! that is given it, into a buffer that is wiped. The key of a tenant's snapshots lies beside it ([`mvm_vmm::snapshot_key`]).

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{File, Metadata};
use std::io::{self, Read};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use mvm_host::{Dir, OpenHow};
use mvm_proto::guest::MAX_SECRETS_BYTES;
use mvm_proto::{Digest, PoolId, TenantId};
use mvm_vmm::snapshot_key::{KEY_SUFFIX, TenantKey};
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

/// Why what a tenant has in the secrets folder could not be removed.
#[derive(Debug, thiserror::Error)]
pub enum SecretsNotRemoved {
    #[error("could not list the secrets in {}", path.display())]
    Folder {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
    #[error("could not remove {}", path.display())]
    File {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Why a bundle that was delivered is not kept.
#[derive(Debug, thiserror::Error)]
pub enum SecretsNotKept {
    #[error("what came as the bundle {expected} is {found}")]
    Other { expected: Digest, found: Digest },
    #[error("could not write the secrets bundle {}", path.display())]
    Unwritable {
        path: PathBuf,
        #[source]
        cause: io::Error,
    },
}

/// Bundles by their tenants and digests.
pub type BundleSet = BTreeSet<(TenantId, Digest)>;

/// What tells one version of a file from another without reading it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Version {
    device: u64,
    inode: u64,
    size: u64,
    modified: (i64, i64),
}

/// Which bundle is meant.
#[derive(Debug, Clone, Copy)]
pub struct BundleOf<'a> {
    pub tenant: &'a TenantId,
    /// Whose guests are to be given it.
    pub pool: &'a PoolId,
    /// The pool's own, not its tenant's.
    pub own: bool,
}

impl BundleOf<'_> {
    /// The files that it may be: the one where it belongs, and the other one. A digest says which secrets are meant, and a
    /// document may name the same ones in another place by now.
    fn files(self) -> [String; 2] {
        let (tenant, pool) = (self.tenant.to_string(), pool_file(self.tenant, self.pool));
        if self.own { [pool, tenant] } else { [tenant, pool] }
    }
}

/// The name of a pool's own bundle: no tenant's, and nothing of any tenant's.
fn pool_file(tenant: &TenantId, pool: &PoolId) -> String {
    format!("pool.{tenant}.{pool}")
}

/// What a delivered bundle is called, before its tenant and its digest: no tenant's file, and no pool's.
const DELIVERED: &str = "bundle.";
/// One that is being written, or was when its agent ended.
const UNFINISHED: &str = ".bundle.";

fn delivered_file(tenant: &TenantId, digest: &Digest) -> String {
    format!("{DELIVERED}{tenant}.{}", digest.hex())
}

/// Whether a file of this name is a tenant's alone. No id has a dot.
fn is_of_tenant(name: &str, tenant: &TenantId) -> bool {
    let tenant = tenant.as_str();
    let is_after = |start: &str| {
        let of = name.strip_prefix(start).and_then(|rest| rest.split_once('.'));
        of.is_some_and(|(of, _)| of == tenant)
    };
    name == tenant
        || name.strip_suffix(KEY_SUFFIX) == Some(tenant)
        || ["pool.", DELIVERED, UNFINISHED].into_iter().any(is_after)
}

#[derive(Debug)]
pub struct Secrets {
    dir: PathBuf,
    /// By the name of the file.
    known: Mutex<BTreeMap<String, (Version, Digest)>>,
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

    /// Whether the bundle is the one that the document means.
    pub fn check(&self, of: BundleOf<'_>, expected: &Digest) -> Result<(), SecretsError> {
        self.any(of, expected, |file| self.check_file(file, expected))
    }

    /// Whether the tenant's bundle is, for those of its pools that have none of their own.
    pub fn check_tenant(&self, tenant: &TenantId, expected: &Digest) -> Result<(), SecretsError> {
        self.check_file(tenant.as_str(), expected)
    }

    fn check_file(&self, file: &str, expected: &Digest) -> Result<(), SecretsError> {
        let found = self.digest(file).map_err(|cause| self.unreadable(file, cause))?;
        self.compare(file, found, expected)
    }

    /// The bundle, if it is the one that is meant.
    pub fn read(&self, of: BundleOf<'_>, expected: &Digest) -> Result<Zeroizing<Vec<u8>>, SecretsError> {
        self.any(of, expected, |file| {
            let read = self.open(file).and_then(|(mut file, meta)| read_wiped(&mut file, &meta));
            let bytes = read.map_err(|cause| self.unreadable(file, cause))?;
            self.compare(file, Digest::of(&bytes), expected)?;
            Ok(bytes)
        })
    }

    /// The first of a bundle's files that is the one, or what was delivered of this digest. Where none is, what is wrong with the
    /// one where it belongs.
    fn any<T>(
        &self,
        of: BundleOf<'_>,
        expected: &Digest,
        look: impl Fn(&str) -> Result<T, SecretsError>,
    ) -> Result<T, SecretsError> {
        let [first, second] = of.files();
        let delivered = || look(&delivered_file(of.tenant, expected));
        look(&first).or_else(|why| look(&second).or_else(|_| delivered()).map_err(|_| why))
    }

    /// Keeps a bundle that was delivered. It is whole or not there.
    pub fn keep(&self, tenant: &TenantId, expected: &Digest, bytes: &[u8]) -> Result<(), SecretsNotKept> {
        let found = Digest::of(bytes);
        if found != *expected {
            return Err(SecretsNotKept::Other { expected: *expected, found });
        }
        let path = self.dir.join(delivered_file(tenant, expected));
        mvm_pki::files::write_private(&path, bytes)
            .map_err(|cause| SecretsNotKept::Unwritable { path, cause })
    }

    /// Removes delivered bundles that are none of these.
    pub fn retain(&self, wanted: &BundleSet) -> Result<(), SecretsNotRemoved> {
        let wanted: BTreeSet<String> =
            wanted.iter().map(|(tenant, digest)| delivered_file(tenant, digest)).collect();
        let is_delivered = |name: &str| name.starts_with(DELIVERED) || name.starts_with(UNFINISHED);
        self.remove_where(|name| is_delivered(name) && !wanted.contains(name))
    }

    /// Where the key of the tenant's snapshots is.
    #[must_use]
    pub fn snapshot_key(&self, tenant: &TenantId) -> TenantKey {
        TenantKey::new(&self.dir, tenant)
    }

    /// Removes a tenant's bundle, those of its pools and the key of its snapshots. What is not there is as good as removed.
    pub fn remove_tenant(&self, tenant: &TenantId) -> Result<(), SecretsNotRemoved> {
        self.remove_where(|name| is_of_tenant(name, tenant))
    }

    fn remove_where(&self, is_meant: impl Fn(&str) -> bool) -> Result<(), SecretsNotRemoved> {
        let unreadable = |cause| SecretsNotRemoved::Folder { path: self.dir.clone(), cause };
        let entries = match std::fs::read_dir(&self.dir) {
            Ok(entries) => entries,
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(cause) => return Err(unreadable(cause)),
        };
        for entry in entries {
            let name = entry.map_err(unreadable)?.file_name();
            let Some(name) = name.to_str().filter(|name| is_meant(name)) else { continue };
            let path = self.dir.join(name);
            match std::fs::remove_file(&path) {
                Ok(()) => drop(self.known.lock().remove(name)),
                Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
                Err(cause) => return Err(SecretsNotRemoved::File { path, cause }),
            }
        }
        Ok(())
    }

    fn unreadable(&self, file: &str, cause: io::Error) -> SecretsError {
        let path = self.dir.join(file);
        match cause.kind() {
            io::ErrorKind::NotFound => SecretsError::Missing { path },
            _ => SecretsError::Unreadable { path, cause },
        }
    }

    fn compare(&self, file: &str, found: Digest, expected: &Digest) -> Result<(), SecretsError> {
        if found == *expected {
            return Ok(());
        }
        Err(SecretsError::Other { path: self.dir.join(file), found, expected: *expected })
    }

    fn open(&self, file: &str) -> io::Result<(File, Metadata)> {
        let file = Dir::open_root(&self.dir)?.open_file(file, OpenHow::Read)?;
        let meta = file.metadata()?;
        // Hashing more would hold up the pass that asks, and no guest takes more.
        if meta.len() > MAX_SECRETS_BYTES {
            return Err(io::Error::other(format!("longer than {MAX_SECRETS_BYTES} bytes")));
        }
        Ok((file, meta))
    }

    fn digest(&self, name: &str) -> io::Result<Digest> {
        let (mut file, meta) = self.open(name)?;
        let version = Version {
            device: meta.dev(),
            inode: meta.ino(),
            size: meta.len(),
            modified: (meta.mtime(), meta.mtime_nsec()),
        };
        let mut all_known = self.known.lock();
        if let Some((known, digest)) = all_known.get(name)
            && *known == version
        {
            return Ok(*digest);
        }
        let digest = Digest::of(&read_wiped(&mut file, &meta)?);
        all_known.insert(name.to_owned(), (version, digest));
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
        let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
        let of = BundleOf { tenant: &tenant, pool: &pool, own: false };
        let secrets = Secrets::new(dir.path());
        let meant = Digest::of(b"first");
        // Looking and reading agree.
        let refused = || {
            let why = chain(&secrets.check(of, &meant).unwrap_err());
            assert_eq!(chain(&secrets.read(of, &meant).unwrap_err()), why);
            why
        };
        assert!(refused().contains("there is no secrets bundle"));
        fs::write(dir.path().join("acme"), b"first").unwrap();
        secrets.check(of, &meant).unwrap();
        assert_eq!(**secrets.read(of, &meant).unwrap(), *b"first");
        fs::write(dir.path().join("acme"), b"second").unwrap();
        assert!(refused().contains("not sha256:"));
        fs::write(dir.path().join("acme"), vec![0; 4 * 1024 * 1024 + 1]).unwrap();
        assert!(refused().contains("longer than"));
        fs::remove_file(dir.path().join("acme")).unwrap();
        fs::create_dir(dir.path().join("acme")).unwrap();
        assert!(refused().contains("not a regular file"));
    }

    #[test]
    fn what_is_a_tenants_alone_goes_with_it_and_nothing_else() {
        let dir = tempfile::tempdir().unwrap();
        let secrets = Secrets::new(dir.path());
        let its = [
            "acme",
            "acme.snapshot-key",
            "pool.acme.web",
            "pool.acme.acme",
            "bundle.acme.00",
            ".bundle.acme.00.11.tmp",
        ];
        let others = [
            ".bundle.acme-2.00.11.tmp",
            "acme-2",
            "acme-2.snapshot-key",
            "bundle.acme-2.00",
            "bundle.other.acme",
            "pool.acme-2.acme",
            "pool.other.acme",
            "s3.acme",
            "s3.x.acme",
        ];
        for name in its.iter().chain(&others) {
            fs::write(dir.path().join(name), b"secret").unwrap();
        }
        let tenant = "acme".parse().unwrap();
        for _ in 0..2 {
            secrets.remove_tenant(&tenant).unwrap();
        }
        let left =
            fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap());
        let mut left: Vec<_> = left.collect();
        left.sort();
        assert_eq!(left, others);
        fs::create_dir(dir.path().join("acme")).unwrap();
        assert!(chain(&secrets.remove_tenant(&tenant).unwrap_err()).starts_with("could not remove "));
        // A node without secrets has none of it.
        Secrets::new(&dir.path().join("none")).remove_tenant(&tenant).unwrap();
    }

    #[test]
    fn a_delivered_bundle_is_found_by_its_digest_until_it_is_wanted_no_more() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("secrets");
        let (tenant, pool): (TenantId, PoolId) = ("acme".parse().unwrap(), "web".parse().unwrap());
        let of = BundleOf { tenant: &tenant, pool: &pool, own: true };
        let secrets = Secrets::new(&folder);
        let (old, new) = (Digest::of(b"old"), Digest::of(b"new"));
        assert!(matches!(secrets.keep(&tenant, &new, b"other"), Err(SecretsNotKept::Other { .. })));
        for (digest, bytes) in [(old, b"old"), (new, b"new")] {
            assert!(secrets.check(of, &digest).is_err());
            secrets.keep(&tenant, &digest, bytes).unwrap();
            secrets.check(of, &digest).unwrap();
        }
        let mode = |path: &Path| fs::metadata(path).unwrap().mode() & 0o7777;
        assert_eq!((mode(&folder), mode(&folder.join(delivered_file(&tenant, &new)))), (0o700, 0o600));
        // Both are there for as long as an instance that was started with the old one is.
        assert_eq!(**secrets.read(of, &old).unwrap(), *b"old");
        let other = "other".parse().unwrap();
        assert!(secrets.check(BundleOf { tenant: &other, ..of }, &new).is_err(), "another tenant's");
        fs::write(folder.join(".bundle.acme.00.tmp"), b"half").unwrap();
        fs::write(folder.join("acme"), b"an operator's").unwrap();
        secrets.retain(&BTreeSet::from([(tenant.clone(), new)])).unwrap();
        assert!(secrets.check(of, &old).is_err() && secrets.check(of, &new).is_ok());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "the new one, and the operator's");
        // A file that was changed is not the one.
        fs::write(folder.join(delivered_file(&tenant, &new)), b"changed").unwrap();
        assert!(secrets.check(of, &new).is_err());
    }

    #[test]
    fn a_pool_has_a_bundle_of_its_own_and_the_digest_says_which_one_is_meant() {
        let dir = tempfile::tempdir().unwrap();
        let (tenant, pool) = ("acme".parse().unwrap(), "web".parse().unwrap());
        let of = |own| BundleOf { tenant: &tenant, pool: &pool, own };
        let secrets = Secrets::new(dir.path());
        let meant = Digest::of(b"own");
        let why = chain(&secrets.check(of(true), &meant).unwrap_err());
        assert!(why.ends_with("/pool.acme.web"), "{why}");
        fs::write(dir.path().join("acme"), b"whole").unwrap();
        let why = chain(&secrets.check(of(true), &meant).unwrap_err());
        assert!(why.starts_with("there is no secrets bundle"), "of the pool's own: {why}");
        fs::write(dir.path().join("pool.acme.web"), b"own").unwrap();
        secrets.check(of(true), &meant).unwrap();
        assert_eq!(**secrets.read(of(true), &meant).unwrap(), *b"own");
        // What one that sleeps was started with is there, wherever the document names it now.
        for own in [false, true] {
            assert_eq!(**secrets.read(of(own), &meant).unwrap(), *b"own");
            assert_eq!(**secrets.read(of(own), &Digest::of(b"whole")).unwrap(), *b"whole");
        }
        let other = "other".parse().unwrap();
        assert!(secrets.check(BundleOf { pool: &other, ..of(true) }, &meant).is_err());
    }
}
