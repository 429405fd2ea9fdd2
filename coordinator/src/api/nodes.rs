//! Nodes as operators see them: the record, the stored document's numbers, and the newest word from memory or store.

use mvm_proto::status::fit::fit_status;
use mvm_proto::status::{ConditionKind, Counts};
use mvm_proto::wire::control::v1::{ListNodesRequest, ListNodesResponse, Node};
use mvm_proto::{NodeId, Problem, Timestamp};
use prost::Message as _;

use crate::enrolment;
use crate::fleet::LiveNode;
use crate::records::{Assigned, NODES, NodeRecord, StatusRecord, status_key};
use crate::state::State;
use crate::stored::{Versioned, load, load_all, now};

pub(super) async fn count(state: &State) -> Result<u32, Problem> {
    let nodes = load_all::<NodeRecord>(&state.store, NODES).await?;
    let present = nodes.iter().filter(|(_, node)| node.value.removed_at.is_none()).count();
    Ok(u32::try_from(present).unwrap_or(u32::MAX))
}

/// Bytes of the nodes in one page, the last one not counted: each is kept within about one MiB, so that every page fits
/// a message.
const MAX_PAGE_BYTES: usize = 2 * 1024 * 1024;

/// A page of the cluster's nodes by name, without their events.
pub(super) async fn list(state: &State, asked: &ListNodesRequest) -> Result<ListNodesResponse, Problem> {
    let after = match asked.page_token.as_str() {
        "" => String::new(),
        token => super::parse::<NodeId>("page_token", token)?.to_string(),
    };
    let most = if asked.page_size == 0 { usize::MAX } else { asked.page_size as usize };
    let mut names = load_all::<NodeRecord>(&state.store, NODES).await?;
    names.retain(|(name, record)| record.value.removed_at.is_none() && *name > after);
    names.sort_by(|(a, _), (b, _)| a.cmp(b));

    let (mut page, mut bytes) = (ListNodesResponse::default(), 0);
    for (_, record) in names {
        if page.nodes.len() >= most || bytes > MAX_PAGE_BYTES {
            page.next_page_token = page.nodes.last().map(|node| node.node_id.clone()).unwrap_or_default();
            break;
        }
        let mut node = one(state, &record.value).await?;
        node.events = Vec::new();
        if asked.summary {
            summarise(&mut node);
        }
        bytes += node.encoded_len();
        page.nodes.push(node);
    }
    Ok(page)
}

/// Leaves out what `desired` and `actual` have the sums of, and what only the whole of a node explains.
fn summarise(node: &mut Node) {
    if let Some(status) = &mut node.status {
        status.pools = Vec::new();
        status.conditions.retain(|condition| condition.is(ConditionKind::StatusComplete));
    }
    if let Some(info) = &mut node.info {
        info.conditions = Vec::new();
        info.passed_over = Vec::new();
        info.capabilities = Vec::new();
    }
}

pub(super) async fn get(state: &State, node_id: &str) -> Result<Node, Problem> {
    let node: NodeId = super::parse("node_id", node_id)?;
    let record = enrolment::registered(state, &node).await?;
    one(state, &record.value).await
}

pub(super) async fn one(state: &State, record: &NodeRecord) -> Result<Node, Problem> {
    let node = &record.node_id;
    let assigned = state.documents.assigned(node).await?;
    let status: Option<Versioned<StatusRecord>> = load(&state.store, &status_key(node)).await?;
    let status = status.map(|found| found.value).unwrap_or_default();
    Ok(message(record, assigned.as_ref(), state.fleet.get(node).as_deref(), status))
}

/// The live word where there is one, else the last that was written.
fn message(
    record: &NodeRecord,
    assigned: Option<&Assigned>,
    live: Option<&LiveNode>,
    mut written: StatusRecord,
) -> Node {
    let text = |at: Option<Timestamp>| at.map(|at| at.to_string()).unwrap_or_default();
    let mut node = Node {
        node_id: record.node_id.to_string(),
        enrolled_at: record.enrolled_at.to_string(),
        assigned: assigned.map(Assigned::mark),
        document_expires_at: text(assigned.map(|assigned| assigned.expires_at)),
        certificate_not_after: record.certificate.not_after.to_string(),
        certificate_root: record.certificate.root.map(|root| root.to_string()).unwrap_or_default(),
        ..Node::default()
    };
    if let Some(live) = live {
        let live = live.lock();
        let newest = live.record();
        written = StatusRecord {
            last_seen_at: newest.last_seen_at.or(written.last_seen_at),
            info: newest.info.or(written.info),
            status: newest.status.or(written.status),
            accepted: newest.accepted.or(written.accepted),
            converged: newest.converged.or(written.converged),
        };
        node.events = live.events.iter().cloned().collect();
        if let Some(second) = live.second.as_ref().filter(|second| now() < second.until()) {
            node.second_address = second.address.to_string();
            node.second_hostname.clone_from(&second.hostname);
            node.second_since = second.since.to_string();
        }
        if let Some(session) = &live.session {
            node.connected = true;
            node.connected_since = session.since.to_string();
            node.remote_address = session.address.to_string();
        }
    }
    node.last_seen_at = text(written.last_seen_at);
    node.info = written.info;
    // A node may have acked since its last status: the marks are the newer word.
    let mut status = written.status.unwrap_or_default();
    status.node_id = record.node_id.to_string();
    status.accepted = written.accepted.or(status.accepted);
    status.converged = written.converged.or(status.converged);
    // One that an older version stored may be larger than what is kept today.
    fit_status(&mut status, now());
    node.desired = Some(sum(status.pools.iter().filter_map(|pool| pool.desired)));
    node.actual = Some(sum(status.pools.iter().filter_map(|pool| pool.actual)));
    node.status = Some(status);
    node
}

/// A node may claim any counts.
fn sum(counts: impl Iterator<Item = Counts>) -> Counts {
    counts.fold(Counts::default(), |sum, one| Counts {
        running: sum.running.saturating_add(one.running),
        warm: sum.warm.saturating_add(one.warm),
        sleeping: sum.sleeping.saturating_add(one.sleeping),
        down: sum.down.saturating_add(one.down),
    })
}
