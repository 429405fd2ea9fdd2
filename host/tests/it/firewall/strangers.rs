//! Interfaces with names of ours that are not in the sets are closed; those of others are none of our business.

use std::net::{Ipv4Addr, UdpSocket};

use mvm_host::firewall::Reason;
use mvm_host::network::Port;

use crate::firewall::frames::{BROADCAST, MARK, UDP, arp, ipv4, udp};
use crate::firewall::lab::{
    A, B, FIRST, Lab, SECOND, UPLINK, add_bridge, add_guest, add_guest_to, from_port, gateway, gateway_mac,
    port,
};
use crate::firewall::space::{NEEDS, PATIENCE, Space, wait_until};
use mvm_needs::can_run;

const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;

fn datagram(from: &Port, to: Ipv4Addr) -> Vec<u8> {
    ipv4(from.address, to, UDP, (0, false), &udp((from.address, 4000), (to, 9), MARK))
}

fn ask(from: &Port, whom: Ipv4Addr) -> Vec<u8> {
    from_port(from, BROADCAST, ARP, &arp(1, (from.mac(), from.address), (BROADCAST, whom)))
}

#[test]
fn a_port_is_closed_before_it_is_added_and_after_it_is_removed() {
    if !can_run(&NEEDS) {
        return;
    }
    let mut lab = Lab::new(true);
    let (late, peer) = (port(A, 9), port(A, FIRST));
    lab.guests.insert((A, 9), add_guest(&lab.node, late.clone()));
    let frames =
        [from_port(&late, peer.mac(), IPV4, &datagram(&late, peer.address)), ask(&late, peer.address)];
    let closed = |when: &str| {
        for frame in &frames {
            lab.refused(when, (A, 9), std::slice::from_ref(frame), Reason::UnknownPort, 1);
        }
        // Nor is anything delivered to it.
        let to_it = from_port(&peer, late.mac(), IPV4, &datagram(&peer, late.address));
        let before = lab.dropped()[&Reason::UnknownPort];
        lab.guest(A, FIRST).tap.send(&to_it);
        wait_until(when, || lab.dropped()[&Reason::UnknownPort] > before);
        assert!(lab.guest(A, 9).tap.marked().iter().all(|frame| frame[6..12] == late.mac().0), "{when}");
        lab.seen((A, 9));
    };
    closed("not yet added");
    for _ in 0..2 {
        lab.firewall(|firewall| firewall.add_port(&late)).unwrap();
    }
    lab.passes("added", (A, 9), (A, FIRST), &frames);
    assert_eq!(lab.inspect().faults, []);
    for _ in 0..2 {
        lab.firewall(|firewall| firewall.remove_port(&late)).unwrap();
    }
    closed("removed");
    assert_eq!(lab.inspect().faults, []);
}

#[test]
fn a_bridge_that_is_not_in_the_sets_is_closed() {
    if !can_run(&NEEDS) {
        return;
    }
    let mut lab = Lab::new(false);
    add_bridge(&lab.node, 9);
    let stray = port(9, FIRST);
    lab.guests.insert((9, FIRST), add_guest(&lab.node, stray.clone()));
    for to in [UPLINK, gateway(9), port(A, FIRST).address, Ipv4Addr::new(198, 51, 100, 1)] {
        let frame = from_port(&stray, gateway_mac(9), IPV4, &datagram(&stray, to));
        lab.refused("from a stray bridge", (9, FIRST), &[frame], Reason::UnknownPort, 1);
    }
    lab.refused("ARP of a stray bridge", (9, FIRST), &[ask(&stray, gateway(9))], Reason::UnknownPort, 1);
    // The whole network, removed at once with its ports, is as closed.
    let (b1, b2) = (port(B, FIRST), port(B, SECOND));
    for _ in 0..2 {
        lab.firewall(|firewall| firewall.remove_net(B)).unwrap();
    }
    let frame = from_port(&b1, b2.mac(), IPV4, &datagram(&b1, b2.address));
    lab.refused("a removed network", (B, FIRST), &[frame], Reason::UnknownPort, 1);
    assert_eq!(lab.inspect().faults, []);
}

#[test]
fn a_port_in_the_wrong_bridge_or_in_none_is_closed() {
    if !can_run(&NEEDS) {
        return;
    }
    let mut lab = Lab::new(false);
    // In another tenant's bridge, with everything else right: neither to its guests nor to the host.
    lab.node.ip("link set tn1i3 master br-tenant-2\n");
    lab.node.wait_forwarding(&["tn1i3"]);
    let me = port(A, FIRST);
    for to in [port(B, FIRST).address, gateway(A), UPLINK] {
        let packet = datagram(&me, to);
        let by_mac = from_port(&me, port(B, FIRST).mac(), IPV4, &packet);
        // The first is flooded to both ports, until the bridge has learnt where the address is.
        lab.guest(B, FIRST).tap.send(&from_port(
            &port(B, FIRST),
            gateway_mac(B),
            IPV4,
            &datagram(&port(B, FIRST), gateway(B)),
        ));
        wait_until("learnt", || lab.dropped().contains_key(&Reason::ToHost));
        lab.refused("to a guest of the bridge", (A, FIRST), &[by_mac], Reason::CrossTenant, 1);
        let by_bridge = from_port(&me, gateway_mac(B), IPV4, &packet);
        lab.refused("to the host by the bridge", (A, FIRST), &[by_bridge], Reason::SpoofIp, 1);
    }
    // In a bridge of the host's own: to none of its ports, in either direction.
    let other = Space::new();
    lab.node.ip(&format!(
        "link add br-host type bridge\nlink set br-host up\n\
         link add lan9 type veth peer name eth0 netns {}\nlink set lan9 master br-host up\n\
         link set tn1i3 master br-host\n",
        other.thread_id
    ));
    other.ip("link set eth0 up\n");
    lab.node.wait_forwarding(&["tn1i3", "lan9"]);
    let tap = other.run(|| crate::firewall::frames::Tap::open("eth0"));
    let frame = from_port(&me, BROADCAST, IPV4, &datagram(&me, UPLINK));
    lab.refused("in the host's bridge", (A, FIRST), &[frame], Reason::UnknownPort, 1);
    assert!(tap.marked().is_empty());
    let before = lab.dropped()[&Reason::UnknownPort];
    tap.send(&from_port(&port(B, FIRST), me.mac(), IPV4, &datagram(&port(B, FIRST), me.address)));
    wait_until("to it", || lab.dropped()[&Reason::UnknownPort] == before + 1);
    // In none: the kernel takes it for a link of its own.
    let bare = port(A, 7);
    let mut guest = add_guest_to(&lab.node, bare.clone(), "address 02:00:00:00:00:07");
    guest.port = bare.clone();
    lab.guests.insert((A, 7), guest);
    lab.node.sysctl("ipv4/conf/all/rp_filter", "0");
    lab.node.sysctl("ipv4/conf/tn1i7/rp_filter", "0");
    for to in [UPLINK, port(B, FIRST).address] {
        let frame = from_port(&bare, mvm_host::network::Mac([2, 0, 0, 0, 0, 7]), IPV4, &datagram(&bare, to));
        lab.refused("in no bridge", (A, 7), &[frame], Reason::UnknownPort, 1);
    }
}

/// Two networks of the host's own, routed and bridged by it, with IPv4 and IPv6.
#[test]
fn traffic_of_the_host_that_is_no_tenants_is_untouched() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(true);
    let (left, right, next) = (Space::new(), Space::new(), Space::new());
    for space in [&lab.node, &left, &right, &next] {
        space.sysctl("ipv6/conf/default/disable_ipv6", "0");
    }
    lab.node.ip(&format!(
        "link add br-lan type bridge\n\
         link add lan0 type veth peer name eth0 netns {}\n\
         link add lan1 type veth peer name eth0 netns {}\n\
         link add tnl0 type veth peer name eth0 netns {}\n\
         link set lan0 master br-lan up\nlink set tnl0 master br-lan up\nlink set br-lan up\n\
         addr add 172.20.1.1/24 dev br-lan\naddr add fd00:1::1/64 dev br-lan nodad\n\
         addr add 172.20.2.1/24 dev lan1\naddr add fd00:2::1/64 dev lan1 nodad\nlink set lan1 up\n",
        left.thread_id, right.thread_id, next.thread_id
    ));
    for (space, net, host) in [(&left, 1, 2), (&next, 1, 3), (&right, 2, 2)] {
        space.ip(&format!(
            "addr add 172.20.{net}.{host}/24 dev eth0\naddr add fd00:{net}::{host}/64 dev eth0 nodad\n\
             link set eth0 up\nroute add default via 172.20.{net}.1\nroute add default via fd00:{net}::1\n"
        ));
    }
    let before = lab.dropped();
    let echo = |space: &Space, to: &str, from: &Space| {
        let address = to.to_owned();
        let server = space.run(move || UdpSocket::bind((address.as_str(), 7000)).unwrap());
        let to = to.to_owned();
        let client = from.run(move || {
            let any = if to.contains(':') { "[::]:0" } else { "0.0.0.0:0" };
            let client = UdpSocket::bind(any).unwrap();
            client.connect((to.as_str(), 7000)).unwrap();
            client
        });
        server.set_read_timeout(Some(PATIENCE / 20)).unwrap();
        client.set_read_timeout(Some(PATIENCE)).unwrap();
        let mut buffer = [0; 8];
        // A neighbour that is only just being asked for may cost the first ones.
        let arrived = (0..20).find_map(|_| {
            client.send(b"hello").unwrap();
            server.recv_from(&mut buffer).ok()
        });
        let (_, peer) = arrived.unwrap();
        server.send_to(b"hello", peer).unwrap();
        client.recv(&mut buffer).unwrap();
    };
    for family in ["172.20.{}", "fd00:{}:"] {
        let at = |net: &str, host: &str| {
            let separator = if family.contains(':') { ":" } else { "." };
            format!("{}{separator}{host}", family.replace("{}", net))
        };
        echo(&right, &at("2", "2"), &left);
        echo(&left, &at("1", "2"), &right);
        echo(&next, &at("1", "3"), &left);
        echo(&lab.node, &at("1", "1"), &left);
        echo(&right, &at("2", "2"), &lab.node);
    }
    echo(&lab.world, "198.51.100.1", &lab.node);
    assert_eq!(lab.dropped(), before);
}
