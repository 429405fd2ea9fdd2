//! A data disk that goes past the host's page cache, with a real VMM.

use std::fs;
use std::path::Path;

use mvm_proto::InstanceId;
use mvm_proto::document::Resources;
use mvm_vmm::conformance::Client;
use mvm_vmm::{Driver as _, SnapshotOptions, VmState};

use super::{DataDir, driver, pids, spec, subject_where_it_can_run};

/// As the kernel shows the flags of an open file.
const O_DIRECT: u32 = 0o40_000;

/// Whether the instance's VMM has its data disk open, and has it open past the page cache.
async fn is_direct(dir: &Path, instance: &InstanceId) -> bool {
    let pid = pids(dir, instance).await[0];
    let open = fs::read_dir(format!("/proc/{pid}/fd")).unwrap().flatten();
    let disk = open.filter(|file| fs::read_link(file.path()).is_ok_and(|path| path.ends_with("data.img")));
    let flags = disk.map(|file| {
        let info = format!("/proc/{pid}/fdinfo/{}", file.file_name().to_str().unwrap());
        let text = fs::read_to_string(info).unwrap();
        let flags = text.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
        u32::from_str_radix(&flags, 8).unwrap()
    });
    let flags: Vec<u32> = flags.collect();
    assert!(!flags.is_empty(), "the data disk is not open");
    flags.iter().all(|flags| flags & O_DIRECT != 0)
}

#[tokio::test]
async fn a_limited_data_disk_is_used_past_the_page_cache_and_a_sleeper_wakes_with_it_or_without() {
    let Some(mut subject) = subject_where_it_can_run() else { return };
    subject.resources = Resources { data_disk_mib: 16, ..subject.resources };
    let dir = DataDir::new();
    let driver = driver(dir.path());
    let plain = spec(&subject, 30);
    let mut limited = plain.clone();
    limited.bounds.direct_disk = true;
    let instance = &plain.instance;
    driver.boot(&plain).await.unwrap();
    assert!(!is_direct(dir.path(), instance).await);
    // Asleep without a limit, awake with one, and the other way round.
    for (wakes_as, direct) in [(&limited, true), (&plain, false)] {
        driver.pause(instance).await.unwrap();
        let snapshot = driver.snapshot(instance, &SnapshotOptions::plain()).await.unwrap();
        driver.kill(instance).await.unwrap();
        driver.restore(wakes_as, &snapshot, &SnapshotOptions::plain()).await.unwrap();
        assert_eq!(is_direct(dir.path(), instance).await, direct);
        driver.resume(instance).await.unwrap();
        assert_eq!(driver.adopt(instance).await.unwrap().unwrap().state, VmState::Running);
    }
    driver.remove(instance).await.unwrap();
}

#[tokio::test]
async fn a_guest_is_told_of_the_cache_that_it_has_to_flush() {
    let Some(mut subject) = subject_where_it_can_run() else { return };
    subject.resources = Resources { data_disk_mib: 16, ..subject.resources };
    let dir = DataDir::new();
    let driver = driver(dir.path());
    for (number, direct) in [(31, false), (32, true)] {
        let mut spec = spec(&subject, number);
        spec.bounds.direct_disk = direct;
        driver.boot(&spec).await.unwrap();
        let mut guest = Client::greet(driver.guest(&spec.instance).await.unwrap()).await.unwrap();
        let caches =
            "for disk in /sys/block/vd*; do echo $(cat $disk/serial) $(cat $disk/queue/write_cache); done";
        let said = guest.run(&["sh", "-c", caches]).await.unwrap();
        // Through it, its fsync would reach no disk: nothing is flushed that says it has no cache.
        assert!(said.lines().any(|line| line == "data write back"), "direct {direct}: {said}");
        driver.remove(&spec.instance).await.unwrap();
    }
}
