//! Brings instances of an older revision up to the pool's current one, one at a time per pool.
//!
//! While running ones are replaced a stand-in runs beside them, so that the running count holds; without room for
//! one they are replaced in place. The stand-in goes when the last of them is done.

use mvm_proto::Phase;

use super::budget::Usage;
use super::draft::Draft;
use super::hold::hold;
use super::view::{PoolView, coldest_first};
use crate::observation::ObservedInstance;
use crate::plan::Action;

pub(crate) fn replace(draft: &mut Draft, view: &mut PoolView<'_>) {
    let due = find_due(draft, view);
    let replacing_running = matches!(due, Some(instance) if instance.phase == Phase::Running);
    dismiss_stand_ins(draft, view, replacing_running);
    let Some(instance) = due else { return };
    if let Some(reason) = view.no_start.clone() {
        return draft.defer(view.place, Some(&instance.id), Action::Replace, 1, reason);
    }
    if view.staging_busy {
        return draft.defer(
            view.place,
            Some(&instance.id),
            Action::Replace,
            1,
            "one at a time per pool".to_owned(),
        );
    }
    let mut why = "the pool's revision changed".to_owned();
    if replacing_running && view.stand_ins.is_empty() && view.have.running <= view.wanted().running {
        let size = &view.place.pool.instance_resources;
        match draft.spend(view.place, Usage::of(Phase::Running, size, None)) {
            Ok(()) => {
                let why = "stands in while instances of an older revision are replaced".to_owned();
                return draft.step(view.place, None, Action::Create, Some(Phase::Running), why);
            }
            Err(shortage) => why = format!("{why}; no room for a stand-in: {shortage}"),
        }
    }
    let size = &view.place.pool.instance_resources;
    let staging = (instance.phase != Phase::Running).then_some(instance.phase);
    let peak = Usage::of(Phase::Running, size, staging).most(Usage::of(instance.phase, size, None));
    match draft.spend(view.place, peak.beyond(Usage::now(instance))) {
        Ok(()) => {
            let target = (instance.phase != Phase::Running).then_some(instance.phase);
            draft.step(view.place, Some(instance), Action::Replace, target, why);
        }
        Err(shortage) => {
            draft.defer(view.place, Some(&instance.id), Action::Replace, 1, format!("{shortage}; {why}"));
        }
    }
}

/// The next instance to replace: running ones first, for they are the ones that work.
fn find_due<'a>(draft: &mut Draft, view: &PoolView<'a>) -> Option<&'a ObservedInstance> {
    for list in [&view.running, &view.warm, &view.sleeping] {
        let mut outdated: Vec<_> = list.iter().copied().filter(|i| view.is_outdated(i)).collect();
        coldest_first(view, &mut outdated);
        for instance in outdated {
            match hold(view.place.tenant, view.place.pool, instance, Action::Replace, draft.now) {
                None => return Some(instance),
                Some(hold) => {
                    let why = "the pool's revision changed";
                    draft.held(view.place, instance, Action::Replace, why, hold);
                }
            }
        }
    }
    None
}

/// Stops stand-ins that nobody needs, or that are themselves of an older revision.
fn dismiss_stand_ins(draft: &mut Draft, view: &mut PoolView<'_>, needed: bool) {
    let busy = view.staging_busy;
    let mut kept = Vec::new();
    for instance in std::mem::take(&mut view.stand_ins) {
        if (needed || busy) && !view.is_outdated(instance) {
            kept.push(instance);
            continue;
        }
        let why = "stood in during a replacement that is done";
        match hold(view.place.tenant, view.place.pool, instance, Action::Stop, draft.now) {
            None => draft.step(view.place, Some(instance), Action::Stop, None, why.to_owned()),
            Some(hold) => draft.held(view.place, instance, Action::Stop, why, hold),
        }
    }
    view.stand_ins = kept;
}
