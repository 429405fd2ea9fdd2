//! A watch pulls: it remembers a revision and reads the change log from there, so a slow watcher costs nothing
//! and is told when the log has moved on without it.

use std::collections::VecDeque;
use std::sync::Arc;

use futures::stream;
use tokio::sync::watch::Receiver;

use super::{Progress, Shared};
use crate::{Event, StoreError, Watch, check_prefix};

/// Transactions copied out of the log at a time, so that one slow watcher can't hold the lock for long.
const TRANSACTIONS_AT_ONCE: usize = 256;

struct Watching {
    shared: Arc<Shared>,
    progress: Receiver<Progress>,
    prefix: String,
    cursor: u64,
    ready: VecDeque<Event>,
}

pub(super) fn watch(shared: Arc<Shared>, prefix: &str, after: u64) -> Watch {
    if let Err(error) = check_prefix(prefix) {
        return Watch::from_stream(stream::iter([Err(error)]));
    }
    if !shared.watched.iter().any(|watched| prefix.starts_with(watched)) {
        let reason = "what changes under it is not kept for watchers";
        let error = StoreError::InvalidKey { key: prefix.to_owned(), reason };
        return Watch::from_stream(stream::iter([Err(error)]));
    }
    let progress = shared.progress.subscribe();
    let watching =
        Watching { shared, progress, prefix: prefix.to_owned(), cursor: after, ready: VecDeque::new() };
    Watch::from_stream(stream::unfold(Some(watching), |watching| async {
        let mut watching = watching?;
        match watching.next().await {
            Ok(event) => Some((Ok(event), Some(watching))),
            Err(error) => Some((Err(error), None)),
        }
    }))
}

impl Watching {
    async fn next(&mut self) -> Result<Event, StoreError> {
        loop {
            if let Some(event) = self.ready.pop_front() {
                return Ok(event);
            }
            // Seen before the log is read: a change that comes after the reading wakes the wait below.
            let closed = self.progress.borrow_and_update().closed;
            let (events, next) =
                self.shared.read().changes(&self.prefix, self.cursor, TRANSACTIONS_AT_ONCE)?;
            let moved = next != self.cursor;
            self.ready.extend(events);
            self.cursor = next;
            if moved {
                continue;
            }
            if closed || self.progress.changed().await.is_err() {
                return Err(StoreError::Closed);
            }
        }
    }
}
