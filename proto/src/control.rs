//! Nouns of the operators' service, `control.proto`, whose fields hold them as text.

use crate::named::named;
use crate::wire::control::v1::PushProgress;

named! {
    /// How far a push is, in the order in which that is told.
    pub enum PushStage {
        /// The document is valid; nothing is stored yet.
        Validated = "validated",
        /// With `dry_run`: the node's planner said what it would do. The last stage.
        Planned = "planned",
        /// Durable at the coordinator.
        Stored = "stored",
        Sent = "sent",
        /// Durable at the node.
        Accepted = "accepted",
        /// The node runs what the document says. The last stage.
        Converged = "converged",
        /// By the node. The last stage.
        Refused = "refused",
        /// The node is not connected, or the time to wait is over.
        Waiting = "waiting",
    }
}

impl PushProgress {
    /// The stage; nothing for one that only a newer coordinator knows.
    #[must_use]
    pub fn known_stage(&self) -> Option<PushStage> {
        self.stage.parse().ok()
    }
}

named! {
    /// What has become of a join token.
    pub enum TokenState {
        Live = "live",
        Used = "used",
        Expired = "expired",
        Revoked = "revoked",
    }
}

named! {
    /// Whether an operator can operate the cluster.
    pub enum OperatorState {
        Active = "active",
        /// None of its certificates is in date.
        Expired = "expired",
        Removed = "removed",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_names_are_those_that_peers_know() {
        let stages =
            ["validated", "planned", "stored", "sent", "accepted", "converged", "refused", "waiting"];
        assert_eq!(PushStage::ALL.map(PushStage::as_str), stages);
        assert_eq!(TokenState::ALL.map(TokenState::as_str), ["live", "used", "expired", "revoked"]);
        assert_eq!(OperatorState::ALL.map(OperatorState::as_str), ["active", "expired", "removed"]);
    }

    #[test]
    fn a_name_reads_back_and_another_is_refused_with_the_names_that_there_are() {
        for stage in PushStage::ALL {
            assert_eq!(stage.as_str().parse(), Ok(stage));
        }
        let error = "Live".parse::<TokenState>().unwrap_err();
        assert_eq!(error.to_string(), "must be one of live, used, expired, revoked");
        let newer = PushProgress { stage: "rehearsed".to_owned(), ..PushProgress::default() };
        assert_eq!(newer.known_stage(), None);
    }
}
