//! What instances use, and what tenants and the node may use at most.
//!
//! Spending only adds: nothing that a plan stops or puts to sleep is given back before it is observed to be gone.
//! So a plan's steps may be carried out in any order, or at once, and no limit is passed on the way.

use std::fmt;

use mvm_proto::Phase;
use mvm_proto::document::{Quotas, Resources, Tenant};

use crate::observation::{Capacity, ObservedInstance};

const MIB_PER_GIB: u64 = 1024;

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Usage {
    pub(crate) vcpus: u64,
    pub(crate) mem_mib: u64,
    pub(crate) disk_mib: u64,
    pub(crate) running: u64,
    pub(crate) warm: u64,
    pub(crate) instances: u64,
}

impl Usage {
    /// What an instance of this size uses in this phase.
    ///
    /// Its data disk exists from its creation to its end; a snapshot adds the size of the guest's memory.
    /// Booted only to be put to warm or sleep, it is not counted as running.
    pub(crate) fn of(phase: Phase, size: &Resources, staging: Option<Phase>) -> Self {
        let resting = Self { disk_mib: size.data_disk_mib, instances: 1, ..Self::default() };
        let vcpus = u64::from(size.vcpus);
        match phase {
            Phase::Running => {
                let running = u64::from(!matches!(staging, Some(Phase::Warm | Phase::Sleeping)));
                Self { vcpus, mem_mib: size.mem_mib, running, ..resting }
            }
            Phase::Warm => Self { mem_mib: size.mem_mib, warm: 1, ..resting },
            Phase::Sleeping => Self { disk_mib: size.data_disk_mib + size.mem_mib, ..resting },
            Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed => resting,
            Phase::Destroyed => Self::default(),
        }
    }

    /// What an instance uses now; one that is being moved, the most of where it was and where it goes. What is being
    /// stopped or destroyed uses what it has until it is seen to be gone, and nothing more, whatever it was booted for.
    pub(crate) fn now(instance: &ObservedInstance) -> Self {
        let at = |phase| Self::of(phase, &instance.resources, instance.staging);
        let to = match instance.moving_to {
            None | Some(Phase::Stopped | Phase::Destroyed) => return at(instance.phase),
            Some(to) => to,
        };
        let ends = at(instance.phase).most(at(to));
        if instance.is_undecided() {
            let kept = Self::of(Phase::Running, &instance.resources, None);
            return kept.most(Self::boot(&instance.resources, instance.staging));
        }
        // A replacement boots on its way back to rest.
        if instance.is_being_replaced() {
            let staging = (to != Phase::Running).then_some(to);
            return ends.most(Self::of(Phase::Running, &instance.resources, staging));
        }
        match instance.staging {
            Some(_) if to == Phase::Running => ends.most(Self::boot(&instance.resources, instance.staging)),
            Some(_) => ends.most(at(Phase::Running)),
            None => ends,
        }
    }

    /// The most that an instance uses from its boot until it is where the boot was meant to bring it.
    ///
    /// Its place at rest is taken from the beginning: so that it is still free when the boot is done.
    pub(crate) fn boot(size: &Resources, staging: Option<Phase>) -> Self {
        let target = staging.unwrap_or(Phase::Running);
        Self::of(Phase::Running, size, staging).most(Self::of(target, size, None))
    }

    /// What an instance that is being booted anew will use: its pool's size, which may not be its own yet.
    pub(crate) fn soon(instance: &ObservedInstance, pool_size: Option<&Resources>) -> Self {
        let (Some(_), Some(size)) = (instance.moving_to, pool_size) else { return Self::default() };
        let rests = matches!(instance.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
        match instance.moving_to {
            Some(to) if instance.is_being_replaced() => Self::boot(size, Some(to)),
            Some(Phase::Running) if !rests => Self::boot(size, instance.staging),
            _ => Self::default(),
        }
    }

    pub(crate) fn most(self, other: Self) -> Self {
        self.zip(other, u64::max)
    }

    /// What `self` uses more than `base`.
    pub(crate) fn beyond(self, base: Self) -> Self {
        self.zip(base, u64::saturating_sub)
    }

    pub(crate) fn plus(self, other: Self) -> Self {
        self.zip(other, u64::saturating_add)
    }

    fn zip(self, other: Self, with: fn(u64, u64) -> u64) -> Self {
        Self {
            vcpus: with(self.vcpus, other.vcpus),
            mem_mib: with(self.mem_mib, other.mem_mib),
            disk_mib: with(self.disk_mib, other.disk_mib),
            running: with(self.running, other.running),
            warm: with(self.warm, other.warm),
            instances: with(self.instances, other.instances),
        }
    }
}

/// A limit that a step would pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shortage {
    limit: &'static str,
    allowed: u64,
    used: u64,
    asked: u64,
}

impl fmt::Display for Shortage {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, allowed, used, asked } = self;
        write!(f, "{limit} is {allowed}: {used} in use, {asked} more needed")
    }
}

/// The node's use and every managed tenant's, each with its limits.
#[derive(Debug)]
pub(crate) struct Budget {
    capacity: Capacity,
    node: Usage,
    tenants: Vec<(Usage, Limits)>,
    pools: Vec<u64>,
}

/// What a tenant may use: its quotas, and as many instances as its subnet has addresses for.
#[derive(Debug, Clone, Copy)]
struct Limits {
    quotas: Quotas,
    addresses: u32,
}

impl Budget {
    pub(crate) fn new(capacity: Capacity, tenants: &[Tenant], pools: usize) -> Self {
        let limits = |tenant: &Tenant| {
            let addresses = tenant.network.ipv4_subnet.instance_capacity();
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

const PER_POOL: &str = "max_instances_per_pool";

/// A limit by name: what it allows, what is used, how much more is asked for.
type Limit = (&'static str, u64, u64, u64);

fn tenant_limits(limits: &Limits, used: &Usage, more: &Usage) -> [Limit; 6] {
    let Limits { quotas, addresses } = limits;
    let max_disk_mib = quotas.max_disk_gib.saturating_mul(MIB_PER_GIB);
    [
        ("max_vcpus", u64::from(quotas.max_vcpus), used.vcpus, more.vcpus),
        ("max_mem_mib", quotas.max_mem_mib, used.mem_mib, more.mem_mib),
        ("max_running", u64::from(quotas.max_running), used.running, more.running),
        ("max_warm", u64::from(quotas.max_warm), used.warm, more.warm),
        ("max_disk_gib (in MiB)", max_disk_mib, used.disk_mib, more.disk_mib),
        ("the subnet's addresses", u64::from(*addresses), used.instances, more.instances),
    ]
}

fn node_limits(capacity: &Capacity, used: &Usage, more: &Usage) -> [Limit; 4] {
    [
        ("the node's vcpus", u64::from(capacity.vcpus), used.vcpus, more.vcpus),
        ("the node's mem_mib", capacity.mem_mib, used.mem_mib, more.mem_mib),
        ("the node's disk_mib", capacity.disk_mib, used.disk_mib, more.disk_mib),
        ("the node's max_instances", u64::from(capacity.max_instances), used.instances, more.instances),
    ]
}

/// The first limit that `asked` on top of `used` would pass. One that is not touched is never passed.
fn first_passed(limits: &[Limit]) -> Result<(), Shortage> {
    for &(limit, allowed, used, asked) in limits {
        if asked > 0 && used.saturating_add(asked) > allowed {
            return Err(Shortage { limit, allowed, used, asked });
        }
    }
    Ok(())
}
