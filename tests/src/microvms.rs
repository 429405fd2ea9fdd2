//! Whether real microVMs can run here, and what they boot from.

use std::path::{Path, PathBuf};

/// Where `make test` builds the images that tests boot.
pub fn test_images() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../target/images")
}

/// Whether tests with real microVMs can run; says so plainly when they can't, and fails where they must.
#[allow(clippy::print_stdout, reason = "a test that did not run must say so where its output is read")]
pub fn microvms_or_say_so(test: &str) -> bool {
    let qemu = std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default())
        .any(|directory| directory.join("qemu-system-x86_64").is_file());
    let image = test_images().join("sha256").is_dir();
    let missing = match (qemu, image) {
        (true, true) => return true,
        (false, _) => "needs qemu-system-x86_64 (scripts/setup)",
        (true, false) => "needs target/images (make image)",
    };
    println!("{test}: did not run: {missing}");
    assert!(std::env::var_os("CI").is_none(), "{test} must run in CI: {missing}");
    false
}
