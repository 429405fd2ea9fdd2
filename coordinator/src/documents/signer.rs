//! Makes the bytes of documents: numbers them, signs them, and tells what they say apart by its digest. Uses the director's
//! key, and neither the store nor a clock.
//!
//! A signature is some forty microseconds of processor time, so a batch is signed on a thread for such work while the store
//! writes the one before it.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_pki::{SigningKey, seal};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::envelope::Payload as _;
use mvm_proto::wire::session::v1::DocumentDelta;
use mvm_proto::{ClusterId, DesiredState, Digest, Envelope, Problem, Provenance, SignedDocument, Timestamp};

use super::{Signed, Stored, check};
use crate::numbering;
use crate::records::{Assigned, NodeRecord, Numbers, assigned_key, node_key};
use crate::stored::{Versioned, unchanged};
use crate::trust::Trust;

pub(super) struct Signer {
    pub(super) key: SigningKey,
    pub(super) trust: Arc<Trust>,
    pub(super) cluster: ClusterId,
    pub(super) epoch: u64,
    pub(super) life: Duration,
}

/// What the store has of a node.
pub(super) struct Known {
    pub(super) record: Versioned<NodeRecord>,
    pub(super) before: Option<Versioned<Assigned>>,
    /// The document before, as it was sent.
    pub(super) envelope: Option<Bytes>,
}

/// What a document says, without what is added to it here.
pub(super) struct Content {
    pub(super) digest: Digest,
    pub(super) bytes: usize,
}

/// A document that was made for a node.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) desired: DesiredState,
    /// How large it is, without numbers and times.
    pub(crate) bytes: usize,
    /// None where the node's newest document says the same.
    pub(crate) signed: Result<Option<Signed>, Problem>,
}

impl Signer {
    pub(super) fn content_of(&self, desired: &DesiredState) -> Content {
        // A document of strings, numbers and lists always serialises.
        let text = if desired.cluster.as_ref() == Some(&self.cluster) {
            serde_json::to_vec(desired)
        } else {
            serde_json::to_vec(&DesiredState { cluster: Some(self.cluster.clone()), ..desired.clone() })
        };
        let text = text.unwrap_or_default();
        Content { digest: Digest::of(&text), bytes: text.len() }
    }

    /// The document that a node is to have.
    pub(super) fn make(&self, desired: DesiredState, known: Result<Known, Problem>, now: Timestamp) -> Made {
        let content = self.content_of(&desired);
        let signed = known.and_then(|known| self.sign_if_new(&desired, content.digest, &known, now));
        Made { desired, bytes: content.bytes, signed }
    }

    /// A node that never had a document gets none that is empty: what it has is not ours to take away.
    fn sign_if_new(
        &self,
        desired: &DesiredState,
        content: Digest,
        known: &Known,
        now: Timestamp,
    ) -> Result<Option<Signed>, Problem> {
        let is_same = match &known.before {
            Some(before) => before.value.content == Some(content),
            None => desired.tenants.is_empty() && desired.removed_tenants.is_empty(),
        };
        if is_same { Ok(None) } else { self.sign(desired, content, known, None, now).map(Some) }
    }

    /// The next document of a node.
    pub(super) fn sign(
        &self,
        desired: &DesiredState,
        content: Digest,
        known: &Known,
        floor: Option<Numbers>,
        now: Timestamp,
    ) -> Result<Signed, Problem> {
        let node = &desired.node_id;
        let stored_numbers = known.before.as_ref().map(|before| before.value.numbers);
        let reported = known.record.value.floor.max(floor);
        let numbers =
            numbering::next(self.epoch, stored_numbers, reported).map_err(|_| check::exhausted(node))?;
        let stored = self.seal(desired, content, numbers, known, now)?;
        let guards = [
            (node_key(node), mvm_store::Guard::Version(known.record.version)),
            (assigned_key(node), unchanged(known.before.as_ref())),
        ];
        Ok(Signed { node: node.clone(), stored, guards })
    }

    fn seal(
        &self,
        desired: &DesiredState,
        content: Digest,
        numbers: Numbers,
        known: &Known,
        now: Timestamp,
    ) -> Result<Stored, Problem> {
        // A key that the trust root does not name is found here, not on the nodes.
        let checked = self.trust.current().check_director(&self.key.public(), now);
        checked.map_err(|error| check::unsignable(&error))?;
        let provenance = self.provenance(numbers, now);
        let expires_at = provenance.expires_at;
        let payload = SignedDocument { provenance, desired: desired.clone() }.to_payload();
        check::size(payload.len())?;
        // What is pushed was read by the strict rules, and what is rendered obeys them: reading it again would cost as much
        // as signing it.
        debug_assert!(
            SignedDocument::parse(&payload).is_ok(),
            "agents would refuse the document of {node}",
            node = desired.node_id
        );
        let digest = Digest::of(&payload);
        let envelope = seal(DOCUMENT_PAYLOAD_TYPE, payload, &[&self.key]);
        let assigned = Assigned { numbers, digest, issued_at: now, expires_at, content: Some(content) };
        let before = known.envelope.as_ref().and_then(|before| Envelope::from_json(before).ok());
        let delta =
            before.and_then(|before| DocumentDelta::between(&before.payload, &envelope)).map(Arc::new);
        Ok(Stored { assigned, envelope: envelope.to_json().into(), delta, trace: None })
    }

    pub(super) fn provenance(&self, numbers: Numbers, now: Timestamp) -> Provenance {
        Provenance {
            cluster: self.cluster.clone(),
            epoch: numbers.epoch,
            generation: numbers.generation,
            issued_at: now,
            expires_at: now + self.life,
        }
    }
}
