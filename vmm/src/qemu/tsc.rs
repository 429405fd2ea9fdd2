//! Measures the rate of this machine's time stamp counter.
//!
//! Under TCG the guest's counter is the host's, and a machine with hardware-reduced ACPI has no other clock to measure
//! it against: a kernel that is not told the rate waits for ever.
#![allow(
    unsafe_code,
    reason = "reading the time stamp counter is an intrinsic that the language calls unsafe"
)]

use std::sync::OnceLock;
use std::time::Duration;

use rustix::time::{ClockId, clock_gettime};

/// Long enough that two readings a microsecond apart from their clock's blur the rate by less than a kernel minds.
#[cfg(target_arch = "x86_64")]
const MEASURE: Duration = Duration::from_millis(20);
const ATTEMPTS: usize = 5;

/// The rate in kHz, measured once; none on a machine without such a counter.
pub(super) async fn khz() -> Option<u64> {
    static KHZ: OnceLock<Option<u64>> = OnceLock::new();
    if let Some(known) = KHZ.get() {
        return *known;
    }
    let mut rates = Vec::with_capacity(ATTEMPTS);
    for _ in 0..ATTEMPTS {
        rates.push(measure().await?);
    }
    rates.sort_unstable();
    // The middle one: a reading that was interrupted is far off in either direction.
    *KHZ.get_or_init(|| Some(rates[ATTEMPTS / 2]))
}

fn nanoseconds() -> i64 {
    let now = clock_gettime(ClockId::MonotonicRaw);
    now.tv_sec * 1_000_000_000 + now.tv_nsec
}

#[cfg(target_arch = "x86_64")]
fn counter() -> u64 {
    // SAFETY: every x86-64 processor has this instruction, and it only reads.
    unsafe { core::arch::x86_64::_rdtsc() }
}

#[cfg(target_arch = "x86_64")]
async fn measure() -> Option<u64> {
    let (began, first) = (nanoseconds(), counter());
    tokio::task::spawn_blocking(|| std::thread::sleep(MEASURE)).await.ok()?;
    let (last, ended) = (counter(), nanoseconds());
    let elapsed = u64::try_from(ended - began).ok()?;
    u64::try_from(u128::from(last.wrapping_sub(first)) * 1_000_000 / u128::from(elapsed.max(1))).ok()
}

#[cfg(not(target_arch = "x86_64"))]
async fn measure() -> Option<u64> {
    None
}
