//! Networks by way of a helper, in a network namespace of the test's own. Needs root.

use std::net::Ipv4Addr;

use mvm_host::network::{DEFAULT_MTU, Port, TenantNet};
use mvm_host::{Host as _, HostError, Operation, Outcome, SpawnVmm, VmmProcess};
use mvm_proto::InstanceId;
use mvm_proto::document::EgressMode;

use crate::held_up::helper;
use crate::netns::in_own_network;
use crate::suite::{JAILED, Site, end};

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

#[test]
fn a_vmm_is_given_its_instances_tap_and_no_other() {
    in_own_network(|| async {
        let site = Site::new();
        let host = helper(&site);
        let net = net(7);
        host.perform(&Operation::EnsureNet { net: net.clone() }).await.unwrap();
        for (instance, offset) in [(1, 3), (2, 4)] {
            let port = port(&net, instance, offset);
            host.perform(&Operation::EnsurePort { net: net.clone(), port }).await.unwrap();
        }
        let instance = InstanceId::from_bits(1);
        host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
        let with_tap = |tap: &str| {
            let tap = Some(tap.to_owned());
            Operation::SpawnVmm(SpawnVmm { tap, ..site.spawn(&instance, "exit 0") })
        };
        let refused = host.perform(&with_tap("tn7i4")).await.unwrap_err();
        assert!(matches!(refused, HostError::Refused(_)), "{refused:?}");
        assert_eq!(host.names(&instance).await.unwrap(), Vec::<String>::new(), "nothing was started");
        match host.perform(&with_tap("tn7i3")).await.unwrap() {
            Outcome::Process(process) => end(&*host, &VmmProcess { instance, process }).await,
            other => panic!("{other:?}"),
        };
    });
}
