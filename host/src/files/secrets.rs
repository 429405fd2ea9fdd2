//! Tenants' secrets on the host: in memory alone, never on a disk.
//!
//! The bundles of tenants lie in a directory that the operator gives, which must be of a file system in memory. A
//! bundle is read into a buffer that is wiped when it is dropped, and only if it is the one that the document means.
//!
//! Two ways lead into a guest. The guest's channel is the one to prefer: the bundle goes from that buffer to a file in
//! the guest's memory after each `reborn`, nothing of it is left on the host, and a template that is forked needs no
//! drive for it. A [`SecretsDrive`] is for guests that want a disk: an image in memory, made anew for every start and
//! wake and wiped after. A guest must unmount it before it sleeps: what it remembers of the old image must not meet the
//! new one.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::path::{Path, PathBuf};

use mvm_proto::{Digest, InstanceId, TenantId};
use rustix::fs::fstatfs;
use zeroize::Zeroizing;

use super::dir::{Dir, OpenHow};
use super::disk::format_ext4;
use super::space::write_failed;
use super::{failed, refused};
use crate::HostError;

/// No bundle of secrets is larger.
const MAX_BUNDLE_BYTES: u64 = 4 * 1024 * 1024;

/// The same for every bundle: a drive's size is part of the machine that a snapshot remembers.
const DRIVE_BYTES: u64 = 8 * 1024 * 1024;

/// In the place of bundles; no tenant has such a name.
const DRIVES: &str = ".drives";
/// What a bundle is called on its drive.
const BUNDLE: &str = "bundle";

const TMPFS_MAGIC: u64 = 0x0102_1994;
const RAMFS_MAGIC: u64 = 0x8584_58f6;

/// No journal, for there is nothing to lose; nothing is reserved for anyone.
const OPTIONS: [&str; 6] = ["-q", "-F", "-m", "0", "-O", "^has_journal"];

const WIPE_BYTES: usize = 64 * 1024;

/// Where secrets are: a directory in memory.
#[derive(Debug)]
pub struct SecretsPlace(Dir);

/// An image with a tenant's secrets, in memory. Wiped when it is dropped, unless it is left to a VMM that outlives
/// this process with [`SecretsDrive::leave`].
#[derive(Debug)]
pub struct SecretsDrive {
    drives: Dir,
    name: String,
    kept: bool,
}

impl SecretsPlace {
    /// Refused unless it is of a file system that is in memory, and its owner's alone to write to.
    pub fn open(path: &Path) -> Result<Self, HostError> {
        let dir = Dir::open_root(path)?;
        let kind = fstatfs(&dir).map_err(|cause| failed("look at", path)(cause.into()))?.f_type;
        #[allow(clippy::cast_sign_loss, reason = "magic numbers are no quantities")]
        let magic = kind as u64 & 0xffff_ffff;
        if [TMPFS_MAGIC, RAMFS_MAGIC].contains(&magic) {
            return Ok(Self(dir));
        }
        let why = "is on a disk, and secrets must stay in memory: name a directory on tmpfs (below /run, say), or \
                   mount one there with `mount -t tmpfs -o mode=0700,noswap tmpfs DIR`";
        Err(refused(path, why))
    }

    /// A tenant's bundle, if it is the one that is meant.
    pub fn bundle(&self, tenant: &TenantId, expected: &Digest) -> Result<Zeroizing<Vec<u8>>, HostError> {
        let path = self.0.path().join(tenant.as_str());
        let bytes = read_wiped(&self.0.open_file(tenant.as_str(), OpenHow::Read)?, &path)?;
        let found = Digest::of(&bytes);
        if found == *expected {
            return Ok(bytes);
        }
        Err(refused(
            &path,
            &format!("is {found}, not {expected}; put the bundle that the document means there"),
        ))
    }

    /// An instance's drive with this bundle, in place of one that is there.
    pub fn build(&self, instance: &InstanceId, bundle: &[u8]) -> Result<SecretsDrive, HostError> {
        let drives = self.0.make(DRIVES, 0o700, None)?;
        let name = instance.as_str().to_owned();
        let drive = SecretsDrive { drives, name, kept: false };
        // What a crash may have left.
        drive.wipe_all()?;
        let staging = drive.drives.make(drive.staging(), 0o700, None)?;
        let fill = || {
            let path = staging.path().join(BUNDLE);
            let mut file = staging.create_new(BUNDLE, 0o400)?;
            file.write_all(bundle).map_err(failed("write", &path))?;
            let image = drive.drives.create_new(&drive.name, 0o600)?;
            image.set_len(DRIVE_BYTES).map_err(failed("make", &drive.path()))?;
            format_ext4(&image, &drive.path(), &OPTIONS, Some(&staging))
        };
        // What failed is wiped as the drive is dropped.
        fill().map_err(|error| write_failed(&staging, bundle.len() as u64, error))?;
        wipe(&staging, BUNDLE)?;
        drive.drives.remove_tree(drive.staging())?;
        Ok(drive)
    }

    /// The drive that an earlier process left to a VMM.
    pub fn wipe(&self, instance: &InstanceId) -> Result<(), HostError> {
        match self.0.sub(DRIVES) {
            Err(error) if error.is_not_found() => Ok(()),
            drives => wipe(&drives?, instance.as_str()),
        }
    }
}

impl SecretsDrive {
    /// Where a VMM finds it.
    #[must_use]
    pub fn path(&self) -> PathBuf {
        self.drives.path().join(&self.name)
    }

    /// The open image, for a VMM that takes descriptors.
    pub fn open(&self) -> Result<File, HostError> {
        self.drives.open_file(&self.name, OpenHow::Write)
    }

    fn staging(&self) -> String {
        format!("{}.new", self.name)
    }

    /// For a VMM that outlives this process: [`SecretsPlace::wipe`] is due when it has ended.
    pub fn leave(mut self) {
        self.kept = true;
    }

    /// Overwritten and gone.
    pub fn wipe(mut self) -> Result<(), HostError> {
        self.kept = true;
        self.wipe_all()
    }

    fn wipe_all(&self) -> Result<(), HostError> {
        wipe(&self.drives, &self.name)?;
        match self.drives.sub(self.staging()) {
            Ok(staging) => wipe(&staging, BUNDLE)?,
            Err(error) if error.is_not_found() => {}
            Err(error) => return Err(error),
        }
        self.drives.remove_tree(self.staging())
    }
}

impl Drop for SecretsDrive {
    fn drop(&mut self) {
        if !self.kept
            && let Err(error) = self.wipe_all()
        {
            tracing::error!(%error, path = %self.path().display(), "secrets could not be wiped; remove them");
        }
    }
}

/// Overwrites a file that there may be, and takes its name away.
fn wipe(dir: &Dir, name: &str) -> Result<(), HostError> {
    match dir.open_file(name, OpenHow::Write) {
        Ok(file) => overwrite(&file).map_err(failed("wipe", &dir.path().join(name)))?,
        Err(error) if error.is_not_found() => return Ok(()),
        // Not a file of ours: its name goes all the same.
        Err(HostError::Refused(_)) => {}
        Err(error) => return Err(error),
    }
    dir.remove_tree(name)
}

/// Only what has pages: holes have nothing to wipe, and would take memory.
fn overwrite(mut file: &File) -> io::Result<()> {
    let length = file.metadata()?.len();
    let zeros = vec![0; WIPE_BYTES];
    let mut at = 0;
    while let Ok(begin) = rustix::fs::seek(file, rustix::fs::SeekFrom::Data(at)) {
        let end = rustix::fs::seek(file, rustix::fs::SeekFrom::Hole(begin))?.min(length);
        file.seek(SeekFrom::Start(begin))?;
        at = begin;
        while at < end {
            let wanted = usize::try_from(end - at).unwrap_or(WIPE_BYTES).min(WIPE_BYTES);
            file.write_all(&zeros[..wanted])?;
            at += wanted as u64;
        }
        if at >= length {
            break;
        }
    }
    Ok(())
}

/// Into one buffer of the right size: one that grew would leave copies behind.
fn read_wiped(mut file: &File, path: &Path) -> Result<Zeroizing<Vec<u8>>, HostError> {
    let length = file.metadata().map_err(failed("look at", path))?.len();
    if length > MAX_BUNDLE_BYTES {
        return Err(refused(path, &format!("is longer than {MAX_BUNDLE_BYTES} bytes")));
    }
    let mut bytes = Zeroizing::new(vec![0; usize::try_from(length).unwrap_or(0)]);
    file.read_exact(&mut bytes).map_err(failed("read", path))?;
    Ok(bytes)
}
