//! Verifies documents that the coordinator reads back from its store, and words why one can't be signed or used.

use mvm_pki::{PublicKey, TrustError};
use mvm_proto::document::MAX_DOCUMENT_BYTES;
use mvm_proto::envelope::{CheckSignatures, Signature, Signed};
use mvm_proto::status::Event;
use mvm_proto::text::chain;
use mvm_proto::{Digest, NodeId, Problem, Timestamp};
use mvm_store::StoreError;

use super::{Carried, Stored};
use crate::fleet::LiveNode;
use crate::records::Numbers;
use crate::stored::StateError;

/// Accepts what one of these director keys signed, or what is on the list of earlier ones' documents.
pub(super) struct DirectorSignature<'a> {
    pub(super) keys: Vec<PublicKey>,
    pub(super) carried: &'a Carried,
}

#[derive(Debug, thiserror::Error)]
#[error(
    "no director key of the trust root signed the document, and it was not stored when the previous director key was replaced"
)]
pub(super) struct NotOurs;

#[derive(Debug, thiserror::Error)]
#[error("the document is for another node or cluster")]
struct Misplaced;

impl CheckSignatures for DirectorSignature<'_> {
    type Error = NotOurs;
    fn check(&self, signed: &Signed<'_>, signatures: &[Signature]) -> Result<(), NotOurs> {
        let by_any =
            |signature: &Signature| self.keys.iter().any(|key| key.vouches_for(signed, &signature.bytes));
        if signatures.iter().any(by_any) || self.carried.contains(&Digest::of(&signed.encoding())) {
            return Ok(());
        }
        Err(NotOurs)
    }
}

/// The own signature would not be accepted: key and trust root do not fit, or the root has expired.
pub(super) fn unsignable(error: &TrustError) -> Problem {
    tracing::error!(error = %chain(error), "agents would refuse this coordinator's documents");
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
        format!("no director key of the trust root signed the stored document of node {node}"),
        "Push the node's document again.",
    )
}

pub(super) fn misplaced(node: &NodeId) -> Problem {
    unusable(node, &Misplaced)
}

/// A stored document that can't be loaded because its parts do not fit, or the store's own trouble.
pub(super) fn unloadable(node: &NodeId, error: StateError) -> Problem {
    match error {
        StateError::Store(cause @ StoreError::Conflict { .. }) => unusable(node, &cause),
        error => error.into(),
    }
}

/// Trouble with one node's document is told in the log and in the node's events; it must not end the session, which is of
/// use all the same.
pub(super) fn set_aside(
    node: &NodeId,
    live: &LiveNode,
    issued: Result<Option<Stored>, Problem>,
    now: Timestamp,
) -> Result<Option<Stored>, Problem> {
    const DOCUMENT_ERRORS: [&str; 4] =
        ["director_not_trusted", "stored_document_unusable", "numbers_exhausted", "document_too_large"];
    match issued {
        Err(problem) if DOCUMENT_ERRORS.contains(&problem.code.as_str()) => {
            tracing::warn!(%node, %problem, "no document for the node");
            let message = format!("{}. {}", problem.detail, problem.remediation);
            let kind = "DocumentNotSent".to_owned();
            let event = Event { at: now.to_string(), kind, subject: String::new(), message };
            live.change(|live| live.add_event_once(event));
            Ok(None)
        }
        issued => issued,
    }
}

/// What an operator is told of a node that runs a newer document than the one stored here.
pub(super) fn stored_older(node: &NodeId, stored: Numbers, reported: Numbers, now: Timestamp) -> Event {
    let message = format!(
        "the node has epoch {} generation {}, the newest stored is epoch {} generation {}: newer documents were lost \
         here, as after a restore from a backup; nothing is sent until the node's document is pushed again",
        reported.epoch, reported.generation, stored.epoch, stored.generation
    );
    tracing::warn!(%node, %message, "the stored document is older than the node's");
    Event { at: now.to_string(), kind: "StoredDocumentOlder".to_owned(), subject: String::new(), message }
}

/// What is sent is larger than what was written: every field is there, with its default where none was given.
pub(super) fn size(bytes: usize) -> Result<(), Problem> {
    if bytes <= MAX_DOCUMENT_BYTES {
        return Ok(());
    }
    let detail = format!(
        "with all defaults filled in, as it is sent to the node, the document has {bytes} bytes; the limit is \
         {MAX_DOCUMENT_BYTES}"
    );
    Err(Problem::new(413, "document_too_large", detail, "Split it over more nodes."))
}

pub(super) fn exhausted(node: &NodeId) -> Problem {
    Problem::new(
        409,
        "numbers_exhausted",
        format!("node {node} reports the highest possible numbers, so no newer document can be issued"),
        "Upload a next trust root that resets the high-water mark, and look at what the node runs.",
    )
}
