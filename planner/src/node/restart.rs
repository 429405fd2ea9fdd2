//! Restarts workloads that ended or are unhealthy, as their pool's `restart` says.
//!
//! An instance with a failed workload keeps its place in its count but does not count as working. Its workload is restarted in
//! the same guest a few times, then in a new guest; an instance of an older revision is replaced at once, and a surplus one is
//! stopped. A restart uses no additional resources, so it also happens in critical and pinned pools, under memory pressure and
//! after the document has expired.

use std::time::Duration;

use mvm_proto::{Phase, Timestamp, WorkloadState};

use super::clock::Clock;
use super::draft::{Draft, Freshness};
use super::hold::{Hold, hands_off, hold};
use super::replace::{more_for, replaces_failed};
use super::view::PoolView;
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::workload::{RESTARTS_IN_PLACE, Workload};

/// No wait is longer: a time further ahead was written before the clock was set back.
const MAX_WAIT: Duration = Duration::from_secs(3600);

pub(crate) fn restart_failed(draft: &mut Draft, view: &mut PoolView<'_>) {
    let mut spare = view.have.running.saturating_sub(view.wanted().running);
    for instance in std::mem::take(&mut view.down) {
        let Some(workload) = instance.workload.as_deref() else { continue };
        let is_own = !instance.on_demand && instance.staging.is_none();
        if is_own && spare > 0 && draft.freshness == Freshness::Current {
            spare -= 1;
            if stop(draft, view, instance, workload) {
                continue;
            }
        }
        // A surge instance of a revision that was given up is not brought back.
        let is_left_over = instance.staging == Some(Phase::Running) && view.is_outdated(instance);
        if is_left_over && draft.freshness == Freshness::Current {
            let why = format!("surge instance of an older revision, and its workload {}", describe(workload));
            match hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Stop, &draft.clock) {
                Some(hold) => draft.held(view.pool_ref, instance, Action::Stop, &why, hold),
                None => draft.step(view.pool_ref, Some(instance), Action::Stop, None, why),
            }
            continue;
        }
        bring_back(draft, view, instance, workload, is_own);
        view.down.push(instance);
    }
}

/// Stops one that no count wants. False: it may not be stopped, so that it is kept up.
fn stop(
    draft: &mut Draft,
    view: &mut PoolView<'_>,
    instance: &ObservedInstance,
    workload: &Workload,
) -> bool {
    let why = format!("surplus, and its workload {}", describe(workload));
    match hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Stop, &draft.clock) {
        Some(Hold::PinnedTenant | Hold::Critical) => return false,
        Some(hold) => draft.held(view.pool_ref, instance, Action::Stop, &why, hold),
        None => {
            draft.step(view.pool_ref, Some(instance), Action::Stop, None, why);
            view.have.running -= 1;
        }
    }
    true
}

fn bring_back(
    draft: &mut Draft,
    view: &mut PoolView<'_>,
    instance: &ObservedInstance,
    workload: &Workload,
    is_own: bool,
) {
    let why = format!("its program {}", describe(workload));
    if let Some(hold) = hands_off(instance, &draft.clock) {
        return draft.held(view.pool_ref, instance, Action::Restart, &why, hold);
    }
    let may_be_replaced = is_own && (!view.is_outdated(instance) || replaces_failed(view));
    // What is of an older revision may be down for that.
    if may_be_replaced && view.is_outdated(instance) && replace(draft, view, instance, &why) {
        return;
    }
    if let Some(due) = waits_until(workload, &draft.clock) {
        let left = draft.clock.left(due).as_millis().div_ceil(1000);
        let reason = format!("{why}; restarted {} times in a row, {left} s left", workload.restarts);
        return draft.defer(view.pool_ref, Some(&instance.id), Action::Restart, 1, reason);
    }
    if may_be_replaced && workload.restarts >= RESTARTS_IN_PLACE && replace(draft, view, instance, &why) {
        return;
    }
    draft.step(view.pool_ref, Some(instance), Action::Restart, None, why);
}

/// Plans a new guest in place of this one. False: something is in the way.
fn replace(draft: &mut Draft, view: &mut PoolView<'_>, instance: &ObservedInstance, why: &str) -> bool {
    let is_barred = draft.freshness == Freshness::Expired || view.no_start.is_some() || draft.under_pressure;
    let hold = hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Replace, &draft.clock);
    // Nothing works in it that its minimum would be for.
    let is_free = matches!(hold, None | Some(Hold::MinRunning(_)));
    if is_barred
        || !is_free
        || view.staging_busy
        || draft.spend(view.pool_ref, more_for(view, instance)).is_err()
    {
        return false;
    }
    draft.step(view.pool_ref, Some(instance), Action::Replace, None, why.to_owned());
    view.staging_busy = true;
    true
}

/// Until when its next restart waits, if it does.
fn waits_until(workload: &Workload, clock: &Clock) -> Option<Timestamp> {
    Some(workload.due_at()).filter(|due| clock.is_held_until(*due, MAX_WAIT))
}

fn describe(workload: &Workload) -> &'static str {
    match workload.state {
        WorkloadState::Running => "runs",
        WorkloadState::Completed => "ended with exit code 0",
        WorkloadState::Failed => "failed",
        WorkloadState::Unhealthy => "is unhealthy",
    }
}
