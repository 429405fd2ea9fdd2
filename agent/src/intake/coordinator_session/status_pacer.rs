//! When to send the node's status: at once when a document was accepted or made true, else at most once a second, and
//! not at all while nothing but the time of day changed. Pure: time arrives from the caller.

use std::time::Duration;

use mvm_proto::status::NodeStatus;
use tokio::time::Instant;

/// Changes within this time travel as one status, the newest.
pub(super) const PACE: Duration = Duration::from_secs(1);

/// A status that does not change is repeated this often, so that its times do not look stale.
pub(super) const REFRESH: Duration = Duration::from_secs(300);

#[derive(Debug, Default)]
pub(super) struct StatusPacer {
    sent: Option<(NodeStatus, Instant)>,
}

impl StatusPacer {
    /// When `status` is due; in the past means now.
    pub(super) fn due(&self, status: &NodeStatus, now: Instant) -> Instant {
        let Some((sent, at)) = &self.sent else { return now };
        if (&sent.accepted, &sent.converged) != (&status.accepted, &status.converged) {
            now
        } else if differs(sent, status) {
            *at + PACE
        } else {
            *at + REFRESH
        }
    }

    /// Notes what is sent now; returns when it is due again if nothing changes.
    pub(super) fn sent(&mut self, status: NodeStatus, now: Instant) -> Instant {
        self.sent = Some((status, now));
        now + REFRESH
    }
}

/// Whether anything but the times of observation differs.
fn differs(a: &NodeStatus, b: &NodeStatus) -> bool {
    a.conditions != b.conditions
        || a.pools != b.pools
        || a.usage != b.usage
        || a.node_id != b.node_id
        || a.removals != b.removals
}

#[cfg(test)]
mod tests {
    use super::*;
    use mvm_proto::Digest;
    use mvm_proto::status::{Mark, Usage};

    fn status(instances: u32, converged: Option<u64>) -> NodeStatus {
        NodeStatus {
            converged: converged.map(|generation| Mark::new(1, generation, Digest::of(b""))),
            usage: Some(Usage { instances, ..Usage::default() }),
            ..NodeStatus::default()
        }
    }

    #[test]
    fn the_first_status_and_every_milestone_go_at_once_and_the_rest_waits_its_turn() {
        let now = Instant::now();
        let mut pacer = StatusPacer::default();
        assert_eq!(pacer.due(&status(0, None), now), now);
        pacer.sent(status(0, None), now);
        assert_eq!(pacer.due(&status(1, None), now), now + PACE);
        assert_eq!(pacer.due(&status(1, Some(1)), now), now);
    }

    #[test]
    fn a_status_that_only_grew_older_is_repeated_rarely() {
        let now = Instant::now();
        let mut pacer = StatusPacer::default();
        pacer.sent(status(1, None), now);
        let later = NodeStatus { observed_at: "later".to_owned(), ..status(1, None) };
        assert_eq!(pacer.due(&later, now), now + REFRESH);
    }
}
