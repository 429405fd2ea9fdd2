//! Boots instances for the warm and sleeping counts when there is no surplus instance to use; a later plan pauses them or puts
//! them to sleep. One at a time per pool, so that a large pool never takes all of the host's CPUs.

use mvm_proto::Phase;

use super::draft::Draft;
use super::hold::hold;
use super::scale_up::backing_off;
use super::view::{PoolView, best_first, readiest_first};
use crate::limits::Shortage;
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::usage::Usage;

pub(crate) const ONE_AT_A_TIME: &str = "one at a time per pool";

pub(crate) fn stage(draft: &mut Draft, view: &mut PoolView<'_>) {
    let warm = view.missing.warm.saturating_sub(view.waiting.warm);
    let sleeping = view.missing.sleeping.saturating_sub(view.waiting.sleeping);
    if warm + sleeping == 0 {
        return;
    }
    if let Some(reason) = view.no_start.clone().or_else(|| draft.no_growth()) {
        return draft.defer(view.pool_ref, None, Action::Create, warm + sleeping, reason);
    }
    // How many of each count wait, and for what.
    let mut waiting: Vec<(usize, String)> = Vec::new();
    for (target, missing) in [(Phase::Warm, warm), (Phase::Sleeping, sleeping)] {
        let wanted = if target == Phase::Warm { view.wanted().warm } else { view.wanted().sleeping };
        let why = format!("{target} {} of {wanted}, no surplus instance to use", wanted - missing);
        let (left, reason) = if missing == 0 || view.staging_busy {
            (missing, ONE_AT_A_TIME.to_owned())
        } else {
            match stage_one(draft, view, target, why) {
                Ok(true) => {
                    view.staging_busy = true;
                    (missing - 1, ONE_AT_A_TIME.to_owned())
                }
                Ok(false) => (missing, "backing off after a failure".to_owned()),
                Err(shortage) => (missing, shortage.to_string()),
            }
        };
        match waiting.last_mut() {
            Some((count, same)) if *same == reason => *count += left,
            _ => waiting.push((left, reason)),
        }
    }
    for (count, reason) in waiting.into_iter().filter(|(count, _)| *count > 0) {
        draft.defer(view.pool_ref, None, Action::Create, count, reason);
    }
}

/// Plans the boot of one instance toward `target`; false when a failed one must be waited for.
fn stage_one(
    draft: &mut Draft,
    view: &mut PoolView<'_>,
    target: Phase,
    why: String,
) -> Result<bool, Shortage> {
    // A sleeper above its count becomes warm without being made anew.
    if target == Phase::Warm && view.have.sleeping > view.wanted().sleeping {
        let mut sleeping = std::mem::take(&mut view.sleeping);
        best_first(view, &mut sleeping);
        let found = start(draft, view, &sleeping, Action::Wake, target, &why);
        view.sleeping = sleeping;
        // One of an older and larger size keeps no other from being made.
        if let Ok(Some(index)) = found {
            view.sleeping.remove(index);
            view.have.sleeping -= 1;
            return Ok(true);
        }
    }
    let mut startable = std::mem::take(&mut view.startable);
    readiest_first(&mut startable);
    let found = start(draft, view, &startable, Action::Start, target, &why);
    view.startable = startable;
    if let Some(index) = found? {
        view.startable.remove(index);
        return Ok(true);
    }
    let missing = view.missing.running + view.missing.warm + view.missing.sleeping;
    if backing_off(draft, view) >= missing {
        return Ok(false);
    }
    let size = &view.pool_ref.pool.instance_resources;
    draft.spend(view.pool_ref, Usage::boot(size, Some(target)))?;
    draft.step(view.pool_ref, None, Action::Create, Some(target), why);
    Ok(true)
}

/// Plans the first of `list` that may be started and fits, and says which.
pub(crate) fn start(
    draft: &mut Draft,
    view: &PoolView<'_>,
    list: &[&ObservedInstance],
    action: Action,
    target: Phase,
    why: &str,
) -> Result<Option<usize>, Shortage> {
    let mut short = None;
    for (index, instance) in list.iter().enumerate() {
        if hold(view.pool_ref.tenant, view.pool_ref.pool, instance, action, &draft.clock).is_some() {
            continue;
        }
        let size = if action == Action::Start {
            &view.pool_ref.pool.instance_resources
        } else {
            &instance.resources
        };
        match draft.spend(view.pool_ref, Usage::boot(size, Some(target)).beyond(Usage::now(instance))) {
            Ok(()) => {
                draft.step(view.pool_ref, Some(instance), action, Some(target), why.to_owned());
                return Ok(Some(index));
            }
            Err(shortage) => short = Some(shortage),
        }
    }
    short.map_or(Ok(None), Err)
}
