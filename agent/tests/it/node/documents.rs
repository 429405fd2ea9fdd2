//! Documents for tests.

use mvm_proto::DesiredState;
use serde_json::{Value, json};

pub(crate) const NODE: &str = "node-1";
pub(crate) const CLUSTER: &str = "test";

pub(crate) fn pool(id: &str, running: u32, warm: u32, sleeping: u32) -> Value {
    json!({
        "pool_id": id,
        "flake_ref": "builtin:busybox",
        "profile": "minimal",
        "instance_resources": { "vcpus": 1, "mem_mib": 128, "data_disk_mib": 64 },
        "desired_counts": { "running": running, "warm": warm, "sleeping": sleeping },
        "runtime_policy": { "min_running_seconds": 0, "min_warm_seconds": 0 },
    })
}

pub(crate) fn tenant(id: &str, net: u16, pools: &[Value]) -> Value {
    json!({
        "tenant_id": id,
        "network": { "tenant_net_id": net, "ipv4_subnet": format!("10.240.{net}.0/24") },
        "quotas": {
            "max_vcpus": 64, "max_mem_mib": 65536, "max_running": 64, "max_warm": 16,
            "max_pools": 8, "max_instances_per_pool": 64, "max_disk_gib": 100,
        },
        "pools": pools,
    })
}

pub(crate) fn document(tenants: &[Value]) -> Value {
    json!({ "schema_version": 1, "node_id": NODE, "tenants": tenants })
}

pub(crate) fn parse(document: &Value) -> DesiredState {
    DesiredState::parse(document.to_string().as_bytes()).unwrap()
}

/// One tenant `acme` with one pool `workers`.
pub(crate) fn simple(running: u32, warm: u32, sleeping: u32) -> DesiredState {
    parse(&document(&[tenant("acme", 3, &[pool("workers", running, warm, sleeping)])]))
}
