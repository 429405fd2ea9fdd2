//! What others do to our links, and that it is mended, reported, and mended once.

use std::sync::Barrier;

use mvm_host::links::{Links, Repair};
use mvm_host::network::TenantNet;
use rtnetlink::MulticastGroup;

use crate::links::{net, port, tenant};
use crate::support::netns::{in_own_network, json, link_names, run};

#[test]
fn second_call_writes_nothing() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = net(7);
        let ports = tenant(&links, &net).await;
        let groups = [
            MulticastGroup::Link,
            MulticastGroup::Neigh,
            MulticastGroup::Ipv4Ifaddr,
            MulticastGroup::Ipv4Netconf,
            MulticastGroup::Ipv6Netconf,
        ];
        let (connection, _handle, mut changes) = rtnetlink::new_multicast_connection(&groups).unwrap();
        let listener = tokio::spawn(connection);
        assert_eq!(links.ensure_bridge(&net).await.unwrap(), []);
        for port in &ports {
            assert_eq!(links.ensure_tap(port, &net).await.unwrap(), []);
            links.open_tap(&port.tap()).await.unwrap();
        }
        // The first change that is heard of is the one made here, after all of those.
        run("ip tuntap add sentinel mode tap");
        let first = futures::StreamExt::next(&mut changes).await.unwrap();
        assert!(format!("{first:?}").contains("sentinel"), "{first:?}");
        listener.abort();
    });
}

#[test]
fn deleted_bridge_comes_back_and_its_ports_with_it() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = net(7);
        let ports = tenant(&links, &net).await;
        run("ip link delete br-tenant-7");
        assert_eq!(links.ensure_bridge(&net).await.unwrap(), [Repair::Missing]);
        for port in &ports {
            assert_eq!(links.ensure_tap(port, &net).await.unwrap(), [Repair::Master { found: None }]);
            assert_eq!(links.ensure_tap(port, &net).await.unwrap(), []);
        }
        assert_eq!(json("ip -j link show tn7i3")[0]["master"], "br-tenant-7");
    });
}

#[test]
fn every_kind_of_drift_of_a_bridge_is_mended() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = net(7);
        links.ensure_bridge(&net).await.unwrap();
        let foreign =
            |address: &str, prefix| Repair::ForeignAddress { address: address.parse().unwrap(), prefix };
        let setting = |name, found| Repair::Setting { name, found };
        let cases = [
            ("ip addr add 10.99.0.1/16 dev br-tenant-7", vec![foreign("10.99.0.1", 16)]),
            ("ip addr add 10.128.7.9/24 dev br-tenant-7", vec![foreign("10.128.7.9", 24)]),
            ("ip addr add 10.77.0.1 peer 10.77.0.2 dev br-tenant-7", vec![foreign("10.77.0.1", 32)]),
            ("ip addr delete 10.128.7.1/24 dev br-tenant-7", vec![Repair::AddressMissing]),
            ("ip link set br-tenant-7 mtu 1300", vec![Repair::Mtu { found: 1300 }]),
            ("ip link set br-tenant-7 type bridge stp_state 1", vec![Repair::BridgeOptions]),
            ("ip link set br-tenant-7 type bridge mcast_snooping 1", vec![Repair::BridgeOptions]),
            (
                "ip link set br-tenant-7 address 02:00:00:00:00:01",
                vec![Repair::Mac { found: "02:00:00:00:00:01".to_owned() }],
            ),
            ("ip link property del dev br-tenant-7 altname mvm-br-tenant-7", vec![Repair::Unmarked]),
            ("ip link set br-tenant-7 name renamed", vec![Repair::Renamed { found: "renamed".to_owned() }]),
            ("sysctl -q -w net.ipv6.conf.br-tenant-7.disable_ipv6=0", vec![setting("ipv6/disable_ipv6", 0)]),
            ("sysctl -q -w net.ipv4.conf.br-tenant-7.rp_filter=0", vec![setting("ipv4/rp_filter", 0)]),
            (
                "sysctl -q -w net.ipv4.conf.br-tenant-7.route_localnet=1",
                vec![setting("ipv4/route_localnet", 1)],
            ),
            ("ip link set br-tenant-7 down", vec![Repair::Down]),
        ];
        for (drift, repairs) in cases {
            run(drift);
            assert_eq!(links.ensure_bridge(&net).await.unwrap(), repairs, "{drift}");
            assert_eq!(links.ensure_bridge(&net).await.unwrap(), [], "{drift}");
            let addresses = &json("ip -j addr show br-tenant-7")[0]["addr_info"];
            assert_eq!(addresses.as_array().unwrap().len(), 1, "{drift}: {addresses}");
        }
    });
}

#[test]
fn every_kind_of_drift_of_a_tap_is_mended() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = net(7);
        let [first, _] = tenant(&links, &net).await;
        run("ip link add elsewhere type bridge");
        let elsewhere = json("ip -j link show elsewhere")[0]["ifindex"].as_u64().unwrap();
        let kind = |repair: &Repair| repair.to_string();
        let cases = [
            ("ip link set tn7i3 mtu 1400", "its MTU was 1400".to_owned(), true),
            ("ip link set tn7i3 name stolen", "it was called stolen".to_owned(), false),
            (
                "ip link set tn7i3 master elsewhere",
                format!("it was in another bridge (link {elsewhere})"),
                false,
            ),
            ("ip link set tn7i3 nomaster", "it was in no bridge".to_owned(), false),
            ("ip link property del dev tn7i3 altname mvm-tn7i3", "its second name was gone".to_owned(), true),
            (
                "ip link set tn7i3 address 02:00:00:00:00:01",
                "its hardware address was 02:00:00:00:00:01".into(),
                true,
            ),
            ("bridge link set dev tn7i3 learning on", "its port flags were changed".to_owned(), true),
            ("bridge link set dev tn7i3 locked off", "its port flags were changed".to_owned(), true),
            ("bridge link set dev tn7i3 isolated on", "its port flags were changed".to_owned(), true),
            (
                "bridge fdb del 02:4d:00:07:00:03 dev tn7i3 master",
                "its forwarding entry was gone".to_owned(),
                true,
            ),
            (
                "bridge fdb replace 02:4d:00:07:00:03 dev tn7i4 master",
                "its forwarding entry was gone".into(),
                true,
            ),
            ("sysctl -q -w net.ipv6.conf.tn7i3.disable_ipv6=0", "ipv6/disable_ipv6 was 0".to_owned(), true),
        ];
        for (drift, repair, stays_open) in cases {
            links.open_tap("tn7i3").await.unwrap();
            run(drift);
            let repairs = links.ensure_tap(&first, &net).await.unwrap();
            assert_eq!(repairs.iter().map(kind).collect::<Vec<_>>(), [repair], "{drift}");
            assert_eq!(links.ensure_tap(&first, &net).await.unwrap(), [], "{drift}");
            let tap = &json("ip -j link show tn7i3")[0];
            assert_eq!(tap["master"], "br-tenant-7", "{drift}");
            let open = tap["flags"].as_array().unwrap().contains(&"UP".into());
            assert_eq!(
                open, stays_open,
                "{drift}: one whose name or bridge was wrong waits for the firewall"
            );
        }
        let isolating = TenantNet { isolate_ports: true, ..net };
        assert_eq!(links.ensure_tap(&first, &isolating).await.unwrap().len(), 1);
        assert_eq!(json("ip -d -j link show tn7i3")[0]["linkinfo"]["info_slave_data"]["isolated"], true);
    });
}

#[test]
fn owner_that_changed_is_set_again() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = net(7);
        let [first, _] = tenant(&links, &net).await;
        let moved = mvm_host::network::Port { owner_uid: 70_002, ..first };
        assert_eq!(
            links.ensure_tap(&moved, &net).await.unwrap(),
            [Repair::Owner { found: Some(crate::links::OWNER) }]
        );
        assert_eq!(json("ip -d -j link show tn7i3")[0]["linkinfo"]["info_data"]["user"], 70_002);
    });
}

#[test]
fn two_writers_at_once_end_with_one_link_each_as_wanted() {
    const NETS: u16 = 50;
    // Each in a thread of its own, as two processes would be; both start on each network at the same moment.
    fn write(start: &Barrier) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let links = Links::connect().unwrap();
            for net_id in 0..NETS {
                let net = net(net_id);
                start.wait();
                links.ensure_bridge(&net).await.unwrap();
                links.ensure_tap(&port(&net, 3), &net).await.unwrap();
            }
        });
    }
    in_own_network(|| async {
        let start = Barrier::new(2);
        std::thread::scope(|scope| {
            scope.spawn(|| write(&start));
            scope.spawn(|| write(&start));
        });
        let links = Links::connect().unwrap();
        for net_id in 0..NETS {
            assert_eq!(links.ensure_bridge(&net(net_id)).await.unwrap(), []);
            assert_eq!(links.ensure_tap(&port(&net(net_id), 3), &net(net_id)).await.unwrap(), []);
        }
        let ours =
            link_names().iter().filter(|name| name.starts_with("br-") || name.starts_with("tn")).count();
        assert_eq!(ours, usize::from(NETS) * 2);
    });
}
