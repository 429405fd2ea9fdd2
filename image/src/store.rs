//! The images of a node on disk, shared by the agent and the command line.
//!
//! ```text
//! sha256/<digest>/{manifest.json,kernel,initrd,rootfs,cmdline}   sealed: files 0444, folder 0555
//! refs/<hash of reference and profile>.json                      what a reference turned out to be
//! in-use/<hash of an agent's data folder>.json                   what its instances need
//! lock                                                           held for a moment by the process that changes any of these
//! cache/                                                         downloaded packages
//! ```

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mvm_proto::digest::from_hex;
use mvm_proto::{Digest, Timestamp};
use sha2::{Digest as _, Sha256};

use super::error::{ImageError, OnPath};
use super::manifest::{Manifest, Part};
use super::staging::{self, Detached, MANIFEST, SEALED_FILE, Staging};
use crate::BootImage;

const IMAGES: &str = "sha256";
const LOCK: &str = "lock";
/// A manifest of four files is a few hundred bytes.
const MAX_MANIFEST_BYTES: u64 = 64 << 10;
const READ_BYTES: usize = 1 << 20;
/// Longer than the store is ever locked for, short enough for a caller that has other things to do.
const PATIENCE: Duration = Duration::from_millis(100);

#[derive(Debug, Clone)]
pub struct Store {
    root: PathBuf,
}

/// Held while the store is changed.
#[derive(Debug)]
pub struct StoreLock {
    _file: File,
}

impl Store {
    /// Opens the store below `root`, and sweeps what crashed makers left in it.
    pub fn open(root: &Path) -> Result<Self, ImageError> {
        let store = Self { root: root.to_owned() };
        for folder in [store.images(), store.refs(), store.in_use_folder()] {
            fs::create_dir_all(&folder).on("make", &folder)?;
        }
        let swept = staging::sweep(&store.images())?;
        if swept > 0 {
            tracing::info!(swept, "removed images that were never finished");
        }
        Ok(store)
    }

    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    pub(super) fn images(&self) -> PathBuf {
        self.root.join(IMAGES)
    }

    pub(super) fn refs(&self) -> PathBuf {
        self.root.join("refs")
    }

    /// Where an image's files are.
    #[must_use]
    pub fn folder(&self, digest: &Digest) -> PathBuf {
        self.images().join(digest.hex())
    }

    pub(super) fn begin(&self) -> Result<Staging, ImageError> {
        Staging::begin(&self.images())
    }

    /// Waits for the lock on the store, which is held for a few writes only.
    pub fn lock(&self) -> Result<StoreLock, ImageError> {
        let (path, file) = self.lock_file()?;
        file.lock().on("lock", &path)?;
        Ok(StoreLock { _file: file })
    }

    /// The same for a caller that must not be kept: gives up after a moment.
    pub(super) fn lock_soon(&self) -> Result<StoreLock, ImageError> {
        let (path, file) = self.lock_file()?;
        let deadline = Instant::now() + PATIENCE;
        loop {
            match file.try_lock() {
                Ok(()) => return Ok(StoreLock { _file: file }),
                Err(fs::TryLockError::Error(cause)) => {
                    return Err(ImageError::Io { action: "lock", path, cause });
                }
                Err(fs::TryLockError::WouldBlock) if Instant::now() >= deadline => {
                    return Err(ImageError::Busy);
                }
                Err(fs::TryLockError::WouldBlock) => std::thread::park_timeout(PATIENCE / 20),
            }
        }
    }

    fn lock_file(&self) -> Result<(PathBuf, File), ImageError> {
        let path = self.root.join(LOCK);
        let file = File::options().create(true).truncate(false).write(true).open(&path).on("open", &path)?;
        Ok((path, file))
    }

    #[must_use]
    pub fn contains(&self, digest: &Digest) -> bool {
        self.folder(digest).join(MANIFEST).is_file()
    }

    /// Every image, by digest.
    pub fn list(&self) -> Result<Vec<Digest>, ImageError> {
        let images = self.images();
        let mut found = Vec::new();
        for entry in fs::read_dir(&images).on("read", &images)? {
            let name = entry.on("read", &images)?.file_name();
            found.extend(name.to_str().and_then(from_hex).map(Digest::from_bytes));
        }
        found.sort();
        Ok(found)
    }

    /// When the image came into the store.
    #[must_use]
    pub fn made_at(&self, digest: &Digest) -> Option<Timestamp> {
        let modified = fs::metadata(self.folder(digest).join(MANIFEST)).ok()?.modified().ok()?;
        Some(Timestamp::from(modified))
    }

    pub fn manifest(&self, digest: &Digest) -> Result<Manifest, ImageError> {
        let path = self.folder(digest).join(MANIFEST);
        let file = match File::open(&path) {
            Err(cause) if cause.kind() == std::io::ErrorKind::NotFound => {
                return Err(ImageError::Missing(*digest));
            }
            opened => opened.on("read", &path)?,
        };
        let mut bytes = Vec::new();
        file.take(MAX_MANIFEST_BYTES).read_to_end(&mut bytes).on("read", &path)?;
        Manifest::read(&bytes, digest).map_err(|fault| ImageError::Damaged { digest: *digest, fault })
    }

    /// The files of an image, after a look at their sizes and modes: reading them all at each boot would cost more
    /// than the boot.
    pub fn boot_image(&self, digest: &Digest) -> Result<BootImage, ImageError> {
        let manifest = self.manifest(digest)?;
        let folder = self.folder(digest);
        for file in &manifest.files {
            let path = folder.join(file.name.file_name());
            let found = fs::symlink_metadata(&path);
            let fault = match found {
                Err(error) => Some(error.to_string()),
                Ok(found) if !found.is_file() => Some("is not a file".to_owned()),
                Ok(found) if found.len() != file.size => {
                    Some(format!("has {} bytes and had {} when it was sealed", found.len(), file.size))
                }
                Ok(found) if found.mode() & 0o222 != 0 || found.mode() & SEALED_FILE == 0 => {
                    Some(format!("is no longer sealed (mode {:o})", found.mode() & 0o777))
                }
                Ok(_) => None,
            };
            if let Some(fault) = fault {
                let fault = format!("{} {fault}", file.name.file_name());
                return Err(ImageError::Damaged { digest: *digest, fault });
            }
        }
        let part = |part: Part| manifest.has(part).then(|| folder.join(part.file_name()));
        let damaged = || ImageError::Damaged { digest: *digest, fault: "it has no kernel".to_owned() };
        let cmdline = match part(Part::Cmdline) {
            Some(path) => fs::read_to_string(&path).on("read", &path)?.trim().to_owned(),
            None => String::new(),
        };
        Ok(BootImage {
            digest: *digest,
            kernel: part(Part::Kernel).ok_or_else(damaged)?,
            initrd: part(Part::Initrd),
            rootfs: part(Part::Rootfs),
            cmdline,
        })
    }

    /// Reads every byte of an image again and compares it with what was sealed.
    pub fn verify(&self, digest: &Digest) -> Result<Manifest, ImageError> {
        self.boot_image(digest)?;
        let manifest = self.manifest(digest)?;
        for file in &manifest.files {
            let path = self.folder(digest).join(file.name.file_name());
            let found = hash_file(&path)?;
            if found != file.sha256 {
                let fault = format!(
                    "{} is not what was sealed: its hash is {found}, not {}",
                    file.name.file_name(),
                    file.sha256
                );
                return Err(ImageError::Damaged { digest: *digest, fault });
            }
        }
        Ok(manifest)
    }

    /// Renames an image out of the store, for a caller that holds the lock and knows that nothing needs it. Its files are
    /// removed when the answer is dropped, which may take longer than the lock should be held.
    pub(super) fn detach(&self, _lock: &StoreLock, digest: &Digest) -> Result<Detached, ImageError> {
        if !self.folder(digest).exists() {
            return Err(ImageError::Missing(*digest));
        }
        staging::detach(&self.images(), digest)
    }
}

pub(super) fn hash_file(path: &Path) -> Result<Digest, ImageError> {
    let mut file = File::open(path).on("read", path)?;
    let (mut hash, mut buffer) = (Sha256::new(), vec![0; READ_BYTES]);
    loop {
        let read = file.read(&mut buffer).on("read", path)?;
        if read == 0 {
            return Ok(Digest::from_bytes(hash.finalize().into()));
        }
        hash.update(&buffer[..read]);
    }
}
