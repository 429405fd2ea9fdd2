//! Finds the guest program that goes into built-in images.

use std::path::{Path, PathBuf};

const NAME: &str = "mvm-guest";

/// Looks beside the `mvm` executable, where packages put it, and where a developer's build leaves it.
#[must_use]
pub fn find_guest(executable: &Path) -> Option<PathBuf> {
    let folder = executable.parent()?;
    let packaged = [folder.join(NAME), folder.join("../lib/mvm").join(NAME)];
    // target/debug/mvm, target/debug/deps/test-1234: the guest is in target/guest, static, which cargo's own is not.
    let target = folder.ancestors().find(|folder| folder.file_name().is_some_and(|name| name == "target"));
    let built = target.map(|target| target.join("guest").join(NAME));
    match built {
        Some(built) => Some(built),
        None => packaged.into_iter().find(|path| path.is_file()),
    }
    .filter(|path| path.is_file())
}
