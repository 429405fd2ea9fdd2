//! Who VMMs run as, by what records are given.

use mvm_host::network::vmm_user;
use mvm_proto::document::DesiredState;
use serde_json::json;

use super::*;

/// A tenant with one pool.
fn tenant(name: &str, net_id: u16, subnet: &str) -> (TenantId, PoolId, PoolSpec) {
    let pool = json!({
        "pool_id": "web", "flake_ref": "builtin:busybox", "profile": "minimal",
        "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
        "desired_counts": { "running": 1, "warm": 0, "sleeping": 0 },
    });
    let tenant = json!({
        "tenant_id": name,
        "network": { "tenant_net_id": net_id, "ipv4_subnet": subnet },
        "quotas": { "max_vcpus": 9, "max_mem_mib": 999, "max_running": 9, "max_warm": 9, "max_pools": 9,
            "max_instances_per_pool": 9, "max_disk_gib": 9 },
        "pools": [pool],
    });
    let text = json!({ "schema_version": 1, "node_id": "node-a", "tenants": [tenant] });
    let desired = DesiredState::parse(text.to_string().as_bytes()).unwrap();
    let tenant = &desired.tenants[0];
    let pool = &tenant.pools[0];
    (tenant.tenant_id.clone(), pool.pool_id.clone(), PoolSpec::of(tenant, pool))
}

fn made(records: &Arc<Records>, (tenant, pool, spec): &(TenantId, PoolId, PoolSpec)) -> (Record, Lease) {
    let (mut record, lease) = records.reserve(tenant, pool, spec, None, Timestamp::from_unix_ms(0)).unwrap();
    // As where instances have no card.
    records.place(&mut record, spec, None).unwrap();
    (record, lease)
}

fn user(record: &Record) -> u32 {
    vmm_user(record.net_id, record.offset)
}

#[test]
fn no_two_instances_have_one_user_whatever_number_a_document_gives_their_tenants_networks() {
    let records = Records::empty();
    let mut all: Vec<(Record, Lease)> = Vec::new();
    // The number of a tenant that is gone is given again while its instance is still there.
    for (name, net_id, subnet) in [
        ("acme", 1, "10.1.0.0/24"),
        ("beta", 1, "10.1.0.0/24"),
        ("gamma", 1, "10.2.0.0/24"),
        ("delta", 2, "10.2.0.0/24"),
        ("beta", 2, "10.2.0.0/24"),
    ] {
        all.push(made(&records, &tenant(name, net_id, subnet)));
    }
    let distinct = |all: &[(Record, Lease)]| {
        let users: BTreeSet<u32> = all.iter().map(|(record, _)| user(record)).collect();
        assert_eq!(users.len(), all.len(), "{users:?}");
    };
    distinct(&all);
    // A tenant whose number changes takes its instances there at their next start, beside those that are there.
    let moved = tenant("delta", 1, "10.2.0.0/24");
    records.place(&mut all[3].0, &moved.2, None).unwrap();
    distinct(&all);
    let places: BTreeSet<u32> = records.all().iter().map(user).collect();
    assert_eq!(places.len(), all.len(), "what is taken is taken from then on");
    // Nor does one that comes from another node.
    let mut came = all[0].0.clone();
    (came.id, came.tenant) = (InstanceId::from_bits(0xc0de), "epsilon".parse().unwrap());
    assert!(matches!(records.admit(came), Err(StateError::AddressTaken { .. })));
}
