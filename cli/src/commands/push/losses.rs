//! What a document takes away from a node, told from how the node was last seen; and the question whether that is meant.

use std::collections::BTreeMap;
use std::fmt;

use mvm_proto::DesiredState;
use mvm_proto::status::PoolStatus;

use crate::confirm::{Question, confirm};
use crate::exit::Run;

/// Instances that would be stopped and then destroyed with their disks.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Losses {
    node: String,
    /// Tenants that the document does not name, with their instances.
    tenants: BTreeMap<String, u64>,
    /// How many instances there are, if none would be left.
    all: Option<u64>,
}

/// What of these pools the document leaves nothing of: everything, or a tenant with instances. `None`: neither.
pub(super) fn losses(desired: &DesiredState, pools: &[PoolStatus]) -> Option<Losses> {
    let (mut tenants, mut kept, mut lost) = (BTreeMap::new(), 0, 0);
    for pool in pools {
        let count = instances(pool);
        let tenant = desired.tenants.iter().find(|tenant| tenant.tenant_id.as_str() == pool.tenant_id);
        let wanted = tenant.map(|tenant| tenant.pools.iter().find(|p| p.pool_id.as_str() == pool.pool_id));
        let stays = match wanted {
            None => !desired.prune_unknown_tenants,
            Some(None) => !desired.prune_unknown_pools,
            Some(Some(pool)) => {
                let counts = &pool.desired_counts;
                pool.critical || counts.running + counts.warm + counts.sleeping > 0
            }
        };
        if stays {
            kept += count;
            continue;
        }
        lost += count;
        if tenant.is_none() && count > 0 {
            *tenants.entry(pool.tenant_id.clone()).or_insert(0) += count;
        }
    }
    let all = (kept == 0 && lost > 0).then_some(lost);
    let grave = all.is_some() || !tenants.is_empty();
    grave.then(|| Losses { node: desired.node_id.to_string(), tenants, all })
}

fn instances(pool: &PoolStatus) -> u64 {
    let actual = pool.actual.unwrap_or_default();
    [actual.running, actual.warm, actual.sleeping, pool.stopped, pool.failed].into_iter().map(u64::from).sum()
}

impl fmt::Display for Losses {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Some(all) = self.all {
            write!(f, "this document leaves none of the {all} instance(s) on {}", self.node)?;
        } else {
            write!(f, "this document prunes tenants with instances on {}", self.node)?;
        }
        if !self.tenants.is_empty() {
            let named: Vec<_> =
                self.tenants.iter().map(|(tenant, count)| format!("{tenant} ({count})")).collect();
            write!(f, "; it does not name {}", named.join(", "))?;
        }
        f.write_str(": they are stopped, then destroyed with their disks")
    }
}

impl Losses {
    /// Asks on a terminal whether this is meant; without one only `--yes` says so.
    pub(super) fn confirm(&self) -> Run {
        let question = Question {
            text: "Push it all the same?",
            undone: "nothing was pushed",
            advice: "look with --dry-run, then repeat with --yes",
        };
        confirm(&self.to_string(), &question)
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::status::Counts;

    use super::*;

    fn pool(tenant: &str, pool: &str, sleeping: u32) -> PoolStatus {
        PoolStatus {
            tenant_id: tenant.to_owned(),
            pool_id: pool.to_owned(),
            actual: Some(Counts { sleeping, ..Counts::default() }),
            stopped: 1,
            ..PoolStatus::default()
        }
    }

    /// A document that names acme's pool `web` with this count.
    fn document(running: u32, prune: bool) -> DesiredState {
        let text = format!(
            r#"{{"schema_version": 1, "node_id": "n", "prune_unknown_tenants": {prune}, "tenants": [{{"tenant_id": "acme",
                "network": {{"tenant_net_id": 1, "ipv4_subnet": "10.1.0.0/24"}},
                "quotas": {{"max_vcpus": 9, "max_mem_mib": 9999, "max_running": 9, "max_warm": 9, "max_pools": 9,
                    "max_instances_per_pool": 9, "max_disk_gib": 9}},
                "pools": [{{"pool_id": "web", "flake_ref": "builtin:busybox", "profile": "minimal",
                    "instance_resources": {{"vcpus": 1, "mem_mib": 64, "data_disk_mib": 0}},
                    "desired_counts": {{"running": {running}, "warm": 0, "sleeping": 0}}}}]}}]}}"#
        );
        DesiredState::parse(text.as_bytes()).unwrap()
    }

    #[test]
    fn pruning_a_tenant_with_instances_and_emptying_a_node_are_losses_and_nothing_else_is() {
        let there = [pool("acme", "web", 2), pool("other", "db", 1)];
        assert_eq!(losses(&document(1, false), &there), None);
        assert_eq!(losses(&document(1, true), &there[..1]), None, "no other tenant has instances");
        assert_eq!(losses(&document(0, true), &[]), None, "there is nothing to lose");
        let pruned = losses(&document(1, true), &there).unwrap();
        assert_eq!((pruned.tenants["other"], pruned.all), (2, None));
        let emptied = losses(&document(0, true), &there).unwrap();
        assert_eq!((emptied.tenants.len(), emptied.all), (1, Some(5)));
        assert_eq!(
            losses(&document(0, false), &there[..1]).unwrap().all,
            Some(3),
            "counts of nothing empty it too"
        );
    }
}
