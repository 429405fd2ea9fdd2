//! The planner's stages for a document that has expired: keeps existing instances going.
//!
//! Restarts failed instances; wakes and resumes instances beyond their own count while the running count is short (memory
//! pressure may have put them to sleep); lets an instance that was booted in order to pause or sleep get there. Creates,
//! replaces, stops and destroys nothing: the plan defers that with the reason that the document has expired.

use mvm_proto::Phase;

use super::draft::Draft;
use super::scale_up::take;
use super::stage::start;
use super::surplus::{count_missing, settle_staged};
use super::view::{PoolView, best_first, readiest_first};
use crate::observation::ObservedInstance;
use crate::plan::Action;

pub(crate) const EXPIRED: &str = "the document has expired";

/// Brings the running count up again by the instances that there are.
pub(crate) fn restart(draft: &mut Draft, view: &mut PoolView<'_>) {
    let wanted = view.wanted();
    let need = wanted.running.saturating_sub(view.have.running + view.undecided.running);
    if need == 0 {
        return;
    }
    if let Some(reason) = view.no_start.clone().or_else(|| draft.no_growth()) {
        view.missing.running = need;
        draft.defer(view.pool_ref, None, Action::Start, need, reason);
        return;
    }
    let why = format!("running {} of {}", view.have.running, wanted.running);
    let mut obstacle = None;
    let mut left = need;

    let (mut failed, others) = split_failed(view);
    take(draft, view, &mut failed, Action::Start, &mut left, &why, &mut obstacle);
    // What failed and can't be started now keeps its place.
    let mut free = left.saturating_sub(failed.len());
    view.startable = failed.into_iter().chain(others).collect();

    for (action, phase) in [(Action::Wake, Phase::Sleeping), (Action::Resume, Phase::Warm)] {
        let (have, wanted, list) = match phase {
            Phase::Sleeping => (view.have.sleeping, wanted.sleeping, &mut view.sleeping),
            _ => (view.have.warm, wanted.warm, &mut view.warm),
        };
        let mut list = std::mem::take(list);
        best_first(view, &mut list);
        let most = free.min(have.saturating_sub(wanted));
        let mut more = most;
        let taken = take(draft, view, &mut list, action, &mut more, &why, &mut obstacle);
        (free, left) = (free - taken, left - taken);
        match phase {
            Phase::Sleeping => (view.sleeping, view.have.sleeping) = (list, have - taken),
            _ => (view.warm, view.have.warm) = (list, have - taken),
        }
    }

    view.have.running += need - left;
    view.missing.running = left;
    if left > 0 {
        let action = if obstacle.is_some() { Action::Start } else { Action::Create };
        let reason = obstacle.map_or_else(|| EXPIRED.to_owned(), |obstacle| obstacle.describe(&draft.clock));
        draft.defer(view.pool_ref, None, action, left, format!("{reason}; {why}"));
    }
}

/// What was booted on its way to rest arrives there, if a count still wants it.
pub(crate) fn settle(draft: &mut Draft, view: &mut PoolView<'_>) {
    count_missing(draft, view);
    settle_staged(draft, view);
}

/// Starts what failed for the warm and sleeping counts, one at a time per pool as ever; says what waits.
pub(crate) fn stage(draft: &mut Draft, view: &mut PoolView<'_>) {
    let mut left = view.missing.warm + view.missing.sleeping;
    let mut reason = view.no_start.clone().or_else(|| draft.no_growth());
    for (target, missing) in [(Phase::Warm, view.missing.warm), (Phase::Sleeping, view.missing.sleeping)] {
        if missing == 0 || view.staging_busy || reason.is_some() {
            continue;
        }
        let (mut failed, others) = split_failed(view);
        let found = start(draft, view, &failed, Action::Start, target, "it failed, and the counts need it");
        match found {
            Ok(Some(index)) => {
                failed.remove(index);
                view.staging_busy = true;
                left -= 1;
            }
            Ok(None) => {}
            Err(shortage) => reason = Some(shortage.to_string()),
        }
        view.startable = failed.into_iter().chain(others).collect();
    }
    if left > 0 {
        let reason = reason.unwrap_or_else(|| EXPIRED.to_owned());
        draft.defer(view.pool_ref, None, Action::Create, left, reason);
    }
    say_what_waits(draft, view);
}

/// Instances that a document in time would replace or stop.
fn say_what_waits(draft: &mut Draft, view: &PoolView<'_>) {
    let lists = [&view.running, &view.down, &view.warm, &view.sleeping];
    let outdated = lists.into_iter().flatten().filter(|instance| view.is_outdated(instance)).count();
    let outdated = outdated + view.woken_outdated.len();
    let (have, wanted) = (view.have, view.wanted());
    let spare = have.running.saturating_sub(wanted.running)
        + have.warm.saturating_sub(wanted.warm)
        + have.sleeping.saturating_sub(wanted.sleeping)
        + view.surge.len();
    for (action, count) in [(Action::Replace, outdated), (Action::Stop, spare)] {
        if count > 0 {
            draft.defer(view.pool_ref, None, action, count, EXPIRED.to_owned());
        }
    }
}

/// Takes the startable ones out of the view: those that failed, readiest first, and those that were stopped or never ran.
fn split_failed<'a>(view: &mut PoolView<'a>) -> (Vec<&'a ObservedInstance>, Vec<&'a ObservedInstance>) {
    let startable = std::mem::take(&mut view.startable);
    let (mut failed, others): (Vec<_>, Vec<_>) =
        startable.into_iter().partition(|instance| instance.has_failed());
    readiest_first(&mut failed);
    (failed, others)
}
