//! Secrets: in memory or not at all, made anew, and gone when they are no longer needed.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::process::Command;

use mvm_host::SecretsPlace;
use mvm_proto::{Digest, InstanceId, TenantId};

const SECRET: &[u8] = b"a secret that must be found nowhere afterwards";

fn in_memory_place() -> Option<(tempfile::TempDir, SecretsPlace)> {
    let place = crate::in_memory();
    match SecretsPlace::open(place.path()) {
        Ok(secrets) => Some((place, secrets)),
        Err(error) => {
            crate::not_run(&format!("there is no file system in memory here: {error}"));
            None
        }
    }
}

#[test]
fn a_place_on_a_disk_is_refused_with_what_to_do() {
    // Where the tests' programs lie is on a disk, whatever /tmp is.
    let exe = std::env::current_exe().unwrap();
    let place = tempfile::tempdir_in(exe.parent().unwrap()).unwrap();
    let error = SecretsPlace::open(place.path()).unwrap_err().to_string();
    assert!(error.contains("tmpfs") && error.contains("must stay in memory"), "{error}");
}

#[test]
fn only_the_bundle_that_is_meant_is_read() {
    let Some((place, secrets)) = in_memory_place() else { return };
    let tenant: TenantId = "acme".parse().unwrap();
    let meant = Digest::of(SECRET);
    assert!(secrets.bundle(&tenant, &meant).unwrap_err().is_not_found());
    fs::write(place.path().join("acme"), SECRET).unwrap();
    assert_eq!(**secrets.bundle(&tenant, &meant).unwrap(), *SECRET);
    let error = secrets.bundle(&tenant, &Digest::of(b"another")).unwrap_err().to_string();
    assert!(error.contains("put the bundle that the document means there"), "{error}");
    assert!(!error.contains("a secret"), "{error}");
    fs::rename(place.path().join("acme"), place.path().join("other")).unwrap();
    std::os::unix::fs::symlink("other", place.path().join("acme")).unwrap();
    secrets.bundle(&tenant, &meant).unwrap_err();
}

#[test]
fn a_drive_is_made_anew_each_time_and_wiped_after() {
    let Some((place, secrets)) = in_memory_place() else { return };
    let instance = InstanceId::from_bits(7);
    let drive = secrets.build(&instance, SECRET).unwrap();
    let image = drive.path();
    let first = fs::metadata(&image).unwrap();
    let held = fs::File::open(&image).unwrap();
    assert!(has(&fs::read(&image).unwrap(), SECRET));
    // What a guest sees: one file, on a file system that is whole.
    let shown = Command::new("/usr/sbin/debugfs").args(["-R", "cat /bundle"]).arg(&image).output();
    match shown {
        Ok(output) => assert_eq!(output.stdout, SECRET),
        Err(cause) => crate::not_run(&format!("debugfs: {cause}")),
    }
    drive.leave();
    let drive = secrets.build(&instance, b"the next").unwrap();
    let second = fs::metadata(&image).unwrap();
    assert_ne!(first.ino(), second.ino());
    assert_eq!(first.len(), second.len(), "a snapshot remembers the size of its drives");
    // Whoever still has the old one open finds nothing in it.
    let mut old = Vec::new();
    std::io::Read::read_to_end(&mut &held, &mut old).unwrap();
    assert!(old.len() as u64 == first.len() && old.iter().all(|byte| *byte == 0));
    drop(drive);
    assert!(!image.exists());
    secrets.build(&instance, SECRET).unwrap().wipe().unwrap();
    secrets.wipe(&instance).unwrap();
    assert_eq!(fs::read_dir(place.path().join(".drives")).unwrap().count(), 0);
}

fn has(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}
