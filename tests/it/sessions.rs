//! Sessions that outlive their instance, their agent and their node, with real microVMs.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::path::Path;
use std::time::{Duration, SystemTime};

use mvm_agent::crash;
use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, PATIENCE, nothing, path_text, small_pool, wait_for, wait_until};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Cold boots on two cores without KVM take seconds each; a healthy change needs a fraction of this.
const LONG: Duration = Duration::from_secs(120);

/// After this long without a word a session with the shortest interval is free: three intervals and thirty seconds.
const FREE_AFTER: Duration = Duration::from_secs(34);

/// Where an agent is killed before a new copy counts; once it does; and while it is brought back. Three times each.
const BEFORE_IT_COUNTS: [&str; 2] = ["persist.content", "persist.index"];
const ONCE_IT_COUNTS: &str = "persist.head";
const BROUGHT_BACK: &str = "persist.brought";

/// An agent with this store, and its only instance.
fn running(store: &Path) -> (LoneAgent, String) {
    let images = mvm_tests::test_images();
    let flags = ["--images-dir", path_text(&images), "--sessions-dir", path_text(store)];
    let mut agent = LoneAgent::new("qemu", &flags);
    agent.declare(&pool(1, 0));
    agent.start();
    let id = only(&agent);
    (agent, id)
}

/// One pool with a data disk and a session on it.
fn pool(running: u32, sleeping: u32) -> Value {
    let mut document = small_pool(running, 0, sleeping);
    let pool = &mut document["tenants"][0]["pools"][0];
    pool["instance_resources"]["data_disk_mib"] = json!(32);
    pool["persist"] = json!({ "path": "/data/session", "store": "local", "every_seconds": 1 });
    pool["stopped_retention_seconds"] = json!(600);
    document
}

fn only(agent: &LoneAgent) -> String {
    agent.wait_counts(1, 0, 0, LONG)["running"].first().expect("one runs").clone()
}

fn shell(agent: &LoneAgent, id: &str, command: &str) -> String {
    agent.mvm_ok(&["instance", "exec", id, "--", "sh", "-c", command])
}

fn status(agent: &LoneAgent, id: &str) -> Value {
    serde_json::from_str(&agent.mvm_ok(&["instance", "get", id, "-o", "json"])).expect("a status is JSON")
}

/// Waits until a copy was made that began after now.
fn wait_copied(agent: &LoneAgent, id: &str) {
    let before = status(agent, id)["persisted_at"].clone();
    let next = || Some(status(agent, id)["persisted_at"].clone()).filter(|at| *at != before && !at.is_null());
    let first = wait_for("a copy to be made", PATIENCE, next);
    // One that was under way may have been past what was written before.
    wait_until("another copy to be made", PATIENCE, || status(agent, id)["persisted_at"] != first);
}

/// Everything in a session: names with their kinds and modes, and what is in the files.
const LOOK: &str = "cd /data/session && find . | sort | while read f; do stat -c '%n %f %u' \"$f\"; done; \
                    cat notes deep/down/er; wc -c < big; md5sum big; readlink link";

#[test]
fn a_session_goes_on_at_another_node_once_its_instance_is_gone() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let store = TempDir::new().expect("a temporary folder can be made");
    let (first, id) = running(store.path());
    let make = "mkdir -p /data/session/deep/down /data/session/empty && cd /data/session && echo one > notes && \
                echo deep > deep/down/er && chmod 640 notes && chown 1000 deep && ln -s deep/down link && \
                head -c 3000000 /dev/urandom > big && echo disk > /data/beside";
    shell(&first, &id, make);
    wait_copied(&first, &id);
    let shown = status(&first, &id);
    assert_eq!(shown["session"], "acme/workers/0");
    assert!(shown["loss_window_seconds"].as_u64().is_some_and(|seconds| seconds < 10), "{shown}");
    assert!(first.mvm_ok(&["instance", "get", &id]).contains("loss window"));

    // The disk stays over sleep, stop and start; nothing is brought back onto it.
    for document in [pool(0, 1), pool(1, 0), pool(0, 0), pool(1, 0)] {
        first.declare(&document);
        let counts = &document["tenants"][0]["pools"][0]["desired_counts"];
        let count = |phase: &str| counts[phase].as_u64().map_or(0, |count| count as usize);
        first.wait_counts(count("running"), 0, count("sleeping"), LONG);
        if count("sleeping") == 1 {
            assert_eq!(status(&first, &id)["loss_window_seconds"], 0);
        }
    }
    assert_eq!(only(&first), id);
    assert_eq!(shell(&first, &id, "cat /data/beside /data/session/notes"), "disk\none\n");
    assert_eq!(status(&first, &id)["session"], "acme/workers/0");

    // Written right before the end: the copy at the stop has it.
    let looks = shell(&first, &id, &format!("echo two > /data/session/notes; {LOOK}"));
    first.declare(&nothing());
    wait_until("the instance to be gone", LONG, || first.census().is_some_and(|census| census.is_empty()));
    let events = first.mvm_ok(&["events"]);
    assert!(!events.contains("SessionNot"), "{events}");
    drop(first);

    let (second, other) = running(store.path());
    assert_ne!(other, id);
    assert_eq!(shell(&second, &other, LOOK), looks, "{}", second.log());
    assert!(looks.contains("two\ndeep\n3000000\n"), "{looks}");
    assert_eq!(shell(&second, &other, "ls /data"), "lost+found\nsession\n");
    let events = second.mvm_ok(&["events"]);
    assert!(events.contains("SessionBroughtBack"), "{events}");
}

#[test]
fn an_agent_that_is_killed_in_the_middle_of_a_copy_leaves_the_old_session_whole() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let store = TempDir::new().expect("a temporary folder can be made");
    let (mut first, id) = running(store.path());
    shell(&first, &id, "mkdir /data/session && cd /data/session && echo old > a && echo old > b");
    wait_copied(&first, &id);

    // The first piece of the new content is in the store; then all of it, and the index, but no head.
    first.kill();
    first.start_with(&[("MVM_CRASH_AT", BEFORE_IT_COUNTS[0])]);
    // The agent may end before it could say that the command did.
    first.mvm(&[
        "instance",
        "exec",
        &id,
        "--",
        "sh",
        "-c",
        "cd /data/session && echo new > a && echo newer > b",
    ]);
    first.wait_crashed(BEFORE_IT_COUNTS[0], LONG);
    for (point, times) in BEFORE_IT_COUNTS.into_iter().zip([2, 3]) {
        die_at(&mut first, point, times);
    }
    let heads = store.path().join("acme/workers/heads/0");
    let newest =
        || std::fs::read_dir(&heads).ok()?.flatten().filter_map(|e| e.metadata().ok()?.modified().ok()).max();
    wait_until("the session to be free", FREE_AFTER * 2, || {
        newest().is_some_and(|at| SystemTime::now().duration_since(at).is_ok_and(|age| age > FREE_AFTER))
    });

    let (second, other) = running(store.path());
    assert_eq!(shell(&second, &other, "cd /data/session && ls && cat a b"), "a\nb\nold\nold\n");

    // The first comes back, finds its session taken, and goes on in another with what it has.
    first.start();
    wait_until("the first to have another session", LONG, || {
        status(&first, &id)["session"] == "acme/workers/1"
    });
    assert_eq!(shell(&first, &id, "cat /data/session/a"), "new\n");
    assert!(first.mvm_ok(&["events"]).contains("SessionTaken"));
    assert_eq!(status(&second, &other)["session"], "acme/workers/0");
}

/// Starts the agent and has it end itself at `point`, so many times.
fn die_at(agent: &mut LoneAgent, point: &str, times: u32) {
    for _ in 0..times {
        agent.launch(&[("MVM_CRASH_AT", point)]);
        agent.wait_crashed(point, LONG);
    }
}

#[test]
fn an_agent_that_is_killed_once_a_copy_counts_or_while_it_is_brought_back_loses_nothing() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let store = TempDir::new().expect("a temporary folder can be made");
    let (mut agent, id) = running(store.path());
    shell(&agent, &id, "mkdir /data/session && cd /data/session && echo one > a && echo two > b");
    wait_copied(&agent, &id);
    agent.kill();
    die_at(&mut agent, ONCE_IT_COUNTS, 3);
    agent.start();
    assert_eq!(only(&agent), id);
    wait_copied(&agent, &id);
    assert_eq!(status(&agent, &id)["session"], "acme/workers/0");

    // Destroyed, so that the next instance has nothing but the session.
    let mut none = pool(0, 0);
    none["tenants"][0]["pools"][0]["stopped_retention_seconds"] = json!(0);
    agent.declare(&none);
    wait_until("the instance to be gone", LONG, || agent.census().is_some_and(|census| census.is_empty()));
    agent.kill();
    agent.declare(&pool(1, 0));
    // The first file is there, and the second is not.
    die_at(&mut agent, BROUGHT_BACK, 3);
    agent.start();
    let other = only(&agent);
    assert_eq!(shell(&agent, &other, "cd /data/session && ls && cat a b"), "a\nb\none\ntwo\n");
    assert_eq!(status(&agent, &other)["session"], "acme/workers/0");
    assert_eq!(agent.vmms().into_keys().collect::<Vec<_>>(), [other], "one VM, and no other");
}

#[test]
fn an_agent_is_killed_at_every_point_of_a_session() {
    let tried = [BEFORE_IT_COUNTS.as_slice(), &[ONCE_IT_COUNTS, BROUGHT_BACK]].concat();
    assert_eq!(tried, crash::SESSION_POINTS);
}

#[test]
fn an_unusable_store_stops_no_instance_and_is_shown() {
    let mut agent = LoneAgent::new("fake", &[]);
    let mut document = pool(1, 0);
    document["tenants"][0]["pools"][0]["persist"]["store"] = json!("file:///etc/sessions");
    agent.declare(&document);
    agent.start();
    let id = only(&agent);
    wait_until("the failure to be shown", PATIENCE, || {
        status(&agent, &id)["persist_error"].as_str().is_some_and(|error| error.contains("--sessions-dir"))
    });
    assert!(agent.mvm_ok(&["events"]).contains("SessionNotBroughtBack"));
    agent.declare(&nothing());
    wait_until("the instance to be gone", LONG, || agent.census().is_some_and(|census| census.is_empty()));
    assert!(!Path::new("/etc/sessions").exists());
}
