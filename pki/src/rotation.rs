//! When to renew. Pure: time and chance arrive from the caller.

use std::time::Duration;

use mvm_proto::{Digest, Timestamp};

/// The part of its life after which a certificate is renewed, in percent: late enough not to waste work, early
/// enough that half a day of trouble does no harm.
const RENEW_AT_PERCENT: u64 = 50;
/// By how much of its life a renewal may be late on purpose, in percent, so that nodes enrolled together do not all
/// come back together.
const JITTER_PERCENT: u64 = 10;
/// The wait after a first failure.
const FIRST_RETRY: Duration = Duration::from_secs(1);
/// The longest wait between two attempts while the certificate is good.
const MAX_RETRY: Duration = Duration::from_secs(5 * 60);
/// The wait between two attempts once the certificate has expired: someone must help, and may do so at any time.
const EXPIRED_RETRY: Duration = Duration::from_secs(30);
/// At least this many attempts fit into what is left of the certificate's life.
const ATTEMPTS_LEFT: u32 = 8;
/// No wait is shorter, however little is left: a failing authority is not helped by being asked in a loop.
const MIN_RETRY: Duration = Duration::from_millis(250);

/// When to renew a certificate: at half its life, and by `jitter` (0 to 1) up to a tenth of its life later.
#[must_use]
pub fn renew_at(not_before: Timestamp, not_after: Timestamp, jitter: f64) -> Timestamp {
    let life_ms = milliseconds(not_after.since(not_before));
    let half = life_ms.saturating_mul(RENEW_AT_PERCENT) / 100;
    let spread = Duration::from_millis(life_ms.saturating_mul(JITTER_PERCENT) / 100);
    not_before + Duration::from_millis(half) + spread.mul_f64(unit(jitter))
}

/// How long to wait after the `attempt`-th failure in a row (from 1) when the certificate is good for `remaining`.
///
/// Doubles from a second to five minutes, is shortened so that several attempts fit into what remains, and is then
/// scaled by `jitter` (0 to 1) to between half and all of that.
#[must_use]
pub fn retry_after(attempt: u32, remaining: Duration, jitter: f64) -> Duration {
    let doubled =
        FIRST_RETRY.saturating_mul(1_u32.checked_shl(attempt.saturating_sub(1)).unwrap_or(u32::MAX));
    let longest = if remaining.is_zero() { EXPIRED_RETRY } else { MAX_RETRY.min(remaining / ATTEMPTS_LEFT) };
    let wait = if remaining.is_zero() { EXPIRED_RETRY } else { doubled.min(longest) };
    wait.mul_f64(0.5 + unit(jitter) / 2.0).max(MIN_RETRY)
}

/// How much of its life a certificate has behind it, 0 to 100.
#[must_use]
pub fn percent_of_life(not_before: Timestamp, not_after: Timestamp, now: Timestamp) -> u8 {
    let life = milliseconds(not_after.since(not_before));
    let lived = milliseconds(now.since(not_before));
    if lived >= life {
        return 100;
    }
    u8::try_from(lived.saturating_mul(100) / life).unwrap_or(100)
}

/// The jitter of one certificate, from its fingerprint: every process that looks at it sees the same renewal time.
#[must_use]
pub fn jitter_of(leaf: &Digest) -> f64 {
    let [a, b, ..] = *leaf.as_bytes();
    f64::from(u16::from_be_bytes([a, b])) / f64::from(u16::MAX)
}

fn milliseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_millis()).unwrap_or(u64::MAX)
}

/// `jitter` held to 0..=1; what is not a number is 0.
fn unit(jitter: f64) -> f64 {
    if jitter.is_nan() { 0.0 } else { jitter.clamp(0.0, 1.0) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn at(ms: i64) -> Timestamp {
        Timestamp::from_unix_ms(ms)
    }

    #[test]
    fn a_day_old_certificate_is_renewed_between_12_h_and_14_h_24_min() {
        let (from, to) = (at(0), at(24 * 3_600_000));
        assert_eq!(renew_at(from, to, 0.0), at(12 * 3_600_000));
        assert_eq!(renew_at(from, to, 1.0), at(14 * 3_600_000 + 24 * 60_000));
    }

    proptest! {
        #[test]
        fn renewal_falls_between_50_and_60_percent_of_any_life(
            from in 0i64..2_000_000_000_000, life in 1i64..400_000_000_000, jitter in any::<f64>(),
        ) {
            let (from, to) = (at(from), at(from + life));
            let when = renew_at(from, to, jitter).unix_ms() - from.unix_ms();
            prop_assert!(when >= life / 2 && when <= life * 6 / 10 + 1);
            prop_assert!(renew_at(from, to, jitter) <= to);
        }

        #[test]
        fn retries_never_loop_and_never_outlast_what_remains_by_much(
            attempt in 0u32..100, remaining_ms in 0u64..100_000_000, jitter in any::<f64>(),
        ) {
            let remaining = Duration::from_millis(remaining_ms);
            let wait = retry_after(attempt, remaining, jitter);
            prop_assert!(wait >= MIN_RETRY && wait <= MAX_RETRY);
            if remaining > Duration::ZERO {
                prop_assert!(wait <= (remaining / ATTEMPTS_LEFT).max(MIN_RETRY));
            } else {
                prop_assert!(wait >= EXPIRED_RETRY / 2);
            }
        }

        #[test]
        fn waits_grow_with_every_failure(attempt in 1u32..40, jitter in 0.0f64..=1.0) {
            let long = Duration::from_secs(1_000_000);
            prop_assert!(retry_after(attempt, long, jitter) <= retry_after(attempt + 1, long, jitter));
        }

        #[test]
        fn percent_of_life_grows_from_0_to_100(
            from in 0i64..1_000_000, life in 0i64..1_000_000, a in 0i64..3_000_000, b in 0i64..3_000_000,
        ) {
            let percent = |now| percent_of_life(at(from), at(from + life), at(now));
            prop_assert!(percent(a.min(b)) <= percent(a.max(b)));
            prop_assert!(percent(a) <= 100);
            prop_assert_eq!(percent(from + life), 100);
        }

        #[test]
        fn jitter_is_a_fraction(bytes in any::<[u8; 32]>()) {
            prop_assert!((0.0..=1.0).contains(&jitter_of(&Digest::from_bytes(bytes))));
        }
    }
}
