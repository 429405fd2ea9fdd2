//! Lists over the whole fleet: large ones are whole, and one node's part is that node's alone.

use std::collections::BTreeMap;

use mvm_client::{ControlClient, list_all_nodes, problem_of};
use mvm_coordinator::InitReport;
use mvm_proto::status::{Counts, InstanceStatus, NodeStatus, PoolStatus};
use mvm_proto::wire::control::v1::{ListInstancesRequest, ListInstancesResponse, ListNodesRequest};
use mvm_proto::wire::session::v1::{
    Instances, ListInstances, Reply, agent_frame, coordinator_frame, reply, request,
};
use mvm_proto::{Digest, Problem};
use mvm_store::{Settings as StoreSettings, SledStore, Store as _, Transaction};
use serde_json::json;

use crate::support::{Node, Running, Session, new_cluster, now, soon};

const NODES: usize = 1000;
const POOLS: usize = 100;

/// Puts nodes into the store as if they had enrolled and told their status long ago.
async fn plant(report: &InitReport, nodes: impl Iterator<Item = (String, NodeStatus)>) {
    let store = SledStore::open(report.data_dir.join("store"), StoreSettings::default()).await.unwrap();
    for (name, status) in nodes {
        let certificate = json!({
            "serial": "00", "fingerprint": Digest::of(name.as_bytes()), "issued_at": now(), "not_after": now()
        });
        let node =
            json!({ "node_id": name, "enrolled_at": now(), "removed_at": null, "certificate": certificate });
        let status = json!({
            "last_seen_at": now(), "info": null, "status": status, "accepted": null, "converged": null
        });
        let txn = Transaction::new()
            .put(format!("nodes/{name}"), node.to_string())
            .put(format!("status/{name}"), status.to_string());
        store.commit(txn).await.unwrap();
    }
    store.close().await;
}

fn honest_status(name: &str) -> NodeStatus {
    let counts = Some(Counts { running: 1, warm: 2, sleeping: 3, down: 0 });
    let pool = |at: usize| PoolStatus {
        tenant_id: format!("tenant-{at}"),
        pool_id: format!("pool-{at}"),
        desired: counts,
        actual: counts,
        revision: Digest::of(b"").to_string(),
        ..PoolStatus::default()
    };
    NodeStatus { node_id: name.to_owned(), pools: (0..POOLS).map(pool).collect(), ..NodeStatus::default() }
}

/// What an older version may have stored.
fn hostile_status(name: &str) -> NodeStatus {
    let pool = PoolStatus {
        tenant_id: "x".repeat(10_000),
        actual: Some(Counts { running: u32::MAX, warm: 0, sleeping: 0, down: 0 }),
        ..PoolStatus::default()
    };
    NodeStatus { node_id: name.to_owned(), pools: vec![pool; 500], ..NodeStatus::default() }
}

#[tokio::test]
async fn a_thousand_nodes_with_a_hundred_pools_each_are_listed_whole_beside_hostile_ones() {
    let (_dir, report) = new_cluster();
    let honest = (0..NODES).map(|n| format!("n-{n:04}")).map(|name| (name.clone(), honest_status(&name)));
    let hostile = (0..3).map(|n| format!("bad-{n}")).map(|name| (name.clone(), hostile_status(&name)));
    plant(&report, honest.chain(hostile)).await;
    let running = Running::start(&report.data_dir).await;
    let mut operator = running.operator().await;

    let all = soon("all nodes", list_all_nodes(&mut operator, false)).await.unwrap();
    let (good, bad): (Vec<_>, Vec<_>) = all.iter().partition(|node| node.node_id.starts_with("n-"));
    assert_eq!((good.len(), bad.len()), (NODES, 3));
    let expected = Some(Counts { running: 100, warm: 200, sleeping: 300, down: 0 });
    for node in good {
        assert_eq!((node.status.as_ref().unwrap().pools.len(), node.actual), (POOLS, expected));
        assert_eq!(node.status.as_ref().unwrap().conditions, []);
    }
    for node in bad {
        let told = &node.status.as_ref().unwrap().conditions;
        assert!(told.iter().any(|condition| condition.r#type == "StatusComplete"), "{told:?}");
        assert_eq!(node.actual.unwrap().running, u32::MAX);
    }

    let lines = soon("all lines", list_all_nodes(&mut operator, true)).await.unwrap();
    assert_eq!(lines.len(), NODES + 3);
    assert!(lines.iter().all(|node| node.status.as_ref().unwrap().pools.is_empty()));
    assert_eq!(lines.iter().filter(|node| node.actual == expected).count(), NODES);
}

#[tokio::test]
async fn nodes_come_in_pages_of_the_size_asked_for() {
    let (_dir, report) = new_cluster();
    plant(&report, (0..5).map(|n| (format!("n{n}"), NodeStatus::default()))).await;
    let running = Running::start(&report.data_dir).await;
    let mut operator = running.operator().await;
    let (mut token, mut pages) = (String::new(), Vec::new());
    loop {
        let request = ListNodesRequest { page_size: 2, page_token: token, summary: false };
        let page = operator.list_nodes(request).await.unwrap().into_inner();
        pages.push(page.nodes.into_iter().map(|node| node.node_id).collect::<Vec<_>>());
        token = page.next_page_token;
        if token.is_empty() {
            break;
        }
    }
    assert_eq!(pages, [vec!["n0", "n1"], vec!["n2", "n3"], vec!["n4"]]);
    let odd = ListNodesRequest { page_token: "../etc".into(), ..ListNodesRequest::default() };
    assert_eq!(problem_of(&operator.list_nodes(odd).await.unwrap_err()).unwrap().code, "bad_request");
}

fn instance(number: usize) -> InstanceStatus {
    InstanceStatus {
        instance_id: format!("i-{number:08x}"),
        tenant_id: "acme".into(),
        pool_id: "web".into(),
        phase: "running".into(),
        revision: Digest::of(b"").to_string(),
        reason: "it was wanted".into(),
        ..InstanceStatus::default()
    }
}

/// Connects a node that answers every list with what `answer` makes of the request.
async fn answering(
    node: &Node,
    mut answer: impl FnMut(&ListInstances) -> Result<reply::Answer, Problem> + Send + 'static,
) {
    let mut session = node.connect(None).await;
    tokio::spawn(async move {
        while let Some(body) = next(&mut session).await {
            let coordinator_frame::Body::Request(asked) = body else { continue };
            let Some(request::Ask::ListInstances(filter)) = asked.ask else { continue };
            let (problem, answer) = match answer(&filter) {
                Ok(answer) => (Vec::new(), Some(answer)),
                Err(problem) => (serde_json::to_vec(&problem).unwrap(), None),
            };
            let reply = Reply { id: asked.id, problem, answer };
            session.send(agent_frame::Body::Reply(reply)).await;
        }
    });
}

/// The next frame, however long it takes.
async fn next(session: &mut Session) -> Option<coordinator_frame::Body> {
    session.session.frames_in.recv().await.ok().flatten().and_then(|frame| frame.body)
}

/// As an agent of today answers: a page by the order of ids.
fn paged(all: usize) -> impl FnMut(&ListInstances) -> Result<reply::Answer, Problem> + Send + 'static {
    move |asked| {
        let rest: Vec<_> = (0..all).map(instance).filter(|one| one.instance_id > asked.after).collect();
        let limit = asked.limit as usize;
        let more = rest.len() > limit;
        let instances = rest.into_iter().take(limit).collect();
        Ok(reply::Answer::Instances(Instances { instances, wake: None, more }))
    }
}

async fn stream(
    operator: &mut ControlClient,
    asked: ListInstancesRequest,
) -> Result<ListInstancesResponse, tonic::Status> {
    let mut pages = operator.stream_instances(asked).await?.into_inner();
    let mut all = ListInstancesResponse::default();
    while let Some(page) = soon("a page", pages.message()).await? {
        all.instances.extend(page.instances);
        all.silent.extend(page.silent);
    }
    Ok(all)
}

fn per_node(all: &ListInstancesResponse) -> BTreeMap<&str, usize> {
    let mut counts = BTreeMap::new();
    all.instances.iter().for_each(|one| *counts.entry(one.node_id.as_str()).or_default() += 1);
    counts
}

async fn start() -> (tempfile::TempDir, Running) {
    let (dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| settings.enrol_burst = 1000.0).await;
    (dir, running)
}

#[tokio::test]
async fn more_instances_than_fit_a_message_are_listed_whole() {
    let (_dir, running) = start().await;
    for n in 0..50 {
        let node = running.enrol(&format!("n-{n:02}")).await;
        answering(&node, paged(1200)).await;
    }
    let mut operator = running.operator().await;
    let all = stream(&mut operator, ListInstancesRequest::default()).await.unwrap();
    assert_eq!(all.silent, []);
    let counts = per_node(&all);
    assert!(counts.len() == 50 && counts.values().all(|count| *count == 1200), "{counts:?}");

    // A client that knows no pages gets what fits, and is told of the rest.
    let one = operator.list_instances(ListInstancesRequest::default()).await.unwrap().into_inner();
    let listed = one.instances.len();
    assert!(listed > 1200 && listed < 60_000, "{listed}");
    assert!(!one.silent.is_empty());
}

#[tokio::test]
async fn what_hostile_nodes_answer_is_missing_from_their_part_of_the_list_only() {
    let (_dir, running) = start().await;
    answering(&running.enrol("a-paged").await, paged(700)).await;
    // An agent that knows no pages answers with everything, in any order, whatever it was asked.
    answering(&running.enrol("b-old").await, |_| {
        let instances = (0..2000).rev().map(instance).collect();
        Ok(reply::Answer::Instances(Instances { instances, wake: None, more: false }))
    })
    .await;
    answering(&running.enrol("c-refuses").await, |_| Err(Problem::new(400, "bad_id", "no", ""))).await;
    answering(&running.enrol("d-other").await, |_| Ok(reply::Answer::Logs(vec![0; 1 << 20]))).await;
    answering(&running.enrol("e-long").await, |_| {
        let long = |n| InstanceStatus { reason: "x".repeat(400_000), ..instance(n) };
        Ok(reply::Answer::Instances(Instances {
            instances: (0..20).map(long).collect(),
            wake: None,
            more: true,
        }))
    })
    .await;
    answering(&running.enrol("f-endless").await, {
        let mut told = 0;
        move |asked| {
            let instances = (told..told + asked.limit as usize).map(instance).collect();
            told += asked.limit as usize;
            Ok(reply::Answer::Instances(Instances { instances, wake: None, more: true }))
        }
    })
    .await;
    answering(&running.enrol("g-empty").await, |_| {
        let instances = vec![InstanceStatus::default(); 50_000];
        Ok(reply::Answer::Instances(Instances { instances, wake: None, more: true }))
    })
    .await;

    let mut operator = running.operator().await;
    let all = stream(&mut operator, ListInstancesRequest::default()).await.unwrap();
    let counts = per_node(&all);
    assert_eq!((counts["a-paged"], counts["b-old"], counts["e-long"]), (700, 2000, 20));
    assert_eq!(counts["f-endless"], 16 * 1024);
    let texts = all.instances.iter().filter_map(|one| one.instance.as_ref());
    assert!(texts.map(|one| one.reason.len()).max() <= Some(mvm_proto::status::fit::MAX_TEXT_BYTES));
    let mut silent: Vec<_> = all.silent.iter().map(|node| node.node_id.as_str()).collect();
    silent.sort_unstable();
    assert_eq!(silent, ["c-refuses", "d-other", "f-endless"]);

    // Asked for one, the refusal is the answer.
    let one = ListInstancesRequest { node_id: "c-refuses".into(), ..ListInstancesRequest::default() };
    assert_eq!(problem_of(&stream(&mut operator, one).await.unwrap_err()).unwrap().code, "bad_id");
    // What no node could answer is refused before any is asked.
    let odd = ListInstancesRequest { phase: "asleep".into(), ..ListInstancesRequest::default() };
    assert_eq!(problem_of(&stream(&mut operator, odd).await.unwrap_err()).unwrap().code, "bad_request");
}
