//! Someone else changes our tables: it is noticed, and put right.

use mvm_host::firewall::{Firewall, FirewallError, Reason};
use mvm_host::network::{Port, TenantNet};

use crate::firewall::frames::{MARK, UDP, ipv4, udp};
use crate::firewall::lab::{A, B, FIRST, Lab, all_ports, both_nets, from_port, gateway_mac, net, port};
use crate::firewall::space::NEEDS;
use mvm_needs::can_run;

/// What someone did, and a word of what must be said about it.
const MEDDLING: [(&str, &str); 24] = [
    ("flush ruleset", "missing"),
    ("delete table inet mvm", "inet mvm is missing"),
    ("delete table bridge mvm", "bridge mvm is missing"),
    ("delete table arp mvm", "arp mvm is missing"),
    ("flush table inet mvm", "chain"),
    ("flush chain bridge mvm from-port", "from-port"),
    ("insert rule inet mvm from-tenant accept", "from-tenant"),
    ("add rule inet mvm to-host accept", "to-host"),
    ("insert rule inet mvm forward ip daddr 10.77.2.3 accept", "forward"),
    ("insert rule bridge mvm prerouting counter", "prerouting"),
    ("add chain inet mvm other", "other"),
    ("add chain inet mvm early { type filter hook forward priority -10; }", "early"),
    ("chain inet mvm forward { policy drop; }", "forward"),
    ("delete element inet mvm sources { \"br-tenant-1\" . 10.77.1.3 }", "sources lacks"),
    ("add element inet mvm sources { \"br-tenant-1\" . 10.77.2.3 }", "sources has"),
    ("delete element inet mvm masqueraded { \"br-tenant-1\" }", "masqueraded lacks"),
    ("add element inet mvm masqueraded { \"br-tenant-2\" }", "masqueraded has"),
    (
        "delete element inet mvm within { \"br-tenant-2\" . \"br-tenant-2\" }\n\
         add element inet mvm within { \"br-tenant-2\" . \"br-tenant-2\" : drop }",
        "within",
    ),
    ("add element inet mvm within { \"br-tenant-1\" . \"br-tenant-2\" : accept }", "within has"),
    ("flush set bridge mvm ports", "ports lacks"),
    ("add set bridge mvm more { type ipv4_addr; }", "more"),
    ("add counter inet mvm extra", "extra"),
    ("add table inet mvm { flags dormant; }", "flags"),
    ("add element bridge mvm ports { \"tn1i3\" . 02:4d:00:01:00:03 . 10.77.1.1 }", "ports has"),
];

#[test]
fn whatever_someone_changes_is_found_and_repaired() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let (me, stranger) = (port(A, FIRST), port(B, FIRST));
    let payload = udp((me.address, 1), (stranger.address, 2), MARK);
    let packet = ipv4(me.address, stranger.address, UDP, (0, false), &payload);
    let forbidden = from_port(&me, gateway_mac(A), 0x0800, &packet);
    for (commands, word) in MEDDLING {
        assert!(lab.firewall(|firewall| firewall.unchanged()).unwrap(), "before {commands}");
        lab.node.nft(commands);
        assert!(!lab.firewall(|firewall| firewall.unchanged()).unwrap(), "{commands}");
        let faults = lab.inspect().faults;
        assert!(faults.iter().any(|fault| fault.to_string().contains(word)), "{commands}: {faults:?}");
        assert!(
            !lab.firewall(|firewall| firewall.unchanged()).unwrap(),
            "{commands}: a fault is not forgotten"
        );
        lab.firewall(|firewall| firewall.rebuild(&both_nets(), &all_ports())).unwrap();
        assert!(lab.firewall(|firewall| firewall.unchanged()).unwrap(), "{commands}");
        assert_eq!(lab.inspect().faults, [], "{commands}");
        lab.refused(commands, (A, FIRST), std::slice::from_ref(&forbidden), Reason::CrossTenant, 1);
    }
}

#[test]
fn a_repair_keeps_what_was_counted_where_the_set_is_whole() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let (me, peer) = (port(A, FIRST), port(A, 4));
    let packet =
        ipv4(me.address, peer.address, UDP, (0, false), &udp((me.address, 1), (peer.address, 2), MARK));
    lab.passes("to a neighbour", (A, FIRST), (A, 4), &[from_port(&me, peer.mac(), 0x0800, &packet)]);
    let counted = lab.inspect();
    assert!(counted.instances[&me.instance].sent.packets >= 1);
    lab.node.nft("flush chain bridge mvm from-port\nadd chain bridge mvm other\n");
    lab.firewall(|firewall| firewall.rebuild(&both_nets(), &all_ports())).unwrap();
    assert_eq!(lab.inspect(), counted);
}

#[test]
fn rules_of_others_change_the_generation_and_are_no_fault() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    lab.node.nft("table inet other {\nchain forward {\ntype filter hook forward priority 0\ncounter\n}\n}\n");
    assert!(!lab.firewall(|firewall| firewall.unchanged()).unwrap());
    assert_eq!(lab.inspect().faults, []);
    assert!(lab.firewall(|firewall| firewall.unchanged()).unwrap());
    lab.firewall(|firewall| firewall.rebuild(&both_nets(), &all_ports())).unwrap();
    assert!(lab.node.command("nft", &["list", "tables"], "").contains("table inet other"));
}

#[test]
fn adding_to_tables_that_someone_flushed_repairs_them() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    lab.node.nft("flush ruleset");
    lab.firewall(|firewall| firewall.add_port(&port(A, 20))).unwrap();
    assert_eq!(lab.inspect().faults, []);
    // A verdict that someone else put under a key of ours is in the way of ours.
    lab.node.nft("add element inet mvm within { \"br-tenant-5\" . \"br-tenant-5\" : drop }");
    lab.firewall(|firewall| firewall.add_net(&net(5))).unwrap();
    assert_eq!(lab.inspect().faults, []);
    assert!(lab.firewall(|firewall| firewall.unchanged()).unwrap());
}

#[test]
fn own_changes_keep_the_generation_known() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let unchanged = || lab.firewall(|firewall| firewall.unchanged()).unwrap();
    assert!(unchanged());
    lab.firewall(|firewall| firewall.add_net(&net(7))).unwrap();
    lab.firewall(|firewall| firewall.add_port(&port(7, FIRST))).unwrap();
    assert!(unchanged());
    lab.firewall(|firewall| firewall.remove_net(7)).unwrap();
    assert!(unchanged());
    lab.node.nft("add table inet other");
    lab.firewall(|firewall| firewall.add_net(&net(7))).unwrap();
    assert!(!unchanged(), "someone else's change is not covered by our own");
    assert_eq!(lab.inspect().faults, []);
}

#[test]
fn networks_and_ports_that_would_open_a_hole_are_refused() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let refused = |act: &mut dyn FnMut(&mut Firewall) -> Result<(), FirewallError>| {
        let told = lab.firewall(|firewall| act(firewall));
        assert!(matches!(told, Err(FirewallError::Refused(_))), "{told:?}");
    };
    let overlapping = TenantNet { subnet: "10.77.1.128/25".parse().unwrap(), ..net(8) };
    refused(&mut |firewall| firewall.add_net(&overlapping));
    let with = |change: fn(&mut Port)| {
        let mut port = port(A, 30);
        change(&mut port);
        port
    };
    for port in [
        with(|port| port.net_id = 8),
        with(|port| port.address = net(A).subnet.gateway()),
        with(|port| port.offset = 1),
        with(|port| (port.offset, port.address) = (1, net(A).subnet.gateway())),
        with(|port| (port.offset, port.address) = (255, net(A).subnet.broadcast())),
        with(|port| port.address = self::port(B, 30).address),
        with(|port| port.tenant = net(B).tenant),
    ] {
        refused(&mut |firewall| firewall.add_port(&port));
    }
    refused(&mut |firewall| firewall.rebuild(&[net(A), net(A)], &[]));
    assert!(lab.firewall(|firewall| firewall.unchanged()).unwrap(), "nothing of it was written");
    let builder = with(|port| (port.offset, port.address) = (2, net(A).subnet.builder()));
    lab.firewall(|firewall| firewall.add_port(&builder)).unwrap();
}
