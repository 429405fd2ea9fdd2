//! Brings instances of an older revision up to the pool's current one, one at a time per pool.
//!
//! While running ones are replaced a stand-in runs beside them, so that the running count holds; without room for
//! one and the replacement they are replaced in place. The stand-in goes when the last of them is done, or when the next
//! one needs its room.

use mvm_proto::Phase;

use super::budget::{Shortage, Usage};
use super::draft::{Draft, Place};
use super::hold::{Hold, hold};
use super::raise::backing_off;
use super::view::{PoolView, coldest_first};
use crate::observation::ObservedInstance;
use crate::plan::Action;

const ONE_AT_A_TIME: &str = "one at a time per pool";
const DONE: &str = "stood in during a replacement that is done";

pub(crate) fn replace(draft: &mut Draft, view: &mut PoolView<'_>) {
    let (due, later) = find_due(draft, view);
    let replacing_running = matches!(due, Some(instance) if instance.phase == Phase::Running);
    dismiss_stand_ins(draft, view, replacing_running);
    let Some(instance) = due else { return };
    let too_few_up = replacing_running && up(view) <= view.wanted().running;
    let obstacle = if let Some(reason) = view.no_start.clone().or_else(|| draft.no_growth()) {
        Some(reason)
    } else if view.staging_busy {
        Some(ONE_AT_A_TIME.to_owned())
    } else if backing_off(draft, view) > 0 {
        // A revision that does not start must not take the next instance with it.
        Some("another instance is backing off after a failure".to_owned())
    } else if too_few_up && view.is_starting {
        Some("waits until what is being started runs".to_owned())
    } else {
        None
    };
    if let Some(reason) = obstacle {
        draft.defer(view.place, Some(&instance.id), Action::Replace, 1, reason.clone());
        return defer_others(draft, view, later, reason);
    }
    let mut why = "the pool's revision changed".to_owned();
    let size = &view.place.pool.instance_resources;
    let staging = (instance.phase != Phase::Running).then_some(instance.phase);
    let more = Usage::boot(size, staging).beyond(Usage::now(instance));
    if too_few_up {
        match stand_in(draft, view, more) {
            Ok(()) => return defer_others(draft, view, later + 1, "a stand-in starts first".to_owned()),
            Err(shortage) => why = format!("{why}; no room for a stand-in: {shortage}"),
        }
    }
    match draft.spend(view.place, more) {
        Ok(()) => draft.step(view.place, Some(instance), Action::Replace, staging, why),
        Err(shortage) => {
            if let Some(stand_in) = view.stand_ins.pop() {
                dismiss(draft, view, stand_in, &format!("its room is needed for a replacement: {shortage}"));
            }
            draft.defer(view.place, Some(&instance.id), Action::Replace, 1, format!("{shortage}; {why}"));
        }
    }
    defer_others(draft, view, later, ONE_AT_A_TIME.to_owned());
}

/// How many work now: what is still on its way does not.
fn up(view: &PoolView<'_>) -> usize {
    view.running.len() + view.lent_running + view.stand_ins.len()
}

fn defer_others(draft: &mut Draft, view: &PoolView<'_>, count: usize, reason: String) {
    if count > 0 {
        draft.defer(view.place, None, Action::Replace, count, reason);
    }
}

/// Plans an instance that runs beside those that are replaced: one that failed to, tried again, or a new one. Only where
/// the replacement, which takes `then`, has room beside it.
fn stand_in(draft: &mut Draft, view: &mut PoolView<'_>, then: Usage) -> Result<(), Shortage> {
    let why = "stands in while instances of an older revision are replaced".to_owned();
    let size = &view.place.pool.instance_resources;
    let full = Usage::of(Phase::Running, size, None);
    let unfinished = |i: &&ObservedInstance| {
        matches!(i.phase, Phase::Failed | Phase::Created | Phase::Ready)
            && hold(view.place.tenant, view.place.pool, i, Action::Start, draft.now).is_none()
    };
    let Place { tenant_index, pool_index, .. } = view.place;
    let Some(index) = view.startable.iter().position(unfinished) else {
        draft.budget.fits(tenant_index, pool_index, full.plus(then))?;
        draft.spend(view.place, full)?;
        draft.step(view.place, None, Action::Create, Some(Phase::Running), why);
        return Ok(());
    };
    let more = full.beyond(Usage::now(view.startable[index]));
    draft.budget.fits(tenant_index, pool_index, more.plus(then))?;
    draft.spend(view.place, more)?;
    let instance = view.startable.remove(index);
    draft.step(view.place, Some(instance), Action::Start, Some(Phase::Running), why);
    Ok(())
}

/// The next instance to replace, running ones first, for they are the ones that work; and how many more are free to be.
fn find_due<'a>(draft: &mut Draft, view: &PoolView<'a>) -> (Option<&'a ObservedInstance>, usize) {
    const WHY: &str = "the pool's revision changed";
    for instance in &view.lent_outdated {
        let hold = if instance.claimed { Hold::Claimed } else { Hold::OnDemand };
        draft.held(view.place, instance, Action::Replace, WHY, hold);
    }
    let (mut due, mut others) = (None, 0);
    for list in [&view.running, &view.warm, &view.sleeping] {
        let mut outdated: Vec<_> = list.iter().copied().filter(|i| view.is_outdated(i)).collect();
        coldest_first(view, &mut outdated);
        for instance in outdated {
            match hold(view.place.tenant, view.place.pool, instance, Action::Replace, draft.now) {
                None if due.is_none() => due = Some(instance),
                None => others += 1,
                Some(hold) => draft.held(view.place, instance, Action::Replace, WHY, hold),
            }
        }
    }
    (due, others)
}

/// Stops stand-ins that nobody needs, or that are themselves of an older revision.
fn dismiss_stand_ins(draft: &mut Draft, view: &mut PoolView<'_>, needed: bool) {
    let busy = view.staging_busy;
    // What is replaced is stopped on its way: until it is up again its stand-in works for it, however old.
    let lacking = view.wanted().running.saturating_sub(view.running.len() + view.lent_running);
    let mut kept = Vec::new();
    for instance in std::mem::take(&mut view.stand_ins) {
        if kept.len() < lacking || ((needed || busy) && !view.is_outdated(instance)) {
            kept.push(instance);
            continue;
        }
        let outdated = view.is_outdated(instance);
        let why = if outdated { "stood in, and is of an older revision itself" } else { DONE };
        dismiss(draft, view, instance, why);
    }
    view.stand_ins = kept;
}

fn dismiss(draft: &mut Draft, view: &PoolView<'_>, stand_in: &ObservedInstance, why: &str) {
    match hold(view.place.tenant, view.place.pool, stand_in, Action::Stop, draft.now) {
        None => draft.step(view.place, Some(stand_in), Action::Stop, None, why.to_owned()),
        Some(hold) => draft.held(view.place, stand_in, Action::Stop, why, hold),
    }
}
