//! A token bucket per peer, so that one noisy peer can't starve the others.
//!
//! Pure: time arrives from the caller as an [`Instant`]. The API's middleware holds one [`RateLimiter`] behind a
//! mutex and asks it once per request.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::{Duration, Instant};

use crate::settings::RateSettings;

/// How many peers are remembered at once. Peers are authenticated, so this many are a large fleet's operators and
/// coordinators; the bound only keeps an issuing authority gone wild from filling memory.
pub const MAX_TRACKED_PEERS: usize = 1024;

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    filled_at: Instant,
}

/// Who may ask how often. `K` names a peer.
#[derive(Debug)]
pub struct RateLimiter<K> {
    rate: RateSettings,
    capacity: usize,
    buckets: HashMap<K, Bucket>,
}

/// A request over the limit: when one more will be let through.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limited {
    pub retry_after: Duration,
}

impl<K: Eq + Hash + Clone> RateLimiter<K> {
    #[must_use]
    pub fn new(rate: RateSettings, capacity: usize) -> Self {
        Self { rate, capacity: capacity.max(1), buckets: HashMap::new() }
    }

    /// Takes one token from `peer`'s bucket, or says how long until there is one.
    pub fn take(&mut self, peer: &K, now: Instant) -> Result<(), Limited> {
        if !self.buckets.contains_key(peer) {
            self.make_room(now);
            let full = Bucket { tokens: f64::from(self.rate.burst), filled_at: now };
            self.buckets.insert(peer.clone(), full);
        }
        let rate = self.rate;
        let Some(bucket) = self.buckets.get_mut(peer) else { return Ok(()) };
        *bucket = refilled(*bucket, rate, now);
        if bucket.tokens >= 1.0 {
            bucket.tokens -= 1.0;
            return Ok(());
        }
        let missing = 1.0 - bucket.tokens;
        Err(Limited { retry_after: Duration::from_secs_f64(missing / f64::from(rate.per_second.max(1))) })
    }

    /// How many peers are remembered.
    #[must_use]
    pub fn tracked(&self) -> usize {
        self.buckets.len()
    }

    /// Forgets the peers whose buckets are full again: to them, being forgotten makes no difference. When all are
    /// busy the fullest goes, because forgetting it forgives the least.
    fn make_room(&mut self, now: Instant) {
        if self.buckets.len() < self.capacity {
            return;
        }
        let rate = self.rate;
        self.buckets.retain(|_, bucket| refilled(*bucket, rate, now).tokens < f64::from(rate.burst));
        if self.buckets.len() < self.capacity {
            return;
        }
        let fullest = self
            .buckets
            .iter()
            .max_by(|(_, a), (_, b)| {
                refilled(**a, rate, now).tokens.total_cmp(&refilled(**b, rate, now).tokens)
            })
            .map(|(peer, _)| peer.clone());
        if let Some(peer) = fullest {
            self.buckets.remove(&peer);
        }
    }
}

/// The bucket as it stands at `now`.
fn refilled(bucket: Bucket, rate: RateSettings, now: Instant) -> Bucket {
    let grown = now.saturating_duration_since(bucket.filled_at).as_secs_f64() * f64::from(rate.per_second);
    let tokens = (bucket.tokens + grown).min(f64::from(rate.burst));
    Bucket { tokens, filled_at: bucket.filled_at.max(now) }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATE: RateSettings = RateSettings { per_second: 10, burst: 20 };

    fn drained(limiter: &mut RateLimiter<&'static str>, peer: &'static str, now: Instant) -> usize {
        std::iter::repeat_with(|| limiter.take(&peer, now)).take_while(Result::is_ok).count()
    }

    #[test]
    fn a_burst_is_let_through_and_then_the_peer_is_told_when_to_come_back() {
        let (mut limiter, now) = (RateLimiter::new(RATE, 8), Instant::now());
        assert_eq!(drained(&mut limiter, "a", now), 20);
        assert_eq!(limiter.take(&"a", now), Err(Limited { retry_after: Duration::from_millis(100) }));
    }

    #[test]
    fn tokens_come_back_at_the_rate_and_never_above_the_burst() {
        let (mut limiter, start) = (RateLimiter::new(RATE, 8), Instant::now());
        drained(&mut limiter, "a", start);
        assert_eq!(drained(&mut limiter, "a", start + Duration::from_millis(500)), 5);
        assert_eq!(drained(&mut limiter, "a", start + Duration::from_secs(3600)), 20);
    }

    #[test]
    fn one_peer_over_its_limit_costs_another_nothing() {
        let (mut limiter, now) = (RateLimiter::new(RATE, 8), Instant::now());
        drained(&mut limiter, "noisy", now);
        assert_eq!(drained(&mut limiter, "quiet", now), 20);
    }

    #[test]
    fn no_more_peers_are_remembered_than_allowed_and_idle_ones_go_first() {
        let (mut limiter, start) = (RateLimiter::new(RATE, 2), Instant::now());
        drained(&mut limiter, "busy", start);
        limiter.take(&"idle", start).unwrap();
        let later = start + Duration::from_millis(200);
        limiter.take(&"new", later).unwrap();
        assert_eq!(limiter.tracked(), 2);
        assert_eq!(drained(&mut limiter, "busy", later), 2, "the busy peer's debt was not forgotten");
    }

    #[test]
    fn a_clock_that_does_not_advance_or_goes_back_gives_no_tokens() {
        let (mut limiter, now) = (RateLimiter::new(RATE, 8), Instant::now() + Duration::from_secs(60));
        drained(&mut limiter, "a", now);
        assert!(limiter.take(&"a", now - Duration::from_secs(30)).is_err());
    }
}
