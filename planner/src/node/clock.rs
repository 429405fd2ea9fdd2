//! The time of a plan, and when time alone changes it.
//!
//! Every comparison with `now` is made here, and notes when its answer changes. Until the first of these times a plan is
//! made of the same answers, so it has the same steps.

use std::cell::Cell;
use std::time::Duration;

use mvm_proto::Timestamp;

#[derive(Debug)]
pub(crate) struct Clock {
    now: Timestamp,
    next: Cell<Option<Timestamp>>,
}

impl Clock {
    pub(crate) fn new(now: Timestamp) -> Self {
        Self { now, next: Cell::new(None) }
    }

    /// Whether it is `at` or later.
    pub(crate) fn is_past(&self, at: Timestamp) -> bool {
        if at > self.now {
            self.note(at);
        }
        at <= self.now
    }

    /// Whether something holds until `until`. No hold is longer than `longest`: what seems to be was written before the
    /// clock was set back, and holds only when no more than that is left of it.
    pub(crate) fn is_held_until(&self, until: Timestamp, longest: Duration) -> bool {
        !self.is_past(until) && self.is_past(until - longest)
    }

    /// How long until then, for a reason's text.
    pub(crate) fn left(&self, until: Timestamp) -> Duration {
        until.since(self.now)
    }

    /// How long since then, for a reason's text.
    pub(crate) fn age(&self, since: Timestamp) -> Duration {
        self.now.since(since)
    }

    /// When the first of the answers given so far changes.
    pub(crate) fn next_deadline(&self) -> Option<Timestamp> {
        self.next.get()
    }

    fn note(&self, at: Timestamp) {
        self.next.set(Some(self.next.get().map_or(at, |earlier| earlier.min(at))));
    }
}
