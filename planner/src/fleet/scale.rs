//! How many instances of a pool are to run, from what is measured of its load.
//!
//! A measurement is the load of the whole pool: the depth of its queue, its requests in a second, the processors that it
//! uses. The pool's `target` is the load that one instance takes, so `load / target` instances are wanted. So that a pool
//! does not swing, a load within a tolerance of what runs changes nothing; more is wanted at once, and at most twice as
//! many at a time; less only when nothing else was wanted for a while; and a measurement that is too old changes nothing.
//!
//! Pure: time and measurements arrive from the caller, which stores what is decided.

use std::collections::VecDeque;
use std::time::Duration;

use mvm_proto::Timestamp;

/// A load this close to what the running instances take changes nothing, in percent.
pub const TOLERANCE_PERCENT: u64 = 10;
/// Fewer are wanted only when no more were for this long.
pub const SHRINK_AFTER: Duration = Duration::from_secs(300);
/// A measurement that is older says nothing: its source may be gone.
pub const STALE_AFTER: Duration = Duration::from_secs(120);
/// At most twice as many at a time; of few this many more.
const GROW_AT_LEAST: u32 = 4;
/// The most that is remembered of what was wanted lately.
const REMEMBERED: usize = 32;

/// What a pool asks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ScalePolicy {
    pub min: u32,
    pub max: u32,
    /// The load that one instance takes, in thousandths. At least 1.
    pub target_milli: u64,
}

/// The load of a whole pool at a time, in thousandths.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Load {
    pub milli: u64,
    pub at: Timestamp,
}

/// What was decided, and what the next decision depends on.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Scaled {
    /// How many instances are to run.
    pub running: u32,
    /// What was wanted lately and is more than what was wanted since: the oldest and largest first.
    wanted: VecDeque<(Timestamp, u32)>,
}

/// Why it was decided so.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScaleReason {
    /// As many run as the load asks for, or nearly.
    Steady,
    /// The load asks for more.
    Grew,
    /// The load asks for less, and did so for long enough.
    Shrank,
    /// The load asks for less, and not for long enough yet.
    Waiting,
    /// There is no measurement that is young enough.
    NoMeasurement,
    /// The pool's bounds changed.
    Bounds,
}

impl ScaleReason {
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Steady => "Steady",
            Self::Grew => "Grew",
            Self::Shrank => "Shrank",
            Self::Waiting => "Waiting",
            Self::NoMeasurement => "NoMeasurement",
            Self::Bounds => "Bounds",
        }
    }
}

impl Scaled {
    /// A pool that was never scaled.
    #[must_use]
    pub fn starting(running: u32) -> Self {
        Self { running, wanted: VecDeque::new() }
    }

    /// A pool of which only the count is known: it is held for as long as if it had been wanted until now.
    #[must_use]
    pub fn resumed(running: u32, now: Timestamp) -> Self {
        Self { running, wanted: VecDeque::from([(now, running)]) }
    }

    /// When time alone changes what is decided: the next of what was wanted lately is forgotten.
    #[must_use]
    pub fn next_due(&self) -> Option<Timestamp> {
        self.wanted.front().map(|(at, _)| *at + SHRINK_AFTER)
    }

    /// Remembers what is wanted now. What is not more than that says nothing any more.
    fn want(&mut self, wanted: u32, now: Timestamp) {
        while self.wanted.front().is_some_and(|(at, _)| now.since(*at) >= SHRINK_AFTER) {
            self.wanted.pop_front();
        }
        while self.wanted.back().is_some_and(|(_, before)| *before <= wanted) {
            self.wanted.pop_back();
        }
        // Two become one that is as large as the first and as young as the second: less is wanted later, never earlier.
        if self.wanted.len() >= REMEMBERED
            && let (Some((at, _)), Some((_, more))) = (self.wanted.pop_back(), self.wanted.pop_back())
        {
            self.wanted.push_back((at, more));
        }
        self.wanted.push_back((now, wanted));
    }

    /// The most that was wanted lately.
    fn most(&self) -> u32 {
        self.wanted.front().map_or(0, |(_, wanted)| *wanted)
    }
}

/// How many instances are to run, from how many are to run now and from the pool's load.
#[must_use]
pub fn scale(
    policy: &ScalePolicy,
    before: &Scaled,
    load: Option<Load>,
    now: Timestamp,
) -> (Scaled, ScaleReason) {
    let mut next = before.clone();
    let bounded = before.running.clamp(policy.min, policy.max.max(policy.min));
    if bounded != before.running {
        next.running = bounded;
        return (next, ScaleReason::Bounds);
    }
    let Some(load) = load.filter(|load| now.since(load.at) < STALE_AFTER) else {
        // What was wanted before holds on until there is a measurement again.
        return (next, ScaleReason::NoMeasurement);
    };
    let wanted = wanted(policy, before.running, load.milli);
    next.want(wanted, now);
    let most = next.most();
    let (running, reason) = if wanted > before.running {
        let step = before.running.saturating_mul(2).max(before.running.saturating_add(GROW_AT_LEAST));
        (wanted.min(step), ScaleReason::Grew)
    } else if most < before.running {
        (most, ScaleReason::Shrank)
    } else if wanted < before.running {
        (before.running, ScaleReason::Waiting)
    } else {
        (before.running, ScaleReason::Steady)
    };
    next.running = running.clamp(policy.min, policy.max.max(policy.min));
    (next, reason)
}

/// How many the load asks for; as many as there are where it is close to what they take.
fn wanted(policy: &ScalePolicy, running: u32, load_milli: u64) -> u32 {
    let target = policy.target_milli.max(1);
    let takes = u128::from(target) * u128::from(running);
    let load = u128::from(load_milli);
    let tolerated = takes * u128::from(TOLERANCE_PERCENT);
    let wanted = if load.abs_diff(takes) * 100 <= tolerated {
        running
    } else {
        u32::try_from(load_milli.div_ceil(target)).unwrap_or(u32::MAX)
    };
    wanted.clamp(policy.min, policy.max.max(policy.min))
}
