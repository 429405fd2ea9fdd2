//! Frame by frame: what passes within a tenant, and everything that does not pass, each counted for its reason.

use std::net::Ipv4Addr;

use mvm_host::firewall::Reason;
use mvm_host::network::Mac;

use crate::firewall::frames::{
    BROADCAST, ICMP, MARK, TCP, UDP, arp, echo_request, ethernet, ipv4, tcp_syn, udp,
};
use crate::firewall::lab::{A, B, FIRST, Lab, SECOND, UPLINK, from_port, gateway, gateway_mac, port};
use crate::firewall::space::{NEEDS, wait_until};
use mvm_needs::can_run;

const ME: (u16, u32) = (A, FIRST);
const IPV4: u16 = 0x0800;
const ARP: u16 = 0x0806;
const WHOLE: (u16, bool) = (0, false);

/// One of each protocol from `from` to `to`: frames, and how many packets the host makes of them.
fn each_protocol(from: Ipv4Addr, to: Ipv4Addr) -> Vec<(&'static str, Vec<Vec<u8>>, u64)> {
    let (tcp, datagram) = (tcp_syn((from, 4000), (to, 22)), udp((from, 4000), (to, 53), MARK));
    // Longer than one fragment: both parts have the mark.
    let long = udp((from, 4001), (to, 9), &[MARK, &[0; 66], MARK].concat());
    let (head, tail) = long.split_at(64);
    let parts = [(head, (0, true)), (tail, (64, false))]
        .map(|(part, place)| ipv4(from, to, UDP, place, part))
        .to_vec();
    vec![
        ("TCP", vec![ipv4(from, to, TCP, WHOLE, &tcp)], 1),
        ("UDP", vec![ipv4(from, to, UDP, WHOLE, &datagram)], 1),
        ("ICMP", vec![ipv4(from, to, ICMP, WHOLE, &echo_request(1))], 1),
        ("fragments", parts, 1),
    ]
}

fn framed(to: Mac, from: Mac, packets: &[Vec<u8>]) -> Vec<Vec<u8>> {
    packets.iter().map(|packet| ethernet(to, from, IPV4, packet)).collect()
}

fn all_cases(br_netfilter: bool) {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(br_netfilter);
    within_a_tenant(&lab);
    elsewhere(&lab);
    forged(&lab);
    other_protocols(&lab);
    own_gateway(&lab);
    let inspection = lab.inspect();
    assert_eq!(inspection.faults, [], "traffic changes no rule");
    let me = port(A, FIRST);
    let traffic = inspection.instances[&me.instance];
    assert!(traffic.sent.packets > 0 && traffic.received.packets > 0, "{traffic:?}");
    assert!(inspection.tenants[&me.tenant].sent.bytes > 0, "{:?}", inspection.tenants);
    assert_eq!(inspection.instances[&port(B, SECOND).instance].sent.packets, 0);
}

#[test]
fn a_guest_reaches_its_own_tenant_and_nothing_else_with_br_netfilter() {
    all_cases(true);
}

#[test]
fn a_guest_reaches_its_own_tenant_and_nothing_else_without_br_netfilter() {
    all_cases(false);
}

fn within_a_tenant(lab: &Lab) {
    let (me, peer) = (port(A, FIRST), port(A, SECOND));
    let ask = arp(1, (me.mac(), me.address), (Mac([0; 6]), peer.address));
    lab.passes("ARP to a neighbour", ME, (A, SECOND), &[from_port(&me, BROADCAST, ARP, &ask)]);
    for (what, packets, _) in each_protocol(me.address, peer.address) {
        let frames = framed(peer.mac(), me.mac(), &packets);
        // A whole packet may arrive in place of its fragments.
        let frames = if what == "fragments" { &frames[..1] } else { &frames[..] };
        if what == "fragments" {
            lab.guest(A, FIRST).tap.send(&framed(peer.mac(), me.mac(), &packets)[1]);
        }
        lab.passes(&format!("{what} to a neighbour"), ME, (A, SECOND), frames);
    }
}

/// To whom a guest has no business to speak, by way of its gateway.
fn elsewhere(lab: &Lab) {
    let me = port(A, FIRST);
    let special = |a, b, c, d| (Ipv4Addr::new(a, b, c, d), Reason::DeniedRange);
    let targets = [
        ("another tenant's guest", (port(B, FIRST).address, Reason::CrossTenant)),
        ("the host", (UPLINK, Reason::ToHost)),
        ("another tenant's gateway", (gateway(B), Reason::ToHost)),
        ("the metadata service", special(169, 254, 169, 254)),
        ("Azure's platform", special(168, 63, 129, 16)),
        ("Alibaba's metadata service", special(100, 100, 100, 200)),
        ("Oracle's metadata service", special(192, 0, 0, 192)),
        ("a private network", special(10, 0, 0, 1)),
        ("a private network", special(172, 31, 255, 254)),
        ("a private network", special(192, 168, 1, 1)),
        ("carrier-grade NAT", special(100, 64, 0, 1)),
        ("protocol assignments", special(192, 0, 0, 9)),
        ("benchmarks", special(198, 19, 0, 1)),
        ("reserved addresses", special(240, 0, 0, 1)),
    ];
    for (name, (address, reason)) in targets {
        for (what, packets, count) in each_protocol(me.address, address) {
            let frames = framed(gateway_mac(A), me.mac(), &packets);
            lab.refused(&format!("{what} to {name}, {address}"), ME, &frames, reason, count);
        }
    }
    // The other tenant has no egress at all.
    let other = port(B, FIRST);
    for (what, packets, count) in each_protocol(other.address, crate::firewall::lab::WORLD) {
        let frames = framed(gateway_mac(B), other.mac(), &packets);
        lab.refused(&format!("{what} to the world"), (B, FIRST), &frames, Reason::Egress, count);
    }
    // Straight to a guest of another tenant by its hardware address: it is on no port of this bridge.
    for (what, packets, _) in each_protocol(me.address, port(B, FIRST).address) {
        for frame in framed(port(B, FIRST).mac(), me.mac(), &packets) {
            lab.guest(A, FIRST).tap.send(&frame);
        }
        // Flooded to the neighbour, as any unknown address; never to the other bridge.
        wait_until(what, || !lab.guest(A, SECOND).tap.marked().is_empty());
        assert_eq!(
            lab.guest(B, FIRST).tap.marked().len() + lab.guest(B, SECOND).tap.marked().len(),
            0,
            "{what}"
        );
    }
    lab.seen(ME);
}

/// Frames of which the sender is a lie.
fn forged(lab: &Lab) {
    let (me, peer, stranger) = (port(A, FIRST), port(A, SECOND), port(B, FIRST));
    for (whose, address) in [
        ("a neighbour's", peer.address),
        ("another tenant's", stranger.address),
        ("the gateway's", gateway(A)),
        ("no", Ipv4Addr::UNSPECIFIED),
    ] {
        for to in [(peer.mac(), peer.address), (gateway_mac(A), stranger.address), (gateway_mac(A), UPLINK)] {
            for (what, packets, _) in each_protocol(address, to.1) {
                let frames = framed(to.0, me.mac(), &packets);
                let count = frames.len() as u64;
                lab.refused(&format!("{what} with {whose} address"), ME, &frames, Reason::SpoofIp, count);
            }
        }
    }
    for (what, packets, _) in each_protocol(me.address, peer.address) {
        for mac in [peer.mac(), stranger.mac(), gateway_mac(A)] {
            let frames = framed(peer.mac(), mac, &packets);
            let count = frames.len() as u64;
            lab.refused(&format!("{what} with another's MAC"), ME, &frames, Reason::SpoofMac, count);
        }
    }
    let lies = [
        ("the gateway's address", 2, (me.mac(), gateway(A))),
        ("a neighbour's address", 1, (me.mac(), peer.address)),
        ("another tenant's address", 2, (me.mac(), stranger.address)),
        ("no address", 1, (me.mac(), Ipv4Addr::UNSPECIFIED)),
        ("its own address at another's MAC", 2, (peer.mac(), me.address)),
    ];
    for (what, operation, sender) in lies {
        for to in [BROADCAST, peer.mac(), gateway_mac(A)] {
            let message = arp(operation, sender, (peer.mac(), peer.address));
            let frame = from_port(&me, to, ARP, &message);
            lab.refused(&format!("ARP with {what}"), ME, &[frame], Reason::SpoofArp, 1);
        }
    }
    let message = arp(1, (me.mac(), me.address), (Mac([0; 6]), gateway(A)));
    let frame = ethernet(BROADCAST, peer.mac(), ARP, &message);
    lab.refused("ARP in a frame with another's MAC", ME, &[frame], Reason::SpoofMac, 1);
    let mut strange = message;
    strange[4] = 8;
    lab.refused("ARP of another shape", ME, &[from_port(&me, BROADCAST, ARP, &strange)], Reason::SpoofArp, 1);
    let cut = ethernet(BROADCAST, me.mac(), IPV4, &[])[..14].to_vec();
    lab.refused("a frame that ends before its addresses", ME, &[cut], Reason::SpoofIp, 1);
}

fn other_protocols(lab: &Lab) {
    let (me, peer) = (port(A, FIRST), port(A, SECOND));
    let mut v6 = vec![0x60, 0, 0, 0, 0, MARK.len() as u8, 59, 64];
    v6.extend([
        0xfe, 0x80, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0xff, 0x02, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,
        0, 1,
    ]);
    v6.extend(MARK);
    for to in [peer.mac(), gateway_mac(A), Mac([0x33, 0x33, 0, 0, 0, 1])] {
        lab.refused("IPv6", ME, &[from_port(&me, to, 0x86dd, &v6)], Reason::Ipv6, 1);
    }
    let inside = ipv4(me.address, peer.address, UDP, WHOLE, &udp((me.address, 1), (peer.address, 2), MARK));
    let tagged = |id: u16| [&id.to_be_bytes()[..], &IPV4.to_be_bytes()[..], &inside[..]].concat();
    let twice = [&[0, 5, 0x81, 0][..], &tagged(7)[..]].concat();
    let types = [
        ("802.1Q", 0x8100, tagged(7)),
        ("802.1Q with priority alone", 0x8100, tagged(0)),
        ("802.1ad", 0x88a8, tagged(7)),
        ("two tags", 0x88a8, twice),
        ("EAPOL", 0x888e, MARK.to_vec()),
        ("LLDP", 0x88cc, MARK.to_vec()),
        ("PPPoE", 0x8864, MARK.to_vec()),
        ("MPLS", 0x8847, MARK.to_vec()),
        ("RARP", 0x8035, arp(3, (me.mac(), me.address), (me.mac(), me.address))),
        ("a length in place of a type", 0x0026, MARK.to_vec()),
    ];
    for (what, kind, payload) in types {
        for to in [peer.mac(), BROADCAST, gateway_mac(A)] {
            let frame = from_port(&me, to, kind, &payload);
            lab.refused(what, ME, &[frame], Reason::Ethertype, 1);
        }
    }
    // The kernel gives what is sent to these to the host, past the bridge's first hook.
    let to_host = ipv4(me.address, UPLINK, UDP, WHOLE, &udp((me.address, 1), (UPLINK, 2), MARK));
    for last in [0x02, 0x03, 0x0f] {
        for (kind, payload) in [(IPV4, &to_host), (0x88cc, &MARK.to_vec())] {
            let frame = from_port(&me, Mac([0x01, 0x80, 0xc2, 0, 0, last]), kind, payload);
            lab.refused("a control address", ME, &[frame], Reason::Ethertype, 1);
        }
    }
    // These even past all of its hooks.
    let ask = arp(1, (me.mac(), me.address), (Mac([0; 6]), UPLINK));
    for (what, kind, payload) in [("ARP", ARP, &ask), ("to the host", IPV4, &to_host)] {
        let frame = from_port(&me, Mac([0x01, 0x80, 0xc2, 0, 0, 0x0e]), kind, payload);
        lab.refused(&format!("{what} by a control address"), ME, &[frame], Reason::UnknownPort, 1);
    }
    let offer = ipv4(me.address, peer.address, UDP, WHOLE, &udp((me.address, 67), (peer.address, 68), MARK));
    lab.refused(
        "an answer of a DHCP server",
        ME,
        &[from_port(&me, peer.mac(), IPV4, &offer)],
        Reason::Dhcp,
        1,
    );
}

/// What a guest may ask of its own gateway, and what it may not.
fn own_gateway(lab: &Lab) {
    let me = port(A, FIRST);
    let tap = &lab.guest(A, FIRST).tap;
    tap.marked();
    let ping = ipv4(me.address, gateway(A), ICMP, WHOLE, &echo_request(3));
    tap.send(&from_port(&me, gateway_mac(A), IPV4, &ping));
    wait_until("the gateway answers a ping", || {
        tap.marked().iter().any(|frame| frame[6..12] == gateway_mac(A).0 && frame[34] == 0)
    });
    for (what, packets, count) in
        each_protocol(me.address, gateway(A)).into_iter().filter(|(what, ..)| *what != "ICMP")
    {
        let frames = framed(gateway_mac(A), me.mac(), &packets);
        lab.refused(&format!("{what} to the own gateway"), ME, &frames, Reason::ToHost, count);
    }
    // Which addresses the host has is nobody's business; the question itself goes to the neighbours, as it may.
    for address in [UPLINK, gateway(B)] {
        let before = lab.dropped().get(&Reason::ArpToHost).copied().unwrap_or_default();
        let ask = arp(1, (me.mac(), me.address), (Mac([0; 6]), address));
        lab.guest(A, FIRST).tap.send(&from_port(&me, BROADCAST, ARP, &ask));
        wait_until("the host does not hear it", || {
            lab.dropped().get(&Reason::ArpToHost).copied().unwrap_or_default() == before + 1
        });
        lab.seen(ME);
    }
}

#[test]
fn what_an_operator_denies_is_reached_by_none_and_the_rest_of_the_world_is() {
    if !can_run(&NEEDS) {
        return;
    }
    let lab = Lab::new(false);
    let me = port(A, FIRST);
    let (denied, neighbour) = (Ipv4Addr::new(203, 0, 113, 7), Ipv4Addr::new(203, 0, 113, 8));
    let to = |address| {
        let datagram = udp((me.address, 4000), (address, 53), MARK);
        framed(gateway_mac(A), me.mac(), &[ipv4(me.address, address, UDP, WHOLE, &datagram)])
    };
    let reaches_the_world = |address| {
        lab.world_tap.marked();
        lab.guest(A, FIRST).tap.send(&to(address)[0]);
        wait_until("a packet to the world", || !lab.world_tap.marked().is_empty());
    };
    reaches_the_world(denied);
    let more = ["203.0.113.7".parse().unwrap(), "10.1.0.0/16".parse().unwrap()];
    let both = || (crate::firewall::lab::both_nets(), crate::firewall::lab::all_ports());
    let deny = |ranges: &[mvm_host::network::AddressRange]| {
        lab.firewall(|firewall| {
            firewall.deny(ranges);
            firewall.rebuild(&both().0, &both().1)
        })
        .unwrap();
        assert_eq!(lab.inspect().faults, []);
    };
    deny(&more);
    lab.refused("a denied address", ME, &to(denied), Reason::DeniedRange, 1);
    lab.refused("what is always denied", ME, &to(Ipv4Addr::new(10, 0, 0, 1)), Reason::DeniedRange, 1);
    reaches_the_world(neighbour);
    deny(&[]);
    reaches_the_world(denied);
}
