//! Whether a node takes one more instance of a pool, and whether its tenant's quotas allow it.

use mvm_proto::PoolId;

use super::FleetPool;
use super::filter::{Obstacle, against_class};
use super::nodes::NodeState;
use super::slab::{NodeNumber, PoolNumber};
use super::spread::Domains;
use super::state::{State, TenantState, instances};
use crate::limits::{PER_POOL, first_passed, quota_limits};
use crate::usage::Usage;

impl TenantState {
    /// How many of its pools come before this one: the first ones have the places that `max_pools` gives.
    pub(super) fn position(&self, pool: &PoolId) -> usize {
        self.pools.range(..pool).count()
    }

    /// Whether some of its pools keep away from others.
    fn has_avoiding(&self, spec: &FleetPool) -> bool {
        self.avoiding > 0 || !spec.placement.anti_affinity.is_empty()
    }
}

impl State {
    /// Whether this node takes one more of a pool, its tenant's quotas aside.
    pub(super) fn accepts(
        &self,
        number: PoolNumber,
        spec: &FleetPool,
        at: NodeNumber,
        need: &Usage,
        domains: Option<&Domains>,
    ) -> Result<(), Obstacle> {
        let Some(node) = self.nodes.get(at) else { return Err(Obstacle::Away) };
        if node.spec.away_since.is_some() {
            return Err(Obstacle::Away);
        }
        if node.spec.cordoned {
            return Err(Obstacle::Cordoned);
        }
        against_class(&spec.placement, &node.spec.labels, &node.spec.taints)?;
        node.fits(need)?;
        if let Some(max) = spec.placement.max_per_node {
            let pool = self.pool(number);
            let placed = pool.map_or(0, |pool| instances(&pool.counts(at)));
            if placed + node.beyond_of(number, pool, at).instances >= u64::from(max) {
                return Err(Obstacle::MaxPerNode(max));
            }
        }
        self.keeps_away(number, spec, node)?;
        domains.map_or(Ok(()), |domains| domains.allows(node))
    }

    /// Whether a pool on this node and this one avoid each other: both ways, whichever of the two was placed first.
    pub(super) fn keeps_away(
        &self,
        number: PoolNumber,
        spec: &FleetPool,
        node: &NodeState,
    ) -> Result<(), Obstacle> {
        let Some(entry) = self.pools.get(number) else { return Ok(()) };
        if !self.tenants.get(entry.tenant).is_some_and(|tenant| tenant.has_avoiding(spec)) {
            return Ok(());
        }
        let avoids = |pool: &FleetPool, other: &PoolId| pool.placement.anti_affinity.contains(other);
        let others = node.pools.iter().filter(|other| **other != number);
        let others = others.filter_map(|other| self.pools.get(*other));
        let avoided = others.filter(|other| other.tenant == entry.tenant).filter(|other| {
            let keeps_off = other.declared.as_ref().is_some_and(|pool| avoids(&pool.spec, &entry.key.pool));
            keeps_off || avoids(spec, &other.key.pool)
        });
        match avoided.map(|other| &other.key.pool).min() {
            Some(first) => Err(Obstacle::AntiAffinity(first.clone())),
            None => Ok(()),
        }
    }

    /// Whether the tenant's quotas allow one more, beside so much more and so many more instances of the pool.
    pub(super) fn quota_allows(
        &self,
        number: PoolNumber,
        more: &Usage,
        more_instances: u64,
        need: &Usage,
    ) -> Result<(), String> {
        let Some(entry) = self.pools.get(number) else { return Err(String::new()) };
        let name = &entry.key.tenant;
        let tenant = self.tenants.get(entry.tenant);
        let Some(TenantState { quotas: Some(quotas), used, beyond, pools, .. }) = tenant else {
            return Err(format!("the tenant {name} does not exist"));
        };
        let of = |told: &dyn std::fmt::Display| format!("quota of tenant {name}: {told}");
        let max_pools = usize::try_from(quotas.max_pools).unwrap_or(usize::MAX);
        if pools.len() > max_pools {
            let position = tenant.map_or(0, |tenant| tenant.position(&entry.key.pool));
            if position >= max_pools {
                let told =
                    format!("max_pools is {max_pools}, this is the tenant's pool number {}", position + 1);
                return Err(of(&told));
            }
        }
        let has = entry.declared.as_ref().map_or(0, |pool| instances(&pool.total));
        let has = has + entry.told.instances + more_instances;
        let per_pool = (PER_POOL, u64::from(quotas.max_instances_per_pool), has, need.instances);
        let [a, b, c, d, e] = quota_limits(quotas, &used.plus(*beyond).plus(*more), need);
        first_passed(&[per_pool, a, b, c, d, e]).map_err(|shortage| match beyond.instances {
            0 => of(&shortage),
            more => {
                format!(
                    "{}; this counts {more} that are claimed or not yet confirmed to be gone",
                    of(&shortage)
                )
            }
        })
    }
}
