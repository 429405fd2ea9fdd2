//! Reads a tenant's network, and holds its addresses against each other.

use super::{AcrossTenants, rules};
use crate::document::{BLOCK_SIZE, MAX_TENANT_NET_ID, Network, Subnet};
use crate::json::Node;

const NETWORK: &[&str] = &["tenant_net_id", "ipv4_subnet", "address_blocks", "reserved_offsets"];

/// What could be read of a network: its parts apart, so that a bad id does not keep its addresses from being checked.
#[derive(Default)]
pub(super) struct Parts {
    net_id: Option<u16>,
    subnet: Option<Subnet>,
    blocks: Option<Option<Vec<u16>>>,
    reserved: Option<Vec<u16>>,
}

impl Parts {
    /// Its addresses, if all about them could be read. The number is not one to go by.
    pub(super) fn addresses(&self) -> Option<Network> {
        Some(Network {
            tenant_net_id: 0,
            ipv4_subnet: self.subnet?,
            address_blocks: self.blocks.clone()?,
            reserved_offsets: self.reserved.clone()?,
        })
    }

    pub(super) fn whole(self) -> Option<Network> {
        let tenant_net_id = self.net_id?;
        Some(Network { tenant_net_id, ..self.addresses()? })
    }
}

pub(super) fn network(node: &Node<'_, '_>, at: usize, across: &mut AcrossTenants) -> Option<Parts> {
    let fields = node.fields(NETWORK)?;
    let net_id = fields.get("tenant_net_id", |node| {
        let id = node.integer(0..=u64::from(MAX_TENANT_NET_ID)).and_then(|id| u16::try_from(id).ok())?;
        across.net_ids.check(&id, "tenants", at, &node);
        Some(id)
    });
    let subnet = fields.get("ipv4_subnet", |node| {
        let subnet = node.parse()?;
        across.subnets.check(subnet, at, &node);
        Some(subnet)
    });
    // Where the subnet is not known, the largest one has room for what could be meant.
    let (blocks, addresses) =
        subnet.map_or((1 << 12, 1 << 16), |subnet: Subnet| (subnet.blocks(), subnet.addresses()));
    let blocks = fields.maybe("address_blocks", |node| {
        let expected = format!("must be the number of a block of {BLOCK_SIZE} inside the subnet");
        rules::ascending(&node, blocks - 1, &expected)
    });
    let reserved = fields.or("reserved_offsets", Vec::new(), |node| {
        rules::ascending(&node, addresses - 1, "must be the offset of an address inside the subnet")
    });
    Some(Parts { net_id, subnet, blocks, reserved })
}

#[cfg(test)]
mod tests;
