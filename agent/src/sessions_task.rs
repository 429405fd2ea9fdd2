//! Has every session copied when it is due. Which are, and what is done, is [`crate::persist`]'s.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::InstanceId;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::persist::Sessions;
use crate::state::Records;

/// The shortest interval that a document can ask for.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// One slow store must not hold all sessions up, nor all of them the machine.
const AT_ONCE: usize = 4;

/// Runs until `stop`. A copy under way is cut off then: the store has the session as it was.
pub(crate) async fn sessions_task(sessions: Arc<Sessions>, records: Arc<Records>, stop: CancellationToken) {
    let mut running: JoinSet<InstanceId> = JoinSet::new();
    let mut busy: BTreeSet<InstanceId> = BTreeSet::new();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            () = tokio::time::sleep(LOOK_EVERY) => {}
            Some(done) = running.join_next() => match done {
                Ok(id) => {
                    busy.remove(&id);
                    continue;
                }
                Err(error) => {
                    tracing::error!(%error, "copying a session ended abnormally");
                    // Which one is not said; those that still run are not begun twice, for each has one seat.
                    busy.clear();
                }
            },
        }
        for record in sessions.due(&records) {
            if running.len() >= AT_ONCE || !busy.insert(record.id.clone()) {
                continue;
            }
            let (sessions, records) = (Arc::clone(&sessions), Arc::clone(&records));
            running.spawn(async move {
                sessions.attend(&record, &records).await;
                record.id
            });
        }
    }
}
