//! Networks by way of a helper, in a network namespace of the test's own. Needs root.

use std::net::Ipv4Addr;

use mvm_host::network::{DEFAULT_MTU, Port, TenantNet};
use mvm_proto::InstanceId;
use mvm_proto::document::EgressMode;

use crate::suite::JAILED;

pub(crate) fn net(net_id: u16) -> TenantNet {
    TenantNet {
        tenant: format!("t{net_id}").parse().unwrap(),
        net_id,
        subnet: format!("10.128.{net_id}.0/24").parse().unwrap(),
        egress: EgressMode::None,
        dns: false,
        isolate_ports: false,
        mtu: DEFAULT_MTU,
    }
}

pub(crate) fn port(net: &TenantNet, instance: u32, offset: u32) -> Port {
    Port {
        tenant: net.tenant.clone(),
        instance: InstanceId::from_bits(instance),
        net_id: net.net_id,
        offset,
        address: Ipv4Addr::from_bits(net.subnet.network().to_bits() + offset),
        owner_uid: JAILED,
    }
}
