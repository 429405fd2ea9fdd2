//! Cancels a pause or sleep: the signal between the step that carries it out and a request that needs the instance.
//!
//! The step checks the signal before its point of no return. It either sees the cancellation, or can't be cancelled any more;
//! never both, however the two calls interleave.

use std::sync::Arc;

use mvm_proto::{InstanceId, Phase};
use tokio::sync::watch;

use super::{Lease, LeaseState, Records};

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum Word {
    /// Neither cancelled nor past the point of no return.
    #[default]
    None,
    CalledOff,
    /// The step has passed the point from which there is no way back.
    Passed,
}

/// Whether a step is wanted to go on. Cheap to clone.
#[derive(Debug, Clone, Default)]
pub struct CallOff(Arc<watch::Sender<Word>>);

impl CallOff {
    /// By a request. Whether the step goes back.
    fn call_off(&self) -> bool {
        self.say(Word::CalledOff)
    }

    /// By the step, which goes back unless this is true. Nothing calls it off from here on.
    pub(crate) fn pass(&self) -> bool {
        self.say(Word::Passed)
    }

    /// The first word counts.
    fn say(&self, word: Word) -> bool {
        self.0.send_if_modified(|said| {
            let first = *said == Word::None;
            if first {
                *said = word;
            }
            first
        });
        *self.0.borrow() == word
    }

    pub(crate) fn is_called_off(&self) -> bool {
        *self.0.borrow() == Word::CalledOff
    }

    /// Waits until it is called off: for ever, if it never is.
    pub(crate) async fn called_off(&self) {
        let mut word = self.0.subscribe();
        if word.wait_for(|word| *word == Word::CalledOff).await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

impl Records {
    /// The right to put `id` to rest, which requests may call off; none while someone else acts on it.
    #[must_use]
    pub fn lease_to_rest(self: &Arc<Self>, id: &InstanceId, rests_as: Phase) -> Option<Lease> {
        self.lease_as(id, LeaseState { call_off: Some(CallOff::default()), ..LeaseState::to(rests_as) })
    }

    /// For a request that wants `id`: calls off the step that is putting it to rest, if there is one that can be. From
    /// here on the instance is the request's, with its place in the count that it was on its way to.
    pub fn call_off_rest(&self, id: &InstanceId) -> bool {
        let mut inner = self.lock();
        let Some(state) = inner.leased.get_mut(id) else { return false };
        let called_off = state.call_off.as_ref().is_some_and(CallOff::call_off);
        if called_off && !state.on_demand {
            state.home = Some(state.to);
            (state.to, state.on_demand) = (Phase::Running, true);
        }
        called_off
    }

    /// Whether a step is under way on `id` that a request could still call off.
    #[must_use]
    pub(crate) fn can_call_off(&self, id: &InstanceId) -> bool {
        let inner = self.lock();
        let call_off = inner.leased.get(id).and_then(|state| state.call_off.as_ref());
        call_off.is_some_and(|call_off| *call_off.0.borrow() != Word::Passed)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_first_word_counts() {
        let call_off = CallOff::default();
        assert!(!call_off.is_called_off());
        assert!(call_off.call_off() && call_off.call_off(), "asking twice is asking once");
        assert!(!call_off.pass());
        call_off.called_off().await;

        let call_off = CallOff::default();
        assert!(call_off.pass() && call_off.pass());
        assert!(!call_off.call_off() && !call_off.is_called_off());
    }
}
