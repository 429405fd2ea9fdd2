//! A guest's load as the host measures it: CPU time of its VMM, and bytes through its port.
//!
//! A guest can't hide work from these counters, and a workload without support for mvm needs to report nothing. Counters are
//! sampled; the difference of two samples counts.

use std::time::Duration;

use tokio::time::Instant;

/// Two looks that are closer than this say little: the kernel counts processor time in hundredths of a second.
pub(crate) const LOOK_EVERY: Duration = Duration::from_secs(5);

/// How far back the average looks: past one garbage collection or cron job, not past a minute.
const REMEMBERED: Duration = Duration::from_secs(20);

/// What a VMM takes for itself, in thousandths of a core: an idle Debian guest costs QEMU 6 of them when it emulates.
const VMM_OWN_MILLI: u64 = 10;

/// What an idle guest sends and receives in [`CHATTER_SPAN`]: neighbours, clock and keep-alives. The shortest TCP
/// exchange is ten packets of 52 bytes and what it was made for.
const CHATTER_BYTES: u64 = 512;
const CHATTER_SPAN: Duration = Duration::from_secs(30);

/// Of one guest, since its VM last began to run.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(super) struct HostLoad {
    cpu: Option<(Instant, Duration)>,
    /// Moving average, in thousandths of its processors; absent: there was one look only.
    cpu_milli: Option<u64>,
    bytes: Option<(Instant, u64)>,
    /// Between the last two looks it sent or received more than chatter.
    pub(super) moves_bytes: bool,
}

impl HostLoad {
    /// `taken`: by its VMM since that was started.
    pub(super) fn hear_cpu(&mut self, taken: Duration, vcpus: u32, at: Instant) {
        let before = self.cpu.replace((at, taken));
        let Some((span, spent)) = before.and_then(|(then, before)| between(then, at, before, taken)) else {
            self.cpu_milli = None;
            return;
        };
        let of_a_core = millis(spent).saturating_mul(1000) / millis(span);
        let share = of_a_core.saturating_sub(VMM_OWN_MILLI) / u64::from(vcpus.max(1));
        // Long looks weigh more than short ones, however they come.
        let (past, now) = (millis(REMEMBERED), millis(span));
        let average = |before: u64| (before * past + share * now) / (past + now);
        self.cpu_milli = Some(self.cpu_milli.map_or(share, average));
    }

    /// `total`: sent and received since its port was made.
    pub(super) fn hear_bytes(&mut self, total: u64, at: Instant) {
        let before = self.bytes.replace((at, total));
        self.moves_bytes = before.is_some_and(|(then, before)| {
            let Some(moved) = total.checked_sub(before) else { return false };
            let spans = millis(at.duration_since(then)).div_ceil(millis(CHATTER_SPAN)).max(1);
            moved > CHATTER_BYTES.saturating_mul(spans)
        });
    }

    /// Of its processors, what its VMM itself needs left out; absent: not known yet.
    pub(super) fn cpu_percent(&self) -> Option<u64> {
        self.cpu_milli.map(|milli| milli.div_ceil(10))
    }
}

/// The time between two looks and what was spent in it; absent where the counter began anew, or no time passed.
fn between(then: Instant, at: Instant, before: Duration, taken: Duration) -> Option<(Duration, Duration)> {
    let span = at.checked_duration_since(then).filter(|span| millis(*span) > 0)?;
    Some((span, taken.checked_sub(before)?))
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn secs(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    /// A load after looks at `(second, processor milliseconds so far)`.
    fn after(looks: &[(u64, u64)], vcpus: u32) -> HostLoad {
        let begun = Instant::now();
        let mut load = HostLoad::default();
        for (at, taken) in looks {
            load.hear_cpu(Duration::from_millis(*taken), vcpus, begun + secs(*at));
        }
        load
    }

    #[test]
    fn a_share_is_of_its_own_processors_and_without_what_the_vmm_needs() {
        assert_eq!(after(&[(0, 0)], 1).cpu_percent(), None, "one look says nothing");
        assert_eq!(after(&[(0, 0), (10, 60)], 1).cpu_percent(), Some(0), "an idle guest under emulation");
        assert_eq!(after(&[(0, 0), (10, 5_100)], 1).cpu_percent(), Some(50));
        assert_eq!(after(&[(0, 0), (10, 5_100)], 4).cpu_percent(), Some(13), "a quarter of it, rounded up");
    }

    #[test]
    fn the_average_forgets_a_burst_within_a_minute_or_so_and_notices_work_at_once() {
        let mut looks = vec![(0, 0), (10, 3_100)];
        assert_eq!(after(&looks, 1).cpu_percent(), Some(30));
        looks.extend((2..=6).map(|ten| (ten * 10, 3_100 + (ten - 1) * 100)));
        assert!(after(&looks, 1).cpu_percent() < Some(5), "{:?}", after(&looks, 1));
        looks.push((70, looks[6].1 + 5_100));
        assert!(after(&looks, 1).cpu_percent() > Some(15), "{:?}", after(&looks, 1));
    }

    #[test]
    fn counters_that_began_anew_say_nothing() {
        assert_eq!(after(&[(0, 9_000), (10, 10)], 1).cpu_percent(), None, "another process");
        assert_eq!(after(&[(5, 0), (5, 10)], 1).cpu_percent(), None, "no time passed");
    }

    #[test]
    fn bytes_count_where_they_are_more_than_chatter() {
        let begun = Instant::now();
        let mut load = HostLoad::default();
        let mut hear = |at, total| {
            load.hear_bytes(total, begun + secs(at));
            load.moves_bytes
        };
        assert!(!hear(0, 1_000_000), "one look says nothing");
        assert!(!hear(30, 1_000_512), "chatter");
        assert!(hear(60, 1_001_025), "one byte more");
        assert!(!hear(360, 1_001_025 + 10 * 512), "ten spans of chatter");
        assert!(!hear(390, 100), "the port was made anew");
        assert!(hear(391, 700), "a short look with a whole exchange in it");
    }
}
