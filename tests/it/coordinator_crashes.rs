//! Coordinator processes that end themselves by SIGKILL around what they make durable and what they send: a sample of the
//! table in `coordinator/tests/it/crashes.rs`, with the real binary, a real agent and the real command line.

use std::os::unix::process::ExitStatusExt as _;

use mvm_tests::{Cluster, PATIENCE, path_text, wait_until};
use serde_json::{Value, json};

/// See `coordinator::crash`.
const POINTS: [&str; 12] = [
    "before.audit",
    "after.audit",
    "before.pools_of",
    "after.pools_of",
    "before.placed",
    "after.placed",
    "before.document",
    "after.document",
    "before.status",
    "after.status",
    "before.tokens",
    "after.nodes",
];

fn objects(tenant: &str) -> String {
    format!(
        "api_version: mvm/v1\nkind: Tenant\nmetadata: {{ name: {tenant} }}\nspec: {{}}\n---\napi_version: mvm/v1\nkind: Pool\n\
         metadata: {{ tenant: {tenant}, name: web }}\nspec:\n  image: {{ ref: \"builtin:busybox\" }}\n  \
         resources: {{ vcpus: 1, mem_mib: 64 }}\n  counts: {{ running: 1 }}\n"
    )
}

/// Asks for a token and, where there is one, for the node's certificate.
fn join(cluster: &Cluster, node: &str) {
    let token = cluster.mvm(&["coordinator", "token", "create", "--node", node, "--quiet"]);
    let token = String::from_utf8(token.stdout).expect("mvm prints UTF-8");
    if !token.trim().is_empty() {
        let dir = cluster.agent_dir(node);
        let args = ["agent", "certs", "request", "--data-dir", path_text(&dir), "--token", token.trim()];
        cluster.mvm(&[&args[..], &["--san", "127.0.0.1", "--quiet"]].concat());
    }
}

/// An agent waits longer before each try to reach a coordinator that ends again and again, so each half has its own.
#[test]
fn a_coordinator_process_that_is_killed_as_it_writes_objects_goes_on_where_it_was() {
    kill_at(&POINTS[..6]);
}

#[test]
fn a_coordinator_process_that_is_killed_as_it_speaks_with_nodes_goes_on_where_it_was() {
    kill_at(&POINTS[6..]);
}

fn kill_at(points: &[&str]) {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    for (at, point) in points.iter().copied().enumerate() {
        let (tenant, node) = (format!("t{at}"), format!("new-{at}"));
        let file = cluster.file(&format!("{tenant}.yaml"), &objects(&tenant));
        let file = path_text(&file).to_owned();
        cluster.kill_coordinator();
        let data_dir = cluster.coordinator_dir();
        cluster.launch_coordinator(&data_dir, &[("MVM_CRASH_AT", point)]);
        let mut process = cluster.coordinator.take().expect("it was started");
        wait_until(&format!("the coordinator to end at {point}"), PATIENCE, || {
            cluster.mvm(&["apply", "-f", &file, "--timeout", "2s"]);
            join(&cluster, &node);
            !process.is_running()
        });
        let ended = process.wait_exit(PATIENCE);
        assert_eq!(ended.signal(), Some(9), "{point}: {ended}\n{}", process.log());

        cluster.start_coordinator();
        cluster.mvm_ok(&["apply", "-f", &file]);
        assert!(cluster.mvm_ok(&["apply", "-f", &file]).lines().all(|line| line.ends_with(" unchanged")));
        let pool = format!("pool/{tenant}/web");
        cluster.mvm_ok(&["wait", &pool, "--for", "condition=Ready", "--timeout", "60s"]);
        let shown = cluster.mvm_json(&["get", &pool]);
        assert_eq!(
            (&shown["status"]["counts"]["running"], &shown["metadata"]["generation"]),
            (&json!(1), &json!(1)),
            "{point}: {shown}"
        );
        assert_eq!(
            shown["status"]["placed"],
            json!([{ "node": "node-a", "wanted": counts(1), "actual": counts(1) }])
        );
    }
    // One instance of each pool, and none beside them.
    let instances = cluster.mvm_json(&["instance", "list"]);
    let listed = instances.as_array().or_else(|| instances["instances"].as_array()).map(Vec::len);
    assert_eq!(listed, Some(points.len()), "{instances}");
}

fn counts(running: u32) -> Value {
    json!({ "running": running, "warm": 0, "sleeping": 0 })
}
