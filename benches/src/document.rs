//! Documents of a wanted size, and the same document as a bare serde type for the floor.

use std::time::Duration;

use anyhow::{Context, Result};
use mvm_proto::{ClusterId, DesiredState, Provenance, SignedDocument, Timestamp};
use serde::Deserialize;
use serde_json::{Value, json};

/// Pools of one tenant: enough tenants to be real, few enough to fit the /24 of each.
const POOLS_PER_TENANT: usize = 10;

/// A document of `pools` pools as a user writes it; `padding` bytes longer than it needs to be.
#[must_use]
pub fn user_document(node: &str, pools: usize, padding: usize) -> Value {
    let tenants: Vec<Value> = (0..pools.div_ceil(POOLS_PER_TENANT).max(1))
        .map(|tenant| {
            let first = tenant * POOLS_PER_TENANT;
            let pools = (first..pools.min(first + POOLS_PER_TENANT)).map(|index| pool(index, padding));
            json!({
                "tenant_id": format!("tenant-{tenant}"),
                "network": {
                    "tenant_net_id": tenant,
                    "ipv4_subnet": format!("10.{}.{}.0/24", tenant / 256, tenant % 256),
                },
                "quotas": {
                    "max_vcpus": 64, "max_mem_mib": 65536, "max_running": 40, "max_warm": 40,
                    "max_pools": POOLS_PER_TENANT, "max_instances_per_pool": 4, "max_disk_gib": 64,
                },
                "pools": pools.collect::<Vec<_>>(),
            })
        })
        .collect();
    json!({ "schema_version": 1, "node_id": node, "tenants": tenants })
}

/// One that asks for so many running instances, ten in a pool.
#[must_use]
pub fn busy_user_document(node: &str, instances: usize) -> Value {
    let mut document = user_document(node, instances.div_ceil(10), 0);
    let tenants = document["tenants"].as_array_mut().into_iter().flatten();
    for tenant in tenants {
        for limit in ["max_vcpus", "max_running", "max_instances_per_pool"] {
            tenant["quotas"][limit] = json!(1000);
        }
        for pool in tenant["pools"].as_array_mut().into_iter().flatten() {
            pool["desired_counts"]["running"] = json!(10);
            pool["instance_resources"]["mem_mib"] = json!(32);
        }
    }
    document
}

/// The first pool takes the padding, in its image's name.
fn pool(index: usize, padding: usize) -> Value {
    let padding = if index == 0 { "x".repeat(padding) } else { String::new() };
    json!({
        "pool_id": format!("pool-{index}"),
        "flake_ref": format!("github:org/echo{padding}"),
        "profile": "minimal",
        "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
        "desired_counts": { "running": usize::from(index == 0), "warm": 0, "sleeping": 0 },
    })
}

/// A document to sign whose payload is as close to `bytes` as whole pools and padding come.
pub fn signed_document(
    cluster: &ClusterId,
    node: &str,
    bytes: usize,
    now: Timestamp,
) -> Result<SignedDocument> {
    let text = serde_json::to_vec(&sized_user_document(node, bytes)?)?;
    sign_ready(cluster, &text, now)
}

/// The same as a user writes it, for pushing.
pub fn sized_user_document(node: &str, bytes: usize) -> Result<Value> {
    let (cluster, now): (ClusterId, _) = ("bench".parse()?, Timestamp::from_unix_ms(0));
    let size = |pools| -> Result<usize> {
        let text = serde_json::to_vec(&user_document(node, pools, 0))?;
        Ok(sign_ready(&cluster, &text, now)?.to_payload().len())
    };
    let (one, eleven) = (size(1)?, size(1 + POOLS_PER_TENANT)?);
    let mut pools = 1 + bytes.saturating_sub(one) * POOLS_PER_TENANT / (eleven - one).max(1);
    while pools > 1 && size(pools)? > bytes {
        pools -= 1;
    }
    let padding = bytes.saturating_sub(size(pools)?).min(mvm_proto::document::MAX_FLAKE_REF_BYTES / 2);
    Ok(user_document(node, pools, padding))
}

fn sign_ready(cluster: &ClusterId, text: &[u8], now: Timestamp) -> Result<SignedDocument> {
    let desired = DesiredState::parse(text).context("the bench's own document is not valid")?;
    Ok(ready_to_sign(cluster, desired, now))
}

/// As a coordinator would sign it: every field is written out.
#[must_use]
pub fn ready_to_sign(cluster: &ClusterId, desired: DesiredState, now: Timestamp) -> SignedDocument {
    let expires_at = now + Duration::from_secs(24 * 3600);
    let cluster = cluster.clone();
    let provenance = Provenance { cluster, epoch: 1, generation: 1, issued_at: now, expires_at };
    SignedDocument::new(provenance, desired)
}

/// What serde alone makes of a signed document: types and unknown fields checked, no rule, no path in an error, nothing
/// looked at twice. The floor under reading a document.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only the reading is measured")]
pub struct BareDocument {
    schema_version: u32,
    node_id: String,
    cluster: String,
    epoch: u64,
    generation: u64,
    issued_at: String,
    expires_at: String,
    tenants: Vec<BareTenant>,
    prune_unknown_tenants: bool,
    prune_unknown_pools: bool,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only the reading is measured")]
struct BareTenant {
    tenant_id: String,
    pinned: bool,
    network: BareNetwork,
    quotas: mvm_proto::document::Quotas,
    secrets_hash: Option<String>,
    egress: BareEgress,
    pools: Vec<BarePool>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only the reading is measured")]
struct BareNetwork {
    tenant_net_id: u16,
    ipv4_subnet: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only the reading is measured")]
struct BareEgress {
    mode: String,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
#[allow(dead_code, reason = "only the reading is measured")]
struct BarePool {
    pool_id: String,
    flake_ref: String,
    profile: String,
    image_digest: Option<String>,
    role: String,
    instance_resources: mvm_proto::document::Resources,
    desired_counts: mvm_proto::document::DesiredCounts,
    pinned: bool,
    critical: bool,
    runtime_policy: mvm_proto::document::RuntimePolicy,
    sleep_policy: mvm_proto::document::SleepPolicy,
    seccomp_policy: String,
    snapshot_compression: String,
    snapshot_encryption: bool,
    stopped_retention_seconds: u64,
    persist: Option<Value>,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn documents_have_about_the_size_that_was_asked_for_and_read_as_bare_ones() {
        let now = Timestamp::from_unix_ms(1_800_000_000_000);
        for bytes in [1 << 10, 4 << 10, 1 << 20] {
            let document = signed_document(&"bench".parse().unwrap(), "node-a", bytes, now).unwrap();
            let payload = document.to_payload();
            assert!(
                payload.len() * 10 >= bytes * 9 && payload.len() * 10 <= bytes * 12,
                "{bytes}: {}",
                payload.len()
            );
            serde_json::from_slice::<BareDocument>(&payload).unwrap();
        }
    }
}
