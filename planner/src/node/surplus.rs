//! Uses surplus instances: they fill the warm count, then the sleeping count; the rest is stopped.

use mvm_proto::Phase;

use super::draft::{Draft, Freshness, PoolRef};
use super::expired::EXPIRED;
use super::hold::{Hold, hands_off, hold};
use super::replace::allowed;
use super::view::{PhaseCounts, PoolView, coldest_first, remove};
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::usage::Usage;

pub(crate) fn use_or_stop(draft: &mut Draft, view: &mut PoolView<'_>) {
    count_missing(draft, view);
    settle_staged(draft, view);

    let wanted = view.wanted();
    let spare_sleeping = view.have.sleeping.saturating_sub(wanted.sleeping);
    let owed = owed_to_running(draft, view, spare_sleeping);
    let spare_warm = view.have.warm.saturating_sub(wanted.warm).saturating_sub(owed.warm);
    let mut warm = std::mem::take(&mut view.warm);
    put_to_use(draft, view, &mut warm, spare_warm, "warm");
    view.warm = warm;

    let spare_running = view.have.running.saturating_sub(wanted.running);
    let may_go = spare_running.min(spare_up(draft, view));
    let mut running = std::mem::take(&mut view.running);
    put_to_use(draft, view, &mut running, may_go, "running");
    view.running = running;
    let coming = view.arriving.running.min(spare_running - may_go);
    keep_free(draft, view, coming, "running");

    // A sleeper above its count is kept while the warm count is short: staging wakes it for that.
    let kept = owed.sleeping + view.missing.warm.saturating_sub(view.waiting.warm);
    let mut sleeping = std::mem::take(&mut view.sleeping);
    put_to_use(draft, view, &mut sleeping, spare_sleeping.saturating_sub(kept), "sleeping");
    view.sleeping = sleeping;
}

/// How many of those that work now may go: what is on its way up does not work yet. One more than wanted stays while a
/// rollout can begin with it: it is replaced while the others work, and what is older goes then.
fn spare_up(draft: &Draft, view: &PoolView<'_>) -> usize {
    let wanted = view.wanted().running;
    let spare = (view.running.len() + view.woken_running).saturating_sub(wanted + view.unproven);
    let current = view.running.iter().filter(|i| !view.is_outdated(i)).count() + view.woken_running;
    let stands_in = wanted > 0 && current < wanted && can_replace_one(draft, view);
    spare.saturating_sub(usize::from(stands_in))
}

/// Whether a running instance of an older revision can be replaced now, beside all the others.
fn can_replace_one(draft: &Draft, view: &PoolView<'_>) -> bool {
    let PoolRef { tenant, pool, tenant_index, pool_index, .. } = view.pool_ref;
    let is_free = view.no_start.is_none() && !draft.under_pressure && !view.staging_busy && allowed(view).any;
    let backs_off = |i: &&ObservedInstance| matches!(hands_off(i, &draft.clock), Some(Hold::Backoff(_)));
    is_free
        && !view.startable.iter().any(backs_off)
        && view.running.iter().filter(|i| view.is_outdated(i)).any(|instance| {
            let more = Usage::boot(&pool.instance_resources, None).beyond(Usage::now(instance));
            hold(tenant, pool, instance, Action::Replace, &draft.clock).is_none()
                && draft.budget.fits(tenant_index, pool_index, more).is_ok()
        })
}

/// How many places are free at rest.
pub(crate) fn count_missing(draft: &mut Draft, view: &mut PoolView<'_>) {
    let wanted = view.wanted();
    view.missing.warm = wanted.warm.saturating_sub(view.have.warm + view.undecided.warm);
    view.missing.sleeping = wanted.sleeping.saturating_sub(view.have.sleeping + view.undecided.sleeping);
    if view.missing.sleeping > 0 && view.pool_ref.pool.pinned {
        let why = Hold::PinnedPool.describe(&draft.clock);
        draft.defer(view.pool_ref, None, Action::Sleep, view.missing.sleeping, why);
        view.missing.sleeping = 0;
    }
}

/// What rests above its count and is wanted among those that run, where something keeps it from running now: it comes
/// back when it may, sleepers first. Of an older revision it may be too large to come back ever; one that is stopped
/// starts at its pool's size.
fn owed_to_running(draft: &Draft, view: &PoolView<'_>, spare_sleeping: usize) -> PhaseCounts {
    let comes_back = |i: &&&ObservedInstance| draft.under_pressure || !view.is_outdated(i);
    let missing = view.missing.running;
    let sleeping = missing.min(spare_sleeping).min(view.sleeping.iter().filter(comes_back).count());
    let warm = (missing - sleeping).min(view.warm.iter().filter(comes_back).count());
    PhaseCounts { running: 0, warm, sleeping }
}

/// What was booted on its way to rest goes there, or where else a place is free; else it stops, unless the document has
/// expired.
pub(crate) fn settle_staged(draft: &mut Draft, view: &mut PoolView<'_>) {
    let mut gone = Vec::new();
    for instance in view.staged.clone() {
        let mut uses = [Phase::Warm, Phase::Sleeping];
        if instance.staging == Some(Phase::Sleeping) {
            uses.reverse();
        }
        let mut why = "staged, and no count wants it".to_owned();
        if view.pool_ref.pool.pinned && instance.staging == Some(Phase::Sleeping) {
            why = format!("staged, and may not sleep: {}", Hold::PinnedPool.describe(&draft.clock));
        }
        let mut action = None;
        for to in uses {
            if action.is_none() && missing_at(view, to) > 0 {
                match rest(draft, view, instance, to) {
                    Ok(found) => action = Some(found),
                    Err(shortage) => why = format!("staged, and may not rest: {shortage}"),
                }
            }
        }
        let action = action.unwrap_or((Action::Stop, why));
        if let Some(hold) = hold(view.pool_ref.tenant, view.pool_ref.pool, instance, action.0, &draft.clock) {
            draft.held(view.pool_ref, instance, action.0, &action.1, hold);
        } else if action.0 == Action::Stop && draft.freshness == Freshness::Expired {
            draft.defer(view.pool_ref, Some(&instance.id), action.0, 1, format!("{EXPIRED}; {}", action.1));
        } else {
            draft.step(view.pool_ref, Some(instance), action.0, None, action.1);
            gone.push(&instance.id);
        }
        // The slot is free again when the step is done, not when it is planned.
        view.staging_busy = true;
    }
    remove(&mut view.staged, &gone);
}

fn missing_at(view: &PoolView<'_>, phase: Phase) -> usize {
    if phase == Phase::Warm { view.missing.warm } else { view.missing.sleeping }
}

/// The step that puts `instance` to `to`, if a place is free there and may be taken; the place is then filled.
fn rest(
    draft: &mut Draft,
    view: &mut PoolView<'_>,
    instance: &ObservedInstance,
    to: Phase,
) -> Result<(Action, String), String> {
    let wanted = view.wanted();
    let (action, missing, total) = match to {
        Phase::Warm => (Action::Warm, &mut view.missing.warm, wanted.warm),
        _ => (Action::Sleep, &mut view.missing.sleeping, wanted.sleeping),
    };
    let why = format!("{to} {} of {total}", total - *missing);
    if *missing == 0 {
        return Err(why);
    }
    let more = Usage::of(to, &instance.resources, None).beyond(Usage::now(instance));
    draft.spend(view.pool_ref, more).map_err(|shortage| format!("{shortage}; {why}"))?;
    *missing -= 1;
    Ok((action, why))
}

/// Gives the coldest `spare` of `list` a use, or stops them. One that waits for its minimum runtime keeps a place.
fn put_to_use<'a>(
    draft: &mut Draft,
    view: &mut PoolView<'a>,
    list: &mut Vec<&'a ObservedInstance>,
    spare: usize,
    what: &str,
) {
    if spare == 0 {
        return;
    }
    coldest_first(view, list);
    // Places that a surplus instance will take, only not yet. One that is held by hand may be held for days: none is
    // made for its place, but another spare one may take it.
    let mut waiting = 0;
    let mut left = spare;
    let by_hand = overridden(draft, view, list, spare);
    for &(instance, action, hold) in &by_hand {
        wait_for(draft, view, instance, action, hold, &format!("{what} {left} more than wanted"));
        left -= 1;
    }
    let mut gone = Vec::new();
    let mut held = Vec::new();
    // Wanted by a count that has no room for them now: left as they are.
    let mut kept = 0;
    let others: Vec<_> =
        list.iter().copied().filter(|i| by_hand.iter().all(|(other, ..)| other.id != i.id)).collect();
    let is_free = |i: &&&ObservedInstance| {
        hold(view.pool_ref.tenant, view.pool_ref.pool, i, Action::Warm, &draft.clock).is_none()
    };
    // Those that can go now do. Only as many of the others are spare too, and keep a place for when they may.
    let mut may_wait = left.saturating_sub(others.iter().filter(is_free).count());
    for instance in &others {
        if left == kept {
            break;
        }
        let to = use_for(view, instance.phase, kept + waiting);
        let action = toward(to);
        if let Some(hold) = hold(view.pool_ref.tenant, view.pool_ref.pool, instance, action, &draft.clock) {
            if hold.is_short() && may_wait > 0 {
                may_wait -= 1;
                waiting += usize::from(to.is_some());
            }
            held.push((*instance, action, hold));
            continue;
        }
        let use_of_it = match to {
            // Where no more may be warm, it may still sleep.
            Some(Phase::Warm) => rest(draft, view, instance, Phase::Warm)
                .or_else(|why| rest(draft, view, instance, Phase::Sleeping).map_err(|_| why)),
            Some(to) => rest(draft, view, instance, to),
            None => Ok((action, format!("{what} {left} more than wanted, and no other count wants it"))),
        };
        match use_of_it {
            Ok((action, why)) => {
                draft.step(view.pool_ref, Some(instance), action, None, why);
                gone.push(&instance.id);
                left -= 1;
            }
            Err(why) => {
                kept += 1;
                draft.defer(view.pool_ref, Some(&instance.id), action, 1, why);
            }
        }
    }
    let arriving = match what {
        "running" => view.arriving.running,
        "warm" => view.arriving.warm,
        _ => view.arriving.sleeping,
    };
    let arriving = arriving.min((left - kept).saturating_sub(held.len()));
    // A place is kept for those that will take it, not for those of which it is unknown when they can.
    held.sort_by_key(|(.., hold)| !hold.is_short());
    for (instance, action, hold) in held.into_iter().take(left - kept) {
        wait_for(draft, view, instance, action, hold, &format!("{what} {left} more than wanted"));
    }
    remove(list, &gone);
    keep_free(draft, view, arriving, what);
}

/// Keeps places free for what is spare and still on its way: once it has arrived it is put to use, and nothing need be
/// made anew for it.
fn keep_free(draft: &mut Draft, view: &mut PoolView<'_>, arriving: usize, what: &str) {
    for _ in 0..arriving {
        let warm = view.missing.warm > view.waiting.warm && what != "warm";
        let sleeping = view.missing.sleeping > view.waiting.sleeping && what != "sleeping";
        let (waiting, action) = match (warm, sleeping) {
            (true, _) => (&mut view.waiting.warm, Action::Warm),
            (false, true) => (&mut view.waiting.sleeping, Action::Sleep),
            (false, false) => return,
        };
        *waiting += 1;
        draft.defer(view.pool_ref, None, action, 1, format!("one more than wanted will be {what} first"));
    }
}

/// The spare ones that someone acted on by hand, or that are on their way between nodes: what they are too many of is theirs
/// to be, until that ends.
///
/// Without this, starting an instance by hand would stop another one in its place.
fn overridden<'a>(
    draft: &Draft,
    view: &PoolView<'a>,
    list: &[&'a ObservedInstance],
    spare: usize,
) -> Vec<(&'a ObservedInstance, Action, Hold)> {
    let mut found: Vec<(&'a ObservedInstance, Action, Hold)> = Vec::new();
    for instance in list {
        let spoken_for = found.iter().filter(|(_, action, _)| *action != Action::Stop).count();
        let action = toward(use_for(view, instance.phase, spoken_for));
        let hold = hold(view.pool_ref.tenant, view.pool_ref.pool, instance, action, &draft.clock);
        if let Some(hold @ (Hold::Override(_) | Hold::Moving)) = hold
            && found.len() < spare
        {
            found.push((instance, action, hold));
        }
    }
    found
}

/// Says what keeps a spare instance, and keeps the place free that it will take.
fn wait_for(
    draft: &mut Draft,
    view: &mut PoolView<'_>,
    instance: &ObservedInstance,
    action: Action,
    hold: Hold,
    why: &str,
) {
    draft.held(view.pool_ref, instance, action, why, hold);
    match action {
        Action::Warm if hold.is_short() => view.waiting.warm += 1,
        Action::Sleep if hold.is_short() => view.waiting.sleeping += 1,
        _ => {}
    }
}

fn toward(phase: Option<Phase>) -> Action {
    match phase {
        Some(Phase::Warm) => Action::Warm,
        Some(_) => Action::Sleep,
        None => Action::Stop,
    }
}

/// The count that a spare instance of `phase` can help, when so many of the free places are spoken for.
fn use_for(view: &PoolView<'_>, phase: Phase, spoken_for: usize) -> Option<Phase> {
    let missing = &view.missing;
    match phase {
        Phase::Running if missing.warm > spoken_for => Some(Phase::Warm),
        Phase::Running if missing.sleeping > spoken_for - missing.warm => Some(Phase::Sleeping),
        Phase::Warm if missing.sleeping > spoken_for => Some(Phase::Sleeping),
        _ => None,
    }
}
