//! What a tenant's instances on one node need of each quota, and what they may need beyond that.

use std::collections::BTreeMap;

use mvm_proto::document::{DesiredCounts, Quotas, Resources};
use mvm_proto::{Phase, PoolId};

use super::PoolNeed;
use crate::fleet::state::{PHASES, count};
use crate::usage::Usage;

const MIB_PER_GIB: u64 = 1024;

/// The quotas that are divided among nodes, in the order of [`Amounts`].
pub(super) const AMOUNTS: [&str; 6] =
    ["max_vcpus", "max_mem_mib", "max_running", "max_warm", "max_disk_gib", "max_instances_per_pool"];

/// An amount of each of [`AMOUNTS`].
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Amounts(pub(super) [u64; AMOUNTS.len()]);

impl Amounts {
    pub(super) fn of(quotas: &Quotas) -> Self {
        Self([
            u64::from(quotas.max_vcpus),
            quotas.max_mem_mib,
            u64::from(quotas.max_running),
            u64::from(quotas.max_warm),
            quotas.max_disk_gib,
            u64::from(quotas.max_instances_per_pool),
        ])
    }

    fn of_usage(usage: &Usage, per_pool: u64) -> Self {
        let disk_gib = usage.disk_mib.div_ceil(MIB_PER_GIB);
        Self([usage.vcpus, usage.mem_mib, usage.running, usage.warm, disk_gib, per_pool])
    }

    pub(super) fn quotas(&self, max_pools: u32) -> Quotas {
        let [vcpus, max_mem_mib, running, warm, max_disk_gib, per_pool] = self.0;
        let number = |amount: u64| u32::try_from(amount).unwrap_or(u32::MAX);
        Quotas {
            max_vcpus: number(vcpus),
            max_mem_mib,
            max_running: number(running),
            max_warm: number(warm),
            max_pools,
            max_instances_per_pool: number(per_pool),
            max_disk_gib,
        }
    }

    pub(super) fn plus(&self, other: &Self) -> Self {
        Self(std::array::from_fn(|at| self.0[at].saturating_add(other.0[at])))
    }

    pub(super) fn per_pool(&mut self, change: impl FnOnce(u64) -> u64) {
        let [.., per_pool] = &mut self.0;
        *per_pool = change(*per_pool);
    }
}

/// What a tenant needs on one node.
#[derive(Debug, Clone, Copy)]
pub(super) struct Need {
    pub(super) placed: Amounts,
    pub(super) burst: Amounts,
}

impl Need {
    pub(super) fn of(pools: &BTreeMap<PoolId, PoolNeed>) -> Self {
        let (mut placed, mut burst) = (Usage::default(), Usage::default());
        let (mut largest, mut largest_with_burst) = (0, 0);
        for pool in pools.values() {
            let more = pool.burst();
            placed =
                placed.plus(used(&pool.resources, &pool.placed)).plus(used(&pool.resources, &pool.claimed));
            burst = burst.plus(more);
            largest = largest.max(pool.instances());
            largest_with_burst = largest_with_burst.max(pool.instances().saturating_add(more.instances));
        }
        Self {
            placed: Amounts::of_usage(&placed, largest),
            burst: Amounts::of_usage(&burst, largest_with_burst - largest),
        }
    }

    /// How many instances the largest pool has.
    pub(super) fn largest(&self) -> u64 {
        let [.., per_pool] = self.placed.0;
        per_pool
    }
}

impl PoolNeed {
    /// How many it has, in whatever phase, claimed or not.
    pub(super) fn instances(&self) -> u64 {
        used(&self.resources, &self.placed).instances + used(&self.resources, &self.claimed).instances
    }

    /// What may happen to it without a new document.
    pub(super) fn burst(&self) -> Usage {
        burst_of(&self.resources, &self.placed)
    }
}

fn used(resources: &Resources, counts: &DesiredCounts) -> Usage {
    PHASES.into_iter().fold(Usage::default(), |sum, phase| {
        sum.plus(Usage::of(phase, resources, None).times(count(counts, phase)))
    })
}

/// What may happen on a node without a new document: everything that is warm or asleep is woken or claimed while its
/// place is refilled, one instance is started beside those that run, and idle ones are paused and put to sleep.
fn burst_of(resources: &Resources, placed: &DesiredCounts) -> Usage {
    let woken = placed.warm.saturating_add(placed.sleeping).max(1);
    let idle = u64::from(placed.running.saturating_add(placed.warm));
    let snapshots = Usage {
        warm: u64::from(placed.running),
        disk_mib: idle.saturating_mul(resources.mem_mib),
        ..Usage::default()
    };
    Usage::of(Phase::Running, resources, None).times(woken).plus(snapshots)
}
