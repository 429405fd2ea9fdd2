//! Guest sessions in the stores that nodes use, asked of the nodes: nothing but agents reaches a store.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use futures::StreamExt as _;
use mvm_pki::Identity;
use mvm_proto::status::Feature;
use mvm_proto::status::fit::shorten;
use mvm_proto::wire::control::v1::{
    DeleteGuestSessionsRequest, DeleteGuestSessionsResponse, KeptGuestSession, ListGuestSessionsRequest,
    ListGuestSessionsResponse, NodeGuestSession,
};
use mvm_proto::wire::session::v1::{DeleteSessions, ListSessions, Sessions, reply, request};
use mvm_proto::{NodeId, PoolId, Problem, TenantId};

use super::instances::other_answer;
use super::parse;
use crate::enrolment;
use crate::refuse;
use crate::state::State;

/// A store may be far away, and a session have a hundred thousand pieces.
const LIST_WAIT: Duration = Duration::from_secs(60);
const DELETE_WAIT: Duration = Duration::from_secs(600);
/// Nodes asked at the same time.
const AT_ONCE: usize = 64;
/// Of why a node or store is missing: the node may have written it.
const MAX_REASON_BYTES: usize = 512;

pub(super) async fn list(
    state: &State,
    asked: &ListGuestSessionsRequest,
) -> Result<ListGuestSessionsResponse, Problem> {
    let (tenant, _) = checked(&asked.tenant_id, &asked.pool_id)?;
    let ask = |node: &NodeId| {
        let stores = stores(state, tenant.as_ref(), node);
        let (tenant_id, pool_id) = (asked.tenant_id.clone(), asked.pool_id.clone());
        request::Ask::ListSessions(ListSessions { tenant_id, pool_id, stores })
    };
    let (told, missing) = ask_all(state, &asked.node_id, ask, LIST_WAIT).await?;
    let mut sessions = BTreeMap::new();
    for (node, told) in told {
        for session in told.sessions {
            let key = (session.session.clone(), session.store.clone(), of_node(&session.store, &node));
            let named = NodeGuestSession { node_id: node.to_string(), session: Some(session) };
            sessions.entry(key).or_insert(named);
        }
    }
    Ok(ListGuestSessionsResponse { sessions: sessions.into_values().collect(), missing })
}

pub(super) async fn delete(
    state: &State,
    asked: &DeleteGuestSessionsRequest,
    by: &Identity,
) -> Result<DeleteGuestSessionsResponse, Problem> {
    let (tenant, pool) = checked(&asked.tenant_id, &asked.pool_id)?;
    if tenant.is_none() || (asked.session.is_some() && pool.is_none()) {
        return Err(refuse::bad_request("a tenant has to be named, and with a session its pool"));
    }
    let ask = |node: &NodeId| {
        request::Ask::DeleteSessions(DeleteSessions {
            tenant_id: asked.tenant_id.clone(),
            pool_id: asked.pool_id.clone(),
            session: asked.session,
            unused_seconds: asked.unused_seconds,
            by: by.to_string(),
            stores: stores(state, tenant.as_ref(), node),
        })
    };
    let (told, missing) = ask_all(state, &asked.node_id, ask, DELETE_WAIT).await?;
    let (mut deleted, mut gone) = (Vec::new(), BTreeSet::new());
    let mut kept = BTreeMap::new();
    let asked_for = match &pool {
        Some(pool) => format!("{}/{pool}/", asked.tenant_id),
        None => format!("{}/", asked.tenant_id),
    };
    for (node, mut told) in told {
        // A node's word counts for what it was asked.
        told.sessions.retain(|session| session.session.starts_with(&asked_for));
        told.kept.retain(|kept| kept.session.starts_with(&asked_for));
        for session in told.sessions {
            gone.insert((session.session.clone(), session.store.clone(), of_node(&session.store, &node)));
            deleted.push(NodeGuestSession { node_id: node.to_string(), session: Some(session) });
        }
        for one in told.kept {
            let key = (one.session.clone(), one.store.clone(), of_node(&one.store, &node));
            kept.entry(key).or_insert(KeptGuestSession {
                node_id: node.to_string(),
                session: one.session,
                store: one.store,
                reason: shortened(one.reason),
            });
        }
    }
    // Another node was faster: that is how it should be.
    kept.retain(|key, _| !gone.contains(key));
    tracing::info!(tenant = %asked.tenant_id, deleted = deleted.len(), %by, "deleted guest sessions");
    Ok(DeleteGuestSessionsResponse { deleted, kept: kept.into_values().collect(), missing })
}

fn checked(tenant: &str, pool: &str) -> Result<(Option<TenantId>, Option<PoolId>), Problem> {
    let tenant = (!tenant.is_empty()).then(|| parse("tenant_id", tenant)).transpose()?;
    let pool = (!pool.is_empty()).then(|| parse("pool_id", pool)).transpose()?;
    Ok((tenant, pool))
}

fn stores(state: &State, tenant: Option<&TenantId>, node: &NodeId) -> Vec<String> {
    tenant.map(|tenant| state.world.lock().session_stores(tenant, node)).unwrap_or_default()
}

/// Whose store it is: a bucket is everyone's.
fn of_node(store: &str, node: &NodeId) -> Option<NodeId> {
    (!store.starts_with("s3://")).then(|| node.clone())
}

/// What the nodes said, and which nodes and stores are missing.
async fn ask_all(
    state: &State,
    only: &str,
    ask: impl Fn(&NodeId) -> request::Ask,
    wait: Duration,
) -> Result<(Vec<(NodeId, Sessions)>, Vec<String>), Problem> {
    let nodes = if only.is_empty() {
        state.fleet.connected_nodes()
    } else {
        let node: NodeId = parse("node_id", only)?;
        enrolment::registered(state, &node).await?;
        vec![node]
    };
    let ask = &ask;
    let asking = nodes.into_iter().map(|node| async move {
        let answer = ask_one(state, &node, ask(&node), wait).await;
        (node, answer)
    });
    let mut answers: Vec<_> = futures::stream::iter(asking).buffer_unordered(AT_ONCE).collect().await;
    answers.sort_by(|a, b| a.0.cmp(&b.0));
    let (mut told, mut missing) = (Vec::new(), Vec::new());
    for (node, answer) in answers {
        match answer {
            Ok(mut sessions) => {
                let unreadable = std::mem::take(&mut sessions.unreadable).into_iter();
                missing.extend(unreadable.map(|why| shortened(format!("node {node}: {why}"))));
                told.push((node, sessions));
            }
            Err(problem) if !only.is_empty() => return Err(problem),
            Err(problem) => missing.push(shortened(format!("node {node}: {}", problem.detail))),
        }
    }
    Ok((told, missing))
}

async fn ask_one(
    state: &State,
    node: &NodeId,
    ask: request::Ask,
    wait: Duration,
) -> Result<Sessions, Problem> {
    let knows =
        |live: &crate::fleet::Live| live.info.as_ref().is_some_and(|info| info.has(Feature::GuestSessions));
    if state.fleet.get(node).is_some_and(|live| !knows(&live.lock())) {
        let detail = format!("the agent of node {node} is too old to list or delete guest sessions");
        return Err(Problem::new(409, "agent_too_old", detail, "Upgrade the agent."));
    }
    match state.fleet.ask(node, ask, wait).await? {
        Some(reply::Answer::Sessions(sessions)) => Ok(sessions),
        _ => Err(other_answer(node)),
    }
}

fn shortened(mut text: String) -> String {
    shorten(&mut text, MAX_REASON_BYTES);
    text
}
