//! Random documents and random worlds.

use std::collections::BTreeSet;

use mvm_planner::{Capacity, Observation, ObservedInstance, Workload, revision_of};
use mvm_proto::document::{
    DesiredCounts, Egress, Network, Pool, PoolRole, Quotas, Resources, Restart, RuntimePolicy, SleepPolicy,
    Tenant, User, WorkloadOverride,
};
use mvm_proto::{DesiredState, Digest, InstanceId, Phase, Timestamp, WorkloadState};
use proptest::collection::{btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::select;

/// When the random worlds are seen; instances date from the hour before.
pub(crate) const NOW_MS: i64 = 1_800_000_000_000;

pub(crate) const AMPLE: Quotas = Quotas {
    max_vcpus: 100_000,
    max_mem_mib: 100_000_000,
    max_running: 10_000,
    max_warm: 10_000,
    max_pools: 100,
    max_instances_per_pool: 10_000,
    max_disk_gib: 100_000,
};

pub(crate) const AMPLE_CAPACITY: Capacity =
    Capacity { vcpus: 1_000_000, mem_mib: 1_000_000_000, disk_mib: 1_000_000_000, max_instances: 1_000_000 };

/// A build with `MVM_PLANNER_CASES` set runs as many instead.
pub(crate) fn cases() -> ProptestConfig {
    let cases = option_env!("MVM_PLANNER_CASES").and_then(|n| n.parse().ok()).unwrap_or(10_000_u32);
    // Some laws want fleets with a pool in them: as many without one are passed over.
    let max_local_rejects = cases.saturating_mul(8);
    ProptestConfig { cases, failure_persistence: None, max_local_rejects, ..ProptestConfig::default() }
}

/// Which kinds of trouble a fleet may have.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Kinds {
    pub(crate) tight: bool,
    pub(crate) guards: bool,
    pub(crate) pressure: bool,
}

pub(crate) fn fleet(kinds: Kinds) -> impl Strategy<Value = (DesiredState, Observation)> {
    document(kinds).prop_flat_map(move |desired| {
        let capacity = if kinds.tight {
            (1..24_u32, 64..4096_u64, 64..8192_u64, 1..24_u32)
                .prop_map(|(vcpus, mem_mib, disk_mib, max_instances)| Capacity {
                    vcpus,
                    mem_mib,
                    disk_mib,
                    max_instances,
                })
                .boxed()
        } else {
            Just(AMPLE_CAPACITY).boxed()
        };
        let instances = vec(instance(desired.clone(), kinds), 0..16);
        let pressed = any::<bool>();
        (Just(desired), capacity, instances, pressed).prop_map(
            move |(desired, capacity, mut instances, pressed)| {
                for (index, instance) in instances.iter_mut().enumerate() {
                    instance.id = InstanceId::from_bits(u32::try_from(index).unwrap());
                }
                let mut taken = BTreeSet::new();
                for instance in &mut instances {
                    // No two instances of a tenant have one address.
                    let tenant = instance.tenant.clone();
                    instance.offset = instance.offset.filter(|offset| taken.insert((tenant, *offset)));
                }
                let memory_pressure = kinds.pressure && pressed;
                (desired, Observation { capacity, instances, blocked: Vec::new(), memory_pressure })
            },
        )
    })
}

fn document(kinds: Kinds) -> impl Strategy<Value = DesiredState> {
    (vec(tenant(kinds), 0..4), any::<bool>(), any::<bool>()).prop_map(
        |(mut tenants, tenants_too, pools_too)| {
            for (index, tenant) in tenants.iter_mut().enumerate() {
                tenant.tenant_id = format!("t{index}").parse().unwrap();
                for (index, pool) in tenant.pools.iter_mut().enumerate() {
                    pool.pool_id = format!("p{index}").parse().unwrap();
                }
            }
            DesiredState {
                schema_version: 1,
                node_id: "node".parse().unwrap(),
                cluster: None,
                tenants,
                prune_unknown_tenants: tenants_too,
                prune_unknown_pools: pools_too,
                removed_tenants: Vec::new(),
            }
        },
    )
}

fn tenant(kinds: Kinds) -> impl Strategy<Value = Tenant> {
    let quotas = if kinds.tight {
        (0..16_u32, 0..2048_u64, 0..6_u32, 0..4_u32, 0..4_u32, 0..8_u32, 0..6_u64)
            .prop_map(|(max_vcpus, max_mem_mib, max_running, max_warm, max_pools, per_pool, max_disk_gib)| {
                Quotas {
                    max_vcpus,
                    max_mem_mib,
                    max_running,
                    max_warm,
                    max_pools,
                    max_instances_per_pool: per_pool,
                    max_disk_gib,
                }
            })
            .boxed()
    } else {
        Just(AMPLE).boxed()
    };
    let tenant = (vec(pool(kinds), 0..4), quotas, network(kinds), any::<[bool; 2]>());
    tenant.prop_map(move |(pools, quotas, network, [pinned, secret])| Tenant {
        tenant_id: "t".parse().unwrap(),
        pinned: pinned && kinds.guards,
        network,
        quotas,
        secrets_hash: secret.then(|| Digest::of(b"the tenant's")),
        egress: Egress::default(),
        pools,
    })
}

fn network(kinds: Kinds) -> impl Strategy<Value = Network> {
    let numbers = |most: u16, count: usize| {
        btree_set(0..most, 0..=count).prop_map(|numbers| numbers.into_iter().collect::<Vec<_>>())
    };
    let shared = move |(blocks, reserved): (Option<Vec<u16>>, Vec<u16>)| {
        // Where there is to be room for all, the node has the whole subnet.
        let (address_blocks, reserved_offsets) =
            if kinds.tight { (blocks, reserved) } else { (None, Vec::new()) };
        let ipv4_subnet = "10.1.0.0/16".to_owned().try_into().unwrap();
        Network { tenant_net_id: 1, ipv4_subnet, address_blocks, reserved_offsets }
    };
    (option::of(numbers(3, 2)), numbers(48, 40)).prop_map(shared)
}

fn pool(kinds: Kinds) -> impl Strategy<Value = Pool> {
    let role = prop_oneof![Just(PoolRole::Gateway), Just(PoolRole::Builder), Just(PoolRole::Worker)];
    let counts = (0..4_u32, 0..4_u32, 0..4_u32);
    let times = (prop_oneof![Just(0_u64), Just(60)], prop_oneof![Just(0_u64), Just(30)], 0..3600_u64);
    let restart = prop_oneof![Just(Restart::Always), Just(Restart::OnFailure), Just(Restart::Never)];
    let made_of = (option::of(0..3_u32), any::<bool>());
    (role, counts, size(), times, any::<[bool; 3]>(), restart, made_of).prop_map(
        move |(role, counts, size, times, [pinned, critical, new], restart, (run_as, secret))| Pool {
            pool_id: "p".parse().unwrap(),
            flake_ref: if new { "builtin:new" } else { "builtin:old" }.to_owned(),
            profile: "minimal".parse().unwrap(),
            image_digest: None,
            role,
            instance_resources: size,
            desired_counts: DesiredCounts { running: counts.0, warm: counts.1, sleeping: counts.2 },
            pinned: pinned && kinds.guards,
            critical: critical && kinds.guards,
            runtime_policy: RuntimePolicy {
                min_running_seconds: times.0,
                min_warm_seconds: times.1,
                ..RuntimePolicy::default()
            },
            sleep_policy: SleepPolicy::default(),
            seccomp_policy: Default::default(),
            snapshot_compression: Default::default(),
            snapshot_encryption: false,
            stopped_retention_seconds: times.2,
            persist: None,
            warmup: None,
            io_limits: None,
            restart,
            health: None,
            workload: run_as.map(|id| {
                Box::new(WorkloadOverride { user: Some(User::Id(id)), ..WorkloadOverride::default() })
            }),
            secrets_hash: secret.then(|| Digest::of(b"the pool's")),
            update: None,
        },
    )
}

/// Its program does not work, and its pool has it started again.
#[allow(dead_code, reason = "not every file of laws looks at programs")]
pub(crate) fn is_brought_back(desired: &DesiredState, instance: &ObservedInstance) -> bool {
    let is_its = |(t, p): &(&Tenant, &Pool)| t.tenant_id == instance.tenant && p.pool_id == instance.pool;
    let state = instance.workload.as_ref().map_or(WorkloadState::Running, |workload| workload.state);
    instance.phase == Phase::Running
        && desired.pools().find(is_its).is_some_and(|(_, pool)| state.is_restarted(pool.restart))
}

fn size() -> impl Strategy<Value = Resources> {
    (1..4_u32, prop_oneof![Just(128_u64), Just(512)], prop_oneof![Just(0_u64), Just(256)])
        .prop_map(|(vcpus, mem_mib, data_disk_mib)| Resources { vcpus, mem_mib, data_disk_mib })
}

fn instance(desired: DesiredState, kinds: Kinds) -> impl Strategy<Value = ObservedInstance> {
    let phase = prop_oneof![
        3 => Just(Phase::Running),
        2 => Just(Phase::Warm),
        2 => Just(Phase::Sleeping),
        2 => Just(Phase::Stopped),
        1 => Just(Phase::Created),
        1 => Just(Phase::Ready),
        1 => Just(Phase::Failed),
    ];
    // Often young, and often as old as another one.
    let age = || prop_oneof![2 => 0..3600_i64, 1 => 0..90_i64, 1 => (0..6_i64).prop_map(|n| n * 300)];
    let ages = (age(), option::of(age()), option::of(age()), option::of(-600..600_i64));
    let staging = prop_oneof![
        6 => Just(None),
        1 => Just(Some(Phase::Warm)),
        1 => Just(Some(Phase::Sleeping)),
        1 => Just(Some(Phase::Running)),
    ];
    let lent = (any::<bool>(), any::<bool>(), any::<bool>());
    let home = option::of(prop_oneof![Just(Phase::Running), Just(Phase::Warm), Just(Phase::Sleeping)]);
    let of = (0..5_usize, 0..4_usize, any::<bool>());
    let workload = prop_oneof![
        3 => Just(None),
        1 => (select(&WorkloadState::ALL), 0..700_i64, 0..6_u32).prop_map(Some),
    ];
    let offset = option::of(3..64_u32);
    let retry = (option::of(-60..600_i64), workload, offset);
    (of, phase, ages, staging, lent, home, size(), retry).prop_map(
        move |(
            (tenant, pool, current),
            phase,
            ages,
            staging,
            lent,
            home,
            resources,
            (retry, workload, offset),
        )| {
            let at = |seconds: i64| Timestamp::from_unix_ms(NOW_MS - seconds * 1000);
            let named = desired.tenants.get(tenant).and_then(|t| t.pools.get(pool).map(|p| (t, p)));
            let (revision, resources) = match named {
                Some((t, p)) if current => (revision_of(t, p), p.instance_resources),
                _ => (Digest::of(b"an older revision"), resources),
            };
            let guarded = kinds.guards;
            // A guest whose program is down says nothing of being idle.
            let is_up =
                phase != Phase::Running || workload.is_none_or(|(state, ..)| state == WorkloadState::Running);
            ObservedInstance {
                tenant: format!("t{tenant}").parse().unwrap(),
                pool: format!("p{pool}").parse().unwrap(),
                id: InstanceId::from_bits(0),
                phase,
                since: at(ages.0),
                revision,
                resources,
                last_used_at: ages.1.map(at),
                idle_since: ages.2.filter(|_| is_up).map(at),
                override_until: ages.3.filter(|_| guarded).map(at),
                moving: false,
                claimed: guarded && lent.0 && lent.1,
                on_demand: guarded && lent.2,
                home: home.filter(|_| guarded),
                staging: staging.filter(|_| phase == Phase::Running),
                moving_to: None,
                retry_not_before: retry.map(at),
                failures: u32::from(retry.is_some()),
                workload: workload
                    .map(|(state, age, restarts)| Box::new(Workload { state, since: at(age), restarts })),
                offset,
            }
        },
    )
}
