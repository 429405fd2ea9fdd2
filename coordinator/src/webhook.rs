//! Tells a program of the operator's what the fleet lacks and which nodes have nothing, so that it adds and removes machines.
//!
//! One task looks at the demand every second. What was the same at two looks, and is not what the program took last, is
//! posted as JSON with a signature ([`Hook`]); as long as something lacks it is posted again from time to time. Only the newest
//! is ever sent, so nothing piles up. What is not answered with success is tried again with growing waits.

mod hook;

use std::sync::Arc;
use std::time::Duration;

use mvm_proto::object::FleetDemand;
use mvm_proto::text::chain;
use mvm_transport::Backoff;
use serde::Serialize;
use tokio::time::Instant;

use crate::placement::demand_of;
use crate::state::State;
use crate::stored::now;

pub(crate) use hook::Hook;

/// A pool that moves from node to node lacks something for less than two of these.
const LOOK_EVERY: Duration = Duration::from_secs(1);
/// What still lacks is told again this often: the program may have lost it.
const AGAIN_AFTER: Duration = Duration::from_secs(300);
/// The longest wait after a failure.
const MAX_WAIT: Duration = Duration::from_secs(120);
/// So many shapes and so many empty nodes are told at most: the rest is told once these are gone.
const MAX_LISTED: usize = 1000;

/// What is posted.
#[derive(Debug, Serialize)]
struct Told<'a> {
    /// In whole seconds since 1970; the signature is over this, too.
    at: i64,
    cluster: &'a str,
    #[serde(flatten)]
    demand: &'a FleetDemand,
}

/// Runs until shutdown.
pub(crate) async fn webhook_task(state: Arc<State>, hook: Hook) {
    let mut seen: Option<FleetDemand> = None;
    let mut told: Option<(FleetDemand, Instant)> = None;
    let mut backoff = Backoff::new(LOOK_EVERY, MAX_WAIT);
    let mut wait = LOOK_EVERY;
    loop {
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            () = tokio::time::sleep(wait) => {}
        }
        wait = LOOK_EVERY;
        let mut demand = demand_of(&state.world.lock());
        demand.unplaced.truncate(MAX_LISTED);
        demand.empty_nodes.truncate(MAX_LISTED);
        let is_steady = seen.as_ref() == Some(&demand);
        seen = Some(demand.clone());
        if !is_steady || !is_due(told.as_ref(), &demand, Instant::now()) {
            continue;
        }
        let (at, cluster) = (now().unix_secs(), state.cluster.cluster.to_string());
        let body = serde_json::to_vec(&Told { at, cluster: &cluster, demand: &demand }).unwrap_or_default();
        let posted = tokio::select! {
            () = state.shutdown.cancelled() => return,
            posted = hook.post(at, body) => posted,
        };
        state.metrics.webhooks.get_or_create(&posted.is_ok().into()).inc();
        match posted {
            Ok(()) => {
                backoff.reset();
                told = Some((demand, Instant::now()));
            }
            Err(error) => {
                wait = backoff.next(fastrand::f64());
                tracing::warn!(error = %chain(&error), wait = ?wait, "could not tell the demand");
            }
        }
    }
}

/// Whether the program has to hear of it. A program that was told nothing yet knows of no demand.
fn is_due(told: Option<&(FleetDemand, Instant)>, demand: &FleetDemand, now: Instant) -> bool {
    match told {
        None => *demand != FleetDemand::default(),
        Some((before, at)) => {
            before != demand || (!demand.unplaced.is_empty() && now.duration_since(*at) >= AGAIN_AFTER)
        }
    }
}

#[cfg(test)]
mod tests {
    use mvm_proto::object::EmptyNode;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn what_changed_is_told_and_what_still_lacks_again_after_a_while() {
        let lacks: FleetDemand = serde_json::from_value(serde_json::json!({
            "unplaced": [{ "vcpus": 1, "mem_mib": 64, "counts": { "running": 1 } }],
        }))
        .unwrap();
        let empty_node = EmptyNode { node: "n1".parse().unwrap(), cordoned: false };
        let spare = FleetDemand { empty_nodes: vec![empty_node], ..FleetDemand::default() };
        let (nothing, begun) = (FleetDemand::default(), Instant::now());
        assert!(!is_due(None, &nothing, begun));
        assert!(is_due(None, &spare, begun) && is_due(None, &lacks, begun));
        let told = (lacks.clone(), begun);
        assert!(is_due(Some(&told), &nothing, begun), "that it is there now");
        assert!(!is_due(Some(&told), &lacks, begun + AGAIN_AFTER / 2));
        assert!(is_due(Some(&told), &lacks, begun + AGAIN_AFTER));
        assert!(
            !is_due(Some(&(spare.clone(), begun)), &spare, begun + 2 * AGAIN_AFTER),
            "an empty node is told once"
        );
    }
}
