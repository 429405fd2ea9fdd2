//! A new revision with larger instances, where there is hardly room for both.

use crate::world::model::World;
use crate::world::one_pool::{desired, observed, workers};
use crate::world::rest::{now, run_to_rest};
use mvm_planner::Action;
use mvm_proto::document::Resources;
use mvm_proto::{DesiredState, Digest, Phase};

/// As many as are wanted run, each with half of what the new revision asks for.
fn outgrown(running: u32, change: impl FnOnce(&mut DesiredState)) -> (DesiredState, World) {
    let mut desired = desired(running, 0, 0);
    change(&mut desired);
    let count = usize::try_from(running).unwrap();
    let mut seen = observed(&desired, &vec![(Phase::Running, 5000); count]);
    for instance in &mut seen.instances {
        instance.revision = Digest::of(b"older");
        instance.resources = Resources { vcpus: 1, mem_mib: 128, data_disk_mib: 0 };
    }
    (desired, World::new(seen, now()))
}

#[test]
fn a_rollout_to_larger_instances_is_done_wherever_all_of_them_fit() {
    for running in 1..=5 {
        for spare in 0..=2 * u64::from(running) {
            let limits: [fn(&mut DesiredState, u64); 2] = [
                |desired, room| desired.tenants[0].quotas.max_vcpus = u32::try_from(room).unwrap(),
                |desired, room| desired.tenants[0].quotas.max_mem_mib = 128 * room,
            ];
            for limit in limits {
                let room = 2 * u64::from(running) + spare;
                let (desired, mut world) = outgrown(running, |desired| limit(desired, room));
                run_to_rest(&desired, &mut world, |_, _, _| ());
                let (tenant, pool) = workers(&desired);
                let revision = mvm_planner::revision_of(tenant, pool);
                let up = world.observed.instances.iter().filter(|i| i.phase == Phase::Running);
                let up: Vec<_> = up.map(|i| i.revision).collect();
                assert_eq!(up, vec![revision; running as usize], "{running} in {room}");
            }
        }
    }
}

#[test]
fn with_room_for_a_surge_instance_and_the_replacement_no_instance_is_missing() {
    // Three of the new size, and the surge instance.
    let (desired, mut world) = outgrown(3, |desired| desired.tenants[0].quotas.max_vcpus = 8);
    let up = |world: &World| world.observed.instances.iter().filter(|i| i.phase == Phase::Running).count();
    run_to_rest(&desired, &mut world, |_, after, _| assert!(up(after) >= 3));
}

#[test]
fn the_surge_instance_that_stays_is_the_one_of_the_new_revision() {
    let mut desired = desired(1, 0, 2);
    desired.tenants[0].pools[0].runtime_policy.min_running_seconds = 0;
    let mut seen = observed(&desired, &[(Phase::Running, 0); 3]);
    for (place, instance) in seen.instances.iter_mut().enumerate() {
        if place < 2 {
            instance.revision = Digest::of(b"older");
        }
        instance.staging = Some(if place == 0 { Phase::Warm } else { Phase::Running });
    }
    let newest = seen.instances[2].id.clone();
    let mut stopped = None;
    run_to_rest(&desired, &mut World::new(seen, now()), |_, _, step| {
        if step.instance.as_ref() == Some(&newest) && step.action == Action::Stop {
            stopped = Some(step.clone());
        }
        assert!(stopped.is_none() || step.action != Action::Replace, "{stopped:?} before {step}");
    });
}
