//! `mvm drain` on real processes: what sleeps and what has a disk goes to another node and goes on there, and nothing is left; also when
//! source, target or coordinator end in the middle.
//!
//! With simulated guests, and with microVMs: those need QEMU and the test image (`make test` installs and builds both).

use std::collections::BTreeMap;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{Cluster, ClusterSettings, path_text, wait_for, wait_until};
use serde_json::Value;

const LONG: Duration = Duration::from_secs(600);

/// Pools that may be put to sleep at once.
fn pool(name: &str, counts: (usize, usize), disk_mib: usize) -> String {
    let (running, sleeping) = counts;
    format!(
        "---\napi_version: mvm/v1\nkind: Pool\nmetadata: {{ name: {name}, tenant: acme }}\n\
         spec: {{ image: {{ ref: 'builtin:busybox' }}, resources: {{ vcpus: 1, mem_mib: 128, data_disk_mib: {disk_mib} }},\n\
         counts: {{ running: {running}, sleeping: {sleeping} }}, stopped_retention_seconds: 0,\n\
         runtime_policy: {{ min_running_seconds: 0, min_warm_seconds: 0, drain_timeout_seconds: 10, graceful_shutdown_seconds: 5 }} }}\n"
    )
}

const TENANT: &str = "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: acme }\nspec: { quotas: { max_vcpus: 64, \
                      max_mem_mib: 16384, max_running: 40, max_warm: 40, max_pools: 8, max_instances_per_pool: 40, max_disk_gib: 64 } }\n";

fn apply(cluster: &Cluster, pools: &[String]) {
    let file = cluster.file("objects.yaml", &format!("{TENANT}{}", pools.concat()));
    cluster.mvm_ok(&["apply", "-f", path_text(&file)]);
}

/// Node, address and phase of every instance, by `pool/id`. None while a node does not answer.
fn instances(cluster: &Cluster) -> Option<BTreeMap<String, (String, String, String)>> {
    let output = cluster.mvm(&["instance", "list", "-o", "json", "--timeout", "10s"]);
    let listed: Vec<Value> =
        output.status.success().then(|| serde_json::from_slice(&output.stdout).ok())??;
    let text = |one: &Value, key: &str| one[key].as_str().unwrap_or_default().to_owned();
    let entry = |one: &Value| {
        let name = format!("{}/{}", text(one, "pool_id"), text(one, "instance_id"));
        (name, (text(one, "node_id"), text(one, "address"), text(one, "phase")))
    };
    let all: BTreeMap<_, _> = listed.iter().map(entry).collect();
    // An instance on two nodes would be lost in a map.
    assert_eq!(all.len(), listed.len(), "{listed:?}");
    Some(all)
}

fn count(all: &BTreeMap<String, (String, String, String)>, pool: &str, phase: &str) -> usize {
    all.iter().filter(|(name, (.., is))| name.starts_with(&format!("{pool}/")) && is == phase).count()
}

fn wait_counts(
    cluster: &Cluster,
    wanted: &[(&str, &str, usize)],
) -> BTreeMap<String, (String, String, String)> {
    wait_for(&format!("{wanted:?}\n{}", cluster.logs()), LONG, || {
        let all = instances(cluster)?;
        wanted.iter().all(|(pool, phase, number)| count(&all, pool, phase) == *number).then_some(all)
    })
}

/// Three that sleep, one that runs with a disk, and two that have nothing to lose, all on node-a; node-b is empty.
fn fleet() -> (Cluster, BTreeMap<String, (String, String, String)>) {
    let mut cluster = Cluster::start_with(ClusterSettings::with(&["--node-grace", "10m"]));
    cluster.join("node-a");
    apply(&cluster, &[pool("sleepers", (0, 3), 0), pool("disks", (1, 0), 64), pool("plain", (2, 0), 0)]);
    let wanted = [("sleepers", "sleeping", 3), ("disks", "running", 1), ("plain", "running", 2)];
    let before = wait_counts(&cluster, &wanted);
    cluster.join("node-b");
    (cluster, before)
}

fn drain(cluster: &Cluster, limit: &str) -> String {
    let output = cluster.mvm(&["drain", "node-a", "-w", "--timeout", limit]);
    let told =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{told}\n{}", cluster.logs());
    told
}

/// All that had something to lose is on node-b under its own name and address, and node-a has nothing.
fn check_drained(cluster: &Cluster, before: &BTreeMap<String, (String, String, String)>) {
    let all = wait_counts(
        cluster,
        &[("sleepers", "sleeping", 3), ("disks", "running", 1), ("plain", "running", 2)],
    );
    for (name, (node, address, _)) in &all {
        assert_eq!(node, "node-b", "{name}");
        if !name.starts_with("plain/") {
            let was = before.get(name).unwrap_or_else(|| panic!("{name} was made anew: {all:?}"));
            assert_eq!(*address, was.1, "{name}");
        }
    }
    let drained = cluster.mvm_json(&["get", "node/node-a"]);
    let conditions = drained["status"]["conditions"].as_array().cloned().unwrap_or_default();
    assert!(conditions.iter().any(|one| one["type"] == "Drained" && one["status"] == "True"), "{drained}");
}

#[test]
fn a_drained_node_gives_all_that_it_has_to_another_and_takes_nothing_until_it_is_uncordoned() {
    let (cluster, before) = fleet();
    let told = drain(&cluster, "2m");
    assert!(told.contains(" moved to node-b") && told.contains(" replaced to node-b"), "{told}");
    check_drained(&cluster, &before);
    let why = cluster.mvm_ok(&["explain", "node/node-a"]);
    assert!(why.contains("it is being drained") && why.contains("moved"), "{why}");
    // What moved is an instance like any other: it is woken, and its counts are held.
    let sleeper = before.keys().find(|name| name.starts_with("sleepers/")).expect("one sleeps");
    cluster.mvm_ok(&["instance", "wake", &format!("acme/{sleeper}")]);
    cluster.mvm_ok(&["uncordon", "node-a"]);
    let node = cluster.mvm_json(&["get", "node/node-a"]);
    assert_eq!(
        (&node["spec"]["drain"], &node["spec"]["cordoned"]),
        (&Value::Bool(false), &Value::Bool(false))
    );
    // And back, to the node that has the block of their addresses.
    cluster.mvm_ok(&["instance", "sleep", &format!("acme/{sleeper}"), "--override", "0s"]);
    let output = cluster.mvm(&["drain", "node-b", "-w", "--timeout", "2m"]);
    assert!(output.status.success(), "{}\n{}", String::from_utf8_lossy(&output.stderr), cluster.logs());
    for (name, (node, address, _)) in instances(&cluster).expect("both answer") {
        assert_eq!(node, "node-a", "{name}");
        if let Some(was) = before.get(&name) {
            assert_eq!(address, was.1, "{name}");
        }
    }
}

#[test]
fn what_can_not_go_is_told_with_its_reason_and_stays() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    apply(&cluster, &[pool("sleepers", (0, 1), 0)]);
    wait_counts(&cluster, &[("sleepers", "sleeping", 1)]);
    let output = cluster.mvm(&["drain", "node-a", "-w", "--timeout", "1m"]);
    assert_eq!(output.status.code(), Some(1), "{}", String::from_utf8_lossy(&output.stderr));
    let why = cluster.mvm_ok(&["explain", "node/node-a"]);
    assert!(why.contains("stays") && why.contains("no node takes it"), "{why}");
    let all = instances(&cluster).expect("it answers");
    assert_eq!(count(&all, "sleepers", "sleeping"), 1);
    // A node with room, and it goes.
    cluster.join("node-b");
    drain(&cluster, "1m");
    let all = instances(&cluster).expect("both answer");
    assert!(all.values().all(|(node, ..)| node == "node-b"), "{all:?}");
}

#[test]
fn an_operator_exports_and_imports_through_the_coordinator() {
    let mut cluster = Cluster::start();
    cluster.join("node-a");
    cluster.join("node-b");
    // One on each, so that both documents name the pool.
    let spread = pool("sleepers", (0, 2), 0)
        .replace("counts:", "placement: { spread: { by: node, max_skew: 1 } }, counts:");
    apply(&cluster, &[spread]);
    let all = wait_counts(&cluster, &[("sleepers", "sleeping", 2)]);
    let (id, (.., address, _)) =
        all.iter().find(|(_, (node, ..))| node == "node-a").expect("one sleeps there");
    let name = format!("acme/{id}");
    let file = cluster.path().join("sleeper.mvm");
    cluster.mvm_ok(&["instance", "export", &name, path_text(&file), "--remove"]);
    assert!(std::fs::read(&file).expect("an archive").starts_with(b"mvmsleep"));
    let told = cluster.mvm_fails(&["instance", "import", path_text(&file)], 2);
    assert!(told.contains("--node"), "{told}");
    let mut damaged = std::fs::read(&file).expect("an archive");
    let at = damaged.len() - 1;
    damaged[at] ^= 1;
    let bad = cluster.path().join("bad.mvm");
    std::fs::write(&bad, damaged).expect("a file");
    let told = cluster.mvm_fails(&["instance", "import", path_text(&bad), "--node", "node-b"], 1);
    assert!(told.contains("damaged"), "{told}");
    cluster.mvm_ok(&["instance", "import", path_text(&file), "--node", "node-b"]);
    let back = instances(&cluster).expect("both answer");
    assert_eq!(back.get(id), Some(&("node-b".to_owned(), address.clone(), "sleeping".to_owned())));
}

/// Drains a node under coordinators of which each ends at the transaction about a move that `point` names, until one is done. Each
/// begins to count anew, so that every step is come to. Before the first there would be no progress.
fn drain_with_coordinators_that_end_at(point: &str) {
    let (mut cluster, before) = fleet();
    let data = cluster.coordinator_dir();
    cluster.mvm_ok(&["drain", "node-a"]);
    let mut ends = 0;
    loop {
        cluster.kill_coordinator();
        cluster.launch_coordinator(&data, &[("MVM_CRASH_AT", point)]);
        let mut is_over = false;
        wait_until(&format!("{point} to be passed, or nothing left to do"), LONG, || {
            let node = ["wait", "node/node-a", "--for", "condition=Drained", "--timeout", "1s"];
            is_over = cluster.mvm(&node).status.success();
            is_over || !cluster.coordinator.as_mut().is_some_and(|process| process.is_running())
        });
        if is_over {
            break;
        }
        ends += 1;
        assert!(ends < 100, "it never ends\n{}", cluster.logs());
    }
    assert!(ends >= 3, "it was passed {ends} times only");
    check_drained(&cluster, &before);
}

#[test]
fn a_coordinator_that_ends_after_every_second_step_of_a_drain_goes_on_with_it() {
    drain_with_coordinators_that_end_at("after.moves:2");
}

#[test]
fn a_coordinator_that_ends_after_every_third_step_of_a_drain_goes_on_with_it() {
    drain_with_coordinators_that_end_at("after.moves:3");
}

#[test]
fn a_source_or_target_that_ends_at_any_step_of_a_move_leaves_each_instance_on_one_node() {
    let points = [
        ("node-a", "transfer.marked"),
        ("node-a", "destroy.intended"),
        ("node-a", "destroy.removed"),
        ("node-b", "import.begun"),
        ("node-b", "import.received"),
        ("node-b", "import.recorded"),
        ("node-b", "transfer.marked"),
    ];
    let (mut cluster, before) = fleet();
    let mut from = "node-a";
    for (side, point) in points {
        // The source is now one, now the other.
        let to = if from == "node-a" { "node-b" } else { "node-a" };
        let ends = if side == "node-a" { from } else { to };
        cluster.kill_agent(ends);
        cluster.start_agent_with(ends, &[("MVM_CRASH_AT", point)]);
        cluster.wait_connected(ends);
        cluster.mvm_ok(&["uncordon", to]);
        cluster.mvm_ok(&["drain", from]);
        wait_until(&format!("{ends} to end at {point}\n{}", cluster.logs()), LONG, || {
            !cluster.agents.get_mut(ends).expect("it was started").process.is_running()
        });
        cluster.start_agent(ends, &[]);
        cluster.wait_connected(ends);
        let output = cluster.mvm(&["drain", from, "-w", "--timeout", "3m"]);
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success(), "{point}: {told}\n{}", cluster.logs());
        let all = wait_counts(&cluster, &[("sleepers", "sleeping", 3), ("disks", "running", 1)]);
        for (name, (node, address, _)) in all.iter().filter(|(name, _)| !name.starts_with("plain/")) {
            assert_eq!((node.as_str(), address), (to, &before[name].1), "{point}: {name}");
        }
        from = to;
    }
}

/// Each number by a rename, so that one that is read is whole.
const COUNT: &str = "(n=0; while :; do n=$((n+1)); echo $n > /run/next; mv /run/next /run/count; sleep 1; done) \
                     >/dev/null 2>&1 </dev/null & echo $! > /run/counter; while [ ! -e /run/count ]; do sleep 1; done";

fn number(name: &str, default: usize) -> usize {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

/// `MVM_DRAIN_SLEEPERS` and `MVM_DRAIN_DISKS` say how many; few without them.
#[test]
#[allow(clippy::print_stdout, reason = "the figure is worth more than that it was below a limit")]
fn microvms_go_on_counting_on_the_other_node_with_their_files() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let (sleepers, disks) = (number("MVM_DRAIN_SLEEPERS", 3), number("MVM_DRAIN_DISKS", 2));
    let mut cluster = Cluster::start();
    cluster.join_with_microvms("node-a");
    apply(&cluster, &[pool("sleepers", (sleepers, 0), 0), pool("disks", (disks, 0), 256)]);
    let before = wait_counts(&cluster, &[("sleepers", "running", sleepers), ("disks", "running", disks)]);
    let guest = |name: &str, line: &str| {
        let name = format!("acme/{name}");
        cluster.mvm_ok(&["exec", &name, "--timeout", "3m", "--", "sh", "-c", line]).trim().to_owned()
    };
    for name in before.keys() {
        guest(name, COUNT);
        if name.starts_with("disks/") {
            guest(name, &format!("echo {name} > /data/kept; sync"));
        }
    }
    // A sleeper keeps what it counted; one with a disk runs until it is moved.
    apply(&cluster, &[pool("sleepers", (0, sleepers), 0), pool("disks", (disks, 0), 256)]);
    wait_counts(&cluster, &[("sleepers", "sleeping", sleepers), ("disks", "running", disks)]);
    let counted: BTreeMap<&String, u64> = before
        .keys()
        .filter(|name| name.starts_with("disks/"))
        .map(|name| (name, guest(name, "cat /run/count").parse().expect("a count")))
        .collect();

    let mut cluster = cluster;
    cluster.join_with_microvms("node-b");
    let begun = std::time::Instant::now();
    let told = drain(&cluster, "20m");
    println!("{sleepers} sleepers and {disks} disks moved in {:?}", begun.elapsed());
    for name in before.keys() {
        assert!(told.contains(&format!("acme/{name} moved to node-b")), "{name}: {told}");
    }
    let after = wait_counts(&cluster, &[("sleepers", "sleeping", sleepers), ("disks", "running", disks)]);
    assert_eq!(before.keys().collect::<Vec<_>>(), after.keys().collect::<Vec<_>>());
    let guest = |name: &str, line: &str| {
        let name = format!("acme/{name}");
        cluster.mvm_ok(&["exec", &name, "--timeout", "3m", "--", "sh", "-c", line]).trim().to_owned()
    };
    let count = |name: &str| guest(name, "cat /run/count").parse::<u64>().expect("a count");
    for (name, (node, address, _)) in &after {
        assert_eq!((node.as_str(), address), ("node-b", &before[name].1), "{name}");
        guest(name, "kill -0 $(cat /run/counter)");
        let seen = count(name);
        assert!(seen >= counted.get(name).copied().unwrap_or(1), "{name} counted anew: {seen}");
        wait_until(&format!("{name} to go on counting"), LONG, || count(name) > seen);
        if name.starts_with("disks/") {
            assert_eq!(guest(name, "cat /data/kept"), *name);
        } else {
            // Its tenant's share has no room for all of them at once.
            cluster.mvm_ok(&["instance", "sleep", &format!("acme/{name}")]);
        }
    }
    for node in ["node-a", "node-b"] {
        let events = cluster.mvm_ok(&["events", "--node", node, "-o", "json"]);
        assert!(!events.contains("SnapshotUnusable"), "nothing may have started anew: {events}");
    }
    // Nothing is left behind: no instance, no folder, no process.
    let left: Vec<_> = std::fs::read_dir(cluster.agent_dir("node-a").join("vms"))
        .into_iter()
        .flatten()
        .flatten()
        .map(|entry| entry.file_name())
        .filter(|name| before.keys().any(|id| id.ends_with(&*name.to_string_lossy())))
        .collect();
    assert!(left.is_empty(), "{left:?}");
    let listed = cluster.mvm_json(&["instance", "list", "--node", "node-a"]);
    assert_eq!(listed, Value::Array(Vec::new()));
}
