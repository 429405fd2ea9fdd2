//! Numbers, signs and stores the document of each node. The only place that uses the director's key.
//!
//! A document is accepted once it is stored: signed, under numbers above everything that the node ever reported, in
//! one transaction guarded by the document before it. Delivery is the fleet's business and may take days.

mod carried;
mod check;
mod due;
mod reset;
mod signer;

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_pki::SigningKey;
use mvm_proto::status::Mark;
use mvm_proto::wire::session::v1::DocumentDelta;
use mvm_proto::{
    ClusterId, DesiredState, Digest, NodeId, Problem, SignedDocument, Timestamp, TraceContext, Unverified,
    Verified,
};
use mvm_store::{Guard, Store, StoreError, Transaction};

use crate::fleet::LiveNode;
use crate::numbering::{self, AfterHello};
use crate::records::{ASSIGNED, Assigned, NodeRecord, Numbers, assigned_key, envelope_key, node_key};
use crate::refuse;
use crate::stored::{Backend, MAX_TRIES, StateError, Versioned, encode, load, load_all};
use crate::trust::Trust;
pub(crate) use carried::Carried;
use check::DirectorSignature;
use due::DueList;
pub(crate) use signer::Made;
use signer::{Known, Signer};

/// A stored document: its numbers and the envelope, exactly as it is sent.
#[derive(Debug, Clone)]
pub(crate) struct Stored {
    pub(crate) assigned: Assigned,
    pub(crate) envelope: Bytes,
    /// The same as what changed of the document before it, for a node that has that. None of one that was read from the store.
    pub(crate) delta: Option<Arc<DocumentDelta>>,
    /// Where what the node makes of it belongs, for a document that a traced request caused.
    pub(crate) trace: Option<TraceContext>,
}

/// A document that is signed and not stored yet, with what has to be so still when it is.
#[derive(Debug, Clone)]
pub(crate) struct Signed {
    node: NodeId,
    pub(crate) stored: Stored,
    guards: [(String, Guard); 2],
}

impl Signed {
    /// How many changes it makes in a transaction.
    pub(crate) const CHANGES: usize = 2;
    pub(crate) const GUARDS: usize = 2;

    pub(crate) fn add_to(&self, txn: Transaction) -> Transaction {
        let guarded = self.guards.iter().fold(txn, |txn, (key, guard)| txn.guard(key.as_str(), *guard));
        guarded
            .put(assigned_key(&self.node), encode(&self.stored.assigned))
            .put(envelope_key(&self.node), self.stored.envelope.clone())
    }

    /// Whether the node has no document yet.
    pub(crate) fn is_first(&self) -> bool {
        matches!(self.guards, [_, (_, Guard::Absent)])
    }

    /// Whether one of its guards is on this key.
    pub(crate) fn is_guarded_by(&self, key: &str) -> bool {
        self.guards.iter().any(|(guarded, _)| guarded == key)
    }
}

/// What a new document is to say.
enum Content<'a> {
    New(&'a DesiredState),
    /// What the stored one says; nothing happens unless it is still this one, when given, and the newest that is known
    /// of the node.
    Again {
        only_if: Option<&'a Assigned>,
    },
}

pub(crate) struct Documents {
    store: Backend,
    signer: Arc<Signer>,
    trust: Arc<Trust>,
    carried: Carried,
    cluster: ClusterId,
    pub(crate) due: DueList,
}

impl Documents {
    pub(crate) fn new(
        store: Backend,
        director: SigningKey,
        (trust, carried): (Arc<Trust>, Carried),
        cluster: ClusterId,
        epoch: u64,
        life: Duration,
    ) -> Self {
        let signer =
            Signer { key: director, trust: Arc::clone(&trust), cluster: cluster.clone(), epoch, life };
        Self { store, signer: Arc::new(signer), trust, carried, cluster, due: DueList::default() }
    }

    /// How many nodes have a document. None is due yet, however old: what a store says counts only once the node has said
    /// how far it is, because the store may be a restored backup.
    pub(crate) async fn count_assigned(&self) -> Result<usize, StateError> {
        Ok(load_all::<Assigned>(&self.store, ASSIGNED).await?.len())
    }

    /// Reads what an operator wrote and holds it against the rules that agents hold it against.
    pub(crate) fn read(
        &self,
        bytes: &[u8],
        node: Option<NodeId>,
        now: Timestamp,
    ) -> Result<DesiredState, Problem> {
        let mut desired = DesiredState::parse(bytes)?;
        if let Some(node) = node {
            desired.node_id = node;
        }
        if desired.cluster.as_ref().is_some_and(|cluster| *cluster != self.cluster) {
            let detail = format!("the document is for another cluster than {}", self.cluster);
            return Err(Problem::new(
                422,
                "wrong_cluster",
                detail,
                "Remove `cluster`, or push it where it belongs.",
            ));
        }
        let trust = self.trust.current();
        trust.check_images(&desired, now).map_err(|error| error.to_problem())?;
        // With the longest numbers, so that what is valid here fits whatever numbers it gets.
        let longest = Numbers { epoch: numbering::MAX_NUMBER, generation: numbering::MAX_NUMBER };
        let document = SignedDocument { provenance: self.signer.provenance(longest, now), desired };
        check::size(document.to_payload().len())?;
        Ok(document.desired)
    }

    /// Stores `desired` as the newest document of its node.
    pub(crate) async fn push(&self, desired: &DesiredState, now: Timestamp) -> Result<Stored, Problem> {
        let stored = self.issue(&desired.node_id, &Content::New(desired), None, now).await?;
        stored.ok_or_else(|| refuse::unknown_node(&desired.node_id))
    }

    /// Issues the stored document again with a new life, if it is still `expected`.
    pub(crate) async fn reissue(
        &self,
        node: &NodeId,
        expected: &Assigned,
        now: Timestamp,
    ) -> Result<Option<Stored>, Problem> {
        self.issue(node, &Content::Again { only_if: Some(expected) }, None, now).await
    }

    pub(crate) async fn assigned(&self, node: &NodeId) -> Result<Option<Assigned>, StateError> {
        Ok(load(&self.store, &assigned_key(node)).await?.map(|found: Versioned<Assigned>| found.value))
    }

    /// The newest document of a node.
    pub(crate) async fn load(&self, node: &NodeId) -> Result<Option<Stored>, StateError> {
        let key = assigned_key(node);
        for _ in 0..MAX_TRIES {
            let Some(before) = load::<Assigned>(&self.store, &key).await? else {
                return Ok(None);
            };
            let envelope = self.store.get(&envelope_key(node)).await?;
            // Both are written by one transaction, so equal versions mean that they belong together.
            match envelope {
                Some(envelope) if envelope.version == before.version => {
                    let (assigned, envelope) = (before.value, envelope.value);
                    return Ok(Some(Stored { assigned, envelope, delta: None, trace: None }));
                }
                _ => tokio::task::yield_now().await,
            }
        }
        Err(StoreError::Conflict { key }.into())
    }

    /// The newest document of a node in a form that its agent accepts now: one that is past half of its life, that
    /// another director key signed, or that was not numbered since a reset, is issued again.
    async fn load_acceptable(&self, node: &NodeId, now: Timestamp) -> Result<Option<Stored>, Problem> {
        let stored = match self.load(node).await {
            Ok(Some(stored)) => stored,
            Ok(None) => return Ok(None),
            Err(error) => return Err(check::unloadable(node, error)),
        };
        let accepted = |envelope| self.trust.current().verify_document(envelope, now).is_ok();
        if stored.assigned.numbers != reset::UNNUMBERED
            && stored.assigned.reissue_at() > now
            && Unverified::from_json(&stored.envelope).is_ok_and(accepted)
        {
            self.due.set(node, stored.assigned.reissue_at());
            return Ok(Some(stored));
        }
        let again = Content::Again { only_if: Some(&stored.assigned) };
        self.issue(node, &again, None, now).await
    }

    /// What to send to a node whose ledger holds `reported`: the document that it lacks, if any. A node that is past the
    /// stored document is told nothing: what it runs was lost here, and only an operator knows whether the older content
    /// is still wanted. It is marked, and the next push is numbered above it. `None` as well when the document can't be
    /// issued: the session goes on without, and the node's events say so.
    pub(crate) async fn after_hello(
        &self,
        node: &NodeId,
        live: &LiveNode,
        reported: Option<&Mark>,
        now: Timestamp,
    ) -> Result<Option<Stored>, Problem> {
        let assigned = self.assigned(node).await?;
        match numbering::after_hello(assigned.as_ref(), reported) {
            AfterHello::Nothing => {
                if let Some(assigned) = assigned {
                    self.due.set(node, assigned.reissue_at());
                }
                Ok(None)
            }
            AfterHello::Send => check::set_aside(node, live, self.load_acceptable(node, now).await, now),
            AfterHello::StoredOlder => {
                if let (Some(assigned), Some(reported)) = (assigned, reported) {
                    self.remember(node, Numbers::from(reported)).await?;
                    let event = check::stored_older(node, assigned.numbers, Numbers::from(reported), now);
                    live.change(|live| live.add_event_once(event));
                }
                Ok(None)
            }
            AfterHello::Remember => {
                if let Some(reported) = reported {
                    self.remember(node, Numbers::from(reported)).await?;
                }
                Ok(None)
            }
            AfterHello::Renumber => {
                tracing::warn!(%node, "the node has different content under the stored document's numbers; issuing the document again");
                check::set_aside(node, live, self.renumber(node, reported.map(Numbers::from), now).await, now)
            }
        }
    }

    /// The document under new numbers, if the node refused it because it is past it; `None` if it is not. What was sent
    /// is the newest that was known of the node, so it is meant to replace what the node has.
    pub(crate) async fn renumber_if_past(
        &self,
        node: &NodeId,
        live: &LiveNode,
        reported: &Mark,
        now: Timestamp,
    ) -> Result<Option<Stored>, Problem> {
        let assigned = self.assigned(node).await?;
        match numbering::after_hello(assigned.as_ref(), Some(reported)) {
            AfterHello::Renumber | AfterHello::StoredOlder => {
                tracing::warn!(%node, "the node has a newer generation than the document sent; issuing it again above that");
                let numbered = self.renumber(node, Some(Numbers::from(reported)), now).await;
                check::set_aside(node, live, numbered, now)
            }
            AfterHello::Nothing | AfterHello::Send | AfterHello::Remember => Ok(None),
        }
    }

    async fn renumber(
        &self,
        node: &NodeId,
        floor: Option<Numbers>,
        now: Timestamp,
    ) -> Result<Option<Stored>, Problem> {
        let again = Content::Again { only_if: None };
        self.issue(node, &again, floor, now).await
    }

    /// Keeps in mind that a node is past these numbers, for the first document to come.
    async fn remember(&self, node: &NodeId, reported: Numbers) -> Result<(), Problem> {
        let key = node_key(node);
        for _ in 0..MAX_TRIES {
            let found: Option<Versioned<NodeRecord>> = load(&self.store, &key).await?;
            let Some(found) = found.filter(|found| found.value.floor < Some(reported)) else { return Ok(()) };
            let record = NodeRecord { floor: Some(reported), ..found.value };
            let txn = Transaction::new().guard(key.as_str(), Guard::Version(found.version));
            match self.store.commit(txn.put(key.as_str(), encode(&record))).await {
                Ok(_) => return Ok(()),
                Err(StoreError::Conflict { .. }) => {}
                Err(error) => return Err(StateError::from(error).into()),
            }
        }
        Err(refuse::too_busy("the node"))
    }

    /// Issues one document and waits until it is stored. `None` when there is nothing to do.
    async fn issue(
        &self,
        node: &NodeId,
        content: &Content<'_>,
        floor: Option<Numbers>,
        now: Timestamp,
    ) -> Result<Option<Stored>, Problem> {
        for _ in 0..MAX_TRIES {
            let Some(signed) = self.prepare(node, content, floor, now).await? else { return Ok(None) };
            match self.store.commit(signed.add_to(Transaction::new())).await {
                Ok(_) => return Ok(Some(self.committed(node, signed))),
                Err(StoreError::Conflict { .. }) => {}
                Err(error) => return Err(StateError::from(error).into()),
            }
        }
        Err(refuse::too_busy("the document"))
    }

    /// The documents that these nodes are to have, numbered and signed for one try to store each, on a thread for such work.
    pub(crate) async fn make_all(
        &self,
        all: Vec<DesiredState>,
        now: Timestamp,
    ) -> Result<Vec<Made>, Problem> {
        let mut known = Vec::with_capacity(all.len());
        for desired in all {
            known.push((self.known(&desired.node_id).await, desired));
        }
        let signer = Arc::clone(&self.signer);
        let making = tokio::task::spawn_blocking(move || signer.make_all(known, now));
        making.await.map_err(|error| refuse::internal(&error))
    }

    /// The envelope of a document as an agent takes it that knows of no batches.
    pub(crate) fn signed_alone(&self, envelope: Bytes, now: Timestamp) -> Bytes {
        signer::signed_alone(&self.signer.key, &self.trust.current(), envelope, now)
    }

    /// The document is in the store.
    pub(crate) fn committed(&self, node: &NodeId, signed: Signed) -> Stored {
        self.due.set(node, signed.stored.assigned.reissue_at());
        signed.stored
    }

    /// What is stored of a node of the cluster.
    async fn known(&self, node: &NodeId) -> Result<Known, Problem> {
        let record: Option<Versioned<NodeRecord>> = load(&self.store, &node_key(node)).await?;
        let record = record.ok_or_else(|| refuse::unknown_node(node))?;
        if record.value.removed_at.is_some() {
            return Err(refuse::removed_node(node));
        }
        let before: Option<Versioned<Assigned>> = load(&self.store, &assigned_key(node)).await?;
        let envelope = self.store.get(&envelope_key(node)).await.map_err(StateError::from)?;
        // Both are written by one transaction: of another one is an envelope that came meanwhile.
        let envelope = envelope.filter(|it| Some(it.version) == before.as_ref().map(|before| before.version));
        Ok(Known { record, before, envelope: envelope.map(|envelope| envelope.value) })
    }

    /// The next document of one node. `None` when there is nothing to do.
    async fn prepare(
        &self,
        node: &NodeId,
        content: &Content<'_>,
        floor: Option<Numbers>,
        now: Timestamp,
    ) -> Result<Option<Signed>, Problem> {
        let known = self.known(node).await?;
        let Known { record, before, .. } = &known;
        let desired = match content {
            Content::New(desired) => (*desired).clone(),
            Content::Again { only_if } => {
                let same = |before: &Versioned<Assigned>| only_if.is_none_or(|only| *only == before.value);
                let newest = |before: &Versioned<Assigned>| record.value.floor <= Some(before.value.numbers);
                if !before.as_ref().is_some_and(|before| same(before) && newest(before)) {
                    return Ok(None);
                }
                match self.load(node).await.map_err(|error| check::unloadable(node, error))? {
                    Some(stored) => self.stored_content(node, &stored)?,
                    None => return Ok(None),
                }
            }
        };
        self.signer.sign(&desired, &known, floor, now).map(Some)
    }

    /// Before the trust root changes: notes which stored documents are good until then, so that they go on being issued
    /// under the next director. The list is new each time; what lost its signer earlier and is not stored any more is
    /// not kept on it.
    pub(crate) async fn carry_over(&self) -> Result<(), Problem> {
        let mut good = BTreeSet::new();
        for (node, _) in load_all::<Assigned>(&self.store, ASSIGNED).await? {
            let Ok(node) = node.parse::<NodeId>() else { continue };
            if let Ok(Some(stored)) = self.load(&node).await
                && let Ok(verified) = self.verify_stored(&node, &stored)
            {
                good.insert(Digest::of(&verified.envelope().signed_bytes()));
            }
        }
        self.carried.replace(good).await.map_err(|error| refuse::internal(&error))
    }

    /// What the newest document of a node says, with its numbers.
    pub(crate) async fn content(&self, node: &NodeId) -> Result<Option<(Numbers, DesiredState)>, Problem> {
        match self.load(node).await.map_err(|error| check::unloadable(node, error))? {
            Some(stored) => Ok(Some((stored.assigned.numbers, self.stored_content(node, &stored)?))),
            None => Ok(None),
        }
    }

    /// What a stored document says.
    fn stored_content(&self, node: &NodeId, stored: &Stored) -> Result<DesiredState, Problem> {
        let document = self.verify_stored(node, stored)?.into_inner();
        if document.desired.node_id != *node || document.provenance.cluster != self.cluster {
            return Err(check::misplaced(node));
        }
        Ok(document.desired)
    }

    /// A changed store must not get our signature on its changes: only a director of the current root vouches for what
    /// it holds, or the list of what earlier ones left behind. The content itself was checked when it was stored.
    fn verify_stored(&self, node: &NodeId, stored: &Stored) -> Result<Verified<SignedDocument>, Problem> {
        let unverified = Unverified::<SignedDocument>::from_json(&stored.envelope)
            .map_err(|error| check::unusable(node, &error))?;
        let directors = DirectorSignature { keys: self.trust.directors(), carried: &self.carried };
        unverified.verify(&directors).map_err(|error| check::unusable(node, &error))
    }
}
