//! Whether the workload is healthy: a check that a thread repeats while there is one to carry out.
//!
//! A guest whose workload was not found healthy yet is not ready; one whose workload failed its check too often in a row
//! has failed, until a check succeeds again or the agent has it started again. Nothing is checked while the guest
//! prepares for sleep: a workload that was told to be still need not answer.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, SocketAddr, TcpStream};
use std::os::unix::process::CommandExt as _;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use crate::protocol::health::Check;
use crate::protocol::workload::State as Fares;
use crate::protocol::{self, Readiness};
use crate::state::{Guest, State, spawn};
use crate::workload;

/// Between the first checks of a run: doubled with each, up to the interval, so that what is up at once is ready at once.
const FIRST_INTERVAL: Duration = Duration::from_millis(250);

/// The most of an answer that is read to find its status.
const STATUS_LINE_BYTES: usize = 512;

/// Checks like this from now on; none: not at all.
pub(crate) fn set(guest: &Guest, config: Option<protocol::Health>) -> Result<(), crate::refusal::Refusal> {
    let begins = guest.update(|state| {
        if state.health.config == config {
            return false;
        }
        // A workload that is ready stays so until another check says otherwise.
        let was_ready = matches!(state.told().0, Readiness::Ready | Readiness::Idle | Readiness::Busy);
        let runs = state.workload.fares == Fares::Running;
        state.health.begin_run();
        state.health.passed = runs && was_ready;
        state.health.config = config;
        state.health.config.is_some() && !std::mem::replace(&mut state.health.watched, true)
    });
    if begins {
        let thread = guest.clone();
        if let Err(error) = spawn("health", move || check_forever(&thread)) {
            guest.update(|state| state.health.watched = false);
            return Err(crate::refusal::Refusal::io("health", &error));
        }
    }
    Ok(())
}

/// One check that is due.
struct Due {
    config: protocol::Health,
    round: u64,
}

fn check_forever(guest: &Guest) {
    let (mut round, mut failures, mut pause) = (0, 0, FIRST_INTERVAL);
    let mut next = Instant::now();
    loop {
        let due = {
            let mut state = guest.lock();
            loop {
                let config = state.health.config.clone().filter(|_| !state.ended);
                let Some(config) = config else {
                    state.health.watched = false;
                    return;
                };
                if state.health.round != round {
                    (round, failures, pause) = (state.health.round, 0, FIRST_INTERVAL);
                    next = Instant::now();
                }
                let is_still = state.going || state.announced || state.preparing.is_some();
                let runs = state.workload.fares == Fares::Running && !is_still;
                let left = next.saturating_duration_since(Instant::now());
                if runs && left.is_zero() {
                    break Due { config, round };
                }
                state = guest.wait(state, runs.then_some(left));
            }
        };
        let outcome = due.config.check.as_ref().map_or(Ok(()), |check| {
            try_once(guest, check, Duration::from_secs(due.config.timeout_seconds.max(1).into()))
        });
        guest.update(|state| conclude(state, &due, outcome, &mut failures));
        let interval = Duration::from_secs(due.config.interval_seconds.max(1).into());
        next = Instant::now() + pause.min(interval);
        pause = if guest.lock().health.passed { interval } else { (pause * 2).min(interval) };
    }
}

fn conclude(state: &mut State, due: &Due, outcome: Result<(), String>, failures: &mut u32) {
    // Of a run that is over, or of one that was told to be still meanwhile.
    if state.health.round != due.round || state.announced || state.workload.fares != Fares::Running {
        return;
    }
    let Err(why) = outcome else {
        (*failures, state.health.passed, state.health.failing) = (0, true, None);
        return;
    };
    let start_period = Duration::from_secs(due.config.start_period_seconds.into());
    let starts = state.workload.started_at.is_some_and(|at| at.elapsed() < start_period);
    if starts && !state.health.passed {
        return;
    }
    *failures += 1;
    if *failures >= due.config.failure_threshold {
        state.health.failing = Some(format!("{failures} checks in a row failed: {why}"));
    }
}

fn try_once(guest: &Guest, check: &Check, timeout: Duration) -> Result<(), String> {
    let deadline = Instant::now() + timeout;
    match check {
        Check::Exec(exec) => run(guest, &exec.command, timeout),
        Check::Http(http) => get(http, deadline),
        Check::Tcp(tcp) => connect(tcp.port, deadline).map(drop),
    }
}

fn run(guest: &Guest, words: &[String], timeout: Duration) -> Result<(), String> {
    let Some((program, arguments)) = words.split_first() else { return Err("no command".to_owned()) };
    let fault = |what: &str, error: &dyn std::fmt::Display| format!("could not {what} {program}: {error}");
    let mut command = Command::new(program);
    command.args(arguments).process_group(0).current_dir("/");
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null());
    command.env_clear().envs(workload::environment(guest));
    let mut child = command.spawn().map_err(|error| fault("start", &error))?;
    let pid = Pid::from_child(&child);
    let ended = pidfd_open(pid, PidfdFlags::empty()).and_then(|handle| {
        let timeout = Timespec::try_from(timeout).ok();
        loop {
            match poll(&mut [PollFd::new(&handle, PollFlags::IN)], timeout.as_ref()) {
                Err(rustix::io::Errno::INTR) => {}
                polled => return polled.map(|ready| ready > 0),
            }
        }
    });
    // What it left behind goes with it; it is not reaped yet, so its number is its own.
    let _ = kill_process_group(pid, Signal::KILL);
    let status = child.wait();
    match (ended, status) {
        (Ok(true), Ok(status)) if status.success() => Ok(()),
        (Ok(true), Ok(status)) => Err(format!("{program}: {status}")),
        (Ok(false), _) => Err(format!("{program} did not end within {} s", timeout.as_secs())),
        (Err(error), _) => Err(fault("wait for", &error)),
        (_, Err(error)) => Err(fault("wait for", &error)),
    }
}

fn connect(port: u32, deadline: Instant) -> Result<TcpStream, String> {
    let port = u16::try_from(port).map_err(|_| format!("{port} is no port"))?;
    let address = SocketAddr::from((Ipv4Addr::LOCALHOST, port));
    let left = deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    TcpStream::connect_timeout(&address, left).map_err(|error| format!("port {port}: {error}"))
}

/// Asks for the path, and takes any status from 200 to 399 for a good answer.
fn get(http: &protocol::HttpCheck, deadline: Instant) -> Result<(), String> {
    let protocol::HttpCheck { port, path } = http;
    let fault = |error: &dyn std::fmt::Display| format!("GET {path} on port {port}: {error}");
    let mut stream = connect(*port, deadline)?;
    let request = format!(
        "GET {path} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nUser-Agent: mvm-health\r\nConnection: close\r\n\r\n"
    );
    let left = || deadline.saturating_duration_since(Instant::now()).max(Duration::from_millis(1));
    stream.set_write_timeout(Some(left())).map_err(|error| fault(&error))?;
    stream.write_all(request.as_bytes()).map_err(|error| fault(&error))?;
    let mut answer = Vec::new();
    let mut buffer = [0; STATUS_LINE_BYTES];
    while !answer.contains(&b'\n') && answer.len() < STATUS_LINE_BYTES {
        if Instant::now() >= deadline {
            return Err(fault(&"no answer in time"));
        }
        stream.set_read_timeout(Some(left())).map_err(|error| fault(&error))?;
        match stream.read(&mut buffer) {
            Ok(0) => break,
            Ok(length) => answer.extend_from_slice(&buffer[..length]),
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(fault(&error)),
        }
    }
    match status_of(&answer) {
        Some(200..=399) => Ok(()),
        Some(status) => Err(fault(&format!("status {status}"))),
        None => Err(fault(&"no HTTP answer")),
    }
}

/// The status of an answer that begins like this.
fn status_of(answer: &[u8]) -> Option<u16> {
    let line = answer.split(|byte| *byte == b'\n').next()?;
    let mut words = std::str::from_utf8(line).ok()?.split_ascii_whitespace();
    words.next().filter(|version| version.starts_with("HTTP/"))?;
    words.next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_status_of_an_answer_is_found_in_its_first_line_alone() {
        assert_eq!(status_of(b"HTTP/1.1 204 No Content\r\n\r\n"), Some(204));
        assert_eq!(status_of(b"HTTP/1.0 503"), Some(503));
        for bad in
            [&b""[..], b"\n", b"HTTP/1.1\r\n200\r\n", b"SSH-2.0-x\r\n", b"HTTP/1.1 ok\r\n", b"\xff\xfe 200"]
        {
            assert_eq!(status_of(bad), None, "{bad:?}");
        }
    }
}
