//! The thread of an exec: its pipes or its terminal, its time, its end.

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::OwnedFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::terminal::{TERM, Terminal};
use crate::account::Account;
use crate::limits;
use crate::program::HOME;
use crate::protocol::exec::User;
use crate::protocol::{self, CHUNK_BYTES, Exit, workload_override};
use crate::refusal::Refusal;
use crate::state::Request;
use crate::state::{Exec, Order};
use crate::state::{Guest, spawn};
use crate::wake::Wake;
use crate::workload;

/// Starts the program and its thread.
pub(super) fn start(guest: &Guest, number: u64, request: &protocol::Exec) -> Result<(), Refusal> {
    let (program, arguments) = request.command.split_first().ok_or_else(|| Refusal::invalid("no command"))?;
    let failed = |error: io::Error| Refusal::io(program, &error);
    let no_terminal = |error: io::Error| Refusal::io("a terminal", &error);
    let account = account(guest, request)?;
    let terminal = request.terminal.as_ref().map(Terminal::open).transpose().map_err(no_terminal)?;
    let mut command = Command::new(program);
    command.args(arguments).env_clear().envs(environment(guest, request, account.as_ref()));
    let directory = if request.directory.is_empty() { "/" } else { request.directory.as_str() };
    check_directory(directory)?;
    command.current_dir(directory);
    match &terminal {
        Some(terminal) => {
            let given = account.as_ref().map_or(Ok(()), |account| terminal.own(account.uid));
            given.and_then(|()| terminal.give_to(&mut command)).map_err(no_terminal)?;
        }
        None => {
            command.process_group(0).stdout(Stdio::piped()).stderr(Stdio::piped());
            command.stdin(if request.stdin { Stdio::piped() } else { Stdio::null() });
        }
    }
    if account.is_none() && (request.uid, request.gid) != (0, 0) {
        command.uid(request.uid).gid(request.gid);
    }
    let wake = Wake::new().map_err(failed)?;
    let spawned = match &account {
        Some(account) => account.spawn(&mut command),
        None => command.spawn(),
    };
    let mut child = spawned.map_err(failed)?;
    // With its copies of the program's end of the terminal.
    drop(command);
    let running = Running::of(guest.clone(), number, &mut child, terminal, wake.clone(), request);
    let running = match running {
        Ok(running) => running,
        Err(error) => {
            let _ = child.kill();
            let _ = child.wait();
            return Err(failed(error));
        }
    };
    guest.update(|state| state.requests.all.insert(number, Request::Exec(Exec::new(request, wake))));
    let group = running.group;
    let spawned = spawn("exec", move || running.follow(child));
    spawned.map(drop).map_err(|error| {
        let _ = kill_process_group(group, Signal::KILL);
        guest.update(|state| state.requests.remove(number));
        failed(error)
    })
}

/// As whom it runs, where that is a user of the guest's.
fn account(guest: &Guest, request: &protocol::Exec) -> Result<Option<Account>, Refusal> {
    let user = match &request.user {
        None => return Ok(None),
        Some(User::UserId(id)) => workload_override::User::Id(*id),
        Some(User::UserName(name)) => workload_override::User::Name(name.clone()),
    };
    Account::find(&user, &guest.0.settings.etc).map(Some).map_err(Refusal::invalid)
}

/// What every program gets, then what its user and its terminal bring, then what the request says.
fn environment(
    guest: &Guest,
    request: &protocol::Exec,
    account: Option<&Account>,
) -> BTreeMap<String, String> {
    let mut env = workload::environment(guest);
    env.extend(account.map(|account| (HOME.to_owned(), account.home.clone())));
    env.extend(request.terminal.as_ref().map(|terminal| {
        let term = if terminal.term.is_empty() { TERM } else { terminal.term.as_str() };
        ("TERM".to_owned(), term.to_owned())
    }));
    env.extend(request.env.clone());
    env
}

/// A program that can't be started in its working directory fails as if it were itself the one that is missing.
pub(crate) fn check_directory(directory: &str) -> Result<(), Refusal> {
    let refuse = |error: io::Error| Refusal::io(&format!("working directory {directory}"), &error);
    let found = std::fs::metadata(directory).map_err(refuse)?;
    if found.is_dir() { Ok(()) } else { Err(refuse(io::ErrorKind::NotADirectory.into())) }
}

struct Running {
    guest: Guest,
    number: u64,
    wake: Wake,
    group: Pid,
    /// Readable when the program has ended. It is reaped last of all, so that its group's number stays its own.
    ended: OwnedFd,
    /// Of a terminal all three are one, and its output is `stdout`.
    terminal: Option<Terminal>,
    stdin: Option<File>,
    stdout: Option<File>,
    stderr: Option<File>,
    /// The last byte of the input so far was no line's end.
    in_a_line: bool,
    deadline: Option<Instant>,
    kill_at: Option<Instant>,
    exit: Exit,
}

/// What the thread does in one round, as the state was when it looked.
struct Round {
    may_read: bool,
    input: Vec<u8>,
    close_input: bool,
}

impl Running {
    fn of(
        guest: Guest,
        number: u64,
        child: &mut Child,
        terminal: Option<Terminal>,
        wake: Wake,
        request: &protocol::Exec,
    ) -> io::Result<Self> {
        let group = Pid::from_child(child);
        let of_pipe = |pipe: OwnedFd| File::from(pipe);
        let (stdin, stdout, stderr) = match &terminal {
            Some(terminal) => {
                let stdin = if request.stdin { Some(terminal.file()?) } else { None };
                (stdin, Some(terminal.file()?), None)
            }
            None => (
                child.stdin.take().map(OwnedFd::from).map(of_pipe),
                child.stdout.take().map(OwnedFd::from).map(of_pipe),
                child.stderr.take().map(OwnedFd::from).map(of_pipe),
            ),
        };
        if let Some(stdin) = &stdin {
            rustix::io::ioctl_fionbio(stdin, true)?;
        }
        let limit = Duration::from_secs(request.timeout_seconds.into());
        let deadline = (!limit.is_zero()).then(|| Instant::now() + limit);
        Ok(Self {
            guest,
            number,
            wake,
            group,
            ended: pidfd_open(group, PidfdFlags::empty())?,
            terminal,
            stdin,
            stdout,
            stderr,
            in_a_line: false,
            deadline,
            kill_at: None,
            exit: Exit::default(),
        })
    }

    fn follow(mut self, mut child: Child) {
        while !self.round(None) {}
        if self.exit.timed_out || self.exit.cancelled {
            self.kill(Signal::KILL);
        }
        // What it wrote before its end is in the pipes; what others write there later is not its output.
        self.stdin = None;
        if let Some(terminal) = &mut self.terminal {
            terminal.program_ended();
        }
        let before = self.end_of_output();
        let mut quiet_until = Instant::now() + limits::OUTPUT_GRACE;
        while self.stdout.is_some() || self.stderr.is_some() {
            let at = self.end_of_output();
            let waits = !self.may_read();
            self.round(Some(quiet_until.saturating_duration_since(Instant::now())));
            let (end, now) = (self.end_of_output(), Instant::now());
            if end != at || waits {
                quiet_until = now + limits::OUTPUT_GRACE;
            }
            if quiet_until <= now || end - before > limits::OUTPUT_AFTER_END_BYTES as u64 {
                break;
            }
        }
        let mut exit = self.exit;
        if let Ok(status) = child.wait() {
            exit.signal = status.signal().and_then(|signal| u32::try_from(signal).ok()).unwrap_or(0);
            exit.code = status.code().unwrap_or(128 + status.signal().unwrap_or(0));
        }
        self.guest.update(|state| {
            if let Some(exec) = state.requests.exec(self.number) {
                exec.exit = Some(exit);
                let forgotten = exec.forgotten;
                state.requests.is_over(self.number);
                if forgotten {
                    state.requests.remove(self.number);
                }
            }
        });
    }

    /// Waits for something to happen and deals with it. Says whether the program has ended.
    fn round(&mut self, grace: Option<Duration>) -> bool {
        let round = self.look();
        let has_input = !round.input.is_empty();
        let ends_input = round.close_input && !has_input && self.stdin.is_some();
        if ends_input && self.terminal.is_none() {
            self.stdin = None;
        }
        if has_input && self.stdin.is_none() {
            // No program reads it: it is taken and dropped, so that the agent does not wait.
            self.took(round.input.len());
            return false;
        }
        let none = PollFlags::empty();
        let reading = if round.may_read { PollFlags::IN } else { none };
        let (mut out, mut err, mut input, mut ended) = (none, none, none, none);
        {
            // Those that are not waited for are left out: a pipe at its end would wake this thread for ever.
            let mut fds = vec![PollFd::new(&self.wake, PollFlags::IN)];
            let mut which: Vec<&mut PollFlags> = Vec::new();
            if grace.is_none() {
                fds.push(PollFd::new(&self.ended, PollFlags::IN));
                which.push(&mut ended);
            }
            if let Some(stdout) = self.stdout.as_ref().filter(|_| round.may_read) {
                fds.push(PollFd::new(stdout, reading));
                which.push(&mut out);
            }
            if let Some(stderr) = self.stderr.as_ref().filter(|_| round.may_read) {
                fds.push(PollFd::new(stderr, reading));
                which.push(&mut err);
            }
            if let Some(stdin) = self.stdin.as_ref().filter(|_| has_input || ends_input) {
                fds.push(PollFd::new(stdin, PollFlags::OUT));
                which.push(&mut input);
            }
            let timeout = grace.filter(|_| round.may_read).or_else(|| self.until_next_deadline());
            let timeout = timeout.and_then(|timeout| Timespec::try_from(timeout).ok());
            let _ = poll(&mut fds, timeout.as_ref());
            for (flags, fd) in which.into_iter().zip(&fds[1..]) {
                *flags = fd.revents();
            }
        }
        self.wake.clear();
        if out != none {
            self.read(false);
        }
        if err != none {
            self.read(true);
        }
        if input != none && has_input {
            self.write(&round.input);
        } else if input != none {
            self.end_input();
        }
        self.keep_time();
        ended != none
    }

    fn look(&mut self) -> Round {
        let (round, orders, resize) = self.guest.update(|state| {
            let kept = state.kept_by_all();
            let Some(exec) = state.requests.exec(self.number) else {
                return (Round { may_read: true, input: Vec::new(), close_input: true }, Vec::new(), None);
            };
            let (front, _) = exec.input.buffer.as_slices();
            let input = front[..front.len().min(CHUNK_BYTES)].to_vec();
            let close_input = exec.input.last && exec.input.buffer.is_empty();
            (
                Round { may_read: exec.has_room(kept), input, close_input },
                exec.orders.drain(..).collect::<Vec<_>>(),
                exec.resize.take(),
            )
        });
        if let (Some(terminal), Some(size)) = (&self.terminal, resize) {
            // A terminal of this guest's own takes any size.
            let _ = terminal.resize(size.rows, size.columns);
        }
        for order in orders {
            match order {
                Order::Signal(number) => {
                    if let Some(signal) = Signal::from_named_raw(number) {
                        self.kill(signal);
                    }
                }
                Order::Cancel => {
                    self.exit.cancelled = true;
                    if self.terminal.is_some() {
                        // A shell that someone types to ignores SIGTERM, and passes a hang-up on to its jobs.
                        self.kill(Signal::HUP);
                        self.kill(Signal::CONT);
                    } else {
                        self.kill(Signal::TERM);
                    }
                    self.kill_at.get_or_insert(Instant::now() + limits::CANCEL_GRACE);
                }
            }
        }
        round
    }

    fn read(&mut self, stderr: bool) {
        let mut buffer = [0; CHUNK_BYTES];
        let outcome = match (stderr, &mut self.stdout, &mut self.stderr) {
            (false, Some(pipe), _) => pipe.read(&mut buffer),
            (true, _, Some(pipe)) => pipe.read(&mut buffer),
            _ => return,
        };
        match outcome {
            Ok(length) if length > 0 => self.guest.update(|state| {
                let kept = state.kept_by_all();
                if let Some(exec) = state.requests.exec(self.number) {
                    // With a connection nothing is dropped that it has not confirmed: then this thread did not read.
                    let keep = exec.keep_bytes(kept);
                    let unconfirmed =
                        exec.attached.as_ref().map(|attached| exec.kept.end() - attached.confirmed);
                    let unconfirmed = usize::try_from(unconfirmed.unwrap_or(0)).unwrap_or(0) + length;
                    exec.kept.add(stderr, &buffer[..length], keep.max(unconfirmed));
                }
            }),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            _ if stderr => self.stderr = None,
            _ => self.stdout = None,
        }
    }

    fn write(&mut self, input: &[u8]) {
        let Some(stdin) = &mut self.stdin else { return };
        let taken = match stdin.write(input) {
            Ok(taken) => taken,
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => 0,
            Err(_) => {
                // It closed its input.
                self.stdin = None;
                input.len()
            }
        };
        if let Some(last) = input[..taken].last() {
            self.in_a_line = *last != b'\n' && *last != b'\r';
        }
        self.took(taken);
    }

    /// Types the end of the input into the terminal.
    fn end_input(&mut self) {
        let (Some(terminal), Some(stdin)) = (&self.terminal, &mut self.stdin) else { return };
        match stdin.write(&terminal.end_of_input(self.in_a_line)) {
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => {}
            _ => self.stdin = None,
        }
    }

    fn took(&self, taken: usize) {
        self.guest.update(|state| {
            if let Some(exec) = state.requests.exec(self.number) {
                exec.input.buffer.drain(..taken);
                exec.input.taken += taken as u64;
                exec.input.tell = exec.attached.is_some();
            }
        });
    }

    fn until_next_deadline(&self) -> Option<Duration> {
        let next = [self.deadline, self.kill_at].into_iter().flatten().min()?;
        Some(next.saturating_duration_since(Instant::now()))
    }

    fn keep_time(&mut self) {
        let now = Instant::now();
        if self.deadline.is_some_and(|deadline| deadline <= now) {
            self.deadline = None;
            self.exit.timed_out = true;
            self.kill(Signal::KILL);
        }
        if self.kill_at.is_some_and(|kill_at| kill_at <= now) {
            self.kill_at = None;
            self.kill(Signal::KILL);
        }
    }

    fn kill(&self, signal: Signal) {
        // The group is gone when every program in it has ended: then there is nothing to do.
        let _ = kill_process_group(self.group, signal);
        // The command that a shell runs for the one at the terminal has a group of its own.
        let foreground = self.terminal.as_ref().and_then(Terminal::foreground);
        if let Some(foreground) = foreground.filter(|foreground| *foreground != self.group) {
            let _ = kill_process_group(foreground, signal);
        }
    }

    fn end_of_output(&self) -> u64 {
        self.guest.lock().requests.exec(self.number).map_or(0, |exec| exec.kept.end())
    }

    fn may_read(&self) -> bool {
        let mut state = self.guest.lock();
        let kept = state.kept_by_all();
        state.requests.exec(self.number).is_none_or(|exec| exec.has_room(kept))
    }
}
