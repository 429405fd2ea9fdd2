//! What the coordinator knows of a fleet: changes of status by number, nodes at rest, sessions that flap, many nodes that come
//! back at once.

use std::time::Duration;

use mvm_proto::status::{Capacity, Condition, Counts, NodeInfo, NodeStatus, PoolStatus};
use mvm_proto::wire::control::v1::GetNodeRequest;
use mvm_proto::wire::session::v1::{
    AgentFrame, Heartbeat, PoolName, Stage, StatusDelta, agent_frame, coordinator_frame,
};
use mvm_transport::{ALPN_SESSION, ClientSession, Limits, SessionDialer};
use serde_json::{Value, json};

use crate::objects::{POOL, acme, connect, field, join, pool, until};
use crate::rest::Rest;
use crate::support::{Node, PATIENCE, Running, Session, coordinator, mark_of, new_cluster, soon, wait_until};

fn web(name: &str, running: u32, claimable: u32) -> PoolStatus {
    PoolStatus {
        tenant_id: "acme".to_owned(),
        pool_id: name.to_owned(),
        actual: Some(Counts { running, warm: claimable, ..Counts::default() }),
        current: Some(Counts { running, warm: claimable, ..Counts::default() }),
        claimable,
        ..PoolStatus::default()
    }
}

fn status(node: &str, pools: Vec<PoolStatus>) -> NodeStatus {
    NodeStatus { node_id: node.to_owned(), pools, ..NodeStatus::default() }
}

fn delta(sequence: u64, node: &str, pools: Vec<PoolStatus>, gone: &[&str]) -> agent_frame::Body {
    let gone = gone.iter().map(|name| PoolName { tenant_id: "acme".into(), pool_id: (*name).into() });
    let changed = Some(status(node, pools));
    agent_frame::Body::StatusDelta(StatusDelta { sequence, changed, gone: gone.collect() })
}

async fn pools_of(running: &Running, node: &str) -> Vec<(String, u32)> {
    let request = GetNodeRequest { node_id: node.to_owned() };
    let status = running.operator().await.get_node(request).await.unwrap().into_inner().status.unwrap();
    let count = |pool: PoolStatus| (pool.pool_id, pool.actual.unwrap().running);
    let mut pools: Vec<_> = status.pools.into_iter().map(count).collect();
    pools.sort();
    pools
}

fn counts(pools: &[(&str, u32)]) -> Vec<(String, u32)> {
    pools.iter().map(|(name, running)| ((*name).to_owned(), *running)).collect()
}

#[tokio::test]
async fn changes_are_taken_in_by_their_number_and_a_gap_makes_the_coordinator_ask_for_the_whole() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let node = running.enrol("a").await;
    let mut session = node.connect(None).await;
    // Numbers belong to a whole status of the same session.
    session.send(delta(1, "a", vec![web("web", 9, 0)], &[])).await;
    assert!(matches!(session.next().await, Some(coordinator_frame::Body::StatusWanted(_))));
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0), web("api", 1, 0)]))).await;
    session.send(delta(1, "a", vec![web("web", 2, 0)], &[])).await;
    session.send(delta(2, "a", vec![web("db", 5, 0)], &["api"])).await;
    session.expect_quiet().await;
    assert_eq!(pools_of(&running, "a").await, counts(&[("db", 5), ("web", 2)]));

    session.send(delta(4, "a", vec![web("web", 7, 0)], &[])).await;
    assert!(matches!(session.next().await, Some(coordinator_frame::Body::StatusWanted(_))));
    // Asked for once; what was under way before the whole is passed over.
    session.send(delta(5, "a", vec![web("web", 8, 0)], &[])).await;
    session.expect_quiet().await;
    assert_eq!(pools_of(&running, "a").await, counts(&[("db", 5), ("web", 2)]));
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 8, 0)]))).await;
    session.send(delta(1, "a", vec![web("web", 9, 0)], &[])).await;
    session.expect_quiet().await;
    assert_eq!(pools_of(&running, "a").await, counts(&[("web", 9)]));

    // The next session begins with the whole.
    let mut session = node.connect(None).await;
    session.send(delta(2, "a", vec![web("web", 1, 0)], &[])).await;
    assert!(matches!(session.next().await, Some(coordinator_frame::Body::StatusWanted(_))));
}

#[tokio::test]
async fn features_are_those_that_both_know() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let node = running.enrol("a").await;
    for (named, expected) in [
        (vec!["status-deltas", "moonlight"], vec!["status-deltas"]),
        (vec!["moonlight"], vec![]),
        (vec![], vec![]),
    ] {
        let mut session = node.dial().await.unwrap();
        let features = named.into_iter().map(str::to_owned).collect();
        let hello = mvm_proto::wire::session::v1::Hello { features, ..node.hello(None) };
        session.send(agent_frame::Body::Hello(hello)).await;
        assert_eq!(session.welcome().await.features, expected);
        // Whole statuses are taken from every agent.
        session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0)]))).await;
        session.expect_quiet().await;
    }
}

#[tokio::test]
async fn changes_without_end_make_no_more_be_kept_than_one_whole_status() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let node = running.enrol("a").await;
    let mut session = node.connect(None).await;
    session.send(agent_frame::Body::Status(status("a", Vec::new()))).await;
    let large = |round: u64, at: usize| PoolStatus {
        deferred: vec!["x".repeat(1000); 16],
        ..web(&format!("{round}-{at}"), 1, 0)
    };
    let mut asked = false;
    for round in 1..=8 {
        session.send(delta(round, "a", (0..40).map(|at| large(round, at)).collect(), &[])).await;
    }
    session.send(agent_frame::Body::Heartbeat(Heartbeat { sequence: 3, info: None })).await;
    loop {
        match session.next().await {
            Some(coordinator_frame::Body::StatusWanted(_)) => asked = true,
            Some(coordinator_frame::Body::HeartbeatAck(_)) => break,
            other => panic!("{other:?}"),
        }
    }
    assert!(asked, "more than one status may be came by changes");
    let request = GetNodeRequest { node_id: "a".into() };
    let kept = running.operator().await.get_node(request).await.unwrap().into_inner().status.unwrap();
    let bytes = prost::Message::encoded_len(&kept);
    assert!(bytes <= mvm_proto::status::fit::MAX_STATUS_BYTES, "{bytes}");
    assert!(kept.pools.len() >= 40, "what fits is kept: {}", kept.pools.len());
}

/// How much the coordinator wrote, and how often placement woke.
async fn done(running: &Running) -> (u64, u64) {
    let writes = running.metric("mvm_coordinator_store_writes_total").await;
    (writes, running.metric("mvm_coordinator_placement_wakes_total").await)
}

/// The same once neither grows any more: statuses are written every two seconds.
async fn at_rest(running: &Running) -> (u64, u64) {
    let mut look = tokio::time::interval(Duration::from_millis(50));
    let (mut before, mut since) = (done(running).await, std::time::Instant::now());
    let resting = async {
        while since.elapsed() < Duration::from_secs(3) {
            look.tick().await;
            let now = done(running).await;
            if now != before {
                (before, since) = (now, std::time::Instant::now());
            }
        }
        before
    };
    soon("the coordinator to rest", resting).await
}

async fn beat(session: &mut Session, times: u32) {
    for _ in 0..times {
        session.expect_quiet().await;
    }
}

#[tokio::test]
async fn heartbeats_write_nothing_and_wake_placement_never() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    let (_a, mut session) = join(&running, "a", 4).await;
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0)]))).await;
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("Ready")).await;
    // Until the node is at rest: what its coming made be written is written.
    let before = at_rest(&running).await;
    beat(&mut session, 100).await;
    // Times alone are no news either.
    for sequence in 1..=20 {
        let changed = NodeStatus { observed_at: sequence.to_string(), ..status("a", Vec::new()) };
        let delta = StatusDelta { sequence, changed: Some(changed), gone: Vec::new() };
        session.send(agent_frame::Body::StatusDelta(delta)).await;
    }
    beat(&mut session, 1).await;
    assert_eq!(done(&running).await, before);
    // What is news wakes it.
    session.send(delta(21, "a", vec![web("web", 2, 0)], &[])).await;
    wait_until("placement to wake", async || {
        running.metric("mvm_coordinator_placement_wakes_total").await > before.1
    })
    .await;
}

fn condition<'a>(object: &'a Value, kind: &str) -> &'a Value {
    let conditions = object["status"]["conditions"].as_array().unwrap();
    conditions.iter().find(|condition| condition["type"] == kind).unwrap_or(&Value::Null)
}

#[tokio::test]
async fn a_session_that_flaps_moves_neither_the_node_nor_its_pools_and_wakes_placement_never() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (node, mut session) = join(&running, "a", 4).await;
    assert_eq!(rest.put(POOL, &pool(1)).await.status, 201);
    let mark = session.obey().await;
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0)]))).await;
    until(&mut rest, POOL, "/status/ready", &json!("1/1")).await;
    let before = at_rest(&running).await;
    for _ in 0..20 {
        session.session.control.close(0, "gone");
        soon("the end", session.end()).await;
        session = connect(&node, 4, Some(mark.clone())).await;
        session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0)]))).await;
        beat(&mut session, 1).await;
    }
    assert_eq!(done(&running).await, before);
    assert_eq!(condition(&rest.get(POOL).await.body, "Ready")["status"], "True");
    assert_eq!(field(&mut rest, "/v1/nodes/a", "/status/state").await, "Ready");
}

#[tokio::test]
async fn a_node_that_stays_away_is_unknown_then_lost_and_ready_again_when_it_comes_back() {
    let (_dir, start) = new_cluster();
    let running = Running::start_with(&start.data_dir, |settings| {
        settings.heartbeat = Duration::from_secs(3);
        settings.node_grace = Duration::from_secs(9);
    })
    .await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (node, mut session) = join(&running, "a", 4).await;
    assert_eq!(rest.put(POOL, &pool(1)).await.status, 201);
    let mark = session.obey().await;
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0)]))).await;
    until(&mut rest, POOL, "/status/ready", &json!("1/1")).await;
    session.session.control.close(0, "gone");
    let gone = std::time::Instant::now();
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("Unknown")).await;
    assert!(gone.elapsed() >= Duration::from_secs(6), "{:?}", gone.elapsed());
    assert_eq!(condition(&rest.get(POOL).await.body, "Ready")["reason"], "NodesAway");
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("NotReady")).await;
    assert!(gone.elapsed() >= Duration::from_secs(9), "{:?}", gone.elapsed());
    assert_eq!(condition(&rest.get("/v1/nodes/a").await.body, "Ready")["reason"], "Lost");
    let mut session = connect(&node, 4, Some(mark)).await;
    let long = Condition {
        r#type: "Ready".into(),
        status: "False".into(),
        message: "no disk".into(),
        ..Condition::default()
    };
    let not_ready = NodeStatus { conditions: vec![long], ..status("a", vec![web("web", 1, 0)]) };
    session.send(agent_frame::Body::Status(not_ready)).await;
    // It says so itself.
    wait_until("the node's own word", async || {
        let object = Rest::operator(&running).await.get("/v1/nodes/a").await.body;
        condition(&object, "Ready")["reason"] == "AgentNotReady"
    })
    .await;
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 0)]))).await;
    until(&mut rest, "/v1/nodes/a", "/status/state", &json!("Ready")).await;
}

#[tokio::test]
async fn counts_that_move_are_read_at_once_and_written_once_in_a_while() {
    let (_dir, start) = new_cluster();
    let running = Running::start(&start.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let (_a, mut session) = join(&running, "a", 64).await;
    assert_eq!(rest.put(POOL, &pool(50)).await.status, 201);
    session.obey().await;
    session.send(agent_frame::Body::Status(status("a", vec![web("web", 1, 1)]))).await;
    until(&mut rest, POOL, "/status/counts/running", &json!(1)).await;
    let before = running.metric("mvm_coordinator_store_writes_total{of=\"objects\"}").await;
    for sequence in 1..=30 {
        let moved = u32::try_from(sequence).unwrap() + 1;
        session.send(delta(sequence, "a", vec![web("web", moved, moved)], &[])).await;
        until(&mut rest, POOL, "/status/counts/running", &json!(moved)).await;
        assert_eq!(field(&mut rest, POOL, "/status/claimable").await, json!(moved));
    }
    let listed = rest.get("/v1/tenants/acme/pools").await.body;
    assert_eq!(listed["items"][0]["status"]["counts"]["warm"], 31);
    let written = running.metric("mvm_coordinator_store_writes_total{of=\"objects\"}").await - before;
    assert!(written <= 4, "{written} writes of 30 movements");
}

/// So many nodes, each with a pool's instance placed on it.
const NODES: u32 = 200;

struct Many {
    node: Node,
    session: ClientSession,
}

/// A session of a node from the one socket that plays the fleet.
async fn dial(dialer: &SessionDialer, node: &Node, mark: Option<mvm_proto::status::Mark>) -> ClientSession {
    let (anchors, alpn) = (&node.anchors, [ALPN_SESSION]);
    let tls = mvm_pki::tls::client_config(Some(&node.credential), anchors, coordinator(), &alpn).unwrap();
    let mut session =
        soon("a session", dialer.dial(node.address, "127.0.0.1", tls, &Limits::default())).await.unwrap();
    let capacity = Capacity { vcpus: 1, mem_mib: 64, disk_mib: 65_536, max_instances: 1 };
    let info = NodeInfo { node_id: node.id.clone(), capacity: Some(capacity), ..NodeInfo::default() };
    // One that knows of no deltas: every document comes whole.
    let features = vec![mvm_proto::wire::FEATURE_STATUS_DELTAS.to_owned()];
    let hello = mvm_proto::wire::session::v1::Hello { info: Some(info), features, ..node.hello(mark) };
    send(&mut session, agent_frame::Body::Hello(hello)).await;
    assert!(matches!(next(&mut session).await, coordinator_frame::Body::Welcome(_)));
    session
}

async fn send(session: &mut ClientSession, body: agent_frame::Body) {
    session.frames_out.send(&AgentFrame { body: Some(body) }).await.unwrap();
}

async fn next(session: &mut ClientSession) -> coordinator_frame::Body {
    let frame = tokio::time::timeout(PATIENCE, session.frames_in.recv()).await.unwrap().unwrap();
    frame.unwrap().body.unwrap()
}

/// Waits until every node runs its instance. Over a connection of its own each time: an older one of an operator gives way.
async fn all_run(running: &Running) {
    let expected = json!(format!("{NODES}/{NODES}"));
    wait_until("all to run", async || {
        field(&mut Rest::operator(running).await, POOL, "/status/ready").await == expected
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_restart_and_the_return_of_many_nodes_send_no_document_and_write_none() {
    let (_dir, start) = new_cluster();
    let generous = |settings: &mut mvm_coordinator::CoordinatorSettings| {
        (settings.enrol_per_second, settings.enrol_burst) = (10_000.0, 10_000.0);
        settings.max_grpc_connections = 10_000;
        settings.limits.max_handshakes_per_ip = usize::try_from(NODES).unwrap();
    };
    let running = Running::start_with(&start.data_dir, generous).await;
    let mut rest = Rest::operator(&running).await;
    let quotas = json!({ "spec": { "quotas": { "max_pools": 2, "max_vcpus": 10_000, "max_mem_mib": 10_000_000, "max_running": 10_000, "max_instances_per_pool": 10_000 } } });
    let made = rest.put("/v1/tenants/acme", &quotas).await;
    assert_eq!(made.status, 201, "{}", made.body);
    let dialer = SessionDialer::bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let mut fleet = Vec::new();
    for number in 0..NODES {
        let node = running.enrol(&format!("n{number}")).await;
        let session = dial(&dialer, &node, None).await;
        fleet.push(Many { node, session });
    }
    // Of many connections of operators an older one gives way.
    let mut rest = Rest::operator(&running).await;
    assert_eq!(rest.put(POOL, &pool(NODES)).await.status, 201);
    let mut marks = Vec::new();
    for many in &mut fleet {
        let document = loop {
            if let coordinator_frame::Body::Document(document) = next(&mut many.session).await {
                let envelope = mvm_proto::Unverified::from_json(&document.envelope).unwrap();
                let verified = many.node.trust.verify_document(envelope, crate::support::now()).unwrap();
                if !verified.get().desired.tenants.is_empty() {
                    break verified;
                }
            }
        };
        let mark = mark_of(&document);
        for stage in [Stage::Accepted, Stage::Converged] {
            let ack = mvm_proto::wire::session::v1::Ack {
                mark: Some(mark.clone()),
                stage: stage.into(),
                ..Default::default()
            };
            send(
                &mut many.session,
                agent_frame::Body::Acks(mvm_proto::wire::session::v1::Acks { acks: vec![ack] }),
            )
            .await;
        }
        marks.push(mark);
        send(&mut many.session, agent_frame::Body::Status(status(&many.node.id, vec![web("web", 1, 0)])))
            .await;
    }
    all_run(&running).await;
    running.stop().await;

    let running = Running::start_with(&start.data_dir, generous).await;
    // All at once after the restart, and once more without one.
    for round in 0..2 {
        let mut coming = tokio::task::JoinSet::new();
        for (many, mark) in fleet.drain(..).zip(marks.clone()) {
            let (dialer, address) = (dialer.clone(), running.addresses.quic);
            coming.spawn(async move {
                let Many { mut node, session } = many;
                session.control.close(0, "gone");
                node.address = address;
                let mut session = dial(&dialer, &node, Some(mark.clone())).await;
                let told = status(&node.id, vec![web("web", 1, 0)]);
                send(&mut session, agent_frame::Body::Status(told)).await;
                send(&mut session, agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info: None })).await;
                let mut documents = 0;
                loop {
                    match next(&mut session).await {
                        coordinator_frame::Body::HeartbeatAck(_) => break,
                        coordinator_frame::Body::Document(_) => documents += 1,
                        _ => {}
                    }
                }
                (Many { node, session }, mark, documents)
            });
        }
        let (mut back, mut documents) = (Vec::new(), 0);
        while let Some(one) = coming.join_next().await {
            let (many, mark, heard) = one.unwrap();
            documents += heard;
            back.push((many, mark));
        }
        assert_eq!(documents, 0, "round {round}");
        (fleet, marks) = back.into_iter().unzip();
    }
    all_run(&running).await;
    assert_eq!(running.metric("mvm_coordinator_sessions ").await, u64::from(NODES));
    // What comes after all of that: a change is one document, and it is counted.
    assert_eq!(running.metric("mvm_coordinator_documents_sent_total").await, 0);
    for of in ["assigned", "envelopes", "placed"] {
        let name = format!("mvm_coordinator_store_writes_total{{of=\"{of}\"}}");
        assert_eq!(running.metric(&name).await, 0, "{of}");
    }
    assert_eq!(Rest::operator(&running).await.put(POOL, &pool(NODES - 1)).await.status, 200);
    wait_until("the change to be sent", async || {
        running.metric("mvm_coordinator_documents_sent_total").await == 1
    })
    .await;
}
