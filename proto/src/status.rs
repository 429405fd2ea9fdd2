//! What a node says of itself: the messages of [`crate::wire::node`] with what code needs to build them.

pub use crate::wire::node::v1::{
    Capability, Capacity, Condition, Counts, Event, InstanceStatus, Mark, NodeInfo, NodeStatus, PassedOver,
    PoolStatus, Usage, WakeTiming,
};

pub mod fit;

use crate::{Digest, Timestamp};

/// Every condition that a node has. A coordinator counts these alone, so that no node can add series to its metrics.
pub const CONDITIONS: [&str; 18] = [
    "ArtifactsReady",
    "Converged",
    "DesiredStateCurrent",
    "DiskWritable",
    "DnsReady",
    "DriverReady",
    "ImagesVouched",
    "InfoComplete",
    "LimitsHeld",
    "NetworkReady",
    "PrivilegesDropped",
    "Ready",
    "SecretsReady",
    "SessionConnected",
    "SessionsPersisted",
    "StatusComplete",
    "VmsAccountedFor",
    "WorkloadsRunning",
];

impl Mark {
    #[must_use]
    pub fn new(epoch: u64, generation: u64, digest: Digest) -> Self {
        Self { epoch, generation, digest: digest.to_string() }
    }

    /// The order in which documents replace each other.
    #[must_use]
    pub fn order(&self) -> (u64, u64) {
        (self.epoch, self.generation)
    }
}

impl Condition {
    #[must_use]
    pub fn new(kind: &str, holds: bool, reason: &str, message: impl Into<String>, since: Timestamp) -> Self {
        debug_assert!(CONDITIONS.contains(&kind), "{kind} is in no list of conditions");
        Self {
            r#type: kind.to_owned(),
            status: if holds { "True" } else { "False" }.to_owned(),
            reason: reason.to_owned(),
            message: message.into(),
            since: since.to_string(),
        }
    }
}

/// Puts `condition` in its place by type; `since` stays when the status did not change.
pub fn set_condition(conditions: &mut Vec<Condition>, mut condition: Condition) {
    match conditions.iter_mut().find(|old| old.r#type == condition.r#type) {
        Some(old) => {
            if old.status == condition.status {
                condition.since.clone_from(&old.since);
            }
            *old = condition;
        }
        None => conditions.push(condition),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_condition_that_did_not_change_keeps_its_time() {
        let at = Timestamp::from_unix_ms;
        let mut conditions = vec![Condition::new("Converged", true, "Done", "", at(1_000))];
        set_condition(&mut conditions, Condition::new("Converged", true, "Done", "again", at(5_000)));
        assert_eq!((conditions.len(), conditions[0].since.as_str()), (1, "1970-01-01T00:00:01Z"));
        set_condition(&mut conditions, Condition::new("Converged", false, "Working", "", at(9_000)));
        assert_eq!(conditions[0].since, "1970-01-01T00:00:09Z");
    }
}
