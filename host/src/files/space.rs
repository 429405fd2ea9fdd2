//! What lies in a directory costs disk: how much it is, how much is left, and whether more may be had.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::io;

use rustix::fs::{self, FileType};

use super::Dir;
use super::refused;
use crate::HostError;

/// What a tenant can't exceed by making directories in directories, or files without end. Each directory on the way down
/// is held open by two descriptors.
const MAX_DEPTH: usize = 32;
const MAX_ENTRIES: usize = 1_000_000;

/// The unit of `st_blocks`, whatever the file system's own is.
const BLOCK_BYTES: u64 = 512;

/// More than a tenant may have on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "{wanted_bytes} bytes do not fit: {used_bytes} of the quota's {quota_bytes} are in use, {} too many",
    self.missing_bytes()
)]
pub struct QuotaExceeded {
    pub quota_bytes: u64,
    pub used_bytes: u64,
    pub wanted_bytes: u64,
}

impl QuotaExceeded {
    /// How much would have to be freed.
    #[must_use]
    pub fn missing_bytes(&self) -> u64 {
        self.used_bytes.saturating_add(self.wanted_bytes).saturating_sub(self.quota_bytes)
    }
}

/// Whether a tenant that uses this much may have that much more.
pub fn fits(quota_bytes: u64, used_bytes: u64, wanted_bytes: u64) -> Result<(), QuotaExceeded> {
    match used_bytes.checked_add(wanted_bytes) {
        Some(all) if all <= quota_bytes => Ok(()),
        _ => Err(QuotaExceeded { quota_bytes, used_bytes, wanted_bytes }),
    }
}

/// What this process may still write to the file system of a directory.
pub fn free_space(dir: &Dir) -> Result<u64, HostError> {
    let stat = fs::fstatvfs(dir).map_err(|cause| dir.fault("look at the disk of", OsStr::new(""), cause))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Says of a write that failed for want of space which disk is full, and how much is missing. Other errors stay.
pub(super) fn write_failed(dir: &Dir, wanted_bytes: u64, error: HostError) -> HostError {
    let full = [io::ErrorKind::StorageFull, io::ErrorKind::QuotaExceeded];
    match error {
        HostError::Io { attempt, cause } if full.contains(&cause.kind()) => {
            let free = free_space(dir).unwrap_or(0);
            let missing = wanted_bytes.saturating_sub(free);
            let disk = dir.path().display();
            let attempt = format!(
                "{attempt}: the disk of {disk} is full: {wanted_bytes} bytes are wanted, {free} are free, {missing} \
                 are missing; make room there"
            );
            HostError::Io { attempt, cause }
        }
        error => error,
    }
}

impl Dir {
    /// The bytes on disk of all that is in this directory, itself included: what a sparse file has, not what it claims;
    /// once for a file with several names here.
    pub fn usage(&self) -> Result<u64, HostError> {
        let mut walk = Walk::default();
        let own = self.stat()?;
        let below = walk.below(self, 0)?;
        Ok(below + blocks(&own))
    }
}

fn blocks(stat: &fs::Stat) -> u64 {
    u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(BLOCK_BYTES)
}

#[derive(Default)]
struct Walk {
    entries: usize,
    /// Files with several names that were counted already.
    counted: BTreeSet<(u64, u64)>,
}

impl Walk {
    fn below(&mut self, dir: &Dir, depth: usize) -> Result<u64, HostError> {
        let mut bytes = 0_u64;
        for name in dir.names()? {
            let name = name?;
            self.entries += 1;
            if self.entries > MAX_ENTRIES || depth >= MAX_DEPTH {
                let why =
                    format!("has more than {MAX_ENTRIES} files or {MAX_DEPTH} directories in each other");
                return Err(refused(dir.path(), &why));
            }
            // What went away meanwhile costs nothing.
            let Some(stat) = dir.look(&name)? else { continue };
            if stat.st_nlink > 1 && FileType::from_raw_mode(stat.st_mode) != FileType::Directory {
                #[allow(clippy::unnecessary_cast, reason = "the fields' types differ between machines")]
                let id = (stat.st_dev as u64, stat.st_ino as u64);
                if !self.counted.insert(id) {
                    continue;
                }
            }
            bytes = bytes.saturating_add(blocks(&stat));
            if FileType::from_raw_mode(stat.st_mode) == FileType::Directory {
                // One that became something else, or that another disk is mounted on, is not looked into.
                if let Ok(sub) = dir.sub(&name) {
                    bytes = bytes.saturating_add(self.below(&sub, depth + 1)?);
                }
            }
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_quota_is_met_exactly_and_never_exceeded() {
        assert_eq!(fits(10, 4, 6), Ok(()));
        assert_eq!(fits(0, 0, 0), Ok(()));
        let over = fits(10, 4, 7).unwrap_err();
        assert_eq!(over.missing_bytes(), 1);
        assert_eq!(over.to_string(), "7 bytes do not fit: 4 of the quota's 10 are in use, 1 too many");
        assert_eq!(fits(10, 20, 0).unwrap_err().missing_bytes(), 10);
        assert!(fits(u64::MAX, u64::MAX, 1).is_err(), "no overflow");
    }
}
