//! A program in a guest, followed across lost connections.
//!
//! [`Exec::open`] begins one, or attaches to one, through a coordinator. [`Exec::next`] tells what comes of it, and
//! attaches again by itself when the stream breaks: output is asked for from the byte that the caller does not have, input
//! is sent again from the byte that the program has not taken. [`ExecInput`] is the other direction, for another task.
//! Memory is bounded by a window each way, whatever the program writes.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_proto::Problem;
use mvm_proto::guest::WINDOW_BYTES;
use mvm_proto::wire::frames::MAX_TUNNEL_FRAME_BYTES;
use mvm_proto::wire::tunnel::v1::guests_client::GuestsClient;
use mvm_proto::wire::tunnel::v1::{self as wire, Attach, Frame, Input, Open, Opened, Signal, Taken, frame};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, sleep};
use tonic::Streaming;

use crate::channel::Channel;
use crate::error::CallError;

/// How long a stream that broke is tried to be opened again: longer than a coordinator or an agent takes to restart.
pub const RESUME_WITHIN: Duration = Duration::from_secs(60);
const FIRST_WAIT: Duration = Duration::from_millis(100);
const LONGEST_WAIT: Duration = Duration::from_secs(2);

/// The guest hears how much of its output is here this often: a quarter of what it sends without hearing.
const CONFIRM_EVERY_BYTES: u64 = WINDOW_BYTES as u64 / 4;
/// Input in one frame.
const PIECE_BYTES: usize = 32 * 1024;

/// What is asked for again: the coordinator, the node or the guest may be back in a moment.
const PASSING: [&str; 9] = [
    "stream_lost",
    "stopping",
    "tunnel_lost",
    "tunnel_failed",
    "node_not_connected",
    "node_silent",
    "node_busy",
    "guest_unreachable",
    "instance_busy",
];

/// What comes of a program.
#[derive(Debug, Clone, PartialEq)]
pub enum ExecEvent {
    /// It runs; told once.
    Opened(Opened),
    Output {
        stderr: bool,
        data: Bytes,
        /// Bytes before these that are no longer to be had.
        lost: u64,
    },
    /// The stream broke, and is being opened again.
    Resuming,
    /// The last one.
    Exit(wire::Exit),
}

/// Why nothing more comes of it.
#[derive(Debug, thiserror::Error)]
pub enum ExecError {
    #[error(transparent)]
    Call(#[from] CallError),
    /// The coordinator or the node ended the stream.
    #[error("{0}")]
    Ended(Problem),
    #[error("the stream was lost before it was known whether the program had begun")]
    Unknown,
    #[error("the stream was lost, and could not be opened again within {} s", RESUME_WITHIN.as_secs())]
    Lost(#[source] Box<ExecError>),
    #[error("the answer is not one of an exec's")]
    Unexpected,
}

impl ExecError {
    /// What the server says against it.
    #[must_use]
    pub fn problem(&self) -> Option<Problem> {
        match self {
            Self::Call(error) => error.problem(),
            Self::Ended(problem) => Some(problem.clone()),
            Self::Lost(cause) => cause.problem(),
            Self::Unknown | Self::Unexpected => None,
        }
    }

    /// Whether opening the stream again may help.
    fn is_passing(&self) -> bool {
        match self {
            Self::Ended(problem) => PASSING.contains(&problem.code.as_str()),
            Self::Call(error) => {
                error.is_lost()
                    || error.problem().is_some_and(|problem| PASSING.contains(&problem.code.as_str()))
            }
            Self::Unknown | Self::Lost(_) | Self::Unexpected => false,
        }
    }
}

/// A program that is followed.
#[derive(Debug)]
pub struct Exec {
    client: GuestsClient<Channel>,
    /// The header of the first stream.
    open: Open,
    shared: Arc<Shared>,
    stream: Option<Streaming<Frame>>,
    opened: Option<Opened>,
    /// The first byte of output that the caller does not have, and how far the guest knows of it.
    output: u64,
    confirmed: u64,
    /// Since when there is no stream, and how long to wait before the next try.
    broken: Option<(Instant, Duration)>,
}

/// Sends input and signals to a program. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ExecInput {
    shared: Arc<Shared>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    room: Notify,
}

#[derive(Debug, Default)]
struct State {
    /// Of the stream that is open now.
    frames: Option<mpsc::UnboundedSender<Frame>>,
    /// Input that the program has not taken, as far as is known.
    untaken: VecDeque<Input>,
    /// How much was sent, and how much of it taken.
    sent: u64,
    taken: u64,
    /// The program has ended, or will not be heard of again.
    over: bool,
}

impl State {
    /// What it is sent to is gone: it is sent again by the next stream, or it is of no use any more.
    fn send(&self, body: frame::Body) {
        if let Some(frames) = &self.frames {
            let _ = frames.send(Frame { body: Some(body) });
        }
    }

    fn take(&mut self, bytes: u64) {
        self.taken = self.taken.max(bytes.min(self.sent));
        let taken = self.taken;
        // The end of the input has no bytes to be taken: it stays.
        self.untaken.retain(|piece| piece.last || piece.offset + piece.data.len() as u64 > taken);
    }
}

impl Exec {
    /// Begins what `open` asks for. An `exec` gets an id of this side's choice, so that asking again begins nothing twice.
    pub async fn open(channel: Channel, mut open: Open) -> Result<Self, ExecError> {
        if let Some(exec) = &mut open.exec
            && exec.exec_id.is_empty()
        {
            exec.exec_id = format!("x-{:016x}", fastrand::u64(1..));
        }
        let (output, input) =
            open.attach.as_ref().map_or((0, 0), |attach| (attach.output_from, attach.input_from));
        let client = GuestsClient::new(channel)
            .max_decoding_message_size(MAX_TUNNEL_FRAME_BYTES)
            .max_encoding_message_size(MAX_TUNNEL_FRAME_BYTES);
        let state = State { sent: input, taken: input, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), room: Notify::new() });
        let mut exec = Self {
            client,
            open,
            shared,
            stream: None,
            opened: None,
            output,
            confirmed: output,
            broken: None,
        };
        exec.connect().await?;
        Ok(exec)
    }

    #[must_use]
    pub fn input(&self) -> ExecInput {
        ExecInput { shared: Arc::clone(&self.shared) }
    }

    /// The program's id, by which others attach to it; empty until it is known.
    #[must_use]
    pub fn id(&self) -> &str {
        match (&self.opened, &self.open.exec, &self.open.attach) {
            (Some(opened), ..) => &opened.exec_id,
            (None, Some(exec), _) => &exec.exec_id,
            (None, None, Some(attach)) => &attach.exec_id,
            (None, None, None) => "",
        }
    }

    /// Where it runs, once that is known.
    #[must_use]
    pub fn opened(&self) -> Option<&Opened> {
        self.opened.as_ref()
    }

    /// The first byte of output that was not given out by [`Exec::next`].
    #[must_use]
    pub fn output_from(&self) -> u64 {
        self.output
    }

    /// What comes next. With this call the caller says that it has what the last one gave. Dropping the future loses nothing.
    pub async fn next(&mut self) -> Result<ExecEvent, ExecError> {
        if self.output - self.confirmed >= CONFIRM_EVERY_BYTES {
            self.confirmed = self.output;
            self.shared.state.lock().send(frame::Body::Taken(Taken { bytes: self.output }));
        }
        loop {
            if self.stream.is_none() {
                self.resume().await?;
            }
            let Some(stream) = &mut self.stream else { continue };
            let broken = match stream.message().await {
                Ok(Some(Frame { body: Some(body) })) => match self.hear(body)? {
                    Heard::Event(event) => return Ok(event),
                    Heard::Nothing => continue,
                    Heard::Broken(error) => error,
                },
                // Of a kind that a newer peer knows.
                Ok(Some(Frame { body: None })) => continue,
                Ok(None) => CallError::from(tonic::Status::unavailable("the stream ended")).into(),
                Err(status) => CallError::from(status).into(),
            };
            self.break_off(broken)?;
            return Ok(ExecEvent::Resuming);
        }
    }

    fn hear(&mut self, body: frame::Body) -> Result<Heard, ExecError> {
        let event = match body {
            frame::Body::Opened(opened) => {
                self.broken = None;
                let is_first = self.opened.is_none();
                self.opened = Some(opened.clone());
                return Ok(if is_first { Heard::Event(ExecEvent::Opened(opened)) } else { Heard::Nothing });
            }
            frame::Body::Output(wire::Output { stderr, mut data, offset, lost }) => {
                let end = offset.saturating_add(data.len() as u64);
                // What is known already was under way when an earlier stream broke.
                let known = usize::try_from(self.output.saturating_sub(offset)).unwrap_or(usize::MAX);
                let data = data.split_off(known.min(data.len()));
                self.output = self.output.max(end);
                if data.is_empty() && lost == 0 {
                    return Ok(Heard::Nothing);
                }
                ExecEvent::Output { stderr, data, lost }
            }
            frame::Body::Taken(Taken { bytes }) => {
                self.shared.state.lock().take(bytes);
                self.shared.room.notify_waiters();
                return Ok(Heard::Nothing);
            }
            frame::Body::Exit(exit) => {
                self.end();
                ExecEvent::Exit(exit)
            }
            frame::Body::Ended(ended) => {
                let problem = serde_json::from_slice(&ended.problem).map_err(|_| ExecError::Unexpected)?;
                return Ok(Heard::Broken(ExecError::Ended(problem)));
            }
            _ => return Err(ExecError::Unexpected),
        };
        Ok(Heard::Event(event))
    }

    /// The stream is gone; an error where opening it again would not help.
    fn break_off(&mut self, error: ExecError) -> Result<(), ExecError> {
        self.stream = None;
        self.shared.state.lock().frames = None;
        if !error.is_passing() {
            self.end();
            return Err(error);
        }
        // Of a pool another instance may be chosen the next time, and the program run twice.
        if self.opened.is_none() && self.open.instance_id.is_empty() {
            self.end();
            return Err(ExecError::Unknown);
        }
        self.broken.get_or_insert((Instant::now(), FIRST_WAIT));
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), ExecError> {
        loop {
            if let Some((_, wait)) = self.broken {
                sleep(wait).await;
            }
            let Err(error) = self.connect().await else { return Ok(()) };
            let Some((since, wait)) = &mut self.broken else { return Err(error) };
            *wait = wait.saturating_mul(2).min(LONGEST_WAIT);
            if !error.is_passing() {
                self.end();
                return Err(error);
            }
            if since.elapsed() >= RESUME_WITHIN {
                self.end();
                return Err(ExecError::Lost(Box::new(error)));
            }
        }
    }

    /// Opens a stream: the first, or one that goes on with what runs.
    async fn connect(&mut self) -> Result<(), ExecError> {
        let (frames, outgoing) = mpsc::unbounded_channel();
        {
            let mut state = self.shared.state.lock();
            let open = self.header(state.taken);
            state.frames = Some(frames);
            state.send(frame::Body::Open(open));
            let again: Vec<_> = state.untaken.iter().cloned().collect();
            again.into_iter().for_each(|piece| state.send(frame::Body::Input(piece)));
            self.confirmed = self.output;
        }
        let outgoing = futures::stream::unfold(outgoing, |mut outgoing| async move {
            let frame = outgoing.recv().await?;
            Some((frame, outgoing))
        });
        let opened = self.client.open(outgoing).await.map_err(CallError::from);
        self.stream = Some(opened.inspect_err(|_| self.shared.state.lock().frames = None)?.into_inner());
        Ok(())
    }

    fn header(&self, taken: u64) -> Open {
        let Some(opened) = &self.opened else { return self.open.clone() };
        let exec_id = opened.exec_id.clone();
        Open {
            kind: "attach".to_owned(),
            tenant_id: opened.tenant_id.clone(),
            pool_id: opened.pool_id.clone(),
            instance_id: opened.instance_id.clone(),
            node_id: opened.node_id.clone(),
            exec: None,
            attach: Some(Attach { exec_id, output_from: self.output, input_from: taken }),
            ..self.open.clone()
        }
    }

    fn end(&mut self) {
        self.stream = None;
        let mut state = self.shared.state.lock();
        state.over = true;
        state.frames = None;
        state.untaken.clear();
        drop(state);
        self.shared.room.notify_waiters();
    }
}

impl Drop for Exec {
    fn drop(&mut self) {
        self.end();
    }
}

enum Heard {
    Event(ExecEvent),
    Nothing,
    Broken(ExecError),
}

impl ExecInput {
    /// Sends input; waits while the program takes none. False once the program has ended.
    pub async fn write(&self, mut data: Bytes) -> bool {
        while !data.is_empty() {
            let piece = data.split_to(data.len().min(PIECE_BYTES));
            if !self.send(piece, false).await {
                return false;
            }
        }
        true
    }

    /// There is no more input.
    pub async fn close(&self) -> bool {
        self.send(Bytes::new(), true).await
    }

    async fn send(&self, data: Bytes, last: bool) -> bool {
        loop {
            let room = self.shared.room.notified();
            tokio::pin!(room);
            // Registered before looking, so that room made in between is not missed.
            room.as_mut().enable();
            {
                let mut state = self.shared.state.lock();
                if state.over {
                    return false;
                }
                if state.sent - state.taken + data.len() as u64 <= WINDOW_BYTES as u64 {
                    let piece = Input { offset: state.sent, data, last };
                    state.sent += piece.data.len() as u64;
                    state.untaken.push_back(piece.clone());
                    state.send(frame::Body::Input(piece));
                    return true;
                }
            }
            room.await;
        }
    }

    /// Sends a signal to the whole process group; 0 ends the program: SIGTERM, then SIGKILL.
    pub fn signal(&self, number: u32) {
        self.shared.state.lock().send(frame::Body::Signal(Signal { number }));
    }

    /// The terminal has this size from now on.
    pub fn resize(&self, rows: u32, cols: u32) {
        self.shared.state.lock().send(frame::Body::Resize(wire::Resize { rows, cols }));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn input_is_kept_until_it_is_taken_and_its_end_for_good() {
        let mut state = State::default();
        for (offset, length, last) in [(0, 10, false), (10, 10, false), (20, 0, true)] {
            state.sent += length as u64;
            state.untaken.push_back(Input { offset, data: vec![0; length].into(), last });
        }
        let offsets = |state: &State| state.untaken.iter().map(|piece| piece.offset).collect::<Vec<_>>();
        state.take(9);
        assert_eq!(offsets(&state), [0, 10, 20]);
        state.take(10);
        assert_eq!(offsets(&state), [10, 20]);
        state.take(u64::MAX);
        assert_eq!((offsets(&state), state.taken), (vec![20], 20), "a guest takes no more than it was sent");
    }

    #[test]
    fn only_what_may_pass_is_asked_again() {
        let ended = |code: &str| ExecError::Ended(Problem::new(503, code, "told", "do this"));
        assert!(PASSING.iter().all(|code| ended(code).is_passing()));
        for code in ["asleep", "replaced", "exec_unknown", "forbidden", "caller_streams_full"] {
            assert!(!ended(code).is_passing(), "{code}");
        }
        assert!(!ExecError::Unknown.is_passing() && !ExecError::Unexpected.is_passing());
    }
}
