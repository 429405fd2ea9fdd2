//! Finds a pool by its tenant's name and its own, in a time that does not grow with the document.
//!
//! A hash table of the pools' numbers. It is only asked and never walked, so no plan can show its order.

use std::hash::{DefaultHasher, Hash as _, Hasher as _};

use mvm_proto::{PoolId, TenantId};

use super::draft::PoolRef;

/// A free place between any two taken ones, on average: a search ends after a step or two.
const PLACES_PER_POOL: usize = 2;

/// No pool has this number: a document is never that large.
const FREE: u32 = u32::MAX;

#[derive(Debug)]
pub(crate) struct PoolIndex {
    /// A power of two of them; a pool is at the place that its names say, or at the next that was free.
    places: Vec<u32>,
}

impl PoolIndex {
    pub(crate) fn new<'a>(pools: impl ExactSizeIterator<Item = PoolRef<'a>>) -> Self {
        let mut index = Self { places: vec![FREE; (PLACES_PER_POOL * pools.len() + 1).next_power_of_two()] };
        for (number, pool) in (0..).zip(pools) {
            let mut at = index.first_place(&pool.tenant.tenant_id, &pool.pool.pool_id);
            while index.places[at] != FREE {
                at = index.after(at);
            }
            index.places[at] = number;
        }
        index
    }

    /// The number of the pool with these names; `is_it` says whether that with a number is the one.
    pub(crate) fn find(
        &self,
        tenant: &TenantId,
        pool: &PoolId,
        is_it: impl Fn(usize) -> bool,
    ) -> Option<usize> {
        let mut at = self.first_place(tenant, pool);
        while self.places[at] != FREE {
            let number = self.places[at] as usize;
            if is_it(number) {
                return Some(number);
            }
            at = self.after(at);
        }
        None
    }

    fn first_place(&self, tenant: &TenantId, pool: &PoolId) -> usize {
        let mut hasher = DefaultHasher::new();
        (tenant, pool).hash(&mut hasher);
        // Only the low bits are used, and a cut of the high ones does no harm.
        hasher.finish() as usize & (self.places.len() - 1)
    }

    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.places.len() - 1)
    }
}
