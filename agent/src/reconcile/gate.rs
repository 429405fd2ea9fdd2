//! Keeps plans and requests from overlooking each other.
//!
//! A pass and the check of a request each close the gate while they look and decide. A request that was let in took
//! room that the steps of an earlier plan may have counted on: what of them has not begun waits for the next plan.

use std::sync::atomic::{AtomicU64, Ordering};

use tokio::sync::{Mutex, MutexGuard};

#[derive(Debug, Default)]
pub(crate) struct Gate {
    closed: Mutex<()>,
    admitted: AtomicU64,
}

/// Nobody else looks and decides until this is dropped.
#[derive(Debug)]
pub(crate) struct Closed<'a> {
    _guard: MutexGuard<'a, ()>,
    gate: &'a Gate,
}

impl Gate {
    pub(crate) async fn close(&self) -> Closed<'_> {
        Closed { _guard: self.closed.lock().await, gate: self }
    }

    /// How many requests were let in so far.
    pub(crate) fn admitted(&self) -> u64 {
        self.admitted.load(Ordering::SeqCst)
    }
}

impl Closed<'_> {
    /// A request goes on with what it was checked for.
    pub(crate) fn admit(&self) {
        self.gate.admitted.fetch_add(1, Ordering::SeqCst);
    }
}
