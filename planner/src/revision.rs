//! The name of what a pool's instances are made of: artifacts, resources, secrets, and what is run in place of the image's
//! workload.

use mvm_proto::Digest;
use mvm_proto::document::{Pool, Tenant, User, WorkloadOverride};

/// The content hash of everything that makes a booted instance of this pool what it is.
///
/// Counts, policies, guards and limits on the disk are absent on purpose: changing them replaces nothing. Limits on the disk
/// are set anew on instances that run.
#[must_use]
pub fn revision_of(tenant: &Tenant, pool: &Pool) -> Digest {
    revision_with(pool, pool.secrets_of(tenant))
}

/// The same, where it is known which secrets the pool has.
#[must_use]
pub fn revision_with(pool: &Pool, secrets: Option<Digest>) -> Digest {
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
    // The same bundle is the same, whether the tenant names it or the pool.
    part(secrets.as_ref().map_or(&[][..], |digest| digest.as_bytes()));
    // What it leaves behind is in every instance. A pool without one is called what it was before there were any.
    if let Some(warmup) = &pool.warmup {
        part(b"warm-up");
        part(&warmup.timeout_seconds.to_be_bytes());
        warmup.command.iter().for_each(|word| part(word.as_bytes()));
    }
    if let Some(workload) = &pool.workload {
        // No word of a warm-up has such a byte: this is not one of them.
        part(b"\0workload");
        part(workload_digest(workload).as_bytes());
    }
    Digest::of(&bytes)
}

/// The content hash of what a pool's guests run: each part by its name, each list with its length.
fn workload_digest(workload: &WorkloadOverride) -> Digest {
    let WorkloadOverride { command, args, env, working_dir, user } = workload;
    let mut bytes = Vec::with_capacity(workload.bytes() + 128);
    let mut text = |text: &str| {
        bytes.extend_from_slice(&(text.len() as u64).to_be_bytes());
        bytes.extend_from_slice(text.as_bytes());
    };
    let mut words = |name: &str, words: Vec<&str>| {
        text(name);
        text(&words.len().to_string());
        words.into_iter().for_each(&mut text);
    };
    for (name, list) in [("command", command), ("args", args)] {
        if let Some(list) = list {
            words(name, list.iter().map(String::as_str).collect());
        }
    }
    words("env", env.iter().flat_map(|(name, value)| [name.as_str(), value.as_str()]).collect());
    if let Some(directory) = working_dir {
        words("working_dir", vec![directory]);
    }
    match user {
        Some(User::Id(id)) => words("uid", vec![&id.to_string()]),
        Some(User::Name(name)) => words("user", vec![name]),
        None => {}
    }
    Digest::of(&bytes)
}

#[cfg(test)]
mod tests {
    use mvm_proto::DesiredState;
    use serde_json::{Value, json};

    use super::*;

    fn revision(warmup: Value) -> String {
        revision_with(&[("/pools/0/warmup", warmup)])
    }

    /// With these in the document, but for what is null.
    fn revision_with(more: &[(&str, Value)]) -> String {
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
        for (pointer, value) in more.iter().filter(|(_, value)| !value.is_null()) {
            let (parent, name) = pointer.rsplit_once('/').unwrap();
            document["tenants"][0].pointer_mut(parent).unwrap()[name] = value.clone();
        }
        let desired = DesiredState::parse(document.to_string().as_bytes()).unwrap();
        revision_of(&desired.tenants[0], &desired.tenants[0].pools[0]).to_string()
    }

    fn all_differ(names: &[String]) {
        let different: std::collections::BTreeSet<_> = names.iter().collect();
        assert_eq!(different.len(), names.len(), "{names:?}");
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
        let limited =
            revision_with(&[("/pools/0/io_limits", json!({ "write_bytes_per_second": 1_048_576 }))]);
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
        all_differ(&names);
        assert_eq!(names[1], revision(json!({ "command": ["/app/warm"], "timeout_seconds": 60 })));
    }

    #[test]
    fn another_workload_is_another_revision() {
        let of = |workload: Value| revision_with(&[("/pools/0/workload", workload)]);
        let mut names = vec![revision(Value::Null)];
        names.extend(
            [
                json!({ "command": ["a", "b"] }),
                json!({ "command": ["a"], "args": ["b"] }),
                json!({ "command": ["ab"] }),
                json!({ "args": ["a", "b"] }),
                json!({ "args": [] }),
                json!({ "args": ["env", "0"] }),
                json!({ "env": { "A": "b" } }),
                json!({ "env": { "A": "" } }),
                json!({ "env": { "A": "", "B": "" } }),
                json!({ "working_dir": "/" }),
                json!({ "working_dir": "/srv" }),
                json!({ "user": 0 }),
                json!({ "user": 1000 }),
                json!({ "user": "root" }),
            ]
            .map(of),
        );
        all_differ(&names);
        let told = json!({ "user": 1000, "env": { "B": "1", "A": "2" } });
        let again = json!({ "env": { "A": "2", "B": "1" }, "user": 1000 });
        assert_eq!(of(told), of(again));
        // A warm-up is no workload, whatever its words are.
        let both =
            [("/pools/0/warmup", json!({ "command": ["a"] })), ("/pools/0/workload", json!({ "user": 0 }))];
        all_differ(&[revision_with(&both), revision_with(&both[..1]), revision_with(&both[1..])]);
    }

    #[test]
    fn what_a_node_may_give_of_its_addresses_replaces_nothing() {
        let blocks = [("/network/address_blocks", json!([0, 3])), ("/network/reserved_offsets", json!([9]))];
        assert_eq!(revision_with(&blocks), revision(Value::Null));
    }

    #[test]
    fn a_pools_secrets_take_the_place_of_its_tenants() {
        let digest = |byte: &str| json!(format!("sha256:{}", byte.repeat(32)));
        let of = |tenant: Value, pool: Value| {
            revision_with(&[("/secrets_hash", tenant), ("/pools/0/secrets_hash", pool)])
        };
        let (a, b) = (digest("aa"), digest("bb"));
        let whole = of(a.clone(), Value::Null);
        assert_eq!(of(b.clone(), a.clone()), whole, "the tenant's is another's business");
        assert_eq!(of(Value::Null, a.clone()), whole, "the same secrets, wherever they are named");
        all_differ(&[revision(Value::Null), whole, of(a, b)]);
    }
}
