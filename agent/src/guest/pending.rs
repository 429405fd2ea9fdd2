//! A request that is under way on a link: what is sent again when that breaks, and how far both directions are.

use std::collections::VecDeque;
use std::sync::Arc;

use mvm_proto::guest::{Detach, Exec, Input, WINDOW_BYTES, Window, host_frame};

use super::call::Inbox;

#[derive(Debug)]
pub(super) struct Pending {
    pub(super) body: host_frame::Body,
    pub(super) inbox: Arc<Inbox>,
    pub(super) kind: Kind,
    pub(super) sent: bool,
    /// It went out with this hello already.
    pub(super) with_hello: Option<u64>,
}

#[derive(Debug)]
pub(super) enum Kind {
    /// Answered whole; asked again when the link breaks.
    Plain,
    /// Goes on where it was when the link breaks.
    Exec(ExecState),
    /// Ends when the link breaks, because it is unknown which bytes arrived.
    Relay { inward: InboundBuffer },
}

#[derive(Debug, Default)]
pub(super) struct ExecState {
    /// How much of its output came.
    pub(super) received: u64,
    /// What its program has not taken yet, to be sent again.
    input: VecDeque<Input>,
    inward: InboundBuffer,
    /// Its caller hears what of the input was taken.
    tells_input: bool,
    /// The guest has to say how much of the input came before.
    learns_input: bool,
    /// No more of its output is wanted, only its end.
    pub(super) let_go: bool,
}

impl ExecState {
    /// Of a program that an earlier caller may have begun.
    pub(super) fn going_on(exec: &Exec, input_from: u64) -> Self {
        Self {
            received: exec.output_from,
            inward: InboundBuffer { sent: input_from, taken: input_from },
            tells_input: true,
            learns_input: exec.tell_input,
            ..Self::default()
        }
    }

    /// A piece of input is on its way.
    pub(super) fn give(&mut self, piece: &Input) {
        self.inward.sent = self.inward.sent.saturating_add(piece.data.len() as u64);
        if piece.last {
            // It is never taken, so that each one that was said again would stay.
            self.input.retain(|earlier| !earlier.last);
        }
        self.input.push_back(piece.clone());
    }

    /// What the guest says of the input; what the caller is told of it, if anything.
    pub(super) fn hear(&mut self, window: &Window) -> Option<u64> {
        if std::mem::take(&mut self.learns_input) {
            let received = window.received.max(window.bytes);
            self.inward = InboundBuffer { sent: received, taken: window.bytes };
            return Some(received);
        }
        self.inward.take(window.bytes);
        let taken = self.inward.taken;
        // The end of the input has no bytes to be taken: it stays, in case that it was lost.
        let end = |piece: &Input| piece.offset.saturating_add(piece.data.len() as u64);
        self.input.retain(|piece| piece.last || end(piece) > taken);
        self.tells_input.then_some(taken)
    }

    /// What a guest is sent on a new link.
    pub(super) fn again(&self, exec: &Exec) -> Vec<host_frame::Body> {
        let (output_from, tell_input) = (self.received, self.learns_input);
        let mut bodies = vec![host_frame::Body::Exec(Exec { output_from, tell_input, ..exec.clone() })];
        bodies.extend(self.input.iter().cloned().map(host_frame::Body::Input));
        // Else the guest would wait for a reader again.
        bodies.extend(self.let_go.then_some(host_frame::Body::Detach(Detach {})));
        bodies
    }
}

/// How much was sent to a program or a port, and how much of it that has taken.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct InboundBuffer {
    pub(super) sent: u64,
    pub(super) taken: u64,
}

impl InboundBuffer {
    /// One piece may overstep the window: the guest keeps room for it.
    pub(super) fn has_room(self) -> bool {
        self.sent - self.taken < WINDOW_BYTES as u64
    }

    /// What a guest says it took is never more than what it was sent.
    pub(super) fn take(&mut self, bytes: u64) {
        self.taken = self.taken.max(bytes.min(self.sent));
    }
}

impl Kind {
    pub(super) fn inward(&self) -> Option<InboundBuffer> {
        match self {
            Kind::Plain => None,
            Kind::Exec(ExecState { inward, .. }) | Kind::Relay { inward } => Some(*inward),
        }
    }
}
