//! Checks by its superblock that a file is a root disk, and whole.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::path::Path;

use super::error::{ImageError, OnPath};

/// Every superblock of the file systems below lies in this.
const HEAD_BYTES: usize = 2048;
const KNOWN: &str = "known are ext4, erofs and squashfs, as plain images without a partition table";

/// Refuses what no guest can mount as its root.
pub(super) fn check(file: &mut File, path: &Path) -> Result<(), ImageError> {
    let size = file.metadata().on("read", path)?.len();
    let mut head = Vec::new();
    let limit = u64::try_from(HEAD_BYTES).unwrap_or(u64::MAX);
    file.by_ref().take(limit).read_to_end(&mut head).on("read", path)?;
    file.seek(SeekFrom::Start(0)).on("read", path)?;
    if head.starts_with(b"QFI\xfb") {
        return Err(ImageError::invalid(path, format!("a qcow2 image; {KNOWN}")));
    }
    let Some((name, needed)) = file_system(&head) else {
        return Err(ImageError::invalid(path, format!("not a file system that is known; {KNOWN}")));
    };
    if size < needed {
        return Err(ImageError::invalid(
            path,
            format!("truncated: the {name} in it has {needed} bytes, the file {size}"),
        ));
    }
    Ok(())
}

/// Its name and how many bytes its superblock says it has.
fn file_system(head: &[u8]) -> Option<(&'static str, u64)> {
    ext4(head)
        .map(|size| ("ext4", size))
        .or_else(|| squashfs(head).map(|size| ("squashfs", size)))
        .or_else(|| erofs(head).map(|size| ("erofs", size)))
}

fn ext4(head: &[u8]) -> Option<u64> {
    const AT: usize = 1024;
    if head.get(AT + 56..AT + 58)? != [0x53, 0xef] {
        return None;
    }
    let block_shift = word(head, AT + 24)?.checked_add(10)?;
    u64::from(word(head, AT + 4)?).checked_mul(1_u64.checked_shl(block_shift)?)
}

fn squashfs(head: &[u8]) -> Option<u64> {
    let long = |at: usize| Some(u64::from_le_bytes(head.get(at..at + 8)?.try_into().ok()?));
    if head.starts_with(b"hsqs") { long(40) } else { None }
}

fn erofs(head: &[u8]) -> Option<u64> {
    const AT: usize = 1024;
    if word(head, AT)? != 0xe0f5_e1e2 {
        return None;
    }
    let block_shift = u32::from(*head.get(AT + 12)?);
    u64::from(word(head, AT + 36)?).checked_mul(1_u64.checked_shl(block_shift)?)
}

fn word(bytes: &[u8], at: usize) -> Option<u32> {
    Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?))
}
