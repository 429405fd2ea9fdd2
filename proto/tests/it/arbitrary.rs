//! Strategies for valid documents: what a property test draws from.
//!
//! Every value is valid by construction, never by filtering, so that shrinking stays quick: subnets come from
//! separate /16 blocks, ids carry their index, and counts are dealt out of what subnet and quota allow.

use std::net::Ipv4Addr;
use std::ops::RangeInclusive;

use proptest::collection::{btree_map, btree_set, vec};
use proptest::option;
use proptest::prelude::*;
use proptest::sample::{select, subsequence};

use mvm_proto::document::{
    DesiredCounts, DesiredState, Egress, EgressMode, ExecCheck, Health, HealthCheck, HttpCheck,
    IO_BYTES_PER_SECOND, IO_OPS_PER_SECOND, IoLimits, MAX_PREFIX, MAX_TENANT_NET_ID, MAX_USER_ID, MIN_PREFIX,
    Network, Persist, Pool, PoolRole, Provenance, Quotas, RemovedTenant, Resources, Restart, RuntimePolicy,
    SCHEMA_VERSION, SeccompPolicy, SignedDocument, SleepPolicy, SnapshotCompression, Subnet, TcpCheck,
    Tenant, Update, UpdateSleeping, User, Warmup, WorkloadOverride,
};
use mvm_proto::json::MAX_INTEGER;
use mvm_proto::{Digest, Timestamp};

/// A valid document with up to four tenants of up to four pools.
pub(crate) fn desired_state() -> impl Strategy<Value = DesiredState> {
    desired_state_of(0..=4, 0..=4)
}

/// A valid document with as many tenants, and pools in each, as these ranges say.
pub(crate) fn desired_state_of(
    tenants: RangeInclusive<usize>,
    pools: RangeInclusive<usize>,
) -> impl Strategy<Value = DesiredState> {
    let blocks = subsequence(private_blocks(), tenants).prop_shuffle();
    let tenants = blocks.prop_flat_map(move |blocks| {
        let tenants: Vec<_> =
            blocks.into_iter().enumerate().map(|(at, block)| tenant(at, block, pools.clone())).collect();
        tenants
    });
    (name(), option::of(name()), tenants, any::<bool>(), any::<bool>(), removed_tenants()).prop_map(
        |(node_id, cluster, tenants, prune_unknown_tenants, prune_unknown_pools, removed)| DesiredState {
            schema_version: SCHEMA_VERSION,
            node_id: parsed(&node_id),
            cluster: cluster.as_deref().map(parsed),
            tenants,
            prune_unknown_tenants,
            prune_unknown_pools,
            removed_tenants: removed,
        },
    )
}

/// Of names that no tenant here has.
fn removed_tenants() -> impl Strategy<Value = Vec<RemovedTenant>> {
    let stores = vec(select(vec!["local", "file:///var/lib/sessions", "s3://acme-sessions/prod"]), 0..3);
    let removed = ("[!-~]{1,64}", stores);
    prop_oneof![3 => Just(Vec::new()), 1 => vec(removed, 1..3)].prop_map(|removed| {
        let removed = removed.into_iter().enumerate();
        let one = |(at, (uid, stores)): (usize, (String, Vec<&str>))| RemovedTenant {
            tenant_id: parsed(&format!("removed-{at}-x")),
            uid,
            session_stores: stores.into_iter().map(str::to_owned).collect(),
        };
        removed.map(one).collect()
    })
}

/// A valid document with its provenance.
pub(crate) fn signed_document() -> impl Strategy<Value = SignedDocument> {
    (provenance(), desired_state()).prop_map(|(provenance, desired)| SignedDocument::new(provenance, desired))
}

pub(crate) fn provenance() -> impl Strategy<Value = Provenance> {
    let number = 1..=MAX_INTEGER;
    // Any time that can be written, and a life of at least a millisecond.
    let times = (0..=4_000_000_000_000_i64, 1..=4_000_000_000_000_i64);
    (name(), number.clone(), number, times).prop_map(|(cluster, epoch, generation, (issued, life))| {
        Provenance {
            cluster: parsed(&cluster),
            epoch,
            generation,
            issued_at: Timestamp::from_unix_ms(issued),
            expires_at: Timestamp::from_unix_ms(issued + life),
        }
    })
}

/// Any text that is an id, but not an instance's.
pub(crate) fn name() -> impl Strategy<Value = String> {
    "[a-z0-9]([a-z0-9-]{0,30}[a-z0-9])?"
}

pub(crate) fn digest() -> impl Strategy<Value = Digest> {
    any::<[u8; 32]>().prop_map(Digest::from_bytes)
}

pub(crate) fn resources() -> impl Strategy<Value = Resources> {
    (1..=32_u32, 32..=65_536_u64, 0..=1_048_576_u64).prop_map(|(vcpus, mem_mib, data_disk_mib)| Resources {
        vcpus,
        mem_mib,
        data_disk_mib,
    })
}

pub(crate) fn sleep_policy() -> impl Strategy<Value = SleepPolicy> {
    (seconds(), seconds(), 0..=100_u32).prop_map(|(a, b, cpu_idle_percent)| SleepPolicy {
        warm_after_seconds: a.min(b),
        sleep_after_seconds: a.max(b),
        cpu_idle_percent,
    })
}

pub(crate) fn runtime_policy() -> impl Strategy<Value = RuntimePolicy> {
    (seconds(), seconds(), seconds(), seconds()).prop_map(|(running, warm, drain, shutdown)| RuntimePolicy {
        min_running_seconds: running,
        min_warm_seconds: warm,
        drain_timeout_seconds: drain,
        graceful_shutdown_seconds: shutdown,
    })
}

fn seconds() -> impl Strategy<Value = u64> {
    prop_oneof![9 => 0..=7_200_u64, 1 => 0..=MAX_INTEGER]
}

/// The first addresses of all private /16 networks.
fn private_blocks() -> Vec<Ipv4Addr> {
    let ten = (0..=255).map(|n| Ipv4Addr::new(10, n, 0, 0));
    let twelve = (16..=31).map(|n| Ipv4Addr::new(172, n, 0, 0));
    ten.chain(twelve).chain([Ipv4Addr::new(192, 168, 0, 0)]).collect()
}

fn subnet(block: Ipv4Addr) -> impl Strategy<Value = Subnet> {
    (MIN_PREFIX..=MAX_PREFIX, any::<u16>()).prop_map(move |(prefix, inside)| {
        let network = (block.to_bits() | u32::from(inside)) & (u32::MAX << (32 - prefix));
        parsed(&format!("{}/{prefix}", Ipv4Addr::from_bits(network)))
    })
}

/// The addresses of a network, whose number is drawn elsewhere.
fn network(ipv4_subnet: Subnet) -> impl Strategy<Value = Network> {
    let ascending = |most: u32| {
        btree_set(0..=u16::try_from(most).unwrap_or(u16::MAX), 0..8)
            .prop_map(|numbers| numbers.into_iter().collect::<Vec<_>>())
    };
    let blocks = option::of(ascending(ipv4_subnet.blocks() - 1));
    (blocks, ascending(ipv4_subnet.addresses() - 1)).prop_map(move |(address_blocks, reserved_offsets)| {
        Network { tenant_net_id: 0, ipv4_subnet, address_blocks, reserved_offsets }
    })
}

fn tenant(at: usize, block: Ipv4Addr, pools: RangeInclusive<usize>) -> impl Strategy<Value = Tenant> {
    (subnet(block).prop_flat_map(network), pools).prop_flat_map(move |(network, pools)| {
        // What each pool may want of each phase, so that all fit the addresses whatever is drawn.
        let share = network.instance_capacity() / (3 * u32::try_from(pools).unwrap_or(1).max(1));
        let pools: Vec<_> = (0..pools).map(|index| pool(index, share.min(1000))).collect();
        let net_ids = 0..=MAX_TENANT_NET_ID;
        let spare = (0..=100_u32, 0..=20_u32);
        (name(), any::<bool>(), net_ids, quotas(), spare, option::of(digest()), any::<bool>(), pools)
            .prop_map(
                move |(tenant_id, pinned, net_id, quotas, (instances, more), secrets_hash, nat, pools)| {
                    let largest = pools.iter().map(|pool| total(&pool.desired_counts)).max().unwrap_or(0);
                    Tenant {
                        tenant_id: parsed(&format!("t{at}-{tenant_id}")),
                        pinned,
                        network: Network { tenant_net_id: spread(net_id, at), ..network.clone() },
                        quotas: Quotas {
                            max_pools: u32::try_from(pools.len()).unwrap_or(0) + more,
                            max_instances_per_pool: largest + instances,
                            ..quotas
                        },
                        secrets_hash,
                        egress: Egress { mode: if nat { EgressMode::Nat } else { EgressMode::None } },
                        pools,
                    }
                },
            )
    })
}

/// A net id near `drawn` that no other tenant of the document has: those of two tenants differ modulo 512.
fn spread(drawn: u16, at: usize) -> u16 {
    const TENANTS: u16 = 512;
    drawn / TENANTS * TENANTS + u16::try_from(at).unwrap_or(0) % TENANTS
}

fn total(counts: &DesiredCounts) -> u32 {
    counts.running + counts.warm + counts.sleeping
}

fn quotas() -> impl Strategy<Value = Quotas> {
    (0..=512_u32, 0..=1_048_576_u64, 0..=1000_u32, 0..=1000_u32, 0..=10_000_u64).prop_map(
        |(max_vcpus, max_mem_mib, max_running, max_warm, max_disk_gib)| Quotas {
            max_vcpus,
            max_mem_mib,
            max_running,
            max_warm,
            max_pools: 0,
            max_instances_per_pool: 0,
            max_disk_gib,
        },
    )
}

fn pool(at: usize, share: u32) -> impl Strategy<Value = Pool> {
    let what = (name(), flake_ref(), name(), option::of(digest()), role());
    let counts = (0..=share, 0..=share, 0..=share).prop_map(|(running, warm, sleeping)| DesiredCounts {
        running,
        warm,
        sleeping,
    });
    let flags = any::<[bool; 3]>();
    let snapshots = (
        select(vec![SeccompPolicy::Baseline, SeccompPolicy::Strict]),
        select(vec![SnapshotCompression::None, SnapshotCompression::Lz4, SnapshotCompression::Zstd]),
    );
    let restart = select(vec![Restart::Always, Restart::OnFailure, Restart::Never]);
    let kept = (
        option::of(persist()),
        option::of(warmup()),
        option::of(io_limits()),
        (restart, option::of(health()), option::of(workload()), option::of(digest()), option::of(update())),
    );
    let policies = (runtime_policy(), sleep_policy(), seconds(), kept);
    (what, resources(), counts, flags, snapshots, policies).prop_map(
        move |(what, instance_resources, desired_counts, flags, snapshots, policies)| {
            let (pool_id, flake_ref, profile, image_digest, role) = what;
            let (runtime_policy, sleep_policy, stopped_retention_seconds, kept) = policies;
            let (persist, warmup, io_limits, (restart, health, workload, secrets_hash, update)) = kept;
            Pool {
                pool_id: parsed(&format!("p{at}-{pool_id}")),
                flake_ref,
                profile: parsed(&profile),
                image_digest,
                role,
                instance_resources,
                desired_counts,
                pinned: flags[0],
                critical: flags[1],
                runtime_policy,
                sleep_policy,
                seccomp_policy: snapshots.0,
                snapshot_compression: snapshots.1,
                snapshot_encryption: flags[2],
                stopped_retention_seconds,
                persist: persist.map(Box::new),
                warmup: warmup.map(Box::new),
                io_limits: io_limits.map(Box::new),
                restart,
                health: health.map(Box::new),
                workload: workload.map(Box::new),
                secrets_hash,
                update,
            }
        },
    )
}

pub(crate) fn role() -> impl Strategy<Value = PoolRole> {
    select(vec![PoolRole::Gateway, PoolRole::Builder, PoolRole::Worker])
}

fn flake_ref() -> impl Strategy<Value = String> {
    prop_oneof!["github:[a-z]{1,8}/[a-z-]{1,20}\\?rev=[0-9a-f]{40}", "builtin:busybox", "path:/[a-z/]{0,40}"]
}

fn warmup() -> impl Strategy<Value = Warmup> {
    (vec("[ -~]{1,20}", 1..5), 1..=3600_u64)
        .prop_map(|(command, timeout_seconds)| Warmup { command, timeout_seconds })
}

fn health() -> impl Strategy<Value = Health> {
    let check = prop_oneof![
        vec("[ -~]{1,20}", 1..5).prop_map(|command| HealthCheck::Exec(ExecCheck { command })),
        (1..=u16::MAX, "/[!-~]{0,40}").prop_map(|(port, path)| HealthCheck::Http(HttpCheck { port, path })),
        (1..=u16::MAX).prop_map(|port| HealthCheck::Tcp(TcpCheck { port })),
    ];
    (check, 0..=3600_u64, 1..=500_u64, 1..=100_u64, 1..=6_u32).prop_map(
        |(check, start_period_seconds, interval_seconds, timeout_seconds, failure_threshold)| Health {
            check,
            start_period_seconds,
            interval_seconds,
            timeout_seconds,
            failure_threshold,
        },
    )
}

fn workload() -> impl Strategy<Value = WorkloadOverride> {
    let program = ("[^\\x00]{1,20}", vec("[^\\x00]{0,20}", 0..4))
        .prop_map(|(program, words)| std::iter::once(program).chain(words).collect());
    let user = prop_oneof![
        (0..=MAX_USER_ID).prop_map(User::Id),
        "[A-Za-z_][A-Za-z0-9_.-]{0,31}".prop_map(User::Name),
    ];
    (
        option::of(program),
        option::of(vec("[^\\x00]{0,20}", 0..5)),
        btree_map("[A-Za-z_][A-Za-z0-9_]{0,20}", "[^\\x00]{0,20}", 0..5),
        option::of("/|(/[a-z0-9_-]{1,8}){1,4}"),
        user,
        any::<bool>(),
    )
        .prop_map(|(command, args, env, working_dir, user, more)| {
            let workload = WorkloadOverride { command, args, env, working_dir, user: None };
            // One is always there.
            let user = (more || workload.is_empty()).then_some(user);
            WorkloadOverride { user, ..workload }
        })
}

fn update() -> impl Strategy<Value = Update> {
    let sleeping = select(vec![UpdateSleeping::Background, UpdateSleeping::OnWake]);
    (0..=1000u32, 0..=1000u32, any::<bool>(), 0..=3600u64, sleeping).prop_map(
        |(max_unavailable, max_surge, replace_failed, min_ready_seconds, sleeping)| Update {
            max_unavailable,
            max_surge,
            replace_failed,
            min_ready_seconds,
            sleeping,
        },
    )
}

fn io_limits() -> impl Strategy<Value = IoLimits> {
    let bytes = || option::of(IO_BYTES_PER_SECOND);
    let ops = || option::of(IO_OPS_PER_SECOND);
    // One is always there: which of the four, and how much it is.
    (bytes(), bytes(), ops(), ops(), 0..4_usize, IO_OPS_PER_SECOND).prop_map(
        |(read_bytes, write_bytes, read_ops, write_ops, first, limit)| {
            let mut limits = IoLimits {
                read_bytes_per_second: read_bytes,
                write_bytes_per_second: write_bytes,
                read_ops_per_second: read_ops,
                write_ops_per_second: write_ops,
            };
            match first {
                0 => limits.read_bytes_per_second = Some(limit.max(*IO_BYTES_PER_SECOND.start())),
                1 => limits.write_bytes_per_second = Some(limit.max(*IO_BYTES_PER_SECOND.start())),
                2 => limits.read_ops_per_second = Some(limit),
                _ => limits.write_ops_per_second = Some(limit),
            }
            limits
        },
    )
}

fn persist() -> impl Strategy<Value = Persist> {
    (
        vec("[a-z0-9_]{1,8}", 1..4),
        prop_oneof!["local", "file:///[a-z]{1,8}/[a-z]{1,8}", "s3://[a-z]{3,20}(/[a-z]{1,8})?"],
        1..=86_400_u64,
    )
        .prop_map(|(steps, store, every_seconds)| Persist {
            path: format!("/{}", steps.join("/")),
            store,
            every_seconds,
        })
}

fn parsed<T: std::str::FromStr<Err: std::fmt::Debug>>(text: &str) -> T {
    text.parse().expect("strategies make valid text")
}
