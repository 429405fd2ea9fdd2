//! A program in a guest, followed across lost connections.
//!
//! [`Exec::open`] begins one, or attaches to one, through a coordinator. [`Exec::next`] tells what comes of it, and
//! attaches again by itself when the stream breaks: output is asked for from the byte that the caller does not have, input
//! is sent again from the byte that the program has not taken. [`ExecInput`] is the other direction, for another task.
//! Memory is bounded by a window each way, whatever the program writes.

use std::collections::VecDeque;
use std::sync::Arc;

use bytes::Bytes;
use mvm_proto::guest::WINDOW_BYTES;
use mvm_proto::wire::tunnel::v1::guests_client::GuestsClient;
use mvm_proto::wire::tunnel::v1::{self as wire, Attach, Frame, Input, Open, Opened, Signal, Taken, frame};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc};
use tonic::Streaming;

use crate::channel::Channel;
use crate::streams::{self, Retry, StreamError};

/// The guest hears how much of its output is here this often: a quarter of what it sends without hearing.
const CONFIRM_EVERY_BYTES: u64 = WINDOW_BYTES as u64 / 4;
/// Input in one frame.
const PIECE_BYTES: usize = 32 * 1024;
/// Signals that wait for a stream: as many as a guest lets wait for its program.
const MAX_WAITING_SIGNALS: usize = 16;

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
    retry: Retry,
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
    /// How much was sent, and how much of it taken; not known yet of a program that another caller gave input to.
    sent: u64,
    taken: u64,
    learns: bool,
    /// Signals that no stream has carried, and the newest size of the terminal.
    signals: Vec<u32>,
    size: Option<wire::Resize>,
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
        if std::mem::take(&mut self.learns) {
            (self.sent, self.taken) = (bytes, bytes);
        }
        self.taken = self.taken.max(bytes.min(self.sent));
        let taken = self.taken;
        // The end of the input has no bytes to be taken: it stays.
        self.untaken.retain(|piece| piece.last || piece.offset + piece.data.len() as u64 > taken);
    }
}

impl Exec {
    /// Begins what `open` asks for. An `exec` gets an id of this side's choice, so that asking again begins nothing twice.
    pub async fn open(channel: Channel, mut open: Open) -> Result<Self, StreamError> {
        if let Some(exec) = &mut open.exec
            && exec.exec_id.is_empty()
        {
            exec.exec_id = format!("x-{:016x}", fastrand::u64(1..));
        }
        let (output, input, learns) = open
            .attach
            .as_ref()
            .map_or((0, 0, false), |attach| (attach.output_from, attach.input_from, attach.input_follows));
        let client = streams::guests(channel);
        let state = State { sent: input, taken: input, learns, ..State::default() };
        let shared = Arc::new(Shared { state: Mutex::new(state), room: Notify::new() });
        let mut exec = Self {
            client,
            open,
            shared,
            stream: None,
            opened: None,
            output,
            confirmed: output,
            retry: Retry::default(),
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
    pub async fn next(&mut self) -> Result<ExecEvent, StreamError> {
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
                received => streams::broken(received),
            };
            self.break_off(broken)?;
            return Ok(ExecEvent::Resuming);
        }
    }

    fn hear(&mut self, body: frame::Body) -> Result<Heard, StreamError> {
        let event = match body {
            frame::Body::Opened(opened) => {
                self.retry.is_open();
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
                return Ok(Heard::Broken(StreamError::told(&ended)));
            }
            _ => return Err(StreamError::Unexpected),
        };
        Ok(Heard::Event(event))
    }

    /// The stream is gone; an error where opening it again would not help.
    fn break_off(&mut self, error: StreamError) -> Result<(), StreamError> {
        self.stream = None;
        self.shared.state.lock().frames = None;
        if let Err(error) = self.retry.broke(error) {
            self.end();
            return Err(error);
        }
        // Of a pool another instance may be chosen the next time, and the program run twice.
        if self.opened.is_none() && self.open.instance_id.is_empty() {
            self.end();
            return Err(StreamError::Unknown);
        }
        Ok(())
    }

    async fn resume(&mut self) -> Result<(), StreamError> {
        loop {
            self.retry.wait().await;
            let Err(error) = self.connect().await else { return Ok(()) };
            if let Err(error) = self.retry.broke(error) {
                self.end();
                return Err(error);
            }
        }
    }

    /// Opens a stream: the first, or one that goes on with what runs.
    async fn connect(&mut self) -> Result<(), StreamError> {
        let (frames, outgoing) = mpsc::unbounded_channel();
        {
            let mut state = self.shared.state.lock();
            let open = self.header(&state);
            state.frames = Some(frames);
            state.send(frame::Body::Open(open));
            // What the terminal became meanwhile, and what was to be told to the program.
            if let Some(size) = state.size {
                state.send(frame::Body::Resize(size));
            }
            for number in std::mem::take(&mut state.signals) {
                state.send(frame::Body::Signal(Signal { number }));
            }
            let again: Vec<_> = state.untaken.iter().cloned().collect();
            again.into_iter().for_each(|piece| state.send(frame::Body::Input(piece)));
            self.confirmed = self.output;
        }
        let opened = streams::open(&mut self.client, outgoing).await;
        self.stream = Some(opened.inspect_err(|_| self.shared.state.lock().frames = None)?);
        Ok(())
    }

    fn header(&self, state: &State) -> Open {
        let Some(opened) = &self.opened else { return self.open.clone() };
        let exec_id = opened.exec_id.clone();
        Open {
            kind: "attach".to_owned(),
            tenant_id: opened.tenant_id.clone(),
            pool_id: opened.pool_id.clone(),
            instance_id: opened.instance_id.clone(),
            node_id: opened.node_id.clone(),
            exec: None,
            attach: Some(Attach {
                exec_id,
                output_from: self.output,
                input_from: state.taken,
                input_follows: state.learns,
            }),
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
    Broken(StreamError),
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
                let waiting = state.sent - state.taken + data.len() as u64;
                if !state.learns && waiting <= WINDOW_BYTES as u64 {
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
        let mut state = self.shared.state.lock();
        if state.frames.is_some() {
            state.send(frame::Body::Signal(Signal { number }));
        } else if state.signals.len() < MAX_WAITING_SIGNALS {
            state.signals.push(number);
        }
    }

    /// The terminal has this size from now on.
    pub fn resize(&self, rows: u32, cols: u32) {
        let (mut state, size) = (self.shared.state.lock(), wire::Resize { rows, cols });
        state.size = Some(size);
        state.send(frame::Body::Resize(size));
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
}
