//! Deletes what is left of tenants that the document in force has removed, and tries again until nothing is.
//!
//! One task, woken by a document and by time. What it did is not recorded: after a restart it looks again, and finds
//! nothing left. A document from before the start may be of a tenant that is declared again meanwhile: it is followed once a
//! coordinator had the time to send a newer one.

use std::collections::BTreeSet;
use std::time::Duration;

use mvm_proto::TenantId;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use crate::node::handle::NodeHandle;
use crate::node::removals::{Waiting, look_again, removal};

/// How long a session lasts before the document from before it counts as the newest: its coordinator sends a newer one with the
/// first frames.
const CONFIRMED_AFTER: Duration = Duration::from_secs(5);

/// Runs until `stop`. A deletion that is cut off is taken up again by the next agent. `is_connected` says whether there is a
/// session; always for nodes without one, whose documents come from files and pushes.
pub(crate) async fn removed_tenants_task(
    node: NodeHandle,
    is_connected: impl Fn() -> bool + Send,
    stop: CancellationToken,
) {
    let mut documents = node.documents();
    let mut connected_since: Option<Instant> = None;
    let mut is_confirmed = is_connected();
    let mut done: BTreeSet<(TenantId, String)> = BTreeSet::new();
    let mut failures = 0;
    loop {
        connected_since =
            if is_connected() { connected_since.or_else(|| Some(Instant::now())) } else { None };
        is_confirmed |= connected_since.is_some_and(|since| since.elapsed() >= CONFIRMED_AFTER);
        let document = documents.borrow_and_update().clone();
        let mut removals = Vec::new();
        let mut again: Option<Duration> = None;
        if let Some(document) = &document {
            let removed = &document.desired.removed_tenants;
            done.retain(|(tenant, uid)| removed.iter().any(|it| it.tenant_id == *tenant && it.uid == *uid));
            for removed in removed {
                let key = (removed.tenant_id.clone(), removed.uid.clone());
                let waiting = if done.contains(&key) {
                    None
                } else if !is_confirmed {
                    Some(Waiting::NotConfirmed)
                } else {
                    tokio::select! {
                        () = stop.cancelled() => return,
                        waiting = node.remove_tenant(removed, document) => waiting,
                    }
                };
                match &waiting {
                    None => drop(done.insert(key)),
                    Some(waiting) => {
                        failures = if matches!(waiting, Waiting::Data(_)) { failures + 1 } else { 0 };
                        tracing::info!(tenant = %removed.tenant_id, %waiting, "a removed tenant is not gone yet");
                        let next = look_again(waiting, failures);
                        again = Some(again.map_or(next, |again| again.min(next)));
                    }
                }
                removals.push(removal(removed, waiting.as_slice()));
            }
        }
        if again.is_none() {
            failures = 0;
        }
        node.set_removals(removals);
        let wait = async {
            match again {
                Some(again) => tokio::time::sleep(again).await,
                None => std::future::pending().await,
            }
        };
        tokio::select! {
            () = stop.cancelled() => return,
            changed = documents.changed() => match changed {
                // Newer than what was known at the start.
                Ok(()) => is_confirmed = true,
                Err(_) => return stop.cancelled().await,
            },
            () = wait => {}
        }
    }
}
