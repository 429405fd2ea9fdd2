//! The state of a program that runs for the agent, and its output that the agent has not read.
//!
//! An exec belongs to no connection. Its thread reads its pipes into `kept`, from which a connection that asked for it is
//! served. With a connection, output that the agent has not confirmed is never dropped, and the program waits; without one the
//! program continues, and the newest output replaces the oldest. A connection that let go of the output is told the end alone.

use std::collections::VecDeque;

use super::State;
use super::output::Kept;
use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::{self, Accepted, CHUNK_BYTES, Exit, Input, Resize, WINDOW_BYTES, Window};
use crate::wake::Wake;

#[derive(Debug)]
pub(crate) struct Exec {
    pub(crate) kept: Kept,
    /// What was asked to be kept of the output.
    pub(crate) keep_bytes: usize,
    /// The connection that follows it, and how far it is.
    pub(crate) attached: Option<Attached>,
    /// The connection let go of the output, and has yet to hear of the end.
    pub(crate) tells_end: bool,
    pub(crate) exit: Option<Exit>,
    pub(crate) input: Inbound,
    pub(crate) orders: VecDeque<Order>,
    /// The size that its terminal is to have; of several only the newest counts.
    pub(crate) resize: Option<Resize>,
    /// The end will not be asked for.
    pub(crate) forgotten: bool,
    pub(crate) wake: Wake,
}

#[derive(Debug)]
pub(crate) struct Attached {
    /// `accepted` has still to be sent.
    pub(crate) accept: bool,
    /// The next byte to send, and the first that the agent has not confirmed.
    pub(crate) next: u64,
    pub(crate) confirmed: u64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Order {
    Signal(i32),
    Cancel,
}

/// Input that the program has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct Inbound {
    pub(crate) buffer: VecDeque<u8>,
    /// How much came, and how much the program took, in all.
    pub(crate) received: u64,
    pub(crate) taken: u64,
    pub(crate) last: bool,
    /// The agent has still to be told how far this is.
    pub(crate) tell: bool,
}

impl Exec {
    pub(crate) fn new(request: &protocol::Exec, wake: Wake) -> Self {
        let wish = usize::try_from(request.max_output_bytes).unwrap_or(usize::MAX);
        let keep_bytes = match wish {
            0 => limits::KEPT_OUTPUT_BYTES,
            wish => wish.clamp(limits::MIN_KEPT_OUTPUT_BYTES, limits::MAX_KEPT_OUTPUT_BYTES),
        };
        let mut exec = Self {
            kept: Kept::default(),
            keep_bytes,
            attached: None,
            tells_end: false,
            exit: None,
            input: Inbound::default(),
            orders: VecDeque::new(),
            resize: None,
            forgotten: false,
            wake,
        };
        exec.attach(request);
        exec
    }

    pub(crate) fn attach(&mut self, request: &protocol::Exec) {
        let from = request.output_from.min(self.kept.end());
        self.attached = Some(Attached { accept: true, next: from, confirmed: from });
        self.tells_end = false;
        // An agent that knows only what an earlier one sent goes on from here.
        self.input.tell = self.input.received > 0 || request.tell_input;
        self.wake.wake();
    }

    /// The connection wants no more of the output: the program waits for no reader.
    pub(crate) fn let_go(&mut self) {
        self.tells_end |= self.attached.is_some();
        self.detach();
    }

    /// There is no connection any more.
    pub(crate) fn lose_connection(&mut self) {
        self.tells_end = false;
        self.detach();
    }

    fn detach(&mut self) {
        self.attached = None;
        self.input.tell = false;
        self.wake.wake();
    }

    /// Whether it takes up one of the places for execs.
    pub(crate) fn is_open(&self) -> bool {
        self.exit.is_none() || self.attached.is_some()
    }

    /// Whether its thread may read more output, when all execs keep `kept_by_all`.
    pub(crate) fn has_room(&self, kept_by_all: usize) -> bool {
        let keep = self.keep_bytes(kept_by_all) as u64;
        self.attached.as_ref().is_none_or(|attached| self.kept.end() - attached.confirmed < keep)
    }

    pub(crate) fn keep_bytes(&self, kept_by_all: usize) -> usize {
        if kept_by_all > limits::KEPT_OUTPUT_OF_ALL_BYTES {
            limits::MIN_KEPT_OUTPUT_BYTES
        } else {
            self.keep_bytes
        }
    }

    /// The agent has read this much of the output.
    pub(crate) fn acknowledge(&mut self, bytes: u64) {
        if let Some(attached) = &mut self.attached {
            attached.confirmed = attached.confirmed.max(bytes.min(attached.next));
            self.wake.wake();
        }
    }

    /// Takes what is new and fits; the agent is told from where to go on.
    pub(crate) fn take_input(&mut self, input: &Input) {
        let end = input.offset.saturating_add(input.data.len() as u64);
        let to_take = if input.offset <= self.input.received {
            let known = usize::try_from(self.input.received - input.offset).unwrap_or(usize::MAX);
            input.data.get(known..).unwrap_or_default()
        } else {
            &[]
        };
        let room = limits::INBOUND_BYTES - self.input.buffer.len();
        let fits = if self.input.last { 0 } else { to_take.len().min(room) };
        self.input.buffer.extend(&to_take[..fits]);
        self.input.received += fits as u64;
        self.input.last |= input.last && self.input.received == end;
        self.input.tell = true;
        self.wake.wake();
    }

    pub(crate) fn signal(&mut self, number: u32) {
        let order = match i32::try_from(number) {
            Ok(0) => Order::Cancel,
            Ok(number) => Order::Signal(number),
            Err(_) => return,
        };
        if self.orders.len() < limits::MAX_PENDING_SIGNALS {
            self.orders.push_back(order);
        }
        self.wake.wake();
    }

    pub(crate) fn resize(&mut self, size: Resize) {
        self.resize = Some(size);
        self.wake.wake();
    }

    pub(crate) fn cancel(&mut self) {
        self.orders.clear();
        self.signal(0);
    }

    pub(crate) fn cancel_and_forget(&mut self) {
        self.forgotten = true;
        self.cancel();
        self.lose_connection();
    }

    /// What the connection that follows it is told next.
    pub(crate) fn next(&mut self, version: u32) -> Option<Body> {
        let Some(attached) = self.attached.as_mut() else {
            let exit = self.exit.filter(|_| self.tells_end)?;
            self.tells_end = false;
            return Some(Body::Exit(exit));
        };
        if std::mem::take(&mut attached.accept) && version >= 2 {
            return Some(Body::Accepted(Accepted {}));
        }
        if std::mem::take(&mut self.input.tell) && version >= 2 {
            return Some(Body::Window(Window { bytes: self.input.taken, received: self.input.received }));
        }
        let under_way = attached.next - attached.confirmed;
        if attached.next < self.kept.end() && (version < 2 || under_way < WINDOW_BYTES as u64) {
            let output = self.kept.piece(attached.next, CHUNK_BYTES)?;
            attached.next = output.offset + output.data.len() as u64;
            if version < 2 {
                attached.confirmed = attached.next;
                self.wake.wake();
            } else {
                // What was lost needs no confirmation.
                attached.confirmed = attached.confirmed.max(self.kept.start().min(attached.next));
            }
            return Some(Body::Output(output));
        }
        if attached.next < self.kept.end() {
            return None;
        }
        let exit = self.exit?;
        self.attached = None;
        Some(Body::Exit(exit))
    }
}

impl State {
    pub(crate) fn kept_by_all(&self) -> usize {
        self.requests.execs().map(|exec| exec.kept.len()).sum()
    }
}
