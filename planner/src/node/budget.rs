//! What tenants and the node may use at most, and what of it is in use.
//!
//! Spending only adds: nothing that a plan stops or puts to sleep is given back before it is observed to be gone.
//! So a plan's steps may be carried out in any order, or at once, and no limit is passed on the way.

use mvm_proto::document::{Quotas, Tenant};

use crate::limits::{Limit, PER_POOL, Shortage, first_passed, node_limits, quota_limits};
use crate::observation::Capacity;
use crate::usage::Usage;

/// The node's use and every managed tenant's, each with its limits.
#[derive(Debug)]
pub(crate) struct Budget {
    capacity: Capacity,
    node: Usage,
    tenants: Vec<(Usage, Limits)>,
    pools: Vec<u64>,
}

/// What a tenant may use: its quotas, and as many instances as this node has addresses for.
#[derive(Debug, Clone, Copy)]
struct Limits {
    quotas: Quotas,
    addresses: (&'static str, u32),
}

impl Budget {
    pub(crate) fn new(capacity: Capacity, tenants: &[Tenant], pools: usize) -> Self {
        let limits = |tenant: &Tenant| {
            let network = &tenant.network;
            let name = if network.is_whole() { "the subnet's addresses" } else { "this node's addresses" };
            let addresses = (name, network.instance_capacity());
            (Usage::default(), Limits { quotas: tenant.quotas, addresses })
        };
        let tenants = tenants.iter().map(limits).collect();
        Self { capacity, node: Usage::default(), tenants, pools: vec![0; pools] }
    }

    /// Counts an instance that exists. Unmanaged ones use the node all the same.
    pub(crate) fn count(&mut self, tenant: Option<usize>, pool: Option<usize>, usage: Usage) {
        self.node = self.node.plus(usage);
        if let Some(tenant) = tenant {
            self.tenants[tenant].0 = self.tenants[tenant].0.plus(usage);
        }
        if let Some(pool) = pool {
            self.pools[pool] += usage.instances;
        }
    }

    /// Takes `more` for a step, or says which limit forbids it.
    pub(crate) fn spend(&mut self, tenant: usize, pool: usize, more: Usage) -> Result<(), Shortage> {
        self.fits(tenant, pool, more)?;
        self.count(Some(tenant), Some(pool), more);
        Ok(())
    }

    /// Whether there is room for `more`, or which limit forbids it. A limit that is not touched never does.
    pub(crate) fn fits(&self, tenant: usize, pool: usize, more: Usage) -> Result<(), Shortage> {
        self.fits_tenant(tenant, more)?;
        let per_pool = u64::from(self.tenants[tenant].1.quotas.max_instances_per_pool);
        first_passed(&[(PER_POOL, per_pool, self.pools[pool], more.instances)])?;
        self.fits_node(more)
    }

    /// Whether the tenant's quotas have room for `more` of what exists.
    pub(crate) fn fits_tenant(&self, tenant: usize, more: Usage) -> Result<(), Shortage> {
        let (used, limits) = &self.tenants[tenant];
        first_passed(&tenant_limits(limits, used, &more))
    }

    /// Whether the node itself has room for `more`.
    pub(crate) fn fits_node(&self, more: Usage) -> Result<(), Shortage> {
        first_passed(&node_limits(&self.capacity, &self.node, &more))
    }

    /// The limits that what exists passes already: they were lowered, or capacity went away.
    pub(crate) fn passed(&self) -> impl Iterator<Item = Passed> {
        let none = Usage::default();
        let node = node_limits(&self.capacity, &self.node, &none);
        let of_node = node.into_iter().map(|limit| (None, None, limit));
        let of_tenants = self.tenants.iter().enumerate().flat_map(move |(tenant, (used, limits))| {
            tenant_limits(limits, used, &none).into_iter().map(move |limit| (Some(tenant), None, limit))
        });
        of_node.chain(of_tenants).filter_map(|(tenant, pool, (limit, allowed, used, _))| {
            (used > allowed).then_some(Passed { tenant, pool, limit, allowed, used })
        })
    }

    /// The same for how many instances a pool may have.
    pub(crate) fn passed_by_pool(&self, tenant: usize, pool: usize) -> Option<Passed> {
        let allowed = u64::from(self.tenants[tenant].1.quotas.max_instances_per_pool);
        let used = self.pools[pool];
        let passed = Passed { tenant: Some(tenant), pool: Some(pool), limit: PER_POOL, allowed, used };
        (used > allowed).then_some(passed)
    }
}

/// A limit that is passed. No tenant: it is the node's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Passed {
    pub(crate) tenant: Option<usize>,
    pub(crate) pool: Option<usize>,
    pub(crate) limit: &'static str,
    pub(crate) allowed: u64,
    pub(crate) used: u64,
}

fn tenant_limits(limits: &Limits, used: &Usage, more: &Usage) -> [Limit; 6] {
    let Limits { quotas, addresses: (name, addresses) } = limits;
    let [vcpus, mem, running, warm, disk] = quota_limits(quotas, used, more);
    let addresses = (*name, u64::from(*addresses), used.addresses, more.addresses);
    [vcpus, mem, running, warm, disk, addresses]
}
