//! An image in the making: a folder beside the finished ones, which becomes one by a single rename.
//!
//! The process that makes it holds a lock on the folder. An unlocked folder was left by one that crashed, and the next
//! [`Staging::begin`] removes it.

use std::fs::{self, File, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use mvm_proto::Digest;
use sha2::{Digest as _, Sha256};

use super::error::{ImageError, OnPath};
use super::manifest::{FileEntry, Manifest, Part};
use super::work::Work;

/// Images in the making begin so; a digest never does.
const PREFIX: &str = ".making-";
/// Images on the way out begin so.
const DETACHED_PREFIX: &str = ".doomed-";
const SCRATCH: &str = "scratch";
pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const SEALED_FILE: u32 = 0o444;
const SEALED_FOLDER: u32 = 0o555;
const COPY_BYTES: usize = 1 << 20;

#[derive(Debug)]
pub(super) struct Staging {
    folder: PathBuf,
    _lock: File,
    files: Vec<FileEntry>,
}

impl Staging {
    /// A new folder in `images`, on the same file system as what it becomes.
    pub(super) fn begin(images: &Path) -> Result<Self, ImageError> {
        let folder = images.join(format!("{PREFIX}{:016x}", fastrand::u64(..)));
        fs::create_dir(&folder).on("make", &folder)?;
        let lock = File::open(&folder).on("open", &folder)?;
        // Just made by us: only a sweep can hold it, for a moment, and then the folder is gone.
        lock.lock().on("lock", &folder)?;
        Ok(Self { folder, _lock: lock, files: Vec::new() })
    }

    /// A folder for what is not part of the image. It goes with the staging.
    pub(super) fn scratch(&self) -> Result<PathBuf, ImageError> {
        let folder = self.folder.join(SCRATCH);
        fs::create_dir_all(&folder).on("make", &folder)?;
        Ok(folder)
    }

    pub(super) fn add_bytes(&mut self, part: Part, content: &[u8]) -> Result<(), ImageError> {
        let path = self.folder.join(part.file_name());
        let mut file = File::create_new(&path).on("write", &path)?;
        file.write_all(content).on("write", &path)?;
        seal(&file, &path)?;
        let size = u64::try_from(content.len()).unwrap_or(u64::MAX);
        self.files.push(FileEntry { name: part, size, sha256: Digest::of(content) });
        Ok(())
    }

    /// Copies a file in; what arrives is what is hashed, whatever happens to the original meanwhile.
    pub(super) fn add_file(
        &mut self,
        part: Part,
        mut from: File,
        source: &Path,
        work: &Work<'_>,
    ) -> Result<(), ImageError> {
        let path = self.folder.join(part.file_name());
        let mut file = File::create_new(&path).on("write", &path)?;
        let expected = from.metadata().on("read", source)?.len();
        let (mut hash, mut size, mut buffer) = (Sha256::new(), 0_u64, vec![0; COPY_BYTES]);
        loop {
            work.check()?;
            let read = from.read(&mut buffer).on("read", source)?;
            if read == 0 {
                break;
            }
            file.write_all(&buffer[..read]).on("write", &path)?;
            hash.update(&buffer[..read]);
            size += u64::try_from(read).unwrap_or(0);
            if size > expected {
                break;
            }
        }
        if size != expected {
            return Err(ImageError::invalid(
                source,
                "changed while it was read; try again when it is left alone",
            ));
        }
        seal(&file, &path)?;
        self.files.push(FileEntry { name: part, size, sha256: Digest::from_bytes(hash.finalize().into()) });
        Ok(())
    }

    /// Closes the image, durably, under the name of its content. One that is already there is the same.
    pub(super) fn finish(mut self, images: &Path) -> Result<(Digest, Manifest), ImageError> {
        let scratch = self.folder.join(SCRATCH);
        if scratch.exists() {
            fs::remove_dir_all(&scratch).on("remove", &scratch)?;
        }
        let manifest = Manifest::new(std::mem::take(&mut self.files));
        let digest = manifest.digest();
        let path = self.folder.join(MANIFEST);
        let mut file = File::create_new(&path).on("write", &path)?;
        file.write_all(&manifest.bytes()).on("write", &path)?;
        seal(&file, &path)?;
        sync_folder(&self.folder)?;
        fs::set_permissions(&self.folder, Permissions::from_mode(SEALED_FOLDER)).on("seal", &self.folder)?;
        let target = images.join(digest.hex());
        match fs::rename(&self.folder, &target) {
            Ok(()) => sync_folder(images)?,
            // A folder that has content is never replaced: another maker was first.
            Err(_) if target.join(MANIFEST).is_file() => {}
            Err(cause) => return Err(ImageError::Io { action: "put in place", path: target, cause }),
        }
        Ok((digest, manifest))
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        // Gone from here when it was finished; else what can't be removed now is swept later.
        let _ = remove_folder(&self.folder);
    }
}

fn seal(file: &File, path: &Path) -> Result<(), ImageError> {
    file.set_permissions(Permissions::from_mode(SEALED_FILE)).on("seal", path)?;
    file.sync_all().on("write", path)
}

pub(super) fn sync_folder(folder: &Path) -> Result<(), ImageError> {
    File::open(folder).and_then(|folder| folder.sync_all()).on("write", folder)
}

/// An image that is no longer one.
#[derive(Debug)]
pub(super) struct Detached {
    folder: PathBuf,
}

impl Drop for Detached {
    fn drop(&mut self) {
        // What can't be removed now is swept later.
        let _ = remove_folder(&self.folder);
    }
}

/// Takes an image out of sight in one step.
pub(super) fn detach(images: &Path, digest: &Digest) -> Result<Detached, ImageError> {
    let from = images.join(digest.hex());
    let folder = images.join(format!("{DETACHED_PREFIX}{:016x}", fastrand::u64(..)));
    fs::rename(&from, &folder).on("remove", &from)?;
    sync_folder(images)?;
    Ok(Detached { folder })
}

/// Removes what crashed makers and removers left; gives how many there were.
pub(super) fn sweep(images: &Path) -> Result<usize, ImageError> {
    let mut swept = 0;
    for entry in fs::read_dir(images).on("read", images)? {
        let entry = entry.on("read", images)?;
        let name = entry.file_name();
        let name = name.to_string_lossy();
        let abandoned = if name.starts_with(PREFIX) {
            // Gone meanwhile, or locked by a maker that lives.
            File::open(entry.path()).is_ok_and(|folder| folder.try_lock().is_ok())
        } else {
            name.starts_with(DETACHED_PREFIX)
        };
        if abandoned && entry.path().exists() {
            remove_folder(&entry.path())?;
            swept += 1;
        }
    }
    Ok(swept)
}

fn remove_folder(folder: &Path) -> Result<(), ImageError> {
    // Sealed folders give nothing up, except to root.
    let _ = fs::set_permissions(folder, Permissions::from_mode(0o700));
    match fs::remove_dir_all(folder) {
        Err(cause) if cause.kind() != std::io::ErrorKind::NotFound => {
            Err(ImageError::Io { action: "remove", path: folder.to_owned(), cause })
        }
        _ => Ok(()),
    }
}
