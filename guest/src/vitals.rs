//! The figures of a heartbeat, from the kernel's text files.

use std::fs;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::protocol::{Heartbeat, Readiness};

/// A tick of `/proc/stat`: Linux shows hundredths of a second to programs, whatever it counts in.
const TICK_MS: u64 = 10;

static SEQUENCE: AtomicU64 = AtomicU64::new(1);

pub(crate) fn heartbeat(readiness: Readiness, open_work: usize) -> Heartbeat {
    let read = |path| fs::read_to_string(path).unwrap_or_default();
    let memory = read("/proc/meminfo");
    Heartbeat {
        uptime_ms: thousandths(&read("/proc/uptime")),
        load_milli: u32::try_from(thousandths(&read("/proc/loadavg"))).unwrap_or(u32::MAX),
        mem_total_kib: kib(&memory, "MemTotal:"),
        mem_available_kib: kib(&memory, "MemAvailable:"),
        open_work: u32::try_from(open_work).unwrap_or(u32::MAX),
        sequence: SEQUENCE.fetch_add(1, Ordering::Relaxed),
        cpu_busy_ms: busy_ticks(&read("/proc/stat")) * TICK_MS,
        readiness: readiness.into(),
    }
}

/// The first word, `12.34`, as thousandths.
fn thousandths(text: &str) -> u64 {
    let word = text.split_whitespace().next().unwrap_or_default();
    let (whole, part) = word.split_once('.').unwrap_or((word, ""));
    let part: String = part.chars().chain("000".chars()).take(3).collect();
    whole.parse::<u64>().unwrap_or(0) * 1000 + part.parse::<u64>().unwrap_or(0)
}

fn kib(text: &str, name: &str) -> u64 {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|line| line.split_whitespace().next()).and_then(|word| word.parse().ok()).unwrap_or(0)
}

/// user, nice, system, (idle, iowait,) irq, softirq, steal: all that is not waiting.
fn busy_ticks(text: &str) -> u64 {
    let line = text.lines().next().unwrap_or_default();
    let ticks = line.split_whitespace().skip(1).map(|word| word.parse::<u64>().unwrap_or(0));
    ticks.enumerate().filter(|(at, _)| !matches!(at, 3 | 4) && *at < 8).map(|(_, ticks)| ticks).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_are_read_as_the_kernel_writes_them() {
        assert_eq!(thousandths("12.34 56.78\n"), 12_340);
        assert_eq!(thousandths(""), 0);
        assert_eq!(kib("MemTotal:   1234 kB\nMemAvailable: 56 kB\n", "MemAvailable:"), 56);
        assert_eq!(busy_ticks("cpu  1 2 3 1000 1000 4 5 6 0 0\ncpu0 9\n"), 21);
    }
}
