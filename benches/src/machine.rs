//! What the figures were taken on, and what `/proc` says of load, CPU time and memory.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use nix::sched::{CpuSet, sched_getaffinity, sched_setaffinity};
use nix::unistd::{Pid, SysconfVar, sysconf};
use serde::Serialize;

/// More than this much of a core used by others makes figures worthless.
pub const MAX_OUTSIDE_LOAD: f64 = 0.3;

/// The kind of machine, without its name.
#[derive(Debug, Clone, Serialize)]
pub struct Machine {
    pub cpu: String,
    pub cores: usize,
    pub memory_mib: u64,
    pub kernel: String,
}

impl Machine {
    #[must_use]
    pub fn here() -> Self {
        let cpu = field("/proc/cpuinfo", "model name").unwrap_or_else(|| "unknown".to_owned());
        let memory = field("/proc/meminfo", "MemTotal").unwrap_or_default();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        Self {
            cpu,
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: memory.split(' ').next().and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) / 1024,
            kernel: kernel.trim().to_owned(),
        }
    }
}

/// The value of the first `name : value` line.
fn field(path: impl AsRef<Path>, name: &str) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let line = text.lines().find(|line| line.starts_with(name))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

/// Cores kept busy by everyone but this process, over `span`.
pub fn outside_load(span: Duration) -> Result<f64> {
    let begun = Instant::now();
    let before = busy_ticks()? - own_ticks()?;
    std::thread::sleep(span);
    let after = busy_ticks()? - own_ticks()?;
    let ticks_per_second = sysconf(SysconfVar::CLK_TCK)?.unwrap_or(100) as f64;
    Ok((after - before).max(0.0) / ticks_per_second / begun.elapsed().as_secs_f64())
}

/// User, nice, system, irq and softirq ticks of all cores. Not steal: that is the neighbours of the whole machine.
fn busy_ticks() -> Result<f64> {
    let text = fs::read_to_string("/proc/stat")?;
    let line = text.lines().next().context("/proc/stat is empty")?;
    let ticks: Vec<f64> = line.split_whitespace().skip(1).filter_map(|n| n.parse().ok()).collect();
    Ok([0, 1, 2, 5, 6].iter().filter_map(|at| ticks.get(*at)).sum())
}

fn own_ticks() -> Result<f64> {
    let text = fs::read_to_string("/proc/self/stat")?;
    let (_, fields) = text.rsplit_once(") ").context("/proc/self/stat is odd")?;
    Ok(fields.split(' ').skip(11).take(2).filter_map(|n| n.parse::<f64>().ok()).sum())
}

/// CPU time of all living threads of a process. `/proc/PID/schedstat` alone tells only of the first thread.
pub fn cpu_time(pid: u32) -> Result<Duration> {
    threads(pid)?.iter().map(|thread| thread_cpu_time(thread)).sum()
}

/// CPU time of one thread, given its folder under `/proc/PID/task`. A thread that has ended since counts nothing.
pub fn thread_cpu_time(thread: &Path) -> Result<Duration> {
    let Ok(text) = fs::read_to_string(thread.join("schedstat")) else { return Ok(Duration::ZERO) };
    let ns = text.split_whitespace().next().and_then(|ns| ns.parse().ok()).context("schedstat is odd")?;
    Ok(Duration::from_nanos(ns))
}

/// The calling thread's folder under `/proc`.
#[must_use]
pub fn this_thread() -> PathBuf {
    PathBuf::from(format!("/proc/self/task/{}", nix::unistd::gettid()))
}

fn threads(pid: u32) -> Result<Vec<PathBuf>> {
    let dir = format!("/proc/{pid}/task");
    let entries = fs::read_dir(&dir).with_context(|| format!("process {pid} is gone"))?;
    Ok(entries.filter_map(|entry| entry.ok().map(|entry| entry.path())).collect())
}

/// Resident memory of a process, in KiB.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Resident {
    pub all_kib: f64,
    /// What is its own: without the pages of files, which other processes share.
    pub anonymous_kib: f64,
}

pub fn resident(pid: u32) -> Result<Resident> {
    let status = format!("/proc/{pid}/status");
    let kib = |name| -> Result<f64> {
        let text = field(&status, name).with_context(|| format!("{status} has no {name}"))?;
        Ok(text.trim_end_matches(" kB").parse()?)
    };
    Ok(Resident { all_kib: kib("VmRSS")?, anonymous_kib: kib("RssAnon")? })
}

/// The two ends of a measurement get a core each, so that neither's work hides in the other's idle time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Core {
    /// What is measured.
    Server,
    /// What makes it work.
    Load,
}

/// Binds the calling thread, and the threads it will start. Does nothing on a machine with a single core.
pub fn pin_this_thread(core: Core) -> Result<()> {
    pin(Pid::from_raw(0), core)
}

/// Binds every thread of a process.
pub fn pin_process(pid: u32, core: Core) -> Result<()> {
    for thread in threads(pid)? {
        let id = thread
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok())
            .context("a thread has a number")?;
        pin(Pid::from_raw(id), core)?;
    }
    Ok(())
}

fn pin(thread: Pid, core: Core) -> Result<()> {
    // The first process's mask is the machine's: ours may already be narrowed.
    let allowed = sched_getaffinity(Pid::from_raw(1)).or_else(|_| sched_getaffinity(Pid::from_raw(0)))?;
    let cores: Vec<usize> =
        (0..CpuSet::count()).filter(|core| allowed.is_set(*core).unwrap_or(false)).collect();
    if let [first, .., last] = cores[..] {
        let mut set = CpuSet::new();
        set.set(if core == Core::Server { first } else { last })?;
        sched_setaffinity(thread, &set)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_process_has_memory_and_has_used_cpu() {
        let me = std::process::id();
        let memory = resident(me).unwrap();
        assert!(memory.all_kib >= memory.anonymous_kib && memory.anonymous_kib > 0.0);
        assert!(cpu_time(me).unwrap() >= thread_cpu_time(&this_thread()).unwrap());
    }

    #[test]
    fn the_machine_says_what_it_is_but_not_its_name() {
        let machine = Machine::here();
        assert!(machine.cores > 0 && machine.memory_mib > 0 && !machine.kernel.is_empty());
        let name = fs::read_to_string("/proc/sys/kernel/hostname").unwrap();
        assert!(!serde_json::to_string(&machine).unwrap().contains(&format!("\"{}\"", name.trim())));
    }
}
