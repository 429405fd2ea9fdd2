//! The node's latest events, numbered, for those who come late and for those who stay.
//!
//! One task feeds it from the node's broadcast. A follower reads by number, so that between what was kept and what
//! comes next nothing is told twice; one that is too slow misses the oldest and is not held up.

use std::collections::VecDeque;
use std::sync::Arc;

use mvm_proto::status::Event;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::broadcast::{self, error::RecvError};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

/// A busy hour of a node.
const KEPT: usize = 1024;

#[derive(Debug)]
pub struct EventLog {
    events: Mutex<VecDeque<(u64, Event)>>,
    /// The number of the newest event.
    newest: watch::Sender<u64>,
}

impl Default for EventLog {
    fn default() -> Self {
        Self { events: Mutex::default(), newest: watch::Sender::new(0) }
    }
}

impl EventLog {
    fn lock(&self) -> MutexGuard<'_, VecDeque<(u64, Event)>> {
        self.events.lock()
    }

    pub fn push(&self, event: Event) {
        let mut events = self.lock();
        let number = *self.newest.borrow() + 1;
        if events.len() == KEPT {
            events.pop_front();
        }
        events.push_back((number, event));
        drop(events);
        self.newest.send_replace(number);
    }

    /// Everything kept that came after event number `after`, oldest first, each with its number.
    #[must_use]
    pub fn after(&self, after: u64) -> Vec<(u64, Event)> {
        self.lock().iter().filter(|(number, _)| *number > after).cloned().collect()
    }

    /// Changes with every event.
    #[must_use]
    pub fn newest(&self) -> watch::Receiver<u64> {
        self.newest.subscribe()
    }
}

/// Keeps what is published until `shutdown`.
pub async fn event_log_task(
    mut events: broadcast::Receiver<Event>,
    log: Arc<EventLog>,
    shutdown: CancellationToken,
) {
    loop {
        tokio::select! {
            () = shutdown.cancelled() => return,
            event = events.recv() => match event {
                Ok(event) => log.push(event),
                Err(RecvError::Lagged(missed)) => tracing::warn!(missed, "events were lost"),
                // The node ends with the agent; current readers get what there is.
                Err(RecvError::Closed) => return shutdown.cancelled().await,
            },
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_events_are_kept_and_each_is_told_once() {
        let log = EventLog::default();
        for number in 0..KEPT + 3 {
            log.push(Event { message: number.to_string(), ..Event::default() });
        }
        let kept = log.after(0);
        assert_eq!((kept.len(), kept[0].1.message.as_str()), (KEPT, "3"));
        let last = kept[KEPT - 1].0;
        assert!(log.after(last).is_empty());
        log.push(Event::default());
        assert_eq!(log.after(last).len(), 1);
    }
}
