//! Instances that the document does not name: stops and destroys them where it asks to prune, else reports them.

use std::time::Duration;

use mvm_proto::document::{SleepPolicy, Tenant};
use mvm_proto::{DesiredState, Phase};

use super::draft::{Draft, Freshness};
use super::expired::EXPIRED;
use super::hold::{Hold, hands_off};
use crate::observation::ObservedInstance;
use crate::plan::{Action, Deferred, Step, Unmanaged};

/// `tenant` is the instance's tenant if the document names it; its pool is not in the document.
pub(crate) fn prune(
    draft: &mut Draft,
    desired: &DesiredState,
    tenant: Option<&Tenant>,
    instance: &ObservedInstance,
) {
    let asked = if tenant.is_some() { desired.prune_unknown_pools } else { desired.prune_unknown_tenants };
    if !asked {
        draft.plan.unmanaged.push(Unmanaged {
            tenant: instance.tenant.clone(),
            pool: instance.pool.clone(),
            instance: instance.id.clone(),
            phase: instance.phase,
        });
        return;
    }
    if instance.moving_to.is_some() || instance.phase == Phase::Destroyed {
        return;
    }
    let action = match instance.phase {
        Phase::Running | Phase::Warm | Phase::Sleeping => Action::Stop,
        _ => Action::Destroy,
    };
    let what = if tenant.is_some() { "pool" } else { "tenant" };
    let why = format!("the document does not name its {what}, and asks to prune");
    match held(draft, tenant, instance) {
        None => draft.plan.steps.push(Step {
            tenant: instance.tenant.clone(),
            pool: instance.pool.clone(),
            instance: Some(instance.id.clone()),
            action,
            staging: None,
            reason: why,
        }),
        Some(reason) => draft.plan.deferred.push(Deferred {
            tenant: instance.tenant.clone(),
            pool: instance.pool.clone(),
            instance: Some(instance.id.clone()),
            action,
            count: 1,
            reason: format!("{reason}; {why}"),
        }),
    }
}

fn held(draft: &Draft, tenant: Option<&Tenant>, instance: &ObservedInstance) -> Option<String> {
    if draft.freshness == Freshness::Expired {
        return Some(EXPIRED.to_owned());
    }
    let pinned = tenant.is_some_and(|tenant| tenant.pinned).then_some(Hold::PinnedTenant);
    if let Some(hold) = pinned.or_else(|| hands_off(instance, &draft.clock)) {
        return Some(hold.describe(&draft.clock));
    }
    if !instance.on_demand || !matches!(instance.phase, Phase::Running | Phase::Warm) {
        return None;
    }
    // The pool's own policy went with the pool; the default one says when a woken instance is done.
    let after = Duration::from_secs(SleepPolicy::default().warm_after_seconds);
    let is_idle = instance.idle_since.is_some_and(|since| draft.clock.is_past(since + after));
    // Nor does anyone use a program that does not work.
    (!is_idle && !instance.is_down()).then(|| Hold::OnDemand.describe(&draft.clock))
}
