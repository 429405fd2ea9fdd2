//! What happened to objects: for people, beside the conditions that say how things are.
//!
//! The coordinator makes events of what changes in objects' statuses ([`derive`](derive::happenings)) and stores each in the
//! transaction that writes the status. The same thing for the same reason is one event with a count ([`Book`]). They are
//! kept outside the log that watchers read, so that they evict no watcher, by number and by age.
//!
//! ```text
//! events/<plural>/<name>/<uid>/<reason>            of an object of the cluster
//! events/<plural>/<tenant>/<name>/<uid>/<reason>   of an object of a tenant
//! ```

mod book;
mod derive;

use mvm_proto::Timestamp;
use mvm_proto::object::{ObjectEvent, kind_named};
use mvm_store::{MAX_CHANGES, Store, Transaction};
use parking_lot::Mutex;
use tokio::sync::broadcast;

use crate::stored::{Backend, StateError, encode, load_all};

pub(crate) use book::{Book, Change, Happening, Subject};
pub(crate) use derive::happenings;

pub(crate) const EVENTS: &str = "events/";
/// How many a follower may be behind before it misses some.
const BEHIND: usize = 1024;

/// The events that are kept, and those who follow them.
#[derive(Debug)]
pub(crate) struct Events {
    book: Mutex<Book>,
    followers: broadcast::Sender<ObjectEvent>,
}

impl Events {
    pub(crate) async fn load(store: &Backend) -> Result<Self, StateError> {
        let stored = load_all::<ObjectEvent>(store, EVENTS).await?.into_iter();
        // Those that were noted by name alone may be another object's.
        let (known, others): (Vec<_>, Vec<_>) =
            stored.partition(|(path, record)| key(&record.value) == format!("{EVENTS}{path}"));
        for some in others.chunks(MAX_CHANGES) {
            let txn =
                some.iter().fold(Transaction::new(), |txn, (path, _)| txn.delete(format!("{EVENTS}{path}")));
            store.commit(txn).await.map_err(StateError::from)?;
        }
        let book = Book::new(known.into_iter().map(|(_, record)| record.value));
        Ok(Self { book: Mutex::new(book), followers: broadcast::Sender::new(BEHIND) })
    }

    pub(crate) fn follow(&self) -> broadcast::Receiver<ObjectEvent> {
        self.followers.subscribe()
    }

    /// What the store has to be told of these; [`Events::note`] takes it over once it has.
    pub(crate) fn propose(&self, subject: &Subject, happenings: &[Happening], now: Timestamp) -> Vec<Change> {
        self.book.lock().propose(subject, happenings, now)
    }

    /// The store has these.
    pub(crate) fn note(&self, changes: Vec<Change>) {
        let mut book = self.book.lock();
        for change in changes {
            if let Change::Put(event) = &change {
                // No follower is no error.
                let _ = self.followers.send(event.clone());
            }
            book.apply(change);
        }
    }

    /// Forgets what is too old.
    pub(crate) async fn forget_old(&self, store: &Backend, now: Timestamp) -> Result<(), StateError> {
        loop {
            let mut old = self.book.lock().too_old(now);
            old.truncate(MAX_CHANGES);
            if old.is_empty() {
                return Ok(());
            }
            store.commit(add_to(Transaction::new(), &old)).await?;
            self.note(old);
        }
    }

    /// What is kept of the objects that `wanted` takes, by the time at which it happened last.
    pub(crate) fn kept(&self, wanted: impl Fn(&ObjectEvent) -> bool, now: Timestamp) -> Vec<ObjectEvent> {
        self.book.lock().kept(now).filter(|event| wanted(event)).cloned().collect()
    }
}

/// Adds them to a transaction.
pub(crate) fn add_to(txn: Transaction, changes: &[Change]) -> Transaction {
    changes.iter().fold(txn, |txn, change| match change {
        Change::Put(event) => txn.put(key(event), encode(event)),
        Change::Drop(event) => txn.delete(key(event)),
    })
}

fn key(event: &ObjectEvent) -> String {
    let ObjectEvent { kind, tenant, name, uid, reason, .. } = event;
    let plural = kind_named(kind).map_or(kind.as_str(), |kind| kind.plural);
    match tenant {
        Some(tenant) => format!("{EVENTS}{plural}/{tenant}/{name}/{uid}/{reason}"),
        None => format!("{EVENTS}{plural}/{name}/{uid}/{reason}"),
    }
}
