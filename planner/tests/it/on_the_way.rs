//! What is seen of an instance while a step on it is carried out, and what the plan makes of it: one case each.

use crate::world::one_pool::{desired, id, now, observed, steps};
use mvm_planner::{Action, check_move, plan_node};
use mvm_proto::{DesiredState, Digest, InstanceId, Phase};

/// `workers` and a second pool like it.
fn two_pools(running: u32, warm: u32, sleeping: u32) -> DesiredState {
    let mut desired = desired(running, warm, sleeping);
    let mut other = desired.tenants[0].pools[0].clone();
    other.pool_id = "other".parse().unwrap();
    desired.tenants[0].pools.push(other);
    desired
}

#[test]
fn a_surge_instance_stays_until_what_it_stands_in_for_is_up_again() {
    let desired = desired(1, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 100)]);
    seen.instances[1].staging = Some(Phase::Running);
    // A replacement stops its instance first.
    seen.instances[0].phase = Phase::Stopped;
    seen.instances[0].moving_to = Some(Phase::Running);
    assert_eq!(steps(&plan_node(&desired, &seen, now())), []);
    seen.instances[1].revision = Digest::of(b"older");
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [], "however old the surge instance is");
    seen.instances[0].phase = Phase::Running;
    seen.instances[0].moving_to = None;
    assert_eq!(steps(&plan_node(&desired, &seen, now())), [(Action::Stop, id(2))]);
}

#[test]
fn a_resting_instance_that_is_being_replaced_keeps_the_processors_for_its_boot() {
    let mut desired = two_pools(0, 0, 1);
    desired.tenants[0].quotas.max_vcpus = 2;
    let mut seen = observed(&desired, &[(Phase::Stopped, 1)]);
    seen.instances[0].moving_to = Some(Phase::Sleeping);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.deferred[0].reason, "max_vcpus is 2: 2 in use, 2 more needed");
}

#[test]
fn a_boot_toward_rest_has_its_place_there_from_the_beginning() {
    let mut desired = two_pools(0, 1, 0);
    desired.tenants[0].quotas.max_warm = 1;
    for phase in [Phase::Created, Phase::Sleeping] {
        let mut seen = observed(&desired, &[(phase, 1)]);
        seen.instances[0].staging = Some(Phase::Warm);
        seen.instances[0].moving_to = Some(Phase::Running);
        let plan = plan_node(&desired, &seen, now());
        assert_eq!(steps(&plan), []);
        assert_eq!(plan.deferred[0].reason, "max_warm is 1: 1 in use, 1 more needed");
    }

    let mut desired = two_pools(0, 0, 1);
    desired.tenants[0].pools[0].instance_resources.mem_mib = 768;
    desired.tenants[0].quotas.max_disk_gib = 1;
    desired.tenants[0].pools[1].instance_resources.mem_mib = 512;
    let mut seen = observed(&desired, &[(Phase::Ready, 1)]);
    seen.instances[0].staging = Some(Phase::Sleeping);
    seen.instances[0].moving_to = Some(Phase::Running);
    let plan = plan_node(&desired, &seen, now());
    assert_eq!(steps(&plan), []);
    assert_eq!(plan.deferred[0].reason, "max_disk_gib (in MiB) is 1024: 768 in use, 512 more needed");
}

#[test]
fn for_what_was_staged_or_stood_in_and_is_being_kept_running_no_other_is_started() {
    for staging in [Phase::Warm, Phase::Sleeping, Phase::Running] {
        let mut desired = two_pools(1, 0, 0);
        desired.tenants[0].quotas.max_running = 1;
        let mut seen = observed(&desired, &[(Phase::Running, 1)]);
        seen.instances[0].staging = Some(staging);
        seen.instances[0].moving_to = Some(Phase::Running);
        let plan = plan_node(&desired, &seen, now());
        assert_eq!((steps(&plan), plan.deferred.len()), (vec![], 1), "no second one for {staging}");
        assert_eq!(plan.deferred[0].pool.as_str(), "other");
        assert_eq!(plan.deferred[0].reason, "max_running is 1: 1 in use, 1 more needed; running 0 of 1");
    }
}

#[test]
fn for_what_was_just_booted_to_rest_or_as_surge_nothing_else_is_put_down_or_made() {
    for staging in [Phase::Warm, Phase::Sleeping, Phase::Running] {
        let desired = desired(1, u32::from(staging == Phase::Warm), u32::from(staging == Phase::Sleeping));
        let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Running, 1)]);
        seen.instances[1].staging = Some(staging);
        seen.instances[1].moving_to = Some(Phase::Running);
        let plan = plan_node(&desired, &seen, now());
        assert_eq!((steps(&plan), plan.deferred.len()), (vec![], 0), "{staging}");
    }
}

#[test]
fn a_start_by_hand_is_checked_with_the_size_that_it_boots() {
    let mut desired = desired(0, 0, 0);
    desired.tenants[0].quotas.max_vcpus = 3;
    let first = InstanceId::from_bits(1);
    for phase in [Phase::Created, Phase::Ready, Phase::Stopped, Phase::Failed] {
        let seen = observed(&desired, &[(phase, 100)]);
        let mut larger = desired.clone();
        larger.tenants[0].pools[0].instance_resources.vcpus = 4;
        assert_eq!(check_move(&desired, &seen, &first, Phase::Running), Ok(()));
        assert_eq!(
            check_move(&larger, &seen, &first, Phase::Running),
            Err("max_vcpus is 3: 0 in use, 4 more needed".to_owned())
        );
    }
    // A sleeper comes back as large as it was.
    let asleep = observed(&desired, &[(Phase::Sleeping, 100)]);
    desired.tenants[0].pools[0].instance_resources.vcpus = 4;
    assert_eq!(check_move(&desired, &asleep, &first, Phase::Running), Ok(()));
}

#[test]
fn a_move_in_a_pool_that_is_not_in_the_document_is_held_to_its_tenants_quotas() {
    let mut desired = desired(0, 0, 0);
    let mut seen = observed(&desired, &[(Phase::Running, 100), (Phase::Sleeping, 100)]);
    seen.instances[1].pool = "gone".parse().unwrap();
    let asleep = InstanceId::from_bits(2);
    assert_eq!(check_move(&desired, &seen, &asleep, Phase::Running), Ok(()));
    desired.tenants[0].quotas.max_running = 1;
    assert_eq!(
        check_move(&desired, &seen, &asleep, Phase::Running),
        Err("max_running is 1: 1 in use, 1 more needed".to_owned())
    );
    // Nobody's quotas hold an instance of a tenant that is not there either; the node's capacity does.
    seen.instances[1].tenant = "gone".parse().unwrap();
    assert_eq!(check_move(&desired, &seen, &asleep, Phase::Running), Ok(()));
    seen.capacity.vcpus = 3;
    assert_eq!(
        check_move(&desired, &seen, &asleep, Phase::Running),
        Err("the node's vcpus is 3: 2 in use, 2 more needed".to_owned())
    );
}
