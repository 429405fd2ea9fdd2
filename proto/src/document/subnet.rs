//! Tenant subnets: private IPv4 networks and the addresses inside them.
//!
//! `.1` is the gateway, `.2` the builder, `.3` to the last before broadcast are for instances; other prefixes than
//! /24 count on from the network address in the same way.

use std::fmt;
use std::net::Ipv4Addr;
use std::ops::RangeInclusive;
use std::str::FromStr;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};

use super::Subnet;

/// The shortest prefix: 65,532 instances.
pub const MIN_PREFIX: u8 = 16;
/// The longest prefix: 4 instances.
pub const MAX_PREFIX: u8 = 29;

/// The rule as a JSON Schema pattern, but for the host bits, which a pattern can't see.
const SUBNET_PATTERN: &str = concat!(
    r"^(10\.(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])|172\.(1[6-9]|2[0-9]|3[01])|192\.168)",
    r"(\.(0|[1-9][0-9]?|1[0-9]{2}|2[0-4][0-9]|25[0-5])){2}/(1[6-9]|2[0-9])$",
);

const GATEWAY_OFFSET: u32 = 1;
const BUILDER_OFFSET: u32 = 2;
const FIRST_INSTANCE_OFFSET: u32 = 3;

/// Why a text is not a tenant's subnet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum SubnetError {
    #[error("must be an IPv4 network with its prefix, for example 10.240.3.0/24")]
    NotANetwork,
    #[error("must have a prefix of /{MIN_PREFIX} to /{MAX_PREFIX}")]
    Prefix,
    #[error("must lie inside 10.0.0.0/8, 172.16.0.0/12 or 192.168.0.0/16")]
    NotPrivate,
    #[error("must have its host bits zero: {0}")]
    HostBits(Subnet),
}

/// Where tenants get their subnets from unless they name one: 10.240.0.0/12, which has 256 networks of /20.
const DEFAULT_RANGE: Ipv4Addr = Ipv4Addr::new(10, 240, 0, 0);
const DEFAULT_PREFIX: u8 = 20;

impl Subnet {
    /// One of the 256 networks of /20 in 10.240.0.0/12, which are for tenants that name none.
    #[must_use]
    pub fn default_of(number: u8) -> Self {
        let host_bits = 32 - DEFAULT_PREFIX;
        let address = Ipv4Addr::from_bits(DEFAULT_RANGE.to_bits() | (u32::from(number) << host_bits));
        Self { address, prefix: DEFAULT_PREFIX }
    }

    /// The address that names the network: the first one.
    #[must_use]
    pub fn network(&self) -> Ipv4Addr {
        self.address
    }

    #[must_use]
    pub fn prefix(&self) -> u8 {
        self.prefix
    }

    #[must_use]
    pub fn broadcast(&self) -> Ipv4Addr {
        self.at(self.addresses() - 1)
    }

    /// The bridge's own address.
    #[must_use]
    pub fn gateway(&self) -> Ipv4Addr {
        self.at(GATEWAY_OFFSET)
    }

    /// The address of the tenant's builder.
    #[must_use]
    pub fn builder(&self) -> Ipv4Addr {
        self.at(BUILDER_OFFSET)
    }

    /// The offsets from the network address that instances may have.
    #[must_use]
    pub fn instance_offsets(&self) -> RangeInclusive<u32> {
        FIRST_INSTANCE_OFFSET..=self.addresses() - 2
    }

    /// The address at this offset from the network address, if it is one for instances.
    #[must_use]
    pub fn instance_address(&self, offset: u32) -> Option<Ipv4Addr> {
        self.instance_offsets().contains(&offset).then(|| self.at(offset))
    }

    /// How many instances have an address here.
    #[must_use]
    pub fn instance_capacity(&self) -> u32 {
        self.addresses() - 1 - FIRST_INSTANCE_OFFSET
    }

    #[must_use]
    pub fn contains(&self, address: Ipv4Addr) -> bool {
        masked(address, self.prefix) == self.address
    }

    #[must_use]
    pub fn overlaps(&self, other: &Self) -> bool {
        let prefix = self.prefix.min(other.prefix);
        masked(self.address, prefix) == masked(other.address, prefix)
    }

    /// This network and all larger ones around it that a tenant could have.
    pub(super) fn enclosing(self) -> impl Iterator<Item = Subnet> {
        (MIN_PREFIX..=self.prefix).map(move |prefix| Subnet { address: masked(self.address, prefix), prefix })
    }

    fn at(&self, offset: u32) -> Ipv4Addr {
        Ipv4Addr::from_bits(self.address.to_bits() + offset)
    }

    /// How many addresses it has, with those that no instance may have.
    #[must_use]
    pub fn addresses(&self) -> u32 {
        1 << (32 - self.prefix)
    }
}

fn masked(address: Ipv4Addr, prefix: u8) -> Ipv4Addr {
    Ipv4Addr::from_bits(address.to_bits() & (u32::MAX << (32 - prefix)))
}

impl FromStr for Subnet {
    type Err = SubnetError;
    fn from_str(text: &str) -> Result<Self, SubnetError> {
        let (address, prefix) = text.split_once('/').ok_or(SubnetError::NotANetwork)?;
        let address: Ipv4Addr = address.parse().map_err(|_| SubnetError::NotANetwork)?;
        // `u8::from_str` would take "+24" and "024" too.
        let digits = (1..=2).contains(&prefix.len()) && prefix.bytes().all(|b| b.is_ascii_digit());
        if !digits || (prefix.len() == 2 && prefix.starts_with('0')) {
            return Err(SubnetError::NotANetwork);
        }
        let prefix = prefix.parse().map_err(|_| SubnetError::NotANetwork)?;
        if !(MIN_PREFIX..=MAX_PREFIX).contains(&prefix) {
            return Err(SubnetError::Prefix);
        }
        if !address.is_private() {
            return Err(SubnetError::NotPrivate);
        }
        let network = Self { address: masked(address, prefix), prefix };
        if network.address == address { Ok(network) } else { Err(SubnetError::HostBits(network)) }
    }
}

impl TryFrom<String> for Subnet {
    type Error = SubnetError;
    fn try_from(text: String) -> Result<Self, SubnetError> {
        text.parse()
    }
}

impl From<Subnet> for String {
    fn from(subnet: Subnet) -> String {
        subnet.to_string()
    }
}

impl fmt::Display for Subnet {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&format!("{}/{}", self.address, self.prefix))
    }
}

impl JsonSchema for Subnet {
    fn inline_schema() -> bool {
        true
    }
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "Subnet".into()
    }
    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({ "type": "string", "pattern": SUBNET_PATTERN })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subnet(text: &str) -> Subnet {
        text.parse().unwrap()
    }

    #[test]
    fn gateway_builder_and_instances_share_a_subnet_without_its_ends() {
        let small = subnet("10.0.0.8/29");
        assert_eq!(small.gateway().to_string(), "10.0.0.9");
        assert_eq!(small.builder().to_string(), "10.0.0.10");
        let addresses: Vec<_> =
            (0..9).filter_map(|offset| small.instance_address(offset)).map(|a| a.to_string()).collect();
        assert_eq!(addresses, ["10.0.0.11", "10.0.0.12", "10.0.0.13", "10.0.0.14"]);
        assert_eq!((small.instance_capacity(), small.broadcast().to_string().as_str()), (4, "10.0.0.15"));
        assert_eq!(subnet("10.240.3.0/24").instance_offsets(), 3..=254);
        assert_eq!(subnet("192.168.0.0/16").instance_capacity(), 65_532);
    }

    #[test]
    fn every_way_not_to_be_a_tenant_subnet_has_its_own_reason() {
        use SubnetError::{HostBits, NotANetwork, NotPrivate, Prefix};
        let cases = [
            ("10.240.3.0", NotANetwork),
            ("10.240.3/24", NotANetwork),
            ("010.240.3.0/24", NotANetwork),
            ("10.240.3.0/+24", NotANetwork),
            ("10.240.3.0/024", NotANetwork),
            ("10.240.3.0/ 24", NotANetwork),
            ("10.240.3.0/24/24", NotANetwork),
            ("fd00::/24", NotANetwork),
            ("10.240.3.0/", NotANetwork),
            ("10.0.0.0/15", Prefix),
            ("10.0.0.0/30", Prefix),
            ("10.0.0.0/0", Prefix),
            ("8.8.8.0/24", NotPrivate),
            ("172.32.0.0/16", NotPrivate),
            ("169.254.169.0/24", NotPrivate),
            ("127.0.0.0/24", NotPrivate),
            ("10.240.3.1/24", HostBits(subnet("10.240.3.0/24"))),
        ];
        for (text, error) in cases {
            assert_eq!(text.parse::<Subnet>(), Err(error), "{text}");
        }
    }

    #[test]
    fn default_subnets_fill_their_range() {
        let ends = [0, 1, 255].map(|number| Subnet::default_of(number).to_string());
        assert_eq!(ends, ["10.240.0.0/20", "10.240.16.0/20", "10.255.240.0/20"]);
        assert!((0..=255).all(|number| Subnet::default_of(number).to_string().parse::<Subnet>().is_ok()));
    }

    #[test]
    fn subnets_overlap_when_one_lies_inside_the_other() {
        let outer = subnet("10.1.0.0/16");
        for (other, overlaps) in [("10.1.0.0/16", true), ("10.1.255.0/24", true), ("10.2.0.0/24", false)] {
            assert_eq!(outer.overlaps(&subnet(other)), overlaps, "{other}");
            assert_eq!(subnet(other).overlaps(&outer), overlaps, "{other}");
        }
    }
}
