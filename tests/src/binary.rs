//! The `mvm` binary under test: built once from this workspace, in the profile the tests run in.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

/// Where the binary is. Cargo does not build another package's binary for a test, so it is asked to; that is quick
/// when there is nothing to do.
pub fn mvm_binary() -> &'static Path {
    static BINARY: OnceLock<PathBuf> = OnceLock::new();
    BINARY.get_or_init(|| {
        let test = std::env::current_exe().expect("a test knows its own path");
        // Tests run from target/<profile>/deps, the benches from target/<profile>.
        let dir = test.parent().expect("a program lies in a folder");
        let profile_dir = if dir.ends_with("deps") { dir.parent().unwrap_or(dir) } else { dir }.to_owned();
        let mut build = Command::new(env!("CARGO"));
        build.args(["build", "--quiet", "--locked", "--workspace", "--bin", "mvm"]);
        build.current_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/.."));
        if profile_dir.file_name().is_some_and(|name| name == "release") {
            build.arg("--release");
        }
        let built = build.status().expect("cargo runs");
        assert!(built.success(), "the mvm binary does not build");
        profile_dir.join("mvm")
    })
}
