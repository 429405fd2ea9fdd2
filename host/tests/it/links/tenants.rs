//! Tenants to try things on.

use std::net::Ipv4Addr;

use mvm_host::links::Links;
use mvm_host::network::{DEFAULT_MTU, Port, TenantNet};
use mvm_proto::InstanceId;
use mvm_proto::document::EgressMode;

/// Who the VMMs of these tests would run as.
pub(crate) const OWNER: u32 = 70_001;

pub(crate) fn net(net_id: u16) -> TenantNet {
    TenantNet {
        tenant: format!("t{net_id}").parse().unwrap(),
        net_id,
        subnet: format!("10.{}.{}.0/24", 128 + net_id / 256, net_id % 256).parse().unwrap(),
        egress: EgressMode::None,
        dns: false,
        isolate_ports: false,
        mtu: DEFAULT_MTU,
    }
}

pub(crate) fn port(net: &TenantNet, offset: u32) -> Port {
    Port {
        tenant: net.tenant.clone(),
        instance: InstanceId::from_bits(u32::from(net.net_id) << 16 | offset),
        net_id: net.net_id,
        offset,
        address: Ipv4Addr::from_bits(net.subnet.network().to_bits() + offset),
        owner_uid: OWNER,
    }
}

/// A bridge with two TAPs in it, all open.
pub(crate) async fn tenant(links: &Links, net: &TenantNet) -> [Port; 2] {
    links.ensure_bridge(net).await.unwrap();
    let ports = [port(net, 3), port(net, 4)];
    for port in &ports {
        links.ensure_tap(port, net).await.unwrap();
        links.open_tap(&port.tap()).await.unwrap();
    }
    ports
}
