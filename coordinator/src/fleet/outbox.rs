//! What waits to be sent down one session. Slots, not a queue: a newer document replaces one not yet sent, so a slow
//! node costs one document and never a backlog.

use std::collections::VecDeque;

use mvm_proto::wire::session::v1::{Goodbye, Request};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::Notify;

use crate::documents::Stored;

/// Requests that may wait for one node. More means that it does not read; the caller is told at once.
const MAX_REQUESTS: usize = 32;

/// The next thing to send.
#[derive(Debug)]
pub(crate) enum Item {
    Goodbye(Goodbye),
    /// The trust that the node lacks, which the session works out.
    Trust,
    /// Which operators are refused.
    Operators,
    Document(Stored),
    Request(Request),
}

#[derive(Debug, Default)]
pub(crate) struct Outbox {
    slots: Mutex<Slots>,
    /// One permit is kept when no task waits, so nothing put in is ever overlooked.
    filled: Notify,
}

#[derive(Debug, Default)]
struct Slots {
    goodbye: Option<Goodbye>,
    trust: bool,
    operators: bool,
    document: Option<Stored>,
    requests: VecDeque<Request>,
}

impl Outbox {
    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.slots.lock()
    }

    /// The newest document wins, in whatever order they are put.
    pub(crate) fn put_document(&self, stored: Stored) {
        let mut slots = self.lock();
        let waiting = slots.document.as_ref().map(|waiting| waiting.assigned.numbers);
        if waiting < Some(stored.assigned.numbers) {
            slots.document = Some(stored);
        }
        drop(slots);
        self.filled.notify_one();
    }

    /// Takes back a document that was not sent yet.
    pub(crate) fn drop_document(&self) {
        self.lock().document = None;
    }

    pub(crate) fn put_trust(&self) {
        self.lock().trust = true;
        self.filled.notify_one();
    }

    pub(crate) fn put_operators(&self) {
        self.lock().operators = true;
        self.filled.notify_one();
    }

    pub(crate) fn put_goodbye(&self, goodbye: Goodbye) {
        self.lock().goodbye = Some(goodbye);
        self.filled.notify_one();
    }

    /// `false` when too many wait already.
    pub(crate) fn put_request(&self, request: Request) -> bool {
        let mut slots = self.lock();
        if slots.requests.len() >= MAX_REQUESTS {
            return false;
        }
        slots.requests.push_back(request);
        drop(slots);
        self.filled.notify_one();
        true
    }

    /// Takes the next item: the end before all, trust before the document that may need it.
    pub(crate) fn take(&self) -> Option<Item> {
        let mut slots = self.lock();
        if let Some(goodbye) = slots.goodbye.take() {
            return Some(Item::Goodbye(goodbye));
        }
        if std::mem::take(&mut slots.trust) {
            return Some(Item::Trust);
        }
        if std::mem::take(&mut slots.operators) {
            return Some(Item::Operators);
        }
        if let Some(stored) = slots.document.take() {
            return Some(Item::Document(stored));
        }
        slots.requests.pop_front().map(Item::Request)
    }

    /// Waits until something may be there. Cancel-safe.
    pub(crate) async fn filled(&self) {
        self.filled.notified().await;
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::{Digest, Timestamp};

    use super::*;
    use crate::records::{Assigned, Numbers};

    fn document(generation: u64) -> Stored {
        let at = Timestamp::from_unix_ms(0);
        let numbers = Numbers { epoch: 1, generation };
        let assigned =
            Assigned { numbers, digest: Digest::of(b""), issued_at: at, expires_at: at, content: None };
        Stored { assigned, envelope: bytes::Bytes::new(), delta: None, trace: None }
    }

    #[test]
    fn only_the_newest_document_waits() {
        let outbox = Outbox::default();
        for generation in [1, 3, 2] {
            outbox.put_document(document(generation));
        }
        assert!(
            matches!(outbox.take(), Some(Item::Document(found)) if found.assigned.numbers.generation == 3)
        );
        assert!(outbox.take().is_none());
    }

    #[test]
    fn trust_goes_before_the_document_and_the_end_before_all() {
        let outbox = Outbox::default();
        outbox.put_document(document(1));
        outbox.put_trust();
        outbox.put_goodbye(Goodbye::default());
        assert!(matches!(outbox.take(), Some(Item::Goodbye(_))));
        assert!(matches!(outbox.take(), Some(Item::Trust)));
        assert!(matches!(outbox.take(), Some(Item::Document(_))));
    }

    #[test]
    fn requests_beyond_the_bound_are_turned_away() {
        let outbox = Outbox::default();
        assert_eq!((0..100).filter(|_| outbox.put_request(Request::default())).count(), MAX_REQUESTS);
    }
}
