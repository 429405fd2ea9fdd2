//! Laws on one pool with many instances of it, hardly room for any, and much under way.

use std::collections::BTreeMap;

use crate::world::crowd::{is_free, one_pool, secs, serves};
use crate::world::fleet::{Kinds, cases, is_brought_back};
use crate::world::limits;
use crate::world::model::World;
use crate::world::rest::{now, run_to_rest};
use mvm_planner::{
    Action, NodePlan, Observation, ObservedInstance, Step, plan_expired, plan_node, revision_of,
};
use mvm_proto::{DesiredState, InstanceId, Phase};
use proptest::prelude::*;

const ANYTHING: Kinds = Kinds { tight: true, guards: true, pressure: true };
const CALM: Kinds = Kinds { tight: true, guards: true, pressure: false };
const GUARDED: Kinds = Kinds { tight: false, guards: true, pressure: false };
const FREE: Kinds = Kinds { tight: false, guards: false, pressure: false };

fn by_instance(plan: &NodePlan) -> BTreeMap<InstanceId, Action> {
    plan.steps.iter().filter_map(|step| Some((step.instance.clone()?, step.action))).collect()
}

fn what(plan: &NodePlan) -> Vec<(Option<InstanceId>, Action, Option<Phase>)> {
    plan.steps.iter().map(|step| (step.instance.clone(), step.action, step.staging)).collect()
}

fn wanted(desired: &DesiredState) -> [usize; 3] {
    let counts = desired.tenants[0].pools[0].desired_counts;
    [counts.running, counts.warm, counts.sleeping].map(|count| usize::try_from(count).unwrap())
}

fn is_startable(instance: &ObservedInstance) -> bool {
    matches!(instance.phase, Phase::Created | Phase::Ready | Phase::Stopped | Phase::Failed)
}

fn starts_a_surge_instance(step: &Step) -> bool {
    matches!(step.action, Action::Create | Action::Start) && step.staging == Some(Phase::Running)
}

/// The limit that a reason names, and how much would be enough.
fn named_limit(reason: &str) -> Option<(&'static str, u64)> {
    let name = LIMITS.into_iter().find(|name| reason.contains(&format!("{name} is ")))?;
    let numbers = reason.split_once(&format!("{name} is "))?.1.split_once(": ")?.1;
    let (used, more) = numbers.split_once(" in use, ")?;
    let (more, _) = more.split_once(" more needed")?;
    Some((name, used.parse::<u64>().ok()? + more.parse::<u64>().ok()?))
}

const LIMITS: [&str; 10] = [
    "max_vcpus",
    "max_mem_mib",
    "max_running",
    "max_warm",
    "max_disk_gib (in MiB)",
    "max_instances_per_pool",
    "the node's vcpus",
    "the node's mem_mib",
    "the node's disk_mib",
    "the node's max_instances",
];

fn set_limit(desired: &mut DesiredState, seen: &mut Observation, name: &str, enough: u64) {
    let small = u32::try_from(enough).unwrap();
    let (quotas, capacity) = (&mut desired.tenants[0].quotas, &mut seen.capacity);
    match name {
        "max_vcpus" => quotas.max_vcpus = small,
        "max_mem_mib" => quotas.max_mem_mib = enough,
        "max_running" => quotas.max_running = small,
        "max_warm" => quotas.max_warm = small,
        "max_disk_gib (in MiB)" => quotas.max_disk_gib = enough.div_ceil(1024),
        "max_instances_per_pool" => quotas.max_instances_per_pool = small,
        "the node's vcpus" => capacity.vcpus = small,
        "the node's mem_mib" => capacity.mem_mib = enough,
        "the node's disk_mib" => capacity.disk_mib = enough,
        "the node's max_instances" => capacity.max_instances = small,
        other => panic!("{other} is no limit"),
    }
}

/// What is said of each step, taken or not.
fn reasons(plan: &NodePlan) -> Vec<(Option<&InstanceId>, Action, &str)> {
    let steps = plan.steps.iter().map(|step| (step.instance.as_ref(), step.action, step.reason.as_str()));
    let deferred = plan.deferred.iter().map(|d| (d.instance.as_ref(), d.action, d.reason.as_str()));
    steps.chain(deferred).collect()
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn a_limit_that_a_reason_names_is_in_the_way((desired, seen) in one_pool(ANYTHING)) {
        let plan = plan_node(&desired, &seen, now());
        for (instance, action, reason) in reasons(&plan) {
            let Some((name, enough)) = named_limit(reason) else { continue };
            let (mut desired, mut seen, mut enough) = (desired.clone(), seen.clone(), Some(enough));
            // What may not go yet keeps its place before this one: each has to have its own.
            for _ in 0..=seen.instances.len() {
                let Some(next) = enough else { break };
                set_limit(&mut desired, &mut seen, name, next);
                let raised = plan_node(&desired, &seen, now());
                let again = reasons(&raised).into_iter().find(|other| (other.0, other.1) == (instance, action));
                let again = again.and_then(|(.., reason)| named_limit(reason)).filter(|(limit, _)| *limit == name);
                enough = again.filter(|_| what(&raised) == what(&plan)).map(|(_, enough)| enough);
            }
            prop_assert_eq!(enough, None, "however much {} is raised: {}", name, reason);
        }
    }

    #[test]
    fn a_hold_that_a_reason_names_ends_when_it_says((desired, seen) in one_pool(ANYTHING)) {
        let plan = plan_node(&desired, &seen, now());
        for deferred in plan.deferred.iter().filter(|deferred| deferred.instance.is_some()) {
            let Some((word, rest)) = deferred.reason.split_once(", ") else { continue };
            let Some((left, _)) = rest.split_once(" s left") else { continue };
            let Ok(left) = left.parse() else { continue };
            let later = plan_node(&desired, &seen, now() + secs(left));
            let held = later.deferred.iter().find(|d| {
                (&d.instance, d.action) == (&deferred.instance, deferred.action) && d.reason.starts_with(word)
            });
            prop_assert!(held.is_none(), "{deferred}, and then {held:?}");
        }
    }

    #[test]
    fn what_serves_is_not_taken_below_the_count_unless_there_is_no_room_beside_it((desired, seen) in one_pool(CALM)) {
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        let [wanted, ..] = wanted(&desired);
        // What a request woke goes when it is idle; the counts do not rely on it.
        let counted = |i: &&ObservedInstance| serves(i) && !is_brought_back(&desired, i) && !(i.on_demand && i.home.is_some_and(|home| home != Phase::Running));
        let before = seen.instances.iter().filter(counted).count();
        let goes = |i: &&ObservedInstance| {
            let step = steps.get(&i.id);
            matches!(step, Some(Action::Stop | Action::Warm | Action::Sleep | Action::Replace))
        };
        let gone = seen.instances.iter().filter(counted).filter(goes).count();
        let in_place = plan.steps.iter().any(|step| step.reason.contains("no room for a surge instance"));
        let allowed = before.saturating_sub(wanted) + usize::from(in_place);
        prop_assert!(gone <= allowed, "{gone} of {before} go, {wanted} wanted: {:#?}", plan.steps);
    }

    #[test]
    fn no_step_is_both_taken_and_deferred((desired, seen) in one_pool(ANYTHING)) {
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        for deferred in &plan.deferred {
            let taken = deferred.instance.as_ref().and_then(|id| steps.get(id));
            prop_assert!(taken != Some(&deferred.action), "{deferred} and {taken:?}");
        }
    }

    #[test]
    fn until_its_deadline_a_plan_stays_the_same((desired, seen) in one_pool(ANYTHING)) {
        for plans in [plan_node, plan_expired] {
            let plan = plans(&desired, &seen, now());
            let times = match plan.next_deadline {
                Some(end) => [1, 10, 50, 90, 99].map(|part| now() + end.since(now()) / 100 * part).to_vec(),
                None => [1, 24, 30 * 24].map(|hours| now() + secs(hours * 3600)).to_vec(),
            };
            for at in times {
                let later = plans(&desired, &seen, at);
                prop_assert_eq!(what(&later), what(&plan), "at {}: {:#?}", at, later);
            }
        }
    }

    #[test]
    fn where_nothing_is_done_no_instance_of_an_older_revision_has_room_for_its_replacement(
        (desired, seen) in one_pool(CALM)
    ) {
        let plan = plan_node(&desired, &seen, now());
        let (tenant, pool) = (&desired.tenants[0], &desired.tenants[0].pools[0]);
        let under_way = seen.instances.iter().any(|i| i.moving_to.is_some() || i.staging.is_some());
        let backs_off = |i: &ObservedInstance| is_startable(i) && i.retry_not_before.is_some_and(|at| at > now());
        // Nor does a revision whose program does not work take the next instance with it.
        let waits = |i: &ObservedInstance| backs_off(i) || is_brought_back(&desired, i);
        let is_settled = plan.is_empty() && !under_way && !seen.instances.iter().any(waits);
        let looked_at = if is_settled && tenant.quotas.max_pools > 0 { &seen.instances[..] } else { &[] };
        let revision = revision_of(tenant, pool);
        for (index, instance) in looked_at.iter().enumerate() {
            let lent = instance.on_demand;
            let up = matches!(instance.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
            if instance.revision == revision || lent || !up || !is_free(&desired, instance) {
                continue;
            }
            let mut after = seen.clone();
            after.instances[index].resources = pool.instance_resources;
            after.instances[index].moving_to = Some(instance.phase);
            prop_assert!(!limits::are_kept(&desired, &seen, &after), "{:?}: {:?}", instance, plan.deferred);
        }
    }

    #[test]
    fn nothing_that_runs_is_stopped_while_another_count_lacks_one((desired, mut seen) in one_pool(GUARDED)) {
        for i in &mut seen.instances {
            (i.moving_to, i.staging, i.on_demand) = (None, None, false);
        }
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        let pool = &desired.tenants[0].pools[0];
        let works = |i: &ObservedInstance| i.phase == Phase::Running && !is_brought_back(&desired, i);
        let stops = |i: &ObservedInstance| works(i) && steps.get(&i.id) == Some(&Action::Stop);
        let one_stops = seen.instances.iter().any(stops);
        // Spare ones that are only too young take a place soon.
        let least = secs(pool.runtime_policy.min_running_seconds);
        let soon = |i: &ObservedInstance| i.phase == Phase::Running && !i.claimed && i.since + least > now();
        let rests = |i: &ObservedInstance, phase, action| {
            let goes = steps.get(&i.id);
            let stays = matches!(goes, None | Some(Action::Replace)) && i.phase == phase && !i.claimed;
            goes == Some(&action) || stays
        };
        let count = |phase, action| seen.instances.iter().filter(|i| rests(i, phase, action)).count();
        let soon = seen.instances.iter().filter(|i| soon(i) && !steps.contains_key(&i.id)).count();
        let [_, warm, sleeping] = wanted(&desired);
        let lacking = warm.saturating_sub(count(Phase::Warm, Action::Warm));
        let lacking = lacking + sleeping.saturating_sub(count(Phase::Sleeping, Action::Sleep));
        prop_assert!(!one_stops || pool.pinned || lacking <= soon, "{lacking} are lacking: {:#?}", plan.steps);
    }

    #[test]
    fn what_a_request_woke_is_put_back_past_t2_even_where_no_more_may_be_warm(
        (mut desired, seen) in one_pool(GUARDED), max_warm in 0..3_u32
    ) {
        desired.tenants[0].quotas.max_warm = max_warm;
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        let t2 = secs(desired.tenants[0].pools[0].sleep_policy.sleep_after_seconds);
        for i in &seen.instances {
            let at_rest = i.home.is_some_and(|home| home != Phase::Running);
            let idle = i.idle_since.is_some_and(|since| since + t2 <= now());
            if !i.on_demand || !at_rest || !idle || i.phase != Phase::Running || !is_free(&desired, i) {
                continue;
            }
            let serves = plan.deferred.iter().any(|d| d.reason.contains("the running count lacks"));
            prop_assert!(serves || steps.contains_key(&i.id), "{:?}: {:?}", i, plan.deferred);
        }
    }

    #[test]
    fn no_surge_instance_goes_before_another_one_is_made((desired, mut seen) in one_pool(FREE)) {
        for instance in &mut seen.instances {
            (instance.moving_to, instance.retry_not_before) = (None, None);
        }
        let revision = revision_of(&desired.tenants[0], &desired.tenants[0].pools[0]);
        let mut dismissed = None;
        run_to_rest(&desired, &mut World::new(seen, now()), |before, _, step| {
            if starts_a_surge_instance(step) {
                assert_eq!(dismissed, None, "{step}");
            }
            let stood_in = before.observed.instances.iter().any(|i| {
                Some(&i.id) == step.instance.as_ref() && i.staging == Some(Phase::Running) && i.revision == revision
            });
            if stood_in && step.action == Action::Stop {
                dismissed = Some(step.clone());
            }
        });
    }

    #[test]
    fn nothing_is_made_while_one_that_does_not_run_may_be_started((desired, seen) in one_pool(FREE)) {
        let plan = plan_node(&desired, &seen, now());
        let steps = by_instance(&plan);
        if let Some(step) = plan.steps.iter().find(|step| step.action == Action::Create) {
            let ahead = |at: Option<_>| at.is_some_and(|at| at > now());
            let could_start = |i: &&ObservedInstance| {
                let held = i.claimed || ahead(i.override_until) || ahead(i.retry_not_before);
                is_startable(i) && i.moving_to.is_none() && !held && !steps.contains_key(&i.id)
            };
            let unused: Vec<_> = seen.instances.iter().filter(could_start).collect();
            prop_assert!(unused.is_empty(), "{step} beside {unused:?}");
        }
    }

    #[test]
    fn an_instance_that_is_being_destroyed_blocks_no_other(
        (mut desired, mut seen) in one_pool(ANYTHING), phase in 0..4_usize, stood_in in any::<bool>()
    ) {
        let plan = plan_node(&desired, &seen, now());
        let (tenant, pool) = (&desired.tenants[0], &desired.tenants[0].pools[0]);
        let phase = [Phase::Created, Phase::Ready, Phase::Stopped, Phase::Failed][phase];
        let mut going = ObservedInstance::of(tenant, pool, InstanceId::from_bits(99), phase, now() - secs(9));
        going.moving_to = Some(Phase::Destroyed);
        going.staging = stood_in.then_some(Phase::Running);
        going.resources.data_disk_mib = 0;
        seen.instances.push(going);
        // All that it uses is its own place.
        seen.capacity.max_instances += 1;
        desired.tenants[0].quotas.max_instances_per_pool += 1;
        prop_assert_eq!(what(&plan_node(&desired, &seen, now())), what(&plan));
    }
}
