//! The laws of quota shares, whatever arrives, gets lost or comes late.

use mvm_planner::fleet::shares::{NO_SHARE, shares};
use mvm_proto::document::Quotas;
use proptest::prelude::*;

use crate::world::fleet::cases;
use crate::world::shares::{Event, World, events, is_within, quotas, tenant_id};

/// A tenant that has come to rest after these events, with all nodes there.
fn at_rest(quotas: Quotas, one_pool: bool, events: &[Event]) -> World {
    let mut world = World::new(quotas, one_pool);
    events.iter().for_each(|event| world.happens(event));
    world.nodes.values_mut().for_each(|node| node.away = false);
    world.converge();
    world
}

proptest! {
    #![proptest_config(cases())]

    #[test]
    fn shares_never_sum_to_more_than_the_quota_whatever_is_lost(
        quotas in quotas(), one_pool in any::<bool>(), events in events(),
    ) {
        let mut world = World::new(quotas, one_pool);
        for event in &events {
            world.happens(event);
            let (in_truth, counted) = world.in_truth();
            prop_assert!(is_within(&counted, &quotas, one_pool), "counted {counted:?} after {event:?}: {world:?}");
            prop_assert!(is_within(&in_truth, &quotas, one_pool), "in truth {in_truth:?} after {event:?}: {world:?}");
            prop_assert!(is_within(&in_truth, &counted, one_pool), "a node follows what is not counted: {world:?}");
        }
    }

    #[test]
    fn shares_come_to_rest_with_all_that_is_placed(
        quotas in quotas(), one_pool in any::<bool>(), events in events(),
    ) {
        let mut world = World::new(quotas, one_pool);
        events.iter().for_each(|event| world.happens(event));
        world.nodes.values_mut().for_each(|node| node.away = false);
        let rounds = world.converge();
        prop_assert!(rounds <= 20, "{rounds} rounds: {world:?}");
        let (plan, changed) = world.plan();
        prop_assert!(!plan.waiting, "all was acknowledged, so nothing is waited for: {:?}", world);
        prop_assert_eq!(changed, vec![]);
        prop_assert_eq!(world.all_have_what_they_need(), plan.short.is_empty());
        prop_assert!(!world.fits() || plan.short.is_empty(), "{:?} of {world:?}", plan.short);
        for (id, node) in world.nodes.iter().filter(|(_, node)| node.pools.is_empty()) {
            prop_assert_eq!(plan.shares[id], NO_SHARE, "{:?}", node);
        }
    }

    #[test]
    fn while_no_node_waits_no_acknowledgement_changes_a_share(
        quotas in quotas(), one_pool in any::<bool>(), events in events(),
    ) {
        let mut world = World::new(quotas, one_pool);
        for event in &events {
            world.happens(event);
            if matches!(event, Event::Plan) && !world.plan().0.waiting {
                world.all_arrives();
                prop_assert_eq!(world.plan().1, vec![], "{:?}", world);
            }
        }
    }

    #[test]
    fn shares_of_a_lowered_quota_come_down_to_it(
        before in quotas(), after in quotas(), one_pool in any::<bool>(), events in events(),
    ) {
        let mut world = at_rest(before, one_pool, &events);
        world.quotas = after;
        world.converge();
        let (in_truth, counted) = world.in_truth();
        prop_assert!(is_within(&counted, &after, one_pool), "{counted:?} of {after:?}: {world:?}");
        prop_assert!(is_within(&in_truth, &after, one_pool));
    }

    #[test]
    fn a_node_that_stays_away_keeps_others_from_its_share_only(
        quotas in quotas(), one_pool in any::<bool>(), events in events(), which in 0usize..4,
    ) {
        let mut world = at_rest(quotas, one_pool, &events);
        let id = world.nodes.keys().nth(which).unwrap().clone();
        let kept = world.current()[&id];
        world.nodes.get_mut(&id).unwrap().away = true;
        // What it had is placed elsewhere.
        world.nodes.get_mut(&id).unwrap().pools.clear();
        let rounds = world.converge();
        prop_assert!(rounds <= 20, "{rounds} rounds: {world:?}");
        let (in_truth, counted) = world.in_truth();
        prop_assert!(is_within(&counted, &quotas, one_pool) && is_within(&in_truth, &quotas, one_pool));
        prop_assert_eq!(world.nodes[&id].offers.most().unwrap_or(NO_SHARE), kept, "until it acknowledges less");
        prop_assert_eq!(world.current()[&id], NO_SHARE, "it is told to give it back when it returns");
    }

    #[test]
    fn a_change_on_one_node_rewrites_no_other_document_while_there_is_quota(
        quotas in quotas(), events in events(), which in 0usize..4, more in 1u32..3,
    ) {
        let generous = Quotas {
            max_vcpus: 100_000, max_mem_mib: 100_000_000, max_running: 100_000, max_warm: 100_000,
            max_instances_per_pool: 100_000, max_disk_gib: 100_000, ..quotas
        };
        let mut world = at_rest(generous, false, &events);
        let id = world.nodes.keys().nth(which).unwrap().clone();
        world.grow(which, more);
        let (_, changed) = world.plan();
        prop_assert!(changed.iter().all(|other| *other == id), "{changed:?}");
        world.all_arrives();
        prop_assert_eq!(world.plan().1, vec![]);
    }

    #[test]
    fn a_node_that_needs_more_takes_leases_only_and_no_more_than_it_lacks(
        quotas in quotas(), one_pool in any::<bool>(), events in events(), which in 0usize..4, more in 1u32..4,
    ) {
        let mut world = at_rest(quotas, one_pool, &events);
        let before = world.current();
        let had_all = world.all_have_what_they_need();
        let id = world.nodes.keys().nth(which).unwrap().clone();
        world.grow(which, more);
        let fits = world.fits();
        let (_, changed) = world.plan();
        for other in changed.iter().filter(|other| **other != id) {
            let (old, new) = (before[other], world.current()[other]);
            prop_assert!(is_within(&new, &old, one_pool) || !fits, "{other} got more: {old:?} {new:?}");
        }
        if fits && had_all {
            world.converge();
            prop_assert!(world.all_have_what_they_need(), "{world:?}");
        }
    }
}

/// The worlds of the laws are neither all idle nor all short of everything.
#[test]
fn worlds_with_and_without_enough_quota_are_tried() {
    use proptest::strategy::ValueTree;
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let (mut fit, mut short, mut busy) = (0, 0, 0);
    for _ in 0..500 {
        let (quotas, events) = (quotas(), events()).new_tree(&mut runner).unwrap().current();
        let world = at_rest(quotas, false, &events);
        fit += u32::from(world.fits());
        short += u32::from(!shares(&tenant_id(), &quotas, &world.nodes).short.is_empty());
        busy += u32::from(world.in_truth().0.max_running > 0);
    }
    assert!(fit > 50 && short > 50 && busy > 50, "{fit} fit, {short} are short, {busy} have shares");
}

mod offers {
    use mvm_planner::fleet::offers::Offers;
    use mvm_proto::document::DesiredCounts;
    use proptest::prelude::*;

    use crate::world::fleet::cases;

    fn counts(running: u32) -> DesiredCounts {
        DesiredCounts { running, ..DesiredCounts::default() }
    }

    #[test]
    fn a_node_that_forgot_its_numbers_may_follow_any_of_what_was_offered() {
        let mut offers = Offers::default();
        offers.offer((5, 900), counts(3));
        offers.acknowledge((5, 900));
        offers.offer((5, 901), counts(1));
        offers.forget_numbers();
        assert_eq!((offers.acknowledged(), offers.current()), (None, Some(&counts(1))));
        assert_eq!(offers.most(), Some(counts(3)));
        // The same document under its new number.
        offers.acknowledge((5, 1));
        assert_eq!(offers.most(), Some(counts(1)));
        offers.offer((5, 2), counts(2));
        assert_eq!(offers.most(), Some(counts(2)));
    }

    proptest! {
        #![proptest_config(cases())]

        #[test]
        fn what_a_node_may_follow_is_always_counted(
            values in proptest::collection::vec(0u32..6, 1..30),
            steps in proptest::collection::vec((1usize..4, 0usize..4), 1..30),
        ) {
            // In each step some documents are offered, and the node accepts one of those that are newer than its own.
            let mut offers = Offers::default();
            let (mut offered, mut accepted) = (0, 0);
            for (more, which) in steps {
                let upto = (offered + more).min(values.len());
                for (at, value) in values.iter().enumerate().take(upto).skip(offered) {
                    offers.offer((1, at as u64 + 1), counts(*value));
                }
                offered = upto;
                accepted = (accepted + which).min(offered);
                let most = offers.most().map_or(0, |most| most.running);
                let followed = accepted.checked_sub(1).map_or(0, |at| values[at]);
                prop_assert!(followed <= most, "follows {followed}, counted with {most}: {offers:?}");
                prop_assert_eq!(offers.current(), Some(&counts(values[offered - 1])));
                if which == 2 && accepted > 0 {
                    offers.acknowledge((1, accepted as u64));
                    let most = offers.most().map_or(0, |most| most.running);
                    let open = values[accepted - 1..offered].iter().max().copied().unwrap_or(0);
                    prop_assert!(followed <= most && most >= open, "{offers:?}");
                }
            }
            offers.acknowledge((1, offered as u64));
            prop_assert!(offers.is_agreed());
            prop_assert_eq!(offers.most(), Some(counts(values[offered - 1])), "an agreed value is counted exactly");
        }
    }
}
