//! Someone flushes the rules of the whole machine while guests send: our tables are back before any regular look.

use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use mvm_host::network::{Mac, NetworkFound, NetworkWanted, Port, TenantNet};
use mvm_host::{Host as _, LocalHost, Operation, Outcome};

use crate::links::{net, port};
use crate::support::netns::{in_own_network, run, wait_until};

/// How often the rules are flushed; the longest of them is what the documentation says.
const ROUNDS: usize = 20;
/// How often a packet is sent until one is counted.
const TRIES: usize = 1000;
/// A busy machine included. A regular look would take whatever an operator set, 30 seconds and more.
const AT_MOST: Duration = Duration::from_secs(5);

async fn look(host: &LocalHost, wanted: &NetworkWanted) -> NetworkFound {
    match host.perform(&Operation::KeepNetwork { wanted: wanted.clone() }).await.unwrap() {
        Outcome::Network(found) => found,
        other => panic!("{other:?}"),
    }
}

/// What a regular look says was put right.
async fn keep(host: &LocalHost, wanted: &NetworkWanted) -> Vec<String> {
    look(host, wanted).await.repairs
}

/// All rules without what they counted; their handles say whether anything was made anew.
fn rules() -> String {
    run("nft -a -s list ruleset")
}

fn has_all_tables() -> bool {
    let tables = run("nft list tables");
    ["inet", "bridge", "arp"].iter().all(|family| tables.contains(&format!("table {family} mvm")))
}

/// An IPv4 packet with a source that is not the port's: dropped by the bridge's table, if there is one.
fn forge(tap: &OwnedFd, port: &Port, net: &TenantNet) {
    let mut frame = vec![0; 10];
    frame.extend(Mac::of(net.net_id, 1).0.iter().chain(&port.mac().0).chain(&[0x08, 0x00]));
    frame.extend([0x45, 0, 0, 28, 0, 0, 0, 0, 64, 17, 0, 0]);
    frame.extend(net.subnet.builder().octets().iter().chain(&net.subnet.gateway().octets()));
    frame.resize(10 + 60, 0);
    // A queue that is full is no matter.
    let _ = rustix::io::write(tap, &frame);
}

#[test]
fn flushed_rules_are_back_without_a_regular_look() {
    in_own_network(|| async {
        let dir = tempfile::tempdir().unwrap();
        let host = LocalHost::new(dir.path());
        let net = net(7);
        let ports = vec![port(&net, 3), port(&net, 4)];
        let wanted =
            NetworkWanted { nets: vec![net.clone()], ports: ports.clone(), ..NetworkWanted::default() };
        keep(&host, &wanted).await;
        let links = mvm_host::links::Links::connect().unwrap();
        let tap = links.attach_tap(&ports[0].tap()).await.unwrap();
        let mut slowest = Duration::ZERO;
        for _ in 0..ROUNDS {
            forge(&tap, &ports[0], &net);
            let flushed = Instant::now();
            run("nft flush ruleset");
            wait_until("the rules to be back", || {
                forge(&tap, &ports[0], &net);
                has_all_tables()
            })
            .await;
            slowest = slowest.max(flushed.elapsed());
        }
        assert!(slowest < AT_MOST, "{slowest:?}");
        eprintln!("flushed {ROUNDS} times under traffic; back within {slowest:?}, `nft` itself included");
        let repairs = keep(&host, &wanted).await;
        let missing =
            ["inet", "bridge", "arp"].map(|family| format!("firewall: table {family} mvm is missing"));
        assert!(missing.iter().all(|missing| repairs.contains(missing)), "{repairs:?}");
        assert!(repairs.len() <= 2 * missing.len(), "each is told once: {repairs:?}");
        let mut dropped = 0;
        for _ in 0..TRIES {
            forge(&tap, &ports[0], &net);
            let found = look(&host, &wanted).await;
            assert_eq!(found.repairs, Vec::<String>::new(), "told once");
            dropped += found
                .dropped
                .iter()
                .filter(|one| one.reason == "spoof-ip")
                .map(|one| one.packets)
                .sum::<u64>();
            if dropped > 0 {
                break;
            }
        }
        assert!(dropped > 0, "the rules that are back hold");
    });
}

#[test]
fn one_rule_is_put_back_too_and_own_changes_and_those_of_others_cause_none() {
    in_own_network(|| async {
        let dir = tempfile::tempdir().unwrap();
        let host = LocalHost::new(dir.path());
        let net = net(7);
        let wanted = NetworkWanted { nets: vec![net.clone()], ..NetworkWanted::default() };
        keep(&host, &wanted).await;
        run("nft insert rule inet mvm from-tenant accept");
        wait_until("the rule to go", || {
            run("nft list chain inet mvm from-tenant").lines().all(|line| line.trim() != "accept")
        })
        .await;
        let repaired = keep(&host, &wanted).await;
        assert!(
            repaired.iter().all(|repair| repair.contains("from-tenant")) && !repaired.is_empty(),
            "{repaired:?}"
        );
        // News of our own repair, of our own changes and of a stranger's table: nothing is made anew for any of it.
        let before = rules();
        let port = port(&net, 5);
        host.perform(&Operation::EnsurePort { net: net.clone(), port: port.clone() }).await.unwrap();
        host.perform(&Operation::RemovePort { port }).await.unwrap();
        run("nft add table inet other");
        run("nft delete table inet other");
        for _ in 0..ROUNDS {
            assert_eq!(keep(&host, &wanted).await, Vec::<String>::new());
        }
        assert_eq!(rules(), before);
    });
}
