//! Relieves memory pressure: puts to sleep the instances of all pools that have been idle for longest.
//!
//! The only stage that may take a pool below its counts. The other stages start nothing meanwhile, so nothing comes back before
//! the pressure ends; then the counts wake what they lack. A plan puts only a few to sleep, and the next observation shows
//! whether more are needed. Surplus instances are handled before this stage, so that none is put to sleep only to be stopped.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use mvm_proto::{Phase, Timestamp};

use super::draft::Draft;
use super::hold::{Hold, hold};
use super::view::{PoolView, remove};
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::usage::Usage;

pub(crate) const MEMORY_PRESSURE: &str = "memory pressure";

/// How many may be on their way down at once: one whose guest is slow to drain must not keep all others up, and every
/// snapshot that is written takes memory of its own before it gives any back.
const AT_ONCE: usize = 2;

/// One that could be put to sleep.
struct Candidate<'a> {
    /// Its pool's place among the views.
    pool: usize,
    instance: &'a ObservedInstance,
    idle_from: Timestamp,
    /// The minimum runtime that it is short of: it goes only when nothing else can.
    short_of: Option<Hold>,
}

pub(crate) fn relieve(draft: &mut Draft, views: &mut [PoolView<'_>], observed: &[ObservedInstance]) {
    let (grown, young) = candidates(draft, views);
    let mut room = AT_ONCE.saturating_sub(on_their_way_down(draft, observed));
    let mut waiting = vec![0; views.len()];
    for candidate in grown {
        if room > 0 {
            room -= usize::from(put_to_sleep(draft, &mut views[candidate.pool], &candidate));
        } else {
            waiting[candidate.pool] += 1;
        }
    }
    for (view, count) in views.iter().zip(waiting).filter(|(_, count)| *count > 0) {
        let reason = format!("{MEMORY_PRESSURE}; {AT_ONCE} at a time");
        draft.defer(view.pool_ref, None, Action::Sleep, count, reason);
    }
    // Only when nothing else went, or is going.
    let mut room = if room == AT_ONCE { AT_ONCE } else { 0 };
    for candidate in young {
        let view = &mut views[candidate.pool];
        if room > 0 {
            room -= usize::from(put_to_sleep(draft, view, &candidate));
        } else if let Some(hold) = candidate.short_of {
            draft.held(view.pool_ref, candidate.instance, Action::Sleep, MEMORY_PRESSURE, hold);
        }
    }
}

/// What has nothing to do and takes memory, coldest first: those that ran long enough, then those that did not.
/// Says what keeps the others.
fn candidates<'a>(draft: &mut Draft, views: &[PoolView<'a>]) -> (Vec<Candidate<'a>>, Vec<Candidate<'a>>) {
    let mut found = Vec::new();
    for (pool, view) in views.iter().enumerate() {
        let (tenant, spec) = (view.pool_ref.tenant, view.pool_ref.pool);
        let whole_pool = match (spec.critical, spec.pinned) {
            (true, _) => Some(Hold::Critical),
            (false, true) => Some(Hold::PinnedPool),
            (false, false) => None,
        };
        let mut kept = 0;
        for &instance in [&view.running, &view.warm, &view.on_demand].into_iter().flatten() {
            let Some(idle_from) = view.idle_from(instance) else { continue };
            if whole_pool.is_some() {
                kept += 1;
                continue;
            }
            let short_of = match hold(tenant, spec, instance, Action::Sleep, &draft.clock) {
                hold @ (None | Some(Hold::MinRunning(_) | Hold::MinWarm(_))) => hold,
                Some(hold) => {
                    draft.held(view.pool_ref, instance, Action::Sleep, MEMORY_PRESSURE, hold);
                    continue;
                }
            };
            found.push(Candidate { pool, instance, idle_from, short_of });
        }
        if let (Some(hold), true) = (whole_pool, kept > 0) {
            let reason = format!("{}; {MEMORY_PRESSURE}", hold.describe(&draft.clock));
            draft.defer(view.pool_ref, None, Action::Sleep, kept, reason);
        }
    }
    // Among equals: the last role first, as everywhere when something is put down, then the newest.
    found.sort_by(|a, b| {
        let role = |c: &Candidate<'_>| views[c.pool].pool_ref.pool.role;
        let key = |c: &Candidate<'_>| (c.idle_from, Reverse(role(c)), Reverse(c.instance.since));
        key(a).cmp(&key(b)).then_with(|| a.instance.id.cmp(&b.instance.id))
    });
    found.into_iter().partition(|candidate| candidate.short_of.is_none())
}

/// Plans the step if there is room on disk for what it leaves there; false when there is none.
fn put_to_sleep(draft: &mut Draft, view: &mut PoolView<'_>, candidate: &Candidate<'_>) -> bool {
    let Candidate { instance, idle_from, short_of, .. } = candidate;
    let mut why = format!("{MEMORY_PRESSURE}, idle for {} s", draft.clock.age(*idle_from).as_secs());
    if let Some(hold) = short_of {
        why = format!("{why}; nothing else can be put to sleep ({})", hold.describe(&draft.clock));
    }
    let more = Usage::of(Phase::Sleeping, &instance.resources, None).beyond(Usage::now(instance));
    if let Err(shortage) = draft.spend(view.pool_ref, more) {
        draft.defer(view.pool_ref, Some(&instance.id), Action::Sleep, 1, format!("{shortage}; {why}"));
        return false;
    }
    draft.step(view.pool_ref, Some(instance), Action::Sleep, None, why);
    for list in [&mut view.running, &mut view.warm, &mut view.on_demand] {
        remove(list, &[&instance.id]);
    }
    true
}

/// What gives its memory back soon: what is being put down already, and what this plan puts down.
fn on_their_way_down(draft: &Draft, observed: &[ObservedInstance]) -> usize {
    let is_going = |i: &&ObservedInstance| {
        matches!(i.phase, Phase::Running | Phase::Warm)
            && matches!(i.moving_to, Some(Phase::Sleeping | Phase::Stopped))
    };
    let planned = draft.plan.steps.iter().filter(|step| matches!(step.action, Action::Sleep | Action::Stop));
    let planned: BTreeSet<_> = planned.filter_map(|step| step.instance.as_ref()).collect();
    // What sleeps has no memory to give back.
    let will_go = |i: &&ObservedInstance| {
        matches!(i.phase, Phase::Running | Phase::Warm) && i.moving_to.is_none() && planned.contains(&i.id)
    };
    observed.iter().filter(|i| is_going(i) || will_go(i)).count()
}
