//! The table `bridge mvm`: what a port may send and be sent.
//!
//! A frame from a port passes on one lookup: its port, its source MAC and its IPv4 source (or ARP sender) must be
//! together in one set. Only addresses decide, so that fragments are judged like whole packets. What is not in the set
//! is looked at again, more slowly, for the sake of the right counter.
//!
//! Ports are known by their names: not every kernel can tell here which bridge a frame is in (`meta ibrname`). A port
//! in another tenant's bridge is found out all the same: each frame gets the number of its port's network, and goes on
//! only to ports of the same number; to the host it comes by a bridge that its address is not behind. The number is
//! the frame's priority, which is of no use inside a bridge, and is taken off before the frame leaves it.
//!
//! Frames to 01:80:c2:00:00:0x do not come by `prerouting`: the kernel hands them to the host as traffic of the port
//! itself. `input` is there for them, but for :0e, which no hook of the bridge sees; the other tables are there for that.

use super::packet::{
    ARP, ARP_SENDER, ARP_SENDER_MAC, ARP_TARGET, ETHER_SADDR, IIFNAME, IP_SADDR, IPV4, IPV6, OIFNAME,
    PRIORITY, Reason, UDP, arp_kinds, arp_operation, drop_for, ether_daddr, ether_type, iifname, is_tap,
    l4proto, oifname, set_priority, source_port,
};
use super::ruleset::{
    BaseKind, Chain, Expr, Family, Hook, KeyType, LookupKind, Set, SetKind, Table, accept, compare, equals,
    goto, lookup, rule,
};

/// What each port may send; elements count it.
pub(super) const PORTS: &str = "ports";
/// Ports that are known.
pub(super) const TAPS: &str = "taps";
pub(super) const MACS: &str = "macs";
/// What was sent to each port.
pub(super) const DELIVERED: &str = "delivered";
/// Which network each port belongs to, and the other way round.
pub(super) const NETWORKS: &str = "networks";
pub(super) const MEMBERS: &str = "members";
/// By network.
pub(super) const GATEWAYS: &str = "gateways";

const FROM_PORT: &str = "from-port";
const FROM_PORT_ARP: &str = "from-port-arp";
const FROM_GUEST: &str = "from-guest";
const REFUSED: &str = "refused";
const NUMBERED: &str = "numbered";
const TO_BRIDGE: &str = "to-bridge";
const TO_PORT: &str = "to-port";
const BETWEEN_PORTS: &str = "between-ports";

/// Before br_netfilter's own hooks, which hand frames to the inet table.
const FILTER_PRIORITY: i32 = -200;
const DHCP_SERVER: u16 = 67;
/// Ethernet, IPv4, and the lengths of their addresses.
const ARP_FOR_IPV4: [u8; 6] = [0, 1, 8, 0, 6, 4];
const ARP_REPLY: u16 = 2;
const CONTROL_ADDRESSES: [u8; 6] = [0x01, 0x80, 0xc2, 0, 0, 0];
const CONTROL_MASK: [u8; 6] = [0xff, 0xff, 0xff, 0xff, 0xff, 0xf0];

pub(super) fn table() -> Table {
    use KeyType::{Address, Interface, Mac, Number};
    let sets = vec![
        Set::new(PORTS, &[Interface, Mac, Address]).counted(),
        Set::new(TAPS, &[Interface]),
        Set::new(MACS, &[Interface, Mac]),
        Set::new(DELIVERED, &[Interface]).counted(),
        Set::new(NETWORKS, &[Interface]).of(SetKind::Numbers),
        Set::new(MEMBERS, &[Number, Interface]),
        Set::new(GATEWAYS, &[Number, Address]),
    ];
    let counters = [
        Reason::CrossTenant,
        Reason::SpoofMac,
        Reason::SpoofIp,
        Reason::SpoofArp,
        Reason::ArpToHost,
        Reason::Dhcp,
        Reason::Ipv6,
        Reason::Ethertype,
        Reason::UnknownPort,
    ];
    let counters = counters.iter().map(|reason| reason.name().to_owned()).collect();
    Table { family: Family::Bridge, chains: chains(), sets, counters }
}

fn of_type(number: u16) -> Vec<Expr> {
    equals(ether_type, &number.to_be_bytes())
}

fn number_off() -> Vec<Expr> {
    vec![Expr::Immediate { register: 1, data: vec![0; 4] }, set_priority()]
}

fn chains() -> Vec<Chain> {
    use LookupKind::{In, NotIn, Number};
    let unknown = || drop_for(Reason::UnknownPort);
    let to_control_address = vec![
        ether_daddr(1),
        Expr::And { register: 1, mask: CONTROL_MASK.to_vec() },
        compare(nftnl_sys::libc::NFT_CMP_EQ, &CONTROL_ADDRESSES),
    ];
    let hooked = |name, hook, rules| Chain::base(name, BaseKind::Filter, hook, FILTER_PRIORITY, rules);
    vec![
        Chain::new(
            REFUSED,
            vec![
                rule([lookup(&[IIFNAME], TAPS, NotIn), unknown()]),
                rule([of_type(IPV6), drop_for(Reason::Ipv6)]),
                rule([lookup(&[IIFNAME, ETHER_SADDR], MACS, NotIn), drop_for(Reason::SpoofMac)]),
                rule([of_type(IPV4), drop_for(Reason::SpoofIp)]),
                rule([of_type(ARP), drop_for(Reason::SpoofArp)]),
                drop_for(Reason::Ethertype),
            ],
        ),
        Chain::new(
            NUMBERED,
            vec![
                rule([lookup(&[IIFNAME], NETWORKS, Number), vec![set_priority()], accept()]),
                drop_for(Reason::UnknownPort),
            ],
        ),
        Chain::new(
            FROM_GUEST,
            vec![
                rule([
                    equals(l4proto, &[UDP]),
                    equals(source_port, &DHCP_SERVER.to_be_bytes()),
                    drop_for(Reason::Dhcp),
                ]),
                goto(NUMBERED),
            ],
        ),
        Chain::new(
            FROM_PORT_ARP,
            vec![
                rule([lookup(&[IIFNAME, ETHER_SADDR], MACS, NotIn), goto(REFUSED)]),
                rule([
                    equals(arp_kinds, &ARP_FOR_IPV4),
                    lookup(&[IIFNAME, ARP_SENDER_MAC, ARP_SENDER], PORTS, In),
                    goto(NUMBERED),
                ]),
                goto(REFUSED),
            ],
        ),
        Chain::new(
            FROM_PORT,
            vec![
                rule([of_type(IPV4), lookup(&[IIFNAME, ETHER_SADDR, IP_SADDR], PORTS, In), goto(FROM_GUEST)]),
                rule([of_type(ARP), goto(FROM_PORT_ARP)]),
                goto(REFUSED),
            ],
        ),
        Chain::new(
            TO_BRIDGE,
            vec![
                rule([to_control_address, drop_for(Reason::Ethertype)]),
                rule([of_type(IPV4), number_off(), accept()]),
                rule([of_type(ARP), equals(arp_operation, &ARP_REPLY.to_be_bytes()), number_off(), accept()]),
                rule([of_type(ARP), lookup(&[PRIORITY, ARP_TARGET], GATEWAYS, In), number_off(), accept()]),
                rule([of_type(ARP), drop_for(Reason::ArpToHost)]),
                drop_for(Reason::Ethertype),
            ],
        ),
        Chain::new(
            TO_PORT,
            vec![
                rule([of_type(IPV6), drop_for(Reason::Ipv6)]),
                rule([number_off(), lookup(&[OIFNAME], DELIVERED, In), accept()]),
                unknown(),
            ],
        ),
        Chain::new(
            BETWEEN_PORTS,
            vec![
                rule([lookup(&[PRIORITY, OIFNAME], MEMBERS, In), accept()]),
                rule([lookup(&[OIFNAME], TAPS, In), drop_for(Reason::CrossTenant)]),
                unknown(),
            ],
        ),
        hooked("prerouting", Hook::Prerouting, vec![rule([is_tap(iifname), goto(FROM_PORT)])]),
        hooked("input", Hook::Input, vec![rule([is_tap(iifname), goto(TO_BRIDGE)])]),
        hooked(
            "forward",
            Hook::Forward,
            vec![
                rule([is_tap(iifname), goto(BETWEEN_PORTS)]),
                // From a port that is not an instance's.
                rule([is_tap(oifname), unknown()]),
            ],
        ),
        hooked("postrouting", Hook::Postrouting, vec![rule([is_tap(oifname), goto(TO_PORT)])]),
    ]
}
