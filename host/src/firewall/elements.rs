//! What networks and ports are in the sets: all that changes when a tenant or an instance comes or goes.

use std::collections::BTreeSet;

use mvm_proto::document::EgressMode;

use super::packet::{TCP, UDP};
use super::ruleset::{Element, Family, Key, Placed, Table, Verdict};
use super::{arp, bridge, inet};
use crate::network::{AddressRange, Port, TenantNet};

const DNS: u16 = 53;

/// All tables, without elements.
pub(super) fn tables() -> [Table; 3] {
    [inet::table(), bridge::table(), arp::table()]
}

/// Every element that there should be.
pub(super) fn all<'a>(
    nets: impl IntoIterator<Item = &'a TenantNet>,
    ports: impl IntoIterator<Item = &'a Port>,
    denied: &[AddressRange],
) -> BTreeSet<Placed> {
    let fixed = inet::fixed_elements(denied).into_iter().map(|(set, element)| routed(set, element));
    let nets = nets.into_iter().flat_map(of_net);
    fixed.chain(nets).chain(ports.into_iter().flat_map(of_port)).collect()
}

pub(super) fn of_net(net: &TenantNet) -> Vec<Placed> {
    let (bridge_name, gateway) = (net.bridge(), net.subnet.gateway());
    let bridge = || Key::default().interface(&bridge_name);
    let to_itself = bridge().interface(&bridge_name);
    let mut elements = vec![
        routed(inet::BRIDGES_SET, bridge().element()),
        routed(inet::GATEWAYS, bridge().address(gateway).element()),
        if net.isolate_ports {
            routed(inet::APART, to_itself.element())
        } else {
            routed(inet::WITHIN, to_itself.to(Verdict::Accept))
        },
        routed(inet::SENT, bridge().element()),
        routed(inet::RECEIVED, bridge().element()),
        bridged(bridge::GATEWAYS, Key::default().number(number_of(net.net_id)).address(gateway).element()),
    ];
    if net.egress == EgressMode::Nat {
        elements.push(routed(inet::MASQUERADED, bridge().element()));
    }
    if net.dns {
        let service = |protocol| bridge().address(gateway).protocol(protocol).port(DNS).element();
        elements.extend([UDP, TCP].map(|protocol| routed(inet::SERVICES, service(protocol))));
    }
    elements
}

pub(super) fn of_port(port: &Port) -> Vec<Placed> {
    let (tap_name, mac) = (port.tap(), port.mac().0);
    let tap = || Key::default().interface(&tap_name);
    vec![
        routed(inet::SOURCES, Key::default().interface(&port.bridge()).address(port.address).element()),
        bridged(bridge::PORTS, tap().mac(mac).address(port.address).element()),
        bridged(bridge::TAPS, tap().element()),
        bridged(bridge::MACS, tap().mac(mac).element()),
        bridged(bridge::DELIVERED, tap().element()),
        bridged(bridge::NETWORKS, tap().numbered(number_of(port.net_id))),
        bridged(
            bridge::MEMBERS,
            Key::default().number(number_of(port.net_id)).interface(&tap_name).element(),
        ),
    ]
}

/// Zero is the number of frames that have none.
fn number_of(net_id: u16) -> u32 {
    u32::from(net_id) + 1
}

fn routed(set: &'static str, element: Element) -> Placed {
    Placed { family: Family::Inet, set, element }
}

fn bridged(set: &'static str, element: Element) -> Placed {
    Placed { family: Family::Bridge, set, element }
}
