//! The sleep policy over a whole day: it saves memory, nobody waits long, and it never argues with the counts.

use mvm_tests::day::{Fleet, Latencies, Played, Trace, play};

/// Two tenants with six pools of eight: small enough for every run of the tests.
fn day(seed: u64) -> Played {
    let fleet = Fleet::of(2, 6, 8);
    play(&fleet, &Trace::of(seed, fleet.instances()), Latencies::default())
}

#[test]
fn a_day_takes_a_fifth_of_the_memory_of_always_on_and_nothing_flaps() {
    for seed in [1, 2, 3] {
        let day = day(seed);
        assert!(day.arrivals > 1000 && day.wakes > 100 && day.resumes > 50, "seed {seed} is lively: {day:?}");
        assert!(day.memory_share() <= 0.2, "seed {seed}: {:.3} of always-on", day.memory_share());
        assert_eq!(day.flaps, [""; 0], "seed {seed}");
        assert_eq!(day.interrupted, [""; 0], "seed {seed}");
        assert_eq!(day.refused, 0, "seed {seed}");
        // A sleeper's wake, behind a snapshot that is still being written at worst.
        let longest = Latencies::default().sleep + Latencies::default().wake;
        assert!(day.wait_ms(99) <= 100, "seed {seed}: p99 {} ms", day.wait_ms(99));
        assert!(u128::from(day.wait_ms(100)) <= longest.as_millis(), "seed {seed}: {} ms", day.wait_ms(100));
    }
}

#[test]
fn the_same_seed_plays_the_same_day() {
    assert_eq!(day(4), day(4));
}
