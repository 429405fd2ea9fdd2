//! Deletes what is left of tenants that the document in force has removed, and tries again until nothing is.
//!
//! One task, woken by a document and by time. What it did is not recorded: after a restart it looks again, and finds
//! nothing left.

use std::collections::BTreeSet;
use std::time::Duration;

use mvm_proto::TenantId;
use tokio_util::sync::CancellationToken;

use crate::node::handle::NodeHandle;
use crate::node::removals::{Waiting, look_again, removal};

/// Runs until `stop`. A deletion that is cut off is taken up again by the next agent.
pub(crate) async fn removed_tenants_task(node: NodeHandle, stop: CancellationToken) {
    let mut documents = node.documents();
    let mut done: BTreeSet<(TenantId, String)> = BTreeSet::new();
    let mut failures = 0;
    loop {
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
            changed = documents.changed() => if changed.is_err() { return stop.cancelled().await },
            () = wait => {}
        }
    }
}
