//! Token buckets: per network for what anyone may ask without a certificate, per identity for what costs a signature.
//!
//! Bounded: when the table is full, full buckets are dropped (they remember nothing), and if none is full the
//! newcomer is refused.

use std::collections::HashMap;
use std::hash::Hash;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use mvm_pki::Identity;
use mvm_proto::{Digest, Problem};

/// Networks or identities remembered at once: about 64 to 200 bytes each.
const MAX_BUCKETS: usize = 16 * 1024;

#[derive(Debug)]
pub(crate) struct RateLimit<K> {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<K, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl<K: Eq + Hash> RateLimit<K> {
    pub(crate) fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second, burst, buckets: Mutex::new(HashMap::new()) }
    }

    /// Takes one token of `key`, or says how long to wait for it.
    pub(crate) fn take(&self, key: K, now: Instant) -> Result<(), Duration> {
        let mut buckets = self.buckets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if buckets.len() >= MAX_BUCKETS && !buckets.contains_key(&key) {
            buckets.retain(|_, bucket| self.refilled(*bucket, now) < self.burst);
            if buckets.len() >= MAX_BUCKETS {
                return Err(Duration::from_secs_f64(1.0 / self.per_second));
            }
        }
        let bucket = buckets.entry(key).or_insert(Bucket { tokens: self.burst, at: now });
        let tokens = self.refilled(*bucket, now);
        if tokens < 1.0 {
            *bucket = Bucket { tokens, at: now };
            return Err(Duration::from_secs_f64((1.0 - tokens) / self.per_second));
        }
        *bucket = Bucket { tokens: tokens - 1.0, at: now };
        Ok(())
    }

    fn refilled(&self, bucket: Bucket, now: Instant) -> f64 {
        let passed = now.saturating_duration_since(bucket.at).as_secs_f64();
        (bucket.tokens + passed * self.per_second).min(self.burst)
    }
}

/// The refusal of a request that came too soon, with the whole seconds to wait.
pub(crate) fn too_soon(detail: impl Into<String>, wait: Duration) -> (Problem, u64) {
    let seconds = wait.as_secs() + 1;
    (Problem::new(429, "rate_limited", detail, format!("Try again in {seconds} s.")), seconds)
}

/// Whose rate is spent: a certificate's until it was judged, its identity's after that. So a certificate from before a
/// removal spends nothing of who has the name now.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Holder {
    Certificate(Option<Digest>),
    Identity(Identity),
}

#[cfg(test)]
mod tests {
    use std::net::IpAddr;

    use super::*;

    #[test]
    fn a_burst_is_granted_then_the_rate_holds() {
        let (limit, start) = (RateLimit::new(2.0, 3.0), Instant::now());
        let address = "192.0.2.1".parse::<IpAddr>().unwrap();
        assert_eq!((0..5).filter(|_| limit.take(address, start).is_ok()).count(), 3);
        assert_eq!(limit.take(address, start), Err(Duration::from_millis(500)));
        assert!(limit.take(address, start + Duration::from_millis(500)).is_ok());
        assert!(limit.take("192.0.2.2".parse().unwrap(), start).is_ok());
    }

    #[test]
    fn the_table_never_grows_past_its_bound() {
        let (limit, start) = (RateLimit::new(1.0, 1.0), Instant::now());
        let address = |n: u32| IpAddr::from(std::net::Ipv4Addr::from(n));
        let granted = (0..MAX_BUCKETS as u32 + 10).filter(|n| limit.take(address(*n), start).is_ok()).count();
        assert_eq!(granted, MAX_BUCKETS);
        assert!(limit.take(address(u32::MAX), start + Duration::from_secs(2)).is_ok());
        assert_eq!(limit.buckets.lock().unwrap().len(), 1);
    }
}
