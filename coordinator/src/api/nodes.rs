//! Nodes as operators see them: the record, the stored document's numbers, and the newest word from memory or store.

use std::collections::HashMap;

use mvm_proto::wire::control::v1::Node;
use mvm_proto::{NodeId, Problem, Timestamp};

use crate::enrolment;
use crate::fleet::LiveNode;
use crate::records::{ASSIGNED, Assigned, NODES, NodeRecord, STATUS, StatusRecord, status_key};
use crate::state::{State, Versioned, load, load_all};

pub(super) async fn count(state: &State) -> Result<u32, Problem> {
    let nodes = load_all::<NodeRecord>(&state.store, NODES).await?;
    let present = nodes.iter().filter(|(_, node)| node.value.removed_at.is_none()).count();
    Ok(u32::try_from(present).unwrap_or(u32::MAX))
}

/// Every node of the cluster by name, without its events.
pub(super) async fn list(state: &State) -> Result<Vec<Node>, Problem> {
    let records = load_all::<NodeRecord>(&state.store, NODES).await?;
    let mut assigned: HashMap<String, Versioned<Assigned>> =
        load_all(&state.store, ASSIGNED).await?.into_iter().collect();
    let mut statuses: HashMap<String, Versioned<StatusRecord>> =
        load_all(&state.store, STATUS).await?.into_iter().collect();
    let present = records.into_iter().filter(|(_, record)| record.value.removed_at.is_none());
    let build = |(name, record): (String, Versioned<NodeRecord>)| {
        let live = state.fleet.get(&record.value.node_id);
        let assigned = assigned.remove(&name).map(|found| found.value);
        let status = statuses.remove(&name).map(|found| found.value).unwrap_or_default();
        Node { events: Vec::new(), ..message(&record.value, assigned.as_ref(), live.as_deref(), status) }
    };
    Ok(present.map(build).collect())
}

pub(super) async fn get(state: &State, node_id: &str) -> Result<Node, Problem> {
    let node: NodeId = super::parse("node_id", node_id)?;
    let record = enrolment::registered(state, &node).await?;
    let assigned = state.documents.assigned(&node).await?;
    let status: Option<Versioned<StatusRecord>> = load(&state.store, &status_key(&node)).await?;
    let status = status.map(|found| found.value).unwrap_or_default();
    Ok(message(&record.value, assigned.as_ref(), state.fleet.get(&node).as_deref(), status))
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
    node.status = Some(status);
    node
}
