//! What sleeps on one node goes on on another: exported, carried and imported by two agents on this machine, on the fake
//! driver where only the agents matter, and with real microVMs where memory and disks do.

mod forge;
mod real;

use std::path::{Path, PathBuf};
use std::process::Output;
use std::time::Duration;

use forge::Forged;
use mvm_agent::crash;
use mvm_proto::InstanceId;
use mvm_tests::{LoneAgent, PATIENCE, nothing, path_text, small_pool, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;

/// What no record owns goes soon.
const FLAGS: &[&str] = &["--sweep-after", "1s"];

/// Two nodes, and a place for archives in between.
struct Pair {
    one: LoneAgent,
    other: LoneAgent,
    /// The pool without any count: what is there is left alone for as long as it is overridden.
    empty: Value,
    dir: TempDir,
}

impl Pair {
    /// One instance sleeps on the first, which asks for none; the other has the pool and nothing in it.
    fn with_a_sleeper(driver: &str, flags: &[&str], document: &Value, limit: Duration) -> (Self, String) {
        let (mut one, mut other) = (LoneAgent::new(driver, flags), LoneAgent::new(driver, flags));
        one.declare(document);
        one.start();
        let census = one.wait_counts(1, 0, 0, limit);
        let id = census["running"].first().expect("one runs").clone();
        let mut empty = document.clone();
        empty["tenants"][0]["pools"][0]["desired_counts"] = json!({"running": 0, "warm": 0, "sleeping": 0});
        other.declare(&empty);
        other.start();
        let dir = TempDir::new().expect("a temporary folder can be made");
        let pair = Self { one, other, empty, dir };
        (pair, id)
    }

    fn fake() -> (Self, String) {
        let (pair, id) = Self::with_a_sleeper("fake", FLAGS, &small_pool(1, 0, 0), PATIENCE);
        pair.put_to_sleep(&id);
        (pair, id)
    }

    fn put_to_sleep(&self, id: &str) {
        // What was acted on by hand is left alone, and nothing takes its place.
        self.one.mvm_ok(&["instance", "wake", id, "--override", "1h"]);
        self.one.declare(&self.empty);
        self.one.mvm_ok(&["instance", "sleep", id, "--override", "1h"]);
        self.one.wait_counts(0, 0, 1, PATIENCE);
    }

    fn archive(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    fn export(&self, id: &str) -> PathBuf {
        let path = self.archive("sleeper");
        self.one.mvm_ok(&["instance", "export", id, path_text(&path)]);
        path
    }

    fn import(&self, archive: &Path) -> Output {
        self.other.mvm(&["instance", "import", path_text(archive)])
    }

    /// The archive is refused for this reason, and leaves nothing.
    fn refused(&self, archive: &Path, says: &str) {
        let before = kept(&self.other);
        let output = self.import(archive);
        let said = String::from_utf8_lossy(&output.stderr);
        assert!(
            !output.status.success() && said.contains(says),
            "{says}: {said}\n{before:?}\n{}",
            self.other.log()
        );
        assert_eq!(kept(&self.other), before, "{says}");
    }
}

fn said(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

/// What an agent has of instances, on disk and in its list.
fn kept(agent: &LoneAgent) -> (Vec<String>, usize) {
    let mut names = Vec::new();
    for folder in ["vms", "fake-vms"] {
        let entries = std::fs::read_dir(agent.data_dir().join(folder)).into_iter().flatten().flatten();
        names.extend(entries.map(|entry| entry.file_name().to_string_lossy().into_owned()));
    }
    names.sort();
    let list: Value = serde_json::from_str(&agent.mvm_ok(&["instance", "list", "-o", "json"])).expect("JSON");
    (names, list.as_array().map_or(0, Vec::len))
}

/// An instance as the agent shows it; absent: there is none.
fn get(agent: &LoneAgent, id: &str) -> Option<Value> {
    let output = agent.mvm(&["instance", "get", id, "-o", "json"]);
    output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("JSON"))
}

fn phase(agent: &LoneAgent, id: &str) -> Option<String> {
    Some(get(agent, id)?["phase"].as_str()?.to_owned())
}

#[test]
fn a_sleeper_is_moved_with_its_name_and_address_and_removed_only_when_asked() {
    let (pair, id) = Pair::fake();
    let address = get(&pair.one, &id).expect("it is there")["address"].clone();
    let path = pair.export(&id);
    let still = get(&pair.one, &id).expect("it is still there");
    assert_eq!(still["phase"], "sleeping");
    assert!(still["reason"].as_str().expect("a reason").contains("exported at"), "{still}");
    let output = pair.import(&path);
    assert!(output.status.success(), "{}\n{}", said(&output), pair.other.log());
    let there = get(&pair.other, &id).expect("it is on the other node");
    assert_eq!((&there["phase"], &there["address"]), (&json!("sleeping"), &address));
    pair.other.mvm_ok(&["instance", "wake", &id]);
    assert_eq!(phase(&pair.other, &id).as_deref(), Some("running"));
    for (agent, action) in [(&pair.one, "export"), (&pair.other, "import")] {
        let audit =
            agent.mvm_ok(&["audit", "get", "--tenant", "acme", "--data-dir", path_text(&agent.data_dir())]);
        assert!(audit.contains(action), "{audit}");
    }
    // The first one still has it: what is exported again and removed is gone there.
    pair.one.mvm_ok(&["instance", "export", &id, path_text(&pair.archive("again")), "--remove"]);
    assert_eq!(phase(&pair.one, &id), None);
    assert_eq!(kept(&pair.one).1, 0);
}

#[test]
fn what_is_not_asleep_is_not_exported_and_what_ran_since_is_not_removed() {
    let (pair, id) = Pair::fake();
    pair.export(&id);
    pair.one.mvm_ok(&["instance", "wake", &id]);
    let path = pair.archive("running");
    let output = pair.one.mvm(&["instance", "export", &id, path_text(&path)]);
    assert!(!output.status.success() && said(&output).contains("mvm instance sleep"), "{}", said(&output));
    assert!(!path.exists(), "nothing is left of an export that was refused");
    let events = pair.one.mvm_ok(&["events", "-o", "json"]);
    assert!(events.contains("ExportedInstanceRuns"), "{events}");
    let output = pair.one.mvm(&["instance", "export", &id, "-", "--remove"]);
    assert!(said(&output).contains("--remove needs a file"), "{}", said(&output));
    let taken = pair.archive("sleeper");
    let output = pair.one.mvm(&["instance", "export", &id, path_text(&taken)]);
    assert!(said(&output).contains("already exists"), "{}", said(&output));
    let output = pair.one.mvm(&["instance", "export", "i-0badcafe", path_text(&path)]);
    assert!(said(&output).contains("there is no instance"), "{}", said(&output));
    assert_eq!(phase(&pair.one, &id).as_deref(), Some("running"));
}

#[test]
fn an_archive_can_come_from_standard_output_and_go_to_standard_input() {
    let (pair, id) = Pair::fake();
    let output = pair.one.mvm(&["instance", "export", &id, "-"]);
    assert!(output.status.success() && output.stdout.starts_with(b"mvmsleep"), "{}", said(&output));
    let output = pair.other.mvm_with_input(&["instance", "import", "-"], output.stdout);
    assert!(output.status.success(), "{}", said(&output));
    assert_eq!(phase(&pair.other, &id).as_deref(), Some("sleeping"));
}

#[test]
fn an_archive_that_is_damaged_or_has_no_place_here_is_refused_and_leaves_nothing() {
    let (pair, id) = Pair::fake();
    let path = pair.export(&id);
    let bytes = std::fs::read(&path).expect("the archive can be read");
    let bad = pair.archive("bad");
    for (at, what) in [(9, "version"), (bytes.len() - 40, "a member"), (bytes.len() - 1, "its end")] {
        let mut flipped = bytes.clone();
        flipped[at] ^= 4;
        std::fs::write(&bad, flipped).expect("a file can be written");
        assert!(!pair.import(&bad).status.success(), "{what} was flipped");
        pair.refused(&bad, "bad_archive");
    }
    for length in [0, 10, 300, bytes.len() - 1] {
        std::fs::write(&bad, &bytes[..length]).expect("a file can be written");
        pair.refused(&bad, "bad_archive");
    }
    let forged = Forged::read(&path);
    let mut other_driver = forged.clone();
    other_driver.header["driver"] = json!("qemu");
    pair.refused(&other_driver.write(&bad), "this node runs fake");
    let mut elsewhere = forged.clone();
    elsewhere.header["record"]["pool"] = json!("others");
    pair.refused(&elsewhere.write(&bad), "does not say what acme/others is made of");
    let mut awake = forged.clone();
    awake.header["record"]["phase"] = json!("running");
    pair.refused(&awake.write(&bad), "does not sleep in it");
    let mut other_net = forged.clone();
    other_net.header["record"]["net_id"] = json!(8);
    pair.refused(&other_net.write(&bad), "network 8");
    let mut other_name = forged.clone();
    other_name.header["members"][0]["name"] = json!("../../elsewhere");
    pair.refused(&other_name.write(&bad), "is no file of a snapshot");
    let mut other_snapshot = forged.clone();
    other_snapshot.header["record"]["snapshot"]["digest"] = json!(mvm_proto::Digest::of(b"another"));
    pair.refused(&other_snapshot.write(&bad), "can't be used");

    let output = pair.one.mvm(&["instance", "import", path_text(&path)]);
    assert!(
        said(&output).contains(&format!("instance {id} already exists on this node")),
        "{}",
        said(&output)
    );
    assert!(pair.import(&path).status.success());
    let mut neighbour = forged;
    neighbour.rename(&InstanceId::from_bits(0x0bad_cafe));
    pair.refused(&neighbour.write(&bad), "already has address");
    let mut full = small_pool(0, 0, 0);
    full["tenants"][0]["quotas"]["max_instances_per_pool"] = json!(1);
    pair.other.declare(&full);
    wait_until("the quota to be in force", PATIENCE, || {
        let dir = pair.other.data_dir();
        let desired = pair.other.mvm_ok(&["agent", "desired", "--data-dir", path_text(&dir)]);
        let desired: Value = serde_json::from_str(&desired).expect("JSON");
        desired["tenants"][0]["quotas"]["max_instances_per_pool"] == 1
    });
    neighbour.header["record"]["offset"] = json!(77);
    neighbour.header["record"]["address"] = json!("10.77.0.77");
    neighbour.write(&bad);
    pair.refused(&bad, "max_instances_per_pool is 1");
}

#[test]
fn a_node_whose_document_does_not_name_the_pool_takes_nothing_in() {
    let (mut pair, id) = Pair::fake();
    let path = pair.export(&id);
    pair.other.kill();
    pair.other.declare(&nothing());
    pair.other.start();
    pair.refused(&path, "does not say what acme/workers is made of");
}

/// Starts `agent` so that it ends at `point`, runs `mvm args` against it, and starts it again.
fn end_at(agent: &mut LoneAgent, point: &str, args: &[&str]) -> Output {
    agent.kill();
    agent.start_with(&[("MVM_CRASH_AT", point)]);
    let output = agent.mvm(args);
    agent.wait_crashed(point, PATIENCE);
    agent.start();
    output
}

#[test]
fn an_agent_that_ends_anywhere_in_an_import_leaves_the_instance_whole_or_not_at_all() {
    let (mut pair, id) = Pair::fake();
    let path = pair.export(&id);
    for point in crash::ALL.iter().filter(|point| point.starts_with("import.")) {
        let output = end_at(&mut pair.other, point, &["instance", "import", path_text(&path)]);
        assert!(!output.status.success(), "{point}");
        if *point == "import.recorded" {
            assert_eq!(phase(&pair.other, &id).as_deref(), Some("sleeping"), "{point}");
            pair.other.mvm_ok(&["instance", "wake", &id]);
        } else {
            assert_eq!(phase(&pair.other, &id), None, "{point}");
            wait_until("what no record owns to be swept", PATIENCE, || kept(&pair.other) == (Vec::new(), 0));
        }
    }
}

#[test]
fn an_agent_that_ends_anywhere_in_an_export_loses_nothing() {
    let (mut pair, id) = Pair::fake();
    let path = pair.archive("sleeper");
    let output =
        end_at(&mut pair.one, "export.marked", &["instance", "export", &id, path_text(&path), "--remove"]);
    assert!(!output.status.success() && !path.exists(), "an archive that was not closed is none");
    assert_eq!(phase(&pair.one, &id).as_deref(), Some("sleeping"));
    for point in ["destroy.intended", "destroy.removed", "destroy.released", "destroy.deleted"] {
        let path = pair.archive(point);
        let output = end_at(&mut pair.one, point, &["instance", "export", &id, path_text(&path), "--remove"]);
        assert!(!output.status.success(), "{point}");
        // It was whole on the disk before anything was removed; and what was begun to be removed goes.
        wait_until("the instance to be gone", PATIENCE, || phase(&pair.one, &id).is_none());
        let back = pair.one.mvm(&["instance", "import", path_text(&path)]);
        assert!(back.status.success(), "{point}: {}\n{}", said(&back), pair.one.log());
        assert_eq!(phase(&pair.one, &id).as_deref(), Some("sleeping"), "{point}");
    }
}
