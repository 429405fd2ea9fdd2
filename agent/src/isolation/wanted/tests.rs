//! Networks and ports from documents and records.

use mvm_proto::{Digest, InstanceId, Timestamp};
use serde_json::{Value, json};

use super::*;
use crate::instance::record::Net;

fn record(number: u32, tenant: &str, net: Option<(u16, &str)>, phase: Phase) -> Record {
    let subnet = net.map(|(_, subnet)| subnet).unwrap_or("10.1.0.0/24");
    let subnet: mvm_proto::document::Subnet = subnet.parse().unwrap();
    let now = Timestamp::from_unix_ms(0);
    serde_json::from_value(json!({
        "tenant": tenant,
        "pool": "web",
        "id": InstanceId::from_bits(number),
        "offset": 2 + number,
        "address": subnet.instance_address(2 + number).unwrap(),
        "net": net.map(|(id, _)| Net { id, subnet }),
        "phase": phase,
        "since": now,
        "reason": "test",
        "revision": Digest::of(b"wanted"),
        "resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
        "flake_ref": "builtin:busybox",
        "claimed": false,
        "on_demand": false,
        "failures": 0,
    }))
    .unwrap()
}

fn document(tenants: &[(&str, u16, &str)]) -> DesiredState {
    let tenants: Vec<Value> = tenants
        .iter()
        .map(|(tenant, net, subnet)| {
            json!({
                "tenant_id": tenant,
                "network": { "tenant_net_id": net, "ipv4_subnet": subnet },
                "quotas": { "max_vcpus": 9, "max_mem_mib": 999, "max_running": 9, "max_warm": 9, "max_pools": 9,
                    "max_instances_per_pool": 9, "max_disk_gib": 9 },
                "egress": { "mode": "nat" },
                "pools": [],
            })
        })
        .collect();
    let text = json!({ "schema_version": 1, "node_id": "node-a", "tenants": tenants }).to_string();
    DesiredState::parse(text.as_bytes()).unwrap()
}

fn of(desired: Option<&DesiredState>, records: &[(Record, bool)]) -> Wanted {
    wanted(desired, false, records.iter().map(|(record, moving)| (record, *moving)))
}

fn bridges(wanted: &Wanted) -> Vec<String> {
    wanted.network.nets.iter().map(TenantNet::bridge).collect()
}

#[test]
fn every_tenant_of_the_document_has_its_network_and_every_vm_its_port() {
    let desired = document(&[("acme", 7, "10.1.0.0/24"), ("beta", 8, "10.2.0.0/24")]);
    let acme = Some((7, "10.1.0.0/24"));
    let records = [
        (record(1, "acme", acme, Phase::Running), false),
        (record(2, "acme", acme, Phase::Warm), false),
        (record(3, "acme", acme, Phase::Sleeping), false),
        (record(4, "acme", acme, Phase::Stopped), true),
        (record(5, "acme", None, Phase::Running), false),
    ];
    let found = of(Some(&desired), &records);
    assert_eq!(bridges(&found), ["br-tenant-7", "br-tenant-8"]);
    let taps: Vec<_> = found.network.ports.iter().map(mvm_host::network::Port::tap).collect();
    assert_eq!(taps, ["tn7i3", "tn7i4"]);
    assert_eq!(found.network.hands_off, ["tn7i6"]);
    assert!(found.conflicts.is_empty());
    let users: Vec<_> = found.network.ports.iter().map(|port| port.owner_uid).collect();
    assert_eq!(users, [0x7007_0003, 0x7007_0004]);
}

#[test]
fn instances_that_the_document_does_not_name_keep_a_network_without_a_way_out() {
    let records = [(record(1, "acme", Some((7, "10.1.0.0/24")), Phase::Running), false)];
    let found = of(Some(&document(&[])), &records);
    assert_eq!(bridges(&found), ["br-tenant-7"]);
    assert_eq!(found.network.nets[0].egress, mvm_proto::document::EgressMode::None);
}

#[test]
fn a_network_waits_for_the_instances_of_another_with_its_number_or_addresses() {
    let old = [(record(1, "acme", Some((7, "10.1.0.0/24")), Phase::Sleeping), false)];
    for (tenant, net, subnet) in
        [("acme", 7, "10.9.0.0/24"), ("beta", 7, "10.9.0.0/24"), ("beta", 8, "10.1.0.0/16")]
    {
        let found = of(Some(&document(&[(tenant, net, subnet)])), &old);
        assert_eq!(bridges(&found), ["br-tenant-7"], "{tenant} {net} {subnet}");
        assert_eq!(found.network.nets[0].subnet.to_string(), "10.1.0.0/24");
        assert_eq!(found.conflicts.len(), 1, "{tenant} {net} {subnet}");
    }
    let moved = of(Some(&document(&[("acme", 9, "10.9.0.0/24")])), &old);
    assert_eq!(bridges(&moved), ["br-tenant-7", "br-tenant-9"]);
    assert!(moved.conflicts.is_empty());
}

#[test]
fn names_are_answered_to_tenants_of_the_document_only_where_the_operator_says_so() {
    let desired = document(&[("acme", 7, "10.1.0.0/24")]);
    let left = [(record(1, "gone", Some((9, "10.9.0.0/24")), Phase::Running), false)];
    let told = |dns| {
        let found = wanted(Some(&desired), dns, left.iter().map(|(record, moving)| (record, *moving)));
        found.network.nets.iter().map(|net| net.dns).collect::<Vec<_>>()
    };
    assert_eq!(told(false), [false, false]);
    assert_eq!(told(true), [true, false]);
}
