//! The session to the coordinator: hello, documents, acks, requests, and coming back after a restart.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use mvm_agent::AgentSettings;
use mvm_pki::Role;
use mvm_proto::Problem;
use mvm_proto::wire::session::v1::{
    Ack, ActOnInstance, AgentFrame, CoordinatorFrame, Document, DocumentDelta, Goodbye, Heartbeat,
    HeartbeatAck, Hello, RemovedOperator, RemovedOperators, Request, Stage, Trust, Welcome, agent_frame,
    coordinator_frame, request,
};
use mvm_transport::ServerSession;
use mvm_transport::frame::encode_once;

use crate::serve::cluster::{
    Cluster, NODE, PATIENCE, Running, get_local, now, problem_of, request as http_request,
};
use crate::serve::coordinator::Coordinator;

fn settings(cluster: &Cluster, coordinator: &Coordinator) -> AgentSettings {
    let mut settings = cluster.settings();
    settings.coordinator = Some(coordinator.target());
    cluster.enrol(&settings);
    settings
}

/// The coordinator's side of one session.
struct Talk {
    session: ServerSession,
    /// Acks that came in one frame with the one that was waited for.
    acks: VecDeque<Ack>,
}

impl Talk {
    /// Waits for an agent, hears its hello and welcomes it.
    async fn begin(coordinator: &mut Coordinator) -> (Self, Hello) {
        let session = tokio::time::timeout(PATIENCE, coordinator.sessions.recv()).await.unwrap().unwrap();
        let mut talk = Self { session, acks: VecDeque::new() };
        let Some(agent_frame::Body::Hello(hello)) = talk.next().await else { panic!("hello comes first") };
        let welcome =
            Welcome { protocol: 1, coordinator: "c1".to_owned(), heartbeat_seconds: 5, ..Welcome::default() };
        talk.send(coordinator_frame::Body::Welcome(welcome)).await;
        (talk, hello)
    }

    /// The agent's next frame; heartbeats are answered and passed over.
    async fn next(&mut self) -> Option<agent_frame::Body> {
        loop {
            let received = tokio::time::timeout(PATIENCE, self.session.frames_in.recv()).await;
            let frame: Option<AgentFrame> = received.unwrap().unwrap();
            match frame?.body {
                Some(agent_frame::Body::Heartbeat(Heartbeat { sequence, .. })) => {
                    self.send(coordinator_frame::Body::HeartbeatAck(HeartbeatAck { sequence })).await;
                }
                body => return body,
            }
        }
    }

    async fn send(&mut self, body: coordinator_frame::Body) {
        self.session.frames_out.send(&CoordinatorFrame { body: Some(body) }).await.unwrap();
    }

    async fn push(&mut self, envelope: &mvm_proto::Envelope) {
        self.send(coordinator_frame::Body::Document(Document {
            envelope: envelope.to_json().into(),
            traceparent: String::new(),
        }))
        .await;
    }

    /// The next ack, which must be of this stage; other frames are passed over.
    async fn ack(&mut self, stage: Stage) -> Ack {
        while self.acks.is_empty() {
            if let agent_frame::Body::Acks(acks) = self.next().await.expect("the session goes on") {
                self.acks.extend(acks.acks);
            }
        }
        let ack = self.acks.pop_front().unwrap();
        assert_eq!(ack.stage(), stage);
        ack
    }

    async fn reply(&mut self, id: &str) -> Vec<u8> {
        loop {
            if let agent_frame::Body::Reply(reply) = self.next().await.expect("the session goes on") {
                assert_eq!(reply.id, id);
                return reply.problem;
            }
        }
    }
}

#[tokio::test]
async fn a_document_is_acknowledged_when_durable_and_again_when_made_true() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let agent = Running::start(settings(&cluster, &coordinator)).await;
    let (mut talk, hello) = Talk::begin(&mut coordinator).await;
    let info = hello.info.unwrap();
    assert_eq!((hello.protocol, hello.high_water, info.node_id.as_str()), (1, None, NODE));
    assert_eq!(info.conditions, [], "no word on a session that is only beginning");
    assert_eq!((hello.trust_root_version, info.dev_cluster, info.driver.as_str()), (1, true, "fake"));

    talk.push(&cluster.document(4, 2)).await;
    let accepted = talk.ack(Stage::Accepted).await.mark.unwrap();
    assert_eq!(accepted.generation, 4);
    assert_eq!(talk.ack(Stage::Converged).await.mark, Some(accepted));
    assert_eq!(get_local(agent.metrics, "/readyz").await.0, 200);
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn a_delta_of_the_document_in_force_is_accepted_and_of_another_one_the_whole_is_asked_for() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let agent = Running::start(settings(&cluster, &coordinator)).await;
    let (mut talk, hello) = Talk::begin(&mut coordinator).await;
    assert!(hello.features.iter().any(|feature| feature == "document-deltas"), "{:?}", hello.features);
    let [first, second, third] =
        [(4, 2), (5, 3), (6, 1)].map(|(generation, running)| cluster.document(generation, running));
    let delta = |old: &mvm_proto::Envelope, new: &mvm_proto::Envelope| {
        let of = |envelope: &mvm_proto::Envelope| envelope.signed().digest;
        DocumentDelta::between((&old.payload, of(old)), (new, of(new))).unwrap()
    };
    talk.push(&first).await;
    talk.ack(Stage::Accepted).await;
    talk.send(coordinator_frame::Body::DocumentDelta(delta(&first, &second))).await;
    let (mut accepted, mut converged) = (Vec::new(), Vec::new());
    while accepted.is_empty() {
        let Some(agent_frame::Body::Acks(acks)) = talk.next().await else { continue };
        for ack in acks.acks {
            let of_stage = if ack.stage() == Stage::Accepted { &mut accepted } else { &mut converged };
            of_stage.push(ack.mark.unwrap().generation);
        }
    }
    assert_eq!(accepted, [5]);
    // Forged: it makes another text than was signed, and says so.
    let mut forged = delta(&second, &third);
    forged.signatures[0].signature[3] ^= 1;
    talk.send(coordinator_frame::Body::DocumentDelta(forged)).await;
    talk.send(coordinator_frame::Body::DocumentDelta(delta(&first, &third))).await;
    let mut refused = 0;
    loop {
        match talk.next().await.unwrap() {
            agent_frame::Body::Acks(acks) => {
                refused += acks.acks.iter().filter(|ack| ack.stage() == Stage::Refused).count();
            }
            agent_frame::Body::DocumentWanted(_) => break,
            _ => {}
        }
    }
    talk.push(&third).await;
    loop {
        let Some(agent_frame::Body::Acks(acks)) = talk.next().await else { continue };
        refused += acks.acks.iter().filter(|ack| ack.stage() == Stage::Refused).count();
        if acks.acks.iter().any(|ack| ack.stage() == Stage::Accepted) {
            break;
        }
    }
    assert_eq!(refused, 1, "the forged one alone");
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn a_refused_document_is_answered_with_the_problem_and_the_high_water_mark() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let agent = Running::start(settings(&cluster, &coordinator)).await;
    let (mut talk, _) = Talk::begin(&mut coordinator).await;
    talk.push(&cluster.document(8, 1)).await;
    talk.ack(Stage::Accepted).await;
    talk.ack(Stage::Converged).await;
    talk.push(&cluster.document(7, 1)).await;
    let refused = talk.ack(Stage::Refused).await;
    assert_eq!(refused.mark.unwrap().generation, 7);
    assert_eq!(refused.high_water.unwrap().generation, 8);
    assert!(serde_json::from_slice::<Problem>(&refused.problem).is_ok());
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn the_agent_comes_back_to_a_coordinator_that_restarted_and_tells_its_high_water_mark() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let address = coordinator.address;
    let agent = Running::start(settings(&cluster, &coordinator)).await;
    let (mut talk, _) = Talk::begin(&mut coordinator).await;
    talk.push(&cluster.document(2, 1)).await;
    talk.ack(Stage::Accepted).await;
    talk.ack(Stage::Converged).await;
    drop(talk);
    coordinator.stop().await;

    let mut again =
        Coordinator::start_with(&cluster, address, Vec::new(), std::time::Duration::from_secs(3600));
    let (mut talk, hello) = Talk::begin(&mut again).await;
    assert_eq!(hello.high_water.map(|mark| mark.generation), Some(2));
    assert_eq!(
        talk.ack(Stage::Converged).await.mark.unwrap().generation,
        2,
        "what may have been missed is told again"
    );
    agent.stop().await.unwrap();
    again.stop().await;
}

#[tokio::test]
async fn requests_are_answered_with_their_id_and_their_problem() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let agent = Running::start(settings(&cluster, &coordinator)).await;
    let (mut talk, _) = Talk::begin(&mut coordinator).await;
    let wake = |instance: &str| {
        let wake = ActOnInstance {
            tenant_id: "acme".to_owned(),
            pool_id: "workers".to_owned(),
            instance_id: instance.to_owned(),
            action: "wake".to_owned(),
            override_seconds: None,
            by: "operator o".to_owned(),
        };
        Request { id: format!("r-{instance}"), ask: Some(request::Ask::Act(wake)) }
    };
    talk.push(&cluster.document(1, 1)).await;
    talk.ack(Stage::Accepted).await;
    talk.ack(Stage::Converged).await;
    let instance = agent.node.instances(None)[0].instance_id.clone();
    talk.send(coordinator_frame::Body::Request(wake(&instance))).await;
    assert_eq!(talk.reply(&format!("r-{instance}")).await, b"", "an instance that runs is awake");
    talk.send(coordinator_frame::Body::Request(wake("../x"))).await;
    let problem: Problem = serde_json::from_slice(&talk.reply("r-../x").await).unwrap();
    assert_eq!(problem.code, "bad_id");
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn an_agent_that_was_told_not_to_come_back_is_not_ready_and_does_not_redial() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let agent = Running::start(settings(&cluster, &coordinator)).await;
    let (mut talk, _) = Talk::begin(&mut coordinator).await;
    let goodbye = Goodbye { reason: "removed".to_owned(), redial: false };
    talk.send(coordinator_frame::Body::Goodbye(goodbye)).await;
    let not_ready = async {
        loop {
            let (status, body) = get_local(agent.metrics, "/readyz").await;
            if status == 503 && body.contains("removed") {
                return;
            }
        }
    };
    tokio::time::timeout(PATIENCE, not_ready).await.unwrap();
    tokio::time::pause();
    let redialled =
        tokio::time::timeout(std::time::Duration::from_secs(3600), coordinator.sessions.recv()).await;
    assert!(redialled.is_err(), "an hour passed without a new session");
    tokio::time::resume();
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn a_status_and_a_document_larger_than_the_window_pass_each_other() {
    const WINDOW: u32 = 128;
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start_narrow(&cluster, WINDOW);
    let mut settings = settings(&cluster, &coordinator);
    settings.limits.stream_window = WINDOW;
    let agent = Running::start(settings).await;
    let (mut talk, _) = Talk::begin(&mut coordinator).await;
    // The first status is due with the welcome, and is not read before the document is out.
    let document = cluster.document(1, 1);
    assert!(document.to_json().len() > WINDOW as usize);
    tokio::time::timeout(PATIENCE, talk.push(&document)).await.expect("the agent reads while it sends");
    let status = agent_frame::Body::Status(agent.node.status().borrow().clone());
    assert!(encode_once(&AgentFrame { body: Some(status) }).len() > WINDOW as usize);
    talk.ack(Stage::Accepted).await;
    talk.ack(Stage::Converged).await;
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn trust_that_could_not_be_stored_is_asked_for_again_by_a_new_hello() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let settings = settings(&cluster, &coordinator);
    let trust_file = settings.certs_dir.join("trust.json");
    let agent = Running::start(settings).await;
    let trust = Trust { roots: vec![cluster.second_root().to_json()], images: Vec::new() };
    let (mut talk, _) = Talk::begin(&mut coordinator).await;
    // No file can take the place of a directory.
    std::fs::remove_file(&trust_file).unwrap();
    std::fs::create_dir(&trust_file).unwrap();
    talk.send(coordinator_frame::Body::Trust(trust.clone())).await;

    let (mut talk, hello) = Talk::begin(&mut coordinator).await;
    assert_eq!(hello.trust_root_version, 1);
    std::fs::remove_dir(&trust_file).unwrap();
    talk.send(coordinator_frame::Body::Trust(trust)).await;
    talk.push(&cluster.document(1, 1)).await;
    talk.ack(Stage::Accepted).await;
    assert_eq!(mvm_pki::TrustStore::load(&trust_file).unwrap().root_version(), 2);
    agent.stop().await.unwrap();
    coordinator.stop().await;
}

#[tokio::test]
async fn a_removed_operator_is_refused_while_connected_and_after_a_restart_without_the_coordinator() {
    let cluster = Arc::new(Cluster::new());
    let mut coordinator = Coordinator::start(&cluster);
    let settings = settings(&cluster, &coordinator);
    let agent = Running::start(settings.clone()).await;
    let (mut talk, hello) = Talk::begin(&mut coordinator).await;
    assert_eq!(hello.removed_operators, 0);
    let info = |agent: &Running| http_request(Method::GET, agent.api(), "/v1/node/info", "");
    let (alice, bob) = (Some((Role::Operator, "alice")), Some((Role::Operator, "bob")));
    let client = cluster.client(agent.api(), alice).await.unwrap();
    assert_eq!(client.request(info(&agent)).await.unwrap().status(), 200);
    let watch = http_request(Method::GET, agent.api(), "/v1/node/watch", "");
    let watch = client.request(watch).await.unwrap();
    assert_eq!(watch.status(), 200);

    let entry = RemovedOperator {
        name: "alice".to_owned(),
        until: (now() + Duration::from_secs(3600)).to_string(),
        except: Vec::new(),
    };
    let told = RemovedOperators { operators: vec![entry] };
    talk.send(coordinator_frame::Body::RemovedOperators(told)).await;
    let ended = watch.into_body().bytes(1 << 20);
    tokio::time::timeout(PATIENCE, ended).await.expect("what streams to the operator ends").unwrap();
    assert_eq!(problem_of(client.request(info(&agent)).await.unwrap()).await.code, "operator_removed");
    let other = cluster.client(agent.api(), bob).await.unwrap();
    assert_eq!(other.request(info(&agent)).await.unwrap().status(), 200);
    agent.stop().await.unwrap();
    coordinator.stop().await;

    let agent = Running::start(settings).await;
    let client = cluster.client(agent.api(), alice).await.unwrap();
    assert_eq!(problem_of(client.request(info(&agent)).await.unwrap()).await.code, "operator_removed");
    let other = cluster.client(agent.api(), bob).await.unwrap();
    assert_eq!(other.request(info(&agent)).await.unwrap().status(), 200);
    agent.stop().await.unwrap();
}
