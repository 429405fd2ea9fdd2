//! Getting ready to be paused and saved, while still running.

use std::fs;
use std::time::{Duration, Instant};

use crate::guest::Guest;
use crate::protocol::{PrepareSleep, Readiness};
use crate::refusal::Refusal;
use crate::settings::Machine;

/// Its appearance tells the workload that sleep comes; its removal, that it is over or was called off.
const SIGN: &str = "prepare-sleep";

/// Waits until the workload is not busy and no exec runs; then everything is on the disk and memory is as small as it
/// gets. When the time is over the rest is done all the same, for the agent may decide to go on.
pub(crate) fn prepare(guest: &Guest, number: u64, request: &PrepareSleep) -> Result<(), Refusal> {
    let sign = guest.0.settings.run_dir.join(SIGN);
    fs::write(&sign, "").map_err(|error| Refusal::io(SIGN, &error))?;
    let deadline = Instant::now() + Duration::from_secs(request.timeout_seconds.into());
    let mut state = guest.lock();
    // A newer request to prepare takes the place of this one.
    state.preparing = Some(number);
    let in_time = loop {
        let busy =
            state.readiness == Readiness::Busy || state.requests.execs().any(|exec| exec.exit.is_none());
        let now = Instant::now();
        if state.preparing != Some(number) {
            return Err(Refusal::new("busy", "called off"));
        }
        if !busy || now >= deadline {
            break !busy;
        }
        state = guest.wait(state, Some(deadline - now));
    };
    state.preparing = None;
    drop(state);
    if guest.0.settings.machine == Machine::Own {
        rustix::fs::sync();
        // Memory that is only a copy of a disk would be saved with the rest.
        let _ =
            fs::write("/proc/sys/vm/drop_caches", droppable(rustix::system::uname().version().to_bytes()));
    }
    if in_time { Ok(()) } else { Err(Refusal::new("timed_out", "there is still work under way")) }
}

/// What this kernel can be told to drop: all, or what is no page of a file.
///
/// Debian's 6.1.192-1 takes for granted that ext4's map of free blocks is in memory: once it was dropped, whoever next
/// needs a block of the data disk dies in the kernel, with the file system's locks in its hands.
fn droppable(kernel_version: &[u8]) -> &'static str {
    const LOSES_EXT4: &[u8] = b"Debian 6.1.192-1 ";
    if kernel_version.windows(LOSES_EXT4.len()).any(|part| part == LOSES_EXT4) { "2" } else { "3" }
}

pub(crate) fn cancel(guest: &Guest) {
    guest.update(|state| state.preparing = None);
    let _ = fs::remove_file(guest.0.settings.run_dir.join(SIGN));
}

#[cfg(test)]
mod tests {
    use super::droppable;

    #[test]
    fn pages_of_files_stay_where_the_kernel_can_not_do_without_them() {
        assert_eq!(droppable(b"#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-1 (2026-11-14)"), "2");
        assert_eq!(droppable(b"#1 SMP PREEMPT_DYNAMIC Debian 6.1.190-1 (2026-10-20)"), "3");
        assert_eq!(droppable(b"#1 SMP PREEMPT_DYNAMIC Debian 6.1.192-10 (2026-11-20)"), "3");
    }
}
