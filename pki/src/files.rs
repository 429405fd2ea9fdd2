//! Files that are whole or not there, and secrets that only their owner reads.

use std::io;
use std::path::Path;

/// Replaces `path` so that a reader, or a crash at any instant, sees the old bytes or the new ones.
pub fn write_atomic(path: impl AsRef<Path>, bytes: &[u8], mode: u32) -> io::Result<()> {
    let _ = (path, bytes, mode);
    todo!()
}

/// Makes `path` and its missing parents, each 0700.
pub fn create_private_dir(path: impl AsRef<Path>) -> io::Result<()> {
    let _ = path;
    todo!()
}

/// Reads a secret; refused when anyone but its owner could read or write it.
pub fn read_private(path: impl AsRef<Path>) -> io::Result<zeroize::Zeroizing<Vec<u8>>> {
    let _ = path;
    todo!()
}
