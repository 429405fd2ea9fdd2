//! What a tenant's network on this node is, and what everything in it is called.
//!
//! One bridge per tenant with the subnet's first address, one TAP per instance. Names, hardware addresses and tags come
//! from numbers alone, so that whatever is found on the host can be traced to its owner, adopted or swept.

mod ranges;

use std::fmt;
use std::net::Ipv4Addr;

use mvm_proto::document::{EgressMode, Subnet};
use mvm_proto::{InstanceId, TenantId};
use serde::{Deserialize, Serialize};

pub use ranges::{AddressRange, NoRange};

const BRIDGE_PREFIX: &str = "br-tenant-";
const TAP_PREFIX: &str = "tn";

/// What we made bears this in its alias; links without it are not ours, whatever they are called.
const ALIAS_TAG: &str = "mvm:";

/// A bridge with ports that all have an address of this size: no packet of a guest needs to be cut on its way out.
pub const DEFAULT_MTU: u16 = 1500;

/// The highest number of a tenant's network.
pub const MAX_NET_ID: u16 = 4095;

/// VMMs run as users of their own, one for each place in each network: a range that neither people, services nor
/// containers are given.
pub const VMM_USERS: (u32, u32) = (0x7000_0000, 0x7fff_ffff);
/// How many places a network may have.
const PLACES_PER_NET: u32 = 1 << 16;

/// Who the VMM at this place runs as.
#[must_use]
pub fn vmm_user(net_id: u16, offset: u32) -> u32 {
    VMM_USERS.0 + u32::from(net_id) * PLACES_PER_NET + offset
}

/// One tenant's network on this node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct TenantNet {
    pub tenant: TenantId,
    pub net_id: u16,
    pub subnet: Subnet,
    pub egress: EgressMode,
    /// Whether the gateway's address answers DNS queries (port 53) of its tenant.
    pub dns: bool,
    /// Whether the tenant's own instances are kept apart from each other too.
    pub isolate_ports: bool,
    pub mtu: u16,
}

/// One instance's place in its tenant's network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Port {
    pub tenant: TenantId,
    pub instance: InstanceId,
    pub net_id: u16,
    /// Of its address, from the subnet's own.
    pub offset: u32,
    pub address: Ipv4Addr,
    /// The user of its VMM: no other may open the TAP.
    pub owner_uid: u32,
}

/// All networks and ports that should be there.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkWanted {
    pub nets: Vec<TenantNet>,
    /// Of instances that have a VM.
    pub ports: Vec<Port>,
    /// TAPs of instances that someone acts on now: neither repaired nor reported.
    pub hands_off: Vec<String>,
    /// What no tenant reaches, besides what none ever does.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub denied: Vec<AddressRange>,
}

/// What a look at the network found.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct NetworkFound {
    /// What was wrong and is right now, for people.
    pub repairs: Vec<String>,
    /// Ports whose TAP was gone: it was made anew, but the VMM still holds the one that is no more.
    pub cut_off: Vec<InstanceId>,
    /// Links that are ours by name and tag, and that no record owns.
    pub orphans: Vec<OrphanLink>,
    /// Links that have a name of ours and not our tag: they are not touched.
    pub foreign: Vec<String>,
    pub dropped: Vec<Dropped>,
    pub traffic: Vec<Traffic>,
}

/// A link that no record owns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct OrphanLink {
    pub name: String,
    /// Whose it was: a tenant, or a tenant and an instance.
    pub owner: String,
}

/// How much the firewall dropped for one reason.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Dropped {
    pub reason: String,
    pub packets: u64,
    pub bytes: u64,
}

/// What a tenant's instances, or one of them, sent and received since its network or port was made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Traffic {
    pub tenant: TenantId,
    /// Absent: all of the tenant's.
    pub instance: Option<InstanceId>,
    pub sent_packets: u64,
    pub sent_bytes: u64,
    pub received_packets: u64,
    pub received_bytes: u64,
}

/// One thing that was tried on a tenant's network, and whether it went as it must.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Probe {
    pub what: String,
    pub holds: bool,
    /// For people.
    pub detail: String,
}

impl Probe {
    #[cfg(feature = "network")]
    pub(crate) fn passing(what: &str, passed: bool) -> Self {
        let detail = if passed { "answered" } else { "no answer" };
        Self { what: what.to_owned(), holds: passed, detail: detail.to_owned() }
    }

    /// Nothing may have come back, and it must have been dropped for this very reason; or, if it would have had to be
    /// routed, by a host that routes no such thing and has no need of a rule against it.
    #[cfg(feature = "network")]
    pub(crate) fn forbidden(what: String, reason: &str, counted: bool, answered: bool, routed: bool) -> Self {
        let detail = match (answered, counted) {
            (true, _) => "an answer came back".to_owned(),
            (false, true) => format!("dropped as {reason}"),
            (false, false) if routed => "not routed by this host".to_owned(),
            (false, false) => format!("not counted as {reason}"),
        };
        Self { what, holds: !answered && (counted || routed), detail }
    }
}

/// A hardware address that says whose it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Mac(pub [u8; 6]);

impl Mac {
    /// Locally administered, unicast; then the tenant's network and the instance's offset in it.
    #[must_use]
    pub fn of(net_id: u16, offset: u32) -> Self {
        let ([n1, n0], [_, _, o1, o0]) = (net_id.to_be_bytes(), offset.to_be_bytes());
        Self([0x02, 0x4d, n1, n0, o1, o0])
    }
}

impl fmt::Display for Mac {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [a, b, c, d, e, g] = self.0;
        write!(f, "{a:02x}:{b:02x}:{c:02x}:{d:02x}:{e:02x}:{g:02x}")
    }
}

impl TenantNet {
    #[must_use]
    pub fn bridge(&self) -> String {
        bridge_name(self.net_id)
    }

    #[must_use]
    pub fn alias(&self) -> String {
        format!("{ALIAS_TAG}{}", self.tenant)
    }
}

impl Port {
    #[must_use]
    pub fn tap(&self) -> String {
        tap_name(self.net_id, self.offset)
    }

    #[must_use]
    pub fn bridge(&self) -> String {
        bridge_name(self.net_id)
    }

    #[must_use]
    pub fn mac(&self) -> Mac {
        Mac::of(self.net_id, self.offset)
    }

    #[must_use]
    pub fn alias(&self) -> String {
        format!("{ALIAS_TAG}{}/{}", self.tenant, self.instance)
    }
}

#[must_use]
pub fn bridge_name(net_id: u16) -> String {
    format!("{BRIDGE_PREFIX}{net_id}")
}

#[must_use]
pub fn tap_name(net_id: u16, offset: u32) -> String {
    format!("{TAP_PREFIX}{net_id}i{offset}")
}

/// The network whose bridge has this name.
#[must_use]
pub fn net_of_bridge(name: &str) -> Option<u16> {
    let net_id = name.strip_prefix(BRIDGE_PREFIX)?.parse().ok()?;
    (bridge_name(net_id) == name).then_some(net_id)
}

/// The network and the offset of the TAP with this name.
#[must_use]
pub fn place_of_tap(name: &str) -> Option<(u16, u32)> {
    let (net_id, offset) = name.strip_prefix(TAP_PREFIX)?.split_once('i')?;
    let place = (net_id.parse().ok()?, offset.parse().ok()?);
    (tap_name(place.0, place.1) == name).then_some(place)
}

/// Whose a link with this alias is: a tenant, or a tenant and an instance.
#[must_use]
pub fn owner_of(alias: &str) -> &str {
    alias.strip_prefix(ALIAS_TAG).unwrap_or(alias)
}

/// Whether a link with this alias was made by us.
#[must_use]
pub fn is_ours(alias: &str) -> bool {
    alias.starts_with(ALIAS_TAG)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_lead_back_to_their_numbers_and_fit_an_interface() {
        for (net_id, offset) in [(0, 3), (7, 254), (4095, 65_534)] {
            assert_eq!(net_of_bridge(&bridge_name(net_id)), Some(net_id));
            assert_eq!(place_of_tap(&tap_name(net_id, offset)), Some((net_id, offset)));
            assert!(bridge_name(net_id).len() <= 15 && tap_name(net_id, offset).len() <= 15);
        }
        let users = VMM_USERS.0..=VMM_USERS.1;
        assert!(users.contains(&vmm_user(0, 0)) && users.contains(&vmm_user(MAX_NET_ID, 65_535)));
        assert_eq!(Mac::of(4095, 65_534).to_string(), "02:4d:0f:ff:ff:fe");
    }

    #[test]
    fn what_only_looks_like_one_of_our_names_is_not_one() {
        for name in ["br-tenant-07", "br-tenant-+7", "br-tenant-", "br-tenant-65536", "br-x"] {
            assert_eq!(net_of_bridge(name), None, "{name}");
        }
        for name in ["tn7", "tn07i3", "tn7i03", "tni3", "tn7i-3", "tun0"] {
            assert_eq!(place_of_tap(name), None, "{name}");
        }
    }
}
