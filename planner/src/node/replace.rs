//! Rolls out a new revision: replaces instances of an older one, one at a time per pool.
//!
//! While running instances are replaced, a surge instance runs beside them, so that the running count holds. Without room for
//! the surge instance and the replacement, instances are replaced in place. The surge instance is stopped when the rollout is
//! done, or when the next replacement needs its room.
//!
//! A pool's [`Update`] bounds that: whether there may be a surge instance, whether the running count may lack one meanwhile, and
//! for how long a new instance has to work before the next one is replaced.

use mvm_proto::Phase;
use mvm_proto::document::{Update, UpdateSleeping};

use super::draft::{Draft, PoolRef};
use super::hold::{Hold, hold};
use super::scale_up::backing_off;
use super::stage::ONE_AT_A_TIME;
use super::view::{PoolView, coldest_first, readiest_first};
use crate::limits::Shortage;
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::usage::Usage;

const WHY: &str = "the pool's revision changed";
const DONE: &str = "surge instance of a finished replacement";
const NOT_ITS_TURN: &str = "the document lets nothing be replaced now";
const NO_SURGE: &str = "the document allows no further surge instance";

/// What the document allows.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Allowed {
    /// Anything may be replaced that serves or rests.
    pub(crate) any: bool,
    /// How many may run beyond the running count.
    surge: usize,
    /// Of the running count, how many may not serve.
    unavailable: usize,
    sleeping: bool,
}

pub(crate) fn allowed(view: &PoolView<'_>) -> Allowed {
    match view.pool_ref.pool.update {
        None => Allowed { any: true, surge: usize::MAX, unavailable: usize::MAX, sleeping: true },
        Some(update) => Allowed {
            any: update.may_roll(),
            surge: usize::try_from(update.max_surge).unwrap_or(usize::MAX),
            unavailable: usize::try_from(update.max_unavailable).unwrap_or(usize::MAX),
            sleeping: update.sleeping == UpdateSleeping::Background,
        },
    }
}

/// Whether an instance of an older revision that does not serve is replaced rather than started again.
pub(crate) fn replaces_failed(view: &PoolView<'_>) -> bool {
    view.pool_ref.pool.update.is_none_or(|update: Update| update.replace_failed || update.may_roll())
}

pub(crate) fn replace(draft: &mut Draft, view: &mut PoolView<'_>) {
    let Due { free, held } = find_due(draft, view);
    for (instance, hold) in held {
        draft.held(view.pool_ref, instance, Action::Replace, WHY, hold);
    }
    let replacing_running = is_running(free.first());
    let Some(first) = free.first() else { return };
    let too_few_up = replacing_running && up(view) <= view.wanted().running;
    let allowed = allowed(view);
    let obstacle = if !allowed.any {
        Some(NOT_ITS_TURN.to_owned())
    } else if let Some(reason) = view.no_start.clone().or_else(|| draft.no_growth()) {
        Some(reason)
    } else if view.staging_busy {
        Some(ONE_AT_A_TIME.to_owned())
    } else if backing_off(draft, view) > 0 {
        // A revision that does not start must not take the next instance with it.
        Some("another instance is backing off after a failure".to_owned())
    } else if view.down.iter().any(|i| !view.is_outdated(i)) {
        // Nor one whose program does not work.
        Some("the workload of an instance of this revision has failed".to_owned())
    } else if view.unproven > 0 {
        Some("waits until what was replaced has served for min_ready_seconds".to_owned())
    } else if too_few_up && view.is_starting {
        Some("waits until what is being started runs".to_owned())
    } else {
        None
    };
    if let Some(reason) = obstacle {
        draft.defer(view.pool_ref, Some(&first.id), Action::Replace, 1, reason.clone());
        return defer_others(draft, view, free.len() - 1, reason);
    }
    let mut why = WHY.to_owned();
    if too_few_up {
        let more = more_for(view, first);
        let begun = if view.up_or_coming < view.wanted().running.saturating_add(allowed.surge) {
            surge(draft, view, more).map_err(|shortage| format!("no room for a surge instance: {shortage}"))
        } else {
            Err(NO_SURGE.to_owned())
        };
        match begun {
            Ok(()) => {
                return defer_others(draft, view, free.len(), "a surge instance starts first".to_owned());
            }
            Err(obstacle) if up(view).saturating_add(allowed.unavailable) <= view.wanted().running => {
                let reason = format!("{obstacle}; as many do not serve as the document allows");
                draft.defer(view.pool_ref, Some(&first.id), Action::Replace, 1, reason.clone());
                return defer_others(draft, view, free.len() - 1, reason);
            }
            Err(obstacle) => why = format!("{why}; {obstacle}"),
        }
    }
    // The first that fits: one that shrinks makes room for one that grows.
    let mut short = Vec::new();
    for &instance in &free {
        match draft.spend(view.pool_ref, more_for(view, instance)) {
            Ok(()) => {
                draft.step(
                    view.pool_ref,
                    Some(instance),
                    Action::Replace,
                    resting_phase(instance),
                    why.clone(),
                );
                break;
            }
            Err(shortage) => short.push((instance, shortage)),
        }
    }
    // One that serves for what is lacking is not spare.
    if let (Some((_, shortage)), true) = (short.first(), short.len() == free.len())
        && up(view) > view.wanted().running
        && let Some(surge) = view.surge.pop()
    {
        dismiss(draft, view, surge, &format!("its room is needed for a replacement: {shortage}"));
    }
    let others = free.len().saturating_sub(short.len() + 1);
    for (instance, shortage) in short {
        draft.defer(view.pool_ref, Some(&instance.id), Action::Replace, 1, format!("{shortage}; {why}"));
    }
    defer_others(draft, view, others, ONE_AT_A_TIME.to_owned());
}

/// Where a replaced instance goes back to, if that is not where it boots.
fn resting_phase(instance: &ObservedInstance) -> Option<Phase> {
    (instance.phase != Phase::Running).then_some(instance.phase)
}

/// What its replacement takes beyond what the instance has.
pub(crate) fn more_for(view: &PoolView<'_>, instance: &ObservedInstance) -> Usage {
    Usage::boot(&view.pool_ref.pool.instance_resources, resting_phase(instance)).beyond(Usage::now(instance))
}

/// How many work now: what is still on its way does not.
fn up(view: &PoolView<'_>) -> usize {
    view.running.len() + view.woken_running + view.surge.len()
}

fn defer_others(draft: &mut Draft, view: &PoolView<'_>, count: usize, reason: String) {
    if count > 0 {
        draft.defer(view.pool_ref, None, Action::Replace, count, reason);
    }
}

/// Plans an instance that runs beside those that are replaced: one that does not run, or a new one. Only where the
/// replacement, which takes `then`, has room beside it.
fn surge(draft: &mut Draft, view: &mut PoolView<'_>, then: Usage) -> Result<(), Shortage> {
    let why = "surge instance while instances of an older revision are replaced".to_owned();
    let size = &view.pool_ref.pool.instance_resources;
    let full = Usage::of(Phase::Running, size, None);
    let is_free = |i: &&ObservedInstance| {
        hold(view.pool_ref.tenant, view.pool_ref.pool, i, Action::Start, &draft.clock).is_none()
    };
    let PoolRef { tenant_index, pool_index, .. } = view.pool_ref;
    readiest_first(&mut view.startable);
    let Some(index) = view.startable.iter().position(is_free) else {
        draft.budget.fits(tenant_index, pool_index, full.plus(then))?;
        draft.spend(view.pool_ref, full)?;
        draft.step(view.pool_ref, None, Action::Create, Some(Phase::Running), why);
        return Ok(());
    };
    let more = full.beyond(Usage::now(view.startable[index]));
    draft.budget.fits(tenant_index, pool_index, more.plus(then))?;
    draft.spend(view.pool_ref, more)?;
    let instance = view.startable.remove(index);
    draft.step(view.pool_ref, Some(instance), Action::Start, Some(Phase::Running), why);
    Ok(())
}

/// Instances of an older revision.
struct Due<'a> {
    /// Those that may be replaced now, running ones first, for they are the ones that work.
    free: Vec<&'a ObservedInstance>,
    held: Vec<(&'a ObservedInstance, Hold)>,
}

fn is_running(instance: Option<&&ObservedInstance>) -> bool {
    instance.is_some_and(|instance| instance.phase == Phase::Running)
}

fn find_due<'a>(draft: &Draft, view: &PoolView<'a>) -> Due<'a> {
    let woken = view.woken_outdated.iter().map(|instance| (*instance, Hold::OnDemand));
    let (mut free, mut held) = (Vec::new(), woken.collect::<Vec<_>>());
    let sleeping: &[_] = if allowed(view).sleeping { &view.sleeping } else { &[] };
    for list in [&view.running, &view.warm, sleeping] {
        let mut outdated: Vec<_> = list.iter().copied().filter(|i| view.is_outdated(i)).collect();
        coldest_first(view, &mut outdated);
        for instance in outdated {
            match hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Replace, &draft.clock) {
                None => free.push(instance),
                Some(hold) => held.push((instance, hold)),
            }
        }
    }
    Due { free, held }
}

/// Stops surge instances that no replacement needs now or soon, or that are themselves of an older revision. Done before memory is
/// looked for: they give some back.
pub(crate) fn dismiss_surge(draft: &mut Draft, view: &mut PoolView<'_>) {
    if view.surge.is_empty() {
        return;
    }
    let Due { free, held } = find_due(draft, view);
    let needed = is_running(free.first()) || held.iter().any(|(_, hold)| matches!(hold, Hold::MinRunning(_)));
    // Nor is it let go before what it stood in for has proved to work.
    let busy = view.staging_busy || view.unproven > 0;
    // What is replaced is stopped on its way: until it is up again its surge instance works for it, however old.
    let lacking = view.wanted().running.saturating_sub(view.running.len() + view.woken_running);
    let mut kept = Vec::new();
    let mut surge = std::mem::take(&mut view.surge);
    // One of this revision serves on.
    surge.sort_by_key(|i| view.is_outdated(i));
    for instance in surge {
        if kept.len() < lacking || ((needed || busy) && !view.is_outdated(instance)) {
            kept.push(instance);
            continue;
        }
        let outdated = view.is_outdated(instance);
        let why = if outdated { "surge instance of an older revision" } else { DONE };
        dismiss(draft, view, instance, why);
    }
    view.surge = kept;
}

fn dismiss(draft: &mut Draft, view: &PoolView<'_>, surge: &ObservedInstance, why: &str) {
    match hold(view.pool_ref.tenant, view.pool_ref.pool, surge, Action::Stop, &draft.clock) {
        None => draft.step(view.pool_ref, Some(surge), Action::Stop, None, why.to_owned()),
        Some(hold) => draft.held(view.pool_ref, surge, Action::Stop, why, hold),
    }
}
