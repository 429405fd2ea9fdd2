//! One pool as the passes see it: its instances sorted into what can be done with them.

use std::cmp::Reverse;
use std::time::Duration;

use mvm_proto::document::Pool;
use mvm_proto::{Digest, InstanceId, Phase, Timestamp, WorkloadState};

use super::clock::Clock;
use super::draft::PoolRef;
use super::members::Members;
use super::serving::{is_unproven, is_up_or_coming};
use crate::observation::ObservedInstance;
use crate::workload::Workload;

/// How many instances hold a place in each count.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct PhaseCounts {
    pub(crate) running: usize,
    pub(crate) warm: usize,
    pub(crate) sleeping: usize,
}

impl PhaseCounts {
    pub(crate) fn wanted(pool: &Pool) -> Self {
        let counts = &pool.desired_counts;
        let size = |count: u32| usize::try_from(count).unwrap_or(usize::MAX);
        Self { running: size(counts.running), warm: size(counts.warm), sleeping: size(counts.sleeping) }
    }

    pub(crate) fn count(&mut self, phase: Phase) {
        match phase {
            Phase::Running => self.running += 1,
            Phase::Warm => self.warm += 1,
            Phase::Sleeping => self.sleeping += 1,
            _ => {}
        }
    }
}

#[derive(Debug)]
pub(crate) struct PoolView<'a> {
    pub(crate) pool_ref: PoolRef<'a>,
    pub(crate) revision: Digest,
    /// Why nothing of this pool may be started now.
    pub(crate) no_start: Option<String>,
    /// The counts' own: no request holds these. What is claimed is in no list.
    pub(crate) running: Vec<&'a ObservedInstance>,
    pub(crate) warm: Vec<&'a ObservedInstance>,
    pub(crate) sleeping: Vec<&'a ObservedInstance>,
    /// Running, and their program does not work and is started again. One that is over for good is as good as idle.
    pub(crate) down: Vec<&'a ObservedInstance>,
    /// Stopped, failed or never booted: they can be started.
    pub(crate) startable: Vec<&'a ObservedInstance>,
    /// Booted on the way to warm or sleeping.
    pub(crate) staged: Vec<&'a ObservedInstance>,
    /// Booted to stand in for one that is being replaced.
    pub(crate) surge: Vec<&'a ObservedInstance>,
    /// Woken by a request; the sleep policy puts them back.
    pub(crate) on_demand: Vec<&'a ObservedInstance>,
    /// Woken by a request, and of an older revision.
    pub(crate) woken_outdated: Vec<&'a ObservedInstance>,
    /// Woken by a request, running, and at home in the running count.
    pub(crate) woken_running: usize,
    /// Of this revision, running, and not long enough to count as working where the document says how long.
    pub(crate) unproven: usize,
    /// Running, on the way there, or on the way down from there.
    pub(crate) up_or_coming: usize,
    /// Something is on its way to running: what counts as running is not all up yet.
    pub(crate) is_starting: bool,
    pub(crate) have: PhaseCounts,
    /// Those of them that are still on their way there, and no request's.
    pub(crate) arriving: PhaseCounts,
    /// Places that may be filled already: no instance is made or removed for them.
    pub(crate) undecided: PhaseCounts,
    /// Something is being staged or replaced now: one at a time per pool.
    pub(crate) staging_busy: bool,
    /// Places that the stages so far could not fill, and those that a surplus instance will fill when it may.
    pub(crate) missing: PhaseCounts,
    pub(crate) waiting: PhaseCounts,
}

impl<'a> PoolView<'a> {
    pub(crate) fn new(members: &Members<'a>, no_start: Option<String>, clock: &Clock) -> Self {
        let mut view = Self {
            pool_ref: members.pool_ref,
            revision: members.revision(),
            no_start,
            running: Vec::new(),
            warm: Vec::new(),
            sleeping: Vec::new(),
            down: Vec::new(),
            startable: Vec::new(),
            staged: Vec::new(),
            surge: Vec::new(),
            on_demand: Vec::new(),
            woken_outdated: Vec::new(),
            woken_running: 0,
            unproven: 0,
            up_or_coming: 0,
            is_starting: false,
            have: PhaseCounts::default(),
            arriving: PhaseCounts::default(),
            undecided: PhaseCounts::default(),
            staging_busy: false,
            missing: PhaseCounts::default(),
            waiting: PhaseCounts::default(),
        };
        members.instances().for_each(|instance| view.add(instance, clock));
        // No plan, nor what it says, depends on the order of an observation.
        for list in view.lists() {
            list.sort_by(|a, b| a.id.cmp(&b.id));
        }
        view
    }

    fn lists(&mut self) -> [&mut Vec<&'a ObservedInstance>; 9] {
        [
            &mut self.running,
            &mut self.warm,
            &mut self.sleeping,
            &mut self.down,
            &mut self.startable,
            &mut self.staged,
            &mut self.surge,
            &mut self.on_demand,
            &mut self.woken_outdated,
        ]
    }

    pub(crate) fn wanted(&self) -> PhaseCounts {
        PhaseCounts::wanted(self.pool_ref.pool)
    }

    pub(crate) fn is_outdated(&self, instance: &ObservedInstance) -> bool {
        instance.revision != self.revision
    }

    /// Sorts one instance in, and gives it its place in a count. A claimed one has none: it counts against quotas and capacity
    /// alone, and what its pool lacks without it is made anew.
    fn add(&mut self, instance: &'a ObservedInstance, clock: &Clock) {
        if instance.claimed {
            return;
        }
        // Its place is its own until its move is over, whatever is done to it meanwhile.
        if let Some(phase) = instance.moving_in() {
            self.have.count(phase);
            match phase {
                Phase::Running => self.running.push(instance),
                Phase::Warm => self.warm.push(instance),
                _ => self.sleeping.push(instance),
            }
            return;
        }
        let woken = instance.on_demand && !self.is_released(instance, clock);
        self.up_or_coming += usize::from(is_up_or_coming(instance));
        if let Some(to) = instance.moving_to {
            let is_staged = instance.staging.is_some() && to != Phase::Destroyed;
            self.staging_busy |= is_staged || instance.is_being_replaced();
            self.is_starting |= to == Phase::Running;
            let toward = if to == Phase::Running { instance.staging.unwrap_or(to) } else { to };
            let stands_in = instance.staging == Some(Phase::Running);
            if instance.is_undecided() && !woken {
                self.undecided.running += 1;
                if !stands_in {
                    self.undecided.count(toward);
                }
                return;
            }
            let home = if woken { instance.home.unwrap_or(toward) } else { toward };
            if !stands_in {
                self.have.count(home);
                if !woken {
                    self.arriving.count(home);
                }
            }
            return;
        }
        if !woken && !self.is_outdated(instance) {
            self.unproven += usize::from(is_unproven(self.pool_ref.pool, instance, clock));
        }
        match instance.phase {
            Phase::Running | Phase::Warm if woken => {
                let home = instance.home.unwrap_or(Phase::Running);
                self.have.count(home);
                if self.is_brought_back(instance) {
                    self.down.push(instance);
                    return;
                }
                self.woken_running += usize::from(home == Phase::Running && instance.phase == Phase::Running);
                self.on_demand.push(instance);
                if self.is_outdated(instance) {
                    self.woken_outdated.push(instance);
                }
            }
            Phase::Running => match instance.staging {
                // Its program is brought back when it is woken.
                Some(Phase::Warm | Phase::Sleeping) => self.staged.push(instance),
                staging if self.is_brought_back(instance) => {
                    self.staging_busy |= staging.is_some();
                    self.have.running += usize::from(staging.is_none());
                    self.down.push(instance);
                }
                Some(_) => self.surge.push(instance),
                None => {
                    self.have.running += 1;
                    self.running.push(instance);
                }
            },
            Phase::Warm => {
                self.have.warm += 1;
                self.warm.push(instance);
            }
            Phase::Sleeping => {
                self.have.sleeping += 1;
                self.sleeping.push(instance);
            }
            Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed => self.startable.push(instance),
            Phase::Destroyed => {}
        }
    }

    /// Since when it has nothing to do; none: it is busy, or that is unknown.
    pub(crate) fn idle_from(&self, instance: &ObservedInstance) -> Option<Timestamp> {
        // What is paused has nothing to do, whatever was known of it before; nor has a program that is over for good.
        let paused = (instance.phase == Phase::Warm).then_some(instance.since);
        if self.is_brought_back(instance) {
            return None;
        }
        // One that is unhealthy may still have work.
        let is_over = |workload: &Workload| workload.is_down() && workload.state != WorkloadState::Unhealthy;
        let workload = instance.workload.as_deref().filter(|_| instance.phase == Phase::Running);
        let ended = workload.filter(|workload| is_over(workload)).map(|workload| workload.since);
        instance.idle_since.or(paused).or(ended)
    }

    /// Its program does not work and is started again.
    pub(crate) fn is_brought_back(&self, instance: &ObservedInstance) -> bool {
        let state = instance.workload.as_ref().map(|workload| workload.state);
        instance.is_down() && state.is_some_and(|state| state.is_restarted(self.pool_ref.pool.restart))
    }

    /// A request's hold on an instance ends by itself where the counts then decide: back at home, or idle.
    fn is_released(&self, instance: &ObservedInstance, clock: &Clock) -> bool {
        match instance.home.unwrap_or(Phase::Running) {
            Phase::Running => {
                let after = Duration::from_secs(self.pool_ref.pool.sleep_policy.warm_after_seconds);
                self.idle_from(instance).is_some_and(|since| clock.is_past(since + after))
            }
            home => instance.phase == home && instance.moving_to.is_none(),
        }
    }
}

fn used_at(instance: &ObservedInstance) -> Timestamp {
    instance.last_used_at.unwrap_or(instance.since)
}

/// For waking and resuming: of the current revision, most recently used.
pub(crate) fn best_first<'a>(view: &PoolView<'a>, list: &mut [&'a ObservedInstance]) {
    list.sort_by(|a, b| {
        let key = |i: &&'a ObservedInstance| (view.is_outdated(i), Reverse(used_at(i)));
        key(a).cmp(&key(b)).then_with(|| a.id.cmp(&b.id))
    });
}

/// For stopping and sleeping: outdated, then idle longest, then newest. What is busy, or not known to be idle, last.
pub(crate) fn coldest_first<'a>(view: &PoolView<'a>, list: &mut [&'a ObservedInstance]) {
    list.sort_by(|a, b| {
        let key = |i: &&'a ObservedInstance| {
            let idle_from = i.idle_since.unwrap_or_else(|| used_at(i));
            (!view.is_outdated(i), i.idle_since.is_none(), idle_from, Reverse(i.since))
        };
        key(a).cmp(&key(b)).then_with(|| a.id.cmp(&b.id))
    });
}

/// For starting: what was begun and never booted, then what stopped last, then what failed.
pub(crate) fn readiest_first(list: &mut [&ObservedInstance]) {
    list.sort_by(|a, b| {
        let key = |i: &&ObservedInstance| (i.phase == Phase::Failed, Reverse(used_at(i)));
        key(a).cmp(&key(b)).then_with(|| a.id.cmp(&b.id))
    });
}

/// Drops from `list` what `taken` names. Both are short, or `taken` is.
pub(crate) fn remove(list: &mut Vec<&ObservedInstance>, taken: &[&InstanceId]) {
    if !taken.is_empty() {
        let taken: std::collections::BTreeSet<_> = taken.iter().collect();
        list.retain(|instance| !taken.contains(&&instance.id));
    }
}
