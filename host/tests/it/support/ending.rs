//! Ends what a test started below a directory of its own, however the test ends.

use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

const PATIENCE: Duration = Duration::from_secs(10);

/// Kills every process that works below `dir`, has its root there or was started by a path there, until none is left.
/// To be called by `Drop`, where it must not panic: what stays is told.
#[allow(clippy::print_stderr, reason = "what is left of a test must be told where its output is read")]
pub(crate) fn end_all_below(dir: &Path) {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let left = below(dir);
        if left.is_empty() {
            return;
        }
        if Instant::now() >= deadline {
            return eprintln!("processes of {} are left: {left:?}", dir.display());
        }
        for pid in left {
            let _ = kill(Pid::from_raw(pid), Signal::SIGKILL);
        }
        std::thread::yield_now();
    }
}

/// The processes of the directory but for this one. What ended and was not waited for has neither a place nor arguments.
fn below(dir: &Path) -> Vec<i32> {
    let of = |pid: i32| {
        let proc = Path::new("/proc").join(pid.to_string());
        let place = |link: &str| std::fs::read_link(proc.join(link)).is_ok_and(|path| path.starts_with(dir));
        let arguments = std::fs::read(proc.join("cmdline")).unwrap_or_default();
        let name = dir.as_os_str().as_bytes();
        place("cwd") || place("root") || arguments.windows(name.len()).any(|part| part == name)
    };
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    let pids = entries.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    pids.filter(|pid| u32::try_from(*pid) != Ok(std::process::id()) && of(*pid)).collect()
}
