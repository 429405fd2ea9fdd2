//! Join tokens: one-time, node-bound, expiring. The store holds the hash of the secret, never the secret.
//!
//! A token is used up in the same transaction that registers the node (see `enrolment`), so of any number of
//! simultaneous uses exactly one succeeds.

use std::net::IpAddr;
use std::time::Duration;

use mvm_pki::{Anchors, JoinToken};
use mvm_proto::control::TokenState;
use mvm_proto::wire::control::v1::Token;
use mvm_proto::{Digest, NodeId, Problem, Timestamp};
use mvm_store::{Guard, Store, StoreError, Transaction};
use zeroize::Zeroizing;

use crate::records::{FixedNames, TOKENS, TokenRecord, token_key};
use crate::refuse;
use crate::stored::{Backend, MAX_TRIES, StateError, Versioned, encode, load, load_all};

/// How long a token lives unless asked otherwise: long enough to carry it over, too short to lie around.
pub const DEFAULT_TTL: Duration = Duration::from_secs(10 * 60);
/// The longest life of a token: a day's roll-out.
pub const MAX_TTL: Duration = Duration::from_secs(24 * 3600);
/// How long tokens that can't be used any more stay listed, so that people see what became of them.
const KEPT_AFTER_END: Duration = Duration::from_secs(24 * 3600);

/// What a joiner pins, by digest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct PinnedRoots {
    pub(crate) certificate: Digest,
    pub(crate) trust: Digest,
}

/// Makes a token. Its text is returned once and not kept.
pub(crate) async fn create(
    store: &Backend,
    node_id: NodeId,
    ttl: Duration,
    created_by: &str,
    roots: PinnedRoots,
    names: FixedNames,
    now: Timestamp,
) -> Result<(Zeroizing<String>, TokenRecord), Problem> {
    let ttl = if ttl.is_zero() { DEFAULT_TTL } else { ttl };
    if ttl > MAX_TTL {
        let detail = format!(
            "a token may live for at most {} s, {} s were asked for",
            MAX_TTL.as_secs(),
            ttl.as_secs()
        );
        return Err(Problem::new(422, "ttl_too_long", detail, "Ask for a shorter life."));
    }
    let token =
        JoinToken::generate(roots.certificate, roots.trust).map_err(|error| refuse::internal(&error))?;
    let record = TokenRecord {
        token_id: token.id().to_owned(),
        node_id,
        secret_hash: token.secret_hash(),
        created_at: now,
        created_by: created_by.to_owned(),
        expires_at: now + ttl,
        used_at: None,
        revoked_at: None,
        names,
    };
    let key = token_key(&record.token_id);
    let txn = Transaction::new().guard(key.as_str(), Guard::Absent).put(key, encode(&record));
    store.commit(txn).await.map_err(StateError::from)?;
    Ok((token.expose(), record))
}

pub(crate) async fn list(store: &Backend) -> Result<Vec<TokenRecord>, Problem> {
    let mut records: Vec<TokenRecord> =
        load_all(store, TOKENS).await?.into_iter().map(|(_, record)| record.value).collect();
    records.sort_by(|a, b| (a.created_at, &a.token_id).cmp(&(b.created_at, &b.token_id)));
    Ok(records)
}

/// Makes a token useless. Doing so twice, or to an expired token, is no error; a used one can't be taken back.
pub(crate) async fn revoke(store: &Backend, id: &str, now: Timestamp) -> Result<TokenRecord, Problem> {
    // An id is shown in lists and logs; anything else must not reach the store as a key.
    let well_formed = id.len() == 16 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'));
    let unknown = || {
        let shown: String = id.chars().take(16).collect();
        Problem::new(
            404,
            "token_unknown",
            format!("there is no token {shown:?}"),
            "List them: `mvm coordinator token list`.",
        )
    };
    if !well_formed {
        return Err(unknown());
    }
    let key = token_key(id);
    for _ in 0..MAX_TRIES {
        let found: Versioned<TokenRecord> = load(store, &key).await?.ok_or_else(unknown)?;
        let mut record = found.value;
        if record.used_at.is_some() {
            let detail = format!("token {id} was already used by node {}", record.node_id);
            let advice = format!("If that was not you: `mvm node remove {}`.", record.node_id);
            return Err(Problem::new(409, "token_used", detail, advice));
        }
        if record.revoked_at.is_some() {
            return Ok(record);
        }
        record.revoked_at = Some(now);
        let txn = Transaction::new().guard(key.as_str(), Guard::Version(found.version));
        match store.commit(txn.put(key.as_str(), encode(&record))).await {
            Ok(_) => return Ok(record),
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(StateError::from(error).into()),
        }
    }
    Err(refuse::too_busy("the token"))
}

/// Makes every token that this operator made and that is still live useless.
pub(crate) async fn revoke_of(store: &Backend, created_by: &str, now: Timestamp) -> Result<(), Problem> {
    for record in list(store).await? {
        if record.created_by == created_by && record.state(now) == TokenState::Live {
            match revoke(store, &record.token_id, now).await {
                // It was used just now: the node that it let in is listed, and can be removed.
                Err(problem) if problem.code == "token_used" => {}
                revoked => drop(revoked?),
            }
        }
    }
    Ok(())
}

/// The live token with this text, for this node. The reason is told only to a caller that knows the secret.
pub(crate) async fn prove(
    store: &Backend,
    roots: &Anchors,
    text: &str,
    claims: Option<&NodeId>,
    now: Timestamp,
) -> Result<Versioned<TokenRecord>, Problem> {
    let invalid = || {
        let advice = "Make a new one: `mvm coordinator token create --node NODE`.";
        Problem::new(403, "token_invalid", "the join token is not valid here", advice)
    };
    let token = JoinToken::parse(text).map_err(|_| invalid())?;
    let found: Option<Versioned<TokenRecord>> = load(store, &token_key(token.id())).await?;
    // An unknown id costs the same comparison as a known one with the wrong secret.
    let stored = found.as_ref().map_or(Digest::from_bytes([0; 32]), |found| found.value.secret_hash);
    // A token says which root its bearer is to trust. One that was changed to name another is not ours.
    if !token.check(&stored) || !roots.contains(&token.fingerprint()) {
        return Err(invalid());
    }
    let found = found.ok_or_else(invalid)?;
    let node_id = &found.value.node_id;
    let refused = |code, detail: String| {
        let advice = format!("Make a new one: `mvm coordinator token create --node {node_id}`.");
        Problem::new(403, code, detail, advice)
    };
    if let Some(claimed) = claims.filter(|claimed| *claimed != node_id) {
        let detail = format!("the join token is for another node, not for {claimed}");
        return Err(refused("token_wrong_node", detail));
    }
    match found.value.state(now) {
        TokenState::Live => Ok(found),
        TokenState::Used => Err(used(node_id)),
        TokenState::Revoked => Err(refused("token_revoked", "the join token was revoked".to_owned())),
        TokenState::Expired => {
            let detail = format!("the join token expired at {}", found.value.expires_at);
            Err(refused("token_expired", detail))
        }
    }
}

pub(crate) fn used(node_id: &NodeId) -> Problem {
    Problem::new(
        403,
        "token_used",
        "the join token was already used",
        format!("Make a new one: `mvm coordinator token create --node {node_id}`."),
    )
}

/// Deletes tokens that ended a while ago; returns how many.
pub(crate) async fn remove_old(store: &Backend, now: Timestamp) -> Result<usize, StateError> {
    let mut gone = 0;
    for (id, found) in load_all::<TokenRecord>(store, TOKENS).await? {
        let over = found.value.ended_at(now).is_some_and(|ended| now.since(ended) > KEPT_AFTER_END);
        if !over {
            continue;
        }
        let key = token_key(&id);
        let txn = Transaction::new().guard(key.as_str(), Guard::Version(found.version)).delete(key);
        match store.commit(txn).await {
            Ok(_) => gone += 1,
            Err(StoreError::Conflict { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(gone)
}

/// The record as operators see it: without the hash.
pub(crate) fn message(record: &TokenRecord, now: Timestamp) -> Token {
    Token {
        token_id: record.token_id.clone(),
        node_id: record.node_id.to_string(),
        created_at: record.created_at.to_string(),
        expires_at: record.expires_at.to_string(),
        state: record.state(now).as_str().to_owned(),
        used_at: record.used_at.map(|at| at.to_string()).unwrap_or_default(),
        created_by: record.created_by.clone(),
        names: record
            .names
            .dns
            .iter()
            .cloned()
            .chain(record.names.ips.iter().map(IpAddr::to_string))
            .collect(),
    }
}
