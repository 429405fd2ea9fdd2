//! A world where steps take time and go wrong: they fail, the agent dies between two of them, VMs end, requests wake
//! and claim instances, memory runs short, and the clock jumps. What it does follows from one number.

use std::time::Duration;

use mvm_planner::{Action, NodePlan, Observation, ObservedInstance, Step, check_move, revision_of};
use mvm_proto::{DesiredState, InstanceId, Phase, Timestamp};

/// Random enough for faults, the same for the same seed.
#[derive(Debug, Clone)]
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        // splitmix64
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (x ^ (x >> 31)) % limit
    }

    fn one_in(&mut self, count: u64) -> bool {
        self.below(count) == 0
    }
}

#[derive(Debug, Clone)]
pub(crate) struct SlowWorld {
    pub(crate) observed: Observation,
    pub(crate) now: Timestamp,
    pub(crate) chance: Chance,
    under_way: Vec<(Step, InstanceId)>,
    next_id: u32,
}

impl SlowWorld {
    pub(crate) fn new(observed: Observation, now: Timestamp, seed: u64) -> Self {
        Self { observed, now, chance: Chance(seed), under_way: Vec::new(), next_id: 0x4000_0000 }
    }

    pub(crate) fn instance(&mut self, id: &InstanceId) -> Option<&mut ObservedInstance> {
        self.observed.instances.iter_mut().find(|i| i.id == *id)
    }

    /// Begins the steps of a plan, in an order of its own.
    pub(crate) fn begin(&mut self, desired: &DesiredState, plan: &NodePlan, mut each: impl FnMut(&Self)) {
        let mut steps = plan.steps.clone();
        while !steps.is_empty() {
            let index = self.chance.below(steps.len() as u64);
            self.begin_one(desired, steps.swap_remove(usize::try_from(index).unwrap()));
            each(self);
        }
    }

    fn begin_one(&mut self, desired: &DesiredState, step: Step) {
        let now = self.now;
        let id = match &step.instance {
            Some(id) => id.clone(),
            None => {
                let (tenant, pool) = named(desired, &step).expect("only a named pool gets new instances");
                self.next_id += 1;
                let id = InstanceId::from_bits(self.next_id);
                let made =
                    super::model::booted(&self.observed, (tenant, pool), id.clone(), step.staging, now);
                self.observed.instances.push(ObservedInstance { phase: Phase::Created, ..made });
                id
            }
        };
        let instance = self.instance(&id).expect("a step names an instance that exists");
        assert_eq!(instance.moving_to, None, "{step:?}: nothing is acted on twice at once");
        instance.moving_to = Some(step.action.leads_to(Some(instance.phase)));
        if matches!(step.action, Action::Create | Action::Start | Action::Wake) {
            instance.staging = step.staging;
        }
        if let (Action::Start | Action::Replace, Some((_, pool))) = (step.action, named(desired, &step)) {
            instance.resources = pool.instance_resources;
        }
        self.under_way.push((step, id));
    }

    /// Ends some of what is under way, or all of it; each step fails once in `failing` times (0: never).
    pub(crate) fn finish(&mut self, desired: &DesiredState, all: bool, failing: u64) {
        for (step, id) in std::mem::take(&mut self.under_way) {
            if !all && self.chance.one_in(3) {
                self.go_on(&step, &id);
                self.under_way.push((step, id));
                continue;
            }
            let fails = failing > 0 && self.chance.one_in(failing);
            self.end(desired, &step, &id, fails);
        }
    }

    /// A step is seen on its way. A boot is over before its step is; a replacement stops, is marked with where it rests,
    /// boots, and only then goes there.
    fn go_on(&mut self, step: &Step, id: &InstanceId) {
        let now = self.now;
        let Some(instance) = self.instance(id) else { return };
        let to = instance.moving_to.expect("it was under way");
        let rests = to != Phase::Running;
        match (instance.phase, instance.staging) {
            _ if matches!(step.action, Action::Create | Action::Start | Action::Wake) => {
                instance.phase = Phase::Running;
                instance.since = now;
            }
            _ if step.action != Action::Replace => {}
            (phase, _) if phase == to => {
                instance.phase = Phase::Stopped;
                instance.since = now;
            }
            (Phase::Stopped, None) if rests => instance.staging = Some(to),
            (Phase::Stopped, Some(_)) if rests => {
                instance.phase = Phase::Running;
                instance.since = now;
            }
            _ => {}
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.under_way.is_empty()
    }

    pub(crate) fn end(&mut self, desired: &DesiredState, step: &Step, id: &InstanceId, fails: bool) {
        let now = self.now;
        let wait = Duration::from_secs(1 + self.chance.below(60));
        let still_asleep = self.chance.one_in(2);
        let Some(instance) = self.instance(id) else { return };
        let to = instance.moving_to.take().expect("it was under way");
        let boots = matches!(step.action, Action::Create | Action::Start | Action::Wake | Action::Replace);
        if fails {
            // A wake that fails before the snapshot was given up leaves it asleep.
            let sleeps_on = step.action == Action::Wake && still_asleep;
            if boots && !sleeps_on {
                instance.phase = Phase::Failed;
                instance.since = now;
                instance.staging = instance.staging.filter(|staging| *staging == Phase::Running);
            }
            instance.retry_not_before = Some(now + wait);
            instance.failures += 1;
            return;
        }
        if step.action == Action::Destroy {
            self.observed.instances.retain(|i| i.id != *id);
            return;
        }
        if let (true, Some((tenant, pool))) = (boots && step.action != Action::Wake, named(desired, step)) {
            instance.revision = revision_of(tenant, pool);
            instance.resources = pool.instance_resources;
        }
        match step.action {
            Action::Restart => {
                instance.workload = instance.workload.as_deref().map(|w| Box::new(w.restarted(now)));
                (instance.retry_not_before, instance.failures) = (None, 0);
                return;
            }
            _ if boots && step.action != Action::Wake => instance.workload = None,
            _ => {}
        }
        let stood_in = instance.staging == Some(Phase::Running) && step.action == Action::Stop;
        instance.phase = to;
        instance.since = now;
        instance.retry_not_before = None;
        instance.failures = 0;
        instance.idle_since = None;
        if !matches!(step.action, Action::Create | Action::Start | Action::Wake) && !stood_in {
            instance.staging = None;
        }
        if Some(instance.phase) == instance.home || matches!(instance.phase, Phase::Sleeping | Phase::Stopped)
        {
            instance.on_demand = false;
            instance.home = None;
        }
    }

    /// Steps that had begun, as a plan's execution knows them.
    pub(crate) fn take_under_way(&mut self) -> Vec<(Step, InstanceId)> {
        std::mem::take(&mut self.under_way)
    }

    /// The agent dies and starts again: what it had begun is found done, or undone.
    pub(crate) fn crash(&mut self, desired: &DesiredState) {
        for (step, id) in self.take_under_way() {
            if self.chance.one_in(2) {
                self.end(desired, &step, &id, false);
            } else if let Some(instance) = self.instance(&id) {
                instance.moving_to = None;
                if step.action == Action::Replace {
                    instance.phase = Phase::Stopped;
                }
            }
        }
    }

    /// One thing that nobody planned.
    pub(crate) fn trouble(&mut self, desired: &DesiredState) {
        let now = self.now;
        let jump = Duration::from_secs(self.chance.below(3600));
        match self.chance.below(9) {
            0 => self.now = now + jump,
            1 => self.now = now - jump,
            2 => self.crash(desired),
            8 => self.observed.memory_pressure ^= true,
            kind => {
                let count = self.observed.instances.len() as u64;
                if count == 0 {
                    return;
                }
                let index = usize::try_from(self.chance.below(count)).unwrap();
                let id = self.observed.instances[index].id.clone();
                let may_wake = check_move(desired, &self.observed, &id, Phase::Running).is_ok();
                let Some(instance) = self.instance(&id).filter(|i| i.moving_to.is_none()) else { return };
                match (kind, instance.phase) {
                    (3, Phase::Running | Phase::Warm) => {
                        instance.phase = Phase::Failed;
                        instance.since = now;
                        instance.staging = None;
                        instance.claimed = false;
                        instance.on_demand = false;
                        instance.retry_not_before = Some(now + Duration::from_secs(5));
                    }
                    (4, Phase::Sleeping) if may_wake => {
                        instance.phase = Phase::Running;
                        instance.since = now;
                        instance.on_demand = true;
                        instance.home = Some(Phase::Sleeping);
                    }
                    (5, Phase::Running | Phase::Warm | Phase::Sleeping)
                        if instance.staging.is_none() && !instance.on_demand =>
                    {
                        instance.claimed = true;
                    }
                    (6, _) => {
                        instance.claimed = false;
                        instance.idle_since = Some(now);
                    }
                    (7, _) => instance.override_until = Some(now + jump),
                    _ => {}
                }
            }
        }
    }

    /// Everyone lets go, nothing has anything to do, and there is memory enough.
    pub(crate) fn calm(&mut self) {
        let now = self.now;
        self.observed.memory_pressure = false;
        for instance in &mut self.observed.instances {
            instance.claimed = false;
            instance.idle_since = Some(now);
        }
    }
}

fn named<'a>(
    desired: &'a DesiredState,
    step: &Step,
) -> Option<(&'a mvm_proto::document::Tenant, &'a mvm_proto::document::Pool)> {
    desired.pools().find(|(tenant, pool)| tenant.tenant_id == step.tenant && pool.pool_id == step.pool)
}
