//! Random fleets for placement, small and crowded enough that everything runs out now and then.

use std::collections::BTreeMap;
use std::time::Duration;

use mvm_planner::Capacity;
use mvm_planner::fleet::{
    AWAY_GRACE, AwayGrace, Beyond, Fleet, FleetNode, FleetPool, FleetTenant, Overcommit, Placed, Placer,
    PoolKey,
};
use mvm_proto::document::{DesiredCounts, PoolRole, Quotas, Resources};
use mvm_proto::placement::{Placement, Spread, Taint, TaintEffect, Toleration};
use mvm_proto::{Digest, NodeId, TenantId, Timestamp};
use proptest::prelude::*;

const NODES: usize = 5;
const TENANTS: usize = 2;
const POOLS: usize = 3;

pub(crate) fn now() -> Timestamp {
    Timestamp::from_unix_ms(1_800_000_000_000)
}

fn node_id(at: usize) -> NodeId {
    format!("node-{at}").parse().unwrap()
}

fn tenant_id(at: usize) -> TenantId {
    format!("tenant-{at}").parse().unwrap()
}

fn key(tenant: usize, pool: usize) -> PoolKey {
    PoolKey { tenant: tenant_id(tenant), pool: format!("pool-{pool}").parse().unwrap() }
}

fn taint() -> impl Strategy<Value = Taint> {
    let effect = prop_oneof![Just(TaintEffect::NoPlace), Just(TaintEffect::Drain)];
    ("[ab]", effect).prop_map(|(key, effect)| Taint { key, value: String::new(), effect })
}

fn image() -> impl Strategy<Value = Digest> {
    (0u8..3).prop_map(|image| Digest::of(&[image]))
}

pub(crate) fn node() -> impl Strategy<Value = FleetNode> {
    let capacity = (1u32..10, 1u64..10, 1u64..20, 1u32..12);
    let taints = prop_oneof![4 => Just(None), 1 => taint().prop_map(Some)];
    (
        capacity,
        proptest::option::of("[xy]"),
        taints,
        prop::bool::weighted(0.1),
        proptest::option::weighted(0.1, 0u64..600),
        proptest::collection::btree_set(image(), 0..3),
        prop_oneof![Just(1000u32), Just(4000u32)],
        prop_oneof![3 => Just(BTreeMap::new()), 1 => proptest::collection::btree_map(any_key(), beyond(), 1..3)],
    )
        .prop_map(
            |((vcpus, mem, disk, slots), zone, taint, cordoned, away, images, vcpus_permille, beyond)| FleetNode {
                labels: zone.into_iter().map(|zone| ("zone".to_owned(), zone)).collect(),
                taints: taint.into_iter().collect(),
                cordoned,
                away_since: away.map(|seconds| {
                    Timestamp::from_unix_ms(now().unix_ms() - i64::try_from(seconds).unwrap() * 1000)
                }),
                capacity: Capacity { vcpus, mem_mib: mem * 256, disk_mib: disk * 256, max_instances: slots },
                overcommit: Overcommit { vcpus_permille, mem_permille: 1000 },
                images,
                beyond,
            },
        )
}

fn any_key() -> impl Strategy<Value = PoolKey> {
    (0..TENANTS, 0..POOLS).prop_map(|(tenant, pool)| key(tenant, pool))
}

fn beyond() -> impl Strategy<Value = Beyond> {
    (1u32..4, 1u64..4, counts(), 0u32..2).prop_map(|(vcpus, mem, still_there, running)| Beyond {
        resources: Resources { vcpus, mem_mib: mem * 256, data_disk_mib: 0 },
        still_there,
        claimed: DesiredCounts { running, ..DesiredCounts::default() },
    })
}

fn placement() -> impl Strategy<Value = Placement> {
    let pool = || (0..POOLS).prop_map(|pool| key(0, pool).pool);
    let toleration = proptest::option::of("[ab]")
        .prop_map(|key| key.map(|key| Toleration { key, value: None, effect: None }));
    let by = prop_oneof![Just("node"), Just("zone")];
    let spread = (by, 1u32..3).prop_map(|(by, max_skew)| Spread { by: by.to_owned(), max_skew });
    (
        proptest::option::weighted(0.2, "[xy]"),
        toleration,
        proptest::option::weighted(0.3, spread),
        proptest::option::weighted(0.2, pool()),
        proptest::option::weighted(0.2, pool()),
        proptest::option::weighted(0.2, 1u32..4),
        proptest::option::weighted(0.15, Just("together".to_owned())),
    )
        .prop_map(|(zone, toleration, spread, affinity, anti_affinity, max_per_node, colocate)| {
            Placement {
                node_labels: zone.into_iter().map(|zone| ("zone".to_owned(), zone)).collect(),
                tolerations: toleration.into_iter().collect(),
                spread,
                affinity: affinity.into_iter().collect(),
                anti_affinity: anti_affinity.into_iter().collect(),
                max_per_node,
                colocate,
            }
        })
}

pub(crate) fn counts() -> impl Strategy<Value = DesiredCounts> {
    (0u32..6, 0u32..4, 0u32..4).prop_map(|(running, warm, sleeping)| DesiredCounts {
        running,
        warm,
        sleeping,
    })
}

fn pool() -> impl Strategy<Value = FleetPool> {
    let role = prop_oneof![Just(PoolRole::Gateway), Just(PoolRole::Worker)];
    ((1u32..4, 1u64..4, 0u64..3), counts(), proptest::option::of(image()), role, any::<bool>(), placement())
        .prop_map(|((vcpus, mem, disk), counts, image, role, critical, placement)| FleetPool {
            resources: Resources { vcpus, mem_mib: mem * 256, data_disk_mib: disk * 256 },
            counts,
            image,
            role,
            critical,
            placement,
        })
}

fn tenant() -> impl Strategy<Value = FleetTenant> {
    (1u32..30, 1u64..30, 0u32..12, 0u32..6, 1u32..4, 1u32..10, 1u64..30).prop_map(
        |(max_vcpus, mem, max_running, max_warm, max_pools, max_instances_per_pool, max_disk_gib)| {
            FleetTenant {
                quotas: Quotas {
                    max_vcpus,
                    max_mem_mib: mem * 256,
                    max_running,
                    max_warm,
                    max_pools,
                    max_instances_per_pool,
                    max_disk_gib,
                },
            }
        },
    )
}

pub(crate) fn fleet() -> impl Strategy<Value = Fleet> {
    (
        proptest::collection::vec(node(), 0..=NODES),
        proptest::collection::vec(tenant(), 1..=TENANTS),
        proptest::collection::btree_map((0..TENANTS, 0..POOLS), pool(), 0..=TENANTS * POOLS),
        proptest::option::weighted(0.2, 0u64..600),
        prop_oneof![Just(AwayGrace::default()), (1u64..600).prop_map(|s| AwayGrace(Duration::from_secs(s)))],
    )
        .prop_map(|(nodes, tenants, pools, elected, away_grace)| Fleet {
            nodes: nodes.into_iter().enumerate().map(|(at, node)| (node_id(at), node)).collect(),
            tenants: tenants.into_iter().enumerate().map(|(at, tenant)| (tenant_id(at), tenant)).collect(),
            pools: pools.into_iter().map(|((tenant, pool), spec)| (key(tenant, pool), spec)).collect(),
            placed: BTreeMap::new(),
            away_grace,
            elected_at: elected.map(|seconds| now() - Duration::from_secs(seconds)),
        })
}

/// Something that happens to a fleet.
#[derive(Debug, Clone)]
pub(crate) enum Change {
    Node(usize, Option<FleetNode>),
    Away(usize),
    Tenant(usize, Option<FleetTenant>),
    Pool(usize, usize, Option<FleetPool>),
    Counts(usize, usize, DesiredCounts),
    Beyond(usize, PoolKey, Option<Beyond>),
    Time(u64),
}

pub(crate) fn change() -> impl Strategy<Value = Change> {
    prop_oneof![
        2 => (0..NODES, proptest::option::weighted(0.7, node())).prop_map(|(at, node)| Change::Node(at, node)),
        2 => (0..NODES).prop_map(Change::Away),
        1 => (0..TENANTS, proptest::option::weighted(0.8, tenant())).prop_map(|(at, tenant)| Change::Tenant(at, tenant)),
        2 => (0..TENANTS, 0..POOLS, proptest::option::weighted(0.7, pool())).prop_map(|(t, p, pool)| Change::Pool(t, p, pool)),
        3 => (0..TENANTS, 0..POOLS, counts()).prop_map(|(t, p, counts)| Change::Counts(t, p, counts)),
        2 => (0..NODES, any_key(), proptest::option::weighted(0.6, beyond())).prop_map(|(at, key, b)| Change::Beyond(at, key, b)),
        1 => (0u64..2 * AWAY_GRACE.as_secs()).prop_map(Change::Time),
    ]
}

impl Change {
    /// How many kinds change what is declared: all but the time.
    pub(crate) const KINDS: usize = 6;

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Node(..) => "node",
            Self::Away(..) => "away",
            Self::Tenant(..) => "tenant",
            Self::Pool(..) => "pool",
            Self::Counts(..) => "counts",
            Self::Beyond(..) => "beyond",
            Self::Time(..) => "time",
        }
    }

    /// How long after what was before.
    pub(crate) fn after(&self) -> Duration {
        if let Self::Time(seconds) = self { Duration::from_secs(*seconds) } else { Duration::from_secs(1) }
    }

    /// Makes the change, and tells a placer of it.
    pub(crate) fn apply(&self, declared: &mut Fleet, placer: Option<&mut Placer>, at: Timestamp) {
        let mut placer = placer;
        match self {
            Self::Time(_) => {}
            Self::Node(which, node) => {
                let id = node_id(*which);
                set(&mut declared.nodes, &id, node.clone());
                if let Some(placer) = &mut placer {
                    placer.set_node(&id, node.clone());
                }
            }
            Self::Away(which) => {
                let id = node_id(*which);
                let Some(node) = declared.nodes.get_mut(&id) else { return };
                node.away_since = if node.away_since.is_some() { None } else { Some(at) };
                if let Some(placer) = &mut placer {
                    placer.set_node(&id, Some(node.clone()));
                }
            }
            Self::Beyond(which, key, beyond) => {
                let id = node_id(*which);
                let Some(node) = declared.nodes.get_mut(&id) else { return };
                set(&mut node.beyond, key, *beyond);
                if let Some(placer) = &mut placer {
                    placer.set_beyond(&id, key, *beyond);
                }
            }
            Self::Tenant(which, tenant) => {
                let id = tenant_id(*which);
                set(&mut declared.tenants, &id, *tenant);
                if let Some(placer) = &mut placer {
                    placer.set_tenant(&id, *tenant);
                }
            }
            Self::Pool(tenant, pool, spec) => {
                let key = key(*tenant, *pool);
                set(&mut declared.pools, &key, spec.clone());
                if let Some(placer) = &mut placer {
                    placer.set_pool(&key, spec.clone());
                }
            }
            Self::Counts(tenant, pool, counts) => {
                let key = key(*tenant, *pool);
                let Some(spec) = declared.pools.get_mut(&key) else { return };
                spec.counts = *counts;
                if let Some(placer) = &mut placer {
                    placer.set_pool(&key, Some(spec.clone()));
                }
            }
        }
    }
}

fn set<K: Ord + Clone, V>(map: &mut BTreeMap<K, V>, key: &K, value: Option<V>) {
    match value {
        Some(value) => drop(map.insert(key.clone(), value)),
        None => drop(map.remove(key)),
    }
}

pub(crate) fn instances(counts: &DesiredCounts) -> u64 {
    u64::from(counts.running) + u64::from(counts.warm) + u64::from(counts.sleeping)
}

pub(crate) fn sum(placed: Option<&Placed>) -> DesiredCounts {
    placed.into_iter().flat_map(BTreeMap::values).fold(DesiredCounts::default(), |sum, counts| {
        DesiredCounts {
            running: sum.running + counts.running,
            warm: sum.warm + counts.warm,
            sleeping: sum.sleeping + counts.sleeping,
        }
    })
}

/// What instances use, computed again from the contract alone.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Use {
    vcpus: u64,
    mem: u64,
    disk: u64,
    running: u64,
    warm: u64,
    instances: u64,
    most_per_pool: u64,
    pools: u64,
}

fn pool_use(pool: &FleetPool, counts: &DesiredCounts) -> Use {
    use_of(&pool.resources, counts)
}

fn use_of(resources: &Resources, counts: &DesiredCounts) -> Use {
    let Resources { vcpus, mem_mib, data_disk_mib } = *resources;
    let [running, warm, sleeping] = [counts.running, counts.warm, counts.sleeping].map(u64::from);
    Use {
        vcpus: running * u64::from(vcpus),
        mem: (running + warm) * mem_mib,
        disk: (running + warm + sleeping) * data_disk_mib + sleeping * mem_mib,
        running,
        warm,
        instances: running + warm + sleeping,
        most_per_pool: running + warm + sleeping,
        pools: u64::from(running + warm + sleeping > 0),
    }
}

impl Use {
    fn plus(self, other: Self) -> Self {
        Self {
            vcpus: self.vcpus + other.vcpus,
            mem: self.mem + other.mem,
            disk: self.disk + other.disk,
            running: self.running + other.running,
            warm: self.warm + other.warm,
            instances: self.instances + other.instances,
            most_per_pool: self.most_per_pool.max(other.most_per_pool),
            pools: self.pools + other.pools,
        }
    }

    pub(crate) fn is_within(&self, quotas: &Quotas) -> bool {
        self.vcpus <= u64::from(quotas.max_vcpus)
            && self.mem <= quotas.max_mem_mib
            && self.running <= u64::from(quotas.max_running)
            && self.warm <= u64::from(quotas.max_warm)
            && self.disk <= quotas.max_disk_gib * 1024
            && self.most_per_pool <= u64::from(quotas.max_instances_per_pool)
            && self.pools <= u64::from(quotas.max_pools)
    }
}

/// What a tenant's instances use on all nodes.
pub(crate) fn tenant_use(fleet: &Fleet, placed: &BTreeMap<PoolKey, Placed>, tenant: &TenantId) -> Use {
    let pools = placed.iter().filter(|(key, _)| key.tenant == *tenant);
    pools.map(|(key, placed)| pool_use(&fleet.pools[key], &sum(Some(placed)))).fold(Use::default(), Use::plus)
}

/// Some if a node has room for what is placed on it.
pub(crate) fn room_left(
    fleet: &Fleet,
    placed: &BTreeMap<PoolKey, Placed>,
    id: &NodeId,
    node: &FleetNode,
) -> Option<()> {
    let on_it = placed.iter().filter_map(|(key, placed)| Some(pool_use(&fleet.pools[key], placed.get(id)?)));
    let used = on_it.fold(Use::default(), Use::plus);
    let vcpus = u64::from(node.capacity.vcpus) * u64::from(node.overcommit.vcpus_permille) / 1000;
    let fits = used.vcpus <= vcpus
        && used.mem <= node.capacity.mem_mib
        && used.disk <= node.capacity.disk_mib
        && used.instances <= u64::from(node.capacity.max_instances);
    fits.then_some(())
}

/// A limit that is passed because of what was placed, when what nodes may still have and what is claimed counts as well.
pub(crate) fn passed_in_truth(fleet: &Fleet, placed: &BTreeMap<PoolKey, Placed>) -> Option<String> {
    let nothing = BTreeMap::new();
    let nodes = fleet.nodes.iter().find_map(|(id, node)| {
        let [before, after] = [&nothing, placed].map(|placed| all_use(fleet, placed, Some(id), None));
        let vcpus = u64::from(node.capacity.vcpus) * u64::from(node.overcommit.vcpus_permille) / 1000;
        let Capacity { mem_mib, disk_mib, max_instances, .. } = node.capacity;
        let limits = [vcpus, mem_mib, disk_mib, u64::from(max_instances), u64::MAX, u64::MAX];
        grown_past(&before, &after, &limits).then(|| format!("{id}: {before:?} {after:?} {limits:?}"))
    });
    nodes.or_else(|| {
        fleet.tenants.iter().find_map(|(id, tenant)| {
            let [before, after] = [&nothing, placed].map(|placed| all_use(fleet, placed, None, Some(id)));
            let q = &tenant.quotas;
            let numbers = [q.max_running, q.max_warm].map(u64::from);
            let limits = [
                u64::from(q.max_vcpus),
                q.max_mem_mib,
                q.max_disk_gib * 1024,
                u64::MAX,
                numbers[0],
                numbers[1],
            ];
            grown_past(&before, &after, &limits).then(|| format!("{id}: {before:?} {after:?} {limits:?}"))
        })
    })
}

fn grown_past(before: &[u64; 6], after: &[u64; 6], limits: &[u64; 6]) -> bool {
    (0..6).any(|at| after[at] > limits[at] && after[at] > before[at])
}

/// vCPUs, memory, disk, instances, running and warm: on one node or all, of one tenant or all.
fn all_use(
    fleet: &Fleet,
    placed: &BTreeMap<PoolKey, Placed>,
    node: Option<&NodeId>,
    tenant: Option<&TenantId>,
) -> [u64; 6] {
    let amounts = |used: Use| [used.vcpus, used.mem, used.disk, used.instances, used.running, used.warm];
    let mut sum = [0; 6];
    for (id, known) in fleet.nodes.iter().filter(|(id, _)| node.is_none_or(|node| node == *id)) {
        let keys: std::collections::BTreeSet<_> = placed.keys().chain(known.beyond.keys()).collect();
        for key in keys.into_iter().filter(|key| tenant.is_none_or(|tenant| *tenant == key.tenant)) {
            let has =
                placed.get(key).and_then(|placed| placed.get(id)).map(|has| pool_use(&fleet.pools[key], has));
            let beyond = known.beyond.get(key);
            let of = |counts: fn(&Beyond) -> &DesiredCounts| {
                amounts(beyond.map(|beyond| use_of(&beyond.resources, counts(beyond))).unwrap_or_default())
            };
            let (has, still, claimed) =
                (amounts(has.unwrap_or_default()), of(|b| &b.still_there), of(|b| &b.claimed));
            (0..6).for_each(|at| sum[at] += has[at].max(still[at]) + claimed[at]);
        }
    }
    sum
}
