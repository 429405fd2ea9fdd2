//! A token bucket per key, so that one noisy peer can't starve the others.
//!
//! Bounded: when the table is full, full buckets are dropped (they remember nothing), and if none is full the newcomer
//! is refused. Time arrives from the caller.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use parking_lot::Mutex;

/// Keys remembered at once: about 64 to 200 bytes each.
const MAX_BUCKETS: usize = 16 * 1024;

/// How often each `K` may do something.
#[derive(Debug)]
pub struct RateLimit<K> {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

impl<K: Eq + Hash> RateLimit<K> {
    /// `per_second` is above zero.
    #[must_use]
    pub fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second, burst, buckets: Mutex::default() }
    }

    /// Takes one token of `key`, or says how long to wait for it.
    pub fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        let mut buckets = self.buckets.lock();
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&key) {
            buckets.retain(|_, bucket| self.refilled(*bucket, now).tokens < self.burst);
            if buckets.len() >= MAX_BUCKETS {
                return Err(Duration::from_secs_f64(1.0 / self.per_second));
            }
        }
        let bucket = buckets.entry(key).or_insert(Bucket { tokens: self.burst, filled_at: now });
        *bucket = self.refilled(*bucket, now);
        if bucket.tokens < 1.0 {
            return Err(Duration::from_secs_f64((1.0 - bucket.tokens) / self.per_second));
        }
        bucket.tokens -= 1.0;
        Ok(())
    }

    /// The bucket as it stands at `now`.
    fn refilled(&self, bucket: Bucket, now: Instant) -> Bucket {
        let passed = now.saturating_duration_since(bucket.filled_at).as_secs_f64();
        let tokens = (bucket.tokens + passed * self.per_second).min(self.burst);
        Bucket { tokens, filled_at: bucket.filled_at.max(now) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drained(limit: &RateLimit<u32>, key: u32, now: Instant) -> usize {
        std::iter::repeat_with(|| limit.take(key, now)).take_while(Result::is_ok).count()
    }

    #[test]
    fn a_burst_is_granted_then_the_rate_holds() {
        let (limit, start) = (RateLimit::new(2.0, 3.0), Instant::now());
        assert_eq!(drained(&limit, 1, start), 3);
        assert_eq!(limit.take(1, start), Err(Duration::from_millis(500)));
        assert!(limit.take(1, start + Duration::from_millis(500)).is_ok());
        assert_eq!(drained(&limit, 1, start + Duration::from_secs(3600)), 3, "never above the burst");
    }

    #[test]
    fn one_key_over_its_limit_costs_another_nothing() {
        let (limit, now) = (RateLimit::new(10.0, 20.0), Instant::now());
        drained(&limit, 1, now);
        assert_eq!(drained(&limit, 2, now), 20);
    }

    #[test]
    fn a_clock_that_does_not_advance_or_goes_back_gives_no_tokens() {
        let (limit, now) = (RateLimit::new(10.0, 20.0), Instant::now() + Duration::from_secs(60));
        drained(&limit, 1, now);
        assert!(limit.take(1, now - Duration::from_secs(30)).is_err());
        assert!(limit.take(1, now).is_err());
    }

    #[test]
    fn the_table_never_grows_past_its_bound() {
        let (limit, start) = (RateLimit::new(1.0, 1.0), Instant::now());
        let keys = 0..u32::try_from(MAX_BUCKETS).unwrap() + 10;
        let granted = keys.filter(|key| limit.take(*key, start).is_ok()).count();
        assert_eq!(granted, MAX_BUCKETS);
        assert!(limit.take(u32::MAX, start + Duration::from_secs(2)).is_ok());
        assert_eq!(limit.buckets.lock().len(), 1);
    }
}
