//! What a VMM writes for its whole life, and what it leaves for others.

use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::Duration;

use mvm_proto::document::Resources;
use mvm_tests::stand_in::arguments::METRICS_MS;
use mvm_vmm::firecracker::{FirecrackerSettings, JailerSettings, Limits};
use mvm_vmm::{Balloon as _, Driver, Forks as _, SnapshotOptions, VmSpec};
use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::firecracker::jailed::{jailer, settings};
use crate::firecracker::site::{JAILER, Site, names};

const LONG: u64 = 8 << 20;
const SHORT: u64 = 3 << 20;

#[tokio::test(flavor = "multi_thread")]
async fn unread_metrics_do_not_fill_the_disk_in_a_jail_or_out_of_it() {
    let limits = Limits { trim: Duration::from_millis(50), ..Limits::default() };
    for jailed in [false, true] {
        let site = Site::new();
        let spec = site.spec(1);
        // As much in seconds as in days otherwise.
        let often = site.script("jailer", &format!("{METRICS_MS}=1 exec '{JAILER}' \"$@\""));
        let (settings, written) = if jailed {
            let jailed = settings(JailerSettings { program: often, ..jailer() });
            let root =
                site.run_dir(&spec).join("firecracker-stand-in").join(spec.instance.as_str()).join("root");
            (jailed, root.join("metrics.json"))
        } else {
            (site.settings(&[(METRICS_MS, "1")]), site.run_dir(&spec).join("metrics.json"))
        };
        let driver = site.open(FirecrackerSettings { limits, ..settings });
        driver.boot(&spec).await.unwrap();
        let meta = || std::fs::metadata(&written).unwrap();
        mvm_tests::wait_until("much to be written", mvm_tests::PATIENCE, || meta().len() > LONG);
        let short = || meta().blocks() * 512 < SHORT;
        mvm_tests::wait_until("it to be cut", mvm_tests::PATIENCE, short);
        let text = std::fs::read(&written).unwrap();
        let end = String::from_utf8_lossy(&text[text.len() - 64 * 1024..]);
        let whole = |line: &str| serde_json::from_str::<serde_json::Value>(line).is_ok();
        assert!(end.lines().any(whole), "its end can be read");
        driver.remove(&spec.instance).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_do_not_bury_the_cause_of_an_end() {
    let site = Site::new();
    let (spec, driver) = (site.spec(1), site.driver(&[]));
    driver.boot(&spec).await.unwrap();
    call(&site, &spec, "PATCH", "/vm", r#"{"state":"Gone"}"#).await;
    for _ in 0..10 {
        assert_eq!(driver.list().await.unwrap().len(), 1);
    }
    let mut exits = driver.exits();
    site.signal(&spec, Signal::SIGKILL);
    let detail = exits.recv().await.unwrap().detail;
    assert!(detail.contains("unknown variant `Gone`") && !detail.contains("received a GET"), "{detail}");
    let console = driver.console(&spec.instance, 1 << 20).await.unwrap();
    assert!(!String::from_utf8_lossy(&console).contains("Running Firecracker"), "the console is the guest's");
}

/// One request of the test's own.
async fn call(site: &Site, spec: &VmSpec, method: &str, path: &str, body: &str) -> String {
    let mut stream = tokio::net::UnixStream::connect(site.run_dir(spec).join("api.sock")).await.unwrap();
    let call = format!("{method} {path} HTTP/1.1\r\nContent-Length: {}\r\n\r\n{body}", body.len());
    stream.write_all(call.as_bytes()).await.unwrap();
    let mut answer = vec![0; 64 * 1024];
    let read = stream.read(&mut answer).await.unwrap();
    String::from_utf8_lossy(&answer[..read]).into_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_data_disk_is_flushed_to_the_host_s() {
    let site = Site::new();
    let driver = site.driver(&[]);
    let mut spec = site.spec(1);
    spec.resources = Resources { data_disk_mib: 4, ..spec.resources };
    driver.boot(&spec).await.unwrap();
    let told = call(&site, &spec, "GET", "/vm/config", "").await;
    let told: serde_json::Value = serde_json::from_str(told.split_once("\r\n\r\n").unwrap().1).unwrap();
    assert_eq!(told["/drives/data"]["cache_type"], "Writeback", "{told}");
    assert_eq!(told["/drives/rootfs"]["is_read_only"], true, "it has nothing to flush");
}

fn snapshot_file(run_dir: &Path, file: &str) -> std::fs::Metadata {
    let dir = names(run_dir).into_iter().find(|name| name.starts_with("snapshot-")).expect("a snapshot");
    std::fs::metadata(run_dir.join(dir).join(file)).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn the_forks_of_a_template_share_its_memory_and_can_not_change_it() {
    let site = Site::new();
    let driver = site.open(settings(jailer()));
    let (template, first, other) = (site.spec(1), site.spec(2), site.spec(3));
    driver.boot(&template).await.unwrap();
    driver.pause(&template.instance).await.unwrap();
    let snapshot = driver.snapshot(&template.instance, &SnapshotOptions::plain()).await.unwrap();
    driver.kill(&template.instance).await.unwrap();
    let root = mvm_needs::can_run(&[mvm_needs::Need::Root]);
    for file in ["mem", "state"] {
        let kept = snapshot_file(&site.run_dir(&template), file);
        assert_eq!(kept.mode() & 0o7777, 0o444, "{file}");
        assert!(!root || kept.uid() == 0, "{file} is still its VMM's");
    }
    // The first as the user that the template had, the other as one of its own.
    driver.fork(&first, &snapshot).await.unwrap();
    let mut other = other;
    if root {
        let jail = serde_json::json!({ "user": 61_001, "filter": "baseline", "demand": "all" });
        other.bounds.jail = serde_json::from_value(jail).unwrap();
    }
    driver.fork(&other, &snapshot).await.unwrap();
    let kept = snapshot_file(&site.run_dir(&template), "mem");
    for fork in [&first, &other] {
        let jail = site.run_dir(fork).join("firecracker-stand-in").join(fork.instance.as_str()).join("root");
        let lent = std::fs::metadata(jail.join("snapshot.mem")).unwrap();
        assert_eq!((lent.ino(), lent.mode() & 0o222), (kept.ino(), 0), "{}", fork.instance);
        driver.resume(&fork.instance).await.unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_guest_gives_memory_back_and_has_it_again_when_it_goes_on() {
    let site = Site::new();
    let (spec, driver) = (site.spec(1), site.driver(&[]));
    driver.boot(&spec).await.unwrap();
    let asked = async || driver.reclaim(&spec.instance, 1, Duration::from_secs(5)).await.unwrap();
    // Until its driver is up it has none to give.
    let deadline = std::time::Instant::now() + mvm_tests::PATIENCE;
    let left = loop {
        if let Some(left) = asked().await {
            break left;
        }
        assert!(std::time::Instant::now() < deadline, "no guest came up");
        tokio::task::yield_now().await;
    };
    assert_eq!(left, 1, "of 4 MiB");
    let holds = async || call(&site, &spec, "GET", "/balloon", "").await;
    assert!(holds().await.contains(r#""amount_mib":3"#));
    driver.pause(&spec.instance).await.unwrap();
    assert!(holds().await.contains(r#""amount_mib":3"#), "a warm one costs what it uses");
    driver.resume(&spec.instance).await.unwrap();
    assert!(holds().await.contains(r#""amount_mib":0"#), "one that runs has all of it");
}
