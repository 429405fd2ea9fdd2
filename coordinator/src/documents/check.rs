//! Signatures on what the own store gives back, and what is told when a document can't be signed or used.

use mvm_pki::{PublicKey, TrustError};
use mvm_proto::envelope::{CheckSignatures, Signature};
use mvm_proto::{NodeId, Problem};

use crate::error::chain;
use crate::refuse;

/// Accepts what this coordinator's director key signed, and nothing else.
pub(super) struct OwnSignature(pub(super) PublicKey);

#[derive(Debug, thiserror::Error)]
#[error("it does not carry this coordinator's signature")]
pub(super) struct NotOurs;

impl CheckSignatures for OwnSignature {
    type Error = NotOurs;
    fn check(&self, signed: &[u8], signatures: &[Signature]) -> Result<(), NotOurs> {
        match signatures.iter().any(|signature| self.0.verifies(signed, &signature.bytes)) {
            true => Ok(()),
            false => Err(NotOurs),
        }
    }
}

/// The own signature would not be accepted: key and trust root do not fit, or the root has expired.
pub(super) fn unsignable(error: &TrustError) -> Problem {
    tracing::error!(error = %chain(error), "agents would refuse what this coordinator signs");
    let detail = format!("agents would refuse a document signed now: {}", chain(error));
    Problem::new(
        503,
        "director_not_trusted",
        detail,
        "Upload the next trust root that names this coordinator's key.",
    )
}

pub(super) fn unusable<E: std::error::Error + 'static>(node: &NodeId, error: &E) -> Problem {
    tracing::error!(%node, error = %chain(error), "the stored document can't be used");
    Problem::new(
        500,
        "stored_document_unusable",
        format!("the stored document of node {node} is not as this coordinator signed it"),
        "Push the node's document again.",
    )
}

pub(super) fn misplaced(node: &NodeId) -> Problem {
    tracing::error!(%node, "the document stored for this node is another's");
    refuse::internal(&NotOurs)
}

pub(super) fn exhausted(node: &NodeId) -> Problem {
    Problem::new(
        409,
        "numbers_exhausted",
        format!("node {node} reports numbers that leave no higher ones"),
        "Upload a next trust root that resets the high-water mark, and look at what the node runs.",
    )
}
