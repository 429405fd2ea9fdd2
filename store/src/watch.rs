//! The stream of changes that a watcher reads.

use std::fmt;
use std::pin::Pin;
use std::task::{Context, Poll};

use futures::StreamExt;
use futures::stream::{BoxStream, Stream};

use crate::{Entry, StoreError};

/// One key changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Event {
    Put(Entry),
    /// `version` is the revision that deleted the key.
    Delete {
        key: String,
        version: u64,
    },
}

impl Event {
    #[must_use]
    pub fn key(&self) -> &str {
        match self {
            Self::Put(entry) => &entry.key,
            Self::Delete { key, .. } => key,
        }
    }

    /// The revision of the transaction that made this change; all changes of one transaction share it.
    #[must_use]
    pub fn version(&self) -> u64 {
        match self {
            Self::Put(entry) => entry.version,
            Self::Delete { version, .. } => *version,
        }
    }
}

/// Changes in revision order, without gaps. It is a [`Stream`] too.
pub struct Watch {
    events: BoxStream<'static, Result<Event, StoreError>>,
}

impl Watch {
    /// For implementations of [`crate::Store`]: a stream that ends after its first error.
    pub fn from_stream(events: impl Stream<Item = Result<Event, StoreError>> + Send + 'static) -> Self {
        Self { events: events.boxed() }
    }

    /// The next change; waits for it if need be. Dropping the future loses no event.
    ///
    /// A watcher that falls too far behind gets [`StoreError::Compacted`], and after any error only
    /// [`StoreError::Closed`].
    pub async fn next(&mut self) -> Result<Event, StoreError> {
        self.events.next().await.unwrap_or(Err(StoreError::Closed))
    }
}

impl Stream for Watch {
    type Item = Result<Event, StoreError>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.events.poll_next_unpin(context)
    }
}

impl fmt::Debug for Watch {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Watch").finish_non_exhaustive()
    }
}
