//! Which addresses of a tenant's subnet this node may give to instances.
//!
//! A subnet that several nodes share is divided into blocks of [`BLOCK_SIZE`] addresses, named by their number; two nodes
//! never have the same one, so no two of them give one address twice.

use super::{Network, Subnet};

/// How many offsets there are in a block: block n has 16n to 16n + 15.
pub const BLOCK_SIZE: u32 = 16;

impl Subnet {
    /// How many blocks there are. The last one of a /29 is cut short.
    #[must_use]
    pub fn blocks(&self) -> u32 {
        self.addresses().div_ceil(BLOCK_SIZE)
    }
}

impl Network {
    /// The offsets from the subnet's own address that this node may give to instances, in order.
    pub fn offsets(&self) -> impl Iterator<Item = u32> {
        let whole = self.address_blocks.is_none().then(|| self.ipv4_subnet.instance_offsets());
        let blocks = self.address_blocks.iter().flatten();
        let parts = blocks.map(|block| in_block(*block, self.ipv4_subnet));
        whole.into_iter().chain(parts).flatten().filter(|offset| !self.is_reserved(*offset))
    }

    /// Whether this node may give all that the subnet has for instances.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.address_blocks.is_none() && self.reserved_offsets.is_empty()
    }

    /// Whether this node may give this one to an instance.
    #[must_use]
    pub fn offers(&self, offset: u32) -> bool {
        self.is_own(offset) && !self.is_reserved(offset)
    }

    /// How many instances can have an address from this node.
    #[must_use]
    pub fn instance_capacity(&self) -> u32 {
        let of_block = |block: &u16| {
            let offsets = in_block(*block, self.ipv4_subnet);
            (offsets.end() + 1).saturating_sub(*offsets.start())
        };
        let own = match &self.address_blocks {
            None => self.ipv4_subnet.instance_capacity(),
            Some(blocks) => blocks.iter().map(of_block).sum(),
        };
        let reserved = self.reserved_offsets.iter().filter(|offset| self.is_own(u32::from(**offset)));
        own.saturating_sub(u32::try_from(reserved.count()).unwrap_or(u32::MAX))
    }

    /// Whether it is for instances, and in a block of this node.
    fn is_own(&self, offset: u32) -> bool {
        let in_blocks = self.address_blocks.as_ref().is_none_or(|blocks| {
            // Documents have them in order.
            u16::try_from(offset / BLOCK_SIZE).is_ok_and(|block| blocks.binary_search(&block).is_ok())
        });
        in_blocks && self.ipv4_subnet.instance_offsets().contains(&offset)
    }

    fn is_reserved(&self, offset: u32) -> bool {
        u16::try_from(offset).is_ok_and(|offset| self.reserved_offsets.binary_search(&offset).is_ok())
    }
}

/// The offsets of a block that are for instances; none where it has only the gateway's and the builder's.
fn in_block(block: u16, subnet: Subnet) -> std::ops::RangeInclusive<u32> {
    let first = u32::from(block) * BLOCK_SIZE;
    let all = subnet.instance_offsets();
    first.max(*all.start())..=(first + BLOCK_SIZE - 1).min(*all.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn network(subnet: &str, blocks: Option<&[u16]>, reserved: &[u16]) -> Network {
        Network {
            tenant_net_id: 1,
            ipv4_subnet: subnet.parse().unwrap(),
            address_blocks: blocks.map(<[u16]>::to_vec),
            reserved_offsets: reserved.to_vec(),
        }
    }

    #[test]
    fn a_node_offers_its_blocks_without_what_is_reserved_and_what_is_for_no_instance() {
        let offered = |network: Network| {
            let offsets: Vec<u32> = network.offsets().collect();
            let asked: Vec<u32> = (0..70_000).filter(|offset| network.offers(*offset)).collect();
            assert_eq!((offsets.len(), &offsets), (network.instance_capacity() as usize, &asked));
            offsets
        };
        assert_eq!(offered(network("10.0.0.0/29", None, &[])), [3, 4, 5, 6]);
        assert_eq!(offered(network("10.0.0.0/29", Some(&[0]), &[1, 4, 7])), [3, 5, 6]);
        assert_eq!(offered(network("10.0.0.0/24", Some(&[]), &[])), [0; 0]);
        let ends = offered(network("10.0.0.0/24", Some(&[0, 15]), &[0, 2, 3, 16, 250]));
        assert_eq!(ends, (4..16).chain(240..250).chain(251..255).collect::<Vec<_>>());
        assert_eq!(offered(network("10.0.0.0/16", Some(&[4095]), &[])), (65_520..65_535).collect::<Vec<_>>());
        assert_eq!(offered(network("10.0.0.0/24", None, &[9, 255])).len(), 251);
    }

    #[test]
    fn a_subnet_has_as_many_blocks_as_it_takes_to_hold_all_of_it() {
        let blocks = ["10.0.0.0/29", "10.0.0.0/28", "10.0.0.0/24", "10.0.0.0/16"]
            .map(|subnet| subnet.parse::<Subnet>().unwrap().blocks());
        assert_eq!(blocks, [1, 1, 16, 4096]);
    }
}
