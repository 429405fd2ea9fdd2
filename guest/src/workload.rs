//! The program that the image is for: started once the guest knows who it is, and not started again when it ends.
//! Whether a guest without its workload is of any use is for the agent to decide.

use std::collections::BTreeMap;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Command, ExitStatus, Stdio};

use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process_group, waitid};

use crate::guest::{Guest, spawn};
use crate::protocol::Readiness;
use crate::settings::{Machine, ReadyWhen};

#[derive(Debug, Default)]
pub(crate) struct Workload {
    /// It was started, or there is none to start.
    pub(crate) started: bool,
    /// Its process group, while it runs.
    pub(crate) group: Option<Pid>,
    /// What was said of it before it was started.
    pub(crate) said: Option<Readiness>,
}

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
        if state.config.as_ref().is_ok_and(|config| config.workload.is_empty()) {
            // The writer learns of it with the answer to whoever asked for this, and writes both at once.
            return state.hear_workload(true);
        }
        state.config.clone()
    };
    let config = match config {
        Ok(config) => config,
        Err(fault) => return guest.set_readiness(Readiness::Failed, fault),
    };
    let Some((program, arguments)) = config.workload.split_first() else { return };
    let mut command = Command::new(program);
    command.args(arguments).process_group(0).current_dir("/").stdin(Stdio::null());
    command.env_clear().envs(environment(guest));
    if guest.0.settings.machine == Machine::Borrowed {
        command.stdout(Stdio::null()).stderr(Stdio::null());
    }
    let mut child = match command.spawn() {
        Ok(child) => child,
        Err(error) => {
            return guest.set_readiness(Readiness::Failed, format!("could not start {program}: {error}"));
        }
    };
    guest.update(|state| {
        state.workload.group = Some(Pid::from_child(&child));
        state.hear_workload(config.ready == ReadyWhen::Start);
    });
    let thread = guest.clone();
    let spawned = spawn("workload", move || {
        // Seen, but not reaped: its number is its own until nobody signals it any more.
        let _ = waitid(WaitId::Pid(Pid::from_child(&child)), WaitIdOptions::EXITED | WaitIdOptions::NOWAIT);
        thread.update(|state| state.workload.group = None);
        let ended = match child.wait() {
            Ok(status) => how_it_ended(status),
            Err(error) => error.to_string(),
        };
        thread.update(|state| {
            state.readiness = Readiness::Failed;
            state.message = format!("the workload ended: {ended}");
        });
    });
    if let Err(error) = spawned {
        guest.set_readiness(Readiness::Failed, format!("could not watch the workload: {error}"));
    }
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
