//! The program that the image is for: started once the guest knows who it is, and started again when the agent says so.
//! Whether a workload that ended is started again is for the agent to decide.

use std::collections::BTreeMap;
use std::io;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::account::Account;
use crate::exec::check_directory;
use crate::program::{self, HOME, Program};
use crate::protocol::workload::State as Fares;
use crate::protocol::{FailureCode, Readiness, RestartWorkload, WorkloadOverride};
use crate::refusal::Refusal;
use crate::settings::{Machine, ReadyWhen};
use crate::state::{Guest, spawn};
use crate::{limits, readiness};

/// What every program gets.
pub(crate) fn environment(guest: &Guest) -> BTreeMap<String, String> {
    let state = guest.lock();
    program::environment(state.program().as_ref().ok(), &state.env)
}

/// Runs this from now on in place of what the image says.
pub(crate) fn set(guest: &Guest, workload: Option<WorkloadOverride>) {
    guest.lock().workload.instead = workload;
}

/// Starts the workload if the image has one and it was not started before.
pub(crate) fn start(guest: &Guest) {
    let program = {
        let mut state = guest.lock();
        if state.going || std::mem::replace(&mut state.workload.started, true) {
            return;
        }
        // That a file is gone may not have been heard yet.
        state.workload.said = readiness::last_said(&guest.0.settings.run_dir);
        let program = state.program();
        if program.as_ref().is_ok_and(|program| program.words.is_empty()) {
            // The writer gets this together with the answer to the request, and writes both at once.
            return state.hear_workload(true);
        }
        program
    };
    match program {
        Ok(program) => run(guest, &program),
        Err(fault) => guest.update(|state| state.workload_failed(fault)),
    }
}

/// Starts the workload again, after ending it if it still runs.
pub(crate) fn restart(guest: &Guest, request: &RestartWorkload) -> Result<(), Refusal> {
    let _one_at_a_time = guest.0.restart.lock();
    let program = {
        let mut state = guest.lock();
        if state.going {
            return Err(Refusal::new(FailureCode::Busy, "it is shutting down"));
        }
        if state.workload.run > request.run {
            return Ok(());
        }
        let program = state.program().map_err(Refusal::invalid)?;
        if program.words.is_empty() || !state.workload.started {
            return Err(Refusal::invalid("there is no workload that was started"));
        }
        state.workload.restarting = true;
        program
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
    run(guest, &program);
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

fn run(guest: &Guest, program: &Program) {
    let Some((name, arguments)) = program.words.split_first() else { return };
    let spawned = begin(guest, program, name, arguments);
    let begun = guest.update(|state| {
        state.begin_run();
        match spawned {
            Ok(child) => {
                state.workload.group = Some(Pid::from_child(&child));
                state.hear_workload(program.ready == ReadyWhen::Start);
                Some(child)
            }
            Err(why) => {
                state.workload_failed(format!("could not start {name}: {why}"));
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

/// Starts it, or says why it can't be.
fn begin(guest: &Guest, program: &Program, name: &str, arguments: &[String]) -> Result<Child, String> {
    let mut env = environment(guest);
    let mut command = Command::new(name);
    command.args(arguments).process_group(0).current_dir(&program.directory).stdin(Stdio::null());
    if guest.0.settings.machine == Machine::Borrowed {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    // Otherwise it would look as if the program itself were the one that is missing.
    check_directory(&program.directory).map_err(Refusal::into_message)?;
    let account = match &program.user {
        None => return command.env_clear().envs(env).spawn().map_err(|error| error.to_string()),
        Some(user) => Account::find(user, &guest.0.settings.etc)?,
    };
    if !program.env.contains_key(HOME) {
        env.insert(HOME.to_owned(), account.home.clone());
    }
    let failed = |error: io::Error| format!("as user {}: {error}", account.uid);
    let mounts = guest.update(|state| {
        state.workload.account = Some(account.clone());
        state.identity.iter().flat_map(|identity| identity.mounts.clone()).collect::<Vec<_>>()
    });
    // What it is meant to use is root's so far.
    account.may_write(&guest.0.settings.run_dir).map_err(failed)?;
    guest.share_secrets().map_err(failed)?;
    if guest.0.settings.machine == Machine::Own {
        let disks = mounts.iter().filter(|mount| !mount.read_only);
        { disks }.try_for_each(|mount| account.own(Path::new(&mount.path))).map_err(failed)?;
    }
    account.spawn(command.env_clear().envs(env)).map_err(failed)
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
