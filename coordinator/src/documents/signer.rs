//! Makes the bytes of documents: numbers them, signs them, and tells what they say apart by its digest. Uses the director's
//! key, and neither the store nor a clock.
//!
//! A signature is some forty microseconds of processor time, so documents that are made together have one (`mvm_pki::batch`). They
//! are made on a thread for such work while the store writes the ones before them.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_pki::{SigningKey, TrustStore, batch};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::envelope::{Payload as _, Signature};
use mvm_proto::text::chain;
use mvm_proto::wire::session::v1::DocumentDelta;
use mvm_proto::{
    ClusterId, DesiredState, Digest, Envelope, NodeId, Problem, Provenance, SignedDocument, Timestamp,
    Unverified,
};
use mvm_store::Guard;

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
    digest: Digest,
    text: Vec<u8>,
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

/// What is to be signed for a node.
struct Draft {
    payload: Vec<u8>,
    assigned: Assigned,
}

impl Signer {
    pub(super) fn content_of(&self, desired: &DesiredState) -> Content {
        let text = desired.to_content(&self.cluster);
        Content { digest: Digest::of(&text), text }
    }

    /// The documents that nodes are to have, signed together.
    pub(super) fn make_all(
        &self,
        all: Vec<(Result<Known, Problem>, DesiredState)>,
        now: Timestamp,
    ) -> Vec<Made> {
        let drafts: Vec<_> = all
            .into_iter()
            .map(|(known, desired)| {
                let content = self.content_of(&desired);
                let draft = known.and_then(|known| {
                    let draft = self.draft_if_new(&desired, &content, &known, now)?;
                    Ok(draft.map(|draft| (draft, known)))
                });
                (desired, content.text.len(), draft)
            })
            .collect();
        let digests =
            drafts.iter().filter_map(|(_, _, draft)| Some(draft.as_ref().ok()?.as_ref()?.0.assigned.digest));
        let digests: Vec<Digest> = digests.collect();
        // One has its own signature, which every agent knows.
        let batch =
            if digests.len() > 1 { self.key.sign_batch(DOCUMENT_PAYLOAD_TYPE, &digests) } else { Vec::new() };
        let mut signatures = batch.into_iter();
        let made = drafts.into_iter().map(|(desired, bytes, draft)| {
            let signed = draft.map(|draft| {
                draft.map(|(draft, known)| {
                    let signature = signatures.next().unwrap_or_else(|| self.own_signature(&draft.payload));
                    seal(&desired.node_id, draft, signature, &known)
                })
            });
            Made { desired, bytes, signed }
        });
        made.collect()
    }

    /// A node that never had a document gets none that is empty: what it has is not ours to take away.
    fn draft_if_new(
        &self,
        desired: &DesiredState,
        content: &Content,
        known: &Known,
        now: Timestamp,
    ) -> Result<Option<Draft>, Problem> {
        let is_same = match &known.before {
            Some(before) => before.value.content == Some(content.digest),
            None => desired.tenants.is_empty() && desired.removed_tenants.is_empty(),
        };
        if is_same { Ok(None) } else { self.draft(&desired.node_id, content, known, None, now).map(Some) }
    }

    /// The next document of a node, with a signature of its own.
    pub(super) fn sign(
        &self,
        desired: &DesiredState,
        known: &Known,
        floor: Option<Numbers>,
        now: Timestamp,
    ) -> Result<Signed, Problem> {
        let node = &desired.node_id;
        let draft = self.draft(node, &self.content_of(desired), known, floor, now)?;
        let signature = self.own_signature(&draft.payload);
        Ok(seal(node, draft, signature, known))
    }

    fn draft(
        &self,
        node: &NodeId,
        content: &Content,
        known: &Known,
        floor: Option<Numbers>,
        now: Timestamp,
    ) -> Result<Draft, Problem> {
        let stored_numbers = known.before.as_ref().map(|before| before.value.numbers);
        let reported = known.record.value.floor.max(floor);
        let numbers =
            numbering::next(self.epoch, stored_numbers, reported).map_err(|_| check::exhausted(node))?;
        // A key that the trust root does not name is found here, not on the nodes.
        let checked = self.trust.current().check_director(&self.key.public(), now);
        checked.map_err(|error| check::unsignable(&error))?;
        let provenance = self.provenance(numbers, now);
        let expires_at = provenance.expires_at;
        let payload = SignedDocument::payload_of(&provenance, &content.text);
        check::size(payload.len())?;
        // What is pushed was read by the strict rules, and what is rendered obeys them: reading it again would cost as much
        // as signing it.
        debug_assert!(SignedDocument::parse(&payload).is_ok(), "agents would refuse the document of {node}");
        let digest = Digest::of(&payload);
        let assigned =
            Assigned { numbers, digest, issued_at: now, expires_at, content: Some(content.digest) };
        Ok(Draft { payload, assigned })
    }

    fn own_signature(&self, payload: &[u8]) -> Signature {
        self.key.sign(DOCUMENT_PAYLOAD_TYPE, payload)
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

/// The same document for an agent that knows of no batches: with a signature of its own, where it has one of a batch. What is
/// not good by this trust is left as it is: a changed store gets no signature for its changes.
pub(super) fn signed_alone(key: &SigningKey, trust: &TrustStore, envelope: Bytes, now: Timestamp) -> Bytes {
    let Ok(read) = Envelope::from_json(&envelope) else { return envelope };
    if !read.signatures.iter().any(|signature| batch::is_of_batch(&signature.bytes)) {
        return envelope;
    }
    match trust.verify_document(Unverified::new(read), now) {
        Ok(verified) => {
            let alone = mvm_pki::seal(DOCUMENT_PAYLOAD_TYPE, verified.envelope().payload.clone(), &[key]);
            alone.to_json().into()
        }
        Err(error) => {
            tracing::warn!(error = %chain(&error), "a document is not signed again for an older agent");
            envelope
        }
    }
}

/// A draft with its signature, as it is stored and sent.
fn seal(node: &NodeId, Draft { payload, assigned }: Draft, signature: Signature, known: &Known) -> Signed {
    let payload_type = DOCUMENT_PAYLOAD_TYPE.to_owned();
    let envelope = Envelope { payload_type, payload, signatures: vec![signature] };
    let before = known.before.as_ref().zip(known.envelope.as_ref());
    let delta = before.and_then(|(before, stored)| {
        let old = Envelope::from_json(stored).ok()?.payload;
        DocumentDelta::between((&old, before.value.digest), (&envelope, assigned.digest)).map(Arc::new)
    });
    let guards = [
        (node_key(node), Guard::Version(known.record.version)),
        (assigned_key(node), unchanged(known.before.as_ref())),
    ];
    Signed {
        node: node.clone(),
        stored: Stored { assigned, envelope: envelope.to_json().into(), delta, trace: None },
        guards,
    }
}

#[cfg(test)]
mod tests {
    use mvm_pki::RootMetadata;
    use mvm_pki::trust::{RoleSpec, RootSpec};
    use mvm_proto::document::SCHEMA_VERSION;

    use super::*;

    fn now() -> Timestamp {
        Timestamp::from_unix_ms(1_700_000_000_000)
    }

    /// A director and who trusts it.
    fn director() -> (SigningKey, TrustStore) {
        let [director, root, image] = [(); 3].map(|()| SigningKey::generate().unwrap());
        let role = |key: &SigningKey| RoleSpec::single(key.public());
        let spec = RootSpec {
            cluster: "test".parse().unwrap(),
            expires_at: now() + Duration::from_secs(3600),
            dev: true,
            resets_high_water: false,
            root: role(&root),
            director: role(&director),
            image: role(&image),
        };
        let first = RootMetadata::first(&spec, now()).unwrap().seal(&[&root]);
        (director, TrustStore::pin(first, now()).unwrap())
    }

    fn payload(generation: u64) -> Vec<u8> {
        let provenance = Provenance {
            cluster: "test".parse().unwrap(),
            epoch: 1,
            generation,
            issued_at: now(),
            expires_at: now() + Duration::from_secs(60),
        };
        let desired = DesiredState {
            schema_version: SCHEMA_VERSION,
            node_id: "n1".parse().unwrap(),
            cluster: None,
            tenants: Vec::new(),
            prune_unknown_tenants: false,
            prune_unknown_pools: false,
            removed_tenants: Vec::new(),
        };
        SignedDocument { provenance, desired }.to_payload()
    }

    fn in_batch(key: &SigningKey) -> Envelope {
        let payloads = [payload(7), payload(8)];
        let digests = [Digest::of(&payloads[0]), Digest::of(&payloads[1])];
        let signature = key.sign_batch(DOCUMENT_PAYLOAD_TYPE, &digests).remove(0);
        let [payload, _] = payloads;
        Envelope { payload_type: DOCUMENT_PAYLOAD_TYPE.to_owned(), payload, signatures: vec![signature] }
    }

    #[test]
    fn a_document_of_a_batch_gets_its_own_signature_and_no_changed_or_foreign_one_does() {
        let (key, trust) = director();
        let shared = in_batch(&key);
        let alone = signed_alone(&key, &trust, shared.to_json().into(), now());
        let own = mvm_pki::seal(DOCUMENT_PAYLOAD_TYPE, shared.payload.clone(), &[&key]);
        assert_eq!(Envelope::from_json(&alone).as_ref(), Ok(&own));
        assert!(trust.verify_document(Unverified::new(own), now()).is_ok());
        assert_eq!(signed_alone(&key, &trust, alone.clone(), now()), alone, "it has one");

        let changed = Envelope { payload: payload(9), ..shared };
        let (stranger, _) = director();
        for bad in [changed, in_batch(&stranger)] {
            let bytes = Bytes::from(bad.to_json());
            assert_eq!(signed_alone(&key, &trust, bytes.clone(), now()), bytes);
        }
    }
}
