//! A lock between plans and requests, so that both count on the same room only once.
//!
//! A pass and the check of a request each hold the gate while they read the records, decide, and take the leases: never longer,
//! so that no request waits while a pass observes the machine. A request may take room that steps of an earlier plan counted
//! on: those that have not started wait for the next plan.

use std::cell::Cell;

use parking_lot::{Mutex, MutexGuard};

#[derive(Debug, Default)]
pub(crate) struct Gate {
    /// How many requests were let in so far.
    admitted: Mutex<Cell<u64>>,
}

/// No other plan or request decides until this is dropped.
#[derive(Debug)]
pub(crate) struct Closed<'a>(MutexGuard<'a, Cell<u64>>);

impl Gate {
    pub(crate) fn close(&self) -> Closed<'_> {
        Closed(self.admitted.lock())
    }
}

impl Closed<'_> {
    /// How many requests were let in so far.
    pub(crate) fn admitted(&self) -> u64 {
        self.0.get()
    }

    /// A request goes on with what it was checked for.
    pub(crate) fn admit(&self) {
        self.0.set(self.0.get() + 1);
    }
}
