//! What happens on this node, told to all who follow it: the session, the API and its log.

use std::fmt::Display;

use mvm_proto::status::Event;
use tokio::sync::broadcast;

use crate::clock::Clock;

/// A follower that is this many events behind loses the oldest ones and is told so.
const KEPT: usize = 1024;

/// Where events go. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Events {
    sender: broadcast::Sender<Event>,
    clock: Clock,
}

impl Events {
    #[must_use]
    pub fn new(clock: Clock) -> Self {
        Self { sender: broadcast::Sender::new(KEPT), clock }
    }

    #[must_use]
    pub fn subscribe(&self) -> broadcast::Receiver<Event> {
        self.sender.subscribe()
    }

    pub fn publish(&self, kind: &str, subject: impl Display, message: impl Into<String>) {
        let (subject, message) = (subject.to_string(), message.into());
        tracing::info!(kind, subject, message);
        self.send(kind, subject, message);
    }

    /// The same for what an operator should look at.
    pub fn warn(&self, kind: &str, subject: impl Display, message: impl Into<String>) {
        let (subject, message) = (subject.to_string(), message.into());
        tracing::warn!(kind, subject, message);
        self.send(kind, subject, message);
    }

    fn send(&self, kind: &str, subject: String, message: String) {
        let (at, kind) = (self.clock.now().to_string(), kind.to_owned());
        // No receiver is no error.
        let _ = self.sender.send(Event { at, kind, subject, message });
    }
}
