//! The laws of a rollout over a fleet: real node planners, documents and reports that arrive late, revisions and values of secrets
//! that do not work, and changes in the middle.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use mvm_planner::fleet::rollout::{
    Grant, Named, OfferedRevision, Report, Rollout, RolloutLimits, RolloutNode, RolloutPlan, open_grant, roll,
};
use mvm_planner::node::rollout_progress;
use mvm_planner::revision::revision_with;
use mvm_planner::{Action, Capacity, ObservedInstance, Step, Workload, plan_node, revision_of};
use mvm_proto::document::Update;
use mvm_proto::{DesiredState, Digest, InstanceId, NodeId, Phase, WorkloadState};
use proptest::prelude::*;

use crate::world::one_pool::{desired, now, observed, workers};
use crate::world::slow::SlowWorld;

/// A revision's image; `bad` has a program that fails.
const IMAGES: [&str; 3] = ["builtin:a", "builtin:b", "builtin:bad"];
const BAD: usize = 2;
/// So many passes are more than any rollout here takes.
const PASSES: usize = 1500;

/// Values of the pool's secrets, by their number; with the odd ones its program fails.
type Values = usize;

/// Revisions with their secrets, as instances have them, that do not work.
type Bad = BTreeSet<Digest>;

#[derive(Debug, Clone)]
struct SimNode {
    world: SlowWorld,
    /// What it was offered, with what each names, the first acknowledged.
    sent: Vec<(u64, DesiredState, Named)>,
    follows: usize,
    report: (u64, Report),
    wanted: u32,
    bad: Bad,
}

#[derive(Debug, Clone)]
struct Sim {
    nodes: BTreeMap<NodeId, SimNode>,
    limits: RolloutLimits,
    min_ready_seconds: u64,
    target: usize,
    settled: usize,
    values: Values,
    halted: bool,
    number: u64,
    /// What instances are made of, by the revision that they tell.
    made: BTreeMap<Digest, (usize, Values)>,
}

fn document(
    wanted: (u32, u32, u32),
    image: usize,
    secrets: Option<Digest>,
    update: Option<Update>,
) -> DesiredState {
    let mut document = desired(wanted.0, wanted.1, wanted.2);
    let pool = &mut document.tenants[0].pools[0];
    pool.flake_ref = IMAGES[image].to_owned();
    pool.secrets_hash = secrets;
    pool.update = update;
    document
}

fn secrets(values: Values) -> Option<Digest> {
    Some(Digest::of(&values.to_be_bytes()))
}

fn is_bad(image: usize, values: Values) -> bool {
    image == BAD || values % 2 == 1
}

/// As rollouts name it: whatever its secrets are.
fn digest(image: usize) -> Digest {
    let document = document((1, 0, 0), image, None, None);
    revision_with(workers(&document).1, None)
}

/// As instances tell it.
fn full(image: usize, values: Values) -> Digest {
    let document = document((1, 0, 0), image, secrets(values), None);
    let (tenant, pool) = workers(&document);
    revision_of(tenant, pool)
}

fn image_of(revision: &Digest) -> usize {
    (0..IMAGES.len()).find(|image| digest(*image) == *revision).unwrap()
}

#[derive(Debug, Clone)]
struct Shape {
    nodes: Vec<(u32, u32, u32)>,
    limits: RolloutLimits,
    tight: bool,
    min_ready_seconds: u64,
}

fn shape() -> impl Strategy<Value = Shape> {
    let nodes = proptest::collection::vec((0u32..4, 0u32..2, 0u32..2), 1..5);
    let limits = (0u32..3, 0u32..3).prop_filter("some", |(unavailable, surge)| unavailable + surge > 0);
    (nodes, limits, any::<bool>(), prop_oneof![Just(0u64), Just(5)]).prop_map(
        |(nodes, (max_unavailable, max_surge), tight, min_ready_seconds)| Shape {
            nodes,
            limits: RolloutLimits { max_unavailable, max_surge },
            // Where there is no room for a surge instance, one has to be missing.
            tight: tight && max_unavailable > 0,
            min_ready_seconds,
        },
    )
}

impl Sim {
    /// All at rest with the first revision.
    fn at_rest(shape: &Shape, seed: u64) -> Self {
        let named = Named { revision: digest(0), secrets: secrets(0), grant: None };
        let nodes = shape.nodes.iter().enumerate().map(|(at, wanted)| {
            let document = document(*wanted, 0, secrets(0), None);
            let phases = [(Phase::Running, wanted.0), (Phase::Warm, wanted.1), (Phase::Sleeping, wanted.2)];
            let phases: Vec<_> =
                phases.iter().flat_map(|(phase, count)| vec![(*phase, 5000); *count as usize]).collect();
            let mut seen = observed(&document, &phases);
            if shape.tight {
                let size = workers(&document).1.instance_resources;
                // Enough for one that rests to be booted, beside all that run.
                let resting = u32::from(wanted.1 + wanted.2 > 0);
                seen.capacity = Capacity { vcpus: size.vcpus * (wanted.0 + resting), ..seen.capacity };
            }
            let world = SlowWorld::new(seen, now(), seed.wrapping_add(at as u64));
            let id: NodeId = format!("n{at}").parse().unwrap();
            let mut node = SimNode {
                world,
                sent: vec![(0, document, named)],
                follows: 0,
                report: (0, Report::default()),
                wanted: wanted.0,
                bad: Bad::new(),
            };
            node.tell();
            (id, node)
        });
        let mut sim = Self {
            nodes: nodes.collect(),
            limits: shape.limits,
            min_ready_seconds: shape.min_ready_seconds,
            target: 0,
            settled: 0,
            values: 0,
            halted: false,
            number: 0,
            made: BTreeMap::new(),
        };
        sim.has_values(0);
        sim
    }

    /// The pool's secrets have other values: those of before are nowhere but on nodes.
    fn rotate(&mut self, is_bad: bool) {
        self.has_values((self.values / 2 + 1) * 2 + usize::from(is_bad));
    }

    fn has_values(&mut self, values: Values) {
        self.values = values;
        for image in 0..IMAGES.len() {
            let revision = full(image, values);
            self.made.insert(revision, (image, values));
            if is_bad(image, values) {
                self.nodes.values_mut().for_each(|node| node.bad.extend([revision]));
            }
        }
    }

    fn rollout(&self) -> Rollout {
        let node = |node: &SimNode| {
            let offers = node.sent.iter().map(|(number, _, named)| {
                let grant = named.grant.unwrap_or(Grant::OWN_RULE);
                let offer = OfferedRevision { revision: Some(named.revision), secrets: named.secrets, grant };
                ((1, *number), offer)
            });
            let clean_at = (node.report.1.outdated == 0).then_some((1, node.report.0));
            let (newest, _, named) = node.sent.last().unwrap();
            let of_newest = node.report.0 >= *newest;
            RolloutNode {
                wanted: node.wanted,
                named: Some(*named),
                open: open_grant(offers, clean_at),
                report: Report { of_newest, ..node.report.1.clone() },
                away: false,
                whole: false,
            }
        };
        Rollout {
            goal: digest(self.target),
            settled: digest(self.settled),
            secrets: (0..IMAGES.len())
                .filter_map(|image| Some((digest(image), secrets(self.values)?)))
                .collect(),
            limits: self.limits,
            halted: self.halted,
            lacks_secrets: false,
            nodes: self.nodes.iter().map(|(id, sim)| (id.clone(), node(sim))).collect(),
        }
    }

    fn decide(&mut self) -> RolloutPlan {
        let plan = roll(&self.rollout());
        let works = !is_bad(self.target, self.values);
        assert!(!works || plan.failing.is_none(), "{:?} of what works: {self:#?}", plan.failing);
        for (id, named) in &plan.nodes {
            let node = self.nodes.get_mut(id).unwrap();
            let (_, last, before) = node.sent.last().unwrap();
            if before == named {
                continue;
            }
            let counts = workers(last).1.desired_counts;
            let update = named.grant.map(|grant| Update {
                max_unavailable: grant.unavailable,
                max_surge: grant.surge,
                replace_failed: grant.failed,
                min_ready_seconds: self.min_ready_seconds,
                ..Update::default()
            });
            let wanted = (counts.running, counts.warm, counts.sleeping);
            self.number += 1;
            let document = document(wanted, image_of(&named.revision), named.secrets, update);
            node.sent.push((self.number, document, *named));
        }
        if plan.done && !self.halted {
            self.settled = self.target;
        }
        plan
    }

    /// Of all running counts, how many are missing, and how many run beyond them: as it is, whatever anything says.
    fn truth(&self) -> (u32, u32) {
        let (mut missing, mut beyond) = (0, 0);
        for node in self.nodes.values() {
            let for_rest = |i: &&ObservedInstance| matches!(i.staging, Some(Phase::Warm | Phase::Sleeping));
            let all = node.world.observed.instances.iter().filter(|i| !for_rest(i));
            let works = |i: &&ObservedInstance| {
                i.phase == Phase::Running
                    && i.moving_to.is_none()
                    && i.workload.as_ref().is_none_or(|workload| !workload.is_down())
            };
            let up = |i: &&ObservedInstance| i.phase == Phase::Running || i.moving_to == Some(Phase::Running);
            missing += node.wanted.saturating_sub(u32::try_from(all.clone().filter(works).count()).unwrap());
            beyond += u32::try_from(all.filter(up).count()).unwrap().saturating_sub(node.wanted);
        }
        (missing, beyond)
    }

    fn check(&self) {
        let (missing, beyond) = self.truth();
        assert!(missing <= self.limits.max_unavailable, "{missing} are missing: {self:#?}");
        assert!(beyond <= self.limits.max_surge, "{beyond} beyond: {self:#?}");
    }

    /// Passes with nothing lost until nothing changes any more.
    fn settle(&mut self) {
        for _ in 0..PASSES {
            let plan = self.decide();
            if plan.failing.is_some() {
                self.halted = true;
            }
            let mut is_idle = true;
            for node in self.nodes.values_mut() {
                node.follows = node.sent.len() - 1;
                is_idle &= !node.pass(true);
                node.tell();
            }
            self.check();
            let next = self.decide();
            // What fails may take a while until that is told.
            let is_over = next.done || self.halted;
            if is_idle && is_over && self.nodes.values().all(SimNode::is_at_newest) {
                return;
            }
        }
        panic!("it is never done: {self:#?}");
    }

    /// What instances are made of: of which image, with which values.
    fn revisions(&self) -> BTreeSet<(usize, Values)> {
        let all = self.nodes.values().flat_map(|node| &node.world.observed.instances);
        let alive = all.filter(|i| matches!(i.phase, Phase::Running | Phase::Warm | Phase::Sleeping));
        alive.map(|i| self.made[&i.revision]).collect()
    }

    /// Those that work or rest and are no surge instances, each with its revision.
    fn working(&self) -> BTreeSet<(NodeId, InstanceId, Digest)> {
        let of_node = |(id, node): (&NodeId, &SimNode)| {
            let rests = |i: &&ObservedInstance| matches!(i.phase, Phase::Warm | Phase::Sleeping);
            let works = |i: &&ObservedInstance| i.phase == Phase::Running && !node.bad.contains(&i.revision);
            let counted = node.world.observed.instances.iter().filter(|i| i.staging.is_none());
            let all = counted.filter(|i| rests(i) || works(i));
            all.map(|i| (id.clone(), i.id.clone(), i.revision)).collect::<Vec<_>>()
        };
        self.nodes.iter().flat_map(of_node).collect()
    }
}

impl SimNode {
    fn desired(&self) -> &DesiredState {
        &self.sent[self.follows].1
    }

    fn is_at_newest(&self) -> bool {
        self.sent.len() == 1 && self.world.is_idle()
    }

    /// Plans, and carries out some of it. Whether anything was done.
    fn pass(&mut self, all: bool) -> bool {
        let desired = self.desired().clone();
        self.fail_bad_ones();
        let plan = plan_node(&desired, &self.world.observed, self.world.now);
        // What fails is started again for ever; that is no news.
        let fails = |id: &InstanceId| {
            let one = self.world.observed.instances.iter().find(|i| i.id == *id);
            one.is_some_and(|i| self.bad.contains(&i.revision)) && self.is_bad()
        };
        let again = |step: &Step| match step.action {
            Action::Restart => true,
            Action::Replace => step.instance.as_ref().is_some_and(fails),
            _ => false,
        };
        let is_news = !plan.steps.iter().all(again);
        let was_idle = self.world.is_idle();
        self.world.begin(&desired, &plan, |_| ());
        self.world.finish(&desired, all, 0);
        let step = plan.next_deadline.map_or(Duration::from_secs(1), |at| at.since(self.world.now));
        self.world.now = self.world.now + step.min(Duration::from_secs(30)).max(Duration::from_secs(1));
        self.fail_bad_ones();
        is_news || !was_idle || (plan.next_deadline.is_some() && self.is_waiting_for_time())
    }

    /// Time alone lets it go on: something was put up a short while ago.
    fn is_waiting_for_time(&self) -> bool {
        let young = |i: &ObservedInstance| self.world.now.since(i.since) < Duration::from_secs(120);
        let is_bad = self.is_bad();
        // What fails is young again and again.
        let waits = |i: &&ObservedInstance| {
            matches!(i.phase, Phase::Running | Phase::Warm) && !(is_bad && self.bad.contains(&i.revision))
        };
        self.world.observed.instances.iter().filter(waits).any(young)
    }

    /// Whether what its document names does not work.
    fn is_bad(&self) -> bool {
        let (tenant, pool) = workers(self.desired());
        self.bad.contains(&revision_of(tenant, pool))
    }

    fn fail_bad_ones(&mut self) {
        let now = self.world.now;
        for one in &mut self.world.observed.instances {
            if one.phase == Phase::Running && one.moving_to.is_none() && self.bad.contains(&one.revision) {
                let before = one.workload.as_deref().copied();
                one.workload = Workload::seen(before, WorkloadState::Failed, now).map(Box::new);
            }
        }
    }

    /// What it says reaches the coordinator, with which document it follows.
    fn tell(&mut self) {
        let (number, document, _) = &self.sent[self.follows];
        let (tenant, pool) = workers(document);
        let revision = revision_of(tenant, pool);
        let instances = &self.world.observed.instances;
        let progress = rollout_progress(tenant, pool, &revision, instances, self.world.now);
        let current = instances.iter().filter(|i| i.revision == revision).count();
        let down = instances.iter().filter(|i| i.workload.as_ref().is_some_and(|it| it.is_down())).count();
        let report = Report {
            of_newest: false,
            serving: progress.serving,
            current: u32::try_from(current).unwrap(),
            down: u32::try_from(down).unwrap(),
            outdated: progress.outdated,
            surge: progress.surge,
            failing: progress.failing,
        };
        self.report = (*number, report);
        self.sent.drain(..self.follows);
        self.follows = 0;
    }
}

#[derive(Debug, Clone)]
enum Event {
    Decide,
    /// A node accepts one of the documents on their way.
    Accept(usize, prop::sample::Index),
    Pass(usize),
    Tell(usize),
    Declare(usize),
    /// Values that work, or do not.
    Rotate(bool),
    Halt(bool),
}

/// All images, and values that do not work, or only those that work.
fn events(all: bool) -> impl Strategy<Value = Vec<Event>> {
    let images = if all { IMAGES.len() } else { BAD };
    let event = prop_oneof![
        6 => Just(Event::Decide),
        4 => (0usize..4, any::<prop::sample::Index>()).prop_map(|(node, which)| Event::Accept(node, which)),
        10 => (0usize..4).prop_map(Event::Pass),
        5 => (0usize..4).prop_map(Event::Tell),
        1 => (0..images).prop_map(Event::Declare),
        1 => any::<bool>().prop_map(move |bad| Event::Rotate(all && bad)),
        1 => prop_oneof![Just(Event::Halt(false)), Just(Event::Halt(true))],
    ];
    proptest::collection::vec(event, 0..150)
}

fn happen(sim: &mut Sim, events: Vec<Event>) {
    for event in events {
        let count = sim.nodes.len();
        match event {
            Event::Decide => drop(sim.decide()),
            Event::Declare(image) => {
                (sim.target, sim.halted) = (image, false);
            }
            Event::Rotate(is_bad) => {
                sim.rotate(is_bad);
                sim.halted = false;
            }
            Event::Halt(halted) => sim.halted = halted,
            Event::Accept(at, which) => {
                let node = sim.nodes.values_mut().nth(at % count).unwrap();
                node.follows += which.index(node.sent.len() - node.follows);
            }
            Event::Pass(at) => {
                sim.nodes.values_mut().nth(at % count).unwrap().pass(false);
            }
            Event::Tell(at) => sim.nodes.values_mut().nth(at % count).unwrap().tell(),
        }
        sim.check();
    }
}

fn cases() -> ProptestConfig {
    let cases = option_env!("MVM_PLANNER_CASES").and_then(|n| n.parse().ok()).unwrap_or(500_u32);
    ProptestConfig { cases, failure_persistence: None, ..ProptestConfig::default() }
}

proptest! {
    #![proptest_config(cases())]

    /// However late documents and reports are, whatever is declared meanwhile, whatever does not work.
    #[test]
    fn no_more_are_missing_or_beyond_the_counts_than_the_limits_say(shape in shape(), seed in any::<u64>(), events in events(true)) {
        let mut sim = Sim::at_rest(&shape, seed);
        happen(&mut sim, events);
    }

    #[test]
    fn what_works_is_rolled_out_everywhere_and_then_nothing_happens(shape in shape(), seed in any::<u64>(), events in events(false)) {
        let mut sim = Sim::at_rest(&shape, seed);
        happen(&mut sim, events);
        (sim.target, sim.halted) = (1, false);
        sim.settle();
        prop_assert!(sim.revisions().iter().all(|made| *made == (1, sim.values)), "{:?}", sim.revisions());
        let before = sim.nodes.values().map(|node| node.sent.last().unwrap().0).collect::<Vec<_>>();
        sim.decide();
        let after = sim.nodes.values().map(|node| node.sent.last().unwrap().0).collect::<Vec<_>>();
        prop_assert_eq!(before, after, "no document for what is done");
    }

    #[test]
    fn what_fails_stands_still_and_going_back_ends_at_the_old_revision_everywhere(shape in shape(), seed in any::<u64>()) {
        let mut sim = Sim::at_rest(&shape, seed);
        sim.target = BAD;
        sim.settle();
        let runs = shape.nodes.iter().any(|(running, ..)| *running > 0);
        // What rests has no program that could fail.
        prop_assert!(!runs || sim.halted);
        (sim.target, sim.halted) = (0, false);
        sim.settle();
        prop_assert!(sim.revisions().iter().all(|made| *made == (0, 0)), "{:?}", sim.revisions());
    }

    /// All nodes are told of new values at once, each again when it is its turn.
    #[test]
    fn new_values_go_to_one_node_after_the_other_with_two_documents_each(shape in shape(), seed in any::<u64>()) {
        let mut sim = Sim::at_rest(&shape, seed);
        sim.rotate(false);
        sim.settle();
        prop_assert!(sim.revisions().iter().all(|made| *made == (0, sim.values)), "{:?}", sim.revisions());
        // A node that can have no surge instance is told so once more.
        let most = if shape.tight { 3 } else { 2 };
        let nodes = u64::try_from(shape.nodes.len()).unwrap();
        prop_assert!(sim.number <= most * nodes, "{} documents for {nodes} nodes", sim.number);
    }

    #[test]
    fn values_that_fail_stand_still_and_others_that_work_take_their_place(shape in shape(), seed in any::<u64>()) {
        let mut sim = Sim::at_rest(&shape, seed);
        sim.rotate(true);
        sim.settle();
        let runs = shape.nodes.iter().any(|(running, ..)| *running > 0);
        prop_assert!(!runs || sim.halted);
        sim.rotate(false);
        sim.halted = false;
        sim.settle();
        prop_assert!(sim.revisions().iter().all(|made| *made == (0, sim.values)), "{:?}", sim.revisions());
    }

    /// Whatever was under way before: once every node has heard that it is paused, new values replace nothing that works.
    #[test]
    fn while_it_is_paused_new_values_replace_nothing(
        shape in shape(), seed in any::<u64>(), events in events(false), bad in any::<bool>(), passes in 1usize..40,
    ) {
        let mut sim = Sim::at_rest(&shape, seed);
        happen(&mut sim, events);
        sim.halted = true;
        for _ in 0..PASSES {
            sim.decide();
            let mut is_idle = true;
            for node in sim.nodes.values_mut() {
                node.follows = node.sent.len() - 1;
                is_idle &= !node.pass(true);
                node.tell();
            }
            if is_idle && sim.nodes.values().all(SimNode::is_at_newest) {
                break;
            }
        }
        sim.decide();
        let before = sim.working();
        sim.rotate(bad);
        for _ in 0..passes {
            sim.decide();
            for node in sim.nodes.values_mut() {
                node.follows = node.sent.len() - 1;
                node.pass(true);
                node.tell();
            }
            sim.check();
        }
        prop_assert_eq!(sim.working(), before);
    }

    #[test]
    fn the_same_is_decided_from_the_same(shape in shape(), seed in any::<u64>(), events in events(true)) {
        let mut sim = Sim::at_rest(&shape, seed);
        happen(&mut sim, events);
        let rollout = sim.rollout();
        let plan = roll(&rollout);
        prop_assert_eq!(&plan, &roll(&rollout));
        // What was decided and not delivered is decided again.
        sim.decide();
        prop_assert_eq!(roll(&sim.rollout()).nodes, plan.nodes);
    }
}
