//! What a tenant and a node may use at most, limit by limit, and which limit is in the way.

use std::fmt;

use mvm_proto::document::Quotas;

use crate::observation::Capacity;
use crate::usage::Usage;

const MIB_PER_GIB: u64 = 1024;

pub(crate) const PER_POOL: &str = "max_instances_per_pool";

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

/// A limit by name: what it allows, what is used, how much more is asked for.
pub(crate) type Limit = (&'static str, u64, u64, u64);

/// A tenant's quotas on what instances use; how many each pool has is counted elsewhere.
pub(crate) fn quota_limits(quotas: &Quotas, used: &Usage, more: &Usage) -> [Limit; 5] {
    let max_disk_mib = quotas.max_disk_gib.saturating_mul(MIB_PER_GIB);
    [
        ("max_vcpus", u64::from(quotas.max_vcpus), used.vcpus, more.vcpus),
        ("max_mem_mib", quotas.max_mem_mib, used.mem_mib, more.mem_mib),
        ("max_running", u64::from(quotas.max_running), used.running, more.running),
        ("max_warm", u64::from(quotas.max_warm), used.warm, more.warm),
        ("max_disk_gib (in MiB)", max_disk_mib, used.disk_mib, more.disk_mib),
    ]
}

pub(crate) fn node_limits(capacity: &Capacity, used: &Usage, more: &Usage) -> [Limit; 4] {
    [
        ("the node's vcpus", u64::from(capacity.vcpus), used.vcpus, more.vcpus),
        ("the node's mem_mib", capacity.mem_mib, used.mem_mib, more.mem_mib),
        ("the node's disk_mib", capacity.disk_mib, used.disk_mib, more.disk_mib),
        ("the node's max_instances", u64::from(capacity.max_instances), used.instances, more.instances),
    ]
}

/// The first limit that `asked` on top of `used` would pass. One that is not touched is never passed.
pub(crate) fn first_passed(limits: &[Limit]) -> Result<(), Shortage> {
    for &(limit, allowed, used, asked) in limits {
        if asked > 0 && used.saturating_add(asked) > allowed {
            return Err(Shortage { limit, allowed, used, asked });
        }
    }
    Ok(())
}
