//! A day of requests through the real planner on virtual time: what resting saves, and what it costs those who wait.

use anyhow::Result;
use mvm_tests::day::{Fleet, Latencies, Played, Trace, play};

use crate::effort::Effort;
use crate::row::{Figure, Goal, Row, Subject, Unit};

/// Tenants, pools of each that keep nothing running, and sleepers of each pool.
const FLEET: (u32, u32, u32) = (4, 9, 10);
const SHARE_GOAL: Goal = Goal::FigureBelow(20.0);

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    let (tenants, pools, asleep) = FLEET;
    let fleet = Fleet::of(tenants, pools, asleep);
    let latencies = Latencies::default();
    let days: Vec<Played> =
        (1..=effort.days).map(|seed| play(&fleet, &Trace::of(seed, fleet.instances()), latencies)).collect();
    let of = |figure: fn(&Played) -> f64| -> Vec<f64> { days.iter().map(figure).collect() };
    let row = |name: &str, figures: &[f64], unit| Row::of(Subject::Day, name, figures, unit);
    let mut share =
        row("a day's memory-hours beside always-on", &of(|day| 100.0 * day.memory_share()), Unit::Percent)
            .goal(SHARE_GOAL)
            .note(format!(
                "{} instances of 512 MiB; T1 300 s, T2 900 s; one day per seed",
                fleet.instances()
            ));
    for (seed, day) in (1..).zip(&days) {
        share = share.note(told(seed, day));
    }
    let wait = |percent: usize| -> Vec<f64> { days.iter().map(|day| day.wait_ms(percent) as f64).collect() };
    let given = format!(
        "given: wake {} ms, resume {} ms, going to sleep {} ms",
        latencies.wake.as_millis(),
        latencies.resume.as_millis(),
        latencies.sleep.as_millis()
    );
    let flaps: usize = days.iter().map(|day| day.flaps.len() + day.interrupted.len()).sum();
    let flaps = Figure { value: flaps as f64, unit: Unit::Times };
    Ok(vec![
        share,
        row("wait of those who found it resting, p50", &wait(50), Unit::Milliseconds).note(given),
        row("wait of those who found it resting, p99", &wait(99), Unit::Milliseconds),
        Row::single(Subject::Day, "flaps, all seeds together", Some(flaps)).goal(Goal::FigureBelow(1.0)),
    ])
}

fn told(seed: u64, day: &Played) -> String {
    format!(
        "seed {seed}: {:.1} %; {} requests, {} wakes, {} resumes, {} caught on the way to rest; waits p50 {} ms, \
         p99 {} ms, longest {} ms; {} plans, {} flaps",
        100.0 * day.memory_share(),
        day.arrivals,
        day.wakes,
        day.resumes,
        day.caught,
        day.wait_ms(50),
        day.wait_ms(99),
        day.wait_ms(100),
        day.plans,
        day.flaps.len()
    )
}
