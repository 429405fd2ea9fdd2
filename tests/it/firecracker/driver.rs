//! The driver on the stand-in: the suite that every driver passes, and what is Firecracker's own.

use std::time::Duration;

use mvm_vmm::conformance;
use mvm_vmm::firecracker::FirecrackerDriver;
use mvm_vmm::{Driver, SnapshotOptions, SnapshotPolicy, VmState};
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::firecracker::site::{Site, names};

/// Without the bug of 1.16, and with it.
const VERSIONS: [&str; 2] = ["1.15.1", "1.16.1"];

#[tokio::test(flavor = "multi_thread")]
async fn the_driver_passes_the_suite_with_and_without_the_vsock_bug() {
    for version in VERSIONS {
        let site = Site::new();
        let driver = site.driver(&[("STAND_IN_VERSION", version)]);
        conformance::suite(&driver, &site.subject()).await.unwrap();
        site.comes_to_rest();
        assert_eq!(names(&site.path("data/vms")), Vec::<String>::new(), "nothing is left on the disk");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn guests_answer_remember_and_end() {
    for version in VERSIONS {
        let site = Site::new();
        let driver = site.driver(&[("STAND_IN_VERSION", version)]);
        conformance::guest_suite(&driver, &site.subject()).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn vms_outlive_their_driver() {
    let site = Site::new();
    conformance::outlives_its_owner(async || site.driver(&[]), &site.subject()).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn sudden_ends_are_told() {
    let site = Site::new();
    let driver = site.driver(&[]);
    let end = async |instance: &mvm_proto::InstanceId| {
        let spec = mvm_vmm::VmSpec { instance: instance.clone(), ..site.spec(0) };
        site.signal(&spec, Signal::SIGKILL);
    };
    conformance::sudden_ends(&driver, &site.subject(), end).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_end_is_told_before_the_vm_is_missed() {
    let site = Site::new();
    let host = conformance::FaultyHost::late(&site.path("data"));
    let driver = FirecrackerDriver::with_host(host, site.settings(&[])).unwrap();
    let end = async |instance: &mvm_proto::InstanceId| {
        let spec = mvm_vmm::VmSpec { instance: instance.clone(), ..site.spec(0) };
        site.signal(&spec, Signal::SIGKILL);
        mvm_tests::wait_until("the VMM's end", mvm_tests::PATIENCE, || site.vmm(&spec).is_none());
    };
    conformance::an_end_is_told_before_the_vm_is_missed(&driver, &site.subject(), end).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_can_not_be_booted_is_refused() {
    let site = Site::new();
    let text = site.path("text");
    std::fs::write(&text, b"no kernel").unwrap();
    conformance::refusals(&site.driver(&[]), &site.subject(), &text).await.unwrap();
}

/// Whether the guest takes a new stream within a few seconds.
async fn reachable(driver: &impl Driver, spec: &mvm_vmm::VmSpec) -> bool {
    let mut stream = driver.guest(&spec.instance).await.unwrap();
    let opened = async {
        // A write waits for the connection; the answer to an opening is an opening.
        let hello = mvm_proto::guest::OPENING;
        stream.write_all(hello).await.is_ok()
    };
    tokio::time::timeout(Duration::from_secs(3), opened).await.is_ok_and(|opened| opened)
}

#[tokio::test(flavor = "multi_thread")]
async fn the_workaround_is_what_keeps_a_resumed_guest_reachable() {
    let site = Site::new();
    let spec = site.spec(1);
    let driver = site.driver(&[("STAND_IN_VERSION", "1.16.1")]);
    driver.boot(&spec).await.unwrap();
    assert!(reachable(&driver, &spec).await);
    driver.pause(&spec.instance).await.unwrap();
    driver.resume(&spec.instance).await.unwrap();
    assert!(reachable(&driver, &spec).await);
    assert!(
        !names(&site.run_dir(&spec)).iter().any(|name| name.starts_with("snapshot")),
        "it was thrown away"
    );
    driver.remove(&spec.instance).await.unwrap();

    // The same bugs under another number: the driver does not know, and the guest is lost.
    let liar = site.driver(&[("STAND_IN_VERSION", "1.16.1"), ("STAND_IN_SAYS", "1.16.2")]);
    liar.boot(&spec).await.unwrap();
    assert!(reachable(&liar, &spec).await);
    liar.pause(&spec.instance).await.unwrap();
    liar.resume(&spec.instance).await.unwrap();
    assert!(!reachable(&liar, &spec).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pause_that_another_agent_began_is_made_safe_before_the_resume() {
    let site = Site::new();
    let spec = site.spec(1);
    let first = site.driver(&[]);
    first.boot(&spec).await.unwrap();
    assert!(reachable(&first, &spec).await);
    // Paused by hand: no snapshot was taken.
    let socket = site.run_dir(&spec).join("api.sock");
    let body = r#"{"state":"Paused"}"#;
    let call = format!("PATCH /vm HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    let mut stream = tokio::net::UnixStream::connect(socket).await.unwrap();
    stream.write_all(call.as_bytes()).await.unwrap();
    let mut answer = [0; 12];
    stream.read_exact(&mut answer).await.unwrap();
    assert_eq!(&answer, b"HTTP/1.1 204");
    drop(first);
    let second = site.driver(&[]);
    assert_eq!(second.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Paused);
    second.resume(&spec.instance).await.unwrap();
    assert!(reachable(&second, &spec).await);
}

#[tokio::test(flavor = "multi_thread")]
async fn sockets_of_a_vmm_that_was_killed_are_no_obstacle() {
    let site = Site::new();
    let (spec, driver) = (site.spec(1), site.driver(&[]));
    driver.boot(&spec).await.unwrap();
    driver.pause(&spec.instance).await.unwrap();
    let snapshot = driver.snapshot(&spec.instance, &SnapshotOptions::plain()).await.unwrap();
    site.signal(&spec, Signal::SIGTERM);
    mvm_tests::wait_until("the VMM's end", mvm_tests::PATIENCE, || site.vmm(&spec).is_none());
    assert!(site.run_dir(&spec).join("v.sock").exists(), "it is left behind");
    driver.restore(&spec, &snapshot, &SnapshotOptions::plain()).await.unwrap();
    driver.resume(&spec.instance).await.unwrap();
    assert!(reachable(&driver, &spec).await);
    driver.kill(&spec.instance).await.unwrap();
    assert!(!site.run_dir(&spec).join("v.sock").exists() && !site.run_dir(&spec).join("api.sock").exists());
    driver.boot(&spec).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn what_must_be_encrypted_is_not_saved_in_clear() {
    let site = Site::new();
    let (spec, driver) = (site.spec(1), site.driver(&[]));
    driver.boot(&spec).await.unwrap();
    driver.pause(&spec.instance).await.unwrap();
    let policy = SnapshotPolicy { encryption: true, ..SnapshotPolicy::default() };
    let error = driver.snapshot(&spec.instance, &SnapshotOptions { policy, key: None }).await.unwrap_err();
    let told = error.to_string();
    assert!(
        driver.encryption().is_err() && told.contains("the firecracker driver lacks encryption"),
        "{told}"
    );
    assert!(!site.run_dir(&spec).join("snapshot.json").exists());
    assert_eq!(driver.adopt(&spec.instance).await.unwrap().unwrap().state, VmState::Paused);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stop_waits_for_a_guest_that_hears_it() {
    let site = Site::new();
    let (spec, driver) = (site.spec(1), site.driver(&[]));
    driver.boot(&spec).await.unwrap();
    // Keys that are pressed before a guest has a keyboard are lost.
    assert!(reachable(&driver, &spec).await);
    let mut exits = driver.exits();
    driver.stop(&spec.instance, Duration::from_secs(30)).await.unwrap();
    let exit = exits.recv().await.unwrap();
    assert!(exit.detail.starts_with("exited with code 0"), "{}", exit.detail);
    assert!(!exit.detail.contains("panicked"), "{}", exit.detail);
}
