//! A declared Secret in a real microVM: set from standard input, seen by the guests of the pools that name it, changed, there
//! without a coordinator, and in no file that it does not belong in.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{Cluster, PATIENCE, files_with, metrics, path_text, wait_for, wait_until};
use serde_json::Value;

/// Cold boots on two cores without KVM take seconds each; a healthy change needs a fraction of this.
const LONG: Duration = Duration::from_secs(180);

/// A pool has one instance at most: while that is put to sleep by hand its count gets no other one.
const TENANT: &str = "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: acme }\nspec: { quotas: { max_vcpus: 8, max_mem_mib: 4096, \
                      max_running: 4, max_warm: 4, max_pools: 4, max_instances_per_pool: 1, max_disk_gib: 16 } }\n";

fn pool(name: &str, secrets: &str) -> String {
    format!(
        "---\napi_version: mvm/v1\nkind: Pool\nmetadata: {{ name: {name}, tenant: acme }}\n\
         spec: {{ image: {{ ref: 'builtin:busybox' }}, resources: {{ vcpus: 1, mem_mib: 128 }}, counts: {{ running: 1 }}, \
         secrets: {secrets}, runtime_policy: {{ min_running_seconds: 0, min_warm_seconds: 0, drain_timeout_seconds: 5, \
         graceful_shutdown_seconds: 5 }}, stopped_retention_seconds: 0 }}\n"
    )
}

/// `mvm secret set acme/db PASSWORD=-`, with the value on standard input.
fn set_password(cluster: &Cluster, value: &str) -> String {
    let mut command = cluster.command(&["secret", "set", "acme/db", "PASSWORD=-"]);
    let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().expect("mvm runs");
    child.stdin.take().expect("it is piped").write_all(value.as_bytes()).expect("it is read");
    let output = child.wait_with_output().expect("mvm ends");
    assert!(output.status.success(), "{}", cluster.logs());
    String::from_utf8(output.stdout).expect("mvm prints UTF-8")
}

/// A command to the node's own agent.
fn on_node(cluster: &Cluster, args: &[&str]) -> Option<String> {
    let dir = cluster.agent_dir("node-a");
    let output = cluster.mvm(&[args, &["--data-dir", path_text(&dir)]].concat());
    output.status.success().then(|| String::from_utf8(output.stdout).expect("mvm prints UTF-8"))
}

/// The one instance of a pool that is in this phase.
fn the_one(cluster: &Cluster, pool: &str, phase: &str) -> Option<String> {
    let listed: Value = serde_json::from_str(&on_node(cluster, &["instance", "list", "-o", "json"])?).ok()?;
    let of_pool = |one: &&Value| one["pool_id"] == pool && one["phase"] != "destroyed";
    let found: Vec<&Value> = listed.as_array()?.iter().filter(of_pool).collect();
    match found[..] {
        [one] if one["phase"] == phase => one["instance_id"].as_str().map(str::to_owned),
        _ => None,
    }
}

/// Of an instance that runs: what it is made of, and since when it runs.
fn revision_of(cluster: &Cluster, id: &str) -> (Value, Value) {
    let listed = on_node(cluster, &["instance", "list", "-o", "json"]).expect("the agent answers");
    let listed: Value = serde_json::from_str(&listed).expect("instances are JSON");
    let mut all = listed.as_array().into_iter().flatten();
    let one = all.find(|one| one["instance_id"] == id).expect("the instance is there");
    assert_eq!(one["phase"], "running");
    (one["revision"].clone(), one["since"].clone())
}

fn wait_for_one(cluster: &Cluster, pool: &str, phase: &str) -> String {
    wait_for(&format!("one {phase} instance of {pool}"), LONG, || the_one(cluster, pool, phase))
}

fn in_guest(cluster: &Cluster, id: &str, script: &str) -> String {
    let dir = cluster.agent_dir("node-a");
    cluster.mvm_ok(&["instance", "exec", "--data-dir", path_text(&dir), id, "--", "sh", "-c", script])
}

/// Files with a value outside the folder of secrets.
fn leaked(cluster: &Cluster, secrets: &Path, value: &str) -> Vec<PathBuf> {
    let mut found = files_with(cluster.path(), value.as_bytes());
    found.retain(|path| !path.starts_with(secrets));
    found
}

#[test]
fn a_secret_reaches_the_guests_that_name_it_is_changed_there_and_is_in_no_other_file() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut cluster = Cluster::start();
    let [first, second] = [1, 2].map(|n| format!("canary-{n}-{:016x}", fastrand::u64(..)));
    let (images, secrets) = (mvm_tests::test_images(), cluster.path().join("memory"));
    let flags =
        ["--driver", "qemu", "--images-dir", path_text(&images), "--secrets-dir", path_text(&secrets)];
    let free = [
        "--network",
        "none",
        "--jail",
        "best-effort",
        "--cgroups",
        "best-effort",
        "--ignore-memory-pressure",
    ];
    let flags = [&flags[..], &free].concat();
    cluster.enrol("node-a");
    cluster.start_agent("node-a", &flags);
    cluster.wait_connected("node-a");

    // What has values in memory leaves no core behind.
    let coordinator = cluster.coordinator.as_ref().expect("it runs").pid();
    for pid in [coordinator, cluster.agents["node-a"].process.pid()] {
        let limits = std::fs::read_to_string(format!("/proc/{pid}/limits")).expect("it runs");
        let cores = limits.lines().find_map(|line| line.strip_prefix("Max core file size"));
        let cores: Vec<_> = cores.expect("a limit").split_whitespace().take(2).collect();
        assert!(cores.iter().all(|limit| ["0", "1"].contains(limit)), "{cores:?}");
    }

    // The pool is first, and waits.
    let file = cluster.file("acme.yaml", &format!("{TENANT}{}{}", pool("uses", "[db]"), pool("plain", "[]")));
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
    let plain = wait_for_one(&cluster, "plain", "running");
    wait_until("the pool to say what it waits for", PATIENCE, || {
        let shown = cluster.mvm_ok(&["describe", "pool", "acme/uses"]);
        shown.contains("waits for secret db") && shown.contains("SecretMissing")
    });
    assert_eq!(the_one(&cluster, "uses", "running"), None);
    assert_eq!(set_password(&cluster, &first), "secret/acme/db created\n");
    let uses = wait_for_one(&cluster, "uses", "running");
    cluster.mvm_ok(&["wait", "pool/acme/uses", "--for", "condition=Ready", "--timeout", "90s"]);
    assert_eq!(set_password(&cluster, &first), "secret/acme/db unchanged\n");

    // Looked at without being read: what a program has read is in the guest's memory, and so in its snapshot.
    let listed = in_guest(&cluster, &uses, "ls -ln /run/mvm/secrets/bundle");
    assert!(listed.starts_with("-r--------"), "{listed}");
    assert_eq!(in_guest(&cluster, &plain, "ls /run/mvm/secrets 2>/dev/null | wc -l"), "0\n");
    let act = |cluster: &Cluster, action: &str| on_node(cluster, &["instance", action, &uses]);
    wait_until("it to sleep", LONG, || {
        act(&cluster, "sleep").is_some() && the_one(&cluster, "uses", "sleeping").is_some()
    });
    let other = cluster.file(
        "secret.yaml",
        &format!(
            "api_version: mvm/v1\nkind: Secret\nmetadata: {{ tenant: acme, name: db }}\nspec: {{ data: {{ PASSWORD: {second}, \
             OTHER: {{ base64: Y2FuYXJ5 }} }} }}\n"
        ),
    );
    for args in [
        &["diff", "-f", path_text(&other)][..],
        &["plan", "-f", path_text(&other)],
        &["apply", "--dry-run", "-f", path_text(&other)],
        &["explain", "pool/acme/uses", "-o", "json"],
        &["rollout", "status", "pool/acme/uses", "-o", "yaml"],
        &["rollout", "history", "pool/acme/uses", "-o", "json"],
        &["get", "secrets", "-A", "-o", "yaml"],
        &["describe", "secret/acme/db"],
        &["get", "pools,tenants", "-A", "-o", "json"],
        &["node", "get", "node-a", "-o", "json"],
        &["events"],
        &["diff", "-f", path_text(&file)],
    ] {
        let output = cluster.mvm(args);
        let told = [output.stdout, output.stderr].concat();
        let told = String::from_utf8_lossy(&told);
        assert!(!told.contains("canary") && !told.contains("Y2FuYXJ5"), "{args:?}");
        // Nothing differs from what is declared, and nothing may have happened yet.
        assert!(told.len() > 20 || ["diff", "events"].contains(&args[0]), "{args:?} says something: {told}");
    }
    std::fs::remove_file(&other).expect("it is there");
    for port in [cluster.metrics_port, cluster.agents["node-a"].metrics_port] {
        let page = metrics(port).expect("a page of metrics");
        assert!(page.contains("mvm_") && !page.contains("canary"), "{page}");
    }
    assert_eq!(leaked(&cluster, &secrets, &first), Vec::<PathBuf>::new());

    // Without a coordinator, and with an agent that was killed, it is there.
    cluster.kill_coordinator();
    cluster.kill_agent("node-a");
    cluster.start_agent("node-a", &flags);
    wait_until("the agent", PATIENCE, || the_one(&cluster, "uses", "sleeping").is_some());
    wait_until("it to wake", LONG, || {
        let wake = ["instance", "wake", uses.as_str(), "--override", "0s"];
        on_node(&cluster, &wake).is_some() && the_one(&cluster, "uses", "running").is_some()
    });
    let bundle = in_guest(&cluster, &uses, "cat /run/mvm/secrets/bundle");
    let read: Value = serde_json::from_str(&bundle).expect("a bundle is JSON");
    assert_eq!(read["db"]["PASSWORD"], first.as_str());

    // Changed, the pool that names it is another, and no other pool is.
    let before = revision_of(&cluster, &plain);
    cluster.start_coordinator();
    cluster.wait_connected("node-a");
    assert_eq!(set_password(&cluster, &second), "secret/acme/db configured\n");
    cluster.mvm_ok(&["rollout", "status", "pool/acme/uses", "-w", "--timeout", "180s"]);
    let next = wait_for_one(&cluster, "uses", "running");
    let bundle = in_guest(&cluster, &next, "cat /run/mvm/secrets/bundle");
    assert!(bundle.contains(&second) && !bundle.contains(&first), "{bundle}");
    let history = cluster.mvm_ok(&["rollout", "history", "pool/acme/uses"]);
    assert!(history.contains("db (other values)") && history.contains("secret db changed"), "{history}");
    assert!(!history.contains("canary"), "{history}");
    let untouched = cluster.mvm_json(&["rollout", "history", "pool/acme/plain", "-o", "json"]);
    assert_eq!(untouched.as_array().map(Vec::len), Some(1));
    assert_eq!(revision_of(&cluster, &plain), before);
    let refused = cluster.mvm_fails(&["rollout", "undo", "pool/acme/uses", "--to-revision", "1"], 1);
    assert!(refused.contains("mvm secret set"), "{refused}");
    // The old one is kept for nothing any more.
    wait_until("the old bundle to go", LONG, || files_with(&secrets, first.as_bytes()).is_empty());
    assert_eq!(files_with(&secrets, second.as_bytes()).len(), 1);
    let vms = cluster.agent_dir("node-a").join("vms");
    for value in [&first, &second] {
        let mut found = leaked(&cluster, &secrets, value);
        found.retain(|path| !path.starts_with(&vms));
        assert_eq!(found, Vec::<PathBuf>::new());
    }
}
