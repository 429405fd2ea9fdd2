//! What rules read from packets.

use nftnl_sys::libc;

use super::ruleset::{Expr, KeyType, Part, Rule, Verdict, compare, rule};

/// Interfaces whose names begin so are tenants' bridges, known or not.
pub(super) const BRIDGES: &[u8] = b"br-tenant-";
/// Interfaces whose names lie between these are TAPs of instances, known or not.
const TAPS: (&[u8], &[u8]) = (b"tn0", b"tn9");

pub(super) const IPV4: u16 = 0x0800;
pub(super) const ARP: u16 = 0x0806;
pub(super) const IPV6: u16 = 0x86dd;

pub(super) const ICMP: u8 = 1;
pub(super) const TCP: u8 = 6;
pub(super) const UDP: u8 = 17;
pub(super) const NFPROTO_IPV6: u8 = libc::NFPROTO_IPV6 as u8;

pub(super) const CT_INVALID: u32 = 1;
pub(super) const CT_ESTABLISHED: u32 = 2;
pub(super) const CT_RELATED: u32 = 4;
pub(super) const CT_REPLY: u8 = 1;

/// Why a packet was dropped. Each has a counter of this name in the table that drops for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Reason {
    /// From one tenant's network to another's.
    CrossTenant,
    /// Between instances of a tenant that keeps them apart.
    Isolated,
    /// To an address or a service of the host that is not for this tenant.
    ToHost,
    /// To a private, link-local or otherwise special range.
    DeniedRange,
    /// To the world, from a tenant without egress.
    Egress,
    /// From outside to a tenant, and no reply.
    Ingress,
    /// Belongs to no connection and begins none.
    Invalid,
    SpoofMac,
    SpoofIp,
    SpoofArp,
    /// Asked by ARP for an address of the host that is not the gateway, or for a neighbour: the host's own copy of a
    /// broadcast among guests is counted here as well.
    ArpToHost,
    /// Pretends to be a DHCP server.
    Dhcp,
    Ipv6,
    /// Neither IPv4 nor ARP, or sent to the bridge's own control addresses.
    Ethertype,
    /// To or from a bridge or a port that is not in the sets, or between such a port and an instance's.
    UnknownPort,
}

impl Reason {
    pub const ALL: [Self; 15] = [
        Self::CrossTenant,
        Self::Isolated,
        Self::ToHost,
        Self::DeniedRange,
        Self::Egress,
        Self::Ingress,
        Self::Invalid,
        Self::SpoofMac,
        Self::SpoofIp,
        Self::SpoofArp,
        Self::ArpToHost,
        Self::Dhcp,
        Self::Ipv6,
        Self::Ethertype,
        Self::UnknownPort,
    ];

    /// Of its counter, and its label in metrics.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::CrossTenant => "cross-tenant",
            Self::Isolated => "isolated",
            Self::ToHost => "to-host",
            Self::DeniedRange => "denied-range",
            Self::Egress => "egress",
            Self::Ingress => "ingress",
            Self::Invalid => "invalid",
            Self::SpoofMac => "spoof-mac",
            Self::SpoofIp => "spoof-ip",
            Self::SpoofArp => "spoof-arp",
            Self::ArpToHost => "arp-to-host",
            Self::Dhcp => "dhcp",
            Self::Ipv6 => "ipv6",
            Self::Ethertype => "ethertype",
            Self::UnknownPort => "unknown-port",
        }
    }
}

/// Counted, then gone.
pub(super) fn drop_for(reason: Reason) -> Vec<Expr> {
    vec![Expr::Count(reason.name().to_owned()), Expr::Verdict(Verdict::Drop)]
}

/// Whether the interface is a TAP of an instance by its name.
pub(super) fn is_tap(load: fn(u32) -> Expr) -> Vec<Expr> {
    let (first, last) = TAPS;
    vec![load(1), compare(libc::NFT_CMP_GTE, first), compare(libc::NFT_CMP_LTE, last)]
}

/// Whether any of these bits of the connection's state is set.
pub(super) fn ct_state(bits: u32) -> Vec<Expr> {
    with_state(bits, libc::NFT_CMP_NEQ)
}

pub(super) fn ct_state_not(bits: u32) -> Vec<Expr> {
    with_state(bits, libc::NFT_CMP_EQ)
}

fn with_state(bits: u32, operator: i32) -> Vec<Expr> {
    vec![
        Expr::Ct { key: libc::NFT_CT_STATE as u32, register: 1 },
        Expr::And { register: 1, mask: bits.to_ne_bytes().to_vec() },
        compare(operator, &0u32.to_ne_bytes()),
    ]
}

/// All IPv6 ends here.
pub(super) fn no_ipv6() -> Rule {
    rule([super::ruleset::equals(nfproto, &[NFPROTO_IPV6]), drop_for(Reason::Ipv6)])
}

fn meta(key: i32, register: u32) -> Expr {
    Expr::Meta { key: key as u32, register }
}

pub(super) fn iifname(register: u32) -> Expr {
    meta(libc::NFT_META_IIFNAME, register)
}

pub(super) fn oifname(register: u32) -> Expr {
    meta(libc::NFT_META_OIFNAME, register)
}

pub(super) fn nfproto(register: u32) -> Expr {
    meta(libc::NFT_META_NFPROTO, register)
}

pub(super) fn l4proto(register: u32) -> Expr {
    meta(libc::NFT_META_L4PROTO, register)
}

/// In the bridge, the number of the network that a frame is from; see [`super::bridge`].
pub(super) fn priority(register: u32) -> Expr {
    meta(libc::NFT_META_PRIORITY, register)
}

/// Sets it to what is in the first register.
pub(super) fn set_priority() -> Expr {
    Expr::SetMeta { key: libc::NFT_META_PRIORITY as u32, register: 1 }
}

pub(super) fn ct_direction(register: u32) -> Expr {
    Expr::Ct { key: libc::NFT_CT_DIRECTION as u32, register }
}

fn payload(base: i32, offset: u32, bytes: u32, register: u32) -> Expr {
    Expr::Payload { base: base as u32, offset, bytes, register }
}

pub(super) fn ether_daddr(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_LL_HEADER, 0, 6, register)
}

pub(super) fn ether_saddr(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_LL_HEADER, 6, 6, register)
}

/// Read from the frame, not from what the kernel made of it: a tag that was taken off is seen here.
pub(super) fn ether_type(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_LL_HEADER, 12, 2, register)
}

pub(super) fn ip_saddr(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 12, 4, register)
}

pub(super) fn ip_daddr(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 16, 4, register)
}

/// Kinds and lengths of the addresses in an ARP message.
pub(super) fn arp_kinds(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 0, 6, register)
}

pub(super) fn arp_operation(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 6, 2, register)
}

pub(super) fn arp_sender_mac(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 8, 6, register)
}

pub(super) fn arp_sender_address(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 14, 4, register)
}

pub(super) fn arp_target_address(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_NETWORK_HEADER, 24, 4, register)
}

/// The same place in UDP and TCP.
pub(super) fn source_port(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_TRANSPORT_HEADER, 0, 2, register)
}

pub(super) fn destination_port(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_TRANSPORT_HEADER, 2, 2, register)
}

pub(super) fn icmp_type(register: u32) -> Expr {
    payload(libc::NFT_PAYLOAD_TRANSPORT_HEADER, 0, 1, register)
}

pub(super) const IIFNAME: Part = Part { key_type: KeyType::Interface, load: iifname };
pub(super) const OIFNAME: Part = Part { key_type: KeyType::Interface, load: oifname };
pub(super) const PRIORITY: Part = Part { key_type: KeyType::Number, load: priority };
pub(super) const ETHER_SADDR: Part = Part { key_type: KeyType::Mac, load: ether_saddr };
pub(super) const IP_SADDR: Part = Part { key_type: KeyType::Address, load: ip_saddr };
pub(super) const IP_DADDR: Part = Part { key_type: KeyType::Address, load: ip_daddr };
pub(super) const ARP_SENDER_MAC: Part = Part { key_type: KeyType::Mac, load: arp_sender_mac };
pub(super) const ARP_SENDER: Part = Part { key_type: KeyType::Address, load: arp_sender_address };
pub(super) const ARP_TARGET: Part = Part { key_type: KeyType::Address, load: arp_target_address };
pub(super) const L4PROTO: Part = Part { key_type: KeyType::Protocol, load: l4proto };
pub(super) const DESTINATION_PORT: Part = Part { key_type: KeyType::Port, load: destination_port };
