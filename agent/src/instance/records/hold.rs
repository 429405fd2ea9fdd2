//! Holds: what an open stream keeps an instance from being put to rest with.
//!
//! A hold and the lease of a step that puts an instance to rest by policy are taken under the same lock, so that whichever
//! comes second sees the first: the lease is refused while there is a hold, and the hold says when such a step is under
//! way already. A hold keeps nothing from being stopped, destroyed or put to sleep by hand.

use std::sync::Arc;

use mvm_proto::{InstanceId, Phase};

use super::Records;

/// Keeps an instance from being put to rest by policy until it is dropped.
#[derive(Debug)]
pub struct Hold {
    records: Arc<Records>,
    id: InstanceId,
}

/// What was found of an instance when it was held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Usable {
    /// It runs, and nothing that is under way takes it down.
    Now,
    /// It is in this phase, or on its way out of running.
    Not(Phase),
}

impl Records {
    /// Holds an instance that has a record.
    pub(crate) fn hold(self: &Arc<Self>, id: &InstanceId) -> Option<(Hold, Usable)> {
        let mut inner = self.lock();
        let phase = inner.records.get(id)?.phase;
        let leaves = inner.leased.get(id).is_some_and(|state| state.to != Phase::Running);
        *inner.held.entry(id.clone()).or_default() += 1;
        let usable = if phase == Phase::Running && !leaves { Usable::Now } else { Usable::Not(phase) };
        Some((Hold { records: Arc::clone(self), id: id.clone() }, usable))
    }
}

impl Drop for Hold {
    fn drop(&mut self) {
        let mut inner = self.records.lock();
        if let Some(count) = inner.held.get_mut(&self.id) {
            *count -= 1;
            if *count == 0 {
                inner.held.remove(&self.id);
            }
        }
    }
}
