//! What was read for the agent and not told yet.

use std::collections::VecDeque;

use crate::protocol::guest_frame::Body;

/// A file or folder on its way to the agent. It ends with the connection: reading can be asked for again.
#[derive(Debug, Default)]
pub(crate) struct Reading {
    pub(crate) queue: VecDeque<Body>,
    /// No more comes.
    pub(crate) last: bool,
}

impl Reading {
    pub(crate) fn next(&mut self) -> Option<Body> {
        self.queue.pop_front()
    }

    pub(crate) fn is_over(&self) -> bool {
        self.last && self.queue.is_empty()
    }
}
