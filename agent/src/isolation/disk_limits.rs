//! The disk limits of pools, as the document in force has them. They are not part of a revision: a running instance gets new
//! limits without being replaced.

use std::collections::BTreeMap;

use mvm_host::cgroup::{Group, InstanceGroup, Usages};
use mvm_proto::document::IoLimits;
use mvm_proto::{DesiredState, PoolId, TenantId};

/// Of every pool that the document names.
#[derive(Debug, Default)]
pub(super) struct DiskLimits(BTreeMap<TenantId, BTreeMap<PoolId, Option<IoLimits>>>);

impl DiskLimits {
    pub(super) fn of(desired: &DesiredState) -> Self {
        let mut all: BTreeMap<TenantId, BTreeMap<_, _>> = BTreeMap::new();
        for (tenant, pool) in desired.pools() {
            let limits = pool.io_limits.as_deref().copied();
            all.entry(tenant.tenant_id.clone()).or_default().insert(pool.pool_id.clone(), limits);
        }
        Self(all)
    }

    /// Whether these are the document's. Asked at every pass, so nothing is made for it.
    pub(super) fn are_of(&self, desired: &DesiredState) -> bool {
        let known: usize = self.0.values().map(BTreeMap::len).sum();
        let same = |(tenant, pool): (&mvm_proto::document::Tenant, &mvm_proto::document::Pool)| {
            self.get(&tenant.tenant_id, &pool.pool_id) == Some(pool.io_limits.as_deref().copied())
        };
        desired.pools().count() == known && desired.pools().all(same)
    }

    /// Absent: the document does not name the pool.
    pub(super) fn get(&self, tenant: &TenantId, pool: &PoolId) -> Option<Option<IoLimits>> {
        self.0.get(tenant)?.get(pool).copied()
    }

    /// The groups that are limited in another way than the document says, with what it says. One whose pool it does not
    /// name stays as it is.
    pub(super) fn unlike(&self, found: &Usages) -> Vec<(InstanceGroup, Option<IoLimits>)> {
        let unlike = found.iter().filter_map(|(group, usage)| {
            let Group::Instance(instance) = group else { return None };
            let wanted = self.get(&instance.tenant, &instance.pool)?;
            (!usage.io.is(wanted.as_ref())).then(|| (instance.clone(), wanted))
        });
        unlike.collect()
    }
}

/// For people.
pub(super) fn in_words(limits: Option<&IoLimits>) -> String {
    let Some(limits) = limits else { return "not limited".to_owned() };
    let parts = [
        (limits.read_bytes_per_second, "bytes read"),
        (limits.write_bytes_per_second, "bytes written"),
        (limits.read_ops_per_second, "reads"),
        (limits.write_ops_per_second, "writes"),
    ];
    let parts = parts.into_iter().filter_map(|(limit, what)| limit.map(|limit| format!("{limit} {what}")));
    format!("{} in a second", parts.collect::<Vec<_>>().join(", "))
}

#[cfg(test)]
mod tests {
    use mvm_host::cgroup::{Disk, IoFound, Usage};
    use mvm_proto::InstanceId;
    use serde_json::{Value, json};

    use super::*;

    fn document(pools: &[(&str, Value)]) -> DesiredState {
        let pools: Vec<Value> = pools
            .iter()
            .map(|(pool, limits)| {
                let mut pool = json!({
                    "pool_id": pool, "flake_ref": "builtin:busybox", "profile": "minimal",
                    "instance_resources": { "vcpus": 1, "mem_mib": 64, "data_disk_mib": 0 },
                    "desired_counts": { "running": 1, "warm": 0, "sleeping": 0 },
                });
                if !limits.is_null() {
                    pool["io_limits"] = limits.clone();
                }
                pool
            })
            .collect();
        let tenant = json!({
            "tenant_id": "acme",
            "network": { "tenant_net_id": 1, "ipv4_subnet": "10.1.0.0/24" },
            "quotas": { "max_vcpus": 9, "max_mem_mib": 999, "max_running": 9, "max_warm": 9, "max_pools": 9,
                "max_instances_per_pool": 9, "max_disk_gib": 9 },
            "pools": pools,
        });
        let text = json!({ "schema_version": 1, "node_id": "node-a", "tenants": [tenant] }).to_string();
        DesiredState::parse(text.as_bytes()).unwrap()
    }

    fn group(pool: &str, number: u32) -> InstanceGroup {
        let instance = InstanceId::from_bits(number);
        InstanceGroup { tenant: "acme".parse().unwrap(), pool: pool.parse().unwrap(), instance }
    }

    fn reads(read_bytes_per_second: u64) -> IoLimits {
        IoLimits { read_bytes_per_second: Some(read_bytes_per_second), ..IoLimits::default() }
    }

    #[test]
    fn limits_are_the_documents_until_any_pool_has_others_comes_or_goes() {
        let limited = json!({ "read_bytes_per_second": 1 << 20 });
        let before = document(&[("a", limited.clone()), ("b", Value::Null)]);
        let limits = DiskLimits::of(&before);
        assert!(limits.are_of(&before));
        for other in [
            document(&[("a", limited.clone()), ("b", limited.clone())]),
            document(&[("a", Value::Null), ("b", Value::Null)]),
            document(&[("a", json!({ "read_bytes_per_second": 2 << 20 })), ("b", Value::Null)]),
            document(&[("a", limited.clone())]),
            document(&[("a", limited.clone()), ("b", Value::Null), ("c", Value::Null)]),
            document(&[("a", limited), ("c", Value::Null)]),
        ] {
            assert!(!limits.are_of(&other), "{other:?}");
        }
        assert!(!DiskLimits::default().are_of(&before));
    }

    #[test]
    fn groups_with_other_limits_than_their_pools_are_found_and_those_of_unnamed_pools_are_left() {
        let desired = document(&[("a", json!({ "read_bytes_per_second": 1 << 20 })), ("b", Value::Null)]);
        let limited = |bytes| IoFound::Limited { disk: Disk { major: 8, minor: 0 }, limits: reads(bytes) };
        let usage = |io| Usage { io, ..Usage::default() };
        let found: Usages = [
            (group("a", 1).into(), usage(limited(1 << 20))),
            (group("a", 2).into(), usage(IoFound::Unlimited)),
            (group("a", 3).into(), usage(limited(2 << 20))),
            (group("b", 4).into(), usage(IoFound::Unlimited)),
            (group("b", 5).into(), usage(IoFound::Several)),
            (group("gone", 6).into(), usage(limited(2 << 20))),
            (Group::Tenant("acme".parse().unwrap()), usage(limited(2 << 20))),
        ]
        .into();
        let wanted = Some(reads(1 << 20));
        let unlike = [(group("a", 2), wanted), (group("a", 3), wanted), (group("b", 5), None)];
        assert_eq!(DiskLimits::of(&desired).unlike(&found), unlike);
    }

    #[test]
    fn limits_are_told_in_words() {
        let both = IoLimits { write_ops_per_second: Some(100), ..reads(1 << 20) };
        assert_eq!(in_words(Some(&both)), "1048576 bytes read, 100 writes in a second");
        assert_eq!(in_words(None), "not limited");
    }
}
