//! What goes wrong: each time the VM reaches a truthful state with a reason, and nothing is left behind.

use std::os::fd::AsRawFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use mvm_tests::stand_in::machine::{SNAPSHOT_BEGUN, SNAPSHOT_GO_ON};
use mvm_vmm::firecracker::{FirecrackerDriver, FirecrackerUnavailable};
use mvm_vmm::{Driver, DriverError, SnapshotOptions, SnapshotRef, VmSpec, VmState};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::Signal;

use crate::firecracker::site::{Site, names};

fn reason(error: &DriverError) -> String {
    let mut text = error.to_string();
    let mut source = std::error::Error::source(error);
    while let Some(cause) = source {
        text.push_str(&format!(": {cause}"));
        source = cause.source();
    }
    text
}

#[test]
fn a_program_that_is_missing_too_old_or_something_else_is_told_at_the_start() {
    let site = Site::new();
    let open = |settings| FirecrackerDriver::open(&site.path("data"), settings).unwrap_err();
    let mut settings = site.settings(&[]);
    settings.program = Some(site.path("nothing"));
    let missing = open(settings.clone());
    assert!(
        matches!(missing, FirecrackerUnavailable::Missing { .. }) && missing.to_string().contains("install")
    );
    let old = open(site.settings(&[("STAND_IN_VERSION", "1.4.0")]));
    assert!(matches!(old, FirecrackerUnavailable::TooOld { .. }), "{old}");
    settings.program = Some(site.script("other", "echo something else"));
    assert!(matches!(open(settings), FirecrackerUnavailable::Broken { .. }));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_crashes_at_its_start_says_why() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.driver(&[("STAND_IN_FAULT", "crash-at-start")]);
    let error = driver.boot(&spec).await.unwrap_err();
    assert!(reason(&error).contains("exited with code 1"), "{}", reason(&error));
    assert_eq!(driver.list().await.unwrap(), []);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_hangs_before_its_socket_is_ended() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.hasty(&[("STAND_IN_FAULT", "hang-before-socket")]);
    let error = driver.boot(&spec).await.unwrap_err();
    assert!(matches!(error, DriverError::Stuck { .. }), "{error:?}");
    site.comes_to_rest();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_is_stuck_is_listed_told_and_can_be_killed_while_others_go_on() {
    let site = Site::new();
    let (spec, other) = (site.spec(1), site.spec(2));
    let patient = site.driver(&[]);
    patient.boot(&spec).await.unwrap();
    patient.boot(&other).await.unwrap();
    let driver = site.hasty(&[]);
    site.signal(&spec, Signal::SIGSTOP);
    let error = driver.pause(&spec.instance).await.unwrap_err();
    assert!(matches!(error, DriverError::Stuck { .. }), "{error:?}");
    driver.pause(&other.instance).await.unwrap();
    assert_eq!(driver.list().await.unwrap().len(), 2);
    driver.kill(&spec.instance).await.unwrap();
    assert_eq!(driver.adopt(&spec.instance).await.unwrap(), None);
    assert_eq!(driver.adopt(&other.instance).await.unwrap().unwrap().state, VmState::Paused);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_dies_in_its_snapshot_leaves_none() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.driver(&[("STAND_IN_FAULT", "die-in-snapshot"), ("STAND_IN_VERSION", "1.15.1")]);
    driver.boot(&spec).await.unwrap();
    driver.pause(&spec.instance).await.unwrap();
    driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await.unwrap_err();
    mvm_tests::wait_until("the VMM's end", mvm_tests::PATIENCE, || site.vmm(&spec).is_none());
    assert_eq!(driver.adopt(&spec.instance).await.unwrap(), None);
    assert!(!names(&site.run_dir(&spec)).iter().any(|name| name.starts_with("snapshot")));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_disk_that_is_full_costs_the_snapshot_and_not_the_vm() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.driver(&[("STAND_IN_FAULT", "disk-full")]);
    driver.boot(&spec).await.unwrap();
    driver.pause(&spec.instance).await.unwrap();
    let error = driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await.unwrap_err();
    assert!(reason(&error).contains("No space left"), "{}", reason(&error));
    assert!(!names(&site.run_dir(&spec)).iter().any(|name| name.starts_with("snapshot")));
    driver.resume(&spec.instance).await.unwrap();
    assert_eq!(driver.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Running);
}

/// A snapshot whose VM is gone.
async fn asleep(site: &Site, spec: &VmSpec) -> SnapshotRef {
    let driver = site.driver(&[]);
    driver.boot(spec).await.unwrap();
    driver.pause(&spec.instance).await.unwrap();
    let snapshot = driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await.unwrap();
    driver.kill(&spec.instance).await.unwrap();
    snapshot
}

fn snapshot_dir(run_dir: &Path) -> std::path::PathBuf {
    let name = names(run_dir).into_iter().find(|name| name.starts_with("snapshot-")).expect("a snapshot");
    run_dir.join(name)
}

/// In the place of a file that nobody may write to.
fn put(path: &Path, bytes: &[u8]) {
    std::fs::remove_file(path).unwrap();
    std::fs::write(path, bytes).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_snapshot_is_refused_with_what_is_wrong_and_no_vmm_is_left() {
    for (file, damage, said) in [
        ("state", b"cut".as_slice(), "3 bytes instead of"),
        ("mem", b"cut".as_slice(), "3 bytes instead of"),
        ("mem", b"".as_slice(), "not what was written"),
        ("state", b"".as_slice(), "not what was written"),
    ] {
        let site = Site::new();
        let spec = site.spec(1);
        let snapshot = asleep(&site, &spec).await;
        let path = snapshot_dir(&site.run_dir(&spec)).join(file);
        if damage.is_empty() {
            let mut bytes = std::fs::read(&path).unwrap();
            let middle = bytes.len() / 2;
            bytes[middle] ^= 1;
            put(&path, &bytes);
        } else {
            put(&path, damage);
        }
        let driver = site.driver(&[]);
        let error = driver.restore(&spec, &snapshot, &SnapshotOptions::plain()).await.unwrap_err();
        assert!(reason(&error).contains(said), "{file}: {}", reason(&error));
        site.comes_to_rest();
        driver.boot(&spec).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_load_that_is_refused_or_dies_leaves_no_vmm_and_keeps_the_snapshot() {
    let site = Site::new();
    let spec = site.spec(1);
    let snapshot = asleep(&site, &spec).await;
    let error = site
        .driver(&[("STAND_IN_FAULT", "die-in-load")])
        .restore(&spec, &snapshot, &SnapshotOptions::plain())
        .await
        .unwrap_err();
    assert!(reason(&error).contains("exited with code 1"), "{}", reason(&error));
    // The image's root is gone: the drive can't be opened, which ends the process.
    std::fs::rename(site.path("rootfs"), site.path("elsewhere")).unwrap();
    let error = site.driver(&[]).restore(&spec, &snapshot, &SnapshotOptions::plain()).await.unwrap_err();
    assert!(reason(&error).contains("No such file"), "{}", reason(&error));
    site.comes_to_rest();
    std::fs::rename(site.path("elsewhere"), site.path("rootfs")).unwrap();
    site.driver(&[]).restore(&spec, &snapshot, &SnapshotOptions::plain()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_snapshot_of_another_version_is_never_loaded() {
    let site = Site::new();
    let spec = site.spec(1);
    let snapshot = asleep(&site, &spec).await;
    let error = site
        .driver(&[("STAND_IN_VERSION", "1.17.0")])
        .restore(&spec, &snapshot, &SnapshotOptions::plain())
        .await
        .unwrap_err();
    assert!(reason(&error).contains("made on Firecracker 1.16.1, this is 1.17.0"), "{}", reason(&error));
    site.comes_to_rest();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_earlier_process_wrote_is_not_told_of_a_new_one() {
    let site = Site::new();
    let spec = site.spec(1);
    let (driver, run_dir) = (site.driver(&[]), site.run_dir(&spec));
    std::fs::create_dir_all(&run_dir).unwrap();
    let said = "Kernel panic - not syncing: of another life\n";
    std::fs::write(run_dir.join("console.log"), said).unwrap();
    std::fs::write(run_dir.join("vmm.log"), "the log of another life\n").unwrap();
    std::fs::write(run_dir.join("metrics.json"), r#"{"vmm": {"panic_count": 7}}"#).unwrap();
    driver.boot(&spec).await.unwrap();
    let mut exits = driver.exits();
    site.signal(&spec, Signal::SIGKILL);
    let detail = exits.recv().await.unwrap().detail;
    assert!(detail.starts_with("ended by signal 9"), "{detail}");
    assert!(!detail.contains("another life") && !detail.contains('7'), "{detail}");
    let console = driver.console(&spec.instance, 4096).await.unwrap();
    assert!(console.starts_with(said.as_bytes()), "it is kept for people");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_console_that_is_too_long_is_cut_while_its_vmm_runs() {
    let site = Site::new();
    let spec = site.spec(1);
    let (driver, run_dir) = (site.driver(&[]), site.run_dir(&spec));
    std::fs::create_dir_all(&run_dir).unwrap();
    std::fs::write(run_dir.join("console.log"), vec![b'x'; (4 << 20) + 1]).unwrap();
    driver.boot(&spec).await.unwrap();
    let short = || std::fs::metadata(run_dir.join("console.log")).unwrap().len() < 1 << 20;
    mvm_tests::wait_until("the console to be cut", mvm_tests::PATIENCE, short);
    assert!(run_dir.join("console.log.old").exists(), "its end is kept");
    assert!(driver.console(&spec.instance, 4096).await.unwrap().len() == 4096);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_writes_a_snapshot_is_known_to_be_paused_although_it_does_not_answer() {
    let site = Site::new();
    let spec = site.spec(1);
    let environment = [("STAND_IN_FAULT", "slow-snapshot"), ("STAND_IN_VERSION", "1.15.1")];
    site.driver(&environment).boot(&spec).await.unwrap();
    let driver = Arc::new(site.hasty(&environment));
    driver.pause(&spec.instance).await.unwrap();
    let (writer, instance) = (Arc::clone(&driver), spec.instance.clone());
    let snapshot = tokio::spawn(async move { writer.snapshot(&instance, &SnapshotOptions::plain()).await });
    let begun = site.run_dir(&spec).join(SNAPSHOT_BEGUN);
    mvm_tests::wait_until("the snapshot's beginning", mvm_tests::PATIENCE, || begun.exists());
    let listed = driver.list().await.unwrap();
    let adopted = driver.adopt(&spec.instance).await.unwrap();
    std::fs::write(site.run_dir(&spec).join(SNAPSHOT_GO_ON), b"").unwrap();
    snapshot.await.unwrap().unwrap();
    assert_eq!((listed.len(), listed[0].state), (1, VmState::Paused));
    assert_eq!(adopted.unwrap().state, VmState::Paused);
}

#[tokio::test(flavor = "multi_thread")]
async fn want_of_descriptors_makes_no_vm_disappear() {
    let site = Site::new();
    let driver = site.driver(&[]);
    let (plain, gone) = (site.spec(1), site.spec(2));
    for spec in [&plain, &gone] {
        driver.boot(spec).await.unwrap();
    }
    driver.pause(&plain.instance).await.unwrap();
    let (soft, hard) = getrlimit(Resource::RLIMIT_NOFILE).unwrap();
    let free = u64::try_from(std::fs::File::open("/dev/null").unwrap().as_raw_fd()).unwrap();
    let mut listed = 0;
    for more in 0..8 {
        setrlimit(Resource::RLIMIT_NOFILE, free + more, hard).unwrap();
        let answer = driver.list().await;
        setrlimit(Resource::RLIMIT_NOFILE, soft, hard).unwrap();
        // Not to know is no shame; to say that there is none is.
        let Ok(vms) = answer else { continue };
        let states: Vec<_> = vms.iter().map(|vm| vm.state).collect();
        assert_eq!(states, [VmState::Paused, VmState::Running], "with {more} descriptors");
        listed += 1;
    }
    assert!(listed > 0, "with enough of them the list is whole");
    site.signal(&gone, Signal::SIGKILL);
    mvm_tests::wait_until("the VMM's end", mvm_tests::PATIENCE, || site.vmm(&gone).is_none());
    assert_eq!(driver.list().await.unwrap().len(), 1, "only what ended is gone");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_that_is_deaf_is_killed_after_its_grace() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.driver(&[("STAND_IN_FAULT", "deaf")]);
    driver.boot(&spec).await.unwrap();
    driver.stop(&spec.instance, Duration::from_millis(200)).await.unwrap();
    site.comes_to_rest();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_was_started_and_told_nothing_is_replaced() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.driver(&[]);
    driver.boot(&spec).await.unwrap();
    driver.kill(&spec.instance).await.unwrap();
    // What an agent leaves that is killed between the spawn and the start.
    let run_dir = site.run_dir(&spec);
    let mut child = std::process::Command::new(site.path("firecracker"))
        .args(["--id", spec.instance.as_str(), "--api-sock", "api.sock"])
        .current_dir(&run_dir)
        .spawn()
        .unwrap();
    mvm_tests::wait_until("its socket", mvm_tests::PATIENCE, || run_dir.join("api.sock").exists());
    assert_eq!(driver.adopt(&spec.instance).await.unwrap(), None);
    driver.boot(&spec).await.unwrap();
    assert!(!child.wait().unwrap().success());
    assert_eq!(driver.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Running);
}
