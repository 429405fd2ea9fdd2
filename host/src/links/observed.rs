//! Links as they are found: what the kernel says about one, read once into what the rest of this module looks at.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use mvm_proto::{InstanceId, TenantId};
use serde::Serialize;

use super::MARK_PREFIX;
use super::settings::Setting;
use super::words::{Words, attributes, first_u32, first_u64, number, text};
use crate::network::{Mac, is_ours, net_of_bridge, place_of_tap};

/// The kernel's numbers for a link's name and for its other names, by which links are asked for too.
pub(super) const IFNAME: u16 = 3;
pub(super) const ALT_IFNAME: u16 = 53;

/// The kernel's numbers for the other attributes of a link.
mod kinds {
    pub(super) const ADDRESS: u16 = 1;
    pub(super) const MTU: u16 = 4;
    pub(super) const MASTER: u16 = 10;
    pub(super) const LINKINFO: u16 = 18;
    pub(super) const IFALIAS: u16 = 20;
    pub(super) const STATS64: u16 = 23;
    pub(super) const AF_SPEC: u16 = 26;
    pub(super) const PROP_LIST: u16 = 52;

    pub(super) const INFO_KIND: u16 = 1;
    pub(super) const INFO_DATA: u16 = 2;
    pub(super) const INFO_PORT_DATA: u16 = 5;

    pub(super) const BRIDGE_FORWARD_DELAY: u16 = 1;
    pub(super) const BRIDGE_STP_STATE: u16 = 5;
    pub(super) const BRIDGE_MULTICAST_SNOOPING: u16 = 23;

    pub(super) const PORT_HAIRPIN: u16 = 4;
    pub(super) const PORT_LEARNING: u16 = 8;
    pub(super) const PORT_UNICAST_FLOOD: u16 = 9;
    pub(super) const PORT_ISOLATED: u16 = 33;
    pub(super) const PORT_LOCKED: u16 = 39;

    pub(super) const TUN_OWNER: u16 = 1;
    pub(super) const TUN_PERSIST: u16 = 6;

    pub(super) const AF_INET: u16 = 2;
    pub(super) const AF_INET6: u16 = 10;
    pub(super) const INET_CONF: u16 = 1;
    pub(super) const INET6_CONF: u16 = 2;
    pub(super) const INET6_ADDR_GEN_MODE: u16 = 8;
}

/// Where in the kernel's table of a link's IPv4 settings each is.
const IPV4_SETTINGS: [(&str, usize); 9] = [
    ("ipv4/proxy_arp", 2),
    ("ipv4/accept_redirects", 3),
    ("ipv4/send_redirects", 5),
    ("ipv4/rp_filter", 7),
    ("ipv4/accept_source_route", 8),
    ("ipv4/arp_announce", 17),
    ("ipv4/arp_ignore", 18),
    ("ipv4/route_localnet", 25),
    ("ipv4/bc_forwarding", 31),
];

/// The same of its IPv6 settings.
const IPV6_SETTINGS: [(&str, usize); 1] = [("ipv6/disable_ipv6", 26)];

const UP: u32 = 1;

/// All that we have on this host, and what only looks like it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObservedLinks {
    pub bridges: Vec<ObservedBridge>,
    pub taps: Vec<ObservedTap>,
    /// Names like ours on links without our alias: they stay as they are.
    pub foreign: Vec<String>,
    /// Links with our alias whose names say nothing any more: to be swept.
    pub strays: Vec<Stray>,
}

/// A link of ours that can't be traced to a network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stray {
    pub index: u32,
    pub name: String,
    pub alias: String,
}

/// A bridge of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedBridge {
    pub index: u32,
    pub name: String,
    pub net_id: u16,
    /// None only between its making and its tagging.
    pub alias: Option<String>,
    pub tenant: Option<TenantId>,
    /// Whether it has its second name.
    pub marked: bool,
    pub up: bool,
    pub mtu: u32,
    pub mac: Option<Mac>,
    /// No spanning tree, no delay, no listening to multicast.
    pub plain: bool,
    pub addresses: Vec<(Ipv4Addr, u8)>,
    pub settings: Vec<Setting>,
}

/// A TAP of ours.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ObservedTap {
    pub index: u32,
    pub name: String,
    pub net_id: u16,
    pub offset: u32,
    /// None only between its making and its tagging.
    pub alias: Option<String>,
    pub tenant: Option<TenantId>,
    pub instance: Option<InstanceId>,
    pub marked: bool,
    /// The index of the bridge that it is in.
    pub master: Option<u32>,
    pub up: bool,
    pub mtu: u32,
    pub mac: Option<Mac>,
    pub owner: Option<u32>,
    /// None when it is in no bridge.
    pub port: Option<PortFlags>,
    /// Whether its bridge knows the guest's address behind it; None where it was not asked for.
    pub forwarding_entry: Option<bool>,
    pub settings: Vec<Setting>,
    /// What the guest sent.
    pub rx_bytes: u64,
    /// What the guest was sent.
    pub tx_bytes: u64,
}

/// How a bridge treats one of its ports.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub struct PortFlags {
    /// Reaches the bridge, but no other isolated port.
    pub isolated: bool,
    /// Whether senders behind it are remembered: a guest could take another's frames by sending in its name.
    pub learning: bool,
    /// Whether it gets frames to unknown addresses.
    pub unicast_flood: bool,
    /// Whether frames may leave where they came from.
    pub hairpin: bool,
    /// Whether only known senders may speak. Kernels before 5.18 can't say.
    pub locked: Option<bool>,
}

impl PortFlags {
    /// Whether these are `wanted`, as far as this kernel knows them.
    pub(super) fn known_as(self, wanted: Self) -> bool {
        self == Self { locked: self.locked.and(wanted.locked), ..wanted }
    }
}

/// What we make; the kernel's word for anything else does not matter.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) enum Kind {
    Bridge,
    Tap,
    #[default]
    Other,
}

/// One link, before it is known whose it is.
#[derive(Debug, Clone, Default)]
pub(super) struct Link {
    pub(super) index: u32,
    pub(super) name: String,
    pub(super) alias: Option<String>,
    pub(super) kind: Kind,
    pub(super) mac: Option<Mac>,
    other_names: Vec<String>,
    up: bool,
    mtu: u32,
    master: Option<u32>,
    /// Of a bridge: whether it has no option that it should not have.
    plain: bool,
    /// Of a TAP.
    owner: Option<u32>,
    kept: bool,
    port: Option<PortFlags>,
    settings: Vec<Setting>,
    bytes: (u64, u64),
}

impl Link {
    pub(super) fn read(words: &Words) -> Self {
        let (index, flags, bytes) = words.link();
        let mut link = Self { index, up: flags & UP != 0, ..Self::default() };
        for (kind, value) in attributes(bytes) {
            match kind {
                IFNAME => link.name = text(value),
                kinds::IFALIAS => link.alias = Some(text(value)),
                kinds::MTU => link.mtu = number(value),
                kinds::MASTER => link.master = Some(number(value)).filter(|master| *master != 0),
                kinds::ADDRESS => link.mac = value.try_into().ok().map(Mac),
                kinds::STATS64 => {
                    let count = |at| value.get(at..).and_then(first_u64).unwrap_or_default();
                    // After the numbers of packets received and sent.
                    link.bytes = (count(16), count(24));
                }
                kinds::PROP_LIST => {
                    let names = attributes(value).filter(|(kind, _)| *kind == ALT_IFNAME);
                    link.other_names = names.map(|(_, name)| text(name)).collect();
                }
                kinds::LINKINFO => link.read_info(value),
                kinds::AF_SPEC => link.settings = settings(value),
                _ => {}
            }
        }
        link
    }

    fn read_info(&mut self, info: &[u8]) {
        let part = |wanted| attributes(info).find(|(kind, _)| *kind == wanted).map(|(_, value)| value);
        let data = part(kinds::INFO_DATA).unwrap_or_default();
        match part(kinds::INFO_KIND).map(text).as_deref() {
            Some("bridge") => {
                self.kind = Kind::Bridge;
                let unwanted =
                    [kinds::BRIDGE_STP_STATE, kinds::BRIDGE_FORWARD_DELAY, kinds::BRIDGE_MULTICAST_SNOOPING];
                self.plain =
                    !attributes(data).any(|(kind, value)| unwanted.contains(&kind) && number(value) != 0);
            }
            Some("tun") => {
                self.kind = Kind::Tap;
                let option = |wanted| attributes(data).find(|(kind, _)| *kind == wanted);
                self.owner = option(kinds::TUN_OWNER).map(|(_, value)| number(value));
                self.kept = option(kinds::TUN_PERSIST).is_some_and(|(_, value)| number(value) != 0);
            }
            _ => {}
        }
        self.port = part(kinds::INFO_PORT_DATA).map(port_flags);
    }

    pub(super) fn is_ours(&self) -> bool {
        self.alias.as_deref().is_some_and(is_ours)
    }

    /// What our names say that it is, by its own or by its second one.
    pub(super) fn named<T>(&self, place: impl Fn(&str) -> Option<T>) -> Option<T> {
        let marks = self.other_names.iter().filter_map(|name| name.strip_prefix(MARK_PREFIX));
        place(&self.name).or_else(|| marks.filter_map(&place).next())
    }

    /// Whether it is a TAP that is not yet persistent.
    pub(super) fn is_tap_in_the_making(&self) -> bool {
        self.kind == Kind::Tap && self.alias.is_none() && !self.kept
    }

    fn marked(&self, name: &str) -> bool {
        self.other_names.iter().any(|other| other.strip_prefix(MARK_PREFIX) == Some(name))
    }

    /// None when it is no bridge, or has no name of ours.
    pub(super) fn into_bridge(self, addresses: Vec<(Ipv4Addr, u8)>) -> Option<ObservedBridge> {
        let net_id = self.named(net_of_bridge)?;
        if self.kind != Kind::Bridge {
            return None;
        }
        Some(ObservedBridge {
            net_id,
            marked: self.marked(&crate::network::bridge_name(net_id)),
            plain: self.plain,
            tenant: self.alias.as_deref().and_then(owner).map(|(tenant, _)| tenant),
            index: self.index,
            name: self.name,
            alias: self.alias,
            up: self.up,
            mtu: self.mtu,
            mac: self.mac,
            addresses,
            settings: self.settings,
        })
    }

    /// None when it is no TAP, or has no name of ours.
    pub(super) fn into_tap(self) -> Option<ObservedTap> {
        let (net_id, offset) = self.named(place_of_tap)?;
        if self.kind != Kind::Tap {
            return None;
        }
        let (tenant, instance) = self.alias.as_deref().and_then(owner).unzip();
        Some(ObservedTap {
            net_id,
            offset,
            marked: self.marked(&crate::network::tap_name(net_id, offset)),
            owner: self.owner,
            tenant,
            instance: instance.flatten(),
            index: self.index,
            name: self.name,
            alias: self.alias,
            master: self.master,
            up: self.up,
            mtu: self.mtu,
            mac: self.mac,
            port: self.port,
            forwarding_entry: None,
            settings: self.settings,
            rx_bytes: self.bytes.0,
            tx_bytes: self.bytes.1,
        })
    }
}

/// Sorts all links of a host into what is ours and what only looks so.
pub(super) fn sort(links: Vec<Link>, mut addresses: BTreeMap<u32, Vec<(Ipv4Addr, u8)>>) -> ObservedLinks {
    let mut observed = ObservedLinks::default();
    for link in links {
        let looks_ours = net_of_bridge(&link.name).is_some() || place_of_tap(&link.name).is_some();
        let Some(alias) = link.alias.clone().filter(|alias| is_ours(alias)) else {
            if looks_ours {
                observed.foreign.push(link.name);
            }
            continue;
        };
        let stray = Stray { index: link.index, name: link.name.clone(), alias };
        let own = addresses.remove(&link.index).unwrap_or_default();
        if let Some(tap) = link.clone().into_tap() {
            observed.taps.push(tap);
        } else if let Some(bridge) = link.into_bridge(own) {
            observed.bridges.push(bridge);
        } else {
            observed.strays.push(stray);
        }
    }
    observed
}

/// Whose a link with this alias is: `mvm:<tenant>` or `mvm:<tenant>/<instance>`.
fn owner(alias: &str) -> Option<(TenantId, Option<InstanceId>)> {
    let (_, owner) = alias.split_once(':').filter(|_| is_ours(alias))?;
    match owner.split_once('/') {
        Some((tenant, instance)) => Some((tenant.parse().ok()?, Some(instance.parse().ok()?))),
        None => Some((owner.parse().ok()?, None)),
    }
}

fn port_flags(flags: &[u8]) -> PortFlags {
    let mut port = PortFlags::default();
    for (kind, value) in attributes(flags) {
        let on = number(value) != 0;
        match kind {
            kinds::PORT_ISOLATED => port.isolated = on,
            kinds::PORT_LEARNING => port.learning = on,
            kinds::PORT_UNICAST_FLOOD => port.unicast_flood = on,
            kinds::PORT_HAIRPIN => port.hairpin = on,
            kinds::PORT_LOCKED => port.locked = Some(on),
            _ => {}
        }
    }
    port
}

fn settings(families: &[u8]) -> Vec<Setting> {
    let mut found = Vec::new();
    for (family, parts) in attributes(families) {
        for (kind, value) in attributes(parts) {
            match (family, kind) {
                (kinds::AF_INET, kinds::INET_CONF) => found.extend(table(&IPV4_SETTINGS, value)),
                (kinds::AF_INET6, kinds::INET6_CONF) => found.extend(table(&IPV6_SETTINGS, value)),
                (kinds::AF_INET6, kinds::INET6_ADDR_GEN_MODE) => {
                    found.push(("ipv6/addr_gen_mode", number(value).cast_signed()));
                }
                _ => {}
            }
        }
    }
    found
}

/// The settings whose places in the kernel's table are known.
fn table(places: &'static [(&'static str, usize)], value: &[u8]) -> impl Iterator<Item = Setting> {
    places.iter().filter_map(|(name, place)| {
        let found = value.get(place * size_of::<u32>()..).and_then(first_u32)?;
        Some((*name, found.cast_signed()))
    })
}
