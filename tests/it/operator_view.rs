//! What operators are shown and may name: nodes that are away, events of all nodes, one node among several.

use std::process::Output;

use mvm_tests::{Cluster, PATIENCE, Process, path_text, wait_until};
use serde_json::{Value, json};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");

/// Nodes with two running instances each.
fn cluster_of(nodes: &[&str]) -> Cluster {
    let mut cluster = Cluster::start();
    for node in nodes {
        cluster.join(node);
        cluster.mvm_ok(&["push", "-f", EXAMPLE, "--node", node]);
    }
    cluster
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn list(cluster: &Cluster, args: &[&str]) -> Vec<Value> {
    cluster.mvm_json(args).as_array().expect("a list").clone()
}

#[test]
fn a_command_for_one_node_is_refused_by_the_agent_of_another() {
    let cluster = cluster_of(&["node-a"]);
    let dir = cluster.agent_dir("node-a");
    let here = ["--data-dir", path_text(&dir)];
    let instances = list(&cluster, &[&["instance", "list"], &here[..]].concat());
    let id = instances[0]["instance_id"].as_str().expect("an id");

    for command in [&["instance", "stop", id][..], &["instance", "list"], &["pool", "list"], &["events"]] {
        let told = cluster.mvm_fails(&[command, &["--node", "node-b"], &here[..]].concat(), 1);
        assert!(
            told.contains("node-b") && told.contains("node-a") && told.contains("--coordinator"),
            "{told}"
        );
    }
    let phase = |requested: &str| {
        let found = cluster.mvm_json(&[&["instance", "get", id], &here[..]].concat());
        assert_eq!(found["phase"], requested, "{found}");
    };
    phase("running");
    cluster.mvm_ok(&[&["instance", "stop", id, "--node", "node-a"], &here[..]].concat());
    phase("stopped");
}

#[test]
fn a_node_that_is_not_connected_is_named_with_what_it_last_reported() {
    let mut cluster = cluster_of(&["node-a", "node-b"]);
    cluster.enrol("node-c");
    cluster.kill_agent("node-b");
    cluster.wait_node("node-b", "missed", |node| node["connected"] == false);

    for args in [&["instance", "list"][..], &["instance", "list", "-o", "json"]] {
        let (stdout, stderr) = texts(&cluster.mvm(args));
        assert!(stdout.contains("node-a") && !stdout.contains("node-b"), "{stdout}");
        let told = stderr.lines().find(|line| line.contains("node-b is not connected")).unwrap_or_default();
        assert!(told.contains("its 2 instances are not listed") && told.contains(" ago"), "{stderr}");
        assert!(!stderr.contains("node-c"), "a node that never came has nothing that is missed: {stderr}");
    }
    let (stdout, stderr) = texts(&cluster.mvm(&["pool", "list"]));
    let marked = |line: &str| line.starts_with("node-b (last seen ");
    assert!(stdout.lines().any(marked) && stderr.contains("node-b is not connected"), "{stdout}\n{stderr}");
    assert!(texts(&cluster.mvm(&["tenant", "list"])).1.contains("node-b is not connected"));
    for pool in list(&cluster, &["pool", "list"]) {
        assert_eq!(pool["connected"], pool["node_id"] == "node-a", "{pool}");
        assert!(pool["last_seen_at"].is_string(), "{pool}");
    }

    // It is in the store: a coordinator that starts anew still knows.
    cluster.kill_coordinator();
    cluster.start_coordinator();
    cluster.wait_connected("node-a");
    let (_, stderr) = texts(&cluster.mvm(&["instance", "list"]));
    assert!(stderr.contains("its 2 instances are not listed"), "{stderr}");

    let nodes = list(&cluster, &["node", "list"]);
    let seen: Vec<bool> = nodes.iter().map(|node| node.get("last_seen_at").is_some()).collect();
    assert_eq!(seen, [true, true, false], "{nodes:#?}");
    nodes.iter().for_each(|node| no_empty_times(node, "node"));
    list(&cluster, &["instance", "list"]).iter().for_each(|one| no_empty_times(one, "instance"));
    let (table, _) = texts(&cluster.mvm(&["node", "ls"]));
    let headings = table.lines().next().unwrap_or_default();
    assert!(headings.contains("LAST SEEN") && table.contains(" ago"), "{table}");
    assert!(!table.contains("T0") && !table.contains('Z'), "ages, not times: {table}");
}

/// A time that is not known is absent.
fn no_empty_times(value: &Value, at: &str) {
    match value {
        Value::Object(fields) => {
            for (name, field) in fields {
                let is_time = ["_at", "since", "until", "not_after"].iter().any(|end| name.ends_with(end));
                assert!(!(is_time && field == ""), "{at}.{name} is an empty text");
                no_empty_times(field, &format!("{at}.{name}"));
            }
        }
        Value::Array(items) => items.iter().for_each(|item| no_empty_times(item, at)),
        _ => {}
    }
}

#[test]
fn events_of_all_nodes_outlive_the_coordinator_and_are_followed_through_it() {
    let mut cluster = cluster_of(&["node-a", "node-b"]);
    cluster.kill_coordinator();
    cluster.start_coordinator();
    for node in ["node-a", "node-b"] {
        cluster.wait_connected(node);
    }
    let created = |node: &str, events: &[Value]| {
        events.iter().filter(|event| event["node_id"] == node && event["kind"] == "InstanceCreated").count()
    };
    wait_until("the nodes to tell their events again", PATIENCE, || {
        let events = list(&cluster, &["events"]);
        created("node-a", &events) == 2 && created("node-b", &events) == 2
    });
    let events = list(&cluster, &["events"]);
    let times: Vec<mvm_proto::Timestamp> =
        events.iter().map(|event| event["at"].as_str().expect("a time").parse().expect("a time")).collect();
    assert!(times.is_sorted(), "{events:#?}");
    assert!(list(&cluster, &["events", "--node", "node-a"]).iter().all(|event| event["node_id"] == "node-a"));

    let log = cluster.path().join("followed.log");
    let follower = Process::start(cluster.command(&["events", "-w"]), &log);
    let told = |what: &str, node: &str| {
        follower.log().lines().filter(|line| line.contains(what) && line.contains(node)).count()
    };
    wait_until("what was", PATIENCE, || told("InstanceCreated", "node-b") == 2);
    let instances = list(&cluster, &["instance", "list"]);
    let one = instances.iter().find(|one| one["node_id"] == "node-b").expect("an instance there");
    cluster.mvm_ok(&["instance", "stop", one["instance_id"].as_str().expect("an id")]);
    wait_until("what comes", PATIENCE, || told("InstanceStopped", "node-b") == 1);
    assert_eq!(told("InstanceStopped", "node-a"), 0);
}

#[test]
fn allocation_is_shown_beside_capacity() {
    let cluster = cluster_of(&["node-a"]);
    let node = cluster.node("node-a").expect("a node");
    let usage =
        cluster
            .wait_node("node-a", "two instances allocated", |node| node["status"]["usage"]["instances"] == 2)
            ["status"]["usage"]
            .clone();
    let pool = &list(&cluster, &["pool", "list"])[0];
    assert_eq!(pool["allocated"]["mem_mib"], usage["mem_mib"], "{pool}");
    assert_eq!(pool["allocated"], pool["requested"], "{pool}");
    assert_eq!(pool["node_capacity"], node["info"]["capacity"], "{pool}");
    let (table, _) = texts(&cluster.mvm(&["node", "get", "node-a"]));
    for row in ["capacity", "allocated", "requested", "overcommit"] {
        assert!(table.lines().any(|line| line.starts_with(row)), "{row}: {table}");
    }
    for args in [&["node", "list"][..], &["pool", "list"], &["tenant", "list"]] {
        let (table, _) = texts(&cluster.mvm(args));
        assert!(table.contains("VCPUS") && table.contains("MiB/"), "{table}");
    }
}

#[test]
fn a_fleet_that_lacks_nothing_says_so_and_a_program_reads_empty_lists() {
    let mut cluster = Cluster::start();
    let asked = cluster.mvm(&["top", "demand"]);
    assert!(asked.status.success() && asked.stdout.is_empty());
    let said = String::from_utf8_lossy(&asked.stderr).into_owned();
    assert!(said.contains("nothing lacks a place, and no node is empty"), "{said}");
    assert!(cluster.mvm(&["top", "demand", "--quiet"]).stderr.is_empty());
    let lists = cluster.mvm_json(&["top", "demand"]);
    assert!(lists.as_object().is_some_and(|lists| lists.values().all(|list| list == &json!([]))), "{lists}");
    cluster.join("node-a");
    wait_until("the empty node to be told", PATIENCE, || {
        cluster.mvm_ok(&["top", "demand"]).contains("node-a")
    });
}
