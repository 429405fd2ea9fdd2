//! A day of requests, played through the real planner on virtual time.
//!
//! [`Trace`] says when requests come for which agent, and for how long; it follows from one number. [`play`]
//! brings a fleet to its document's counts, then lets the day pass: every request wakes its instance, and what the
//! planner says is done to those that have nothing to do. No clock is read and nothing is waited for.

mod fleet;
mod player;
mod trace;

pub use fleet::Fleet;
pub use player::{Latencies, play};
pub use trace::{Arrival, DAY_MS, Trace};

/// What came of a day.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Played {
    pub instances: usize,
    pub arrivals: usize,
    /// Arrivals that found their instance asleep, and warm.
    pub wakes: usize,
    pub resumes: usize,
    /// Arrivals that came while their instance was being put to rest.
    pub caught: usize,
    /// How long those waited that did not find it running, in milliseconds, in order.
    pub waits_ms: Vec<u64>,
    /// Running and warm instances count their memory, also while they come or go.
    pub memory_mib_hours: f64,
    /// What the same instances take that never rest.
    pub always_on_mib_hours: f64,
    pub plans: usize,
    /// A flap is a step that nobody asked for: an instance put to the same or a lighter rest again without an arrival in
    /// between, or brought up, stopped or made anew by a count although the document is the same all day.
    pub flaps: Vec<String>,
    /// Steps that would have put an instance to rest while it served somebody.
    pub interrupted: Vec<String>,
    /// Arrivals that quotas or capacity turned away.
    pub refused: usize,
}

impl Played {
    /// Memory-hours as a share of what the same fleet takes that never rests.
    #[must_use]
    pub fn memory_share(&self) -> f64 {
        self.memory_mib_hours / self.always_on_mib_hours
    }

    /// The wait that this percentage of those who had to wait did not exceed.
    #[must_use]
    pub fn wait_ms(&self, percent: usize) -> u64 {
        let rank = (self.waits_ms.len() * percent).div_ceil(100).max(1);
        self.waits_ms.get(rank - 1).copied().unwrap_or(0)
    }
}
