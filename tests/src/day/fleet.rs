//! The pools that a day is played on.

use mvm_planner::Capacity;
use mvm_proto::DesiredState;
use serde_json::{Value, json};

/// A document whose pools rest unless somebody wants something of them.
#[derive(Debug, Clone)]
pub struct Fleet {
    pub desired: DesiredState,
    pub capacity: Capacity,
}

impl Fleet {
    /// Each tenant has one pool that keeps one instance running, so that counts and policy meet, and `pools` that keep
    /// none; with `asleep` sleepers each. Every setting that a document may leave out is left out.
    #[must_use]
    pub fn of(tenants: u32, pools: u32, asleep: u32) -> Self {
        let tenants: Vec<Value> = (0..tenants).map(|number| tenant(number, pools, asleep)).collect();
        let document = json!({ "schema_version": 1, "node_id": "node-a", "tenants": tenants });
        let desired = match DesiredState::parse(document.to_string().as_bytes()) {
            Ok(desired) => desired,
            Err(errors) => panic!("the fleet's own document is not valid: {errors}"),
        };
        let capacity =
            Capacity { vcpus: 100_000, mem_mib: 1 << 30, disk_mib: 1 << 30, max_instances: 100_000 };
        Self { desired, capacity }
    }

    /// As many instances as its counts ask for.
    #[must_use]
    pub fn instances(&self) -> usize {
        let counts = self.desired.pools().map(|(_, pool)| pool.desired_counts);
        counts.map(|counts| (counts.running + counts.warm + counts.sleeping) as usize).sum()
    }
}

fn tenant(number: u32, pools: u32, asleep: u32) -> Value {
    let pool = |id: String, running: u32| {
        json!({
            "pool_id": id, "flake_ref": "builtin:busybox", "profile": "minimal",
            "instance_resources": { "vcpus": 1, "mem_mib": 512, "data_disk_mib": 0 },
            "desired_counts": { "running": running, "warm": 0, "sleeping": asleep },
        })
    };
    let front = pool("front".to_owned(), 1);
    let agents = (0..pools).map(|number| pool(format!("agents-{number}"), 0));
    json!({
        "tenant_id": format!("tenant-{number}"),
        "network": { "tenant_net_id": number, "ipv4_subnet": format!("10.{number}.0.0/16") },
        "quotas": {
            "max_vcpus": 1000, "max_mem_mib": 1_000_000, "max_running": 1000, "max_warm": 1000,
            "max_pools": pools + 1, "max_instances_per_pool": 1000, "max_disk_gib": 10_000,
        },
        "pools": std::iter::once(front).chain(agents).collect::<Vec<_>>(),
    })
}
