//! Cancels a pause or sleep: the signal between the step that carries it out and a request that needs the instance.
//!
//! The step checks the signal before its point of no return. It either sees the cancellation, or can't be cancelled any more;
//! never both, however the two calls interleave.

use std::sync::Arc;

use mvm_proto::{InstanceId, Phase};
use tokio::sync::watch;

use super::{Lease, LeaseState, Records};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Decision {
    /// Neither cancelled nor past the point of no return.
    #[default]
    Open,
    Cancelled,
    /// The step has passed the point from which there is no way back.
    Committed,
}

/// Whether a step is wanted to go on. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct CancelSignal(Arc<watch::Sender<Decision>>);

impl CancelSignal {
    /// By a request. Whether the step goes back.
    fn cancel(&self) -> bool {
        self.say(Decision::Cancelled)
    }

    /// By the step, which goes back unless this is true. Nothing calls it off from here on.
    pub(crate) fn commit(&self) -> bool {
        self.say(Decision::Committed)
    }

    /// The first word counts.
    fn say(&self, word: Decision) -> bool {
        self.0.send_if_modified(|said| {
            let first = *said == Decision::Open;
            if first {
                *said = word;
            }
            first
        });
        *self.0.borrow() == word
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        *self.0.borrow() == Decision::Cancelled
    }

    /// Waits until it is called off: for ever, if it never is.
    pub(crate) async fn cancelled(&self) {
        let mut word = self.0.subscribe();
        if word.wait_for(|word| *word == Decision::Cancelled).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Records {
    /// The right to put `id` to rest, which requests may call off; none while someone else acts on it, or a stream holds it.
    #[must_use]
    pub fn lease_to_rest(self: &Arc<Self>, id: &InstanceId, rests_as: Phase) -> Option<Lease> {
        let state = LeaseState { cancel: Some(CancelSignal::default()), ..LeaseState::to(rests_as) };
        self.lease_unless(id, state, |inner| inner.held.contains_key(id))
    }

    /// For a request that wants `id`: calls off the step that is putting it to rest, if there is one that can be. From
    /// here on the instance is the request's, with its place in the count that it was on its way to.
    pub fn cancel_rest(&self, id: &InstanceId) -> bool {
        let mut inner = self.lock();
        let Some(state) = inner.leased.get_mut(id) else { return false };
        let cancelled = state.cancel.as_ref().is_some_and(CancelSignal::cancel);
        if cancelled && !state.on_demand {
            state.home = Some(state.to);
            (state.to, state.on_demand) = (Phase::Running, true);
        }
        cancelled
    }

    /// Whether a step is under way on `id` that a request could still call off.
    #[must_use]
    pub(crate) fn can_cancel(&self, id: &InstanceId) -> bool {
        let inner = self.lock();
        let cancel = inner.leased.get(id).and_then(|state| state.cancel.as_ref());
        cancel.is_some_and(|cancel| *cancel.0.borrow() != Decision::Committed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_word_counts() {
        let cancel = CancelSignal::default();
        assert!(!cancel.is_cancelled());
        assert!(cancel.cancel() && cancel.cancel(), "asking twice is asking once");
        assert!(!cancel.commit());
        cancel.cancelled().await;

        let cancel = CancelSignal::default();
        assert!(cancel.commit() && cancel.commit());
        assert!(!cancel.cancel() && !cancel.is_cancelled());
    }
}
