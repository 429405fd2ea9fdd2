//! Laws of scaling, on random pools and loads.

use std::time::Duration;

use mvm_planner::fleet::scale::{
    Load, SHRINK_AFTER, STALE_AFTER, ScalePolicy, ScaleReason, Scaled, TOLERANCE_PERCENT, scale,
};
use mvm_proto::Timestamp;
use proptest::prelude::*;

fn at(seconds: i64) -> Timestamp {
    Timestamp::from_unix_ms(seconds * 1000)
}

fn policies() -> impl Strategy<Value = ScalePolicy> {
    (0u32..50, 0u32..200, 1u64..100_000).prop_map(|(min, more, target_milli)| ScalePolicy {
        min,
        max: min + more,
        target_milli,
    })
}

/// Loads that come one after the other, each so many seconds after the one before; none: nothing was measured.
fn loads() -> impl Strategy<Value = Vec<(i64, Option<u64>)>> {
    prop::collection::vec((1i64..200, prop::option::weighted(0.8, 0u64..10_000_000)), 1..40)
}

/// All that is decided, in order, with when.
fn play(
    policy: &ScalePolicy,
    begun: u32,
    loads: &[(i64, Option<u64>)],
) -> Vec<(Timestamp, Scaled, ScaleReason)> {
    let (mut now, mut scaled) = (0, Scaled::starting(begun));
    loads
        .iter()
        .map(|(after, milli)| {
            now += after;
            let load = milli.map(|milli| Load { milli, at: at(now) });
            let (next, reason) = scale(policy, &scaled, load, at(now));
            scaled = next;
            (at(now), scaled.clone(), reason)
        })
        .collect()
}

/// As many as carry this load, within the pool's bounds.
fn enough(policy: &ScalePolicy, milli: u64) -> u32 {
    let wanted = milli.div_ceil(policy.target_milli);
    u32::try_from(wanted).unwrap_or(u32::MAX).clamp(policy.min, policy.max)
}

proptest! {
    #[test]
    fn what_is_decided_is_within_the_bounds(policy in policies(), begun in 0u32..500, loads in loads()) {
        for (_, scaled, _) in play(&policy, begun, &loads) {
            prop_assert!((policy.min..=policy.max).contains(&scaled.running));
        }
    }

    #[test]
    fn a_load_that_stays_is_carried_and_then_nothing_changes(policy in policies(), begun in 0u32..500, milli in 0u64..10_000_000) {
        let loads = vec![(10, Some(milli)); 60];
        let decided = play(&policy, begun, &loads);
        let settled = &decided[decided.len() - 1].1;
        let takes = u64::from(settled.running) * policy.target_milli;
        let close = takes.abs_diff(milli) * 100 <= takes * TOLERANCE_PERCENT;
        prop_assert!(close || settled.running == enough(&policy, milli), "{} run", settled.running);
        // Once it is carried it is left alone for ever.
        let first = decided.iter().position(|(_, scaled, _)| scaled.running == settled.running).unwrap();
        prop_assert!(decided[first..].iter().all(|(_, scaled, _)| scaled.running == settled.running));
    }

    #[test]
    fn it_never_swings_under_a_load_that_stays(policy in policies(), begun in 0u32..500, milli in 0u64..10_000_000) {
        let decided = play(&policy, begun, &vec![(10, Some(milli)); 60]);
        let counts: Vec<u32> = decided.iter().map(|(_, scaled, _)| scaled.running).collect();
        let grows = counts.windows(2).any(|pair| pair[0] < pair[1]);
        let shrinks = counts.windows(2).any(|pair| pair[0] > pair[1]);
        prop_assert!(!(grows && shrinks), "{counts:?}");
    }

    #[test]
    fn more_load_never_means_fewer(policy in policies(), begun in 0u32..500, before in loads(), less in 0u64..10_000_000, more in 0u64..10_000_000) {
        let (less, more) = (less.min(more), less.max(more));
        let mut seconds = 0;
        let mut scaled = Scaled::starting(begun);
        for (after, milli) in before {
            seconds += after;
            let load = milli.map(|milli| Load { milli, at: at(seconds) });
            scaled = scale(&policy, &scaled, load, at(seconds)).0;
        }
        let with = |milli| scale(&policy, &scaled, Some(Load { milli, at: at(seconds) }), at(seconds)).0.running;
        prop_assert!(with(less) <= with(more));
    }

    #[test]
    fn a_load_within_the_tolerance_changes_nothing(policy in policies(), part in 0u64..=100) {
        let running = policy.max;
        let takes = u64::from(running) * policy.target_milli;
        let slack = takes * TOLERANCE_PERCENT / 100;
        let milli = takes - slack + 2 * slack * part / 100;
        let (next, reason) = scale(&policy, &Scaled::starting(running), Some(Load { milli, at: at(0) }), at(0));
        prop_assert_eq!((next.running, reason), (running, ScaleReason::Steady));
    }

    #[test]
    fn fewer_run_only_when_no_more_were_wanted_for_a_while(policy in policies(), begun in 0u32..250, loads in loads()) {
        let begun = begun.clamp(policy.min, policy.max);
        let decided = play(&policy, begun, &loads);
        let mut before = begun;
        for (n, (now, scaled, _)) in decided.iter().enumerate() {
            if scaled.running < before {
                for ((then, _, _), (_, milli)) in decided[..=n].iter().zip(&loads) {
                    let Some(milli) = milli else { continue };
                    let lately = now.since(*then) < SHRINK_AFTER;
                    let takes = u64::from(scaled.running) * policy.target_milli;
                    let more = enough(&policy, *milli) > scaled.running && *milli > takes + takes * TOLERANCE_PERCENT / 100;
                    prop_assert!(!(lately && more), "{} too few for {milli} at {then}", scaled.running);
                }
            }
            before = scaled.running;
        }
    }

    #[test]
    fn what_was_not_measured_lately_changes_nothing(policy in policies(), milli in 0u64..10_000_000, late in 0i64..1000) {
        let before = Scaled::starting(policy.min);
        let old = Load { milli, at: at(0) };
        let now = at(0) + STALE_AFTER + Duration::from_secs(u64::try_from(late).unwrap());
        for load in [None, Some(old)] {
            prop_assert_eq!(scale(&policy, &before, load, now), (before.clone(), ScaleReason::NoMeasurement));
        }
    }

    #[test]
    fn it_grows_at_most_twofold_at_a_time(policy in policies(), begun in 0u32..250, loads in loads()) {
        let mut before = begun.clamp(policy.min, policy.max);
        for (_, scaled, _) in play(&policy, before, &loads) {
            prop_assert!(scaled.running <= (2 * before).max(before + 4));
            before = scaled.running;
        }
    }

    #[test]
    fn a_pool_of_which_only_the_count_is_known_shrinks_no_sooner(policy in policies(), running in 0u32..250, milli in 0u64..10_000_000, after in 0i64..299) {
        let running = running.clamp(policy.min, policy.max);
        let load = Load { milli, at: at(after) };
        let (next, _) = scale(&policy, &Scaled::resumed(running, at(0)), Some(load), at(after));
        prop_assert!(next.running >= running);
    }

    #[test]
    fn however_often_it_is_measured_it_shrinks_in_the_end(policy in policies(), milli in prop::collection::vec(0u64..10_000_000, 400)) {
        let (mut scaled, mut most) = (Scaled::starting(policy.max), 0);
        for (second, milli) in milli.iter().enumerate() {
            let now = at(i64::try_from(second).unwrap());
            scaled = scale(&policy, &scaled, Some(Load { milli: *milli, at: now }), now).0;
            most = scaled.running;
        }
        // Two windows without load: whatever was remembered is forgotten.
        for second in 400..1000 {
            scaled = scale(&policy, &scaled, Some(Load { milli: 0, at: at(second) }), at(second)).0;
        }
        prop_assert_eq!(scaled.running, policy.min, "{} ran before", most);
    }
}

#[test]
fn a_pool_without_load_goes_to_its_minimum_once_that_held_for_long_enough() {
    let policy = ScalePolicy { min: 0, max: 10, target_milli: 1000 };
    let load = |milli, seconds| Some(Load { milli, at: at(seconds) });
    let (busy, reason) = scale(&policy, &Scaled::starting(0), load(3000, 0), at(0));
    assert_eq!((busy.running, reason), (3, ScaleReason::Grew));
    let (waits, reason) = scale(&policy, &busy, load(0, 10), at(10));
    assert_eq!((waits.running, reason, waits.next_due()), (3, ScaleReason::Waiting, Some(at(300))));
    let (gone, reason) = scale(&policy, &waits, load(0, 300), at(300));
    assert_eq!((gone.running, reason), (0, ScaleReason::Shrank));
}
