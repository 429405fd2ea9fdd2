//! Tells placement of nodes whose standing changes because time passes: those that stayed away for too long, and those that
//! came back and stayed. Sessions that begin and end wake this task, and not placement.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

use mvm_proto::{NodeId, Timestamp};
use tokio::time::Instant;

use crate::state::State;

/// Without anything to wait for, the task still looks around this often.
const IDLE_AT_MOST: Duration = Duration::from_secs(300);

/// When something of a node changes by itself.
#[derive(Debug, Default)]
struct Due {
    order: BTreeSet<(Timestamp, NodeId)>,
    at: BTreeMap<NodeId, Timestamp>,
}

impl Due {
    fn set(&mut self, node: &NodeId, at: Option<Timestamp>) {
        if let Some(before) = self.at.remove(node) {
            self.order.remove(&(before, node.clone()));
        }
        if let Some(at) = at {
            self.at.insert(node.clone(), at);
            self.order.insert((at, node.clone()));
        }
    }

    fn first(&self) -> Option<Timestamp> {
        self.order.first().map(|(at, _)| *at)
    }

    /// Takes the first node whose time has come.
    fn take(&mut self, now: Timestamp) -> Option<NodeId> {
        let (_, node) = self.order.first().filter(|(at, _)| *at <= now)?.clone();
        self.set(&node, None);
        Some(node)
    }
}

/// Runs until shutdown.
pub(crate) async fn health_task(state: Arc<State>) {
    let (fleet, mut due) = (&state.fleet, Due::default());
    for node in fleet.known_nodes() {
        due.set(&node, fleet.changes_at(&node, fleet.steady.now()));
    }
    loop {
        let wait = due.first().map_or(IDLE_AT_MOST, |at| at.since(fleet.steady.now()).min(IDLE_AT_MOST));
        tokio::select! {
            () = state.shutdown.cancelled() => return,
            () = fleet.sessions_changed() => {}
            () = tokio::time::sleep_until(Instant::now() + wait) => {}
        }
        for node in fleet.take_changed_sessions() {
            due.set(&node, fleet.changes_at(&node, fleet.steady.now()));
        }
        while let Some(node) = due.take(fleet.steady.now()) {
            // Also what is known of it last is written: it may be away for long.
            fleet.mark_dirty(&node);
            due.set(&node, fleet.changes_at(&node, fleet.steady.now()));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_due_once_at_the_time_that_was_set_last() {
        let at = Timestamp::from_unix_ms;
        let node = |name: &str| -> NodeId { name.parse().unwrap() };
        let mut due = Due::default();
        due.set(&node("a"), Some(at(5)));
        due.set(&node("b"), Some(at(3)));
        due.set(&node("a"), Some(at(9)));
        due.set(&node("c"), Some(at(1)));
        due.set(&node("c"), None);
        assert_eq!((due.first(), due.take(at(2))), (Some(at(3)), None));
        assert_eq!(
            (due.take(at(9)), due.take(at(9)), due.take(at(9))),
            (Some(node("b")), Some(node("a")), None)
        );
    }
}
