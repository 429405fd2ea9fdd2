//! Programs run in a guest.
//!
//! A program belongs to its number, not to the handle that began it: [`GuestLinks::exec_under`] and [`GuestLinks::attach`]
//! go on with one that runs, also when an earlier agent began it. The output that such a handle reads is kept by the
//! guest until it is confirmed, so that the one that attaches next misses nothing.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mvm_proto::InstanceId;
use mvm_proto::guest::exec::User;
use mvm_proto::guest::{
    CHUNK_BYTES, Detach, Exec, Exit, FEATURE_DETACH, FEATURE_EXEC_USER, FEATURE_PTY, Input, Resize, Signal,
    Terminal, Window, host_frame,
};
use tokio::time::Instant;

use super::call::{Call, Event, Work};
use super::error::LinkError;
use super::{ANSWER_WITHIN, GuestLinks};

/// The guest hears how far its output was read this often: not for every piece, which may be empty.
pub(super) const WINDOW_STEP_BYTES: u64 = 16 * 1024;

/// The longest that a program may be allowed to run.
const MAX_TIMEOUT: Duration = Duration::from_secs(7 * 86_400);

/// What to run.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecRequest {
    /// The program and its arguments; no shell.
    pub command: Vec<String>,
    pub env: BTreeMap<String, String>,
    /// Empty: `/`.
    pub directory: String,
    /// Absent: it may run for ever.
    pub timeout: Option<Duration>,
    /// Input follows.
    pub stdin: bool,
    /// A user of the guest's; absent: `uid` and `gid`.
    pub user: Option<ExecUser>,
    /// Absent: pipes.
    pub terminal: Option<ExecTerminal>,
    pub uid: u32,
    pub gid: u32,
    /// Kept by the guest for those that attach later; 0: its default.
    pub max_output_bytes: u64,
}

/// A user of the guest's `/etc/passwd`, with its groups and its home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecUser {
    Id(u32),
    Name(String),
}

impl From<&str> for ExecUser {
    fn from(user: &str) -> Self {
        user.parse().map_or_else(|_| Self::Name(user.to_owned()), Self::Id)
    }
}

impl ExecRequest {
    /// What is wrong with it, whoever asks.
    pub(crate) fn check(&self) -> Result<(), String> {
        if self.command.first().is_none_or(String::is_empty) {
            return Err("`command` must name a program".to_owned());
        }
        let longest = MAX_TIMEOUT.as_secs();
        if self.timeout.is_some_and(|timeout| !(1..=longest).contains(&timeout.as_secs())) {
            return Err(format!("`timeout_seconds` must be 1..={longest}"));
        }
        Ok(())
    }
}

/// A terminal of this size and kind; 0 and empty: as is usual.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ExecTerminal {
    pub rows: u32,
    pub columns: u32,
    pub term: String,
}

/// What comes of it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecEvent {
    /// The guest has it, and carries it out even if the link breaks now.
    Accepted,
    Output {
        stderr: bool,
        data: Vec<u8>,
        /// Of these bytes in all output.
        offset: u64,
        /// Bytes before these that the guest no longer had.
        lost: u64,
    },
    /// So much of the input has been taken by the program.
    Taken(u64),
    /// The last one.
    Exit { code: i32, signal: u32, timed_out: bool, cancelled: bool },
}

/// A program that runs. Dropped before its exit, it is killed, unless it was begun under a number of its caller's choice.
#[derive(Debug)]
pub struct ExecHandle {
    call: Call,
    input: AtomicU64,
    told: AtomicU64,
    /// Output is confirmed to the guest as it is read here, not by the caller.
    confirms: bool,
}

/// Where one that attaches goes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct GoOn {
    /// The first byte of output that it does not have.
    pub output_from: u64,
    /// The first byte of input that the program may not have; absent: what came before is not known, and the first
    /// [`ExecEvent::Taken`] says it.
    pub input_from: Option<u64>,
}

impl GuestLinks {
    pub async fn exec(&self, instance: &InstanceId, request: ExecRequest) -> Result<ExecHandle, LinkError> {
        let needs = if request.stdin { 2 } else { 1 };
        self.check_features(instance, &request).await?;
        let body = host_frame::Body::Exec(message(request));
        let call = self.begin(instance, "a program with input", needs, body).await?;
        Ok(ExecHandle { call, input: AtomicU64::new(0), told: AtomicU64::new(0), confirms: true })
    }

    /// The same under a number of the caller's choice; one that runs under it already is gone on with.
    pub(crate) async fn exec_under(
        &self,
        instance: &InstanceId,
        number: u64,
        request: ExecRequest,
    ) -> Result<ExecHandle, LinkError> {
        self.check_features(instance, &request).await?;
        self.begin_exec(instance, number, message(request), 0).await
    }

    /// Follows a program that was begun under this number, and begins none.
    pub(crate) async fn attach(
        &self,
        instance: &InstanceId,
        number: u64,
        from: GoOn,
    ) -> Result<ExecHandle, LinkError> {
        let tell_input = from.input_from.is_none();
        if tell_input {
            let view = self.greeted(instance, Instant::now() + ANSWER_WITHIN).await?;
            if !view.can_let_go {
                return Err(LinkError::Lacks(FEATURE_DETACH));
            }
        }
        // A guest that does not know the number finds no command to run.
        let exec = Exec { output_from: from.output_from, stdin: true, tell_input, ..Exec::default() };
        self.begin_exec(instance, number, exec, from.input_from.unwrap_or(0)).await
    }

    async fn begin_exec(
        &self,
        instance: &InstanceId,
        number: u64,
        exec: Exec,
        input_from: u64,
    ) -> Result<ExecHandle, LinkError> {
        let (told, input) = (AtomicU64::new(exec.output_from), AtomicU64::new(input_from));
        let link = self.connected(instance, "a program that can be attached to", 2).await?;
        let call = link.begin_exec(exec, number, input_from)?;
        call.leave_when_dropped(true);
        Ok(ExecHandle { call, input, told, confirms: false })
    }

    /// An older guest would do something else: run it without a terminal, or as root.
    async fn check_features(&self, instance: &InstanceId, request: &ExecRequest) -> Result<(), LinkError> {
        if request.terminal.is_none() && request.user.is_none() {
            return Ok(());
        }
        let link = self.link(instance)?;
        let view = self.until(&link, Instant::now() + ANSWER_WITHIN, |view| view.connected).await?;
        match request {
            ExecRequest { terminal: Some(_), .. } if !view.has_terminals => {
                Err(LinkError::Lacks(FEATURE_PTY))
            }
            ExecRequest { user: Some(_), .. } if !view.has_users => Err(LinkError::Lacks(FEATURE_EXEC_USER)),
            _ => Ok(()),
        }
    }
}

fn message(request: ExecRequest) -> Exec {
    let seconds = request.timeout.map_or(0, |timeout| timeout.as_secs().max(1));
    Exec {
        command: request.command,
        env: request.env,
        directory: request.directory,
        timeout_seconds: u32::try_from(seconds).unwrap_or(u32::MAX),
        stdin: request.stdin,
        uid: request.uid,
        gid: request.gid,
        max_output_bytes: request.max_output_bytes,
        user: request.user.map(|user| match user {
            ExecUser::Id(id) => User::UserId(id),
            ExecUser::Name(name) => User::UserName(name),
        }),
        terminal: request.terminal.map(|terminal| {
            let ExecTerminal { rows, columns, term } = terminal;
            Terminal { rows, columns, term }
        }),
        ..Exec::default()
    }
}

impl ExecHandle {
    /// The next event; after the exit, or an error, there is none. Dropping the future loses nothing.
    pub async fn next(&self) -> Result<ExecEvent, LinkError> {
        loop {
            match self.call.next().await {
                Event::Accepted => return Ok(ExecEvent::Accepted),
                Event::Output(output) => {
                    if self.confirms {
                        self.confirm(output.offset.saturating_add(output.data.len() as u64));
                    }
                    let (stderr, data, offset, lost) =
                        (output.stderr, output.data, output.offset, output.lost);
                    return Ok(ExecEvent::Output { stderr, data, offset, lost });
                }
                Event::Taken(bytes) => return Ok(ExecEvent::Taken(bytes)),
                Event::Exit(Exit { code, signal, timed_out, cancelled }) => {
                    // From here on nothing is left to attach to but the end.
                    self.call.leave_when_dropped(false);
                    return Ok(ExecEvent::Exit { code, signal, timed_out, cancelled });
                }
                Event::Again => {}
                Event::Broken(error) => {
                    // What the guest refused, it need not remember; a call that was replaced has nothing to forget.
                    self.call.leave_when_dropped(false);
                    return Err(error);
                }
                _ => return Err(LinkError::Unexpected),
            }
        }
    }

    /// Waits while the guest does not read what was sent before: whoever sends many small things without an end calls this
    /// before each, for they are kept until the guest reads them.
    pub(crate) async fn wait_until_read(&self) {
        self.call.wait_until_read().await;
    }

    /// Its number, under which others can attach to it.
    pub(crate) fn number(&self) -> u64 {
        self.call.number()
    }

    /// Dropped from here on, it is killed.
    pub(crate) fn kill_when_dropped(&self) {
        self.call.leave_when_dropped(false);
    }

    /// From here on nothing but its end is heard of it: the guest keeps the newest of its output, and it waits for no reader.
    /// False where the guest can't do that.
    pub(crate) fn let_go(&self) -> bool {
        // A link that is down says it when it stands again.
        self.call.can_let_go() && self.call.send(&host_frame::Body::Detach(Detach {})).is_ok()
    }

    /// Whether the guest counts as working for as long as the program runs.
    pub(crate) fn count_as_work(&self, works: bool) {
        self.call.count_as(if works { Work::Yes } else { Work::Lapsed });
    }

    /// So much of the output is where it belongs: the guest need not keep it.
    pub(crate) fn confirm(&self, read: u64) {
        let told = self.told.load(Ordering::Relaxed);
        if self.call.version() >= 2 && read.saturating_sub(told) >= WINDOW_STEP_BYTES {
            self.told.store(read, Ordering::Relaxed);
            // A link that is down hears it from where the exec goes on.
            let _ = self.call.send(&host_frame::Body::Window(Window { bytes: read, received: 0 }));
        }
    }

    /// Sends input; waits while the guest does not take any.
    pub async fn write(&self, data: &[u8]) -> Result<(), LinkError> {
        for piece in data.chunks(CHUNK_BYTES) {
            let offset = self.input.fetch_add(piece.len() as u64, Ordering::Relaxed);
            let input = Input { data: piece.to_vec(), last: false, offset };
            self.call.send_piece(host_frame::Body::Input(input)).await?;
        }
        Ok(())
    }

    /// Sends a piece of input as its sender numbered it; waits while the guest does not take any.
    pub(crate) async fn write_at(&self, offset: u64, data: &[u8], last: bool) -> Result<(), LinkError> {
        let mut at = offset;
        for piece in data.chunks(CHUNK_BYTES) {
            let input = Input { data: piece.to_vec(), last: false, offset: at };
            self.call.send_piece(host_frame::Body::Input(input)).await?;
            at = at.saturating_add(piece.len() as u64);
        }
        if last {
            let input = Input { data: Vec::new(), last: true, offset: at };
            self.call.send_piece(host_frame::Body::Input(input)).await?;
        }
        Ok(())
    }

    /// There is no more input.
    pub async fn close_input(&self) -> Result<(), LinkError> {
        let offset = self.input.load(Ordering::Relaxed);
        self.call.send_piece(host_frame::Body::Input(Input { data: Vec::new(), last: true, offset })).await
    }

    /// Gives its terminal another size; nothing happens where it has none.
    pub fn resize(&self, rows: u32, columns: u32) -> Result<(), LinkError> {
        self.call.send(&host_frame::Body::Resize(Resize { rows, columns }))
    }

    pub fn signal(&self, number: u32) -> Result<(), LinkError> {
        if self.call.version() == 1 {
            return Err(LinkError::Unsupported { what: "a signal", needs: 2, version: 1 });
        }
        self.call.send(&host_frame::Body::Signal(Signal { number }))
    }
}
