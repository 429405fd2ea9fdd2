//! Writes the nodes' last statuses to the store, and deletes expired join tokens and what else is too old.

use std::sync::Arc;
use std::time::Duration;

use mvm_store::{MAX_CHANGES, MAX_VALUE_BYTES, Store, Transaction};

use crate::fleet::LiveNode;
use crate::records::{StatusRecord, status_key};
use crate::state::State;
use crate::stored::{StateError, encode, now};
use crate::{objects, tokens};

/// How long news of a node may wait to be written. It is for people looking at a node that is away; nothing that
/// must not be lost is in it.
const WRITE_EVERY: Duration = Duration::from_secs(2);
/// Bytes of one such transaction: well inside what the store takes, and soon written.
const MAX_WRITE_BYTES: usize = 4 * 1024 * 1024;
/// Expired tokens do no harm; an hour is soon enough.
const TOKENS_EVERY: Duration = Duration::from_secs(3600);
/// The audit log is a few thousand entries longer by then at most.
const AUDIT_EVERY: Duration = Duration::from_secs(60);

pub(crate) async fn cleanup_task(state: Arc<State>) {
    let mut write = tokio::time::interval(WRITE_EVERY);
    let mut old_tokens = tokio::time::interval(TOKENS_EVERY);
    let mut audit = tokio::time::interval(AUDIT_EVERY);
    for timer in [&mut write, &mut old_tokens, &mut audit] {
        timer.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    }
    loop {
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            _ = write.tick() => {
                log(write_statuses(&state).await, "could not write the nodes' statuses");
                if let Some(on_beat) = &state.settings.on_beat {
                    on_beat();
                }
            }
            _ = old_tokens.tick() => {
                log(tokens::remove_old(&state.store, now()).await.map(drop), "could not remove expired join tokens");
                log(objects::forget_old(&state.store, now()).await, "could not remove old idempotency keys");
                log(state.events.forget_old(&state.store, now()).await, "could not forget old events");
            }
            _ = audit.tick() => log(objects::trim_audit(&state.store).await, "could not trim the audit log"),
        }
    }
}

fn log(result: Result<(), StateError>, what: &str) {
    if let Err(error) = result {
        tracing::warn!(error = %mvm_proto::text::chain(&error), "{what}");
    }
}

/// A node's newest word as it is stored. One that the store would refuse loses what makes it large: it would be refused
/// the next time too.
fn value_of(live: &LiveNode) -> Vec<u8> {
    let record = live.lock().record();
    let value = encode(&record);
    if value.len() <= MAX_VALUE_BYTES {
        return value;
    }
    encode(&StatusRecord { info: None, status: None, ..record })
}

/// Writes the newest word of every node with news; many nodes per transaction.
pub(crate) async fn write_statuses(state: &State) -> Result<(), StateError> {
    let dirty = state.fleet.take_dirty();
    let mut rest = dirty.as_slice();
    while !rest.is_empty() {
        let (mut txn, mut bytes, mut count) = (Transaction::new(), 0, 0);
        for (node, live) in rest.iter().take(MAX_CHANGES) {
            let value = value_of(live);
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

#[cfg(test)]
mod tests {
    use mvm_proto::status::delta::KeptStatus;
    use mvm_proto::status::{Mark, NodeInfo, NodeStatus, PoolStatus};

    use super::*;

    fn live(status: NodeStatus) -> LiveNode {
        let live = LiveNode::new(&"node-a".parse().unwrap(), &tokio::sync::broadcast::Sender::new(1), now());
        live.change(|live| {
            live.set_status(KeptStatus::whole(status, now()));
            live.accepted = Some(Mark::default());
        });
        live
    }

    #[test]
    fn a_status_that_is_kept_can_be_stored_whatever_it_says() {
        // Each byte of these is six in JSON.
        let pool = PoolStatus {
            tenant_id: "\u{1}".repeat(256),
            pool_id: "\u{1}".repeat(256),
            ..PoolStatus::default()
        };
        let status = NodeStatus { pools: vec![pool; 10_000], ..NodeStatus::default() };
        let value = value_of(&live(status));
        assert!(value.len() <= MAX_VALUE_BYTES, "{}", value.len());
        assert!(serde_json::from_slice::<StatusRecord>(&value).unwrap().status.is_some());
    }

    #[test]
    fn what_the_store_would_refuse_is_stored_without_what_makes_it_large() {
        let live = live(NodeStatus::default());
        let info = NodeInfo { driver: "x".repeat(MAX_VALUE_BYTES), ..NodeInfo::default() };
        live.change(|live| live.info = Some(info));
        let value = value_of(&live);
        let stored: StatusRecord = serde_json::from_slice(&value).unwrap();
        assert_eq!((stored.status, stored.accepted), (None, Some(Mark::default())));
    }
}
