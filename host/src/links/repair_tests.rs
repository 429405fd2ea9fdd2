//! What is said about a link that is as wanted, about one that is not there, and about each way to differ.

use super::*;

fn net() -> TenantNet {
    TenantNet {
        tenant: "acme".parse().unwrap(),
        net_id: 7,
        subnet: "10.240.7.0/24".parse().unwrap(),
        egress: mvm_proto::document::EgressMode::None,
        dns: false,
        isolate_ports: false,
        mtu: 1500,
    }
}

fn port() -> Port {
    Port {
        tenant: "acme".parse().unwrap(),
        instance: "i-0000002a".parse().unwrap(),
        net_id: 7,
        offset: 3,
        address: Ipv4Addr::new(10, 240, 7, 3),
        owner_uid: 70_003,
    }
}

fn bridge() -> ObservedBridge {
    ObservedBridge {
        index: 5,
        name: "br-tenant-7".to_owned(),
        net_id: 7,
        alias: Some("mvm:acme".to_owned()),
        tenant: Some("acme".parse().unwrap()),
        marked: true,
        up: true,
        mtu: 1500,
        mac: Some(Mac::of(7, 1)),
        plain: true,
        addresses: vec![(Ipv4Addr::new(10, 240, 7, 1), 24)],
        settings: BRIDGE_SETTINGS.to_vec(),
    }
}

fn tap() -> ObservedTap {
    ObservedTap {
        index: 6,
        name: "tn7i3".to_owned(),
        net_id: 7,
        offset: 3,
        alias: Some("mvm:acme/i-0000002a".to_owned()),
        tenant: Some("acme".parse().unwrap()),
        instance: Some("i-0000002a".parse().unwrap()),
        marked: true,
        master: Some(5),
        up: false,
        mtu: 1500,
        mac: Some(tap_mac(Mac::of(7, 3))),
        owner: Some(70_003),
        port: Some(wanted_port(&net())),
        forwarding_entry: Some(true),
        settings: TAP_SETTINGS.to_vec(),
        rx_bytes: 0,
        tx_bytes: 0,
    }
}

#[test]
fn bridge_as_wanted_needs_nothing_and_a_missing_one_only_making() {
    assert_eq!(bridge_repairs(Some(&bridge()), &net()), []);
    assert_eq!(bridge_repairs(None, &net()), [Repair::Missing]);
}

#[test]
fn each_difference_of_a_bridge_is_one_repair() {
    type Change = fn(&mut ObservedBridge);
    let foreign = Repair::ForeignAddress { address: Ipv4Addr::new(10, 9, 9, 9), prefix: 32 };
    let wider = Repair::ForeignAddress { address: Ipv4Addr::new(10, 240, 7, 1), prefix: 16 };
    let cases: [(Change, Vec<Repair>); 10] = [
        (|b| b.name = "x".to_owned(), vec![Repair::Renamed { found: "x".to_owned() }]),
        (|b| b.alias = None, vec![Repair::Untagged]),
        (|b| b.marked = false, vec![Repair::Unmarked]),
        (|b| b.up = false, vec![Repair::Down]),
        (|b| b.mtu = 9000, vec![Repair::Mtu { found: 9000 }]),
        (|b| b.mac = None, vec![Repair::Mac { found: "none".to_owned() }]),
        (|b| b.plain = false, vec![Repair::BridgeOptions]),
        (|b| b.addresses.push((Ipv4Addr::new(10, 9, 9, 9), 32)), vec![foreign]),
        (|b| b.addresses[0].1 = 16, vec![wider, Repair::AddressMissing]),
        (|b| b.settings[0].1 = 0, vec![Repair::Setting { name: "ipv6/disable_ipv6", found: 0 }]),
    ];
    for (change, repairs) in cases {
        let mut found = bridge();
        change(&mut found);
        assert_eq!(bridge_repairs(Some(&found), &net()), repairs);
    }
}

#[test]
fn tap_as_wanted_needs_nothing_whether_open_or_closed() {
    for up in [false, true] {
        assert_eq!(tap_repairs(Some(&ObservedTap { up, ..tap() }), &port(), &net(), 5), []);
    }
    assert_eq!(tap_repairs(None, &port(), &net(), 5), [Repair::Missing]);
}

#[test]
fn each_difference_of_a_tap_is_one_repair() {
    type Change = fn(&mut ObservedTap);
    let learning = PortFlags { learning: true, ..wanted_port(&net()) };
    let cases: [(Change, Repair); 9] = [
        (|t| t.name = "x".to_owned(), Repair::Renamed { found: "x".to_owned() }),
        (|t| t.marked = false, Repair::Unmarked),
        (|t| t.mtu = 1400, Repair::Mtu { found: 1400 }),
        (|t| t.mac = Some(Mac::of(7, 3)), Repair::Mac { found: "02:4d:00:07:00:03".to_owned() }),
        (|t| t.owner = None, Repair::Owner { found: None }),
        (|t| t.master = Some(9), Repair::Master { found: Some(9) }),
        (
            |t| t.port = t.port.map(|p| PortFlags { learning: true, ..p }),
            Repair::PortFlags { found: learning },
        ),
        (|t| t.forwarding_entry = Some(false), Repair::ForwardingEntry),
        (|t| t.settings[1].1 = 0, Repair::Setting { name: "ipv6/addr_gen_mode", found: 0 }),
    ];
    for (change, repair) in cases {
        let mut found = tap();
        change(&mut found);
        assert_eq!(tap_repairs(Some(&found), &port(), &net(), 5), [repair]);
    }
}

#[test]
fn isolation_that_changed_is_a_repair_and_what_an_old_kernel_lacks_is_none() {
    let isolating = TenantNet { isolate_ports: true, ..net() };
    let repairs = tap_repairs(Some(&tap()), &port(), &isolating, 5);
    assert_eq!(repairs, [Repair::PortFlags { found: wanted_port(&net()) }]);

    let mut old = tap();
    old.port = old.port.map(|flags| PortFlags { locked: None, ..flags });
    old.settings.clear();
    assert_eq!(tap_repairs(Some(&old), &port(), &net(), 5), []);
}
