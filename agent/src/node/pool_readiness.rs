//! What each pool has ready for claims: instances of the revision that the document asks for, those that can be claimed at
//! once, whether its template and image are here, and how far a rollout to that revision is. A function of what a pass saw.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::node::{RolloutProgress, rollout_progress};
use mvm_planner::observation::ObservedInstance;
use mvm_planner::{Blocked, revision_of};
use mvm_proto::document::{Pool, Tenant};
use mvm_proto::status::{ConditionKind, Counts};
use mvm_proto::{Digest, Phase, PoolId, TenantId, Timestamp, WorkloadState};

use crate::instance::template::{Template, TemplateState};

type Key = (TenantId, PoolId);

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OfPool {
    pub(crate) revision: Digest,
    /// Instances of that revision by phase.
    pub(crate) current: Counts,
    /// Warm, of that revision, not claimed, with a guest that works and no step under way.
    pub(crate) claimable: u32,
    pub(crate) has_template: bool,
    pub(crate) has_image: bool,
    pub(crate) rollout: RolloutProgress,
}

#[derive(Debug)]
pub(crate) struct PoolReadiness<'a> {
    now: Timestamp,
    instances: BTreeMap<Key, Vec<&'a ObservedInstance>>,
    /// The revisions that templates can be forked from.
    templates: BTreeMap<Key, Digest>,
    without_image: BTreeSet<Key>,
}

impl<'a> PoolReadiness<'a> {
    pub(crate) fn of(
        observed: &'a [ObservedInstance],
        templates: &[Template],
        blocked: &[Blocked],
        now: Timestamp,
    ) -> Self {
        let (instances, templates_by_pool) = (BTreeMap::new(), BTreeMap::new());
        let without_image = BTreeSet::new();
        let mut ready = Self { now, instances, templates: templates_by_pool, without_image };
        for one in observed {
            ready.instances.entry((one.tenant.clone(), one.pool.clone())).or_default().push(one);
        }
        let usable = templates.iter().filter(|it| matches!(it.state, TemplateState::Ready { .. }));
        ready.templates = usable.map(|it| ((it.tenant.clone(), it.pool.clone()), it.revision)).collect();
        let start_of_reason = ConditionKind::ArtifactsReady.blocks("");
        let without = blocked.iter().filter(|blocked| blocked.reason.starts_with(&start_of_reason));
        ready.without_image =
            without.filter_map(|blocked| Some((blocked.tenant.clone(), blocked.pool.clone()?))).collect();
        ready
    }

    pub(crate) fn pool(&self, tenant: &Tenant, pool: &Pool) -> OfPool {
        let key = (tenant.tenant_id.clone(), pool.pool_id.clone());
        let revision = revision_of(tenant, pool);
        let (mut current, mut claimable) = (Counts::default(), 0);
        for one in self.instances.get(&key).into_iter().flatten().filter(|one| one.revision == revision) {
            let works = one.workload.as_ref().is_none_or(|it| it.state == WorkloadState::Running);
            match one.phase {
                Phase::Running => {
                    current.running += 1;
                    current.down += u32::from(!works);
                }
                Phase::Warm => {
                    current.warm += 1;
                    claimable += u32::from(works && !one.claimed && one.moving_to.is_none());
                }
                Phase::Sleeping => current.sleeping += 1,
                _ => {}
            }
        }
        let has_template = self.templates.get(&key) == Some(&revision);
        let instances = self.instances.get(&key).into_iter().flatten().copied();
        let rollout = rollout_progress(tenant, pool, &revision, instances, self.now);
        let has_image = !self.without_image.contains(&key);
        OfPool { revision, current, claimable, has_template, has_image, rollout }
    }
}

#[cfg(test)]
mod tests {
    use mvm_planner::Workload;
    use mvm_proto::{DesiredState, Timestamp};
    use serde_json::json;

    use super::*;

    fn desired() -> DesiredState {
        let document = json!({
            "schema_version": 1, "node_id": "n1",
            "tenants": [{
                "tenant_id": "acme",
                "network": { "tenant_net_id": 1, "ipv4_subnet": "10.240.1.0/24" },
                "quotas": {
                    "max_vcpus": 16, "max_mem_mib": 8192, "max_running": 8, "max_warm": 8, "max_pools": 4,
                    "max_instances_per_pool": 16, "max_disk_gib": 10
                },
                "pools": [{
                    "pool_id": "web", "flake_ref": "github:org/hello", "profile": "minimal",
                    "instance_resources": { "vcpus": 1, "mem_mib": 128, "data_disk_mib": 0 },
                    "desired_counts": { "running": 1, "warm": 4, "sleeping": 0 }
                }]
            }]
        });
        DesiredState::parse(document.to_string().as_bytes()).unwrap()
    }

    fn instance(number: u32, phase: Phase, revision: Digest) -> ObservedInstance {
        let at = Timestamp::from_unix_ms(0);
        ObservedInstance {
            tenant: "acme".parse().unwrap(),
            pool: "web".parse().unwrap(),
            id: mvm_proto::InstanceId::from_bits(number),
            phase,
            since: at,
            revision,
            resources: desired().tenants[0].pools[0].instance_resources,
            last_used_at: None,
            idle_since: None,
            override_until: None,
            claimed: false,
            moving: false,
            on_demand: false,
            home: None,
            staging: None,
            moving_to: None,
            retry_not_before: None,
            failures: 0,
            workload: None,
            offset: None,
        }
    }

    #[test]
    fn only_warm_instances_of_the_newest_revision_that_work_and_are_free_can_be_claimed() {
        let desired = desired();
        let (tenant, pool) = (&desired.tenants[0], &desired.tenants[0].pools[0]);
        let (new, old) = (revision_of(tenant, pool), Digest::of(b"old"));
        let warm = |number| instance(number, Phase::Warm, new);
        let failed =
            Workload { state: WorkloadState::Failed, since: Timestamp::from_unix_ms(0), restarts: 0 };
        let observed = [
            warm(1),
            ObservedInstance { claimed: true, ..warm(2) },
            ObservedInstance { moving_to: Some(Phase::Running), ..warm(3) },
            ObservedInstance { workload: Some(Box::new(failed)), ..warm(4) },
            instance(5, Phase::Warm, old),
            instance(6, Phase::Running, new),
            instance(7, Phase::Running, old),
            instance(8, Phase::Sleeping, new),
        ];
        let found = PoolReadiness::of(&observed, &[], &[], Timestamp::from_unix_ms(0)).pool(tenant, pool);
        let current = Counts { running: 1, warm: 4, sleeping: 1, down: 0 };
        let expected = OfPool {
            revision: new,
            current,
            claimable: 1,
            has_template: false,
            has_image: true,
            rollout: RolloutProgress { serving: 2, outdated: 2, surge: 2, failing: None },
        };
        assert_eq!(found, expected);
    }

    #[test]
    fn a_pool_without_its_image_says_so_and_one_that_lacks_secrets_has_it() {
        let desired = desired();
        let (tenant, pool) = (&desired.tenants[0], &desired.tenants[0].pools[0]);
        let lacks = |kind: ConditionKind| Blocked {
            tenant: tenant.tenant_id.clone(),
            pool: Some(pool.pool_id.clone()),
            reason: kind.blocks("x"),
        };
        let has = |kind| {
            let at = Timestamp::from_unix_ms(0);
            PoolReadiness::of(&[], &[], &[lacks(kind)], at).pool(tenant, pool).has_image
        };
        assert_eq!((has(ConditionKind::ArtifactsReady), has(ConditionKind::SecretsReady)), (false, true));
    }
}
