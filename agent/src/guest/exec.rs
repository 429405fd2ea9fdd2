//! Programs run in a guest.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use mvm_proto::InstanceId;
use mvm_proto::guest::exec::User;
use mvm_proto::guest::{
    CHUNK_BYTES, Exec, Exit, FEATURE_EXEC_USER, FEATURE_PTY, Input, Resize, Signal, Terminal, Window,
    host_frame,
};
use tokio::time::Instant;

use super::call::{Call, Event};
use super::error::LinkError;
use super::{ANSWER_WITHIN, GuestLinks};

/// The guest hears how far its output was read this often: not for every piece, which may be empty.
pub(super) const WINDOW_STEP_BYTES: u64 = 16 * 1024;

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
}

/// A user of the guest's `/etc/passwd`, with its groups and its home.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ExecUser {
    Id(u32),
    Name(String),
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
        /// Bytes before these that the guest no longer had.
        lost: u64,
    },
    /// The last one.
    Exit { code: i32, signal: u32, timed_out: bool, cancelled: bool },
}

/// A program that runs. Dropped before its exit, it is killed.
#[derive(Debug)]
pub struct ExecHandle {
    call: Call,
    input: AtomicU64,
    told: AtomicU64,
}

impl GuestLinks {
    pub async fn exec(&self, instance: &InstanceId, request: ExecRequest) -> Result<ExecHandle, LinkError> {
        let needs = if request.stdin { 2 } else { 1 };
        self.check_features(instance, &request).await?;
        let seconds = request.timeout.map_or(0, |timeout| timeout.as_secs().max(1));
        let exec = Exec {
            command: request.command,
            env: request.env,
            directory: request.directory,
            timeout_seconds: u32::try_from(seconds).unwrap_or(u32::MAX),
            stdin: request.stdin,
            uid: request.uid,
            gid: request.gid,
            user: request.user.map(|user| match user {
                ExecUser::Id(id) => User::UserId(id),
                ExecUser::Name(name) => User::UserName(name),
            }),
            terminal: request.terminal.map(|terminal| {
                let ExecTerminal { rows, columns, term } = terminal;
                Terminal { rows, columns, term }
            }),
            ..Exec::default()
        };
        let call = self.begin(instance, "a program with input", needs, host_frame::Body::Exec(exec)).await?;
        Ok(ExecHandle { call, input: AtomicU64::new(0), told: AtomicU64::new(0) })
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

impl ExecHandle {
    /// The next event; after the exit, or an error, there is none. Dropping the future loses nothing.
    pub async fn next(&self) -> Result<ExecEvent, LinkError> {
        loop {
            match self.call.next().await {
                Event::Accepted => return Ok(ExecEvent::Accepted),
                Event::Output(output) => {
                    self.tell_read(output.offset.saturating_add(output.data.len() as u64));
                    let (stderr, data, lost) = (output.stderr, output.data, output.lost);
                    return Ok(ExecEvent::Output { stderr, data, lost });
                }
                Event::Exit(Exit { code, signal, timed_out, cancelled }) => {
                    return Ok(ExecEvent::Exit { code, signal, timed_out, cancelled });
                }
                Event::Again => {}
                Event::Broken(error) => return Err(error),
                _ => return Err(LinkError::Unexpected),
            }
        }
    }

    fn tell_read(&self, read: u64) {
        let told = self.told.load(Ordering::Relaxed);
        if self.call.version() >= 2 && read.saturating_sub(told) >= WINDOW_STEP_BYTES {
            self.told.store(read, Ordering::Relaxed);
            // A link that is down hears it from where the exec goes on.
            let _ = self.call.send(&host_frame::Body::Window(Window { bytes: read }));
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
