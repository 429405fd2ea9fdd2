//! Token buckets per address for what anyone may ask without a certificate.
//!
//! Bounded: when the table is full, full buckets are dropped (they remember nothing), and if none is full the
//! newcomer is refused. IPv6 addresses share one bucket per /64, which is what one customer holds.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv6Addr};
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Addresses remembered at once: about 64 bytes each.
const MAX_ADDRESSES: usize = 16 * 1024;

#[derive(Debug)]
pub(crate) struct RateLimit {
    per_second: f64,
    burst: f64,
    buckets: Mutex<HashMap<IpAddr, Bucket>>,
}

#[derive(Debug, Clone, Copy)]
struct Bucket {
    tokens: f64,
    at: Instant,
}

impl RateLimit {
    pub(crate) fn new(per_second: f64, burst: f64) -> Self {
        Self { per_second, burst, buckets: Mutex::new(HashMap::new()) }
    }

    /// Takes one token of `address`, or says how long to wait for it.
    pub(crate) fn take(&self, address: IpAddr, now: Instant) -> Result<(), Duration> {
        let key = network_of(address);
        let mut buckets = self.buckets.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        if buckets.len() >= MAX_ADDRESSES && !buckets.contains_key(&key) {
            buckets.retain(|_, bucket| self.refilled(*bucket, now) < self.burst);
            if buckets.len() >= MAX_ADDRESSES {
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

/// Whom an address stands for.
pub(crate) fn network_of(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V6(v6) => {
            let [a, b, c, d, ..] = v6.segments();
            IpAddr::V6(Ipv6Addr::new(a, b, c, d, 0, 0, 0, 0))
        }
        v4 => v4,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_burst_is_granted_then_the_rate_holds() {
        let (limit, start) = (RateLimit::new(2.0, 3.0), Instant::now());
        let address = "192.0.2.1".parse().unwrap();
        assert_eq!((0..5).filter(|_| limit.take(address, start).is_ok()).count(), 3);
        assert_eq!(limit.take(address, start), Err(Duration::from_millis(500)));
        assert!(limit.take(address, start + Duration::from_millis(500)).is_ok());
        assert!(limit.take("192.0.2.2".parse().unwrap(), start).is_ok());
    }

    #[test]
    fn addresses_of_one_ipv6_network_share_a_bucket() {
        let (limit, start) = (RateLimit::new(1.0, 1.0), Instant::now());
        assert!(limit.take("2001:db8::1".parse().unwrap(), start).is_ok());
        assert!(limit.take("2001:db8::2".parse().unwrap(), start).is_err());
        assert!(limit.take("2001:db8:0:1::1".parse().unwrap(), start).is_ok());
    }

    #[test]
    fn the_table_never_grows_past_its_bound() {
        let (limit, start) = (RateLimit::new(1.0, 1.0), Instant::now());
        let address = |n: u32| IpAddr::from(std::net::Ipv4Addr::from(n));
        let granted =
            (0..MAX_ADDRESSES as u32 + 10).filter(|n| limit.take(address(*n), start).is_ok()).count();
        assert_eq!(granted, MAX_ADDRESSES);
        assert!(limit.take(address(u32::MAX), start + Duration::from_secs(2)).is_ok());
        assert_eq!(limit.buckets.lock().unwrap().len(), 1);
    }
}
