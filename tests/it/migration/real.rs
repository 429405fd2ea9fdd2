//! The same with microVMs: what is in memory and on the data disk goes on, and what does not fit does not begin.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::os::unix::fs::MetadataExt;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{path_text, small_pool, wait_until};
use serde_json::json;

use super::forge::Forged;
use super::{Pair, phase, said};

const LONG: Duration = Duration::from_secs(180);

/// A gibibyte of disk that nobody wrote to, and 128 MiB of memory: what moves is what there is.
const DISK_MIB: u64 = 1024;
const MOST_BYTES: u64 = 192 << 20;

/// Each number by a rename, so that one that is read is whole.
const COUNT: &str = "(n=0; while :; do n=$((n+1)); echo $n > /run/next; mv /run/next /run/count; sleep 0.05; done) \
                     >/dev/null 2>&1 </dev/null & \
                     echo $! > /run/counter; echo kept > /data/kept; sync";

#[test]
#[allow(clippy::print_stdout, reason = "the figure is worth more than that it was below a limit")]
fn a_guest_goes_on_counting_on_another_node_with_its_disk_and_only_where_it_fits() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let images = mvm_tests::test_images();
    let flags = ["--images-dir", path_text(&images), "--sweep-after", "1s"];
    let mut document = small_pool(1, 0, 0);
    document["tenants"][0]["pools"][0]["instance_resources"]["data_disk_mib"] = json!(DISK_MIB);
    let (pair, id) = Pair::with_a_sleeper("qemu", &flags, &document, LONG);
    let guest = |agent: &mvm_tests::LoneAgent, line: &str| {
        agent.mvm_ok(&["instance", "exec", &id, "--", "sh", "-c", line]).trim().to_owned()
    };
    let count = |agent: &mvm_tests::LoneAgent| {
        let said = guest(agent, "cat /run/count");
        said.parse::<u64>().unwrap_or_else(|error| panic!("{said:?} is no count: {error}"))
    };
    guest(&pair.one, COUNT);
    wait_until("the first count", LONG, || guest(&pair.one, "ls /run").lines().any(|name| name == "count"));
    wait_until("the guest to count", LONG, || count(&pair.one) > 3);
    let (before, counter) = (count(&pair.one), guest(&pair.one, "cat /run/counter"));
    pair.put_to_sleep(&id);
    let path = pair.export(&id);
    let archive = std::fs::metadata(&path).expect("the archive is there");
    println!("an archive of 128 MiB of memory and {DISK_MIB} MiB of disk has {} bytes", archive.len());
    assert!(archive.len() < MOST_BYTES, "{} bytes", archive.len());
    assert_eq!(archive.mode() & 0o777, 0o600, "it holds a guest's memory");

    let forged = Forged::read(&path);
    let bad = pair.archive("bad");
    let mut flipped = std::fs::read(&path).expect("the archive can be read");
    let middle = flipped.len() / 2;
    flipped[middle] ^= 1;
    std::fs::write(&bad, &flipped).expect("a file can be written");
    pair.refused(&bad, "does not hash to what it was written as");
    std::fs::write(&bad, &flipped[..middle]).expect("a file can be written");
    pair.refused(&bad, "the archive is truncated");
    drop(flipped);
    let other_qemu = forged.clone().with_manifest(|manifest| manifest["qemu"] = json!("99.1"));
    pair.refused(&other_qemu.write(&bad), "made by QEMU 99.1");
    let other_cpu = forged.clone().with_manifest(|manifest| {
        manifest["accelerator"] = json!({ "name": "kvm", "cpu": "host" });
        manifest["made_on"]["cpu"] = json!("Another Processor");
    });
    pair.refused(&other_cpu.write(&bad), "can't be used");
    let other_time = forged.clone().with_manifest(|manifest| {
        let khz = manifest["made_on"]["tsc_khz"].as_u64().expect("a guest counts time by something");
        manifest["made_on"]["tsc_khz"] = json!(khz * 2);
    });
    pair.refused(&other_time.write(&bad), "it counts time by");
    let other_format = forged.clone().with_manifest(|manifest| manifest["format"] = json!(1));
    pair.refused(&other_format.write(&bad), "it is of format 1");
    let mut larger = forged.clone();
    larger.header["record"]["resources"]["mem_mib"] = json!(256);
    pair.refused(&larger.write(&bad), "other devices or resources");
    let mut no_image = forged.clone();
    no_image.header["record"]["image"] = json!(mvm_proto::Digest::of(b"nowhere"));
    pair.refused(&no_image.write(&bad), "mvm image build");
    let mut state = forged.content("snapshot/state");
    state[4096] ^= 1;
    pair.refused(
        &forged.clone().with("snapshot/state", &state).write(&bad),
        "does not hash to what it was saved as",
    );
    drop(state);
    pair.refused(&forged.with("data.img", b"another disk").write(&bad), "its data disk is not the one");

    let output = pair.import(&path);
    assert!(output.status.success(), "{}\n{}", said(&output), pair.other.log());
    let disk = pair.other.data_dir().join("vms").join(&id).join("data.img");
    let disk = std::fs::metadata(disk).expect("its disk is there");
    assert_eq!(disk.len(), DISK_MIB << 20);
    assert!(disk.blocks() * 512 < 128 << 20, "holes stay holes: {} blocks", disk.blocks());
    let again = pair.archive("again");
    pair.one.mvm_ok(&["instance", "export", &id, path_text(&again), "--remove"]);
    assert_eq!(phase(&pair.one, &id), None);

    pair.other.mvm_ok(&["instance", "wake", &id]);
    let events = pair.other.mvm_ok(&["events", "-o", "json"]);
    assert!(!events.contains("SnapshotUnusable"), "it must not have started anew: {events}");
    let after = count(&pair.other);
    assert!(after >= before, "{after} after {before}: its memory is another's");
    assert_eq!(guest(&pair.other, "cat /run/counter"), counter);
    guest(&pair.other, &format!("kill -0 {counter}"));
    wait_until("the guest to go on counting", LONG, || count(&pair.other) > after);
    assert_eq!(guest(&pair.other, "cat /data/kept"), "kept");
    // And sleeps and wakes there like any other.
    guest(&pair.other, "echo again > /data/again; sync");
    pair.other.mvm_ok(&["instance", "sleep", &id]);
    pair.other.mvm_ok(&["instance", "wake", &id]);
    assert_eq!(guest(&pair.other, "cat /data/kept /data/again"), "kept\nagain");
    assert!(count(&pair.other) >= after);
}
