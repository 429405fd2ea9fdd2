//! How much is measured: enough for figures, or just enough to see that it still runs.

use std::time::Duration;

/// Counts and times of every row. All loops are bounded by these.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Effort {
    /// A/B pairs of a ratio.
    pub pairs: usize,
    /// Days that are played, one seed each.
    pub days: u64,
    /// How long each half of a document pair runs.
    pub document_batch: Duration,
    /// Handshakes in each half of a pair.
    pub handshakes: usize,
    pub pushes: usize,
    /// Changes to a pool.
    pub applies: usize,
    pub starts: usize,
    /// How long a process must have been idle before it is looked at, and how long it is then watched.
    pub settle: Duration,
    pub watch: Duration,
    /// Sessions at the first and the second look; the slope lies between them.
    pub sessions: (usize, usize),
    /// Coordinators that this is done with, each fresh.
    pub fresh_starts: usize,
    /// Documents to the whole fleet, by the last of them.
    pub fanouts: usize,
}

impl Effort {
    #[must_use]
    pub fn full() -> Self {
        Self {
            pairs: 21,
            days: 5,
            document_batch: Duration::from_millis(200),
            handshakes: 256,
            pushes: 200,
            applies: 40,
            starts: 15,
            settle: Duration::from_secs(3),
            watch: Duration::from_secs(10),
            sessions: (100, 1000),
            fresh_starts: 3,
            fanouts: 9,
        }
    }

    #[must_use]
    pub fn quick() -> Self {
        Self {
            pairs: 3,
            days: 1,
            document_batch: Duration::from_millis(20),
            handshakes: 32,
            pushes: 10,
            applies: 4,
            starts: 3,
            settle: Duration::from_secs(1),
            watch: Duration::from_secs(1),
            sessions: (10, 40),
            fresh_starts: 1,
            fanouts: 1,
        }
    }
}
