//! Tells requests under way that a credential may have been revoked: each then looks whether its own still counts.
//!
//! One task that watches the API keys in the store, whatever process changed them. Operators are removed in this process,
//! which tells it itself ([`State::revoked`]).

use std::sync::Arc;

use mvm_store::{Store, StoreError};

use crate::objects::{API_KEY_OBJECTS, revision};
use crate::state::State;

/// Runs until the coordinator stops.
pub(crate) async fn revocation_task(state: Arc<State>) {
    while !state.shutdown.is_cancelled() {
        let Ok(from) = revision(&state.store).await else { return };
        let mut changes = state.store.watch(API_KEY_OBJECTS, from);
        // What happened before that was not told.
        state.revoked();
        loop {
            let change = tokio::select! {
                change = changes.next() => change,
                () = state.shutdown.cancelled() => return,
            };
            match change {
                Ok(_) => state.revoked(),
                Err(StoreError::Compacted { .. }) => break,
                Err(_) => return,
            }
        }
    }
}
