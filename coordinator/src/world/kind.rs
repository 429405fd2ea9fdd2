//! Whether a status changed in kind or in degree only: counts that move, and the words around them, are degree. Pure.

use mvm_proto::object::{NodeObjectStatus, PoolCounts, PoolObjectStatus};
use mvm_proto::status::Condition;
use serde_json::Value;

/// Whether two statuses of a pool differ in degree at most.
pub(crate) fn same_kind_of_pool(before: &Value, after: &Value) -> bool {
    let kind = |status: &Value| {
        let mut status: PoolObjectStatus = serde_json::from_value(status.clone()).ok()?;
        let counts =
            |counts: PoolCounts| [counts.running, counts.warm, counts.sleeping].map(|count| count > 0);
        let some = counts(status.counts);
        status.counts = PoolCounts::default();
        status.ready = String::new();
        let ready_for_claims = status.claimable > 0;
        (status.claimable, status.outdated) = (0, 0);
        if let Some(scale) = &mut status.scale {
            (scale.load, scale.measured_at, scale.reason) = (None, None, String::new());
        }
        status
            .placed
            .iter_mut()
            .for_each(|placed| placed.actual = placed.actual.map(|_| PoolCounts::default()));
        let unplaced = status.unplaced.take().is_some();
        // Which revision, and how it stands, is kind; how far it is, degree.
        let rollout = status.rollout.take().map(|rollout| (rollout.revision, rollout.settled, rollout.phase));
        without_words(&mut status.observed.conditions);
        Some((status, some, ready_for_claims, unplaced, rollout))
    };
    kind(before) == kind(after)
}

/// Whether two statuses of a node differ in degree at most.
pub(crate) fn same_kind_of_node(before: &Value, after: &Value) -> bool {
    let kind = |status: &Value| {
        let mut status: NodeObjectStatus = serde_json::from_value(status.clone()).ok()?;
        without_words(&mut status.observed.conditions);
        Some(status)
    };
    kind(before) == kind(after)
}

fn without_words(conditions: &mut [Condition]) {
    for condition in conditions {
        (condition.message, condition.since) = (String::new(), String::new());
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn status(running: u32, warm: u32, ready: &str, reason: &str) -> Value {
        json!({
            "observed_generation": 1,
            "counts": { "running": running, "warm": warm, "sleeping": 0 },
            "ready": format!("{running}/9"),
            "placed": [{ "node": "n1", "wanted": { "running": 9, "warm": 0, "sleeping": 0 },
                "actual": { "running": running, "warm": warm, "sleeping": 0 } }],
            "conditions": [{ "type": "Ready", "status": ready, "reason": reason, "message": format!("{running} of 9 run"), "since": "2026-01-01T00:00:00Z" }],
        })
    }

    #[test]
    fn counts_that_move_are_degree_and_conditions_and_the_first_instance_are_kind() {
        let before = status(3, 1, "False", "Starting");
        assert!(same_kind_of_pool(&before, &status(4, 2, "False", "Starting")));
        assert!(!same_kind_of_pool(&before, &status(9, 1, "True", "AllPlaced")));
        assert!(!same_kind_of_pool(&before, &status(3, 1, "False", "NodesAway")));
        assert!(!same_kind_of_pool(&before, &status(3, 0, "False", "Starting")), "the last one went");
        let mut generation = before.clone();
        generation["observed_generation"] = json!(2);
        assert!(!same_kind_of_pool(&before, &generation));
    }

    #[test]
    fn the_words_of_a_nodes_condition_are_degree() {
        let of = |status: &str, message: &str| json!({ "state": "Ready", "conditions": [{ "type": "DiskPressure", "status": status, "reason": "Enough", "message": message, "since": "" }] });
        assert!(same_kind_of_node(&of("False", "a"), &of("False", "b")));
        assert!(!same_kind_of_node(&of("False", "a"), &of("True", "a")));
    }
}
