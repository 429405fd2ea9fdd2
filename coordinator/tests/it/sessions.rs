//! Node sessions: who may speak, replacement, removal, silence.

use mvm_proto::Problem;
use mvm_proto::status::{Condition, Event, NodeInfo, NodeStatus};
use mvm_proto::wire::control::v1::{
    ActOnInstanceRequest, GetNodeRequest, Node as NodeMessage, RemoveNodeRequest,
};
use mvm_proto::wire::session::v1::{
    Events, Heartbeat, Instances, Reply, agent_frame, coordinator_frame, reply,
};
use mvm_transport::{Limits, SessionError};

use crate::support::{HEARTBEAT, PATIENCE, Running, document, new_cluster, soon, stages, wait_until};

async fn get(running: &Running, node: &str) -> NodeMessage {
    running.operator().await.get_node(GetNodeRequest { node_id: node.into() }).await.unwrap().into_inner()
}

async fn wait_connected(running: &Running, node: &str, connected: bool) {
    wait_until("the connection to be known", || async { get(running, node).await.connected == connected })
        .await;
}

#[tokio::test]
async fn a_node_is_welcomed_and_its_heartbeats_are_answered() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.dial().await.unwrap();
    session.send(agent_frame::Body::Hello(node.hello(None))).await;
    let welcome = session.welcome().await;
    assert_eq!((welcome.protocol, u64::from(welcome.heartbeat_seconds)), (1, HEARTBEAT.as_secs()));
    session.expect_quiet().await;
    let known = get(&running, "n1").await;
    assert!(known.connected && known.remote_address.starts_with("127.0.0.1:"));
    drop(session);
    wait_connected(&running, "n1", false).await;
}

#[tokio::test]
async fn status_and_events_come_up() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let status = NodeStatus {
        node_id: "n1".into(),
        last_reconcile_at: "2026-01-01T00:00:00Z".into(),
        ..NodeStatus::default()
    };
    session.send(agent_frame::Body::Status(status)).await;
    let event = Event { kind: "InstanceCreated".into(), ..Event::default() };
    session.send(agent_frame::Body::Events(Events { events: vec![event.clone()] })).await;
    session.expect_quiet().await;
    let known = get(&running, "n1").await;
    assert_eq!(known.status.unwrap().last_reconcile_at, "2026-01-01T00:00:00Z");
    assert_eq!(known.events, [event]);

    let info = NodeInfo { node_id: "n1".into(), accelerator: "kvm".into(), ..NodeInfo::default() };
    session.send(agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info: Some(info.clone()) })).await;
    let answer = session.next().await;
    assert!(matches!(answer, Some(coordinator_frame::Body::HeartbeatAck(_))), "{answer:?}");
    assert_eq!(get(&running, "n1").await.info, Some(info), "what was found out since the hello");
}

#[tokio::test]
async fn a_node_that_speaks_for_another_is_cut_off() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    running.enrol("n2").await;
    let mut session = node.dial().await.unwrap();
    let mut hello = node.hello(None);
    hello.info = Some(NodeInfo { node_id: "n2".into(), ..NodeInfo::default() });
    session.send(agent_frame::Body::Hello(hello)).await;
    assert!(!session.end().await.unwrap().redial);
    assert!(!get(&running, "n2").await.connected);

    let mut session = node.connect(None).await;
    let info = Some(NodeInfo { node_id: "n2".into(), ..NodeInfo::default() });
    session.send(agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info })).await;
    assert!(!session.end().await.unwrap().redial);

    let mut session = node.connect(None).await;
    let status = NodeStatus { node_id: "n2".into(), ..NodeStatus::default() };
    session.send(agent_frame::Body::Status(status)).await;
    assert!(session.end().await.unwrap().reason.contains("another node"));
}

#[tokio::test]
async fn the_first_frame_must_be_a_hello_and_the_only_one() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.dial().await.unwrap();
    session.send(agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info: None })).await;
    assert!(session.end().await.unwrap().reason.contains("hello"));
    let mut session = node.connect(None).await;
    session.send(agent_frame::Body::Hello(node.hello(None))).await;
    assert!(session.end().await.unwrap().reason.contains("second hello"));
}

#[tokio::test]
async fn an_agent_of_an_unknown_old_version_is_told_to_upgrade() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.dial().await.unwrap();
    let mut hello = node.hello(None);
    hello.protocol = 0;
    session.send(agent_frame::Body::Hello(hello)).await;
    assert!(session.end().await.unwrap().reason.contains("upgrade"));
}

#[tokio::test]
async fn an_operators_certificate_opens_no_session() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut node = running.enrol("n1").await;
    let operator = mvm_pki::Credential::load(&report.operator.credential).unwrap();
    let own = std::mem::replace(&mut node.credential, mvm_pki::LiveCredential::new(operator));
    // Refused before the handshake is over or after it, whichever the client sees first.
    if let Ok(mut session) = node.dial().await {
        let hello = mvm_proto::wire::session::v1::AgentFrame {
            body: Some(agent_frame::Body::Hello(node.hello(None))),
        };
        let _ = session.session.frames_out.send(&hello).await;
        while let Some(body) = session.next().await {
            assert!(matches!(body, coordinator_frame::Body::Goodbye(_)), "{body:?}");
        }
    }
    assert!(!get(&running, "n1").await.connected);
    // With its own certificate the same node is welcome.
    node.credential = own;
    let _session = node.connect(None).await;
    assert!(get(&running, "n1").await.connected);
}

#[tokio::test]
async fn a_newer_session_of_a_node_replaces_the_older() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut older = node.connect(None).await;
    let mut newer = node.connect(None).await;
    assert!(older.end().await.is_none());
    newer.expect_quiet().await;
    assert!(get(&running, "n1").await.connected);
}

#[tokio::test]
async fn removing_a_node_closes_its_session_at_once_and_refuses_its_certificate() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    session.expect_quiet().await;
    let removed =
        running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    assert!(removed.into_inner().session_closed);
    let begun = std::time::Instant::now();
    soon("the session's end", session.end()).await;
    assert!(begun.elapsed() < std::time::Duration::from_secs(10), "{:?}", begun.elapsed());

    let mut again = node.dial().await.unwrap();
    again.send(agent_frame::Body::Hello(node.hello(None))).await;
    let goodbye = again.end().await.unwrap();
    assert!(!goodbye.redial && goodbye.reason.contains("removed"));
}

#[tokio::test]
async fn a_silent_session_is_given_up_after_three_intervals() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| {
        settings.heartbeat = std::time::Duration::from_millis(200);
    })
    .await;
    let node = running.enrol("n1").await;
    let session = node.connect(None).await;
    let end = soon("the end", session.session.control.closed()).await;
    let code = u64::from(mvm_transport::session::close_code::TOO_SLOW);
    assert!(matches!(&end, SessionError::Closed { code: found, .. } if *found == code), "{end:?}");
    wait_connected(&running, "n1", false).await;
}

#[tokio::test]
async fn a_wake_goes_down_the_session_and_its_answer_comes_back() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let wake = ActOnInstanceRequest {
        node_id: "n1".into(),
        tenant_id: "acme".into(),
        pool_id: "web".into(),
        instance_id: "i-0000000a".into(),
        action: "wake".into(),
        override_seconds: None,
    };
    let problem = Problem::new(404, "instance_unknown", "no such instance", "");
    for answer in [Vec::new(), serde_json::to_vec(&problem).unwrap()] {
        let mut operator = running.operator().await;
        let asked = tokio::spawn({
            let wake = wake.clone();
            async move { operator.act_on_instance(wake).await }
        });
        let Some(coordinator_frame::Body::Request(request)) = session.next().await else {
            panic!("no request")
        };
        let refused = !answer.is_empty();
        // A node that did it says how the instance is then.
        let done = (!refused).then(|| reply::Answer::Instances(Instances::default()));
        let reply = Reply { id: request.id, problem: answer, answer: done };
        session.send(agent_frame::Body::Reply(reply)).await;
        let result = soon("the answer", asked).await.unwrap();
        match refused {
            false => drop(result.unwrap()),
            true => {
                let status = result.unwrap_err();
                let told = mvm_client::problem_of(&status).unwrap();
                assert!(told.request_id.is_some() && told.trace_id.is_some());
                assert_eq!(Problem { request_id: None, trace_id: None, ..told }, problem);
            }
        }
    }
}

#[tokio::test]
async fn a_wake_fails_at_once_when_the_session_ends() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let mut operator = running.operator().await;
    let wake = ActOnInstanceRequest {
        node_id: "n1".into(),
        tenant_id: "acme".into(),
        pool_id: "web".into(),
        instance_id: "i-0000000a".into(),
        action: "wake".into(),
        override_seconds: None,
    };
    let asked = tokio::spawn(async move { operator.act_on_instance(wake).await });
    assert!(matches!(session.next().await, Some(coordinator_frame::Body::Request(_))));
    session.session.control.close(0, "gone");
    let status = soon("the answer", asked).await.unwrap().unwrap_err();
    assert_eq!(mvm_client::problem_of(&status).unwrap().code, "node_not_connected");
}

#[tokio::test]
async fn stopping_says_goodbye_and_asks_to_dial_again() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    session.expect_quiet().await;
    let begun = std::time::Instant::now();
    let (goodbye, ()) = tokio::join!(session.end(), running.stop());
    assert!(goodbye.unwrap().redial);
    assert!(begun.elapsed() < std::time::Duration::from_secs(10));
}

#[tokio::test]
async fn a_document_and_statuses_larger_than_the_window_pass_each_other() {
    const WINDOW: u32 = 512;
    let (_dir, report) = new_cluster();
    let running =
        Running::start_with(&report.data_dir, |settings| settings.limits.stream_window = WINDOW).await;
    let node = running.enrol("n1").await;
    let narrow = Limits { stream_window: WINDOW, ..Limits::default() };
    let mut session = node.dial_within(&narrow).await.unwrap();
    session.send(agent_frame::Body::Hello(node.hello(None))).await;
    session.welcome().await;

    let pushed = running.push(&document("n1", 1), 0).await;
    assert!(stages(&pushed).contains(&"stored"));
    // None of the document is read before all of these are sent.
    let long = Condition { message: "x".repeat(64 * 1024), ..Condition::default() };
    let status = NodeStatus { node_id: "n1".into(), conditions: vec![long], ..NodeStatus::default() };
    for _ in 0..8 {
        let sent = session.send(agent_frame::Body::Status(status.clone()));
        tokio::time::timeout(PATIENCE / 2, sent).await.expect("the coordinator reads while it sends");
    }
    let mark = session.obey().await;
    session.expect_quiet().await;
    assert_eq!(get(&running, "n1").await.assigned, Some(mark));
}
