//! Ranges of IPv4 addresses that no tenant reaches, as an operator writes them.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

const ADDRESS_BITS: u8 = 32;

/// A network such as `203.0.113.0/24`, or one address.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct AddressRange {
    first: Ipv4Addr,
    prefix: u8,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("must be an IPv4 address such as 203.0.113.7, or a network such as 203.0.113.0/24")]
pub struct NoRange;

impl AddressRange {
    fn size(prefix: u8) -> u64 {
        1 << (ADDRESS_BITS - prefix)
    }

    /// As numbers: the first address, and the first one after.
    #[cfg(feature = "network")]
    pub(crate) fn bounds(self) -> (u64, u64) {
        let first = u64::from(self.first.to_bits());
        (first, first + Self::size(self.prefix))
    }
}

impl FromStr for AddressRange {
    type Err = NoRange;

    fn from_str(text: &str) -> Result<Self, NoRange> {
        let (address, prefix) = match text.split_once('/') {
            Some((address, prefix)) => (address, prefix.parse().map_err(|_| NoRange)?),
            None => (text, ADDRESS_BITS),
        };
        let first: Ipv4Addr = address.parse().map_err(|_| NoRange)?;
        // `10.1.2.3/8` may be a slip for `/32` as well as for `10.0.0.0`.
        let whole = prefix <= ADDRESS_BITS && u64::from(first.to_bits()).is_multiple_of(Self::size(prefix));
        if whole { Ok(Self { first, prefix }) } else { Err(NoRange) }
    }
}

impl fmt::Display for AddressRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.prefix {
            ADDRESS_BITS => write!(f, "{}", self.first),
            prefix => write!(f, "{}/{prefix}", self.first),
        }
    }
}

impl TryFrom<String> for AddressRange {
    type Error = NoRange;

    fn try_from(text: String) -> Result<Self, NoRange> {
        text.parse()
    }
}

impl From<AddressRange> for String {
    fn from(range: AddressRange) -> Self {
        range.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_is_an_address_or_a_whole_network() {
        for text in ["203.0.113.7", "203.0.113.0/24", "0.0.0.0/0", "128.0.0.0/1"] {
            let range: AddressRange = text.parse().unwrap();
            assert_eq!(range.to_string(), text);
            assert_eq!(
                serde_json::from_str::<AddressRange>(&serde_json::to_string(&range).unwrap()).unwrap(),
                range
            );
        }
        for bad in
            ["", "x", "203.0.113.7/24", "203.0.113.0/33", "203.0.113.0/", "1.2.3", "fd00::1", "1.2.3.4/-1"]
        {
            assert_eq!(bad.parse::<AddressRange>(), Err(NoRange), "{bad}");
        }
    }
}
