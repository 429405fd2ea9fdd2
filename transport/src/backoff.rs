//! How long to wait before dialling again. Pure: the caller draws the jitter and does the waiting.

use std::time::Duration;

/// The first wait is at most this.
pub const BASE: Duration = Duration::from_millis(250);
/// No wait is longer than this, so that a coordinator that comes back is found within half a minute.
pub const MAX: Duration = Duration::from_secs(30);

/// Doubling waits with jitter, so that a thousand agents that lost one coordinator do not return in one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Backoff {
    base: Duration,
    max: Duration,
    attempt: u32,
}

impl Default for Backoff {
    fn default() -> Self {
        Self::new(BASE, MAX)
    }
}

impl Backoff {
    #[must_use]
    pub fn new(base: Duration, max: Duration) -> Self {
        Self { base, max, attempt: 0 }
    }

    /// The next wait: between half and the whole of base x 2^attempt, at most `max`. `jitter` is in 0..1.
    #[must_use = "the wait is the caller's to do"]
    pub fn next(&mut self, jitter: f64) -> Duration {
        let doubled = self.base.saturating_mul(1_u32.checked_shl(self.attempt).unwrap_or(u32::MAX));
        let ceiling = doubled.min(self.max);
        self.attempt = (self.attempt + 1).min(31);
        let jitter = if jitter.is_finite() { jitter.clamp(0.0, 1.0) } else { 1.0 };
        ceiling.mul_f64(0.5 + jitter / 2.0)
    }

    /// After a success: the next failure waits briefly again.
    pub fn reset(&mut self) {
        self.attempt = 0;
    }

    /// How many waits were handed out since the last success.
    #[must_use]
    pub fn attempts(&self) -> u32 {
        self.attempt
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn waits(jitter: f64, count: usize) -> Vec<u128> {
        let mut backoff = Backoff::default();
        (0..count).map(|_| backoff.next(jitter).as_millis()).collect()
    }

    #[test]
    fn waits_double_up_to_the_maximum() {
        assert_eq!(waits(1.0, 9), [250, 500, 1000, 2000, 4000, 8000, 16_000, 30_000, 30_000]);
    }

    #[test]
    fn jitter_takes_away_at_most_half() {
        assert_eq!(waits(0.0, 4), [125, 250, 500, 1000]);
    }

    #[test]
    fn reset_begins_again() {
        let mut backoff = Backoff::default();
        let first = backoff.next(1.0);
        let _second = backoff.next(1.0);
        backoff.reset();
        assert_eq!(backoff.next(1.0), first);
    }

    #[test]
    fn a_hundred_failures_and_a_jitter_that_is_no_number_stay_within_the_maximum() {
        let mut backoff = Backoff::default();
        assert!((0..100).all(|_| backoff.next(f64::NAN) <= MAX));
    }
}
