//! Plans the next steps of one node.
//!
//! [`plan_node`] sorts the observed instances into the document's pools and skips every pool that has converged (see
//! [`members`]). For each other pool it builds a [`view`] and runs its stages, which all spend from one [`budget`] and all
//! respect the same [`hold`]s:
//!
//! 1. [`scale_up`] fills the running counts, pools in the order of their roles.
//! 2. In the reverse order: [`sleep`] puts back instances that a request woke, [`restart`] starts failed programs again,
//!    [`surplus`] uses surplus instances for the warm and sleeping counts or stops them.
//! 3. [`prune`] handles instances that the document does not name.
//! 4. [`pressure`] puts idle instances to sleep while the node is short of memory.
//! 5. [`stage`] boots what the warm and sleeping counts still lack, [`replace`] rolls out a new revision, [`retention`]
//!    destroys instances that were stopped long enough ago.
//!
//! After the document has expired, [`plan_expired`] runs the smaller set of stages in [`expired`].

mod budget;
mod clock;
mod draft;
mod expired;
mod hold;
mod index;
mod members;
mod pressure;
mod prune;
mod replace;
mod restart;
mod retention;
mod scale_up;
pub(crate) mod serving;
mod sleep;
mod stage;
mod surplus;
mod view;

#[cfg(test)]
mod tests;

pub use hold::MAX_OVERRIDE;
pub use serving::{RolloutProgress, rollout_progress};

use mvm_proto::{DesiredState, InstanceId, Phase, Timestamp};

use crate::observation::{Blocked, Observation, ObservedInstance};
use crate::plan::{NodePlan, OverLimit};
use crate::usage::Usage;
use budget::Budget;
use clock::Clock;
use draft::{Draft, Freshness, PoolRef};
use members::{Members, pools, sort_in};
use view::PoolView;

/// The steps that bring `observed` closer to `desired`; empty when they already agree.
#[must_use]
pub fn plan_node(desired: &DesiredState, observed: &Observation, now: Timestamp) -> NodePlan {
    plan_pools(desired, observed, now, Freshness::Current, skip_converged(observed))
}

/// The steps that a document past its expiry still asks for: the instances that there are go on. What failed is started
/// again, the sleep policy and memory pressure put to rest and bring back as ever; nothing is made, replaced, stopped or
/// destroyed, whatever the document says.
#[must_use]
pub fn plan_expired(desired: &DesiredState, observed: &Observation, now: Timestamp) -> NodePlan {
    plan_pools(desired, observed, now, Freshness::Expired, skip_converged(observed))
}

/// Under pressure even a pool at rest may have to give something.
fn skip_converged(observed: &Observation) -> fn(&Members<'_>) -> bool {
    if observed.memory_pressure { |_| false } else { |members| members.is_converged() }
}

/// The same without a look at the pools of which `skip` is true.
fn plan_pools(
    desired: &DesiredState,
    observed: &Observation,
    now: Timestamp,
    freshness: Freshness,
    skip: fn(&Members<'_>) -> bool,
) -> NodePlan {
    let mut pools = pools(desired);
    let budget = Budget::new(observed.capacity, &desired.tenants, pools.len());
    let under_pressure = observed.memory_pressure;
    let mut draft =
        Draft { plan: NodePlan::default(), budget, clock: Clock::new(now), under_pressure, freshness };
    let mut unnamed = sort_in(&mut draft.budget, desired, &mut pools, &observed.instances);

    report_passed_limits(&mut draft, desired, &pools);

    for members in pools.iter().filter(|members| members.pool_ref.pool.update.is_some()) {
        members.instances().for_each(|instance| {
            serving::is_unproven(members.pool_ref.pool, instance, &draft.clock);
        });
    }

    let busy = pools.iter().filter(|members| !skip(members));
    let mut views: Vec<_> = busy
        .map(|members| PoolView::new(members, no_start(members.pool_ref, &observed.blocked), &draft.clock))
        .collect();
    for view in &mut views {
        match freshness {
            Freshness::Current => scale_up::fill_running(&mut draft, view),
            Freshness::Expired => expired::restart(&mut draft, view),
        }
    }
    for view in views.iter_mut().rev() {
        sleep::put_back_idle(&mut draft, view);
        restart::restart_failed(&mut draft, view);
        match freshness {
            Freshness::Current => {
                surplus::use_or_stop(&mut draft, view);
                replace::dismiss_surge(&mut draft, view);
            }
            Freshness::Expired => expired::settle(&mut draft, view),
        }
    }
    // Told last, and decided before memory is looked for: what is pruned gives some back.
    let begun = (draft.plan.steps.len(), draft.plan.deferred.len());
    unnamed.sort_by_key(|(_, instance)| (&instance.tenant, &instance.pool, &instance.id));
    for (tenant, instance) in unnamed {
        prune::prune(&mut draft, desired, tenant, instance);
    }
    let pruned = (draft.plan.steps.len() - begun.0, draft.plan.deferred.len() - begun.1);
    if under_pressure {
        pressure::relieve(&mut draft, &mut views, &observed.instances);
    }
    for view in &mut views {
        match freshness {
            Freshness::Current => {
                stage::stage(&mut draft, view);
                replace::replace(&mut draft, view);
                retention::destroy_old(&mut draft, view);
            }
            Freshness::Expired => expired::stage(&mut draft, view),
        }
    }
    draft.plan.steps[begun.0..].rotate_left(pruned.0);
    draft.plan.deferred[begun.1..].rotate_left(pruned.1);
    draft.finish()
}

/// Whether this instance may go to another phase now: the same quotas and capacity as for planned steps.
///
/// What already moves counts as if it had arrived. An instance whose pool is unmanaged is held to its tenant's
/// quotas all the same; one whose tenant is unmanaged, to the node's capacity alone.
pub fn check_move(
    desired: &DesiredState,
    observed: &Observation,
    instance: &InstanceId,
    to: Phase,
) -> Result<(), String> {
    let Some(at) = observed.instances.iter().position(|i| i.id == *instance) else {
        return Err(format!("{instance} does not exist"));
    };
    let mut found = observed.instances[at].clone();
    found.moving_to = None;
    let mut pools = pools(desired);
    let mut budget = Budget::new(observed.capacity, &desired.tenants, pools.len());
    for others in [&observed.instances[..at], &observed.instances[at + 1..]] {
        sort_in(&mut budget, desired, &mut pools, others);
    }
    let pool_ref = pools
        .iter()
        .map(|members| members.pool_ref)
        .find(|pool_ref| pool_ref.tenant.tenant_id == found.tenant && pool_ref.pool.pool_id == found.pool);
    if let Some(reason) = pool_ref.and_then(|pool_ref| no_start(pool_ref, &observed.blocked))
        && to == Phase::Running
    {
        return Err(reason);
    }
    // Starting boots the pool's current size; everything else leaves an instance as large as it is.
    let size = match pool_ref {
        Some(pool_ref) if to == Phase::Running && found.is_startable() => &pool_ref.pool.instance_resources,
        _ => &found.resources,
    };
    let tenant = desired.tenants.iter().position(|tenant| tenant.tenant_id == found.tenant);
    let used = Usage::now(&found);
    let network = tenant.map(|tenant| &desired.tenants[tenant].network);
    budget.count(tenant, pool_ref.map(|pool_ref| pool_ref.pool_index), used.held_by(&found, network));
    let more = Usage::of(to, size, None).beyond(used);
    let of_tenant = tenant.map_or(Ok(()), |tenant| budget.fits_tenant(tenant, more));
    of_tenant.and_then(|()| budget.fits_node(more)).map_err(|shortage| shortage.to_string())
}

/// Whether an instance that comes from another node has room here in phase `to`. All of it is new: it is held to every
/// limit that a new one would be. One whose pool is unmanaged has no room.
pub fn check_arrival(
    desired: &DesiredState,
    observed: &Observation,
    newcomer: &ObservedInstance,
    to: Phase,
) -> Result<(), String> {
    let others: Vec<_> = observed.instances.iter().filter(|other| other.id != newcomer.id).cloned().collect();
    let mut pools = pools(desired);
    let mut budget = Budget::new(observed.capacity, &desired.tenants, pools.len());
    sort_in(&mut budget, desired, &mut pools, &others);
    let pool_ref = pools.iter().map(|members| members.pool_ref).find(|pool_ref| {
        pool_ref.tenant.tenant_id == newcomer.tenant && pool_ref.pool.pool_id == newcomer.pool
    });
    let Some(pool_ref) = pool_ref else {
        return Err(format!("the document does not name {}/{}", newcomer.tenant, newcomer.pool));
    };
    let network = Some(&pool_ref.tenant.network);
    let asked = Usage::of(to, &newcomer.resources, None).held_by(newcomer, network);
    budget.spend(pool_ref.tenant_index, pool_ref.pool_index, asked).map_err(|shortage| shortage.to_string())
}

/// Quotas hold before every start: what already runs beyond one that was lowered is told of, not stopped.
fn report_passed_limits(draft: &mut Draft, desired: &DesiredState, pools: &[Members<'_>]) {
    let by_pool = |members: &Members<'_>| {
        draft.budget.passed_by_pool(members.pool_ref.tenant_index, members.pool_ref.pool_index)
    };
    let passed: Vec<_> = draft.budget.passed().chain(pools.iter().filter_map(by_pool)).collect();
    for passed in passed {
        draft.plan.over_limit.push(OverLimit {
            tenant: passed.tenant.map(|tenant| desired.tenants[tenant].tenant_id.clone()),
            pool: passed.pool.map(|pool| pools[pool].pool_ref.pool.pool_id.clone()),
            limit: passed.limit.to_owned(),
            allowed: passed.allowed,
            used: passed.used,
        });
    }
}

/// Why nothing of this pool may be started now.
fn no_start(pool_ref: PoolRef<'_>, blocked: &[Blocked]) -> Option<String> {
    let PoolRef { tenant, pool, position, .. } = pool_ref;
    let limit = tenant.quotas.max_pools;
    let is_beyond = position >= usize::try_from(limit).unwrap_or(usize::MAX);
    let beyond = || format!("max_pools is {limit}, this is the tenant's pool number {}", position + 1);
    let names =
        |b: &&Blocked| b.tenant == tenant.tenant_id && b.pool.as_ref().is_none_or(|id| *id == pool.pool_id);
    let reasons = blocked.iter().filter(names).map(|b| b.reason.clone());
    let reasons: Vec<_> = is_beyond.then(beyond).into_iter().chain(reasons).collect();
    (!reasons.is_empty()).then(|| reasons.join("; "))
}
