//! Fills the running count: wakes, resumes and starts existing instances, and only then creates new ones.

use mvm_proto::Phase;

use super::clock::Clock;
use super::draft::Draft;
use super::hold::{Hold, hands_off, hold};
use super::pressure::MEMORY_PRESSURE;
use super::view::{PoolView, best_first, readiest_first, remove};
use crate::limits::Shortage;
use crate::observation::ObservedInstance;
use crate::plan::Action;
use crate::usage::Usage;

/// Failures in a row after which what rests no longer keeps a place among those that run: a few seconds of retries.
const RETRIES: u32 = 3;

/// Why a place stays empty.
pub(crate) enum Obstacle {
    Hold(Hold),
    Shortage(Shortage),
    Pressure,
    /// One that is not wanted at rest has not arrived there yet.
    Arriving,
    BackingOff,
}

impl Obstacle {
    pub(crate) fn describe(&self, clock: &Clock) -> String {
        match self {
            Obstacle::Hold(hold) => hold.describe(clock),
            Obstacle::Shortage(shortage) => shortage.to_string(),
            Obstacle::Pressure => MEMORY_PRESSURE.to_owned(),
            Obstacle::Arriving => "one that is being put to rest will be brought back".to_owned(),
            Obstacle::BackingOff => "backing off after a failure".to_owned(),
        }
    }
}

pub(crate) fn fill_running(draft: &mut Draft, view: &mut PoolView<'_>) {
    let wanted = view.wanted().running;
    let need = wanted.saturating_sub(view.have.running + view.undecided.running);
    if need == 0 {
        return;
    }
    if let Some(reason) = view.no_start.clone() {
        view.missing.running = need;
        draft.defer(view.pool_ref, None, next_step(view), need, reason);
        return;
    }
    let why = format!("running {} of {wanted}", view.have.running);
    let mut obstacle = None;
    let mut left = need;

    let mut kept_running = std::mem::take(&mut view.staged);
    kept_running.append(&mut view.surge);
    take(draft, view, &mut kept_running, Action::Resume, &mut left, &why, &mut obstacle);
    for instance in kept_running {
        let list = if instance.staging == Some(Phase::Running) { &mut view.surge } else { &mut view.staged };
        list.push(instance);
    }

    // What is kept running needs no more memory than it has; everything else would.
    let obstacle = if draft.under_pressure {
        Obstacle::Pressure
    } else {
        bring_up(draft, view, &mut left, &why, obstacle)
    };

    view.is_starting |= left < need;
    view.have.running += need - left;
    view.missing.running = left;
    if left > 0 {
        let reason = obstacle.describe(&draft.clock);
        draft.defer(view.pool_ref, None, next_step(view), left, format!("{reason}; {why}"));
    }
}

/// How the next place among those that run would be filled, if nothing were in the way.
fn next_step(view: &PoolView<'_>) -> Action {
    match (view.sleeping.is_empty(), view.warm.is_empty(), view.startable.is_empty()) {
        (false, ..) => Action::Wake,
        (true, false, _) => Action::Resume,
        (true, true, false) => Action::Start,
        (true, true, true) => Action::Create,
    }
}

/// Wakes, resumes, starts and creates while any are `left` to bring up; says what is in the way of the rest.
fn bring_up(
    draft: &mut Draft,
    view: &mut PoolView<'_>,
    left: &mut usize,
    why: &str,
    mut obstacle: Option<Obstacle>,
) -> Obstacle {
    for (action, phase) in
        [(Action::Wake, Phase::Sleeping), (Action::Resume, Phase::Warm), (Action::Start, Phase::Stopped)]
    {
        let mut list = std::mem::take(match phase {
            Phase::Sleeping => &mut view.sleeping,
            Phase::Warm => &mut view.warm,
            _ => &mut view.startable,
        });
        if *left > 0 {
            if action == Action::Start { readiest_first(&mut list) } else { best_first(view, &mut list) }
        }
        let taken = take(draft, view, &mut list, action, left, why, &mut obstacle);
        match phase {
            Phase::Sleeping => {
                view.sleeping = list;
                view.have.sleeping -= taken;
            }
            Phase::Warm => {
                view.warm = list;
                view.have.warm -= taken;
            }
            _ => view.startable = list,
        }
    }

    let backing_off = backing_off(draft, view) + resting_and_retried(draft, view);
    let arriving = arriving(view);
    while *left > backing_off + arriving {
        let size = &view.pool_ref.pool.instance_resources;
        if let Err(shortage) = draft.spend(view.pool_ref, Usage::of(Phase::Running, size, None)) {
            obstacle = Some(Obstacle::Shortage(shortage));
            break;
        }
        draft.step(view.pool_ref, None, Action::Create, None, why.to_owned());
        *left -= 1;
    }
    obstacle.unwrap_or(if arriving > 0 { Obstacle::Arriving } else { Obstacle::BackingOff })
}

/// Instances that failed to start keep their place: making another at once would fail the same way.
pub(crate) fn backing_off(draft: &Draft, view: &PoolView<'_>) -> usize {
    let mut count = 0;
    for instance in &view.startable {
        if let Some(Hold::Backoff(_)) = hands_off(instance, &draft.clock) {
            count += 1;
        }
    }
    count
}

/// What is on its way to rest and is not wanted there any more: it is brought back, and nothing is made in its place.
fn arriving(view: &PoolView<'_>) -> usize {
    let (wanted, have, arriving) = (view.wanted(), view.have, view.arriving);
    arriving.warm.min(have.warm.saturating_sub(wanted.warm))
        + arriving.sleeping.min(have.sleeping.saturating_sub(wanted.sleeping))
}

/// A sleeper or warm one that failed to come back has its memory to lose: it is tried again a few times before another
/// takes its place.
fn resting_and_retried(draft: &Draft, view: &PoolView<'_>) -> usize {
    let mut count = 0;
    for instance in view.sleeping.iter().chain(&view.warm) {
        if let Some(Hold::Backoff(_)) = hands_off(instance, &draft.clock)
            && instance.failures < RETRIES
        {
            count += 1;
        }
    }
    count
}

pub(crate) fn take<'a>(
    draft: &mut Draft,
    view: &PoolView<'a>,
    list: &mut Vec<&'a ObservedInstance>,
    action: Action,
    left: &mut usize,
    why: &str,
    obstacle: &mut Option<Obstacle>,
) -> usize {
    let (tenant, pool) = (view.pool_ref.tenant, view.pool_ref.pool);
    let mut taken = Vec::new();
    for instance in list.iter() {
        if *left == 0 {
            break;
        }
        if let Some(hold) = hold(tenant, pool, instance, action, &draft.clock) {
            obstacle.get_or_insert(Obstacle::Hold(hold));
            continue;
        }
        // Starting boots the pool's current size; waking brings back the size that was put to sleep.
        let size = if action == Action::Start { &pool.instance_resources } else { &instance.resources };
        let more = Usage::of(Phase::Running, size, None).beyond(Usage::now(instance));
        if let Err(shortage) = draft.spend(view.pool_ref, more) {
            *obstacle = Some(Obstacle::Shortage(shortage));
            continue;
        }
        draft.step(view.pool_ref, Some(instance), action, None, why.to_owned());
        taken.push(&instance.id);
        *left -= 1;
    }
    remove(list, &taken);
    taken.len()
}
