//! When to renew. Pure: time and chance arrive from the caller.

use std::time::Duration;

use mvm_proto::{Digest, Timestamp};

/// When to renew a certificate: at half its life, and by `jitter` (0 to 1) up to a tenth of its life later.
#[must_use]
pub fn renew_at(not_before: Timestamp, not_after: Timestamp, jitter: f64) -> Timestamp {
    let _ = (not_before, not_after, jitter);
    todo!()
}

/// How long to wait after the `attempt`-th failure (from 1) when the certificate is good for `remaining`.
#[must_use]
pub fn retry_after(attempt: u32, remaining: Duration, jitter: f64) -> Duration {
    let _ = (attempt, remaining, jitter);
    todo!()
}

/// How much of its life a certificate has behind it, 0 to 100.
#[must_use]
pub fn percent_of_life(not_before: Timestamp, not_after: Timestamp, now: Timestamp) -> u8 {
    let _ = (not_before, not_after, now);
    todo!()
}

/// The jitter of one certificate, from its fingerprint: every process that looks at it sees the same renewal time.
#[must_use]
pub fn jitter_of(leaf: &Digest) -> f64 {
    let _ = leaf;
    todo!()
}
