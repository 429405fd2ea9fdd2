//! The program that the image is for: started once the guest knows who it is, and started again when the agent says so.
//! Whether a workload that ended is started again is for the agent to decide.

use std::collections::BTreeMap;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::protocol::workload::State as Fares;
use crate::protocol::{FailureCode, Readiness, RestartWorkload};
use crate::refusal::Refusal;
use crate::settings::{ImageConfig, Machine, ReadyWhen};
use crate::state::{Guest, spawn};
use crate::{limits, readiness};

const PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";

/// What every program gets: the least, then what the image says, then what `reborn` says.
pub(crate) fn environment(guest: &Guest) -> BTreeMap<String, String> {
    let state = guest.lock();
    let least = [("PATH", PATH), ("HOME", "/root"), ("LANG", "C.UTF-8")];
    let mut env: BTreeMap<_, _> = least.map(|(name, value)| (name.to_owned(), value.to_owned())).into();
    if let Ok(config) = &state.config {
        env.extend(config.env.clone());
    }
    env.extend(state.env.clone());
    env
}

/// Starts the workload if the image has one and it was not started before.
pub(crate) fn start(guest: &Guest) {
    let config = {
        let mut state = guest.lock();
        if state.going || std::mem::replace(&mut state.workload.started, true) {
            return;
        }
        // That a file is gone may not have been heard yet.
        state.workload.said = readiness::last_said(&guest.0.settings.run_dir);
        if state.config.as_ref().is_ok_and(|config| config.workload.is_empty()) {
            // The writer gets this together with the answer to the request, and writes both at once.
            return state.hear_workload(true);
        }
        state.config.clone()
    };
    match config {
        Ok(config) => run(guest, &config),
        Err(fault) => guest.update(|state| state.workload_failed(fault)),
    }
}

/// Starts the workload again, after ending it if it still runs.
pub(crate) fn restart(guest: &Guest, request: &RestartWorkload) -> Result<(), Refusal> {
    let _one_at_a_time = guest.0.restart.lock();
    let config = {
        let mut state = guest.lock();
        if state.going {
            return Err(Refusal::new(FailureCode::Busy, "it is shutting down"));
        }
        if state.workload.run > request.run {
            return Ok(());
        }
        let config = state.config.clone().map_err(Refusal::invalid)?;
        if config.workload.is_empty() || !state.workload.started {
            return Err(Refusal::invalid("there is no workload that was started"));
        }
        state.workload.restarting = true;
        config
    };
    end(guest, Duration::from_secs(request.grace_seconds.into()));
    guest.update(|state| {
        state.workload.restarting = false;
        if state.workload.fares == Fares::Running {
            return Err(Refusal::new(FailureCode::TimedOut, "the workload does not end"));
        }
        if state.going {
            state.readiness = Readiness::Failed;
            return Err(Refusal::new(FailureCode::Busy, "it is shutting down"));
        }
        Ok(())
    })?;
    // What the last one said does not count for the next one.
    readiness::forget(&guest.0.settings.run_dir);
    run(guest, &config);
    // It may have said something before it was known to run.
    readiness::look(guest);
    Ok(())
}

/// Asks the workload to end, and kills it when the time is over.
fn end(guest: &Guest, grace: Duration) {
    for (kind, patience) in [(Signal::TERM, grace), (Signal::KILL, limits::KILLED)] {
        signal(guest, kind);
        let deadline = Instant::now() + patience;
        let mut state = guest.lock();
        while state.workload.fares == Fares::Running && Instant::now() < deadline {
            state = guest.wait(state, Some(deadline.saturating_duration_since(Instant::now())));
        }
        if state.workload.fares != Fares::Running {
            return;
        }
    }
}

fn run(guest: &Guest, config: &ImageConfig) {
    let Some((program, arguments)) = config.workload.split_first() else { return };
    let mut command = Command::new(program);
    command.args(arguments).process_group(0).current_dir("/").stdin(Stdio::null());
    command.env_clear().envs(environment(guest));
    if guest.0.settings.machine == Machine::Borrowed {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    let spawned = command.spawn();
    let begun = guest.update(|state| {
        state.begin_run();
        match spawned {
            Ok(child) => {
                state.workload.group = Some(Pid::from_child(&child));
                state.hear_workload(config.ready == ReadyWhen::Start);
                Some(child)
            }
            Err(error) => {
                state.workload_failed(format!("could not start {program}: {error}"));
                None
            }
        }
    });
    let Some(child) = begun else { return };
    let thread = guest.clone();
    if let Err(error) = spawn("workload", move || watch(&thread, child)) {
        guest.update(|state| state.workload_failed(format!("could not watch the workload: {error}")));
    }
}

/// Waits for its end, and says how it ended.
fn watch(guest: &Guest, mut child: Child) {
    // Seen, but not reaped: its number is its own until it can't be signalled any more.
    let ended = waitid(WaitId::Pid(Pid::from_child(&child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
    let restarts = guest.update(|state| {
        state.workload.group = None;
        state.workload.restarting
    });
    // What it left behind would be in the way of the next one. What ended well may have left it on purpose.
    let ended_well = matches!(&ended, Ok(Some(status)) if status.exit_status() == Some(0));
    if restarts || !ended_well {
        let _ = kill_process_group(Pid::from_child(&child), Signal::KILL);
    }
    let (fares, ended) = match child.wait() {
        Ok(status) if status.success() => (Fares::Completed, how_it_ended(status)),
        Ok(status) => (Fares::Failed, how_it_ended(status)),
        Err(error) => (Fares::Failed, error.to_string()),
    };
    guest.update(|state| {
        state.workload.fares = fares;
        if !state.workload.restarting {
            state.readiness = Readiness::Failed;
            state.message = format!("the workload ended: {ended}");
        }
    });
}

fn how_it_ended(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit code {code}"),
        (None, Some(signal)) => format!("signal {signal}"),
        (None, None) => "for no reason known".to_owned(),
    }
}

/// Sends the workload a signal, if it runs.
pub(crate) fn signal(guest: &Guest, signal: Signal) {
    // Under the lock, so that the number is not another's by now.
    let state = guest.lock();
    if let Some(group) = state.workload.group {
        let _ = kill_process_group(group, signal);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Settings;

    #[test]
    fn what_a_file_said_that_is_gone_when_the_workload_starts_does_not_count_though_it_was_not_heard_to_go() {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest::new(Settings::borrowed(folder.path())).unwrap();
        guest.update(|state| state.hear(Readiness::Idle));
        assert_eq!(guest.lock().workload.said, Some(Readiness::Idle));
        start(&guest);
        assert_eq!(guest.lock().readiness, Readiness::Ready);
    }
}
