//! Certificates for nodes and operators: enrolment with a token, renewal with a certificate, removal.
//!
//! The identity in a certificate is decided here, from the token or from the certificate presented, never from the
//! request. The certificate is made before the transaction that uses the token up and leaves the process only after
//! it: one token, one certificate, however many ask at once. Which names a node gets is decided in `names`.

mod names;

use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures::future::BoxFuture;
use mvm_pki::authority::requested_names;
use mvm_pki::{AuthorityError, Identity, Issued, LeafProfile, Role};
use mvm_proto::{Digest, NodeId, Problem, Timestamp};
use mvm_store::{Guard, Store, StoreError, Transaction};
use mvm_transport::Registry;

use self::names::Reserved;
use crate::objects::Caller;
use crate::rate_limit::{Holder, too_soon};
use crate::records::{
    Assigned, FixedNames, IssuedRecord, NodeRecord, Numbers, assigned_key, envelope_key, node_key,
    offers_key, status_key, token_key,
};
use crate::state::State;
use crate::stored::{MAX_TRIES, StateError, Versioned, encode, load, now, unchanged};
use crate::{objects, operators, own_leaf, refuse, tokens};

/// Renewals per second of one identity in the long run. Each is a signature and, for nodes, a write to the disk;
/// honest holders renew at half of a certificate's life, which is seconds only in tests.
pub(crate) const RENEW_PER_SECOND: f64 = 1.0;
/// At once: operators share an identity between machines, and scripts try again.
pub(crate) const RENEW_BURST: f64 = 10.0;
pub(crate) const TOO_MANY_RENEWALS: &str = "too many renewals of this identity";

/// Registers the node that a join token is bound to and issues its first certificate. Who `claims` to be another is
/// refused. `address` is where the request came from.
pub(crate) async fn enrol(
    state: &State,
    token: &str,
    claims: Option<&NodeId>,
    csr_der: &[u8],
    address: IpAddr,
    now: Timestamp,
) -> Result<(NodeId, Issued), Problem> {
    for _ in 0..MAX_TRIES {
        let token = tokens::prove(&state.store, &state.anchors.current(), token, claims, now).await?;
        if state.operators.removed_since(&token.value.created_by, token.value.created_at) {
            return Err(refuse::token_of_removed_operator());
        }
        let node_id = &token.value.node_id.clone();
        let granted = names::granted(&token.value.names, address);
        let names = names::within(asked_names(state, node_id, csr_der)?, &granted);
        let issued = issue_to_node(state, node_id, &names, csr_der, now)?;
        let node: Option<Versioned<NodeRecord>> = load(&state.store, &node_key(node_id)).await?;
        // A removed node comes back by a token made after its removal only.
        let removed_at = node.as_ref().and_then(|node| node.value.removed_at);
        if removed_at.is_some_and(|removed_at| token.value.created_at <= removed_at) {
            return Err(refuse::removed_node(node_id));
        }

        let mut used = token.value;
        used.used_at = Some(now);
        let guard = unchanged(node.as_ref());
        let before = node.map(|node| node.value);
        let record = NodeRecord::enrolled(before, node_id, issued_record(state, &issued, now), now);
        let record = NodeRecord { names: Some(names), ..record };
        let (token_key, node_key) = (token_key(&used.token_id), node_key(node_id));
        let txn = Transaction::new()
            .guard(token_key.as_str(), Guard::Version(token.version))
            .guard(node_key.as_str(), guard)
            .put(token_key, encode(&used))
            .put(node_key, encode(&record));
        match state.store.commit(txn).await {
            Ok(_) => {
                tracing::info!(node = %node_id, token = %used.token_id, serial = %issued.serial_hex, "enrolled");
                // The next start makes it where this fails.
                if let Err(problem) = objects::ensure_node(&state.objects, node_id).await {
                    tracing::warn!(%problem, node = %node_id, "could not make the node's object");
                }
                return Ok((node_id.clone(), issued));
            }
            // Someone else used the token, or the node was just renewed or removed: look again.
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the node"))
}

pub(crate) fn issued_record(state: &State, issued: &Issued, now: Timestamp) -> IssuedRecord {
    IssuedRecord {
        serial: issued.serial_hex.clone(),
        fingerprint: issued.chain.first().map_or(Digest::of(b""), |leaf| Digest::of(leaf)),
        issued_at: now,
        not_after: issued.not_after,
        root: state.issuing_root,
    }
}

/// Why there is no fresh certificate.
pub(crate) enum NotRenewed {
    TooSoon(Duration),
    Refused(Problem),
}

impl NotRenewed {
    pub(crate) fn into_problem(self) -> Problem {
        match self {
            Self::TooSoon(wait) => too_soon(TOO_MANY_RENEWALS, wait).0,
            Self::Refused(problem) => problem,
        }
    }
}

impl From<Problem> for NotRenewed {
    fn from(problem: Problem) -> Self {
        Self::Refused(problem)
    }
}

/// A fresh certificate for the holder of a valid one: the same identity, whatever the request says. `presented` is
/// the fingerprint of the one it showed. One that is not good any more spends the rate of itself alone.
pub(crate) async fn renew(
    state: &State,
    identity: &Identity,
    presented: Option<&Digest>,
    csr_der: &[u8],
    now: Timestamp,
) -> Result<Issued, NotRenewed> {
    let take = |holder| state.renew_limit.take(holder, Instant::now()).map_err(NotRenewed::TooSoon);
    take(Holder::Certificate(presented.cloned()))?;
    let renewed = match (identity.role(), identity.node_id()) {
        (Role::Node, Some(node_id)) => {
            admitted(state, &node_id, presented, now).await?;
            take(Holder::Identity(identity.clone()))?;
            renew_node(state, &node_id, presented, csr_der, now).await
        }
        (Role::Operator, _) => {
            operators::admitted(state, identity, presented, now).await?;
            take(Holder::Identity(identity.clone()))?;
            operators::renew(state, identity, presented, csr_der, now).await
        }
        _ => Err(refuse::wrong_role(&identity.to_string(), "node or operator")),
    };
    Ok(renewed?)
}

async fn renew_node(
    state: &State,
    node_id: &NodeId,
    presented: Option<&Digest>,
    csr_der: &[u8],
    now: Timestamp,
) -> Result<Issued, Problem> {
    let key = node_key(node_id);
    for _ in 0..MAX_TRIES {
        let found = admitted(state, node_id, presented, now).await?;
        let asked = asked_names(state, node_id, csr_der)?;
        // What a record of an older version did not fix is fixed now.
        let fixed = found.value.names.clone().unwrap_or_else(|| asked.clone());
        let issued = issue_to_node(state, node_id, &names::within(asked, &fixed), csr_der, now)?;
        let record = found.value.issued(issued_record(state, &issued, now), now);
        let record = NodeRecord { names: Some(fixed), ..record };
        let txn = Transaction::new().guard(key.as_str(), Guard::Version(found.version));
        match state.store.commit(txn.put(key.as_str(), encode(&record))).await {
            Ok(_) => return Ok(issued),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the node"))
}

/// The record of a node that is part of the cluster now.
pub(crate) async fn registered(state: &State, node_id: &NodeId) -> Result<Versioned<NodeRecord>, Problem> {
    let found: Option<Versioned<NodeRecord>> = load(&state.store, &node_key(node_id)).await?;
    let found = found.ok_or_else(|| refuse::unknown_node(node_id))?;
    if found.value.removed_at.is_some() {
        return Err(refuse::removed_node(node_id));
    }
    Ok(found)
}

/// The record of a node that is part of the cluster now and showed a certificate of this membership: one from before
/// a removal stays refused although the node is back.
pub(crate) async fn admitted(
    state: &State,
    node_id: &NodeId,
    presented: Option<&Digest>,
    now: Timestamp,
) -> Result<Versioned<NodeRecord>, Problem> {
    let found = registered(state, node_id).await?;
    if !found.value.accepts(presented, now) {
        tracing::warn!(node = %node_id, fingerprint = ?presented, "refused a certificate from before a removal");
        return Err(refuse::revoked_certificate(node_id));
    }
    Ok(found)
}

/// Which certificates are of the cluster now.
pub(crate) struct Members(pub(crate) Arc<State>);

impl Registry for Members {
    /// What can't be looked up counts: it is judged again before anything is done for it.
    fn counts<'a>(&'a self, peer: &'a Identity, certificate: &'a Digest) -> BoxFuture<'a, bool> {
        let state = &self.0;
        Box::pin(async move {
            let Some(node_id) = peer.node_id().filter(|_| peer.role() == Role::Node) else {
                return state.operators.check(peer, Some(certificate), now()).is_ok();
            };
            match registered(state, &node_id).await {
                Ok(found) => found.value.accepts(Some(certificate), now()),
                Err(problem) => problem.status >= 500,
            }
        })
    }
}

/// Takes a node out of the cluster: its certificates are refused from here on, its document is gone, its numbers stay.
/// Returns whether a session was closed.
pub(crate) async fn remove(
    state: &State,
    node_id: &NodeId,
    by: &Caller,
    now: Timestamp,
) -> Result<bool, Problem> {
    let key = node_key(node_id);
    for _ in 0..MAX_TRIES {
        let found = registered(state, node_id).await?;
        let assigned: Option<Versioned<Assigned>> = load(&state.store, &assigned_key(node_id)).await?;
        let numbers = assigned.as_ref().map(|assigned| assigned.value.numbers);
        let floor: Option<Numbers> = found.value.floor.max(numbers);
        let record = NodeRecord { floor, ..found.value.removed(now) };
        let txn = Transaction::new()
            .guard(key.as_str(), Guard::Version(found.version))
            .guard(assigned_key(node_id), unchanged(assigned.as_ref()))
            .put(key.as_str(), encode(&record))
            .delete(assigned_key(node_id))
            .delete(envelope_key(node_id))
            .delete(offers_key(node_id))
            .delete(status_key(node_id));
        match state.store.commit(objects::remove_node(txn, node_id, by, now)?).await {
            Ok(_) => {
                tracing::info!(node = %node_id, "removed");
                // After the commit: a session that comes up meanwhile finds the node removed when it looks.
                state.tunnels.forget(node_id);
                return Ok(state.fleet.forget(node_id));
            }
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the node"))
}

/// What the request may have of the names that it asks for.
fn asked_names(state: &State, node_id: &NodeId, csr_der: &[u8]) -> Result<FixedNames, Problem> {
    let asked = requested_names(csr_der).map_err(|error| refused_request(&error))?;
    names::allowed(asked, node_id, &reserved(state)?)
}

/// The names in a request for a token, which the node's certificate may then carry.
pub(crate) fn token_names(state: &State, names: &[String]) -> Result<FixedNames, Problem> {
    names::for_token(names, &reserved(state)?)
}

/// The coordinator's own names. In a dev cluster both often share one machine.
fn reserved(state: &State) -> Result<Reserved, Problem> {
    if state.cluster.dev {
        return Ok(Reserved::default());
    }
    let own = own_leaf::profile(&state.cluster, &state.settings);
    let own = own.map_err(|error| refuse::internal(&*error))?;
    Ok(Reserved { dns: own.dns, ips: own.ips })
}

fn issue_to_node(
    state: &State,
    node_id: &NodeId,
    names: &FixedNames,
    csr_der: &[u8],
    now: Timestamp,
) -> Result<Issued, Problem> {
    let identity = Identity::new(state.cluster.cluster.clone(), Role::Node, node_id.as_str())
        .map_err(|error| refuse::internal(&error))?;
    // The node's own id is always a name of it, for clients that check host names only.
    let dns = std::iter::once(node_id.to_string()).chain(names.dns.iter().cloned()).collect();
    let profile = LeafProfile { identity, dns, ips: names.ips.clone(), life: state.settings.leaf_life };
    issue(state, csr_der, &profile, now)
}

pub(crate) fn issue(
    state: &State,
    csr_der: &[u8],
    profile: &LeafProfile,
    now: Timestamp,
) -> Result<Issued, Problem> {
    state.authority.issue(csr_der, profile, now).map_err(|error| refused_request(&error))
}

fn refused_request(error: &AuthorityError) -> Problem {
    let detail = format!("the certificate request was refused: {}", mvm_proto::text::chain(error));
    Problem::new(400, "csr_refused", detail, "Make a new key and request, and try again.")
}
