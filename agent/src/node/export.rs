//! Makes a document from what runs: counts and specs are those of the instances, the rest is that of the document in force.
//!
//! Given to the planner with the same observation, it plans no step. A pool that can't be expressed without causing one (the
//! document does not name it, and its records don't have the full spec) is left out, and a note says so.

use std::collections::{BTreeMap, BTreeSet};

use mvm_planner::revision_of;
use mvm_proto::document::{
    DesiredCounts, Egress, Network, Pool, PoolRole, Quotas, RuntimePolicy, SCHEMA_VERSION, SeccompPolicy,
    SleepPolicy, Subnet, Tenant, default_stopped_retention,
};
use mvm_proto::{DesiredState, NodeId, Phase, PoolId, ProfileId, TenantId};
use serde::Serialize;

use crate::instance::record::Record;

/// Profiles to try for a pool that no document names, besides those that the document in force uses.
const USUAL_PROFILES: [&str; 2] = ["default", "minimal"];

const MIB_PER_GIB: u64 = 1024;

/// What was exported, and what could not be.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Export {
    pub document: DesiredState,
    /// For people: what is missing from the document, or differs from what runs, and why.
    pub notes: Vec<String>,
}

type Groups<'a> = BTreeMap<(TenantId, PoolId), Vec<&'a Record>>;

/// A document for `node` that asks for what `records` say is there.
#[must_use]
pub fn export(node: &NodeId, current_document: Option<&DesiredState>, records: &[Record]) -> Export {
    let mut groups: Groups<'_> = BTreeMap::new();
    for record in records {
        groups.entry((record.tenant.clone(), record.pool.clone())).or_default().push(record);
    }
    let mut notes = Vec::new();
    let mut document = current_document.cloned().unwrap_or_else(|| DesiredState {
        schema_version: SCHEMA_VERSION,
        node_id: node.clone(),
        cluster: None,
        tenants: Vec::new(),
        prune_unknown_tenants: false,
        prune_unknown_pools: false,
        removed_tenants: Vec::new(),
    });
    document.node_id = node.clone();
    // What is left out must be left alone.
    document.prune_unknown_tenants = false;
    document.prune_unknown_pools = false;
    document.removed_tenants = Vec::new();
    for tenant in &mut document.tenants {
        for index in 0..tenant.pools.len() {
            let key = (tenant.tenant_id.clone(), tenant.pools[index].pool_id.clone());
            let members = groups.remove(&key).unwrap_or_default();
            describe(tenant, index, &members, &mut notes);
        }
    }
    for ((tenant, pool), members) in groups {
        if let Err(why) = add(&mut document, &tenant, &pool, &members) {
            notes.push(format!("{tenant}/{pool} is left out: {why}"));
        }
    }
    for tenant in &mut document.tenants {
        let mine = records.iter().filter(|record| record.tenant == tenant.tenant_id);
        tenant.quotas = raised(tenant.quotas, tenant.pools.len(), mine);
    }
    Export { document, notes }
}

/// Fits a named pool to its instances.
fn describe(tenant: &mut Tenant, index: usize, members: &[&Record], notes: &mut Vec<String>) {
    tenant.pools[index].desired_counts = counts(members);
    let revision = revision_of(tenant, &tenant.pools[index]);
    let live: Vec<_> = members.iter().filter(|record| place(record).is_some()).collect();
    if live.iter().all(|record| record.revision == revision) {
        return;
    }
    let first = live[0];
    let mut made = tenant.pools[index].clone();
    take_makings(&mut made, first);
    if live.iter().all(|record| record.revision == first.revision)
        && revision_of(tenant, &made) == first.revision
    {
        tenant.pools[index] = made;
        return;
    }
    let name = format!("{}/{}", tenant.tenant_id, made.pool_id);
    notes.push(format!("{name}: not all instances are of the document's revision; they would be replaced"));
}

fn take_makings(pool: &mut Pool, record: &Record) {
    pool.flake_ref.clone_from(&record.flake_ref);
    pool.image_digest = record.image_digest;
    pool.instance_resources = record.resources;
    pool.workload.clone_from(&record.workload_override);
    if record.own_secrets {
        pool.secrets_hash = record.secrets;
    }
}

/// Adds a pool that the document does not name.
fn add(
    document: &mut DesiredState,
    tenant_id: &TenantId,
    pool_id: &PoolId,
    members: &[&Record],
) -> Result<(), String> {
    let Some(first) = members.iter().find(|record| place(record).is_some()).or(members.first()) else {
        return Ok(());
    };
    let profiles = profiles(document);
    let existing = document.tenants.iter().position(|tenant| tenant.tenant_id == *tenant_id);
    let mut tenant = match existing {
        Some(index) => document.tenants[index].clone(),
        None => new_tenant(document, tenant_id, members)?,
    };
    let fits = |pool: &Pool| {
        let revision = revision_of(&tenant, pool);
        members.iter().filter(|record| place(record).is_some()).all(|record| record.revision == revision)
    };
    let candidates = profiles.into_iter().map(|profile| new_pool(pool_id, profile, first, counts(members)));
    let pool = { candidates }.find(fits).ok_or("its records do not tell everything that it is made of")?;
    tenant.pools.push(pool);
    match existing {
        Some(index) => document.tenants[index] = tenant,
        None => document.tenants.push(tenant),
    }
    Ok(())
}

fn profiles(document: &DesiredState) -> BTreeSet<ProfileId> {
    let named = document.pools().map(|(_, pool)| pool.profile.clone());
    named.chain(USUAL_PROFILES.iter().filter_map(|name| name.parse().ok())).collect()
}

fn new_pool(pool_id: &PoolId, profile: ProfileId, record: &Record, desired_counts: DesiredCounts) -> Pool {
    Pool {
        pool_id: pool_id.clone(),
        flake_ref: record.flake_ref.clone(),
        profile,
        image_digest: record.image_digest,
        role: PoolRole::default(),
        instance_resources: record.resources,
        desired_counts,
        pinned: false,
        critical: false,
        runtime_policy: RuntimePolicy::default(),
        sleep_policy: SleepPolicy::default(),
        seccomp_policy: SeccompPolicy::default(),
        snapshot_compression: record.at_rest.compression,
        snapshot_encryption: record.at_rest.encryption,
        stopped_retention_seconds: default_stopped_retention(),
        persist: None,
        warmup: record.warmup.clone().map(Box::new),
        io_limits: record.io_limits.clone(),
        restart: record.restart,
        health: record.health.clone(),
        workload: record.workload_override.clone(),
        secrets_hash: record.secrets.filter(|_| record.own_secrets),
        update: None,
    }
}

/// A tenant whose network is told by its instances' addresses alone; how large it is, is not.
fn new_tenant(document: &DesiredState, id: &TenantId, members: &[&Record]) -> Result<Tenant, String> {
    let subnet = [24_u8, 16].into_iter().find_map(|prefix| {
        let first = members.first()?;
        let network = std::net::Ipv4Addr::from_bits(first.address.to_bits().checked_sub(first.offset)?);
        let subnet: Subnet = format!("{network}/{prefix}").parse().ok()?;
        let holds = members.iter().all(|r| subnet.contains(r.address));
        let free = document.tenants.iter().all(|t| !t.network.ipv4_subnet.overlaps(&subnet));
        (holds && free).then_some(subnet)
    });
    let ipv4_subnet = subnet.ok_or("its addresses do not tell its network")?;
    let taken: BTreeSet<u16> = document.tenants.iter().map(|tenant| tenant.network.tenant_net_id).collect();
    let tenant_net_id = (0..=4095).find(|net| !taken.contains(net)).ok_or("no tenant_net_id is free")?;
    let quotas = Quotas {
        max_vcpus: 0,
        max_mem_mib: 0,
        max_running: 0,
        max_warm: 0,
        max_pools: 0,
        max_instances_per_pool: 0,
        max_disk_gib: 0,
    };
    Ok(Tenant {
        tenant_id: id.clone(),
        pinned: false,
        network: Network { tenant_net_id, ipv4_subnet, address_blocks: None, reserved_offsets: Vec::new() },
        quotas,
        secrets_hash: None,
        egress: Egress::default(),
        pools: Vec::new(),
    })
}

/// The count in which an instance has its place; absent: in none.
fn place(record: &Record) -> Option<Phase> {
    let counted = match record.phase {
        Phase::Running | Phase::Warm if record.claimed || record.on_demand => {
            record.home.unwrap_or(Phase::Running)
        }
        Phase::Running => match record.staging {
            // Stands in for another.
            Some(Phase::Running) => return None,
            Some(staged) => staged,
            None => Phase::Running,
        },
        phase => phase,
    };
    matches!(counted, Phase::Running | Phase::Warm | Phase::Sleeping).then_some(counted)
}

fn counts(members: &[&Record]) -> DesiredCounts {
    let count = |phase| {
        let found = members.iter().filter(|record| place(record) == Some(phase)).count();
        u32::try_from(found).unwrap_or(u32::MAX)
    };
    DesiredCounts {
        running: count(Phase::Running),
        warm: count(Phase::Warm),
        sleeping: count(Phase::Sleeping),
    }
}

/// Quotas that hold at least what is there.
fn raised<'a>(quotas: Quotas, pools: usize, records: impl Iterator<Item = &'a Record>) -> Quotas {
    let mut used = Quotas { max_pools: u32::try_from(pools).unwrap_or(u32::MAX), ..quotas };
    let (mut vcpus, mut mem_mib, mut disk_mib, mut running, mut warm) = (0, 0, 0, 0, 0);
    let mut per_pool: BTreeMap<&PoolId, u32> = BTreeMap::new();
    for record in records {
        let size = &record.resources;
        *per_pool.entry(&record.pool).or_default() += 1;
        disk_mib += size.data_disk_mib;
        match record.phase {
            Phase::Running => {
                running += 1;
                vcpus += size.vcpus;
                mem_mib += size.mem_mib;
            }
            Phase::Warm => {
                warm += 1;
                mem_mib += size.mem_mib;
            }
            Phase::Sleeping => disk_mib += size.mem_mib,
            _ => {}
        }
    }
    used.max_pools = used.max_pools.max(quotas.max_pools);
    used.max_vcpus = used.max_vcpus.max(vcpus);
    used.max_mem_mib = used.max_mem_mib.max(mem_mib);
    used.max_running = used.max_running.max(running);
    used.max_warm = used.max_warm.max(warm);
    used.max_instances_per_pool =
        used.max_instances_per_pool.max(per_pool.values().copied().max().unwrap_or(0));
    used.max_disk_gib = used.max_disk_gib.max(disk_mib.div_ceil(MIB_PER_GIB));
    used
}
