//! Whether quotas and capacity hold, counting what moves as the most of where it was and where it goes.

use mvm_planner::{Observation, ObservedInstance};
use mvm_proto::document::Resources;
use mvm_proto::{DesiredState, Phase, PoolId, TenantId};

const NAMES: [&str; 6] = ["vcpus", "memory", "disk", "running", "warm", "instances"];

/// In the order of [`NAMES`].
type Used = [u64; 6];

fn of(phase: Phase, size: &Resources, staged: bool) -> Used {
    let (vcpus, mem, disk) = (u64::from(size.vcpus), size.mem_mib, size.data_disk_mib);
    match phase {
        Phase::Running => [vcpus, mem, disk, u64::from(!staged), 0, 1],
        Phase::Warm => [0, mem, disk, 0, 1, 1],
        Phase::Sleeping => [0, 0, disk + mem, 0, 0, 1],
        Phase::Destroyed => [0; 6],
        _ => [0, 0, disk, 0, 0, 1],
    }
}

fn now(instance: &ObservedInstance) -> Used {
    let size = &instance.resources;
    let is_kept_running = instance.phase == Phase::Running && instance.moving_to == Some(Phase::Running);
    let target = instance.staging.filter(|staging| *staging != Phase::Running && !is_kept_running);
    let mut used = of(instance.phase, size, target.is_some());
    let most = |used: &mut Used, other: Used| used.iter_mut().zip(other).for_each(|(a, b)| *a = (*a).max(b));
    if let Some(to) = instance.moving_to {
        most(&mut used, of(to, size, target.is_some()));
        if to == instance.phase || instance.phase == Phase::Stopped && to != Phase::Destroyed {
            most(&mut used, of(Phase::Running, size, target.is_some() || to != Phase::Running));
        }
        // A place to rest is taken when the boot begins.
        if let (Phase::Running, Some(target)) = (to, target) {
            most(&mut used, of(target, size, false));
        }
    }
    used
}

fn used(observed: &Observation, tenant: Option<&TenantId>, pool: Option<&PoolId>) -> Used {
    let mut total = [0; 6];
    for i in &observed.instances {
        if tenant.is_none_or(|t| i.tenant == *t) && pool.is_none_or(|p| i.pool == *p) {
            total.iter_mut().zip(now(i)).for_each(|(sum, part)| *sum += part);
        }
    }
    total
}

/// No limit is passed that was not passed before, and none that was is passed by more.
#[allow(dead_code, reason = "not every file of laws needs all of it")]
pub(crate) fn inside(desired: &DesiredState, before: &Observation, after: &Observation) {
    let passed = passed(desired, before, after);
    assert!(passed.is_empty(), "{passed:?}");
}

/// The same as a question.
#[allow(dead_code, reason = "not every file of laws needs all of it")]
pub(crate) fn are_kept(desired: &DesiredState, before: &Observation, after: &Observation) -> bool {
    passed(desired, before, after).is_empty()
}

fn passed(desired: &DesiredState, before: &Observation, after: &Observation) -> Vec<String> {
    let mut passed = Vec::new();
    let mut check = |what: &str, limits: [u64; 6], was: Used, is: Used| {
        for (name, ((limit, was), is)) in NAMES.into_iter().zip(limits.into_iter().zip(was).zip(is)) {
            if is > limit.max(was) {
                passed.push(format!("{name} of {what}: {is} passes {limit} (was {was})"));
            }
        }
    };
    let capacity = &after.capacity;
    let most = u64::MAX;
    let node = [
        u64::from(capacity.vcpus),
        capacity.mem_mib,
        capacity.disk_mib,
        most,
        most,
        u64::from(capacity.max_instances),
    ];
    check("the node", node, used(before, None, None), used(after, None, None));
    for tenant in &desired.tenants {
        let quotas = &tenant.quotas;
        let id = Some(&tenant.tenant_id);
        let limits = [
            u64::from(quotas.max_vcpus),
            quotas.max_mem_mib,
            quotas.max_disk_gib * 1024,
            u64::from(quotas.max_running),
            u64::from(quotas.max_warm),
            most,
        ];
        check("a tenant", limits, used(before, id, None), used(after, id, None));
        for pool in &tenant.pools {
            let per_pool = u64::from(quotas.max_instances_per_pool);
            let (was, is) = (used(before, id, Some(&pool.pool_id)), used(after, id, Some(&pool.pool_id)));
            check("a pool", [most, most, most, most, most, per_pool], was, is);
        }
    }
    passed
}
