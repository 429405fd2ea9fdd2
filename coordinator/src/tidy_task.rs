//! Housekeeping: writes what nodes last said to the store, and deletes tokens that are long over.

use std::sync::Arc;
use std::time::Duration;

use mvm_store::{MAX_CHANGES, Store, Transaction};

use crate::records::status_key;
use crate::state::{State, StateError, encode, now};
use crate::tokens;

/// How long news of a node may wait to be written. It is for people looking at a node that is away; nothing that
/// must not be lost is in it.
const WRITE_EVERY: Duration = Duration::from_secs(2);
/// Bytes of one such transaction: well inside what the store takes, and soon written.
const MAX_WRITE_BYTES: usize = 4 * 1024 * 1024;
/// Old tokens hurt nobody; an hour is soon enough.
const TOKENS_EVERY: Duration = Duration::from_secs(3600);

pub(crate) async fn tidy_task(state: Arc<State>) {
    let mut write = tokio::time::interval(WRITE_EVERY);
    let mut old_tokens = tokio::time::interval(TOKENS_EVERY);
    for timer in [&mut write, &mut old_tokens] {
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    }
    loop {
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            _ = write.tick() => {
                log(write_statuses(&state).await, "could not write what nodes said");
                if let Some(on_beat) = &state.settings.on_beat {
                    on_beat();
                }
            }
            _ = old_tokens.tick() => {
                log(tokens::tidy(&state.store, now()).await.map(drop), "could not tidy up tokens");
            }
        }
    }
}

fn log(result: Result<(), StateError>, what: &str) {
    if let Err(error) = result {
        tracing::warn!(error = %crate::error::chain(&error), "{what}");
    }
}

/// Writes the newest word of every node with news; many nodes per transaction.
pub(crate) async fn write_statuses(state: &State) -> Result<(), StateError> {
    let dirty = state.fleet.take_dirty();
    let mut rest = dirty.as_slice();
    while !rest.is_empty() {
        let (mut txn, mut bytes, mut count) = (Transaction::new(), 0, 0);
        for (node, live) in rest.iter().take(MAX_CHANGES) {
            let value = encode(&live.lock().record());
            bytes += value.len();
            if count > 0 && bytes > MAX_WRITE_BYTES {
                break;
            }
            txn = txn.put(status_key(node), value);
            count += 1;
        }
        if let Err(error) = state.store.commit(txn).await {
            rest.iter().for_each(|(node, _)| state.fleet.mark_dirty(node));
            return Err(error.into());
        }
        rest = &rest[count..];
    }
    Ok(())
}
