//! A world that does what a plan says, instantly and without fail, and counts what it uses on the way.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::{Action, Observation, ObservedInstance, Step, revision_of};
use mvm_proto::document::{Pool, Tenant};
use mvm_proto::{DesiredState, InstanceId, Phase, PoolId, TenantId, Timestamp};

#[derive(Debug, Clone)]
pub(crate) struct World {
    pub(crate) observed: Observation,
    pub(crate) now: Timestamp,
    next_id: u32,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Used {
    pub(crate) vcpus: u64,
    pub(crate) mem_mib: u64,
    pub(crate) disk_mib: u64,
    pub(crate) running: u64,
    pub(crate) warm: u64,
    pub(crate) instances: u64,
}

impl World {
    pub(crate) fn new(observed: Observation, now: Timestamp) -> Self {
        Self { observed, now, next_id: 0x4000_0000 }
    }

    pub(crate) fn apply(&mut self, desired: &DesiredState, step: &Step) {
        let named = desired
            .pools()
            .find(|(tenant, pool)| tenant.tenant_id == step.tenant && pool.pool_id == step.pool);
        let Some(id) = &step.instance else {
            let (tenant, pool) = named.expect("only a named pool gets new instances");
            assert_eq!(step.action, Action::Create);
            self.next_id += 1;
            let id = InstanceId::from_bits(self.next_id);
            let made = booted(&self.observed, (tenant, pool), id, step.staging, self.now);
            self.observed.instances.push(made);
            return;
        };
        let index = self.observed.instances.iter().position(|i| i.id == *id).expect("the instance exists");
        let instance = &mut self.observed.instances[index];
        let from = instance.phase;
        let legal: &[Phase] = match step.action {
            Action::Create => panic!("{step:?} names an instance"),
            Action::Start => &[Phase::Stopped, Phase::Failed, Phase::Created, Phase::Ready],
            Action::Wake => &[Phase::Sleeping],
            Action::Resume if instance.staging.is_some() => &[Phase::Running, Phase::Warm],
            Action::Resume => &[Phase::Warm],
            Action::Warm => &[Phase::Running],
            Action::Sleep => &[Phase::Running, Phase::Warm],
            Action::Stop => &[Phase::Running, Phase::Warm, Phase::Sleeping],
            Action::Destroy => &[Phase::Stopped, Phase::Failed, Phase::Created, Phase::Ready],
            Action::Replace => &[Phase::Running, Phase::Warm, Phase::Sleeping],
            Action::Restart => &[Phase::Running],
        };
        assert!(legal.contains(&from), "{step:?} on a {from} instance");
        match step.action {
            Action::Restart => {
                let workload = instance.workload.as_deref_mut().expect("a program that is down");
                assert!(workload.is_down(), "{step:?}");
                *workload = workload.restarted(self.now);
                return;
            }
            Action::Destroy => {
                self.observed.instances.remove(index);
                return;
            }
            Action::Start | Action::Replace => {
                let (tenant, pool) = named.expect("only a named pool's instances are booted");
                instance.revision = revision_of(tenant, pool);
                instance.resources = pool.instance_resources;
                instance.workload = None;
            }
            _ => {}
        }
        let stood_in = instance.staging == Some(Phase::Running) && step.action == Action::Stop;
        instance.phase = step.action.leads_to(Some(from));
        instance.since = self.now;
        instance.staging = match step.action {
            Action::Start | Action::Wake => step.staging,
            _ if stood_in => instance.staging,
            _ => None,
        };
        if Some(instance.phase) == instance.home || matches!(instance.phase, Phase::Sleeping | Phase::Stopped)
        {
            instance.on_demand = false;
            instance.home = None;
        }
    }

    pub(crate) fn used(&self, tenant: Option<&TenantId>, pool: Option<&PoolId>) -> Used {
        let mut used = Used::default();
        let mine = |i: &&ObservedInstance| {
            tenant.is_none_or(|t| i.tenant == *t) && pool.is_none_or(|p| i.pool == *p)
        };
        for i in self.observed.instances.iter().filter(mine) {
            let (vcpus, mem, disk) =
                (u64::from(i.resources.vcpus), i.resources.mem_mib, i.resources.data_disk_mib);
            used.instances += 1;
            used.disk_mib += disk;
            match i.phase {
                Phase::Running => {
                    used.vcpus += vcpus;
                    used.mem_mib += mem;
                    used.running += u64::from(matches!(i.staging, None | Some(Phase::Running)));
                }
                Phase::Warm => {
                    used.mem_mib += mem;
                    used.warm += 1;
                }
                Phase::Sleeping => used.disk_mib += mem,
                _ => {}
            }
        }
        used
    }

    /// How many of a pool are running, warm and sleeping.
    pub(crate) fn counts(&self, tenant: &TenantId, pool: &PoolId) -> (u32, u32, u32) {
        let mut by_phase = BTreeMap::<Phase, u32>::new();
        let of_pool = |i: &&ObservedInstance| i.tenant == *tenant && i.pool == *pool && !i.claimed;
        for i in self.observed.instances.iter().filter(of_pool) {
            *by_phase.entry(i.phase).or_default() += 1;
        }
        let count = |phase| by_phase.get(&phase).copied().unwrap_or(0);
        (count(Phase::Running), count(Phase::Warm), count(Phase::Sleeping))
    }
}

/// A new one, with the first address that the node may give it: a plan makes none without.
pub(crate) fn booted(
    observed: &Observation,
    (tenant, pool): (&Tenant, &Pool),
    id: InstanceId,
    staging: Option<Phase>,
    now: Timestamp,
) -> ObservedInstance {
    let mine = observed.instances.iter().filter(|i| i.tenant == tenant.tenant_id);
    let taken: BTreeSet<u32> = mine.clone().filter_map(|i| i.offset).collect();
    // Of some it is not known which one they have, only that it is one of these.
    let unknown = mine.filter(|i| i.offset.is_none()).count();
    let free = tenant.network.offsets().filter(|offset| !taken.contains(offset)).nth(unknown);
    let offset = Some(free.unwrap_or_else(|| panic!("{} has no address for {id}", tenant.tenant_id)));
    let made = ObservedInstance::of(tenant, pool, id, Phase::Running, now);
    ObservedInstance { staging, offset, ..made }
}
