//! The name of what a pool's instances are made of: artifacts, resources and the tenant's secrets.

use mvm_proto::Digest;
use mvm_proto::document::{Pool, Tenant};

/// The content hash of everything that makes a booted instance of this pool what it is.
///
/// Counts, policies, guards and limits on the disk are absent on purpose: changing them replaces nothing. Limits on the disk
/// are set anew on instances that run.
#[must_use]
pub fn revision_of(tenant: &Tenant, pool: &Pool) -> Digest {
    let mut bytes = Vec::with_capacity(256);
    // Each part is preceded by its length, so that no two different pools give the same bytes.
    let mut part = |bytes_of_part: &[u8]| {
        bytes.extend_from_slice(&(bytes_of_part.len() as u64).to_be_bytes());
        bytes.extend_from_slice(bytes_of_part);
    };
    part(b"mvm revision 1");
    part(pool.flake_ref.as_bytes());
    part(pool.profile.as_str().as_bytes());
    part(pool.image_digest.as_ref().map_or(&[][..], |digest| digest.as_bytes()));
    part(&pool.instance_resources.vcpus.to_be_bytes());
    part(&pool.instance_resources.mem_mib.to_be_bytes());
    part(&pool.instance_resources.data_disk_mib.to_be_bytes());
    part(tenant.secrets_hash.as_ref().map_or(&[][..], |digest| digest.as_bytes()));
    // What it leaves behind is in every instance. A pool without one is called what it was before there were any.
    if let Some(warmup) = &pool.warmup {
        part(b"warm-up");
        part(&warmup.timeout_seconds.to_be_bytes());
        warmup.command.iter().for_each(|word| part(word.as_bytes()));
    }
    Digest::of(&bytes)
}

#[cfg(test)]
mod tests {
    use mvm_proto::DesiredState;
    use serde_json::{Value, json};

    use super::*;

    fn revision(warmup: Value) -> String {
        revision_with(warmup, Value::Null)
    }

    fn revision_with(warmup: Value, io_limits: Value) -> String {
        let mut document = json!({
            "schema_version": 1,
            "node_id": "node-a",
            "tenants": [{
                "tenant_id": "acme",
                "network": { "tenant_net_id": 1, "ipv4_subnet": "10.240.1.0/24" },
                "quotas": {
                    "max_vcpus": 4, "max_mem_mib": 1024, "max_running": 4, "max_warm": 4,
                    "max_pools": 1, "max_instances_per_pool": 4, "max_disk_gib": 1,
                },
                "pools": [{
                    "pool_id": "workers",
                    "flake_ref": "builtin:busybox",
                    "profile": "minimal",
                    "instance_resources": { "vcpus": 1, "mem_mib": 128, "data_disk_mib": 64 },
                    "desired_counts": { "running": 1, "warm": 0, "sleeping": 0 },
                }],
            }],
        });
        if !warmup.is_null() {
            document["tenants"][0]["pools"][0]["warmup"] = warmup;
        }
        if !io_limits.is_null() {
            document["tenants"][0]["pools"][0]["io_limits"] = io_limits;
        }
        let desired = DesiredState::parse(document.to_string().as_bytes()).unwrap();
        revision_of(&desired.tenants[0], &desired.tenants[0].pools[0]).to_string()
    }

    #[test]
    fn a_pool_without_a_warm_up_is_called_what_it_always_was() {
        // Recorded before there were warm-ups: another name would replace every instance there is.
        assert_eq!(
            revision(Value::Null),
            "sha256:8bc9df75c8f83d2b5b4d67aee93c4a8ee9b2193a66d597135eda2037418935da"
        );
    }

    #[test]
    fn limits_on_the_disk_replace_nothing() {
        let limited = revision_with(Value::Null, json!({ "write_bytes_per_second": 1_048_576 }));
        assert_eq!(limited, revision(Value::Null));
    }

    #[test]
    fn another_warm_up_is_another_revision() {
        let names = [
            revision(Value::Null),
            revision(json!({ "command": ["/app/warm"] })),
            revision(json!({ "command": ["/app/warm", "all"] })),
            revision(json!({ "command": ["/app/warmall"] })),
            revision(json!({ "command": ["/app/warm"], "timeout_seconds": 61 })),
        ];
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
        assert_eq!(names[1], revision(json!({ "command": ["/app/warm"], "timeout_seconds": 60 })));
    }
}
