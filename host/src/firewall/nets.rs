//! The networks that should be there, with their subnets in order: whether a new one overlaps another is found without
//! a look at all of them.

use std::collections::BTreeMap;
use std::net::Ipv4Addr;

use super::FirewallError;
use crate::network::TenantNet;

#[derive(Debug, Default)]
pub(super) struct Nets {
    by_id: BTreeMap<u16, TenantNet>,
    /// By the subnet's first address.
    by_start: BTreeMap<Ipv4Addr, u16>,
}

impl Nets {
    pub(super) fn get(&self, net_id: u16) -> Option<&TenantNet> {
        self.by_id.get(&net_id)
    }

    pub(super) fn values(&self) -> impl Iterator<Item = &TenantNet> + Clone {
        self.by_id.values()
    }

    /// What had its number before. Refused when it overlaps another.
    pub(super) fn insert(&mut self, net: &TenantNet) -> Result<Option<TenantNet>, FirewallError> {
        let subnet = net.subnet;
        // Those that begin inside it, and the last that begins before it: they never overlap each other.
        let inside = self.by_start.range(subnet.network()..=subnet.broadcast());
        let before = self.by_start.range(..subnet.network()).next_back();
        let near = inside.chain(before).filter_map(|(_, id)| self.by_id.get(id));
        let mut overlapping =
            near.filter(|other| other.net_id != net.net_id && other.subnet.overlaps(&subnet));
        if let Some(other) = overlapping.next() {
            return Err(FirewallError::Refused(format!(
                "network {} with {subnet} overlaps network {} with {}",
                net.net_id, other.net_id, other.subnet
            )));
        }
        let before = self.remove(net.net_id);
        self.by_start.insert(subnet.network(), net.net_id);
        self.by_id.insert(net.net_id, net.clone());
        Ok(before)
    }

    pub(super) fn remove(&mut self, net_id: u16) -> Option<TenantNet> {
        let net = self.by_id.remove(&net_id)?;
        self.by_start.remove(&net.subnet.network());
        Some(net)
    }
}
