//! What is known of a stream between the agent and a port on the guest's loopback.

use std::collections::VecDeque;

use crate::limits;
use crate::protocol::guest_frame::Body;
use crate::protocol::{Accepted, CHUNK_BYTES, Chunk, FailureCode, WINDOW_BYTES, Window};
use crate::refusal::Refusal;
use crate::wake::Wake;

#[derive(Debug)]
pub(crate) struct Relay {
    pub(crate) wake: Wake,
    /// `accepted` has still to be sent.
    pub(crate) accept: bool,
    pub(crate) to_port: Way,
    pub(crate) to_agent: Way,
    /// How much the agent has read.
    pub(crate) confirmed: u64,
    /// The agent has still to be told how much the port took.
    pub(crate) tell: bool,
    pub(crate) failure: Option<Refusal>,
    pub(crate) over: bool,
}

/// One direction: at most a window of bytes that are not delivered yet.
#[derive(Debug, Default)]
pub(crate) struct Way {
    pub(crate) buffer: VecDeque<u8>,
    pub(crate) delivered: u64,
    /// No more comes.
    pub(crate) last: bool,
    /// And this was told.
    pub(crate) told: bool,
}

impl Way {
    pub(crate) fn piece(&self, most: usize) -> Vec<u8> {
        let (front, _) = self.buffer.as_slices();
        front[..front.len().min(most)].to_vec()
    }

    pub(crate) fn deliver(&mut self, bytes: usize) {
        self.buffer.drain(..bytes);
        self.delivered += bytes as u64;
    }

    pub(crate) fn is_over(&self) -> bool {
        self.last && self.buffer.is_empty() && self.told
    }
}

impl Relay {
    pub(crate) fn take(&mut self, chunk: &Chunk) {
        if self.to_port.last {
            return;
        }
        if self.to_port.buffer.len() + chunk.data.len() > limits::INBOUND_BYTES {
            self.failure = Some(Refusal::new(FailureCode::Busy, "the sender exceeded its window"));
        } else {
            self.to_port.buffer.extend(&chunk.data);
            self.to_port.last = chunk.last || chunk.data.is_empty();
        }
        self.wake.wake();
    }

    pub(crate) fn acknowledge(&mut self, bytes: u64) {
        self.confirmed = self.confirmed.max(bytes.min(self.to_agent.delivered));
        self.wake.wake();
    }

    /// What the agent is told next.
    pub(crate) fn next(&mut self) -> Option<Body> {
        if let Some(refusal) = self.failure.take() {
            self.over = true;
            self.wake.wake();
            return Some(refusal.into_body());
        }
        if std::mem::take(&mut self.accept) {
            return Some(Body::Accepted(Accepted {}));
        }
        if std::mem::take(&mut self.tell) {
            return Some(Body::Window(Window { bytes: self.to_port.delivered, received: 0 }));
        }
        let allowed = (WINDOW_BYTES as u64).saturating_sub(self.to_agent.delivered - self.confirmed);
        let data = self.to_agent.piece(CHUNK_BYTES.min(usize::try_from(allowed).unwrap_or(0)));
        self.to_agent.deliver(data.len());
        let last = self.to_agent.last && self.to_agent.buffer.is_empty() && !self.to_agent.told;
        if data.is_empty() && !last {
            return None;
        }
        self.to_agent.told |= last;
        self.wake.wake();
        Some(Body::Chunk(Chunk { data, last }))
    }

    pub(crate) fn is_over(&self) -> bool {
        self.over || (self.to_agent.is_over() && self.to_port.is_over() && !self.tell)
    }
}
