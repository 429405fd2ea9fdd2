//! The document in force: the accepted document that the reconcile loop follows.

use std::sync::Arc;

use mvm_proto::status::Mark;
use mvm_proto::{DesiredState, Digest, SignedDocument, Timestamp, TraceContext};

/// The document in force. What the reconcile task is given.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CurrentDocument {
    pub desired: DesiredState,
    /// Absent: the document came from a local file.
    pub mark: Option<Mark>,
    /// Past this the document stays in force and changes nothing more, and a condition says so.
    pub expires_at: Option<Timestamp>,
    /// Where what is done for it belongs, where someone records that.
    pub trace: Option<TraceContext>,
}

impl CurrentDocument {
    /// A document from a local file, which has no place in any order.
    #[must_use]
    pub fn local(desired: DesiredState) -> Arc<Self> {
        Arc::new(Self { desired, mark: None, expires_at: None, trace: None })
    }

    /// Whether it may change nothing more.
    #[must_use]
    pub fn is_expired(&self, now: Timestamp) -> bool {
        self.expires_at.is_some_and(|at| at <= now)
    }

    pub(crate) fn signed(document: SignedDocument, digest: Digest, trace: Option<TraceContext>) -> Arc<Self> {
        let provenance = &document.provenance;
        let mark = Some(Mark::new(provenance.epoch, provenance.generation, digest));
        let expires_at = Some(provenance.expires_at);
        Arc::new(Self { desired: document.desired, mark, expires_at, trace })
    }
}
