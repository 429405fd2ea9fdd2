//! What one node does next.
//!
//! [`plan_node`] sorts the observed instances into the document's pools, then makes its passes: [`raise`] fills the
//! running counts, pools in the order of their roles; [`settle`] and [`policy`] put to rest what is spare, in the
//! reverse order; [`stage`], [`replace`] and [`retain`] make what the other counts lack, renew what is outdated and
//! clear away what was kept long enough; [`prune`] deals with what the document does not name. All passes spend
//! from one [`budget`], so that running counts come first everywhere, and all respect the same [`hold`]s.

mod budget;
mod draft;
mod hold;
mod policy;
mod prune;
mod raise;
mod replace;
mod retain;
mod settle;
mod stage;
mod view;

pub use hold::MAX_OVERRIDE;

use std::collections::BTreeMap;

use mvm_proto::document::{Pool, Tenant};
use mvm_proto::{DesiredState, InstanceId, Phase, PoolId, TenantId, Timestamp};

use crate::observation::{Blocked, Observation, ObservedInstance};
use crate::plan::{NodePlan, OverLimit};
use crate::revision::revision_of;
use budget::{Budget, Usage};
use draft::{Draft, Place};
use view::PoolView;

/// The steps that bring `observed` closer to `desired`; empty when they already agree.
#[must_use]
pub fn plan_node(desired: &DesiredState, observed: &Observation, now: Timestamp) -> NodePlan {
    let mut views = views(desired, &observed.blocked);
    let quotas = desired.tenants.iter().map(|tenant| tenant.quotas);
    let budget = Budget::new(observed.capacity, quotas, views.len());
    let mut draft = Draft { plan: NodePlan::default(), budget, now };
    let unnamed = sort_in(&mut draft, desired, &mut views, &observed.instances);

    report_passed_limits(&mut draft, desired, &views);

    for view in &mut views {
        raise::raise(&mut draft, view);
    }
    for view in views.iter_mut().rev() {
        policy::put_back_idle(&mut draft, view);
        settle::settle(&mut draft, view);
    }
    for view in &mut views {
        stage::stage(&mut draft, view);
        replace::replace(&mut draft, view);
        retain::retain(&mut draft, view);
    }
    for (tenant, instance) in unnamed {
        prune::prune(&mut draft, desired, tenant, instance);
    }
    draft.plan
}

/// Whether a request may wake this instance now: the same quotas and capacity as for every other start.
pub fn check_wake(
    desired: &DesiredState,
    observed: &Observation,
    instance: &InstanceId,
) -> Result<(), String> {
    check_move(desired, observed, instance, Phase::Running)
}

/// Whether somebody may move this instance to another phase now: the same quotas and capacity as for planned steps.
///
/// What already moves counts as if it had arrived. An instance whose pool nobody manages is held to its tenant's
/// quotas all the same; one whose tenant nobody manages, to the node's capacity alone.
pub fn check_move(
    desired: &DesiredState,
    observed: &Observation,
    instance: &InstanceId,
    to: Phase,
) -> Result<(), String> {
    let Some(found) = observed.instances.iter().find(|i| i.id == *instance) else {
        return Err(format!("{instance} does not exist"));
    };
    let mut found = found.clone();
    found.moving_to = None;
    let mut views = views(desired, &observed.blocked);
    let quotas = desired.tenants.iter().map(|tenant| tenant.quotas);
    let budget = Budget::new(observed.capacity, quotas, views.len());
    let mut draft = Draft { plan: NodePlan::default(), budget, now: Timestamp::from_unix_ms(0) };
    let others: Vec<_> = observed.instances.iter().filter(|i| i.id != *instance).cloned().collect();
    sort_in(&mut draft, desired, &mut views, &others);
    let is_its = |view: &&PoolView<'_>| {
        view.place.tenant.tenant_id == found.tenant && view.place.pool.pool_id == found.pool
    };
    let view = views.iter().find(is_its);
    if let Some(PoolView { no_start: Some(reason), .. }) = view
        && to == Phase::Running
    {
        return Err(reason.clone());
    }
    // Starting boots the pool's current size; everything else leaves an instance as large as it is.
    let size = match view {
        Some(view) if to == Phase::Running && found.is_startable() => &view.place.pool.instance_resources,
        _ => &found.resources,
    };
    let tenant = desired.tenants.iter().position(|tenant| tenant.tenant_id == found.tenant);
    let used = Usage::now(&found);
    draft.budget.count(tenant, view.map(|view| view.place.pool_index), used);
    let more = Usage::of(to, size, None).beyond(used);
    let of_tenant = tenant.map_or(Ok(()), |tenant| draft.budget.fits_tenant(tenant, more));
    of_tenant.and_then(|()| draft.budget.fits_node(more)).map_err(|shortage| shortage.to_string())
}

/// Quotas hold before every start: what already runs beyond one that was lowered is told of, not stopped.
fn report_passed_limits(draft: &mut Draft, desired: &DesiredState, views: &[PoolView<'_>]) {
    let by_pool =
        |view: &PoolView<'_>| draft.budget.passed_by_pool(view.place.tenant_index, view.place.pool_index);
    let passed: Vec<_> = draft.budget.passed().chain(views.iter().filter_map(by_pool)).collect();
    for passed in passed {
        draft.plan.over_limit.push(OverLimit {
            tenant: passed.tenant.map(|tenant| desired.tenants[tenant].tenant_id.clone()),
            pool: passed.pool.map(|pool| views[pool].place.pool.pool_id.clone()),
            limit: passed.limit.to_owned(),
            allowed: passed.allowed,
            used: passed.used,
        });
    }
}

/// The document's pools, still empty: sorted by role, then as written.
fn views<'a>(desired: &'a DesiredState, blocked: &[Blocked]) -> Vec<PoolView<'a>> {
    let mut views = Vec::new();
    for (tenant_index, tenant) in desired.tenants.iter().enumerate() {
        for (position, pool) in tenant.pools.iter().enumerate() {
            let place = Place { tenant, pool, tenant_index, pool_index: 0 };
            let no_start = no_start(tenant, pool, position, blocked);
            views.push(PoolView::new(place, revision_of(tenant, pool), no_start));
        }
    }
    views.sort_by_key(|view| view.place.pool.role);
    for (pool_index, view) in views.iter_mut().enumerate() {
        view.place.pool_index = pool_index;
    }
    views
}

fn no_start(tenant: &Tenant, pool: &Pool, position: usize, blocked: &[Blocked]) -> Option<String> {
    let limit = tenant.quotas.max_pools;
    if position >= usize::try_from(limit).unwrap_or(usize::MAX) {
        return Some(format!("max_pools is {limit}, this is the tenant's pool number {}", position + 1));
    }
    let names =
        |b: &&Blocked| b.tenant == tenant.tenant_id && b.pool.as_ref().is_none_or(|id| *id == pool.pool_id);
    blocked.iter().find(names).map(|b| b.reason.clone())
}

/// Gives every instance to its pool and counts what it uses. Returns those whose pool the document does not name.
fn sort_in<'a>(
    draft: &mut Draft,
    desired: &'a DesiredState,
    views: &mut [PoolView<'a>],
    instances: &'a [ObservedInstance],
) -> Vec<(Option<&'a Tenant>, &'a ObservedInstance)> {
    let tenants: BTreeMap<&TenantId, usize> =
        desired.tenants.iter().enumerate().map(|(index, tenant)| (&tenant.tenant_id, index)).collect();
    let pools: BTreeMap<(usize, &PoolId), usize> = views
        .iter()
        .enumerate()
        .map(|(index, view)| ((view.place.tenant_index, &view.place.pool.pool_id), index))
        .collect();
    let mut unnamed = Vec::new();
    // Instances of one pool mostly come together: the last answer is the next one.
    let mut last: Option<(&ObservedInstance, Option<usize>, Option<usize>)> = None;
    for instance in instances {
        let (tenant, pool) = match last {
            Some((same, tenant, pool)) if same.pool == instance.pool && same.tenant == instance.tenant => {
                (tenant, pool)
            }
            _ => {
                let tenant = tenants.get(&instance.tenant).copied();
                (tenant, tenant.and_then(|tenant| pools.get(&(tenant, &instance.pool)).copied()))
            }
        };
        last = Some((instance, tenant, pool));
        let size = pool.map(|pool| &views[pool].place.pool.instance_resources);
        draft.budget.count(tenant, pool, Usage::now(instance).most(Usage::soon(instance, size)));
        match pool {
            Some(pool) => views[pool].add(instance, draft.now),
            None => unnamed.push((tenant.map(|index| &desired.tenants[index]), instance)),
        }
    }
    unnamed
}
