//! Two tenants with two real microVMs each: what passes between them, and what does not.
//!
//! The node's links are in a network namespace of the test's own, and the world is another. Needs root, QEMU and the
//! test image (`make test` installs and builds both); says so when it can't run, and fails in CI.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, NetNs, Process, path_text, wait_until};
use serde_json::{Value, json};

/// Four cold boots on two cores without KVM.
const LONG: Duration = Duration::from_secs(180);

/// A network that is nobody's, for examples and tests.
const NODE_ADDRESS: &str = "198.51.100.1";
const WORLD_ADDRESS: &str = "198.51.100.2";

fn tenant(id: &str, net: u16, egress: &str, image: &Path) -> Value {
    json!({
        "tenant_id": id,
        "network": {"tenant_net_id": net, "ipv4_subnet": format!("10.77.{net}.0/24")},
        "quotas": {"max_vcpus": 8, "max_mem_mib": 4096, "max_running": 8, "max_warm": 8, "max_pools": 4,
                   "max_instances_per_pool": 8, "max_disk_gib": 8},
        "egress": {"mode": egress},
        "pools": [{
            "pool_id": "web", "flake_ref": format!("path:{}", path_text(image)), "profile": "minimal",
            "instance_resources": {"vcpus": 1, "mem_mib": 128, "data_disk_mib": 0},
            "desired_counts": {"running": 2, "warm": 0, "sleeping": 0},
            "runtime_policy": {"min_running_seconds": 0, "min_warm_seconds": 0, "graceful_shutdown_seconds": 5},
            "stopped_retention_seconds": 0
        }]
    })
}

fn document(tenants: &[Value]) -> Value {
    json!({
        "schema_version": 1, "node_id": "node-a",
        "prune_unknown_tenants": true, "prune_unknown_pools": true,
        "tenants": tenants,
    })
}

/// The test image with IPv6 switched on: a guest that could speak it and is not heard.
fn image_with_ipv6(target: &Path) {
    let images = mvm_tests::test_images().join("sha256");
    let image = std::fs::read_dir(images).expect("images are there").flatten().next().expect("one is there");
    let line = std::fs::read_to_string(image.path().join("cmdline")).expect("it has a command line");
    std::fs::create_dir_all(target).expect("a folder can be made");
    for file in ["kernel", "initrd"] {
        std::fs::copy(image.path().join(file), target.join(file)).expect("the image's files can be copied");
    }
    std::fs::write(target.join("cmdline"), line.replace("ipv6.disable=1", ""))
        .expect("a command line can be written");
}

struct Site {
    agent: LoneAgent,
    world: NetNs,
    _server: Process,
    _dir: tempfile::TempDir,
}

/// Addresses of a tenant's running instances, by instance.
fn addresses(agent: &LoneAgent, tenant: &str) -> Vec<(String, String)> {
    let listed = agent.mvm_ok(&["instance", "list", "-o", "json"]);
    let listed: Value = serde_json::from_str(&listed).expect("JSON");
    let instances = listed.as_array().or_else(|| listed["instances"].as_array()).expect("a list").clone();
    let mine = instances.iter().filter(|i| i["tenant_id"] == tenant && i["phase"] == "running");
    let text = |value: &Value| value.as_str().expect("text").to_owned();
    mine.map(|i| (text(&i["instance_id"]), text(&i["address"]))).collect()
}

impl Site {
    fn start() -> Self {
        let dir = tempfile::tempdir().expect("a temporary folder can be made");
        let image = dir.path().join("image");
        image_with_ipv6(&image);
        let mut agent = LoneAgent::with_networks("qemu", &[]);
        let world = NetNs::new("world");
        let node = agent.namespace();
        node.connect("up0", &format!("{NODE_ADDRESS}/24"), &world, "eth0", &format!("{WORLD_ADDRESS}/24"));
        node.ok(&["ip", "route", "add", "default", "via", WORLD_ADDRESS]);
        // The world knows the way to the tenants: what keeps it out is the firewall.
        world.ok(&["ip", "route", "add", "10.77.0.0/16", "via", NODE_ADDRESS]);
        std::fs::write(dir.path().join("index.html"), "hello from the world\n")
            .expect("a page can be written");
        let mut server = world.command("python3");
        server.args(["-m", "http.server", "80", "--directory", path_text(dir.path())]);
        let server = Process::start(server, &dir.path().join("server.log"));
        agent.declare(&document(&[tenant("acme", 7, "nat", &image), tenant("beta", 8, "none", &image)]));
        agent.start();
        let both = |agent: &LoneAgent| addresses(agent, "acme").len() + addresses(agent, "beta").len() == 4;
        wait_until("four microVMs to run", LONG, || agent.observe().is_some() && both(&agent));
        Self { agent, world, _server: server, _dir: dir }
    }

    /// Runs a shell line in a guest; whether it succeeded, and what it printed.
    fn guest(&self, instance: &str, line: &str) -> (bool, String) {
        let output = self.agent.mvm(&["instance", "exec", instance, "--", "sh", "-c", line]);
        (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
    }

    /// What the firewall dropped so far, by reason: read with a tool that is not ours.
    fn dropped(&self) -> BTreeMap<String, u64> {
        let mut sums = BTreeMap::new();
        for family in ["inet", "bridge"] {
            let text = self.agent.namespace().ok(&["nft", "-j", "list", "counters", "table", family, "mvm"]);
            let listed: Value = serde_json::from_str(&text).expect("nft prints JSON");
            for item in listed["nftables"].as_array().expect("a list") {
                if let (Some(name), Some(packets)) =
                    (item["counter"]["name"].as_str(), item["counter"]["packets"].as_u64())
                {
                    *sums.entry(name.to_owned()).or_default() += packets;
                }
            }
        }
        sums
    }

    /// The line must fail in the guest, and the firewall must have counted it under this reason.
    fn denied(&self, what: &str, instance: &str, line: &str, reason: &str) {
        let before = self.dropped();
        let (passed, printed) = self.guest(instance, line);
        assert!(!passed, "{what}: `{line}` passed: {printed}");
        let count = |counts: &BTreeMap<String, u64>| counts.get(reason).copied().unwrap_or(0);
        let after = self.dropped();
        assert!(count(&after) > count(&before), "{what}: nothing more was dropped as {reason}: {after:?}");
    }

    fn allowed(&self, what: &str, instance: &str, line: &str) -> String {
        let (passed, printed) = self.guest(instance, line);
        assert!(
            passed,
            "{what}: `{line}` failed: {printed}\ndropped: {:?}\n{}",
            self.dropped(),
            self.agent.log()
        );
        printed
    }
}

/// For what must be answered: it takes as long as a guest on a busy machine needs.
fn http(address: &str) -> String {
    format!("timeout 20 wget -q -O - http://{address}/index.html")
}

/// For what is dropped: nobody answers, however long it is waited for.
fn http_briefly(address: &str) -> String {
    format!("timeout 2 wget -q -O - http://{address}/index.html")
}

#[test]
fn tenants_reach_their_own_and_nothing_else() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let site = Site::start();
    let (acme, beta) = (addresses(&site.agent, "acme"), addresses(&site.agent, "beta"));
    let ((a1, a1_ip), (_, a2_ip)) = (&acme[0], &acme[1]);
    let (b1, b1_ip) = &beta[0];
    for (instance, _) in acme.iter().chain(&beta) {
        let serve = "mkdir -p /tmp/www && echo hello from $(hostname) > /tmp/www/index.html && httpd -p 80 -h /tmp/www";
        site.allowed("an HTTP server starts", instance, serve);
    }

    // Within a tenant, and to its own gateway by ICMP.
    site.allowed("ping within a tenant", a1, &format!("ping -c 1 -W 20 {a2_ip}"));
    site.allowed("fragments within a tenant", a1, &format!("ping -c 1 -W 20 -s 3000 {a2_ip}"));
    let page = site.allowed("HTTP within a tenant", a1, &http(a2_ip));
    assert!(page.starts_with("hello from i-"), "{page}");
    site.allowed("ping to the own gateway", a1, "ping -c 1 -W 20 10.77.7.1");

    // Across tenants, to the host, to the metadata address and to another tenant's gateway.
    for (target, address, reason) in [
        ("another tenant", b1_ip.as_str(), "cross-tenant"),
        ("the host", NODE_ADDRESS, "to-host"),
        ("the metadata address", "169.254.169.254", "denied-range"),
        ("another tenant's gateway", "10.77.8.1", "to-host"),
    ] {
        site.denied(&format!("TCP to {target}"), a1, &http_briefly(address), reason);
        site.denied(
            &format!("UDP to {target}"),
            a1,
            &format!("timeout 2 nslookup x.test {address} | grep -q 'Address 1'"),
            reason,
        );
        site.denied(&format!("ICMP to {target}"), a1, &format!("ping -c 1 -W 1 {address}"), reason);
        site.denied(
            &format!("fragments to {target}"),
            a1,
            &format!("ping -c 1 -W 1 -s 3000 {address}"),
            reason,
        );
    }
    site.denied("TCP to the host by the own gateway", a1, &http_briefly("10.77.7.1"), "to-host");

    // Lies about who one is. Each is taken back, and the truth is heard again.
    let mac = site.allowed("the own hardware address", a1, "cat /sys/class/net/eth0/address");
    let lie = "ip link set eth0 down; ip link set eth0 address 02:4d:00:07:00:63; ip link set eth0 up; ip route add default via 10.77.7.1";
    let truth = format!(
        "ip link set eth0 down; ip link set eth0 address {}; ip link set eth0 up; ip route add default via 10.77.7.1",
        mac.trim()
    );
    site.guest(a1, lie);
    for target in [a2_ip.as_str(), b1_ip, "10.77.7.1"] {
        site.denied("MAC spoof", a1, &format!("ping -c 1 -W 1 {target}"), "spoof-mac");
    }
    site.guest(a1, &truth);
    site.allowed("the truth about the hardware address", a1, &format!("ping -c 1 -W 20 {a2_ip}"));
    site.allowed("a false address", a1, "ip address add 10.77.7.99/24 dev eth0; ip neigh flush dev eth0");
    site.denied("ARP spoof", a1, &format!("ping -c 1 -W 1 -I 10.77.7.99 {a2_ip}"), "spoof-arp");
    // With the neighbour known there is no question to ask, and the packet itself is the lie.
    site.allowed("the neighbour", a1, &format!("ping -c 1 -W 20 {a2_ip}"));
    site.denied("IP spoof", a1, &format!("ping -c 1 -W 1 -I 10.77.7.99 {a2_ip}"), "spoof-ip");
    site.allowed("the address goes", a1, "ip address del 10.77.7.99/24 dev eth0");
    site.denied("IPv6", a1, "ping6 -c 1 -w 1 -I eth0 fe80::1", "ipv6");

    // Out to the world: only the tenant whose policy allows it, and nobody in.
    let page = site.allowed("egress of a tenant that has it", a1, &http(WORLD_ADDRESS));
    assert_eq!(page, "hello from the world\n");
    site.denied("egress of a tenant without", b1, &http_briefly(WORLD_ADDRESS), "egress");
    let before = site.dropped()["ingress"];
    let call = format!("import socket; socket.create_connection(('{a1_ip}', 80), timeout=1)");
    let called = site.world.run(&["python3", "-c", &call]);
    assert!(!called.status.success(), "the world reached a guest");
    assert!(String::from_utf8_lossy(&called.stderr).contains("timed out"), "{called:?}");
    assert!(site.dropped()["ingress"] > before);

    // The same, as the node itself tries it for each tenant.
    let verified = site.agent.mvm(&["net", "verify", "--deep", "-o", "json"]);
    let text = String::from_utf8_lossy(&verified.stdout);
    assert!(verified.status.success(), "{text}{}", String::from_utf8_lossy(&verified.stderr));
    let report: Value = serde_json::from_str(&text).expect("JSON");
    for tenant in report["tenants"].as_array().expect("tenants") {
        assert!(tenant["checks"].as_array().expect("checks").len() > 12, "{tenant}");
    }

    // All rules gone: repaired at once, and told with the next look.
    site.agent.namespace().ok(&["nft", "flush", "ruleset"]);
    wait_until("the rules to be back", Duration::from_secs(20), || {
        site.agent.namespace().run(&["nft", "list", "table", "inet", "mvm"]).status.success()
    });
    site.denied("after the repair", a1, &format!("ping -c 1 -W 1 {b1_ip}"), "cross-tenant");
    site.allowed("after the repair, the own", a1, &format!("ping -c 1 -W 20 {a2_ip}"));
    wait_until("the repair to be told", LONG, || site.agent.mvm_ok(&["events"]).contains("NetworkRepaired"));

    // And all of it goes without a trace.
    site.agent.declare(&document(&[]));
    wait_until("everything to be pruned", LONG, || {
        site.agent.census().is_some_and(|census| census.is_empty())
    });
    wait_until("the links to go", Duration::from_secs(20), || {
        let links = site.agent.namespace().ok(&["ip", "-br", "link"]);
        !links.contains("br-tenant") && !links.contains("tn7i") && !links.contains("tn8i")
    });
}

/// Answers every question for a name with one address.
const RESOLVER: &str = r#"
import socket
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind(("0.0.0.0", 53))
while True:
    question, sender = server.recvfrom(512)
    end = question.index(b"\0", 12) + 5
    is_a = question[end - 4:end - 2] == b"\0\1"
    answer = b"\xc0\x0c\0\1\0\1\0\0\0\x3c\0\4" + socket.inet_aton("192.0.2.53") if is_a else b""
    head = question[:2] + b"\x81\x80" + question[4:6] + (b"\0\1" if is_a else b"\0\0") + b"\0\0\0\0"
    server.sendto(head + question[12:end] + answer, sender)
"#;

#[test]
fn a_guest_is_told_its_gateway_as_its_resolver_and_gets_names_from_it() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let images = mvm_tests::test_images();
    let dir = tempfile::tempdir().expect("a temporary folder can be made");
    let flags = ["--images-dir", path_text(&images), "--gateway-dns"];
    let mut agent = LoneAgent::with_networks("qemu", &flags);
    let mut acme = tenant("acme", 7, "none", dir.path());
    acme["pools"][0]["flake_ref"] = json!("builtin:busybox");
    acme["pools"][0]["desired_counts"]["running"] = json!(1);
    agent.declare(&document(&[acme]));
    agent.start();
    wait_until("a microVM to run", LONG, || {
        agent.observe().is_some() && addresses(&agent, "acme").len() == 1
    });
    let mut resolver = agent.namespace().command("python3");
    resolver.args(["-c", RESOLVER]);
    let _resolver = Process::start(resolver, &dir.path().join("resolver.log"));
    let (id, _) = addresses(&agent, "acme").remove(0);
    let guest = |line: &str| agent.mvm(&["instance", "exec", &id, "--", "sh", "-c", line]);
    let told = String::from_utf8_lossy(&guest("cat /etc/resolv.conf").stdout).into_owned();
    assert_eq!(told.trim(), "nameserver 10.77.7.1");
    wait_until("a name to be answered", LONG, || {
        String::from_utf8_lossy(&guest("nslookup mvm.test").stdout).contains("192.0.2.53")
    });
    // Nothing else of the gateway answers.
    assert!(!guest("nc -w 2 10.77.7.1 22 </dev/null").status.success());
    agent.declare(&mvm_tests::nothing());
    agent.wait_counts(0, 0, 0, LONG);
}
