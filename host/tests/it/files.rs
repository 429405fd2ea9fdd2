//! What is promised of files below the data directory, tried against someone who changes every name meanwhile.

mod full;
mod plain;
mod race;
mod swapper;

use std::path::Path;

use tempfile::TempDir;

/// A directory in memory where there is one, so that many tries take little time.
fn in_memory() -> TempDir {
    let shared = Path::new("/dev/shm");
    if shared.is_dir() { tempfile::tempdir_in(shared) } else { tempfile::tempdir() }.unwrap()
}
