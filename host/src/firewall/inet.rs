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
use crate::network::AddressRange;

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

/// What no tenant reaches, whatever its egress: first address and length of prefix. The ranges for documentation are
/// not among them: they lead nowhere, and tests use them as the world. No tenant has IPv6, and so none reaches a
/// metadata service there.
const DENIED_RANGES: [([u8; 4], u8); 11] = [
    // "This network".
    ([0, 0, 0, 0], 8),
    ([10, 0, 0, 0], 8),
    // Carrier-grade NAT, with Alibaba's metadata service.
    ([100, 64, 0, 0], 10),
    ([127, 0, 0, 0], 8),
    // Azure's platform: certificates and settings of the machine, health, DNS. The one such address that is public.
    ([168, 63, 129, 16], 32),
    // Link-local, with the metadata services of most clouds.
    ([169, 254, 0, 0], 16),
    ([172, 16, 0, 0], 12),
    // Protocol assignments, with Oracle's metadata service.
    ([192, 0, 0, 0], 24),
    ([192, 168, 0, 0], 16),
    // Benchmarks of devices; in use as private addresses.
    ([198, 18, 0, 0], 15),
    // Multicast, reserved and broadcast.
    ([224, 0, 0, 0], 3),
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

/// What is in sets for all tenants. `more`: what an operator denies them besides.
pub(super) fn fixed_elements(more: &[AddressRange]) -> Vec<(&'static str, Element)> {
    let mut elements = Vec::new();
    for (first, after) in denied(more) {
        let at = |bits: u32| Key::default().address(bits.into()).element();
        elements.extend(u32::try_from(first).map(|first| (DENIED, at(first))));
        // A range up to the last address has no end in the set.
        elements.extend(u32::try_from(after).map(|after| (DENIED, Element { end: true, ..at(after) })));
    }
    elements
}

/// All that is denied, in order and apart from each other, as the kernel wants it: first address and first one after.
fn denied(more: &[AddressRange]) -> Vec<(u64, u64)> {
    let always = DENIED_RANGES.map(|(first, prefix)| {
        let first = u64::from(u32::from_be_bytes(first));
        (first, first + (1 << (32 - prefix)))
    });
    let mut ranges: Vec<_> = always.into_iter().chain(more.iter().map(|range| range.bounds())).collect();
    ranges.sort_unstable();
    let mut apart: Vec<(u64, u64)> = Vec::new();
    for (first, after) in ranges {
        match apart.last_mut() {
            Some(last) if first <= last.1 => last.1 = last.1.max(after),
            _ => apart.push((first, after)),
        }
    }
    apart
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_operator_denies_is_joined_with_what_always_is() {
        let range = |text: &str| text.parse::<AddressRange>().unwrap().bounds();
        let alone = denied(&[]);
        assert!(alone.is_sorted() && alone.len() == DENIED_RANGES.len());
        for always in ["168.63.129.16", "169.254.169.254", "100.100.100.200", "192.0.0.192"] {
            let (first, after) = range(always);
            assert!(alone.iter().any(|(from, to)| *from <= first && after <= *to), "{always}");
        }
        let more = ["203.0.113.0/25", "203.0.113.128/25", "10.1.0.0/16", "11.0.0.0/8", "192.0.0.0/16"];
        let more: Vec<_> = more.iter().map(|text| text.parse().unwrap()).collect();
        let joined = denied(&more);
        assert!(joined.contains(&range("203.0.113.0/24")) && joined.contains(&range("10.0.0.0/7")));
        assert!(joined.contains(&range("192.0.0.0/16")) && joined.len() == alone.len() + 1, "{joined:?}");
        assert_eq!(denied(&["0.0.0.0/0".parse().unwrap()]), [(0, 1 << 32)]);
    }
}
