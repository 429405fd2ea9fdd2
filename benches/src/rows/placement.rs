//! What it costs to place a fleet: all of it from nothing, and what one changed pool costs as instances grow.

use std::hint::black_box;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use mvm_planner::Capacity;
use mvm_planner::fleet::{Fleet, FleetNode, FleetPool, FleetTenant, Overcommit, Placer, PoolKey};
use mvm_proto::document::{DesiredCounts, PoolRole, Quotas, Resources};
use mvm_proto::placement::Placement;
use mvm_proto::{Digest, Timestamp};

use crate::authority::now;
use crate::effort::Effort;
use crate::machine::{Core, pin_this_thread};
use crate::row::{Goal, Row, Subject, Unit};

const NODES: usize = 10_000;
const POOLS_PER_TENANT: usize = 10;
/// Of each pool: running, warm, sleeping.
const COUNTS: DesiredCounts = DesiredCounts { running: 60, warm: 20, sleeping: 20 };
const PER_POOL: usize = 100;
/// Pools at the small and at the large end: 1,000 and 100,000 instances.
const POOLS: (usize, usize) = (10, 1000);
/// Kinds of images; each node has one of them.
const IMAGES: usize = 5;
const CHANGES: usize = 200;
/// The same with nothing of the fleet in the processor's caches, as after other work: each takes milliseconds to prepare.
const COLD_CHANGES: usize = 40;
/// More than the last level of a processor's caches.
const EVICTING_BYTES: usize = 64 << 20;

const WHOLE_GOAL: Goal = Goal::FigureBelow(2000.0);
const CHANGE_GOAL: Goal = Goal::FigureBelow(10_000.0);
const GROWTH_GOAL: Goal = Goal::RatioAtMost(1.2);

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    pin_this_thread(Core::Load)?;
    let now = now();
    let (few, many) = (fleet(POOLS.0)?, fleet(POOLS.1)?);
    let wholes = (0..effort.pairs).map(|_| Ok(settled(&many, now)?.1)).collect::<Result<Vec<_>>>()?;
    let (mut small, _) = settled(&few, now)?;
    let (mut large, _) = settled(&many, now)?;
    let pairs = |count: usize, large: &mut Placer, small: &mut Placer, evict: &mut dyn FnMut()| {
        (0..effort.pairs)
            .map(|round| {
                let theirs = changes(&many, large, round, count, now, evict)?;
                Ok((theirs, changes(&few, small, round, count, now, evict)?))
            })
            .collect::<Result<Vec<_>>>()
    };
    // Rounds put back what rounds added, so both kinds begin with an even one.
    let mut evicting = vec![0u8; EVICTING_BYTES];
    let mut evict = || evicting.iter_mut().step_by(64).for_each(|byte| *byte = byte.wrapping_add(1));
    let (mut cold_large, mut cold_small) = (large.clone(), small.clone());
    let cold = pairs(COLD_CHANGES, &mut cold_large, &mut cold_small, &mut evict)?;
    let pairs = pairs(CHANGES, &mut large, &mut small, &mut || {})?;
    let ours = |pairs: &[(f64, f64)]| pairs.iter().map(|(large, _)| *large).collect::<Vec<f64>>();
    let instances = POOLS.1 * PER_POOL;
    let whole = format!("{instances} instances placed on {NODES} nodes, from nothing");
    let change = format!("one pool changed among {instances} instances on {NODES} nodes");
    Ok(vec![
        Row::of(Subject::Placement, whole, &wholes, Unit::Milliseconds).goal(WHOLE_GOAL),
        Row::of(Subject::Placement, change.clone(), &ours(&pairs), Unit::Microseconds).goal(CHANGE_GOAL),
        Row::of(
            Subject::Placement,
            format!("{change}, growth, change after change"),
            &ours(&pairs),
            Unit::Microseconds,
        )
        .beside(format!("{} instances", POOLS.0 * PER_POOL), &pairs)
        .goal(GROWTH_GOAL),
        Row::of(
            Subject::Placement,
            format!("{change}, growth, after other work"),
            &ours(&cold),
            Unit::Microseconds,
        )
        .beside(format!("{} instances", POOLS.0 * PER_POOL), &cold)
        .goal(GROWTH_GOAL)
        .note("nothing of the fleet is in the processor's caches when the change comes"),
    ])
}

/// A placer that has placed all, and the milliseconds that it took.
fn settled(fleet: &Fleet, now: Timestamp) -> Result<(Placer, f64)> {
    let begun = Instant::now();
    let mut placer = Placer::of(black_box(fleet));
    placer.settle(now);
    let took = begun.elapsed().as_secs_f64() * 1000.0;
    ensure!(placer.plan().unplaced.is_empty(), "the bench's fleet has room for all");
    Ok((placer, took))
}

/// Microseconds per change: each makes one pool larger, or as large as it was.
fn changes(
    fleet: &Fleet,
    placer: &mut Placer,
    round: usize,
    count: usize,
    now: Timestamp,
    before_each: &mut dyn FnMut(),
) -> Result<f64> {
    let more = u32::from(round.is_multiple_of(2));
    let keys: Vec<&PoolKey> = fleet.pools.keys().collect();
    let mut took = 0.0;
    for number in 0..count {
        // Every pool once per lap, and one more in it each lap; the next round takes them away again.
        let (lap, at) = (number / keys.len(), number % keys.len());
        let key = keys[at];
        let mut pool = fleet.pools.get(key).context("the pool is there")?.clone();
        let laps = u32::try_from(lap)? + 1;
        let most = u32::try_from(count.div_ceil(keys.len()))?;
        pool.counts.running += if more == 1 { laps } else { most - laps };
        before_each();
        let begun = Instant::now();
        placer.set_pool(key, Some(pool));
        let changed = placer.settle(now);
        took += begun.elapsed().as_secs_f64() * 1e6;
        ensure!(changed.len() == 1, "a change places something");
    }
    Ok(took / count as f64)
}

fn fleet(pools: usize) -> Result<Fleet> {
    let mut fleet = Fleet::default();
    let image = |number: usize| Digest::of(&(number % IMAGES).to_le_bytes());
    for number in 0..NODES {
        let node = FleetNode {
            labels: [("zone".to_owned(), format!("zone-{}", number % 3))].into(),
            taints: [].into(),
            cordoned: false,
            away_since: None,
            capacity: Capacity { vcpus: 64, mem_mib: 262_144, disk_mib: 4_000_000, max_instances: 500 },
            overcommit: Overcommit::default(),
            images: [image(number)].into(),
            beyond: [].into(),
        };
        fleet.nodes.insert(format!("node-{number:05}").parse()?, node);
    }
    let many = u32::MAX;
    let quotas = Quotas {
        max_vcpus: many,
        max_mem_mib: many.into(),
        max_running: many,
        max_warm: many,
        max_pools: many,
        max_instances_per_pool: many,
        max_disk_gib: many.into(),
    };
    for number in 0..pools {
        let tenant = format!("tenant-{:04}", number / POOLS_PER_TENANT).parse::<mvm_proto::TenantId>()?;
        fleet.tenants.insert(tenant.clone(), FleetTenant { quotas });
        let size = number as u64;
        let pool = FleetPool {
            resources: Resources {
                vcpus: 1 + u32::try_from(size % 4)?,
                mem_mib: 512 * (1 + size % 3),
                data_disk_mib: 0,
            },
            counts: COUNTS,
            image: Some(image(number)),
            role: PoolRole::Worker,
            critical: false,
            placement: Placement::default(),
        };
        fleet.pools.insert(PoolKey { tenant, pool: format!("pool-{number:05}").parse()? }, pool);
    }
    Ok(fleet)
}
