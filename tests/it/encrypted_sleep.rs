//! Sleeping microVMs whose memory is compressed and encrypted, by a whole agent: it is killed at every point while it
//! compresses, loses the key and gets it back, and no guest forgets anything.
//!
//! Needs QEMU and the test image (`make test` installs and builds both); says so when it can't run, and fails in CI.

use std::fs;
use std::path::PathBuf;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, nothing, path_text, put_snapshot_key, small_pool, wait_until};
use mvm_vmm::crash;
use serde_json::{Value, json};
use tempfile::TempDir;

const LONG: Duration = Duration::from_secs(120);

fn document(compression: &str, encryption: bool) -> Value {
    let mut document = small_pool(0, 0, 1);
    let pool = &mut document["tenants"][0]["pools"][0];
    pool["snapshot_compression"] = json!(compression);
    pool["snapshot_encryption"] = json!(encryption);
    document
}

/// An agent with one instance, that was woken.
fn woken(secrets: &TempDir, document: &Value) -> (LoneAgent, String) {
    let images = mvm_tests::test_images();
    let flags = ["--images-dir", path_text(&images), "--secrets-dir", path_text(secrets.path())];
    let mut agent = LoneAgent::new("qemu", &flags);
    agent.declare(document);
    agent.start();
    let census = agent.wait_counts(0, 0, 1, LONG);
    let id = census["sleeping"].first().expect("one sleeps").clone();
    agent.mvm_ok(&["instance", "wake", &id]);
    (agent, id)
}

fn shell(agent: &LoneAgent, id: &str, line: &str) -> String {
    agent.mvm_ok(&["instance", "exec", id, "--", "sh", "-c", line])
}

fn snapshot(agent: &LoneAgent, id: &str) -> PathBuf {
    agent.data_dir().join("vms").join(id).join("snapshot")
}

fn is_packed(agent: &LoneAgent, id: &str) -> bool {
    let dir = snapshot(agent, id);
    dir.join("packed.json").exists() && !dir.join("state").exists()
}

fn clear(agent: &LoneAgent, id: &str) {
    // What was acted on by hand is left alone for a while, also by pruning.
    for end in ["stop", "destroy"] {
        agent.mvm_ok(&["instance", end, id]);
    }
    agent.declare(&nothing());
    agent.wait_counts(0, 0, 0, LONG);
}

#[test]
fn an_agent_killed_at_any_point_of_compressing_leaves_a_snapshot_that_wakes() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let secrets = TempDir::new().expect("a temporary folder can be made");
    put_snapshot_key(secrets.path(), "acme");
    let (mut agent, id) = woken(&secrets, &document("zstd", true));
    let points = crash::OF_SNAPSHOTS;
    for (number, point) in points.iter().cycle().take(3 * points.len()).enumerate() {
        agent.kill();
        agent.start_with(&[("MVM_CRASH_AT", point)]);
        shell(&agent, &id, &format!("echo {number} >> /tmp/kept"));
        // The agent may end before it could say that the instance sleeps.
        agent.mvm(&["instance", "sleep", &id]);
        agent.wait_crashed(point, LONG);
        let dir = snapshot(&agent, &id);
        assert!(dir.join("state").exists() || dir.join("packed.json").exists(), "{point}");
        agent.start();
        // Every other one wakes at once, from whatever there is, and another one in each round; the rest when it was
        // compressed after all.
        if (number + number / points.len()).is_multiple_of(2) {
            wait_until("it to be compressed", LONG, || is_packed(&agent, &id));
        }
        agent.mvm_ok(&["instance", "wake", &id]);
        let expected: String = (0..=number).map(|number| format!("{number}\n")).collect();
        assert_eq!(shell(&agent, &id, "cat /tmp/kept"), expected, "{point}");
    }
    let events = agent.mvm_ok(&["events", "-o", "json"]);
    assert!(!events.contains("SnapshotUnusable"), "{events}");
    clear(&agent, &id);
}

#[test]
fn a_lost_key_keeps_what_sleeps_asleep_and_what_runs_running_until_it_is_back() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let secrets = TempDir::new().expect("a temporary folder can be made");
    put_snapshot_key(secrets.path(), "acme");
    let (agent, id) = woken(&secrets, &document("lz4", true));
    let lose_key = || {
        fs::remove_file(secrets.path().join("acme.snapshot-key")).expect("a key can be lost");
    };
    lose_key();
    shell(&agent, &id, "echo kept > /tmp/kept");
    let refused = |action: &str| {
        let output = agent.mvm(&["instance", action, &id]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && said.contains("acme.snapshot-key"), "{action}: {said}");
    };
    refused("sleep");
    assert_eq!(shell(&agent, &id, "cat /tmp/kept"), "kept\n");
    put_snapshot_key(secrets.path(), "acme");
    agent.mvm_ok(&["instance", "sleep", &id]);
    let on_disk = || {
        let text = agent.mvm_ok(&["instance", "get", &id, "-o", "json"]);
        let told: Value = serde_json::from_str(&text).expect("an instance is told as JSON");
        told["disk_used_bytes"].as_u64().expect("what it has on disk is told")
    };
    wait_until("it to be compressed", LONG, || is_packed(&agent, &id));
    let packed = fs::metadata(snapshot(&agent, &id).join("packed")).expect("it was compressed").len();
    wait_until("the smaller file to be counted", LONG, || on_disk() < packed + (8 << 20));
    lose_key();
    refused("wake");
    agent.wait_counts(0, 0, 1, LONG);
    put_snapshot_key(secrets.path(), "acme");
    agent.mvm_ok(&["instance", "wake", &id]);
    assert_eq!(shell(&agent, &id, "cat /tmp/kept"), "kept\n");
    clear(&agent, &id);
}
