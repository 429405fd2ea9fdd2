//! A coordinator and its agents as real processes: enrolment, pushes, deaths and returns.

use std::time::Duration;

use mvm_tests::{
    Cluster, ClusterSettings, PATIENCE, copy_dir, metric, path_text, wait_closely, wait_for, wait_until,
};
use nix::sys::signal::Signal;
use serde_json::Value;

/// Processor time that a coordinator needs for a push, at most, and the rounds that it is divided into.
const WORK_OF_A_PUSH: Duration = Duration::from_millis(40);
const LAST_ROUND: u32 = 8;

fn example(name: &str) -> String {
    format!("{}/../examples/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

/// The ids of all instances that the agent's own state names, by phase.
fn instances(cluster: &Cluster, node: &str) -> Vec<(String, String)> {
    let info = cluster.node(node).expect("the node is known");
    let mut all: Vec<(String, String)> = Vec::new();
    for pool in info["status"]["pools"].as_array().into_iter().flatten() {
        all.push((pool["pool_id"].to_string(), pool["actual"].to_string()));
    }
    all
}

fn mark(value: &Value) -> (u64, u64) {
    (value["epoch"].as_u64().unwrap_or(0), value["generation"].as_u64().unwrap_or(0))
}

fn converged(info: &Value) -> bool {
    mark(&info["status"]["converged"]) == mark(&info["assigned"]) && mark(&info["assigned"]).1 > 0
}

#[test]
fn every_example_for_a_dev_cluster_is_pushed_and_converges() {
    let mut cluster = Cluster::start();
    for (index, example) in mvm_examples::ALL.iter().enumerate() {
        // A node each: what the one before started may not be stopped within its minimum runtime.
        let node = format!("node-{index}");
        cluster.join_with_secrets(&node);
        let file = cluster.file("document.json", example.json);
        cluster.mvm_ok(&["push", "-f", path_text(&file), "--node", &node]);
        let info = cluster.node(&node).unwrap();
        assert!(converged(&info), "{}: {info:#}", example.name);
    }
    // What happened on any of them is told without naming one.
    let events = cluster.mvm_json(&["events"]);
    let events: Vec<_> =
        events.as_array().expect("a list").iter().map(|event| event["node_id"].clone()).collect();
    for node in ["node-0", "node-1"] {
        assert!(events.iter().any(|event| event == node), "{events:?}");
    }
}

#[test]
fn an_agent_killed_at_any_time_comes_back_to_the_same_instances() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", &example("pools")]);
    let before = instances(&cluster, "node-a");
    assert!(!before.is_empty());
    for _ in 0..2 {
        cluster.kill_agent("node-a");
        cluster.wait_node("node-a", "seen as gone", |info| info["connected"] == false);
        cluster.start_agent("node-a", &[]);
        cluster
            .wait_node("node-a", "back and converged", |info| info["connected"] == true && converged(info));
        assert_eq!(instances(&cluster, "node-a"), before);
    }
}

#[test]
fn a_coordinator_killed_while_documents_are_pushed_loses_none_that_it_said_is_stored() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let document = example("minimal");
    let mut acknowledged = 0;
    for round in 0..=LAST_ROUND {
        let mut push = cluster.command(&["push", "-f", &document, "--no-wait", "-o", "json"]);
        let begun = cluster.coordinator.as_ref().unwrap().worked();
        let mut push =
            push.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped()).spawn().unwrap();
        // At another point of the coordinator's work each round, from before the request arrives to after the answer.
        let worked = || cluster.coordinator.as_ref().unwrap().worked() - begun;
        let share = WORK_OF_A_PUSH * round * round / (LAST_ROUND * LAST_ROUND);
        let enough = || round < LAST_ROUND && worked() >= share;
        wait_closely("the moment to kill", PATIENCE, || enough() || push.try_wait().unwrap().is_some());
        cluster.kill_coordinator();
        let output = push.wait_with_output().unwrap();
        cluster.start_coordinator();
        if output.status.success() {
            let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
            let stored = mark(&answer["mark"]);
            let info = cluster.node("node-a").unwrap();
            assert!(
                mark(&info["assigned"]) >= stored,
                "round {round}: {stored:?} was acknowledged, {info:#}"
            );
            acknowledged += 1;
        }
    }
    assert!(acknowledged > 0, "no push was acknowledged");
    cluster.wait_node("node-a", "converged after all", |info| info["connected"] == true && converged(info));
}

#[test]
fn a_document_pushed_while_the_node_is_away_is_delivered_when_it_returns() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.kill_agent("node-a");
    cluster.wait_node("node-a", "seen as gone", |info| info["connected"] == false);
    let told = cluster.mvm_fails(&["push", "-f", &example("minimal"), "--timeout", "5s"], 3);
    assert!(told.contains("stored"), "{told}");
    cluster.start_agent("node-a", &[]);
    cluster.wait_node("node-a", "converged", converged);
}

#[test]
fn a_coordinator_restored_from_an_old_backup_goes_on_above_what_nodes_have_seen() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", &example("minimal")]);
    cluster.kill_coordinator();
    let (data, backup) = (cluster.coordinator_dir(), cluster.path().join("backup"));
    copy_dir(&data, &backup).unwrap();
    cluster.start_coordinator();
    cluster.wait_connected("node-a");
    for _ in 0..3 {
        cluster.mvm_ok(&["push", "-f", &example("pools"), "--node", "node-a"]);
    }
    let seen = mark(&cluster.node("node-a").unwrap()["status"]["accepted"]);
    cluster.kill_coordinator();
    std::fs::remove_dir_all(&data).unwrap();
    copy_dir(&backup, &data).unwrap();
    cluster.start_coordinator();
    cluster.wait_connected("node-a");
    cluster.mvm_ok(&["push", "-f", &example("two-tenants"), "--node", "node-a", "--yes"]);
    let after = mark(&cluster.node("node-a").unwrap()["status"]["accepted"]);
    assert!(after > seen, "{after:?} is not above {seen:?}");
}

#[test]
fn a_removed_node_loses_its_session_at_once_and_returns_only_with_a_new_token() {
    let mut cluster = Cluster::start();
    let old_token = cluster.mvm_ok(&["coordinator", "token", "create", "--node", "node-a", "--quiet"]);
    cluster.join("node-a");
    let port = cluster.agents["node-a"].metrics_port;
    let sessions = || metric(port, "mvm_agent_session_connected");
    // The coordinator counts it before its welcome has arrived.
    wait_until("the welcome", PATIENCE, || sessions() == Some(1.0));
    cluster.mvm_ok(&["node", "remove", "node-a"]);
    wait_until("the session to be closed", Duration::from_secs(10), || sessions() == Some(0.0));
    let list = cluster.mvm_json(&["node", "list"]);
    assert_eq!(list.as_array().map(Vec::len), Some(0), "{list}");
    let dir = cluster.agent_dir("node-a");
    let told = cluster.mvm_fails(&["agent", "certs", "rotate", "--data-dir", path_text(&dir)], 1);
    assert!(told.contains("removed") || told.contains("node_"), "{told}");
    let request = ["agent", "certs", "request", "--data-dir", path_text(&dir), "--token", old_token.trim()];
    cluster.mvm_fails(&request, 1);
    cluster.enrol("node-a");
    cluster.wait_connected("node-a");
}

#[test]
fn a_token_enrols_one_node_once() {
    let cluster = Cluster::start();
    let token = cluster.mvm_ok(&["coordinator", "token", "create", "--node", "node-a", "--quiet"]);
    let request = |dir: &str, more: &[&str]| {
        let dir = cluster.agent_dir(dir);
        cluster.mvm(
            &[&["agent", "certs", "request", "--data-dir", path_text(&dir), "--token", token.trim()], more]
                .concat(),
        )
    };
    assert!(!request("thief", &["--node-id", "node-b"]).status.success(), "the token is bound to node-a");
    assert!(request("node-a", &[]).status.success());
    assert!(!request("again", &[]).status.success(), "a token works once");
    assert!(!cluster.agent_dir("again").join("certs/node.pem").exists());
}

#[test]
fn a_node_that_slept_past_its_certificate_enrols_again_and_keeps_its_document() {
    let settings = ClusterSettings::with(&["--leaf-life", "12s"]);
    let mut cluster = Cluster::start_with(settings);
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", &example("minimal")]);
    let seen = mark(&cluster.node("node-a").unwrap()["status"]["accepted"]);
    cluster.kill_agent("node-a");
    let dir = cluster.agent_dir("node-a");
    wait_for("the certificate to expire", PATIENCE, || {
        let status = cluster.mvm_json(&["agent", "certs", "status", "--data-dir", path_text(&dir)]);
        (status["state"] == "expired").then_some(())
    });
    cluster.enrol("node-a");
    cluster.start_agent("node-a", &[]);
    let info = cluster.wait_node("node-a", "back", |info| info["connected"] == true && converged(info));
    assert!(mark(&info["status"]["accepted"]) >= seen);
}

#[test]
fn sigterm_ends_agent_and_coordinator_with_zero_within_ten_seconds() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", &example("minimal")]);
    let limit = Duration::from_secs(10);
    let agent = &mut cluster.agents.get_mut("node-a").unwrap().process;
    agent.signal(Signal::SIGTERM);
    assert_eq!(agent.wait_exit(limit).code(), Some(0), "{}", agent.log());
    let mut coordinator = cluster.coordinator.take().unwrap();
    coordinator.signal(Signal::SIGTERM);
    assert_eq!(coordinator.wait_exit(limit).code(), Some(0), "{}", coordinator.log());
}

#[test]
fn a_document_goes_straight_to_an_agent_without_a_coordinator() {
    let mut cluster = Cluster::start();
    cluster.enrol("node-a");
    cluster.kill_coordinator();
    cluster.start_agent("node-a", &["--no-session"]);
    let agent = format!("https://127.0.0.1:{}", cluster.agents["node-a"].port);
    let dir = cluster.coordinator_dir();
    for document in ["minimal", "pools"] {
        let file = example(document);
        let args = [
            "push",
            "-f",
            &file,
            "--node",
            "node-a",
            "--direct",
            &agent,
            "--coordinator-dir",
            path_text(&dir),
        ];
        wait_for("the push to succeed", PATIENCE, || cluster.mvm(&args).status.success().then_some(()));
    }
}
