//! What sleeps goes on where it was, and what is forked is someone else: with real microVMs, networks and files.
//!
//! Needs root, QEMU and the test image (`make test` installs and builds both); says so when it can't run, and fails in
//! CI.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, NetNs, Process, path_text, pss_mib, wait_until};
use serde_json::{Value, json};

const LONG: Duration = Duration::from_secs(180);
const CYCLES: u32 = 100;
const FORKS: u32 = 20;
/// What a fork at rest may take of the host, by its share of what is shared.
const FORK_MIB: u64 = 40;

/// A network that is nobody's, for examples and tests.
const NODE_ADDRESS: &str = "198.51.100.1";
const WORLD_ADDRESS: &str = "198.51.100.2";

fn document(running: u32, sleeping: u32, data_disk_mib: u64) -> Value {
    json!({
        "schema_version": 1, "node_id": "node-a",
        "prune_unknown_tenants": true, "prune_unknown_pools": true,
        "tenants": [{
            "tenant_id": "acme",
            "network": {"tenant_net_id": 7, "ipv4_subnet": "10.77.7.0/24"},
            "quotas": {"max_vcpus": 64, "max_mem_mib": 8192, "max_running": 64, "max_warm": 8, "max_pools": 4,
                       "max_instances_per_pool": 64, "max_disk_gib": 64},
            "egress": {"mode": "nat"},
            "pools": [{
                "pool_id": "web", "flake_ref": "builtin:busybox", "profile": "minimal",
                "instance_resources": {"vcpus": 1, "mem_mib": 128, "data_disk_mib": data_disk_mib},
                "desired_counts": {"running": running, "warm": 0, "sleeping": sleeping},
                "runtime_policy": {"min_running_seconds": 0, "min_warm_seconds": 0, "drain_timeout_seconds": 5,
                                   "graceful_shutdown_seconds": 5},
                "stopped_retention_seconds": 0
            }]
        }]
    })
}

/// Writes down every line that comes on a connection, and how many connections there were.
const SERVER: &str = r#"
import socket, sys
server = socket.socket()
server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
server.bind(("0.0.0.0", 9000))
server.listen()
count = 0
while True:
    connection, _ = server.accept()
    count += 1
    with open(sys.argv[1], "a") as lines:
        for line in connection.makefile():
            lines.write(f"{count} {line.strip()}\n")
            lines.flush()
"#;

struct Site {
    agent: LoneAgent,
    world: NetNs,
}

impl Site {
    fn start(document: &Value) -> Self {
        let images = mvm_tests::test_images();
        let flags = ["--images-dir", path_text(&images), "--max-vcpus", "64"];
        let mut agent = LoneAgent::with_networks("qemu", &flags);
        let world = NetNs::new("world");
        let node = agent.namespace();
        node.connect("up0", &format!("{NODE_ADDRESS}/24"), &world, "eth0", &format!("{WORLD_ADDRESS}/24"));
        node.ok(&["ip", "route", "add", "default", "via", WORLD_ADDRESS]);
        agent.declare(document);
        agent.start();
        Self { agent, world }
    }

    fn guest(&self, instance: &str, line: &str) -> String {
        self.agent.mvm_ok(&["instance", "exec", instance, "--", "sh", "-c", line])
    }

    /// Takes everything away again: microVMs outlive their agent.
    fn clear(&self) {
        self.agent.declare(&mvm_tests::nothing());
        self.agent.wait_counts(0, 0, 0, LONG);
    }
}

/// The numbers that arrived, and on how many connections.
fn arrived(path: &Path) -> (u64, Vec<u64>) {
    let text = match std::fs::read_to_string(path) {
        Ok(text) => text,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => String::new(),
        Err(error) => panic!("{}: {error}", path.display()),
    };
    // The last line may still be written.
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    let read = |line: &str| line.split_once(' ').and_then(|(c, n)| Some((c.parse().ok()?, n.parse().ok()?)));
    let lines: Vec<(u64, u64)> =
        whole.lines().map(|line| read(line).unwrap_or_else(|| panic!("not a count: {line:?}"))).collect();
    let connections = lines.iter().map(|(connection, _)| *connection).max().unwrap_or(0);
    (connections, lines.into_iter().map(|(_, number)| number).collect())
}

#[test]
fn a_hundred_sleeps_lose_no_count_no_connection_and_no_file() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let site = Site::start(&document(0, 1, 16));
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let lines = dir.path().join("lines");
    let mut server = site.world.command("python3");
    server.args(["-c", SERVER, path_text(&lines)]);
    let _server = Process::start(server, &dir.path().join("server.log"));
    let census = site.agent.wait_counts(0, 0, 1, LONG);
    let id = census["sleeping"].first().expect("one sleeps").clone();
    site.agent.mvm_ok(&["instance", "wake", &id]);
    let count = "n=0; while :; do n=$((n+1)); echo $n; sleep 0.05; done";
    site.guest(&id, &format!("({count} | nc {WORLD_ADDRESS} 9000) >/dev/null 2>&1 </dev/null &"));
    site.guest(&id, "echo '10.99.0.9 db' >> /etc/hosts");
    let newest = || arrived(&lines).1.last().copied().unwrap_or(0);
    wait_until("the count to reach the world", LONG, || newest() > 0);
    for cycle in 0..CYCLES {
        let text = format!("written before sleep {cycle}");
        site.guest(&id, &format!("echo {text} > /data/{cycle}"));
        site.agent.mvm_ok(&["instance", "sleep", &id]);
        let census = site.agent.wait_counts(0, 0, 1, LONG);
        assert!(census["sleeping"].contains(&id));
        assert!(site.agent.vmms().is_empty(), "what sleeps has no VMM");
        let before = newest();
        site.agent.mvm_ok(&["instance", "wake", &id]);
        assert_eq!(site.guest(&id, &format!("cat /data/{cycle}")).trim(), text);
        wait_until("the count to go on", LONG, || newest() > before);
    }
    let (connections, numbers) = arrived(&lines);
    assert_eq!(connections, 1, "the connection is the one from the beginning");
    let expected: Vec<u64> = (1..=numbers.len() as u64).collect();
    assert_eq!(numbers, expected, "no number is lost, doubled or out of turn");
    let files = site.guest(&id, "ls /data | grep -c '^[0-9]*$'");
    assert_eq!(files.trim(), CYCLES.to_string());
    let told = site.guest(&id, "hostname; grep -c ' db$' /etc/hosts");
    assert_eq!(told.lines().collect::<Vec<_>>(), [&id, "1"], "a wake changes nothing that its guest wrote");
    // What was acted on by hand is left alone for a while, also by pruning.
    for end in ["stop", "destroy"] {
        site.agent.mvm_ok(&["instance", end, &id]);
    }
    site.clear();
}

#[test]
#[allow(clippy::print_stdout, reason = "the figure is worth more than that it was below a limit")]
fn twenty_forks_share_their_memory_and_nothing_else() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let site = Site::start(&document(FORKS, 0, 0));
    let census = site.agent.wait_counts(FORKS as usize, 0, 0, LONG);
    let vmms = site.agent.vmms();
    let shares: Vec<u64> = vmms.values().map(|pids| pss_mib(pids[0])).collect();
    assert_eq!(shares.len(), FORKS as usize);
    println!("MiB by share of {FORKS} forks: {shares:?}");
    let events = site.agent.mvm_ok(&["events"]);
    assert!(shares.iter().all(|share| *share < FORK_MIB), "{shares:?}\n{events}");
    let mut seen = [const { BTreeSet::new() }; 5];
    for id in &census["running"] {
        let line = "cat /etc/machine-id; hostname; cat /sys/class/net/eth0/address; \
                    busybox ifconfig eth0 | grep 'inet addr'; head -c 1048576 /dev/urandom | sha256sum; \
                    cat /sys/devices/system/clocksource/clocksource0/current_clocksource; cat /etc/hosts";
        let told = site.guest(id, line);
        let told: Vec<&str> = told.lines().map(str::trim).collect();
        let names = ["127.0.0.1 localhost", id].join(" ");
        assert_eq!(told.get(6..), Some([names.as_str(), "::1 localhost"].as_slice()), "{told:?}");
        // Its kernel has nothing left to do that booting began.
        assert_ne!(told[5], "tsc-early");
        for (seen, told) in seen.iter_mut().zip(&told) {
            assert!(seen.insert((*told).to_owned()), "two forks have the same {told}");
        }
        assert_eq!(told[1], id, "a fork is called what it is");
    }
    // Forked, not booted: the template is the only one that ever booted.
    let events = site.agent.mvm_ok(&["events", "-o", "json"]);
    assert_eq!(events.matches("TemplateMade").count(), 1, "{events}");
    site.clear();
}
