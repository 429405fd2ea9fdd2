//! VMMs that are missing, too old, that crash, hang, stop answering or die.

use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use mvm_vmm::{Driver as _, DriverError, QemuDriver, QemuSettings, SnapshotOptions, VmState};
use nix::sys::signal::Signal;
use tokio::time::Instant;

use super::{DataDir, driver, pids, settings, signal, spec, subject_where_it_can_run};

/// For a start that comes to an end by itself, on a busy machine.
const LONG: Duration = Duration::from_secs(20);

/// A program that says which version it is, refuses the sandbox's trial run, and else does `then`.
fn stand_in(dir: &Path, version: &str, then: &str) -> PathBuf {
    let path = dir.join("qemu");
    let script = format!(
        "#!/bin/sh\ncase \"$*\" in\n*-version*) echo 'QEMU emulator version {version}'; exit;;\n*'-M none'*) exit 1;;\nesac\n{then}\n"
    );
    std::fs::write(&path, script).unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
    path
}

/// What booting says, after checking that it left no VM and no process.
async fn refusal_where_it_can_run(dir: &Path, program: PathBuf, start_within: Duration) -> Option<String> {
    let spec = spec(&subject_where_it_can_run()?, 1);
    let driver = QemuDriver::open(dir, QemuSettings { program, start_within, ..settings() });
    let error = driver.boot(&spec).await.unwrap_err();
    assert_eq!(driver.adopt(&spec.instance).await.unwrap(), None);
    assert!(pids(dir, &spec.instance).await.is_empty());
    Some(error.to_string())
}

#[tokio::test]
async fn a_missing_qemu_is_named() {
    let dir = DataDir::new();
    let Some(said) = refusal_where_it_can_run(dir.path(), dir.path().join("qemu"), LONG).await else {
        return;
    };
    assert!(said.contains("install qemu-system-x86"), "{said}");
}

#[tokio::test]
async fn a_qemu_that_is_too_old_is_refused_by_version() {
    let dir = DataDir::new();
    let program = stand_in(dir.path(), "4.2.1", "exit 1");
    let Some(said) = refusal_where_it_can_run(dir.path(), program, LONG).await else { return };
    assert!(said.contains("4.2.1") && said.contains("6.2"), "{said}");
}

#[tokio::test]
async fn a_qemu_that_crashes_at_start_says_its_last_words() {
    let dir = DataDir::new();
    let program = stand_in(dir.path(), "7.2.0", "echo out of luck >&2; exit 3");
    let Some(said) = refusal_where_it_can_run(dir.path(), program, LONG).await else { return };
    assert!(said.contains("exit code 3") && said.contains("out of luck"), "{said}");
}

#[tokio::test]
async fn a_qemu_that_hangs_and_ignores_sigterm_is_given_up_and_gone() {
    let dir = DataDir::new();
    // Opening a pipe without a writer waits for ever, in the shell itself.
    let program = stand_in(dir.path(), "7.2.0", "trap '' TERM; mkfifo never; read x < never");
    let Some(said) = refusal_where_it_can_run(dir.path(), program, Duration::from_secs(1)).await else {
        return;
    };
    assert!(said.contains("did not answer"), "{said}");
}

#[tokio::test]
async fn a_qemu_that_stops_answering_is_stuck_and_can_still_be_ended() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let spec = spec(&subject, 2);
    driver(dir.path()).boot(&spec).await.unwrap();
    // Quick to give up, and so not the one that boots.
    let hasty = QemuSettings { answer_within: Duration::from_millis(500), ..settings() };
    let driver = QemuDriver::open(dir.path(), hasty);
    assert!(driver.adopt(&spec.instance).await.unwrap().is_some());
    signal(dir.path(), &spec.instance, Signal::SIGSTOP).await;
    let error = driver.pause(&spec.instance).await.unwrap_err();
    assert!(matches!(error, DriverError::Stuck { .. }), "{error:?}");
    // It is still seen, by this driver and by one that has just started, and without waiting long.
    let began = Instant::now();
    for driver in [&driver, &QemuDriver::open(dir.path(), settings())] {
        let seen = driver.list().await.unwrap();
        assert_eq!(seen.iter().map(|vm| vm.state).collect::<Vec<_>>(), [VmState::Running]);
    }
    assert!(began.elapsed() < Duration::from_secs(5));
    // SIGTERM does not reach a stopped process.
    driver.stop(&spec.instance, Duration::from_millis(10)).await.unwrap();
    assert!(pids(dir.path(), &spec.instance).await.is_empty());
    driver.remove(&spec.instance).await.unwrap();
}

#[tokio::test]
async fn a_qemu_that_dies_while_it_saves_leaves_no_snapshot() {
    let Some(subject) = subject_where_it_can_run() else { return };
    let dir = DataDir::new();
    let driver = driver(dir.path());
    let spec = spec(&subject, 3);
    driver.boot(&spec).await.unwrap();
    driver.pause(&spec.instance).await.unwrap();
    signal(dir.path(), &spec.instance, Signal::SIGSTOP).await;
    let plain = SnapshotOptions::plain();
    let saving = driver.snapshot(&spec.instance, &plain);
    let ending = signal(dir.path(), &spec.instance, Signal::SIGKILL);
    let (saved, ()) = tokio::join!(saving, ending);
    assert!(saved.is_err(), "{saved:?}");
    assert_eq!(driver.adopt(&spec.instance).await.unwrap(), None);
    let run_dir = dir.path().join("vms").join(spec.instance.as_str());
    assert!(!run_dir.join("snapshot").exists() && !run_dir.join("snapshot.tmp").exists());
    driver.remove(&spec.instance).await.unwrap();
    assert!(!run_dir.exists());
}
