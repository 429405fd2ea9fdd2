//! How long the loop leaves a kind of work alone: in proportion to what it took last, so that a quiet fleet is answered at
//! once and a busy one spends a bounded share of the time on it.

use std::time::Duration;

/// Work that takes one part is left alone for this many parts.
const REST: u32 = 4;

/// How long to wait after work that took this long, at most `limit`.
pub(super) fn rest_after(took: Duration, limit: Duration) -> Duration {
    took.saturating_mul(REST).min(limit)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn work_rests_in_proportion_to_what_it_took_and_never_longer_than_its_limit() {
        let limit = Duration::from_millis(20);
        assert_eq!(rest_after(Duration::ZERO, limit), Duration::ZERO);
        assert_eq!(rest_after(Duration::from_millis(1), limit), Duration::from_millis(4));
        assert_eq!(rest_after(Duration::from_millis(5), limit), limit);
        assert_eq!(rest_after(Duration::MAX, limit), limit);
    }
}
