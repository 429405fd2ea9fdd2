//! Sorts the observed instances into their pools, and finds the pools that have converged already.

use std::collections::BTreeMap;

use mvm_proto::document::Tenant;
use mvm_proto::{DesiredState, Digest, Phase, TenantId};

use super::budget::Budget;
use super::draft::PoolRef;
use super::index::PoolIndex;
use super::view::PhaseCounts;
use crate::observation::ObservedInstance;
use crate::revision::revision_of;
use crate::usage::Usage;

/// One pool of the document and what exists of it.
#[derive(Debug)]
pub(crate) struct Members<'a> {
    pub(crate) pool_ref: PoolRef<'a>,
    /// Worked out when its first instance is looked at: by then the pool itself is near.
    revision: Option<Digest>,
    /// Those that came first in the observation, and all that came apart from them later: mostly none.
    first: &'a [ObservedInstance],
    others: Vec<&'a [ObservedInstance]>,
    /// How many are in each phase that has a count, as far as [`is_settled`] holds for all.
    have: PhaseCounts,
    all_settled: bool,
    /// As of the instances so far. Said while the pool's counts are near, which they are not when a plan asks.
    converged: bool,
}

/// The instances whose pool the document does not name, with the tenant if it names that.
pub(crate) type Unnamed<'a> = Vec<(Option<&'a Tenant>, &'a ObservedInstance)>;

impl<'a> Members<'a> {
    fn none_of(pool_ref: PoolRef<'a>) -> Self {
        let have = PhaseCounts::default();
        Self {
            pool_ref,
            revision: None,
            first: &[],
            others: Vec::new(),
            have,
            all_settled: true,
            converged: false,
        }
    }

    /// In the order of the observation.
    pub(crate) fn instances(&self) -> impl Iterator<Item = &'a ObservedInstance> {
        self.first.iter().chain(self.others.iter().copied().flatten())
    }

    pub(crate) fn revision(&self) -> Digest {
        self.revision.unwrap_or_else(|| revision_of(self.pool_ref.tenant, self.pool_ref.pool))
    }

    fn add(&mut self, group: &'a [ObservedInstance]) {
        let revision = self.revision();
        // What is claimed is in no count, and nothing is done to it.
        for instance in group.iter().filter(|instance| !instance.claimed) {
            self.all_settled &= is_settled(instance, &revision);
            self.have.count(instance.moving_in().unwrap_or(instance.phase));
        }
        self.revision = Some(revision);
        self.converged = self.all_settled && self.have == PhaseCounts::wanted(self.pool_ref.pool);
        if self.first.is_empty() {
            self.first = group;
        } else {
            self.others.push(group);
        }
    }

    /// Every instance is one of the counts' own, with nothing to do to it, and there are just as many as wanted.
    ///
    /// No pass has anything to do with such a pool. Most pools are like that most of the time.
    pub(crate) fn is_converged(&self) -> bool {
        if self.first.is_empty() {
            PhaseCounts::wanted(self.pool_ref.pool) == PhaseCounts::default()
        } else {
            self.converged
        }
    }
}

/// The document's pools, still empty: sorted by role, then as written.
pub(crate) fn pools(desired: &DesiredState) -> Vec<Members<'_>> {
    let mut pools = Vec::with_capacity(desired.tenants.iter().map(|tenant| tenant.pools.len()).sum());
    for (tenant_index, tenant) in desired.tenants.iter().enumerate() {
        for (position, pool) in tenant.pools.iter().enumerate() {
            let pool_ref = PoolRef { tenant, pool, tenant_index, pool_index: 0, position };
            pools.push(Members::none_of(pool_ref));
        }
    }
    // Sorting takes half as much memory again, also where there is nothing to sort.
    if !pools.is_sorted_by_key(|members| members.pool_ref.pool.role) {
        pools.sort_by_key(|members| members.pool_ref.pool.role);
    }
    for (pool_index, members) in pools.iter_mut().enumerate() {
        members.pool_ref.pool_index = pool_index;
    }
    pools
}

/// Gives every instance to its pool and counts what it uses. Returns those whose pool the document does not name.
pub(crate) fn sort_in<'a>(
    budget: &mut Budget,
    desired: &'a DesiredState,
    pools: &mut [Members<'a>],
    instances: &'a [ObservedInstance],
) -> Unnamed<'a> {
    let mut index = None;
    let tenants: BTreeMap<&TenantId, usize> =
        desired.tenants.iter().enumerate().map(|(number, tenant)| (&tenant.tenant_id, number)).collect();
    let mut unnamed = Vec::new();
    let mut next = 0;
    // Instances of one pool often come together. Looking for where they end also brings them all near: on a full node
    // most of a plan's time goes by waiting for memory, and the waits of a short loop overlap.
    for group in instances.chunk_by(|a, b| a.pool == b.pool && a.tenant == b.tenant) {
        let (tenant, pool) = (&group[0].tenant, &group[0].pool);
        let is_it =
            |pool_ref: PoolRef<'_>| pool_ref.pool.pool_id == *pool && pool_ref.tenant.tenant_id == *tenant;
        // Mostly a node is observed in the order of its document: then nothing need be looked up at all.
        let found = if pools.get(next).is_some_and(|members| is_it(members.pool_ref)) {
            Some(next)
        } else {
            let index =
                index.get_or_insert_with(|| PoolIndex::new(pools.iter().map(|members| members.pool_ref)));
            index.find(tenant, pool, |number| is_it(pools[number].pool_ref))
        };
        let size = found.map(|number| &pools[number].pool_ref.pool.instance_resources);
        let named = found.map(|number| pools[number].pool_ref.tenant_index);
        let tenant = named.or_else(|| tenants.get(tenant).copied());
        let network = tenant.map(|tenant| &desired.tenants[tenant].network).filter(|net| !net.is_whole());
        let used = group.iter().fold(Usage::default(), |used, instance| {
            let one = Usage::now(instance).most(Usage::soon(instance, size));
            used.plus(one.held_by(instance, network))
        });
        let Some(number) = found else {
            budget.count(tenant, None, used);
            let tenant = tenant.map(|tenant| &desired.tenants[tenant]);
            unnamed.extend(group.iter().map(|instance| (tenant, instance)));
            continue;
        };
        next = number + 1;
        let members = &mut pools[number];
        budget.count(Some(members.pool_ref.tenant_index), Some(number), used);
        members.add(group);
    }
    unnamed
}

/// One of the counts' own, of the pool's revision, and nothing is under way.
fn is_settled(instance: &ObservedInstance, revision: &Digest) -> bool {
    let has_a_count = matches!(instance.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
    let is_under_way = instance.moving_to.is_some() || instance.staging.is_some();
    // What moves is left alone, whatever it is made of.
    if instance.moving {
        return true;
    }
    has_a_count
        && !instance.on_demand
        && !is_under_way
        && !instance.is_down()
        && instance.revision == *revision
}
