//! What differs between a link as it is found and as it is wanted. Pure: the effects are in `bridge.rs` and `tap.rs`.

use std::fmt;
use std::net::Ipv4Addr;

use serde::Serialize;

use super::settings::{BRIDGE_SETTINGS, Setting, TAP_SETTINGS};
use super::{ObservedBridge, ObservedTap, PortFlags};
use crate::network::{Mac, Port, TenantNet};

/// One thing that was not as wanted.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Repair {
    /// It was not there at all.
    Missing,
    /// It was made by us and left before it had its alias.
    Untagged,
    /// It had another name.
    Renamed {
        found: String,
    },
    /// It had lost its second name, by which it is found when it is renamed.
    Unmarked,
    Down,
    Mtu {
        found: u32,
    },
    Mac {
        found: String,
    },
    /// An address that mvm did not give it.
    ForeignAddress {
        address: Ipv4Addr,
        prefix: u8,
    },
    /// The gateway's address was not there.
    AddressMissing,
    /// The bridge took part in a spanning tree, waited before it forwarded, or listened to multicast.
    BridgeOptions,
    Setting {
        name: &'static str,
        found: i32,
    },
    /// It was in no bridge, or in another one.
    Master {
        found: Option<u32>,
    },
    PortFlags {
        found: PortFlags,
    },
    /// The bridge did not know which hardware address is behind this port, or thought it behind another one.
    ForwardingEntry,
    /// Another user, or every user, could open it.
    Owner {
        found: Option<u32>,
    },
}

impl fmt::Display for Repair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing => write!(f, "it was gone"),
            Self::Untagged => write!(f, "it was half made"),
            Self::Renamed { found } => write!(f, "it was called {found}"),
            Self::Unmarked => write!(f, "its second name was gone"),
            Self::Down => write!(f, "it was down"),
            Self::Mtu { found } => write!(f, "its MTU was {found}"),
            Self::Mac { found } => write!(f, "its hardware address was {found}"),
            Self::ForeignAddress { address, prefix } => {
                write!(f, "it had the foreign address {address}/{prefix}")
            }
            Self::AddressMissing => write!(f, "its address was gone"),
            Self::BridgeOptions => write!(f, "its bridge options were changed"),
            Self::Setting { name, found } => write!(f, "{name} was {found}"),
            Self::Master { found: None } => write!(f, "it was in no bridge"),
            Self::Master { found: Some(index) } => write!(f, "it was in another bridge (link {index})"),
            Self::PortFlags { .. } => write!(f, "its port flags were changed"),
            Self::ForwardingEntry => write!(f, "its forwarding entry was gone"),
            Self::Owner { found: None } => write!(f, "it had no owner"),
            Self::Owner { found: Some(uid) } => write!(f, "it was owned by user {uid}"),
        }
    }
}

/// The TAP's own hardware address: the guest's with another first byte, since a bridge would take frames to an address
/// of one of its ports for its own.
#[must_use]
pub fn tap_mac(guest: Mac) -> Mac {
    let [_, rest @ ..] = guest.0;
    let [b, c, d, e, f] = rest;
    Mac([0x06, b, c, d, e, f])
}

/// What its port must be set to.
#[must_use]
pub(super) fn wanted_port(net: &TenantNet) -> PortFlags {
    PortFlags {
        isolated: net.isolate_ports,
        learning: false,
        unicast_flood: false,
        hairpin: false,
        locked: Some(true),
    }
}

/// What makes `found` the bridge of `wanted`; empty when it is.
#[must_use]
pub fn bridge_repairs(found: Option<&ObservedBridge>, wanted: &TenantNet) -> Vec<Repair> {
    let Some(found) = found else { return vec![Repair::Missing] };
    let mut repairs = Vec::new();
    common(&mut repairs, &found.name, &wanted.bridge(), found.alias.as_ref(), found.marked);
    mac(&mut repairs, found.mac, Mac::of(wanted.net_id, 1));
    if found.mtu != u32::from(wanted.mtu) {
        repairs.push(Repair::Mtu { found: found.mtu });
    }
    if !found.plain {
        repairs.push(Repair::BridgeOptions);
    }
    settings(&mut repairs, &BRIDGE_SETTINGS, &found.settings);
    let address = (wanted.subnet.gateway(), wanted.subnet.prefix());
    for (address, prefix) in found.addresses.iter().copied().filter(|other| *other != address) {
        repairs.push(Repair::ForeignAddress { address, prefix });
    }
    if !found.addresses.contains(&address) {
        repairs.push(Repair::AddressMissing);
    }
    if !found.up {
        repairs.push(Repair::Down);
    }
    repairs
}

/// What makes `found` the TAP of `port` in `net`, whose bridge has the index `bridge`; empty when it is. Whether it is
/// up is not part of it: that is the firewall's to say.
#[must_use]
pub fn tap_repairs(found: Option<&ObservedTap>, port: &Port, net: &TenantNet, bridge: u32) -> Vec<Repair> {
    let Some(found) = found else { return vec![Repair::Missing] };
    let mut repairs = Vec::new();
    common(&mut repairs, &found.name, &port.tap(), found.alias.as_ref(), found.marked);
    mac(&mut repairs, found.mac, tap_mac(port.mac()));
    if found.owner != Some(port.owner_uid) {
        repairs.push(Repair::Owner { found: found.owner });
    }
    if found.mtu != u32::from(net.mtu) {
        repairs.push(Repair::Mtu { found: found.mtu });
    }
    settings(&mut repairs, &TAP_SETTINGS, &found.settings);
    if found.master != Some(bridge) {
        // What it is as a port of another bridge is of no interest.
        repairs.push(Repair::Master { found: found.master });
        return repairs;
    }
    match found.port {
        Some(flags) if flags.known_as(wanted_port(net)) => {}
        flags => repairs.push(Repair::PortFlags { found: flags.unwrap_or_default() }),
    }
    if found.forwarding_entry == Some(false) {
        repairs.push(Repair::ForwardingEntry);
    }
    repairs
}

fn common(repairs: &mut Vec<Repair>, name: &str, wanted: &str, alias: Option<&String>, marked: bool) {
    if name != wanted {
        repairs.push(Repair::Renamed { found: name.to_owned() });
    }
    if alias.is_none() {
        repairs.push(Repair::Untagged);
    }
    if !marked {
        repairs.push(Repair::Unmarked);
    }
}

fn mac(repairs: &mut Vec<Repair>, found: Option<Mac>, wanted: Mac) {
    if found != Some(wanted) {
        let found = found.map_or_else(|| "none".to_owned(), |mac| mac.to_string());
        repairs.push(Repair::Mac { found });
    }
}

/// A setting that the kernel does not have can't be wrong: one without IPv6 has no link-local addresses.
fn settings(repairs: &mut Vec<Repair>, wanted: &[Setting], found: &[Setting]) {
    for (name, value) in wanted {
        let differs = |(other, found): &&Setting| other == name && found != value;
        repairs.extend(found.iter().find(differs).map(|(_, found)| Repair::Setting { name, found: *found }));
    }
}

#[cfg(test)]
#[path = "repair_tests.rs"]
mod tests;
