//! One tenant with one pool, and instances of it in given phases: what the examples start from.

use mvm_planner::{Action, NodePlan, Observation, ObservedInstance};
use mvm_proto::document::{Pool, Tenant};
use mvm_proto::{DesiredState, InstanceId, Phase, Timestamp};
use serde_json::json;

use super::fleet::{AMPLE_CAPACITY, NOW_MS};

pub(crate) fn now() -> Timestamp {
    Timestamp::from_unix_ms(NOW_MS)
}

pub(crate) fn desired(running: u32, warm: u32, sleeping: u32) -> DesiredState {
    let text = json!({
        "schema_version": 1, "node_id": "node",
        "tenants": [{
            "tenant_id": "acme",
            "network": { "tenant_net_id": 3, "ipv4_subnet": "10.240.3.0/24" },
            "quotas": {
                "max_vcpus": 64, "max_mem_mib": 65536, "max_running": 64, "max_warm": 64,
                "max_pools": 4, "max_instances_per_pool": 64, "max_disk_gib": 100,
            },
            "pools": [{
                "pool_id": "workers", "flake_ref": "builtin:busybox", "profile": "minimal",
                "instance_resources": { "vcpus": 2, "mem_mib": 256, "data_disk_mib": 0 },
                "desired_counts": { "running": running, "warm": warm, "sleeping": sleeping },
            }],
        }],
    });
    DesiredState::parse(text.to_string().as_bytes()).unwrap()
}

pub(crate) fn workers(desired: &DesiredState) -> (&Tenant, &Pool) {
    (&desired.tenants[0], &desired.tenants[0].pools[0])
}

/// Instances of `workers` in these phases, numbered from 1, each `age` seconds in its phase.
pub(crate) fn observed(desired: &DesiredState, phases: &[(Phase, u64)]) -> Observation {
    let (tenant, pool) = workers(desired);
    let instance = |(index, (phase, age)): (usize, &(Phase, u64))| {
        let id = InstanceId::from_bits(u32::try_from(index).unwrap() + 1);
        ObservedInstance::of(tenant, pool, id, *phase, now() - std::time::Duration::from_secs(*age))
    };
    let instances = phases.iter().enumerate().map(instance).collect();
    Observation { capacity: AMPLE_CAPACITY, instances, ..Observation::default() }
}

pub(crate) fn steps(plan: &NodePlan) -> Vec<(Action, Option<String>)> {
    plan.steps.iter().map(|step| (step.action, step.instance.as_ref().map(ToString::to_string))).collect()
}

pub(crate) fn id(number: u32) -> Option<String> {
    Some(InstanceId::from_bits(number).to_string())
}
