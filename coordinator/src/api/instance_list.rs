//! Lists of instances, asked of the nodes that have them, a page at a time.
//!
//! What one node answers is that node's part of the list and nothing more: it may be late, wrong or without end, and
//! the parts of the others are as they would be without it. What is missing of a node is said beside the list.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use futures::StreamExt as _;
use mvm_proto::status::fit::shorten;
use mvm_proto::status::{Counts, InstanceStatus, PoolStatus};
use mvm_proto::wire::control::v1::{ListInstancesRequest, ListInstancesResponse, NodeInstance, SilentNode};
use mvm_proto::wire::session::v1::{ListInstances, reply, request};
use mvm_proto::{InstanceId, NodeId, Phase, PoolId, Problem, TenantId};
use prost::Message as _;
use tokio::sync::mpsc;

use super::instances::{TELL_WAIT, other_answer};
use super::{nodes, parse};
use crate::enrolment;
use crate::records::{NODES, NodeRecord};
use crate::state::State;
use crate::stored::load_all;

/// Instances asked of a node at once.
const PAGE: usize = 512;
/// Instances of one node in one list: far more than a machine runs.
const MAX_LISTED: usize = 16 * 1024;
/// How long one node may take for all its pages.
const LIST_WAIT: Duration = Duration::from_secs(30);
/// Nodes asked at the same time. Each holds a page of memory at most.
const AT_ONCE: usize = 128;
/// Pages that wait for the operator to read.
const WAITING_PAGES: usize = 4;
/// The answer to a client that does not know pages: half of what a message may have.
const MAX_ONE_ANSWER_BYTES: usize = 4 * 1024 * 1024;
/// Of why a node's part is missing: the node may have written it.
const MAX_REASON_BYTES: usize = 512;

/// A page of the list, or why there is no list.
pub(super) type Piece = Result<ListInstancesResponse, Problem>;

/// The instances of one node, or of every node that is connected, as they come.
pub(super) async fn pages(
    state: &Arc<State>,
    asked: &ListInstancesRequest,
) -> Result<mpsc::Receiver<Piece>, Problem> {
    let filter = filter(asked)?;
    let nodes = if asked.node_id.is_empty() {
        state.fleet.connected_nodes()
    } else {
        let node: NodeId = parse("node_id", &asked.node_id)?;
        enrolment::registered(state, &node).await?;
        vec![node]
    };
    let only = !asked.node_id.is_empty();
    let away = if only { Vec::new() } else { away(state, &nodes, &filter).await? };
    let (pieces, receiver) = mpsc::channel(WAITING_PAGES);
    let state = Arc::clone(state);
    tokio::spawn(async move {
        let (state, filter, pieces) = (&state, &filter, &pieces);
        for silent in away {
            let _ =
                pieces.send(Ok(ListInstancesResponse { instances: Vec::new(), silent: vec![silent] })).await;
        }
        futures::stream::iter(nodes)
            .for_each_concurrent(AT_ONCE, |node| async move {
                let ended = tokio::time::timeout(LIST_WAIT, list_node(state, &node, filter, pieces)).await;
                let missing = match ended {
                    Ok(Ok(())) => return,
                    // Asked for one, the refusal is the answer.
                    Ok(Err(problem)) if only => Err(problem),
                    Ok(Err(problem)) => Ok(problem.detail),
                    Err(_) => Ok(format!(
                        "the node did not list all of its instances within {} s",
                        LIST_WAIT.as_secs()
                    )),
                };
                // The operator may have gone away.
                let _ = pieces.send(missing.map(|reason| silent(&node, reason))).await;
            })
            .await;
    });
    Ok(receiver)
}

/// As much of the list as fits one answer.
pub(super) async fn one_answer(
    state: &Arc<State>,
    asked: &ListInstancesRequest,
) -> Result<ListInstancesResponse, Problem> {
    let mut pieces = pages(state, asked).await?;
    let (mut all, mut bytes) = (ListInstancesResponse::default(), 0);
    let mut left_out: BTreeMap<String, usize> = BTreeMap::new();
    while let Some(piece) = pieces.recv().await {
        let piece = piece?;
        all.silent.extend(piece.silent);
        for instance in piece.instances {
            bytes += instance.encoded_len();
            if bytes > MAX_ONE_ANSWER_BYTES {
                *left_out.entry(instance.node_id).or_default() += 1;
            } else {
                all.instances.push(instance);
            }
        }
    }
    let reason = |count| {
        format!("{count} of the node's instances do not fit one answer; use a newer `mvm` to list them all")
    };
    all.silent.extend(left_out.into_iter().map(|(node_id, count)| SilentNode {
        node_id,
        reason: reason(count),
        ..SilentNode::default()
    }));
    all.instances.sort_by(|a, b| order(a).cmp(&order(b)));
    Ok(all)
}

fn order(one: &NodeInstance) -> (&str, Option<(&str, &str, &str)>) {
    let instance = one.instance.as_ref();
    let place = instance.map(|i| (i.tenant_id.as_str(), i.pool_id.as_str(), i.instance_id.as_str()));
    (one.node_id.as_str(), place)
}

/// The nodes that can't be asked, with what they last told: only how many instances they have of what is asked for.
async fn away(
    state: &State,
    connected: &[NodeId],
    filter: &ListInstances,
) -> Result<Vec<SilentNode>, Problem> {
    let mut records = load_all::<NodeRecord>(&state.store, NODES).await?;
    records.retain(|(_, record)| {
        record.value.removed_at.is_none() && connected.binary_search(&record.value.node_id).is_err()
    });
    let mut away = Vec::new();
    for (_, record) in records {
        let node = nodes::one(state, &record.value).await?;
        let pools = node.status.iter().flat_map(|status| &status.pools);
        let instances = pools
            .filter(|pool| filter.tenant_id.is_empty() || filter.tenant_id == pool.tenant_id)
            .filter(|pool| filter.pool_id.is_empty() || filter.pool_id == pool.pool_id)
            .fold(0_u32, |sum, pool| sum.saturating_add(count(pool, &filter.phase)));
        // One that never came has no instances that anyone could miss.
        if node.last_seen_at.is_empty() {
            continue;
        }
        let reason = format!(
            "it is not connected; it had {instances} instances when last seen at {}",
            node.last_seen_at
        );
        away.push(SilentNode { node_id: node.node_id, reason, last_seen_at: node.last_seen_at, instances });
    }
    Ok(away)
}

/// How many instances a pool last had, in one phase or in all. What is neither at work nor failed is told as stopped.
fn count(pool: &PoolStatus, phase: &str) -> u32 {
    let Counts { running, warm, sleeping, .. } = pool.actual.unwrap_or_default();
    match phase.parse() {
        Ok(Phase::Running) => running,
        Ok(Phase::Warm) => warm,
        Ok(Phase::Sleeping) => sleeping,
        Ok(Phase::Failed) => pool.failed,
        Ok(_) => pool.stopped,
        Err(_) => {
            [running, warm, sleeping, pool.stopped, pool.failed].into_iter().fold(0, u32::saturating_add)
        }
    }
}

/// Checked here: were it left to the nodes, one that refuses everything would refuse it for all.
fn filter(asked: &ListInstancesRequest) -> Result<ListInstances, Problem> {
    let ListInstancesRequest { node_id: _, tenant_id, pool_id, phase, instance_id } = asked;
    if !tenant_id.is_empty() {
        parse::<TenantId>("tenant_id", tenant_id)?;
    }
    if !pool_id.is_empty() {
        parse::<PoolId>("pool_id", pool_id)?;
    }
    if !instance_id.is_empty() {
        parse::<InstanceId>("instance_id", instance_id)?;
    }
    if !phase.is_empty() {
        parse::<Phase>("phase", phase)?;
    }
    Ok(ListInstances {
        tenant_id: tenant_id.clone(),
        pool_id: pool_id.clone(),
        phase: phase.clone(),
        instance_id: instance_id.clone(),
        after: String::new(),
        limit: u32::try_from(PAGE).unwrap_or(u32::MAX),
    })
}

/// Sends the pages of one node, until it has no more or says something else.
async fn list_node(
    state: &State,
    node: &NodeId,
    filter: &ListInstances,
    pieces: &mpsc::Sender<Piece>,
) -> Result<(), Problem> {
    let (mut filter, mut told) = (filter.clone(), 0);
    loop {
        if pieces.is_closed() {
            return Ok(());
        }
        let answer = state.fleet.ask(node, request::Ask::ListInstances(filter.clone()), TELL_WAIT).await?;
        let Some(reply::Answer::Instances(listed)) = answer else { return Err(other_answer(node)) };
        let more = listed.more || listed.instances.len() > PAGE;
        let page = next_page(listed.instances, &filter.after);
        let Some(last) = page.last() else { return Ok(()) };
        filter.after.clone_from(&last.instance_id);
        told += page.len();
        let named = |instance| NodeInstance { node_id: node.to_string(), instance: Some(instance) };
        let instances = page.into_iter().map(named).collect();
        if pieces.send(Ok(ListInstancesResponse { instances, silent: Vec::new() })).await.is_err() || !more {
            return Ok(());
        }
        if told >= MAX_LISTED {
            let reason = format!("the node lists more than {MAX_LISTED} instances; the rest is not shown");
            let _ = pieces.send(Ok(silent(node, reason))).await;
            return Ok(());
        }
    }
}

/// What of an answer belongs to the page after `after`. Agents that know no pages answer with all, in any order.
fn next_page(mut listed: Vec<InstanceStatus>, after: &str) -> Vec<InstanceStatus> {
    listed.retain(|one| one.instance_id.as_str() > after);
    listed.sort_by(|a, b| a.instance_id.cmp(&b.instance_id));
    listed.dedup_by(|a, b| a.instance_id == b.instance_id);
    listed.truncate(PAGE);
    listed.shrink_to_fit();
    listed
}

fn silent(node: &NodeId, mut reason: String) -> ListInstancesResponse {
    shorten(&mut reason, MAX_REASON_BYTES);
    let silent = vec![SilentNode { node_id: node.to_string(), reason, ..SilentNode::default() }];
    ListInstancesResponse { instances: Vec::new(), silent }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_with_everything_in_any_order_is_cut_into_pages() {
        let one = |n: usize| InstanceStatus { instance_id: format!("i-{n:08}"), ..InstanceStatus::default() };
        let all: Vec<_> =
            (0..2 * PAGE + 1).rev().map(one).chain([one(3), InstanceStatus::default()]).collect();
        let (mut after, mut sizes) = (String::new(), Vec::new());
        loop {
            let page = next_page(all.clone(), &after);
            sizes.push(page.len());
            let Some(last) = page.last() else { break };
            after.clone_from(&last.instance_id);
        }
        assert_eq!(sizes, [PAGE, PAGE, 1, 0]);
    }
}
