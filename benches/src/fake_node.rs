//! Nodes that are only their session: enrolled for real, with a certificate of their own, and no agent behind.

use std::net::{Ipv4Addr, SocketAddr};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::stream::{StreamExt as _, TryStreamExt as _};
use mvm_client::ControlClient;
use mvm_pki::{Anchors, Credential, CsrNames, ExpectedPeer, LeafKey, LiveAnchors, LiveCredential, Role};
use mvm_proto::status::DesiredSource;
use mvm_proto::wire::control::v1::CreateTokenRequest;
use mvm_proto::wire::node::v1::{Capacity, Mark, NodeInfo};
use mvm_proto::wire::session::v1::{
    Ack, Acks, AgentFrame, DocumentWanted, Heartbeat, Hello, Reply, Stage, agent_frame, coordinator_frame,
};
use mvm_proto::wire::{FEATURE_BATCH_SIGNATURES, FEATURE_DOCUMENT_DELTAS, SESSION_PROTOCOL};
use mvm_proto::{ClusterId, Digest, Envelope, NodeId};
use mvm_tests::Cluster;
use mvm_transport::{ALPN_H3, ALPN_SESSION, Client, ClientSession, Limits, SessionDialer};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::mpsc::UnboundedSender;

use crate::bare::LOOPBACK;
use crate::operator;

/// Enrolments that a coordinator takes at once from one address before it slows that address down. The bench asks no
/// more of one coordinator process and starts the next.
const ENROLMENTS_PER_START: usize = 50;
const ENROL_WIDTH: usize = 8;
/// The answer to an enrolment holds a chain, the roots and the trust in JSON: a few KiB.
const MAX_ANSWER_BYTES: usize = 1 << 20;
const SERVER_NAME: &str = "127.0.0.1";
/// Until the coordinator says otherwise.
const HEARTBEAT: Duration = Duration::from_secs(10);

/// One enrolled node.
#[derive(Debug)]
pub struct FakeNode {
    pub id: NodeId,
    credential: LiveCredential,
}

/// A document that came to a node, which says that it accepted it.
#[derive(Debug, Clone)]
pub struct Heard {
    pub at: Instant,
    pub node: NodeId,
    pub mark: Option<Mark>,
}

/// Dials sessions of many nodes from one socket.
#[derive(Debug)]
pub struct Dialler {
    address: SocketAddr,
    anchors: LiveAnchors,
    cluster: ClusterId,
    socket: SessionDialer,
}

/// Enrols `count` nodes, each with a token of its own. Leaves some coordinator of the cluster running.
pub fn enrol_all(cluster: &mut Cluster, count: usize) -> Result<Vec<FakeNode>> {
    let ids =
        (0..count).map(|index| Ok(format!("fake-{index}").parse()?)).collect::<Result<Vec<NodeId>>>()?;
    let mut nodes = Vec::with_capacity(count);
    for some in ids.chunks(ENROLMENTS_PER_START) {
        if !nodes.is_empty() {
            cluster.kill_coordinator();
            cluster.start_coordinator();
        }
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
        nodes.extend(runtime.block_on(enrol(cluster, some))?);
    }
    Ok(nodes)
}

async fn enrol(cluster: &Cluster, ids: &[NodeId]) -> Result<Vec<FakeNode>> {
    let client = operator::connect(cluster).await?;
    let (anchors, name) = anchors(cluster)?;
    let tls = mvm_pki::tls::client_config(None, &anchors, coordinator_of(&name), &[ALPN_H3])?;
    let http = Client::connect(address(cluster), SERVER_NAME, tls, &Limits::default()).await?;
    let all = ids.iter().map(|id| enrol_one(client.clone(), &http, id));
    let nodes = futures::stream::iter(all).buffer_unordered(ENROL_WIDTH).try_collect().await;
    http.close().await;
    nodes
}

async fn enrol_one(mut client: ControlClient, http: &Client, id: &NodeId) -> Result<FakeNode> {
    let request =
        CreateTokenRequest { node_id: id.to_string(), ttl_seconds: 600, ..CreateTokenRequest::default() };
    let token = client.create_token(request).await?.into_inner().token;
    let key = LeafKey::generate()?;
    let csr = STANDARD.encode(key.csr_der(&CsrNames::default())?);
    let body = serde_json::to_vec(&json!({ "token": token, "csr": csr, "node_id": id.as_str() }))?;
    let request = http::Request::post(format!("https://{SERVER_NAME}/v1/enrol"))
        .header(http::header::CONTENT_TYPE, "application/json")
        .body(Bytes::from(body))?;
    let response = http.request(request).await?;
    let status = response.status();
    let answer = response.into_body().bytes(MAX_ANSWER_BYTES).await?;
    ensure!(status.is_success(), "{id} could not enrol: {status} {}", String::from_utf8_lossy(&answer));
    let answer: Enrolled = serde_json::from_slice(&answer)?;
    let credential = Credential::with_chain_pem(key, &answer.chain_pem)?;
    Ok(FakeNode { id: id.clone(), credential: LiveCredential::new(credential) })
}

#[derive(Deserialize)]
struct Enrolled {
    chain_pem: String,
}

impl FakeNode {
    /// Must be called inside a tokio runtime.
    pub fn dialler(cluster: &Cluster) -> Result<Dialler> {
        let (anchors, name) = anchors(cluster)?;
        let address = address(cluster);
        Ok(Dialler { address, anchors, cluster: name, socket: SessionDialer::bind(LOOPBACK)? })
    }
}

impl Dialler {
    /// Opens `node`'s session, is welcomed, and leaves a task that plays the node. `heard` is told when a document comes.
    pub async fn join(&self, node: &FakeNode, heard: Option<UnboundedSender<Heard>>) -> Result<()> {
        let expected = coordinator_of(&self.cluster);
        let tls =
            mvm_pki::tls::client_config(Some(&node.credential), &self.anchors, expected, &[ALPN_SESSION])?;
        let mut session = self.socket.dial(self.address, SERVER_NAME, tls, &Limits::default()).await?;
        session.frames_out.send(&frame(agent_frame::Body::Hello(hello(node, &self.cluster)))).await?;
        let first = session.frames_in.recv().await?.and_then(|frame| frame.body);
        let Some(coordinator_frame::Body::Welcome(welcome)) = first else {
            anyhow::bail!("{} was not welcomed: {first:?}", node.id);
        };
        let heartbeat = match welcome.heartbeat_seconds {
            0 => HEARTBEAT,
            seconds => Duration::from_secs(seconds.into()),
        };
        tokio::spawn(play(session, node.id.clone(), heartbeat, heard));
        Ok(())
    }
}

/// Until the session ends, by whoever.
async fn play(
    mut session: ClientSession,
    node: NodeId,
    heartbeat: Duration,
    heard: Option<UnboundedSender<Heard>>,
) {
    // Spread out, as the beats of a real fleet are.
    let first = tokio::time::Instant::now() + heartbeat.mul_f64(fastrand::f64());
    let mut beats = tokio::time::interval_at(first, heartbeat);
    let mut sequence = 0;
    let mut held = None;
    loop {
        let answer = tokio::select! {
            _ = beats.tick() => {
                sequence += 1;
                Some(agent_frame::Body::Heartbeat(Heartbeat { sequence, info: None }))
            }
            received = session.frames_in.recv() => match received {
                Ok(Some(frame)) => {
                    let answer = frame.body.and_then(|body| answer(body, &mut held));
                    if let (Some(heard), Some(agent_frame::Body::Acks(acks))) = (&heard, &answer) {
                        let mark = acks.acks.first().and_then(|ack| ack.mark.clone());
                        // The bench may have heard enough.
                        let _ = heard.send(Heard { at: Instant::now(), node: node.clone(), mark });
                    }
                    answer
                }
                Ok(None) | Err(_) => return,
            },
        };
        if let Some(body) = answer
            && session.frames_out.send(&frame(body)).await.is_err()
        {
            return;
        }
    }
}

/// `held` is the payload of the newest document.
fn answer(body: coordinator_frame::Body, held: &mut Option<Vec<u8>>) -> Option<agent_frame::Body> {
    let envelope = match body {
        coordinator_frame::Body::Document(document) => Envelope::from_json(&document.envelope).ok(),
        coordinator_frame::Body::DocumentDelta(delta) => {
            delta.envelope(&held.take().unwrap_or_default()).ok()
        }
        coordinator_frame::Body::Request(request) => {
            let reply = Reply { id: request.id, problem: Vec::new(), answer: None };
            return Some(agent_frame::Body::Reply(reply));
        }
        _ => return None,
    };
    let Some(envelope) = envelope else {
        return Some(agent_frame::Body::DocumentWanted(DocumentWanted {}));
    };
    let mark = mark(&envelope.payload).ok();
    *held = Some(envelope.payload);
    let ack = Ack { mark, stage: Stage::Accepted.into(), ..Ack::default() };
    Some(agent_frame::Body::Acks(Acks { acks: vec![ack] }))
}

/// What the document says it is.
fn mark(payload: &[u8]) -> Result<Mark> {
    #[derive(Deserialize)]
    struct Numbers {
        epoch: u64,
        generation: u64,
    }
    let Numbers { epoch, generation } = serde_json::from_slice(payload)?;
    Ok(Mark { epoch, generation, digest: Digest::of(payload).to_string() })
}

fn hello(node: &FakeNode, cluster: &ClusterId) -> Hello {
    let capacity = Capacity { vcpus: 64, mem_mib: 1 << 18, disk_mib: 1 << 20, max_instances: 1000 };
    let info = NodeInfo {
        node_id: node.id.to_string(),
        cluster: cluster.to_string(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        capacity: Some(capacity),
        driver: "fake".to_owned(),
        source: DesiredSource::Session.to_string(),
        schema_versions: vec![mvm_proto::document::SCHEMA_VERSION],
        trust_root_version: 1,
        ..NodeInfo::default()
    };
    let features = vec![FEATURE_DOCUMENT_DELTAS.to_owned(), FEATURE_BATCH_SIGNATURES.to_owned()];
    Hello {
        protocol: SESSION_PROTOCOL,
        info: Some(info),
        trust_root_version: 1,
        features,
        ..Hello::default()
    }
}

fn frame(body: agent_frame::Body) -> AgentFrame {
    AgentFrame { body: Some(body) }
}

fn anchors(cluster: &Cluster) -> Result<(LiveAnchors, ClusterId)> {
    let anchors = Anchors::load(&cluster.coordinator_dir().join("operator").join("ca.crt"))
        .context("the operator's folder holds the roots")?;
    let name = anchors.cluster().clone();
    Ok((LiveAnchors::new(anchors), name))
}

fn coordinator_of(cluster: &ClusterId) -> ExpectedPeer {
    ExpectedPeer { cluster: cluster.clone(), role: Role::Coordinator, name: None, check_host: true }
}

fn address(cluster: &Cluster) -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, cluster.port))
}
