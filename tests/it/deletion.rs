//! A tenant that is deleted with its data, with real processes: the coordinator is killed in between, a node is away.

use std::path::Path;

use mvm_proto::Digest;
use mvm_tests::{Cluster, PATIENCE, path_text, wait_for, wait_until};
use serde_json::{Value, json};

const OBJECTS: &str = "\
api_version: mvm/v1
kind: Tenant
metadata: { name: acme }
spec: { on_delete: delete }
---
api_version: mvm/v1
kind: Pool
metadata: { name: workers, tenant: acme }
spec: { image: { ref: 'builtin:busybox' }, resources: { vcpus: 1, mem_mib: 64 }, counts: { running: 2 } }
";

/// A session of `acme/workers` as an agent leaves it, held by an instance or by none.
fn put_session(store: &Path, slot: u32, number: u64, holder: Option<&str>) {
    let pool = store.join("acme/workers");
    let index = br#"{"entries":[]}"#;
    let (heads, content) = (pool.join(format!("heads/{slot}")), pool.join(format!("content/{slot}")));
    std::fs::create_dir_all(&heads).unwrap();
    std::fs::create_dir_all(&content).unwrap();
    std::fs::write(content.join(Digest::of(index).hex()), index).unwrap();
    let head = json!({
        "version": 1, "number": number, "index": Digest::of(index), "taken_at": null, "every_seconds": 3600,
        "holder": holder.map(|instance| json!({ "node": "node-b", "instance": instance })),
    });
    let path = heads.join(format!("{number:020}"));
    std::fs::write(path.with_extension("new"), head.to_string()).unwrap();
    std::fs::rename(path.with_extension("new"), path).unwrap();
}

/// Starts the agent of `node-a` with its own folders for sessions and secrets.
fn start(cluster: &mut Cluster) {
    let (sessions, secrets) = (cluster.path().join("sessions"), cluster.path().join("secrets"));
    let flags = ["--sessions-dir", path_text(&sessions), "--secrets-dir", path_text(&secrets)];
    cluster.start_agent("node-a", &flags);
    cluster.wait_connected("node-a");
}

fn told(cluster: &Cluster, name: &str, part: &str) {
    wait_for(&format!("{name} to be said to wait for {part}"), PATIENCE, || {
        let shown = cluster.mvm(&["describe", name]);
        let shown = String::from_utf8_lossy(&shown.stdout).replace(['\n', ' '], "");
        shown.contains(&part.replace(' ', "")).then_some(())
    });
}

#[test]
fn a_tenant_goes_with_its_sessions_and_secrets_although_coordinator_and_agent_are_killed_in_between() {
    let mut cluster = Cluster::start();
    let (sessions, secrets) = (cluster.path().join("sessions"), cluster.path().join("secrets"));
    std::fs::create_dir(&secrets).unwrap();
    std::fs::write(secrets.join("acme"), b"TOKEN=hunter2").unwrap();
    put_session(&sessions, 0, 1, None);
    put_session(&sessions, 1, 4, Some("i-00000007"));
    cluster.enrol("node-a");
    start(&mut cluster);
    let file = cluster.file("acme.yaml", OBJECTS);
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
    cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Ready", "--timeout", "60s"]);

    // An operator sees them, and deletes one that is not in use.
    let listed = || cluster.mvm_json(&["session", "list", "-t", "acme"]);
    let names = |listed: Value| -> Vec<String> {
        let named = |one: &Value| format!("{} {}", one["session"], one["state"]).replace('"', "");
        listed.as_array().unwrap().iter().map(named).collect()
    };
    assert_eq!(names(listed()), ["acme/workers/0 free", "acme/workers/1 in_use"]);
    let told_why = cluster.mvm_fails(&["session", "delete", "acme/workers/1"], 1);
    assert!(told_why.contains("it is in use by i-00000007 of node node-b"), "{told_why}");
    let shown = cluster.mvm_ok(&["session", "delete", "acme/workers/0"]);
    assert_eq!(shown, "acme/workers/0 deleted from local\n");
    let told_why = cluster.mvm_fails(&["session", "delete", "acme/workers/0"], 1);
    assert!(told_why.contains("there is no session acme/workers/0"), "{told_why}");
    cluster.mvm_ok(&["session", "delete", "--older-than", "30d", "-t", "acme"]);
    assert_eq!(names(listed()), ["acme/workers/1 in_use"]);

    // Its node is away: that is what it waits for.
    cluster.kill_agent("node-a");
    wait_until("the node to be away", PATIENCE, || {
        cluster.node("node-a").is_some_and(|node| node["connected"] == false)
    });
    cluster.mvm_ok(&["delete", "tenant/acme"]);
    told(&cluster, "pool/acme/workers", "node node-a: it is not connected");
    cluster.kill_coordinator();
    cluster.start_coordinator();
    told(&cluster, "tenant/acme", "waits for pool acme/workers");
    let again = cluster.mvm_fails(&["apply", "-f", path_text(&file)], 1);
    assert!(again.contains("being_deleted") && again.contains("--for=delete"), "{again}");

    // It returns, and says what it waits for itself.
    start(&mut cluster);
    told(&cluster, "tenant/acme", "acme/workers/1: it is in use by i-00000007 of node node-b");
    cluster.kill_coordinator();
    cluster.kill_agent("node-a");
    cluster.start_coordinator();
    put_session(&sessions, 1, 5, None);
    start(&mut cluster);
    cluster.mvm_ok(&["wait", "tenant/acme", "--for", "delete", "--timeout", "60s"]);
    assert!(!sessions.join("acme").exists() && !secrets.join("acme").exists());
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
    cluster.mvm_ok(&["wait", "pool/acme/workers", "--for", "condition=Ready", "--timeout", "60s"]);
}
