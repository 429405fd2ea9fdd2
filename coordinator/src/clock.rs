//! The clock, read at the edges only: decisions get the time as an argument.
//!
//! [`now`] is what documents, certificates and records are dated with, and jumps when the machine's clock is set. How long a
//! node has been away is told by a [`SteadyClock`], which does not: a clock that is set forward loses no node.

use std::time::{Instant, SystemTime};

use mvm_proto::Timestamp;

#[cfg(not(debug_assertions))]
pub(crate) fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}

#[cfg(debug_assertions)]
pub(crate) fn now() -> Timestamp {
    let shift_ms = shift::SHIFT_MS.load(std::sync::atomic::Ordering::Relaxed);
    Timestamp::from_unix_ms(Timestamp::from(SystemTime::now()).unix_ms() + shift_ms)
}

#[cfg(debug_assertions)]
pub(crate) mod shift {
    use std::sync::atomic::{AtomicI64, Ordering};

    pub(super) static SHIFT_MS: AtomicI64 = AtomicI64::new(0);

    /// Sets the clock of this process's coordinators by so much off the machine's: for tests.
    pub fn shift_clock(by_ms: i64) {
        SHIFT_MS.store(by_ms, Ordering::Relaxed);
    }
}

/// The time at a start, and what has passed since.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SteadyClock {
    started_at: Timestamp,
    started: Instant,
}

impl SteadyClock {
    pub(crate) fn start() -> Self {
        Self { started_at: now(), started: Instant::now() }
    }

    pub(crate) fn now(&self) -> Timestamp {
        self.at(Instant::now())
    }

    pub(crate) fn at(&self, instant: Instant) -> Timestamp {
        self.started_at + instant.saturating_duration_since(self.started)
    }
}
