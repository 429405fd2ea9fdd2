//! The end: the workload and all execs first, then what is on the disks.

use std::time::{Duration, Instant};

use rustix::process::Signal;

use crate::limits;
use crate::state::Exec;
use crate::state::Guest;
use crate::state::Request;
use crate::workload;

/// SIGKILL.
const KILL: u32 = 9;

/// Asks every program to end; kills those that have not when the time is over.
pub(crate) fn end_work(guest: &Guest, grace_seconds: u32) {
    guest.update(|state| state.going = true);
    for_all_execs(guest, Exec::cancel);
    workload::signal(guest, Signal::TERM);
    let deadline = Instant::now() + Duration::from_secs(grace_seconds.into());
    if !wait_for_end(guest, deadline) {
        workload::signal(guest, Signal::KILL);
        for_all_execs(guest, |exec| exec.signal(KILL));
        wait_for_end(guest, Instant::now() + limits::FAREWELL);
    }
}

fn for_all_execs(guest: &Guest, tell: impl Fn(&mut Exec)) {
    guest.update(|state| {
        for request in state.requests.all.values_mut() {
            if let Request::Exec(exec) = request {
                tell(exec);
            }
        }
    });
}

fn wait_for_end(guest: &Guest, deadline: Instant) -> bool {
    let mut state = guest.lock();
    loop {
        let runs = state.workload.group.is_some() || state.requests.execs().any(|exec| exec.exit.is_none());
        let now = Instant::now();
        if !runs || now >= deadline {
            return !runs;
        }
        state = guest.wait(state, Some(deadline - now));
    }
}

/// Lets the last answers leave. Then the caller ends the program or the machine.
pub(crate) fn finish(guest: &Guest) {
    let deadline = Instant::now() + limits::FAREWELL;
    let mut state = guest.lock();
    while !state.link.is_flushed() && Instant::now() < deadline {
        state = guest.wait(state, Some(deadline.saturating_duration_since(Instant::now())));
    }
    drop(state);
    guest.update(|state| state.ended = true);
}
