//! How well a node suits: the free shares of what it has, and what a pool prefers.

use crate::limits::node_limits;
use crate::observation::Capacity;
use crate::usage::Usage;

/// A share of 1. Integers, so that every replica computes the same order.
const WHOLE: u64 = 1_000_000;

/// How much better a node is that has the pool's image already.
pub(super) const IMAGE_PRESENT: u64 = WHOLE / 10;
/// How much better a node is that runs a pool which this one wants to be near.
pub(super) const AFFINITY: u64 = 2 * WHOLE;
/// How much better a node is that lost an instance of the same pool in another phase: it stays where it is.
pub(super) const STAYS: u64 = 4 * WHOLE;

/// What a node's rank is made of, in millionths.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Score {
    /// Free shares, weighted: 0.4, 0.4 and 0.2.
    pub vcpus: u64,
    pub mem: u64,
    pub slots: u64,
    pub image: u64,
    pub affinity: u64,
}

impl Score {
    /// Of the free shares alone.
    pub(super) fn of_room(capacity: &Capacity, used: &Usage) -> Self {
        let [vcpus, mem, _, slots] = node_limits(capacity, used, &Usage::default())
            .map(|(_, allowed, used, _)| share(allowed.saturating_sub(used), allowed));
        Self { vcpus: vcpus * 4 / 10, mem: mem * 4 / 10, slots: slots * 2 / 10, ..Self::default() }
    }

    /// The total of free shares alone: no more than [`WHOLE`].
    pub(super) fn room(&self) -> u32 {
        u32::try_from(self.vcpus + self.mem + self.slots).unwrap_or(u32::MAX)
    }

    #[must_use]
    pub fn total(&self) -> u64 {
        self.vcpus + self.mem + self.slots + self.image + self.affinity
    }
}

fn share(free: u64, whole: u64) -> u64 {
    // What nodes have fits into 64 bits, where a division takes a fraction of the time.
    if let Some(share) = free.checked_mul(WHOLE).and_then(|scaled| scaled.checked_div(whole)) {
        return share;
    }
    u128::from(free)
        .checked_mul(u128::from(WHOLE))
        .and_then(|scaled| scaled.checked_div(u128::from(whole)))
        .and_then(|share| u64::try_from(share).ok())
        .unwrap_or(0)
}
