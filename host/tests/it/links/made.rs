//! What is made, seen with other eyes than ours; what is refused; what is left after removal.

use mvm_host::links::{LinkError, Links, Repair, enable_forwarding, tap_mac};
use mvm_host::network::{Mac, TenantNet};
use serde_json::json;

use crate::links::{OWNER, net, port, tenant};
use crate::support::netns::{in_own_network, json, link_names, run};

#[test]
fn bridge_is_made_as_wanted() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let net = TenantNet { mtu: 1400, ..net(7) };
        assert_eq!(links.ensure_bridge(&net).await.unwrap(), [Repair::Missing]);

        let bridge = &json("ip -d -j link show br-tenant-7")[0];
        assert_eq!(bridge["ifalias"], "mvm:t7");
        assert_eq!(bridge["address"], Mac::of(7, 1).to_string());
        assert_eq!(bridge["mtu"], 1400);
        assert_eq!(bridge["altnames"], json!(["mvm-br-tenant-7"]));
        assert!(bridge["flags"].as_array().unwrap().contains(&json!("UP")), "{bridge}");
        let options = &bridge["linkinfo"]["info_data"];
        let options = ["stp_state", "forward_delay", "mcast_snooping"].map(|name| options[name].as_i64());
        assert_eq!(options, [Some(0); 3]);

        let addresses = &json("ip -j addr show br-tenant-7")[0]["addr_info"];
        assert_eq!(addresses.as_array().unwrap().len(), 1, "{addresses}");
        assert_eq!((&addresses[0]["local"], &addresses[0]["prefixlen"]), (&json!("10.128.7.1"), &json!(24)));
        let settings = [
            ("ipv6/conf/br-tenant-7/disable_ipv6", "1"),
            ("ipv6/conf/br-tenant-7/addr_gen_mode", "1"),
            ("ipv4/conf/br-tenant-7/rp_filter", "1"),
            ("ipv4/conf/br-tenant-7/accept_redirects", "0"),
            ("ipv4/conf/br-tenant-7/send_redirects", "0"),
            ("ipv4/conf/br-tenant-7/arp_ignore", "1"),
            ("ipv4/conf/br-tenant-7/arp_announce", "2"),
        ];
        for (setting, value) in settings {
            let found = std::fs::read_to_string(format!("/proc/sys/net/{setting}")).unwrap();
            assert_eq!(found.trim(), value, "{setting}");
        }
    });
}

#[test]
fn tap_is_made_as_wanted_and_stays_down_until_it_is_opened() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        // Another size than a new bridge's own: the ports must not talk the bridge out of it.
        let net = TenantNet { isolate_ports: true, mtu: 1400, ..net(7) };
        links.ensure_bridge(&net).await.unwrap();
        let port = port(&net, 3);
        assert_eq!(links.ensure_tap(&port, &net).await.unwrap(), [Repair::Missing]);

        let tap = &json("ip -d -j link show tn7i3")[0];
        assert!(!tap["flags"].as_array().unwrap().contains(&json!("UP")), "{tap}");
        assert_eq!(tap["ifalias"], port.alias());
        assert_eq!(tap["address"], tap_mac(port.mac()).to_string());
        assert_ne!(tap["address"], port.mac().to_string());
        assert_eq!((&tap["mtu"], &tap["master"]), (&json!(1400), &json!("br-tenant-7")));
        let kind = &tap["linkinfo"]["info_data"];
        let kind = ["type", "pi", "vnet_hdr", "persist", "user"].map(|name| kind[name].clone());
        assert_eq!(kind, [json!("tap"), json!(false), json!(true), json!(true), json!(OWNER)]);
        let flags = &tap["linkinfo"]["info_slave_data"];
        let flags = ["isolated", "locked", "learning", "flood", "hairpin"].map(|name| flags[name].as_bool());
        assert_eq!(flags, [true, true, false, false, false].map(Some));
        let entries = json("bridge -j fdb show dev tn7i3");
        let entry = entries.as_array().unwrap().iter().find(|entry| entry["mac"] == port.mac().to_string());
        assert_eq!(entry.unwrap()["state"], "static");

        links.open_tap("tn7i3").await.unwrap();
        assert!(json("ip -j link show tn7i3")[0]["flags"].as_array().unwrap().contains(&json!("UP")));
        assert_eq!(json("ip -j addr show tn7i3")[0]["addr_info"], json!([]), "a port has no addresses");
        assert_eq!(links.ensure_bridge(&net).await.unwrap(), []);
    });
}

#[test]
fn foreign_links_of_our_names_are_refused_and_left_as_they_are() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        run("ip link add br-tenant-7 type bridge");
        run("ip tuntap add tn8i3 mode tap");
        run("ip link add br-tenant-9 type veth peer name other-end");
        run("ip link set br-tenant-9 alias mvm:t9");
        links.ensure_bridge(&net(8)).await.unwrap();
        let foreign =
            || ["br-tenant-7", "tn8i3", "br-tenant-9"].map(|name| run(&format!("ip -d link show {name}")));
        let before = foreign();
        for net_id in [7, 9] {
            let refused = links.ensure_bridge(&net(net_id)).await.unwrap_err();
            assert!(matches!(refused, LinkError::Foreign { .. }), "{refused}");
            assert!(!links.remove_bridge(net_id).await.unwrap());
        }
        let refused = links.ensure_tap(&port(&net(8), 3), &net(8)).await.unwrap_err();
        assert!(matches!(refused, LinkError::Foreign { .. }), "{refused}");
        assert!(matches!(links.open_tap("tn8i3").await, Err(LinkError::Foreign { .. })));
        assert!(matches!(links.attach_tap("tn8i3").await, Err(LinkError::Foreign { .. })));
        assert!(!links.remove_tap("tn8i3").await.unwrap());
        assert_eq!(foreign(), before);

        let seen = links.observe().await.unwrap();
        assert_eq!(seen.foreign, ["br-tenant-7", "tn8i3"]);
        assert_eq!(seen.strays.iter().map(|stray| stray.name.as_str()).collect::<Vec<_>>(), ["br-tenant-9"]);
        assert!(links.remove_stray(&seen.strays[0]).await.unwrap());
        assert_eq!(links.observe().await.unwrap().strays, []);
    });
}

#[test]
fn link_of_another_owner_is_not_taken_over() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let [first, _] = tenant(&links, &net(7)).await;
        let other = TenantNet { tenant: "other".parse().unwrap(), ..net(7) };
        let refused = links.ensure_bridge(&other).await.unwrap_err();
        assert!(matches!(refused, LinkError::Taken { .. }), "{refused}");
        let successor = mvm_host::network::Port { instance: "i-0000beef".parse().unwrap(), ..first };
        let refused = links.ensure_tap(&successor, &net(7)).await.unwrap_err();
        assert!(matches!(refused, LinkError::Taken { .. }), "{refused}");
    });
}

#[test]
fn bridge_that_was_left_half_made_is_finished() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        run(&format!("ip link add br-tenant-7 address {} type bridge", Mac::of(7, 1)));
        let repairs = links.ensure_bridge(&net(7)).await.unwrap();
        assert!(repairs.contains(&Repair::Untagged), "{repairs:?}");
        assert_eq!(links.ensure_bridge(&net(7)).await.unwrap(), []);
    });
}

#[test]
fn everything_is_observed_and_removal_leaves_nothing() {
    in_own_network(|| async {
        let links = Links::connect().unwrap();
        let before = link_names();
        let net = net(7);
        let ports = tenant(&links, &net).await;
        let seen = links.observe().await.unwrap();
        let bridge = &seen.bridges[0];
        assert_eq!(
            (bridge.net_id, bridge.tenant.as_ref(), bridge.up, bridge.mtu),
            (7, Some(&net.tenant), true, 1500)
        );
        assert_eq!(bridge.addresses, [(net.subnet.gateway(), 24)]);
        let taps: Vec<_> =
            seen.taps.iter().map(|tap| (tap.offset, tap.instance.clone(), tap.master, tap.up)).collect();
        let wanted = ports.clone().map(|port| (port.offset, Some(port.instance), Some(bridge.index), true));
        assert_eq!(taps, wanted);
        assert_eq!((&seen.foreign, &seen.strays), (&vec![], &vec![]));

        for port in &ports {
            assert!(links.remove_tap(&port.tap()).await.unwrap());
            assert!(!links.remove_tap(&port.tap()).await.unwrap());
        }
        assert!(links.remove_bridge(7).await.unwrap());
        assert!(!links.remove_bridge(7).await.unwrap());
        assert_eq!(link_names(), before);
    });
}

#[test]
fn forwarding_is_switched_on_once() {
    in_own_network(|| async {
        run("sysctl -q -w net.ipv4.ip_forward=0");
        assert!(enable_forwarding().unwrap());
        assert!(!enable_forwarding().unwrap());
    });
}
