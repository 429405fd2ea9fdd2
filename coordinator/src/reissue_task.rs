//! Issues every document again at half of its life, so that a node never runs out of a valid one while a coordinator
//! lives. The content stays; numbers and expiry are new.
//!
//! Only nodes with a session are served: the hello of one that was away looks after its document, and tells first
//! whether the node has a newer one than this store, as after a restore from a backup.

use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use mvm_proto::NodeId;

use crate::refuse;
use crate::state::State;
use crate::stored::now;

/// Issued at the same time: their transactions share flushes to the disk.
const AT_ONCE: usize = 32;
/// After a failure (a full disk), the document is tried again this much later.
const RETRY: Duration = Duration::from_secs(30);
/// The clock may jump; look at it at least this often.
const LONGEST_SLEEP: Duration = Duration::from_secs(60);

pub(crate) async fn reissue_task(state: Arc<State>) {
    // The process before may have ended between a root that resets numbers and the documents.
    if let Err(problem) = state.documents.follow_reset(now()).await {
        tracing::error!(%problem, "could not follow a root that resets numbers; upload it again");
    }
    loop {
        let wait =
            state.documents.due.next().map_or(LONGEST_SLEEP, |next| next.since(now()).min(LONGEST_SLEEP));
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            () = state.documents.due.changed.notified() => continue,
            () = tokio::time::sleep(wait) => {}
        }
        let due = state.documents.due.take(now(), AT_ONCE);
        futures::stream::iter(due).for_each_concurrent(AT_ONCE, |node| reissue(&state, node)).await;
    }
}

async fn reissue(state: &State, node: NodeId) {
    if state.fleet.get(&node).is_none_or(|live| live.lock().session.is_none()) {
        return;
    }
    let assigned = match state.documents.assigned(&node).await {
        Ok(Some(assigned)) => assigned,
        Ok(None) => return,
        Err(error) => {
            tracing::error!(%node, error = %mvm_proto::text::chain(&error), "could not look at a document");
            state.documents.due.set(&node, now() + RETRY);
            return;
        }
    };
    let now = now();
    if assigned.reissue_at() > now {
        state.documents.due.set(&node, assigned.reissue_at());
        return;
    }
    match state.documents.reissue(&node, &assigned, now).await {
        Ok(Some(stored)) => {
            state.metrics.documents_reissued.inc();
            tracing::debug!(%node, generation = stored.assigned.numbers.generation, "issued again");
            state.fleet.offer(&node, stored, None);
        }
        // Someone pushed or removed meanwhile.
        Ok(None) => {}
        Err(problem) if refuse::is_no_node(&problem) => {
            tracing::info!(%node, %problem, "not issued again");
        }
        Err(problem) => {
            tracing::error!(%node, %problem, "could not issue a document again");
            state.documents.due.set(&node, now + RETRY);
        }
    }
}
