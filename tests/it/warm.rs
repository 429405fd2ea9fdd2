//! Templates with a warm-up, wakes that say where their time went, and what instances cost in memory: with real microVMs.
//!
//! Needs QEMU and the test image (`make test` installs and builds both); says so when it can't run, and fails in CI.

use std::time::{Duration, Instant};

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, nothing, path_text, pss_mib, small_pool, wait_until};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(120);
const MIB: u64 = 1024 * 1024;

fn agent() -> LoneAgent {
    let images = mvm_tests::test_images();
    LoneAgent::new("qemu", &["--images-dir", path_text(&images)])
}

fn warmed(running: u32, command: &[&str]) -> Value {
    let mut document = small_pool(running, 0, 0);
    document["tenants"][0]["pools"][0]["warmup"] = json!({ "command": command });
    document
}

fn json_of(agent: &LoneAgent, args: &[&str]) -> Value {
    let text = agent.mvm_ok(&[args, &["-o", "json"]].concat());
    serde_json::from_str(&text).expect("mvm prints JSON")
}

#[test]
fn every_fork_has_what_the_warm_up_left_and_wakes_say_where_their_time_went() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut agent = agent();
    let script = "echo warmed > /run/left-behind; hostname >> /run/left-behind; ls /run/mvm/secrets /data >> /run/left-behind 2>&1; true";
    agent.declare(&warmed(2, &["sh", "-c", script]));
    agent.start();
    let ids: Vec<String> = agent.wait_counts(2, 0, 0, LONG)["running"].iter().cloned().collect();
    let left: Vec<String> = ids
        .iter()
        .map(|id| agent.mvm_ok(&["instance", "exec", id, "--", "cat", "/run/left-behind"]))
        .collect();
    assert!(left[0].starts_with("warmed\n"), "{}", left[0]);
    assert_eq!(left[0], left[1], "it ran once, for both");
    assert!(ids.iter().all(|id| !left[0].contains(id.as_str())), "it had nobody's name: {}", left[0]);
    let events = agent.mvm_ok(&["events"]);
    assert_eq!(events.matches("TemplateMade").count(), 1, "{events}");

    let id = ids[0].as_str();
    agent.mvm_ok(&["instance", "sleep", id]);
    let woken = json_of(&agent, &["instance", "wake", id]);
    assert_eq!((&woken["phase"], &woken["wake"]["kind"]), (&json!("running"), &json!("woken")), "{woken}");
    let ms = |name: &str| woken["wake"][name].as_f64().unwrap_or_default();
    assert!(ms("restored_ms") > 1.0 && ms("total_ms") > ms("restored_ms"), "{woken}");
    agent.mvm_ok(&["instance", "warm", id]);
    let resumed = agent.mvm(&["instance", "wake", id]);
    let told = String::from_utf8_lossy(&resumed.stderr).into_owned();
    assert!(told.contains("resumed in ") && told.contains(" ms"), "{told}");

    // Measured after the step that changed it, beside whoever asked for that.
    let memory = || json_of(&agent, &["instance", "get", id])["memory_used_bytes"].as_u64().unwrap_or(0);
    wait_until("its memory to be measured", LONG, || memory() > 4 * MIB);
    let stats = agent.mvm_ok(&["node", "stats"]);
    assert!(stats.contains("by running instances"), "{stats}");
}

#[test]
fn where_the_warm_up_fails_instances_boot_and_an_event_says_why() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut agent = agent();
    agent.declare(&warmed(1, &["sh", "-c", "echo there is no model here >&2; exit 3"]));
    agent.start();
    agent.wait_counts(1, 0, 0, LONG);
    let events = agent.mvm_ok(&["events"]);
    let line = events.lines().find(|line| line.contains("TemplateFailed")).unwrap_or_default();
    assert!(line.contains("ended with exit code 3"), "{events}");
    assert!(line.contains("its output ends with `there is no model here`"), "{events}");
    agent.declare(&nothing());
    agent.wait_counts(0, 0, 0, LONG);
}

/// The file that all forks of the node's only template map: what is in it, and how much of it is there.
fn template(agent: &LoneAgent) -> (String, u64) {
    let vms = std::fs::read_dir(agent.data_dir().join("vms")).expect("there are VMs");
    let mut files = vms.filter_map(|entry| Some(entry.ok()?.path().join("snapshot/memory")));
    let file = files.find(|path| path.exists()).expect("there is a template");
    let digest = mvm_proto::Digest::of(&std::fs::read(&file).expect("a template can be read"));
    let blocks = std::os::unix::fs::MetadataExt::blocks(&file.metadata().expect("it is there"));
    (digest.to_string(), blocks)
}

#[test]
#[allow(clippy::print_stdout, reason = "the figures are worth more than that they were within limits")]
fn a_warm_instance_gives_back_what_its_guest_freed_and_others_keep_theirs() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    // What may be started without its jail gives nothing back.
    let images = mvm_tests::test_images();
    let mut agent = LoneAgent::new("qemu", &["--images-dir", path_text(&images), "--jail", "required"]);
    agent.declare(&small_pool(2, 0, 0));
    agent.start();
    let ids: Vec<String> = agent.wait_counts(2, 0, 0, LONG)["running"].iter().cloned().collect();
    let (id, other) = (ids[0].as_str(), ids[1].as_str());
    let guest = |id: &str, line: &str| agent.mvm_ok(&["instance", "exec", id, "--", "sh", "-c", line]);
    let free_kib = || -> u64 {
        let told = guest(id, "grep MemFree: /proc/meminfo");
        told.split_whitespace().nth(1).and_then(|number| number.parse().ok()).expect("a number")
    };
    let share = || pss_mib(agent.vmms()[id][0]);
    let whole = template(&agent);
    for id in &ids {
        guest(id, "head -c 4194304 /dev/urandom > /run/kept; sha256sum /run/kept > /run/sum");
    }
    guest(id, "head -c 50331648 /dev/zero > /run/big; rm /run/big");
    let (running, free) = (share(), free_kib());

    // A guest has only so much time for it, and on a busy machine may not come to it: then the next rest does.
    let (mut rests, deadline) = (Vec::new(), Instant::now() + LONG);
    while rests.last().is_none_or(|warm| warm + 20 >= running) {
        assert!(Instant::now() < deadline, "{running} MiB running, {rests:?} warm\n{}", agent.log());
        agent.mvm_ok(&["instance", "wake", id]);
        agent.mvm_ok(&["instance", "warm", id]);
        rests.push(share());
    }
    println!("MiB by share: {running} running, {rests:?} warm");
    assert_eq!(template(&agent), whole, "nobody else's memory went with it");

    // Asleep it is what it gave back, and awake it has all of it again.
    for back in ["resumed", "woken"] {
        let woken = json_of(&agent, &["instance", "wake", id]);
        assert_eq!(woken["wake"]["kind"], back, "{woken}");
        wait_until("the guest to have its memory again", LONG, || free_kib() + 8 * 1024 > free);
        guest(id, "head -c 50331648 /dev/zero > /run/big; rm /run/big; sha256sum -c /run/sum");
        agent.mvm_ok(&["instance", "warm", id]);
        agent.mvm_ok(&["instance", "sleep", id]);
    }
    guest(other, "sha256sum -c /run/sum");
    assert_eq!(template(&agent), whole);
    agent.mvm_ok(&["instance", "stop", id]);
    agent.mvm_ok(&["instance", "destroy", id]);
    agent.declare(&nothing());
    agent.wait_counts(0, 0, 0, LONG);
}
