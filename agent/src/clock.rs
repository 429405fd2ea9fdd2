//! Where the time comes from.

use std::fmt;
use std::sync::Arc;
use std::time::SystemTime;

use mvm_proto::Timestamp;

/// Where the time comes from; a test brings its own.
#[derive(Clone)]
pub struct Clock(Arc<dyn Fn() -> Timestamp + Send + Sync>);

impl Clock {
    pub fn new(now: impl Fn() -> Timestamp + Send + Sync + 'static) -> Self {
        Self(Arc::new(now))
    }

    #[must_use]
    pub fn system() -> Self {
        Self::new(|| Timestamp::from(SystemTime::now()))
    }

    /// Begins at `start` and goes with tokio's time, which a test may pause.
    #[must_use]
    pub fn starting_at(start: Timestamp) -> Self {
        let begun = tokio::time::Instant::now();
        Self::new(move || start + begun.elapsed())
    }

    #[must_use]
    pub fn now(&self) -> Timestamp {
        (self.0)()
    }
}

impl fmt::Debug for Clock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Clock")
    }
}
