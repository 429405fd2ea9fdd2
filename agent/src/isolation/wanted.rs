//! Which networks and ports a node should have: from its document and its records, decided without looking at the host.

use std::collections::BTreeMap;

use mvm_host::network::{DEFAULT_MTU, NetworkWanted, TenantNet};
use mvm_proto::{DesiredState, Phase, TenantId};

use super::{closed_net, port_of};
use crate::instance::record::Record;

/// What should be there, and the tenants whose network can't be made now.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Wanted {
    pub(super) network: NetworkWanted,
    pub(super) conflicts: Vec<(TenantId, String)>,
}

/// The document's networks, and those that instances are in all the same. An instance keeps the network that it was
/// made in: where the document gives its number to another tenant or subnet, that one waits until the instance is gone.
/// `dns`: whether tenants may ask their gateway for names.
pub(super) fn wanted<'a>(
    desired: Option<&DesiredState>,
    dns: bool,
    records: impl Iterator<Item = (&'a Record, bool)>,
) -> Wanted {
    let mut found = Wanted::default();
    let mut nets: BTreeMap<u16, TenantNet> = BTreeMap::new();
    for tenant in desired.into_iter().flat_map(|desired| &desired.tenants) {
        let net = TenantNet {
            tenant: tenant.tenant_id.clone(),
            net_id: tenant.network.tenant_net_id,
            subnet: tenant.network.ipv4_subnet,
            egress: tenant.egress.mode,
            dns,
            isolate_ports: false,
            mtu: DEFAULT_MTU,
        };
        nets.insert(net.net_id, net);
    }
    let mut held: BTreeMap<u16, TenantNet> = BTreeMap::new();
    for (record, moving) in records {
        let Some(net) = record.net else { continue };
        held.entry(net.id).or_insert_with(|| closed_net(record, net));
        let port = port_of(record, net);
        if moving {
            found.network.hands_off.push(port.tap());
        } else if matches!(record.phase, Phase::Running | Phase::Warm) {
            found.network.ports.push(port);
        }
    }
    for (id, old) in held {
        let overlaps = |net: &TenantNet| net.net_id != id && net.subnet.overlaps(&old.subnet);
        let same = |net: &TenantNet| net.tenant == old.tenant && net.subnet == old.subnet;
        let displaced: Vec<u16> = nets
            .values()
            .filter(|net| (net.net_id == id && !same(net)) || overlaps(net))
            .map(|net| net.net_id)
            .collect();
        for displaced in displaced {
            let Some(net) = nets.remove(&displaced) else { continue };
            let why = format!(
                "network {} with {} waits for instances of {} that are still in network {id} with {}",
                net.net_id, net.subnet, old.tenant, old.subnet
            );
            found.conflicts.push((net.tenant, why));
        }
        nets.entry(id).or_insert(old);
    }
    found.network.nets = nets.into_values().collect();
    found
}

#[cfg(test)]
mod tests;
