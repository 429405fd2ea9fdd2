//! Files that are whole or not there, and secrets that only their owner reads.
//!
//! Everything durable in this crate is written here; so is the agent's ledger. A write returns only when the new
//! bytes and the directory entry are on the disk.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{self, Read as _, Write as _};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use zeroize::Zeroizing;

/// The mode of every file that holds a key.
pub const PRIVATE_MODE: u32 = 0o600;
/// The mode of files that anyone may read, such as root certificates.
pub const PUBLIC_MODE: u32 = 0o644;
const PRIVATE_DIR_MODE: u32 = 0o700;
/// Permission bits of anyone but the owner.
const OTHERS: u32 = 0o077;

/// Far above any key file, so that a wrong path can't fill the memory.
const MAX_PRIVATE_BYTES: u64 = 1024 * 1024;

/// How often a name for the temporary file is drawn before giving up.
const NAME_ATTEMPTS: usize = 16;

/// Replaces `path` so that a reader, or a crash at any instant, sees the old bytes or the new ones.
///
/// On an error the old file is untouched and nothing is left beside it.
pub fn write_atomic(path: impl AsRef<Path>, bytes: &[u8], mode: u32) -> io::Result<()> {
    let path = path.as_ref();
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let (temporary, file) = create_beside(path, dir, mode)?;
    let written = fill(file, bytes).and_then(|()| fs::rename(&temporary, path));
    if let Err(cause) = written {
        // The first error is the one to report; a left-over temporary file is harmless.
        let _ = fs::remove_file(&temporary);
        return Err(cause);
    }
    File::open(dir)?.sync_all()
}

fn create_beside(path: &Path, dir: &Path, mode: u32) -> io::Result<(PathBuf, File)> {
    let name = path.file_name().ok_or_else(|| io::Error::other("the path names no file"))?;
    for _ in 0..NAME_ATTEMPTS {
        let mut hidden = std::ffi::OsString::from(".");
        hidden.push(name);
        hidden.push(format!(".{:016x}.tmp", fastrand::u64(..)));
        let temporary = dir.join(hidden);
        match OpenOptions::new().write(true).create_new(true).mode(mode).open(&temporary) {
            Ok(file) => {
                // The umask may have taken bits away; the mode asked for is the mode given.
                file.set_permissions(Permissions::from_mode(mode))?;
                return Ok((temporary, file));
            }
            Err(cause) if cause.kind() == io::ErrorKind::AlreadyExists => {}
            Err(cause) => return Err(cause),
        }
    }
    Err(io::Error::new(io::ErrorKind::AlreadyExists, "no free name for a temporary file"))
}

fn fill(mut file: File, bytes: &[u8]) -> io::Result<()> {
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes `path` and its missing parents, each 0700. A directory that is already there keeps its mode.
pub fn create_private_dir(path: impl AsRef<Path>) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(PRIVATE_DIR_MODE).create(path)
}

/// [`write_atomic`] with mode 0600, making the directory 0700 if it is missing.
pub fn write_private(path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
    make_parent(path.as_ref())?;
    write_atomic(path, bytes, PRIVATE_MODE)
}

/// [`write_atomic`] with mode 0644, making the directory 0700 if it is missing.
pub fn write_public(path: impl AsRef<Path>, bytes: &[u8]) -> io::Result<()> {
    make_parent(path.as_ref())?;
    write_atomic(path, bytes, PUBLIC_MODE)
}

fn make_parent(path: &Path) -> io::Result<()> {
    match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => create_private_dir(dir),
        _ => Ok(()),
    }
}

/// Reads a secret; refused when anyone but its owner could read or write it.
pub fn read_private(path: impl AsRef<Path>) -> io::Result<Zeroizing<Vec<u8>>> {
    let path = path.as_ref();
    let file = File::open(path)?;
    // Asked of the open file, not of the path, which might name another file by now.
    let metadata = file.metadata()?;
    let mode = metadata.permissions().mode() & 0o7777;
    if mode & OTHERS != 0 {
        let text = format!(
            "its mode is {mode:04o}, so other users may have read the key; run `chmod 600 {}`, and replace the key if \
             they did",
            path.display()
        );
        return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
    }
    if metadata.len() > MAX_PRIVATE_BYTES {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is too large for a key file"));
    }
    // Room for everything at once: a buffer that grows leaves copies behind.
    let length = usize::try_from(metadata.len()).unwrap_or(0);
    let mut bytes = Zeroizing::new(Vec::with_capacity(length + 1));
    file.take(metadata.len()).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode_of(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    #[test]
    fn a_private_file_is_0600_in_a_0700_directory_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a/b/key");
        write_private(&path, b"one").unwrap();
        write_private(&path, b"two").unwrap();
        assert_eq!(read_private(&path).unwrap().as_slice(), b"two");
        assert_eq!((mode_of(&path), mode_of(path.parent().unwrap())), (0o600, 0o700));
        assert_eq!(mode_of(&dir.path().join("a")), 0o700);
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_failed_write_keeps_the_old_file_and_leaves_nothing_beside_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("file");
        fs::create_dir(&path).unwrap();
        fs::write(path.join("inside"), "x").unwrap();
        assert!(write_atomic(&path, b"new", 0o600).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 1);
        assert!(path.join("inside").exists());
    }

    #[test]
    fn a_full_disk_is_reported_before_the_old_file_is_replaced() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        assert_eq!(fill(file, b"x").unwrap_err().kind(), io::ErrorKind::StorageFull);
    }

    #[test]
    fn a_key_file_that_others_can_read_is_refused_with_the_command_that_mends_it() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("key");
        for mode in [0o640, 0o604, 0o660, 0o602] {
            write_atomic(&path, b"secret", mode).unwrap();
            let error = read_private(&path).unwrap_err();
            assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
            assert!(error.to_string().contains("chmod 600"), "{error}");
        }
    }

    #[test]
    fn a_planted_link_at_the_target_is_replaced_not_followed() {
        let dir = tempfile::tempdir().unwrap();
        let (victim, path) = (dir.path().join("victim"), dir.path().join("key"));
        fs::write(&victim, "old").unwrap();
        std::os::unix::fs::symlink(&victim, &path).unwrap();
        write_atomic(&path, b"new", 0o600).unwrap();
        assert_eq!(fs::read(&victim).unwrap(), b"old");
        assert!(fs::symlink_metadata(&path).unwrap().is_file());
    }
}
