//! `mvm push` before it pushes: what a document would do, what it would take away, and what can't be reached.

use mvm_tests::{Cluster, ClusterSettings, free_port, path_text};
use serde_json::Value;

const MINIMAL: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");

/// A document that names nothing and prunes everything.
fn empty(cluster: &Cluster) -> String {
    let text = r#"{"schema_version": 1, "node_id": "node-a", "tenants": [], "prune_unknown_tenants": true}"#;
    path_text(&cluster.file("empty.json", text)).to_owned()
}

/// The plan that a dry run prints, and its exit code.
fn dry_run(cluster: &Cluster, more: &[&str]) -> (i32, Value) {
    let output = cluster.mvm(&[&["push", "--dry-run", "-o", "json"], more].concat());
    let told = String::from_utf8_lossy(&output.stderr);
    let plan = serde_json::from_slice(&output.stdout).unwrap_or_else(|_| panic!("no plan: {told}"));
    (output.status.code().unwrap(), plan)
}

/// How many instances run, as the coordinator knows the node.
fn instances(node: &Value) -> u64 {
    let pools = node["status"]["pools"].as_array().into_iter().flatten();
    pools.map(|pool| pool["actual"]["running"].as_u64().unwrap_or(0)).sum()
}

#[test]
fn a_dry_run_shows_what_the_nodes_planner_would_do_and_changes_nothing() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let (code, plan) = dry_run(&cluster, &["-f", MINIMAL]);
    assert_eq!((code, &plan["effects"]), (5, &serde_json::json!({ "start": 2 })), "{plan}");
    assert_eq!(plan["steps"][0]["action"], "create");
    assert!(cluster.node("node-a").unwrap()["assigned"].is_null(), "nothing is stored");

    cluster.mvm_ok(&["push", "-f", MINIMAL]);
    let (code, plan) = dry_run(&cluster, &["-f", MINIMAL]);
    assert_eq!((code, plan["steps"].as_array().unwrap().len()), (0, 0), "{plan}");
    let agent = format!("https://127.0.0.1:{}", cluster.agents["node-a"].port);
    let data_dir = cluster.coordinator_dir();
    let direct = ["--direct", &agent, "--coordinator-dir", path_text(&data_dir)];
    for how in [&direct[..], &[]] {
        let (code, plan) = dry_run(&cluster, &[&["-f", &empty(&cluster)], how].concat());
        assert_eq!((code, &plan["effects"]), (5, &serde_json::json!({ "destroy": 2 })), "{plan}");
    }
    cluster.kill_agent("node-a");
    cluster.wait_node("node-a", "gone", |info| info["connected"] == false);
    let told = cluster.mvm_fails(&["push", "--dry-run", "-f", MINIMAL], 4);
    assert!(told.contains("node_not_connected"), "{told}");
}

#[test]
fn a_document_that_takes_everything_away_is_pushed_only_where_that_is_said() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.mvm_ok(&["push", "-f", MINIMAL]);
    cluster.wait_node("node-a", "two instances", |info| instances(info) == 2);
    let empty = empty(&cluster);
    let agent = format!("https://127.0.0.1:{}", cluster.agents["node-a"].port);
    let data_dir = cluster.coordinator_dir();
    for how in [&[][..], &["--direct", &agent, "--coordinator-dir", path_text(&data_dir)]] {
        let told = cluster.mvm_fails(&[&["push", "-f", &empty], how].concat(), 2);
        assert!(told.contains("none of the 2 instance(s) on node-a") && told.contains("acme (2)"), "{told}");
        assert!(told.contains("--yes") && told.contains("--dry-run"), "{told}");
    }
    assert_eq!(instances(&cluster.node("node-a").unwrap()), 2);
    cluster.mvm_ok(&["push", "-f", &empty, "--yes"]);
    cluster.wait_node("node-a", "no instance", |info| instances(info) == 0);
    // There is nothing left to lose.
    cluster.mvm_ok(&["push", "-f", &empty]);
}

#[test]
fn a_reference_that_nothing_serves_is_refused_before_anything_is_sent() {
    let cluster = Cluster::init(ClusterSettings::default());
    let text = std::fs::read_to_string(MINIMAL).unwrap().replace("builtin:busybox", "oci:alpine:3");
    let file = cluster.file("oci.json", &text);
    let told = cluster.mvm_fails(&["push", "-f", path_text(&file)], 1);
    assert!(told.contains("tenants[0].pools[0].flake_ref: must not be a container image"), "{told}");
    assert!(told.contains("builtin:busybox, path:/DIR and Nix flakes"), "{told}");
}

#[test]
fn whatever_can_not_be_reached_is_exit_code_4() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    let nowhere = format!("https://127.0.0.1:{}", free_port());
    let token = cluster.mvm_ok(&["coordinator", "token", "create", "--node", "node-b", "--quiet"]);
    let (node_a, node_b) = (cluster.agent_dir("node-a"), cluster.agent_dir("node-b"));
    let (node_a, node_b, data_dir) = (path_text(&node_a), path_text(&node_b), cluster.coordinator_dir());
    let token = token.trim();
    for args in [
        &["node", "list", "--coordinator", &nowhere][..],
        &["push", "-f", MINIMAL, "--coordinator", &nowhere],
        &["push", "-f", MINIMAL, "--direct", &nowhere, "--coordinator-dir", path_text(&data_dir)],
        &["agent", "certs", "request", "--data-dir", node_b, "--coordinator", &nowhere, "--token", token],
        &["agent", "certs", "rotate", "--data-dir", node_a, "--coordinator", &nowhere],
        &["instance", "list", "--endpoint", &format!("agent:{nowhere}")],
        &["instance", "list", "--endpoint", "unix:/nonexistent/agent.sock"],
    ] {
        // Longer than a handshake may take, so that it is the connection that fails.
        let told = cluster.mvm_fails(&[args, &["--timeout", "8s"]].concat(), 4);
        assert!(told.contains("could not reach"), "{args:?}: {told}");
    }
}
