//! Destroys stopped surplus instances after their pool's retention time.

use std::time::Duration;

use mvm_proto::{Phase, Timestamp};

use super::draft::Draft;
use super::hold::hold;
use super::view::PoolView;
use crate::observation::ObservedInstance;
use crate::plan::Action;

pub(crate) fn destroy_old(draft: &mut Draft, view: &mut PoolView<'_>) {
    // What can't be filled now may be filled from these later.
    let wanted = view.missing.running + view.missing.warm + view.missing.sleeping;
    if view.startable.len() <= wanted {
        return;
    }
    let mut spare = view.startable.len() - wanted;
    let mut oldest_first = view.startable.clone();
    oldest_first.sort_by(|a, b| ends_at(view, a).cmp(&ends_at(view, b)).then_with(|| a.id.cmp(&b.id)));
    for instance in oldest_first {
        if spare == 0 {
            break;
        }
        let until = ends_at(view, instance);
        if !draft.clock.is_past(until) {
            break;
        }
        let why = format!("{} and no count wants it", instance.phase);
        match hold(view.pool_ref.tenant, view.pool_ref.pool, instance, Action::Destroy, &draft.clock) {
            None => {
                spare -= 1;
                draft.step(view.pool_ref, Some(instance), Action::Destroy, None, why);
            }
            Some(hold) => draft.held(view.pool_ref, instance, Action::Destroy, &why, hold),
        }
    }
}

/// A surge instance leaves nothing worth keeping.
fn ends_at(view: &PoolView<'_>, instance: &ObservedInstance) -> Timestamp {
    let kept = if instance.staging == Some(Phase::Running) {
        0
    } else {
        view.pool_ref.pool.stopped_retention_seconds
    };
    instance.since + Duration::from_secs(kept)
}
