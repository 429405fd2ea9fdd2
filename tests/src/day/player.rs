//! Plays a trace: requests come, steps take their time, and the planner says what is put to rest.
//!
//! The player does to its instances what an agent does to real ones: a request waits for a step that is under way, its
//! instance is lent until it is idle, and a plan is made when something changed or a deadline has come.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use mvm_planner::{Action, NodePlan, Observation, ObservedInstance, Step, check_move, plan_node};
use mvm_proto::{InstanceId, Phase, Timestamp};

use super::Played;
use super::fleet::Fleet;
use super::trace::{DAY_MS, Trace};

/// Midnight, UTC.
const MIDNIGHT_MS: i64 = 1_767_225_600_000;
const HOUR_MS: f64 = 3_600_000.0;
/// A fleet of any size is provisioned long before; more events than this mean that it never comes to rest.
const MOST_EVENTS_TO_REST: usize = 1_000_000;

/// How long steps take.
#[derive(Debug, Clone, Copy)]
pub struct Latencies {
    pub boot: Duration,
    /// From sleeping, and from warm.
    pub wake: Duration,
    pub resume: Duration,
    /// To warm, and to sleeping.
    pub pause: Duration,
    pub sleep: Duration,
}

impl Default for Latencies {
    /// A snapshot of 512 MiB is written in half a second, and is there again in a tenth.
    fn default() -> Self {
        let ms = Duration::from_millis;
        Self { boot: ms(2000), wake: ms(100), resume: ms(2), pause: ms(5), sleep: ms(500) }
    }
}

impl Latencies {
    fn of(&self, action: Action) -> Duration {
        match action {
            Action::Create | Action::Start | Action::Replace => self.boot,
            Action::Wake => self.wake,
            Action::Resume => self.resume,
            Action::Warm | Action::Stop | Action::Destroy | Action::Restart => self.pause,
            Action::Sleep => self.sleep,
        }
    }
}

#[derive(Debug, Clone, Copy)]
enum Event {
    /// The step under way on this instance is done.
    Done {
        at: usize,
    },
    /// One of the requests in it is served.
    Served {
        at: usize,
    },
    Arrives {
        at: usize,
        service: Duration,
    },
}

/// What the player knows of an instance besides what the planner sees.
#[derive(Debug, Default)]
struct Extra {
    /// Who waits for it: since when, and for how long of a service.
    waiting: VecDeque<(Timestamp, Duration)>,
    serving: usize,
    /// The rest that it was put to since the last arrival. At midnight all are where the counts want them.
    rest: Option<Phase>,
    in_memory_since: Option<Timestamp>,
}

/// A day on a fleet. Panics when the fleet does not even come to its counts.
#[must_use]
pub fn play(fleet: &Fleet, trace: &Trace, latencies: Latencies) -> Played {
    let mut player = Player::new(fleet, latencies);
    player.provision();
    player.play(trace)
}

struct Player<'a> {
    fleet: &'a Fleet,
    latencies: Latencies,
    now: Timestamp,
    observed: Observation,
    /// At the same places as in `observed`.
    extras: Vec<Extra>,
    events: BTreeMap<(Timestamp, u64), Event>,
    next_number: u64,
    deadline: Option<Timestamp>,
    /// The day has begun: before that, counts may act.
    is_day: bool,
    played: Played,
}

impl<'a> Player<'a> {
    fn new(fleet: &'a Fleet, latencies: Latencies) -> Self {
        // A day ahead, so that everything is at rest at midnight.
        let now = Timestamp::from_unix_ms(MIDNIGHT_MS) - Duration::from_millis(DAY_MS);
        let observed = Observation { capacity: fleet.capacity, ..Observation::default() };
        Self {
            fleet,
            latencies,
            now,
            observed,
            extras: Vec::new(),
            events: BTreeMap::new(),
            next_number: 0,
            deadline: None,
            is_day: false,
            played: Played::default(),
        }
    }

    fn schedule(&mut self, at: Timestamp, event: Event) {
        self.next_number += 1;
        self.events.insert((at, self.next_number), event);
    }

    /// Lets the counts make the fleet.
    fn provision(&mut self) {
        for _ in 0..MOST_EVENTS_TO_REST {
            let plan = self.plan();
            if self.events.is_empty() && plan.steps.is_empty() && self.deadline.is_none() {
                assert_eq!(self.observed.instances.len(), self.fleet.instances(), "the counts are met");
                return;
            }
            self.advance(Timestamp::from_unix_ms(MIDNIGHT_MS));
        }
        panic!("the fleet did not come to rest: {:?}", self.plan());
    }

    fn play(mut self, trace: &Trace) -> Played {
        let midnight = Timestamp::from_unix_ms(MIDNIGHT_MS);
        let end = midnight + Duration::from_millis(DAY_MS);
        (self.now, self.is_day) = (midnight, true);
        for extra in &mut self.extras {
            extra.in_memory_since = extra.in_memory_since.map(|_| midnight);
            extra.rest = Some(Phase::Sleeping);
        }
        for arrival in &trace.arrivals {
            let event = Event::Arrives {
                at: arrival.agent % self.extras.len(),
                service: Duration::from_millis(arrival.service_ms),
            };
            self.schedule(midnight + Duration::from_millis(arrival.at_ms), event);
        }
        while self.now < end {
            self.plan();
            self.advance(end);
        }
        for at in 0..self.extras.len() {
            self.leaves_memory(at);
        }
        let total: u64 = self.observed.instances.iter().map(|i| i.resources.mem_mib).sum();
        self.played.instances = self.extras.len();
        self.played.always_on_mib_hours = total as f64 * 24.0;
        self.played.waits_ms.sort_unstable();
        self.played
    }

    /// Goes on to whatever comes next, but not beyond `end`.
    fn advance(&mut self, end: Timestamp) {
        let next_event = self.events.keys().next().map(|(at, _)| *at);
        let next = next_event.into_iter().chain(self.deadline).min().unwrap_or(end).min(end);
        assert!(next >= self.now, "time goes on");
        self.now = next;
        while let Some(entry) = self.events.first_entry()
            && entry.key().0 <= self.now
        {
            match entry.remove() {
                Event::Done { at } => self.step_ends(at),
                Event::Served { at } => {
                    self.extras[at].serving -= 1;
                    if self.extras[at].serving == 0 {
                        self.observed.instances[at].idle_since = Some(self.now);
                    }
                }
                Event::Arrives { at, service } => self.arrives(at, service),
            }
        }
    }

    fn plan(&mut self) -> NodePlan {
        let plan = plan_node(&self.fleet.desired, &self.observed, self.now);
        self.played.plans += 1;
        self.deadline = plan.next_deadline;
        for step in &plan.steps {
            let at = match &step.instance {
                Some(id) => self.observed.instances.iter().position(|i| i.id == *id),
                None => Some(self.create(step)),
            };
            let Some(at) = at else { panic!("{step} names no instance") };
            if self.is_day {
                self.judge(at, step);
            }
            self.begin(at, step.action);
        }
        plan
    }

    /// Notes steps that nobody asked for.
    fn judge(&mut self, at: usize, step: &Step) {
        let extra = &mut self.extras[at];
        let rests_again = match (step.action, extra.rest) {
            (Action::Warm, rest) => rest.is_some(),
            (Action::Sleep, rest) => rest == Some(Phase::Sleeping),
            _ => true,
        };
        extra.rest = Some(step.action.leads_to(None));
        if rests_again {
            self.played.flaps.push(format!("{}: {step}", self.now));
        }
        if self.extras[at].serving > 0 {
            self.played.interrupted.push(format!("{}: {step}", self.now));
        }
    }

    fn create(&mut self, step: &Step) -> usize {
        let named =
            self.fleet.desired.pools().find(|(t, p)| t.tenant_id == step.tenant && p.pool_id == step.pool);
        let Some((tenant, pool)) = named else { panic!("{step} names no pool") };
        let id = InstanceId::from_bits(u32::try_from(self.extras.len()).unwrap_or(u32::MAX));
        let made = ObservedInstance::of(tenant, pool, id, Phase::Created, self.now);
        self.observed.instances.push(ObservedInstance { staging: step.staging, ..made });
        self.extras.push(Extra::default());
        self.extras.len() - 1
    }

    fn begin(&mut self, at: usize, action: Action) {
        let instance = &mut self.observed.instances[at];
        assert_eq!(instance.moving_to, None, "{} is acted on once at a time", instance.id);
        instance.moving_to = Some(action.leads_to(Some(instance.phase)));
        if instance.moving_to == Some(Phase::Running) {
            self.extras[at].in_memory_since.get_or_insert(self.now);
        }
        self.schedule(self.now + self.latencies.of(action), Event::Done { at });
    }

    fn step_ends(&mut self, at: usize) {
        let instance = &mut self.observed.instances[at];
        let Some(to) = instance.moving_to.take() else { panic!("{} was not under way", instance.id) };
        (instance.phase, instance.since) = (to, self.now);
        if to != Phase::Running {
            instance.staging = None;
        }
        if Some(to) == instance.home || !matches!(to, Phase::Running | Phase::Warm) {
            (instance.on_demand, instance.home) = (false, None);
        }
        match to {
            Phase::Running => instance.idle_since = Some(self.now),
            Phase::Warm => {}
            _ => {
                instance.idle_since = Some(self.now);
                self.leaves_memory(at);
            }
        }
        self.serve(at);
    }

    fn arrives(&mut self, at: usize, service: Duration) {
        self.played.arrivals += 1;
        let instance = &self.observed.instances[at];
        match (instance.moving_to, instance.phase) {
            (Some(Phase::Running), _) | (None, Phase::Running) => {}
            (Some(_), _) => self.played.caught += 1,
            (None, Phase::Warm) => self.played.resumes += 1,
            (None, _) => self.played.wakes += 1,
        }
        self.extras[at].rest = None;
        self.extras[at].waiting.push_back((self.now, service));
        self.serve(at);
    }

    /// Lets those in who wait, or wakes the instance for them.
    fn serve(&mut self, at: usize) {
        let instance = &mut self.observed.instances[at];
        if self.extras[at].waiting.is_empty() || instance.moving_to.is_some() {
            return;
        }
        if instance.phase == Phase::Running {
            lend(instance, self.now);
            instance.idle_since = None;
            for (since, service) in std::mem::take(&mut self.extras[at].waiting) {
                self.extras[at].serving += 1;
                if since < self.now {
                    let waited = self.now.since(since).as_millis();
                    self.played.waits_ms.push(u64::try_from(waited).unwrap_or(u64::MAX));
                }
                self.schedule(self.now + service, Event::Served { at });
            }
            return;
        }
        let id = instance.id.clone();
        if check_move(&self.fleet.desired, &self.observed, &id, Phase::Running).is_err() {
            self.played.refused += std::mem::take(&mut self.extras[at].waiting).len();
            return;
        }
        let instance = &mut self.observed.instances[at];
        // From here on it is the request's, also while it is still on its way.
        lend(instance, self.now);
        let action = if instance.phase == Phase::Warm { Action::Resume } else { Action::Wake };
        self.begin(at, action);
    }

    fn leaves_memory(&mut self, at: usize) {
        if let Some(since) = self.extras[at].in_memory_since.take() {
            let hours = self.now.since(since).as_millis() as f64 / HOUR_MS;
            self.played.memory_mib_hours += self.observed.instances[at].resources.mem_mib as f64 * hours;
        }
    }
}

/// Marks an instance as a request's, with its place in the count that it came from.
fn lend(instance: &mut ObservedInstance, now: Timestamp) {
    instance.home.get_or_insert(instance.phase);
    (instance.on_demand, instance.last_used_at) = (true, Some(now));
}
