//! The planner's laws, on random fleets, with a world that carries plans out.

use std::time::Duration;

use crate::world::fleet::{Kinds, cases, fleet, is_brought_back};
use crate::world::model::World;
use crate::world::rest::{now, run_to_rest};
use mvm_planner::{Action, NodePlan, Observation, ObservedInstance, plan_node};
use mvm_proto::{DesiredState, InstanceId, Phase};
use proptest::prelude::*;

const FREE: Kinds = Kinds { tight: false, guards: false, pressure: false };
const TIGHT: Kinds = Kinds { tight: true, guards: false, pressure: true };
const ANYTHING: Kinds = Kinds { tight: true, guards: true, pressure: true };
const GUARDED: Kinds = Kinds { tight: false, guards: true, pressure: true };

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn with_room_for_all_the_desired_counts_are_reached_in_bounded_rounds((desired, observed) in fleet(FREE)) {
        let mut world = World::new(observed, now());
        let rest = run_to_rest(&desired, &mut world, |_, _, _| {});
        for (tenant, pool) in desired.pools() {
            let wanted = &pool.desired_counts;
            prop_assert_eq!(
                world.counts(&tenant.tenant_id, &pool.pool_id),
                (wanted.running, wanted.warm, wanted.sleeping),
                "{}/{}", tenant.tenant_id, pool.pool_id
            );
        }
        prop_assert!(rest.deferred.is_empty(), "{:?}", rest.deferred);
        for instance in &world.observed.instances {
            let revision = desired
                .pools()
                .find(|(t, p)| t.tenant_id == instance.tenant && p.pool_id == instance.pool)
                .map(|(t, p)| mvm_planner::revision_of(t, p));
            let alive = matches!(instance.phase, Phase::Running | Phase::Warm | Phase::Sleeping);
            if let (Some(revision), true) = (revision, alive) {
                prop_assert_eq!(instance.revision, revision, "everything alive is of the current revision");
            }
        }
    }

    #[test]
    fn at_rest_the_plan_stays_empty_until_its_deadline((desired, observed) in fleet(ANYTHING)) {
        let mut world = World::new(observed, now());
        let rest = run_to_rest(&desired, &mut world, |_, _, _| {});
        let end = rest.next_deadline.unwrap_or(world.now + Duration::from_secs(86_400));
        let span = end.since(world.now);
        for part in [0, 1, 50, 99] {
            let at = world.now + span / 100 * part;
            prop_assert!(plan_node(&desired, &world.observed, at).is_empty());
        }
    }

    #[test]
    fn no_step_passes_a_quota_or_the_nodes_capacity((desired, observed) in fleet(TIGHT)) {
        let mut world = World::new(observed, now());
        run_to_rest(&desired, &mut world, |before, after, _| inside_limits(&desired, before, after));
    }

    #[test]
    fn hands_stay_off_what_is_pinned_critical_overridden_or_claimed((desired, observed) in fleet(GUARDED)) {
        let plan = plan_node(&desired, &observed, now());
        let of = |id: &InstanceId| observed.instances.iter().find(|i| i.id == *id).unwrap();
        for step in &plan.steps {
            let named = desired.tenants.iter().find(|t| t.tenant_id == step.tenant);
            let pool = named.and_then(|t| t.pools.iter().find(|p| p.pool_id == step.pool));
            let Some(instance) = step.instance.as_ref().map(of) else { continue };
            prop_assert!(!instance.claimed, "{step}");
            prop_assert!(instance.override_until.is_none_or(|until| until <= now()), "{step}");
            prop_assert!(instance.retry_not_before.is_none_or(|until| until <= now()), "{step}");
            if named.is_some_and(|t| t.pinned) {
                prop_assert!(!matches!(step.action, Action::Stop | Action::Destroy | Action::Replace), "{step}");
            }
            if pool.is_some_and(|p| p.critical) {
                prop_assert!(instance.staging.is_some() || matches!(step.action, Action::Start | Action::Restart), "{step}");
            }
            if pool.is_some_and(|p| p.pinned) {
                prop_assert!(step.action != Action::Sleep, "{step}");
            }
            // Only memory pressure takes what is short of its minimum.
            let puts_down = matches!(step.action, Action::Warm | Action::Sleep | Action::Stop | Action::Replace)
                && !(observed.memory_pressure && step.reason.starts_with("memory pressure"));
            // Nothing works in one whose program is down: it may be replaced at any age.
            let is_down = is_brought_back(&desired, instance);
            let puts_down = puts_down && !(is_down && step.action == Action::Replace);
            if let (Some(pool), true, None) = (pool, puts_down, instance.staging) {
                let least = match instance.phase {
                    Phase::Running => pool.runtime_policy.min_running_seconds,
                    Phase::Warm => pool.runtime_policy.min_warm_seconds,
                    _ => 0,
                };
                prop_assert!(now().since(instance.since) >= Duration::from_secs(least), "{step}");
            }
        }
    }

    #[test]
    fn no_instance_gets_two_steps_and_every_step_says_why((desired, observed) in fleet(ANYTHING)) {
        let plan = plan_node(&desired, &observed, now());
        let mut named: Vec<_> = plan.steps.iter().filter_map(|step| step.instance.clone()).collect();
        let count = named.len();
        named.sort();
        named.dedup();
        prop_assert_eq!(named.len(), count);
        prop_assert!(plan.steps.iter().all(|step| !step.reason.is_empty()));
        prop_assert!(plan.over_limit.iter().all(|over| over.used > over.allowed));
        prop_assert!(plan.deferred.iter().all(|deferred| !deferred.reason.is_empty() && deferred.count > 0));
        prop_assert!(plan.next_deadline.is_none_or(|at| at > now()));
    }

    #[test]
    fn nothing_is_stopped_that_another_count_still_wants((desired, observed) in fleet(FREE)) {
        let plan = plan_node(&desired, &observed, now());
        for (tenant, pool) in desired.pools() {
            let steps: Vec<_> = plan
                .steps
                .iter()
                .filter(|s| s.tenant == tenant.tenant_id && s.pool == pool.pool_id)
                .collect();
            let stopped = steps.iter().any(|s| {
                let from = observed.instances.iter().find(|i| Some(&i.id) == s.instance.as_ref());
                let works = |i: &ObservedInstance| !is_brought_back(&desired, i);
                let is_of_use = |i: &ObservedInstance| i.staging.is_none() && i.phase != Phase::Sleeping && works(i);
                s.action == Action::Stop && from.is_some_and(is_of_use)
            });
            let made_anew = steps.iter().any(|s| {
                matches!(s.action, Action::Create | Action::Start) && s.staging != Some(Phase::Running)
            });
            prop_assert!(!(stopped && made_anew), "{steps:?}");
        }
    }

    #[test]
    fn same_input_same_bytes_out((desired, observed) in fleet(ANYTHING)) {
        let text = |plan: &NodePlan| serde_json::to_string(plan).unwrap();
        let plan = plan_node(&desired, &observed, now());
        let again: Observation =
            serde_json::from_str(&serde_json::to_string(&observed).unwrap()).unwrap();
        prop_assert_eq!(text(&plan), text(&plan_node(&desired, &again, now())));
        let read: NodePlan = serde_json::from_str(&text(&plan)).unwrap();
        prop_assert_eq!(read, plan);
    }

    #[test]
    fn the_order_of_an_observation_changes_nothing((desired, observed) in fleet(ANYTHING), by in 0_usize..16) {
        let plan = plan_node(&desired, &observed, now());
        let mut other = observed;
        other.instances.reverse();
        let length = other.instances.len().max(1);
        other.instances.rotate_left(by % length);
        prop_assert_eq!(plan_node(&desired, &other, now()), plan);
    }

    #[test]
    fn prune_touches_what_it_is_asked_to_and_reports_the_rest((desired, observed) in fleet(FREE)) {
        let plan = plan_node(&desired, &observed, now());
        for instance in &observed.instances {
            let tenant = desired.tenants.iter().find(|t| t.tenant_id == instance.tenant);
            let named = tenant.is_some_and(|t| t.pools.iter().any(|p| p.pool_id == instance.pool));
            if named {
                continue;
            }
            let asked = match tenant {
                Some(_) => desired.prune_unknown_pools,
                None => desired.prune_unknown_tenants,
            };
            let stepped = plan.steps.iter().any(|s| s.instance.as_ref() == Some(&instance.id));
            let waits = plan.deferred.iter().any(|d| d.instance.as_ref() == Some(&instance.id));
            let reported = plan.unmanaged.iter().any(|u| u.instance == instance.id);
            prop_assert_eq!((stepped || waits, reported), (asked, !asked));
        }
    }
}

fn inside_limits(desired: &DesiredState, before: &World, after: &World) {
    let check = |what: &str, limit: u64, before: u64, after: u64| {
        assert!(after <= limit.max(before), "{what}: {after} passes {limit} (was {before})");
    };
    let capacity = &after.observed.capacity;
    let (was, is) = (before.used(None, None), after.used(None, None));
    check("node vcpus", u64::from(capacity.vcpus), was.vcpus, is.vcpus);
    check("node memory", capacity.mem_mib, was.mem_mib, is.mem_mib);
    check("node disk", capacity.disk_mib, was.disk_mib, is.disk_mib);
    check("node instances", u64::from(capacity.max_instances), was.instances, is.instances);
    for tenant in &desired.tenants {
        let quotas = &tenant.quotas;
        let id = Some(&tenant.tenant_id);
        let (was, is) = (before.used(id, None), after.used(id, None));
        check("max_vcpus", u64::from(quotas.max_vcpus), was.vcpus, is.vcpus);
        check("max_mem_mib", quotas.max_mem_mib, was.mem_mib, is.mem_mib);
        check("max_running", u64::from(quotas.max_running), was.running, is.running);
        check("max_warm", u64::from(quotas.max_warm), was.warm, is.warm);
        let addresses = |world: &World| {
            let own = |i: &&ObservedInstance| i.offset.is_none_or(|offset| tenant.network.offers(offset));
            let mine = world.observed.instances.iter().filter(|i| i.tenant == tenant.tenant_id);
            mine.filter(own).count() as u64
        };
        let capacity = u64::from(tenant.network.instance_capacity());
        check("addresses", capacity, addresses(before), addresses(after));
        check("max_disk_gib", quotas.max_disk_gib * 1024, was.disk_mib, is.disk_mib);
        for (position, pool) in tenant.pools.iter().enumerate() {
            let (was, is) = (before.used(id, Some(&pool.pool_id)), after.used(id, Some(&pool.pool_id)));
            let per_pool = u64::from(quotas.max_instances_per_pool);
            check("max_instances_per_pool", per_pool, was.instances, is.instances);
            if position >= usize::try_from(quotas.max_pools).unwrap() {
                assert!(is.vcpus <= was.vcpus, "a pool beyond max_pools starts nothing");
            }
        }
    }
}
