//! The table `inet mvm`: what is routed between tenants, the host and the world.
//!
//! Base chains accept, and send on only what enters or leaves by an interface with a name of ours; from there
//! everything that is not allowed is dropped, so that an interface missing from the sets is closed, not open. What a
//! tenant sends is judged by addresses alone before its connection's state is looked at: a forged ICMP error that
//! "belongs" to someone's connection crosses no border. With br_netfilter on, frames within a bridge come through
//! `forward` too, with the bridge as both interfaces.

use super::packet::{
    BRIDGES, CT_ESTABLISHED, CT_INVALID, CT_RELATED, CT_REPLY, DESTINATION_PORT, ICMP, IIFNAME, IP_DADDR,
    IP_SADDR, L4PROTO, OIFNAME, Reason, ct_direction, ct_state, ct_state_not, drop_for, icmp_type, iifname,
    is_tap, l4proto, no_ipv6, oifname,
};
use super::ruleset::{
    BaseKind, Chain, Element, Expr, Family, Hook, Key, KeyType, LookupKind, Set, SetKind, Table, accept,
    differs, equals, goto, lookup, rule,
};

/// Bridges that are known.
pub(super) const BRIDGES_SET: &str = "bridges";
/// Which bridge each address of an instance is behind.
pub(super) const SOURCES: &str = "sources";
/// Each bridge's own gateway.
pub(super) const GATEWAYS: &str = "gateways";
/// What else a gateway answers to.
pub(super) const SERVICES: &str = "services";
/// From one bridge to itself, as frames that br_netfilter sends through here are, unless its ports are kept apart.
/// Verdicts that go to a chain would make the kernel check all rules and all elements for loops with every new tenant;
/// accepting does not.
pub(super) const WITHIN: &str = "within";
/// From one bridge to itself where ports are kept apart.
pub(super) const APART: &str = "apart";
/// Bridges whose traffic to the world gets the host's address.
pub(super) const MASQUERADED: &str = "masqueraded";
/// What passed, by bridge.
pub(super) const SENT: &str = "sent";
pub(super) const RECEIVED: &str = "received";
const DENIED: &str = "denied";

const TO_WORLD: &str = "to-world";
const FROM_TENANT: &str = "from-tenant";
const TO_TENANT: &str = "to-tenant";
const TO_HOST: &str = "to-host";
const FROM_HOST: &str = "from-host";
const BETWEEN: &str = "between";
const BAD_SOURCE: &str = "bad-source";

const FILTER_PRIORITY: i32 = 0;
const SOURCE_NAT_PRIORITY: i32 = 100;
const ICMP_ECHO_REQUEST: u8 = 8;

/// What no tenant reaches, whatever its egress: first address and first one after. The ranges for documentation are
/// not among them: they lead nowhere, and tests use them as the world.
const DENIED_RANGES: [([u8; 4], Option<[u8; 4]>); 10] = [
    // "This network".
    ([0, 0, 0, 0], Some([1, 0, 0, 0])),
    ([10, 0, 0, 0], Some([11, 0, 0, 0])),
    // Carrier-grade NAT.
    ([100, 64, 0, 0], Some([100, 128, 0, 0])),
    ([127, 0, 0, 0], Some([128, 0, 0, 0])),
    // Link-local, with the metadata services of clouds.
    ([169, 254, 0, 0], Some([169, 255, 0, 0])),
    ([172, 16, 0, 0], Some([172, 32, 0, 0])),
    // Protocol assignments.
    ([192, 0, 0, 0], Some([192, 0, 1, 0])),
    ([192, 168, 0, 0], Some([192, 169, 0, 0])),
    // Benchmarks of devices; in use as private addresses.
    ([198, 18, 0, 0], Some([198, 20, 0, 0])),
    // Multicast, reserved and broadcast.
    ([224, 0, 0, 0], None),
];

pub(super) fn table() -> Table {
    use KeyType::{Address, Interface, Port, Protocol};
    let sets = vec![
        Set::new(BRIDGES_SET, &[Interface]),
        Set::new(SOURCES, &[Interface, Address]),
        Set::new(GATEWAYS, &[Interface, Address]),
        Set::new(SERVICES, &[Interface, Address, Protocol, Port]),
        Set::new(WITHIN, &[Interface, Interface]).of(SetKind::Verdicts),
        Set::new(APART, &[Interface, Interface]),
        Set::new(MASQUERADED, &[Interface]),
        Set::new(SENT, &[Interface]).counted(),
        Set::new(RECEIVED, &[Interface]).counted(),
        Set::new(DENIED, &[Address]).of(SetKind::Ranges),
    ];
    let counters = [
        Reason::CrossTenant,
        Reason::Isolated,
        Reason::ToHost,
        Reason::DeniedRange,
        Reason::Egress,
        Reason::Ingress,
        Reason::Invalid,
        Reason::SpoofIp,
        Reason::Ipv6,
        Reason::UnknownPort,
    ];
    let counters = counters.iter().map(|reason| reason.name().to_owned()).collect();
    Table { family: Family::Inet, chains: chains(), sets, counters }
}

/// What is in sets whoever the tenants are.
pub(super) fn fixed_elements() -> Vec<(&'static str, Element)> {
    let mut elements = Vec::new();
    for (first, after) in DENIED_RANGES {
        let at = |address: [u8; 4]| Key::default().address(address.into()).element();
        elements.push((DENIED, at(first)));
        elements.extend(after.map(|after| (DENIED, Element { end: true, ..at(after) })));
    }
    elements
}

fn chains() -> Vec<Chain> {
    use LookupKind::{In, NotIn, Verdict};
    let both_ways = || {
        vec![
            rule([equals(iifname, BRIDGES), goto(FROM_TENANT)]),
            rule([is_tap(iifname), drop_for(Reason::UnknownPort)]),
            rule([equals(oifname, BRIDGES), goto(TO_TENANT)]),
            rule([is_tap(oifname), drop_for(Reason::UnknownPort)]),
        ]
    };
    let inwards = vec![
        rule([equals(iifname, BRIDGES), goto(TO_HOST)]),
        rule([is_tap(iifname), drop_for(Reason::UnknownPort)]),
    ];
    let outwards = vec![
        rule([equals(oifname, BRIDGES), goto(FROM_HOST)]),
        rule([is_tap(oifname), drop_for(Reason::UnknownPort)]),
    ];
    let known_source = || rule([lookup(&[IIFNAME, IP_SADDR], SOURCES, NotIn), goto(BAD_SOURCE)]);
    let count_sent = || lookup(&[IIFNAME], SENT, In);
    let count_received = || rule([lookup(&[OIFNAME], RECEIVED, In), accept()]);
    let unknown = || drop_for(Reason::UnknownPort);
    let masquerade =
        rule([differs(oifname, BRIDGES), lookup(&[IIFNAME], MASQUERADED, In), vec![Expr::Masquerade]]);
    vec![
        // Chains come before those that go to them, as the kernel wants them.
        Chain::new(
            TO_WORLD,
            vec![
                rule([ct_state(CT_INVALID), drop_for(Reason::Invalid)]),
                rule([count_sent(), accept()]),
                unknown(),
            ],
        ),
        Chain::new(
            BAD_SOURCE,
            vec![rule([lookup(&[IIFNAME], BRIDGES_SET, In), drop_for(Reason::SpoofIp)]), unknown()],
        ),
        Chain::new(
            BETWEEN,
            vec![
                lookup(&[IIFNAME, OIFNAME], WITHIN, Verdict),
                rule([lookup(&[IIFNAME, OIFNAME], APART, In), drop_for(Reason::Isolated)]),
                drop_for(Reason::CrossTenant),
            ],
        ),
        Chain::new(
            FROM_TENANT,
            vec![
                no_ipv6(),
                known_source(),
                rule([equals(oifname, BRIDGES), goto(BETWEEN)]),
                rule([lookup(&[IP_DADDR], DENIED, In), drop_for(Reason::DeniedRange)]),
                rule([lookup(&[IIFNAME], MASQUERADED, In), goto(TO_WORLD)]),
                rule([lookup(&[IIFNAME], BRIDGES_SET, In), drop_for(Reason::Egress)]),
                unknown(),
            ],
        ),
        Chain::new(
            TO_TENANT,
            vec![
                no_ipv6(),
                rule([ct_state_not(CT_ESTABLISHED | CT_RELATED), drop_for(Reason::Ingress)]),
                count_received(),
                unknown(),
            ],
        ),
        Chain::new(
            TO_HOST,
            vec![
                no_ipv6(),
                known_source(),
                // A reply to what the host began, from whichever of its addresses.
                rule([ct_state(CT_ESTABLISHED), equals(ct_direction, &[CT_REPLY]), count_sent(), accept()]),
                rule([lookup(&[IIFNAME, IP_DADDR], GATEWAYS, NotIn), drop_for(Reason::ToHost)]),
                rule([ct_state(CT_INVALID), drop_for(Reason::Invalid)]),
                rule([equals(l4proto, &[ICMP]), ct_state(CT_RELATED), count_sent(), accept()]),
                rule([
                    equals(l4proto, &[ICMP]),
                    equals(icmp_type, &[ICMP_ECHO_REQUEST]),
                    count_sent(),
                    accept(),
                ]),
                rule([
                    lookup(&[IIFNAME, IP_DADDR, L4PROTO, DESTINATION_PORT], SERVICES, In),
                    count_sent(),
                    accept(),
                ]),
                drop_for(Reason::ToHost),
            ],
        ),
        Chain::new(FROM_HOST, vec![no_ipv6(), count_received(), unknown()]),
        Chain::base("forward", BaseKind::Filter, Hook::Forward, FILTER_PRIORITY, both_ways()),
        Chain::base("input", BaseKind::Filter, Hook::Input, FILTER_PRIORITY, inwards),
        Chain::base("output", BaseKind::Filter, Hook::Output, FILTER_PRIORITY, outwards),
        Chain::base("postrouting", BaseKind::Nat, Hook::Postrouting, SOURCE_NAT_PRIORITY, vec![masquerade]),
    ]
}
