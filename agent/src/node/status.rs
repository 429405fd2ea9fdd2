//! What the node says of itself after a pass.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::NodePlan;
use mvm_proto::document::{BLOCK_SIZE, Network, Pool, Resources};
use mvm_proto::status::{
    Condition, ConditionKind, Counts, NodeStatus, PoolStatus, TenantAddresses, TenantRemoval, Usage,
    set_condition,
};
use mvm_proto::{InstanceId, Phase, Timestamp, WorkloadState};

use crate::instance::record::Record;
use crate::node::pool_readiness::PoolReadiness;
use crate::node::{CurrentDocument, removals};

/// How many deferred steps a condition names: the rest are in their pools' status.
const DEFERRED_SHOWN: usize = 3;

/// Everything that a status is made of.
#[derive(Debug)]
pub(crate) struct Facts<'a> {
    pub(crate) now: Timestamp,
    pub(crate) current_document: Option<&'a CurrentDocument>,
    pub(crate) records: &'a [Record],
    pub(crate) ready: &'a PoolReadiness<'a>,
    /// Of instances that run: what they use of their processors, where it was measured.
    pub(crate) used_percent: BTreeMap<InstanceId, u32>,
    pub(crate) memory_pressure: bool,
    pub(crate) plan: Option<&'a NodePlan>,
    pub(crate) converged: bool,
    pub(crate) write_error: Option<String>,
    pub(crate) driver_error: Option<String>,
    pub(crate) orphans: &'a [InstanceId],
    /// Whether images and secrets are there.
    pub(crate) needs: [Condition; 2],
    /// Whether image keys vouch for what instances here were booted from.
    pub(crate) images: Condition,
    /// Whether the tenants' networks and limits are as they should be, and their guests can resolve names.
    pub(crate) bounds: [Condition; 3],
    /// Whether sessions are in their stores.
    pub(crate) sessions: Condition,
    /// How far the removal of tenants is.
    pub(crate) removals: Vec<TenantRemoval>,
    pub(crate) next_reconcile_at: Timestamp,
}

/// Brings `status` up to date; conditions that did not change keep their times.
pub(crate) fn update(status: &mut NodeStatus, facts: &Facts<'_>) {
    let now = facts.now;
    status.observed_at = now.to_string();
    status.last_reconcile_at = now.to_string();
    status.next_reconcile_at = facts.next_reconcile_at.to_string();
    status.accepted = facts.current_document.and_then(|current_document| current_document.mark.clone());
    if facts.converged {
        status.converged.clone_from(&status.accepted);
    }
    let (images, sessions) = (facts.images.clone(), facts.sessions.clone());
    let own = [
        converged(facts),
        current(facts),
        disk(facts),
        driver(facts),
        accounted(facts),
        workloads(facts),
        memory(facts),
        images,
        sessions,
        removals::condition(&facts.removals, now),
    ];
    for condition in own.into_iter().chain(facts.needs.clone()).chain(facts.bounds.clone()) {
        set_condition(&mut status.conditions, condition);
    }
    status.usage = Some(usage(facts.records));
    status.pools = pools(facts);
    status.removals.clone_from(&facts.removals);
    status.addresses = addresses(facts);
}

/// Which addresses instances have, by tenant: those in blocks of the document by their block, others one by one. All are
/// in its blocks where the document gives a tenant its whole subnet, or does not name it any more.
fn addresses(facts: &Facts<'_>) -> Vec<TenantAddresses> {
    let tenants =
        facts.current_document.iter().flat_map(|current_document| &current_document.desired.tenants);
    let own: BTreeMap<&str, &Network> =
        tenants.map(|tenant| (tenant.tenant_id.as_str(), &tenant.network)).collect();
    let mut found: BTreeMap<&str, (BTreeSet<u32>, BTreeSet<u32>)> = BTreeMap::new();
    for record in facts.records.iter().filter(|record| record.phase != Phase::Destroyed) {
        let (blocks, offsets) = found.entry(record.tenant.as_str()).or_default();
        let block = record.offset / BLOCK_SIZE;
        let given = own.get(record.tenant.as_str()).and_then(|network| network.address_blocks.as_ref());
        if given.is_none_or(|given| given.iter().any(|own| u32::from(*own) == block)) {
            blocks.insert(block);
        } else {
            offsets.insert(record.offset);
        }
    }
    let told = found.into_iter().map(|(tenant, (blocks, offsets))| TenantAddresses {
        tenant_id: tenant.to_owned(),
        blocks: blocks.into_iter().collect(),
        offsets: offsets.into_iter().collect(),
    });
    told.collect()
}

fn converged(facts: &Facts<'_>) -> Condition {
    let new =
        |holds, reason, message| Condition::new(ConditionKind::Converged, holds, reason, message, facts.now);
    let Some(plan) = facts.plan.filter(|_| facts.current_document.is_some()) else {
        return new(false, "NoDocument", "no document was accepted yet".to_owned());
    };
    if facts.converged {
        return new(true, "Converged", String::new());
    }
    if !plan.steps.is_empty() || plan.deferred.is_empty() {
        return new(false, "Working", format!("{} step(s) planned", plan.steps.len()));
    }
    let named = plan.deferred.iter().take(DEFERRED_SHOWN);
    let shown: Vec<_> = named.map(|d| format!("{}/{} {d}", d.tenant, d.pool)).collect();
    let more = plan.deferred.len().saturating_sub(DEFERRED_SHOWN);
    let rest = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    new(false, "Deferred", format!("{}{rest}", shown.join("; ")))
}

fn current(facts: &Facts<'_>) -> Condition {
    let new = |holds, reason, message: String| {
        Condition::new(ConditionKind::DesiredStateCurrent, holds, reason, message, facts.now)
    };
    match facts.current_document {
        None => new(false, "NoDocument", "no document was accepted yet".to_owned()),
        Some(current_document @ CurrentDocument { expires_at: Some(at), .. })
            if current_document.is_expired(facts.now) =>
        {
            let message = format!(
                "the document expired at {at}; existing instances are kept, and nothing is created, replaced or removed"
            );
            new(false, "Expired", message)
        }
        Some(CurrentDocument { mark: None, .. }) => new(true, "LocalFile", String::new()),
        Some(_) => new(true, "Accepted", String::new()),
    }
}

fn disk(facts: &Facts<'_>) -> Condition {
    match &facts.write_error {
        None => Condition::new(ConditionKind::DiskWritable, true, "Written", "", facts.now),
        Some(error) => {
            Condition::new(ConditionKind::DiskWritable, false, "WriteFailed", error.clone(), facts.now)
        }
    }
}

fn driver(facts: &Facts<'_>) -> Condition {
    match &facts.driver_error {
        None => Condition::new(ConditionKind::DriverReady, true, "Answers", "", facts.now),
        Some(error) => Condition::new(ConditionKind::DriverReady, false, "Failed", error.clone(), facts.now),
    }
}

fn memory(facts: &Facts<'_>) -> Condition {
    let new = |holds, reason, message: &str| {
        Condition::new(ConditionKind::MemoryAvailable, holds, reason, message, facts.now)
    };
    match facts.memory_pressure {
        false => new(true, "NoPressure", ""),
        true => new(
            false,
            "Pressure",
            "processes of this machine wait for memory; idle instances are put to sleep",
        ),
    }
}

fn accounted(facts: &Facts<'_>) -> Condition {
    let new = |holds, reason, message: String| {
        Condition::new(ConditionKind::VmsAccountedFor, holds, reason, message, facts.now)
    };
    match facts.orphans {
        [] => new(true, "AllKnown", String::new()),
        orphans => {
            let ids: Vec<_> = orphans.iter().take(DEFERRED_SHOWN).map(ToString::to_string).collect();
            new(
                false,
                "UnknownVms",
                format!("{} VM(s) or leftovers without a record: {}", orphans.len(), ids.join(", ")),
            )
        }
    }
}

/// Its program does not work and should: it failed, or is to be started again.
fn is_missed(record: &Record) -> bool {
    let state = record.workload.as_ref().map_or(WorkloadState::Running, |workload| workload.state);
    let failed = matches!(state, WorkloadState::Failed | WorkloadState::Unhealthy);
    record.phase == Phase::Running && (failed || record.is_brought_back())
}

/// Programs that do not work and should, those that are started again and again first.
fn workloads(facts: &Facts<'_>) -> Condition {
    let mut found: Vec<(&'static str, String)> = Vec::new();
    for record in facts.records.iter().filter(|record| record.phase == Phase::Running) {
        let Some(workload) = record.workload.as_deref() else { continue };
        let reason = match workload.state {
            _ if workload.is_in_a_crash_loop(facts.now) => "CrashLoop",
            _ if !is_missed(record) => continue,
            WorkloadState::Unhealthy => "Unhealthy",
            WorkloadState::Completed => "Ended",
            WorkloadState::Failed | WorkloadState::Running => "Failed",
        };
        let (state, restarts) = (workload.state.as_str(), workload.restarts);
        let subject = format!("{}/{}/{}", record.tenant, record.pool, record.id);
        found.push((reason, format!("{subject} {state}, started again {restarts} times in a row")));
    }
    found.sort();
    let Some((reason, _)) = found.first() else {
        return Condition::new(ConditionKind::WorkloadsRunning, true, "AllRunning", "", facts.now);
    };
    let more = found.len().saturating_sub(DEFERRED_SHOWN);
    let rest = if more > 0 { format!(" (and {more} more)") } else { String::new() };
    let shown: Vec<_> = found.iter().take(DEFERRED_SHOWN).map(|(_, text)| text.as_str()).collect();
    Condition::new(
        ConditionKind::WorkloadsRunning,
        false,
        reason,
        format!("{}{rest}", shown.join("; ")),
        facts.now,
    )
}

fn usage(records: &[Record]) -> Usage {
    let mut usage = Usage::default();
    let used_bytes = records.iter().fold(0_u64, |sum, record| sum.saturating_add(record.disk_used_bytes));
    usage.disk_used_mib = used_bytes.div_ceil(1024 * 1024);
    let memory_mib = |phase: Phase| {
        let those = records.iter().filter(|record| record.phase == phase);
        let bytes = those.fold(0_u64, |sum, record| sum.saturating_add(record.memory_used()));
        bytes.div_ceil(1024 * 1024)
    };
    (usage.running_memory_mib, usage.warm_memory_mib) = (memory_mib(Phase::Running), memory_mib(Phase::Warm));
    for record in records {
        allocate(&mut usage, record.phase, &record.resources, 1);
    }
    usage
}

/// What `count` more instances of this size may use in this phase.
fn allocate(usage: &mut Usage, phase: Phase, size: &Resources, count: u32) {
    let many = u64::from(count);
    usage.instances = usage.instances.saturating_add(count);
    usage.disk_mib = usage.disk_mib.saturating_add(size.data_disk_mib.saturating_mul(many));
    let memory = size.mem_mib.saturating_mul(many);
    match phase {
        Phase::Running => {
            usage.vcpus = usage.vcpus.saturating_add(size.vcpus.saturating_mul(count));
            usage.mem_mib = usage.mem_mib.saturating_add(memory);
        }
        Phase::Warm => usage.mem_mib = usage.mem_mib.saturating_add(memory),
        Phase::Sleeping => usage.disk_mib = usage.disk_mib.saturating_add(memory),
        _ => {}
    }
}

/// What the instances may use that a pool asks for.
fn requested(pool: &Pool) -> Usage {
    let (mut usage, counts) = (Usage::default(), &pool.desired_counts);
    for (phase, count) in
        [(Phase::Running, counts.running), (Phase::Warm, counts.warm), (Phase::Sleeping, counts.sleeping)]
    {
        allocate(&mut usage, phase, &pool.instance_resources, count);
    }
    usage
}

/// What pools use of processors is told in steps of this.
const CPU_STEP_PERCENT: u32 = 5;

/// The document's pools in its order, then those that run here without being named.
fn pools(facts: &Facts<'_>) -> Vec<PoolStatus> {
    let mut found: BTreeMap<(&str, &str), PoolStatus> = BTreeMap::new();
    for record in facts.records {
        let pool =
            found.entry((record.tenant.as_str(), record.pool.as_str())).or_insert_with(|| PoolStatus {
                tenant_id: record.tenant.to_string(),
                pool_id: record.pool.to_string(),
                desired: Some(Counts::default()),
                actual: Some(Counts::default()),
                ..PoolStatus::default()
            });
        allocate(pool.allocated.get_or_insert_default(), record.phase, &record.resources, 1);
        let actual = pool.actual.get_or_insert_default();
        match record.phase {
            Phase::Running => {
                actual.running += 1;
                actual.down += u32::from(is_missed(record));
                if let Some(used) = facts.used_percent.get(&record.id) {
                    let sum = pool.cpu_percent.get_or_insert_default();
                    *sum = sum.saturating_add(*used);
                }
            }
            Phase::Warm => actual.warm += 1,
            Phase::Sleeping => actual.sleeping += 1,
            Phase::Failed => pool.failed += 1,
            Phase::Created | Phase::Ready | Phase::Stopped => pool.stopped += 1,
            Phase::Destroyed => {}
        }
    }
    let mut deferred: BTreeMap<(&str, &str), Vec<String>> = BTreeMap::new();
    for step in facts.plan.into_iter().flat_map(|plan| &plan.deferred) {
        deferred.entry((step.tenant.as_str(), step.pool.as_str())).or_default().push(step.to_string());
    }
    let mut pools = Vec::new();
    for (tenant, pool) in
        facts.current_document.iter().flat_map(|current_document| current_document.desired.pools())
    {
        let key = (tenant.tenant_id.as_str(), pool.pool_id.as_str());
        let seen = found.remove(&key).unwrap_or_default();
        let counts = &pool.desired_counts;
        let of_pool = facts.ready.pool(tenant, pool);
        pools.push(PoolStatus {
            tenant_id: tenant.tenant_id.to_string(),
            pool_id: pool.pool_id.to_string(),
            desired: Some(Counts {
                running: counts.running,
                warm: counts.warm,
                sleeping: counts.sleeping,
                down: 0,
            }),
            actual: Some(seen.actual.unwrap_or_default()),
            allocated: Some(seen.allocated.unwrap_or_default()),
            requested: Some(requested(pool)),
            managed: true,
            revision: of_pool.revision.to_string(),
            current: Some(of_pool.current),
            claimable: of_pool.claimable,
            has_template: of_pool.has_template,
            has_image: of_pool.has_image,
            serving: of_pool.rollout.serving,
            outdated: of_pool.rollout.outdated,
            surge: of_pool.rollout.surge,
            failing: of_pool.rollout.failing.unwrap_or_default(),
            deferred: deferred.remove(&key).unwrap_or_default(),
            // Finer than this it would change with every look.
            cpu_percent: seen.cpu_percent.map(|sum| sum.div_ceil(CPU_STEP_PERCENT) * CPU_STEP_PERCENT),
            ..seen
        });
    }
    pools.extend(found.into_values());
    pools
}
