//! What the agent says about documents: accepted when durable, converged when made true, refused with the reason.

use mvm_proto::status::{Mark, NodeStatus};
use mvm_proto::wire::session::v1::{Ack, Stage};
use mvm_proto::{Digest, Envelope, Problem};
use serde::Deserialize;

pub(super) fn accepted(mark: Mark) -> Ack {
    Ack { mark: Some(mark), stage: Stage::Accepted.into(), ..Ack::default() }
}

pub(super) fn refused(envelope_json: &[u8], problem: &Problem, high_water: Option<Mark>) -> Ack {
    Ack {
        mark: claimed_mark(envelope_json),
        stage: Stage::Refused.into(),
        problem: serde_json::to_vec(problem).unwrap_or_default(),
        high_water,
    }
}

/// What a refused document claims to be, as far as it can be read. Only ever reported back, never acted on.
fn claimed_mark(envelope_json: &[u8]) -> Option<Mark> {
    #[derive(Default, Deserialize)]
    #[serde(default)]
    struct Claim {
        epoch: u64,
        generation: u64,
    }
    let envelope = Envelope::from_json(envelope_json).ok()?;
    let claim: Claim = serde_json::from_slice(&envelope.payload).unwrap_or_default();
    Some(Mark::new(claim.epoch, claim.generation, Digest::of(&envelope.payload)))
}

/// The document whose convergence is still to be told.
#[derive(Debug, Default)]
pub(super) struct Awaiting(Option<Mark>);

impl Awaiting {
    /// This document is in force; tell when it is made true.
    pub(super) fn expect(&mut self, mark: Option<Mark>) {
        self.0 = mark;
    }

    /// The ack to send now that the node's status is this.
    pub(super) fn observe(&mut self, status: &NodeStatus) -> Option<Ack> {
        let made_true = self.0.is_some() && status.converged == self.0;
        let mark = if made_true { self.0.take() } else { None }?;
        Some(Ack { mark: Some(mark), stage: Stage::Converged.into(), ..Ack::default() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mark(generation: u64) -> Mark {
        Mark::new(1, generation, Digest::of(&generation.to_be_bytes()))
    }

    fn status(converged: Option<Mark>) -> NodeStatus {
        NodeStatus { converged, ..NodeStatus::default() }
    }

    #[test]
    fn convergence_is_told_once_and_only_for_the_very_document_that_is_awaited() {
        let mut awaiting = Awaiting::default();
        assert_eq!(awaiting.observe(&status(Some(mark(1)))), None, "nothing is awaited");
        awaiting.expect(Some(mark(2)));
        assert_eq!(awaiting.observe(&status(None)), None);
        assert_eq!(awaiting.observe(&status(Some(mark(1)))), None);
        let other_content = Mark { digest: mark(9).digest, ..mark(2) };
        assert_eq!(awaiting.observe(&status(Some(other_content))), None);
        let ack = awaiting.observe(&status(Some(mark(2)))).unwrap();
        assert_eq!((ack.mark, ack.stage), (Some(mark(2)), Stage::Converged.into()));
        assert_eq!(awaiting.observe(&status(Some(mark(2)))), None);
    }

    #[test]
    fn a_refused_document_is_named_as_far_as_it_can_be_read() {
        let problem = Problem::new(409, "older_generation", "older", "");
        let payload = br#"{"epoch":3,"generation":7,"rest":[]}"#.to_vec();
        let envelope =
            Envelope { payload_type: "x".to_owned(), payload: payload.clone(), signatures: vec![] };
        let ack = refused(&envelope.to_json(), &problem, Some(mark(8)));
        assert_eq!(ack.mark, Some(Mark::new(3, 7, Digest::of(&payload))));
        assert_eq!(ack.high_water, Some(mark(8)));
        assert_eq!(serde_json::from_slice::<Problem>(&ack.problem).unwrap(), problem);
        assert_eq!(refused(b"not an envelope", &problem, None).mark, None);
    }
}
