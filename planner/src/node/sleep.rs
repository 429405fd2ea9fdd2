//! Puts instances that a request woke back to warm or sleeping once they are idle.
//!
//! The counts never use these instances, and this stage never touches the counts' own, so neither undoes the other's work.

use std::time::Duration;

use mvm_proto::{Phase, Timestamp};

use super::draft::{Draft, Freshness};
use super::hold::{Hold, hold};
use super::view::{PoolView, coldest_first};
use crate::limits::Shortage;
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::usage::Usage;

pub(crate) fn put_back_idle(draft: &mut Draft, view: &mut PoolView<'_>) {
    let mut woken = std::mem::take(&mut view.on_demand);
    coldest_first(view, &mut woken);
    // Where the running count can't be filled, they stand in for what it lacks: put back, they would be woken for it.
    let stands_in = |i: &&&ObservedInstance| i.phase == Phase::Running && home(i) != Phase::Running;
    let up = woken.iter().filter(stands_in).count();
    let lacking = if draft.under_pressure { 0 } else { view.missing.running };
    let mut may_go = up.saturating_sub(lacking);
    for instance in woken {
        let due = due(draft, view, instance);
        // Paused it would keep its memory: under pressure it is put to sleep in its turn instead.
        let (action, idle) = match due {
            Some(due) if due.0 == Action::Sleep || !draft.under_pressure => due,
            _ => {
                view.on_demand.push(instance);
                continue;
            }
        };
        let why = format!("woken on demand, idle for {} s", idle.as_secs());
        let (tenant, pool) = (view.pool_ref.tenant, view.pool_ref.pool);
        let pinned = pool.pinned.then_some(Hold::PinnedPool);
        if let Some(hold) = pinned.or_else(|| hold(tenant, pool, instance, action, &draft.clock)) {
            draft.held(view.pool_ref, instance, action, &why, hold);
            view.on_demand.push(instance);
            continue;
        }
        if instance.phase == Phase::Running && may_go == 0 {
            let why = format!("the running count lacks {lacking}; {why}");
            draft.defer(view.pool_ref, Some(&instance.id), action, 1, why);
            view.on_demand.push(instance);
            continue;
        }
        let mut spend = |action: Action| {
            let to = action.leads_to(Some(instance.phase));
            let more = Usage::of(to, &instance.resources, None).beyond(Usage::now(instance));
            draft.spend(view.pool_ref, more).map(|()| action)
        };
        // Where no more may be warm, it sleeps in its time.
        let spent = match spend(action) {
            Err(shortage) if action == Action::Warm => sleeps_instead(draft, view, instance, shortage),
            spent => spent,
        };
        match spent {
            Ok(action) => {
                may_go -= usize::from(instance.phase == Phase::Running);
                draft.step(view.pool_ref, Some(instance), action, None, why);
            }
            Err(shortage) if stops_instead(draft, view, instance, action) => {
                may_go -= usize::from(instance.phase == Phase::Running);
                view.have.sleeping -= 1;
                let why = format!("{why}; no count wants it, and it can't sleep: {shortage}");
                draft.step(view.pool_ref, Some(instance), Action::Stop, None, why);
            }
            Err(shortage) => {
                draft.defer(view.pool_ref, Some(&instance.id), action, 1, format!("{shortage}; {why}"));
                view.on_demand.push(instance);
            }
        }
    }
}

/// A sleep in place of what is short, if it was idle for as long as that takes and may sleep.
fn sleeps_instead(
    draft: &mut Draft,
    view: &PoolView<'_>,
    instance: &ObservedInstance,
    shortage: Shortage,
) -> Result<Action, Shortage> {
    let after = Duration::from_secs(view.pool_ref.pool.sleep_policy.sleep_after_seconds);
    let Some(at) = view.idle_from(instance).map(|since| since + after) else { return Err(shortage) };
    if !draft.clock.is_past(at) {
        return Err(shortage);
    }
    let more = Usage::of(Phase::Sleeping, &instance.resources, None).beyond(Usage::now(instance));
    let held = hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Sleep, &draft.clock);
    if held.is_some() || draft.spend(view.pool_ref, more).is_err() {
        return Err(shortage);
    }
    Ok(Action::Sleep)
}

/// A stop in place of a sleep for which there is no room, if the sleeping count does not want it: asleep it would be stopped.
fn stops_instead(draft: &Draft, view: &PoolView<'_>, instance: &ObservedInstance, action: Action) -> bool {
    action == Action::Sleep
        && draft.freshness == Freshness::Current
        && view.have.sleeping > view.wanted().sleeping
        && hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Stop, &draft.clock).is_none()
}

/// The count that it has its place in.
fn home(instance: &ObservedInstance) -> Phase {
    instance.home.unwrap_or(Phase::Running)
}

/// The step that its idle time asks for now.
fn due(draft: &Draft, view: &PoolView<'_>, instance: &ObservedInstance) -> Option<(Action, Duration)> {
    let since = view.idle_from(instance)?;
    let policy = &view.pool_ref.pool.sleep_policy;
    let at = |seconds: u64| -> Timestamp { since + Duration::from_secs(seconds) };
    let (warm_at, sleep_at) = (at(policy.warm_after_seconds), at(policy.sleep_after_seconds));
    let home = home(instance);
    let idle = draft.clock.age(since);
    if home == Phase::Sleeping && draft.clock.is_past(sleep_at) {
        return Some((Action::Sleep, idle));
    }
    let warms = instance.phase == Phase::Running && home != Phase::Running && draft.clock.is_past(warm_at);
    warms.then_some((Action::Warm, idle))
}
