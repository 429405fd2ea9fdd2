//! What tells one state of a `path:` folder from another without reading its files.
//!
//! A folder is left alone until nothing in it changed for a while, so that a kernel and a disk that are copied into it one
//! after the other make one new image, not two.

use std::fmt::Write as _;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, SystemTime};

use serde::{Deserialize, Serialize};

use super::manifest::Part;

/// Inode, size and time of every file that an image is made of.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Stamp(String);

/// How a folder looks now.
#[derive(Debug)]
pub(super) struct Look {
    pub(super) stamp: Stamp,
    /// When something in it changed last.
    changed_at: SystemTime,
}

impl Look {
    /// `None` for a folder without a kernel: it is gone, or being filled.
    pub(super) fn at(folder: &Path) -> Option<Self> {
        let (mut text, mut changed_at) = (String::new(), SystemTime::UNIX_EPOCH);
        for part in Part::ALL {
            // Follows links, as the import does.
            let Ok(found) = std::fs::metadata(folder.join(part.file_name())) else {
                if part == Part::Kernel {
                    return None;
                }
                continue;
            };
            // Writing to a string can't fail.
            let _ = write!(
                text,
                "{}:{}:{}:{}.{:09};",
                part.file_name(),
                found.ino(),
                found.size(),
                found.mtime(),
                found.mtime_nsec()
            );
            let seconds = Duration::from_secs(u64::try_from(found.ctime()).unwrap_or(0));
            changed_at = changed_at.max(SystemTime::UNIX_EPOCH + seconds);
        }
        Some(Self { stamp: Stamp(text), changed_at })
    }

    /// Whether nothing in it changed for this long.
    pub(super) fn is_settled(&self, quiet: Duration, now: SystemTime) -> bool {
        now.duration_since(self.changed_at).is_ok_and(|since| since >= quiet)
    }
}
