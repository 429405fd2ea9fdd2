//! A running coordinator on ports of the system's choice, with an operator and scripted nodes.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::{Request, StatusCode};
use mvm_client::{ControlClient, connect};
use mvm_coordinator::{
    Addresses, CoordinatorError, CoordinatorSettings, InitReport, InitSettings, init, serve,
};
use mvm_pki::{
    Anchors, Credential, CsrNames, ExpectedPeer, JoinToken, LeafKey, LiveAnchors, LiveCredential, Role,
    TrustBundle, TrustStore,
};
use mvm_proto::status::{Mark, NodeInfo};
use mvm_proto::wire::SESSION_FEATURES;
use mvm_proto::wire::control::v1::{CreateTokenRequest, PushProgress, PushRequest};
use mvm_proto::wire::document_delta::DeltaError;
use mvm_proto::wire::session::v1::{
    Ack, Acks, AgentFrame, AgentStart, CoordinatorFrame, DocumentWanted, Hello, Stage, Trust, Welcome,
    agent_frame, coordinator_frame,
};
use mvm_proto::{ClusterId, Problem, SignedDocument, Timestamp, Unverified, Verified};
use mvm_transport::{ALPN_H3, ALPN_SESSION, Client, ClientSession, Limits, Target, dial_session};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// Long enough for a loaded machine; no test passes by waiting this long.
pub(crate) const PATIENCE: Duration = Duration::from_secs(30);

/// So long that no session is given up for its silence; tests about silence have their own.
pub(crate) const HEARTBEAT: Duration = Duration::from_secs(30);

pub(crate) fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}

pub(crate) fn cluster_id() -> ClusterId {
    "test".parse().unwrap()
}

/// Waits for a future that must come; says what for if it does not.
pub(crate) async fn soon<T>(what: &str, future: impl Future<Output = T>) -> T {
    tokio::time::timeout(PATIENCE, future).await.unwrap_or_else(|_| panic!("gave up waiting for {what}"))
}

/// Asks again and again until the answer is the wanted one.
pub(crate) async fn wait_until<F: Future<Output = bool>>(what: &str, mut condition: impl FnMut() -> F) {
    let mut look = tokio::time::interval(Duration::from_millis(20));
    let poll = async {
        while !condition().await {
            look.tick().await;
        }
    };
    soon(what, poll).await;
}

/// Files of a new dev cluster.
pub(crate) fn new_cluster() -> (TempDir, InitReport) {
    new_cluster_with(|settings| settings.dev = true)
}

pub(crate) fn new_cluster_with(change: impl FnOnce(&mut InitSettings)) -> (TempDir, InitReport) {
    let dir = tempfile::tempdir().unwrap();
    let mut settings = InitSettings::new(dir.path().join("data"), cluster_id());
    change(&mut settings);
    let report = init(&settings, now()).unwrap();
    (dir, report)
}

/// A running coordinator.
pub(crate) struct Running {
    pub(crate) addresses: Addresses,
    pub(crate) data_dir: PathBuf,
    pub(crate) shutdown: CancellationToken,
    pub(crate) task: JoinHandle<Result<(), CoordinatorError>>,
}

impl Running {
    pub(crate) async fn start(data_dir: &Path) -> Self {
        Self::start_with(data_dir, |_| {}).await
    }

    pub(crate) async fn start_with(data_dir: &Path, change: impl FnOnce(&mut CoordinatorSettings)) -> Self {
        let mut settings = CoordinatorSettings::new(data_dir);
        settings.listen = "127.0.0.1:0".parse().unwrap();
        settings.metrics_listen = Some("127.0.0.1:0".parse().unwrap());
        settings.heartbeat = HEARTBEAT;
        change(&mut settings);
        let (tell, ready) = tokio::sync::oneshot::channel();
        let tell = Mutex::new(Some(tell));
        settings.on_ready = Some(Arc::new(move |addresses: &Addresses| {
            let _ = tell.lock().take().unwrap().send(*addresses);
        }));
        let shutdown = CancellationToken::new();
        let task = tokio::spawn(serve(settings, shutdown.clone()));
        let addresses = match soon("the coordinator", ready).await {
            Ok(addresses) => addresses,
            Err(_) => panic!("the coordinator did not start: {:?}", task.await),
        };
        Self { addresses, data_dir: data_dir.to_owned(), shutdown, task }
    }

    pub(crate) async fn stop(self) {
        self.shutdown.cancel();
        soon("the coordinator's end", self.task).await.unwrap().unwrap();
    }

    /// The sum of a metric's samples whose line begins like this.
    pub(crate) async fn metric(&self, begins: &str) -> u64 {
        let mut tcp = tokio::net::TcpStream::connect(self.addresses.metrics.unwrap()).await.unwrap();
        tcp.write_all(b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut text = String::new();
        tcp.read_to_string(&mut text).await.unwrap();
        let lines = text.lines().filter(|line| line.starts_with(begins));
        lines.map(|line| line.rsplit_once(' ').unwrap().1.parse::<u64>().unwrap()).sum()
    }

    pub(crate) fn target(&self) -> Target {
        format!("127.0.0.1:{}", self.addresses.grpc.port()).parse().unwrap()
    }

    pub(crate) fn anchors(&self) -> LiveAnchors {
        LiveAnchors::new(Anchors::load(&self.data_dir.join("pki/root/ca.crt")).unwrap())
    }

    /// The first operator, connected.
    pub(crate) async fn operator(&self) -> ControlClient {
        let credential = Credential::load(&self.data_dir.join("operator/operator.pem")).unwrap();
        let live = LiveCredential::new(credential);
        connect(&self.target(), &live, &self.anchors(), &cluster_id(), PATIENCE).await.unwrap()
    }

    pub(crate) async fn token(&self, node: &str) -> String {
        self.token_for(node, &[]).await
    }

    /// A token that allows these names.
    pub(crate) async fn token_for(&self, node: &str, names: &[&str]) -> String {
        let names = names.iter().map(|name| (*name).to_owned()).collect();
        let request = CreateTokenRequest { node_id: node.to_owned(), ttl_seconds: 0, names };
        self.operator().await.create_token(request).await.unwrap().into_inner().token
    }

    /// An HTTP/3 connection, with a certificate or without.
    pub(crate) async fn http(&self, credential: Option<&LiveCredential>) -> Client {
        let tls =
            mvm_pki::tls::client_config(credential, &self.anchors(), coordinator(), &[ALPN_H3]).unwrap();
        Client::connect(self.addresses.quic, "127.0.0.1", tls, &Limits::default()).await.unwrap()
    }

    /// A node enrolled with a fresh token.
    pub(crate) async fn enrol(&self, node: &str) -> Node {
        let token = self.token(node).await;
        let (key, csr) = new_request();
        let answer =
            post(&self.http(None).await, "/v1/enrol", &enrol_body(&token, &csr, node)).await.unwrap();
        let credential = Credential::with_chain_pem(key, answer["chain_pem"].as_str().unwrap()).unwrap();
        let bundle: TrustBundle = serde_json::from_value(answer["trust"].clone()).unwrap();
        let digest = JoinToken::parse(&token).unwrap().trust_root();
        Node {
            id: node.to_owned(),
            credential: LiveCredential::new(credential),
            anchors: self.anchors(),
            trust: TrustStore::pin_digest(&bundle, digest, now()).unwrap().0,
            address: self.addresses.quic,
            start: Some(AgentStart { id: node.to_owned(), data_dir: node.to_owned(), number: 1 }),
        }
    }

    /// Pushes and collects every stage until the stream ends.
    pub(crate) async fn push(&self, document: &Value, wait_seconds: u32) -> Vec<PushProgress> {
        let request = push_request(document, wait_seconds);
        let mut stream = self.operator().await.push(request).await.unwrap().into_inner();
        let mut stages = Vec::new();
        while let Some(stage) = soon("a stage", stream.message()).await.unwrap() {
            stages.push(stage);
        }
        stages
    }
}

pub(crate) fn push_request(document: &Value, wait_seconds: u32) -> PushRequest {
    PushRequest { document: document.to_string().into_bytes(), wait_seconds, ..PushRequest::default() }
}

pub(crate) fn stages(progress: &[PushProgress]) -> Vec<&str> {
    progress.iter().map(|stage| stage.stage.as_str()).collect()
}

pub(crate) fn coordinator() -> ExpectedPeer {
    ExpectedPeer { cluster: cluster_id(), role: Role::Coordinator, name: None, check_host: true }
}

pub(crate) fn new_request() -> (LeafKey, Vec<u8>) {
    let key = LeafKey::generate().unwrap();
    let csr = key.csr_der(&CsrNames::default()).unwrap();
    (key, csr)
}

pub(crate) fn enrol_body(token: &str, csr: &[u8], node: &str) -> Value {
    json!({ "token": token, "csr": STANDARD.encode(csr), "node_id": node })
}

/// Posts JSON; the answer as JSON, or the problem.
pub(crate) async fn post(client: &Client, path: &str, body: &Value) -> Result<Value, Problem> {
    let request = Request::post(format!("https://127.0.0.1{path}"))
        .header("content-type", "application/json")
        .body(Bytes::from(body.to_string()))
        .unwrap();
    let (status, media, bytes) = fetch(client, request).await;
    match status {
        StatusCode::OK => Ok(serde_json::from_slice(&bytes).unwrap()),
        _ => {
            assert_eq!(media, "application/problem+json", "{}", String::from_utf8_lossy(&bytes));
            Err(serde_json::from_slice(&bytes).unwrap())
        }
    }
}

/// Status, media type and body of an answer.
pub(crate) async fn fetch(client: &Client, request: Request<Bytes>) -> (StatusCode, String, Bytes) {
    let response = soon("an answer", client.request(request)).await.unwrap();
    let status = response.status();
    let media =
        response.headers().get("content-type").map(|v| v.to_str().unwrap().to_owned()).unwrap_or_default();
    let body = response.into_body();
    let bytes = soon("a body", body.bytes(1 << 20)).await.unwrap();
    (status, media, bytes)
}

/// A node that does what the test says.
pub(crate) struct Node {
    pub(crate) id: String,
    pub(crate) credential: LiveCredential,
    pub(crate) anchors: LiveAnchors,
    pub(crate) trust: TrustStore,
    pub(crate) address: SocketAddr,
    /// What it says of itself in its hello.
    pub(crate) start: Option<AgentStart>,
}

impl Node {
    pub(crate) fn hello(&self, high_water: Option<Mark>) -> Hello {
        Hello {
            protocol: 1,
            info: Some(NodeInfo { node_id: self.id.clone(), ..NodeInfo::default() }),
            high_water,
            trust_root_version: self.trust.root_version(),
            images_version: self.trust.images_version(),
            features: SESSION_FEATURES.iter().map(|feature| (*feature).to_owned()).collect(),
            start: self.start.clone(),
            ..Hello::default()
        }
    }

    pub(crate) async fn dial(&self) -> Result<Session, mvm_transport::ConnectError> {
        self.dial_within(&Limits::default()).await
    }

    pub(crate) async fn dial_within(&self, limits: &Limits) -> Result<Session, mvm_transport::ConnectError> {
        let tls = mvm_pki::tls::client_config(
            Some(&self.credential),
            &self.anchors,
            coordinator(),
            &[ALPN_SESSION],
        )
        .unwrap();
        let session = dial_session(self.address, "127.0.0.1", tls, limits).await?;
        Ok(Session { session, trust: self.trust.clone(), held: None })
    }

    /// A session that was welcomed.
    pub(crate) async fn connect(&self, high_water: Option<Mark>) -> Session {
        let mut session = self.dial().await.unwrap();
        session.send(agent_frame::Body::Hello(self.hello(high_water))).await;
        session.welcome().await;
        session
    }
}

pub(crate) struct Session {
    pub(crate) session: ClientSession,
    trust: TrustStore,
    /// The payload of the newest document, which deltas are of.
    pub(crate) held: Option<Vec<u8>>,
}

impl Session {
    pub(crate) async fn send(&mut self, body: agent_frame::Body) {
        self.session.frames_out.send(&AgentFrame { body: Some(body) }).await.unwrap();
    }

    /// The next frame; `None` when the session is over.
    pub(crate) async fn next(&mut self) -> Option<coordinator_frame::Body> {
        match soon("a frame", self.session.frames_in.recv()).await {
            Ok(Some(CoordinatorFrame { body })) => Some(body.unwrap()),
            Ok(None) | Err(_) => None,
        }
    }

    pub(crate) async fn welcome(&mut self) -> Welcome {
        match self.next().await {
            Some(coordinator_frame::Body::Welcome(welcome)) => welcome,
            other => panic!("expected a welcome, found {other:?}"),
        }
    }

    /// The next document, verified as an agent verifies it.
    pub(crate) async fn document(&mut self) -> Verified<SignedDocument> {
        loop {
            let body = self.next().await;
            let is_delta = matches!(body, Some(coordinator_frame::Body::DocumentDelta(_)));
            match self.document_in(body.as_ref()).await {
                Some(document) => return document,
                None if is_delta => {}
                None => panic!("expected a document, found {body:?}"),
            }
        }
    }

    /// The document that a frame brings, verified. One that is a delta of a document that is not here is asked for whole.
    pub(crate) async fn document_in(
        &mut self,
        body: Option<&coordinator_frame::Body>,
    ) -> Option<Verified<SignedDocument>> {
        let envelope = match body {
            Some(coordinator_frame::Body::Document(document)) => {
                Unverified::from_json(&document.envelope).unwrap()
            }
            Some(coordinator_frame::Body::DocumentDelta(delta)) => {
                match delta.clone().envelope(self.held.as_deref().unwrap_or_default()) {
                    Ok(envelope) => Unverified::new(envelope),
                    Err(error) => {
                        assert_eq!(error, DeltaError::OtherBase);
                        self.send(agent_frame::Body::DocumentWanted(DocumentWanted {})).await;
                        return None;
                    }
                }
            }
            _ => return None,
        };
        let document = self.trust.verify_document(envelope, now()).unwrap();
        self.held = Some(document.envelope().payload.clone());
        Some(document)
    }

    pub(crate) async fn trust(&mut self) -> Trust {
        match self.next().await {
            Some(coordinator_frame::Body::Trust(trust)) => trust,
            other => panic!("expected trust, found {other:?}"),
        }
    }

    pub(crate) async fn ack(&mut self, mark: Mark, stage: Stage) {
        let ack = Ack { mark: Some(mark), stage: stage.into(), ..Ack::default() };
        self.send(agent_frame::Body::Acks(Acks { acks: vec![ack] })).await;
    }

    /// Accepts and makes true whatever comes next.
    pub(crate) async fn obey(&mut self) -> Mark {
        let mark = mark_of(&self.document().await);
        self.ack(mark.clone(), Stage::Accepted).await;
        self.ack(mark.clone(), Stage::Converged).await;
        mark
    }

    /// Reads until the session ends; the goodbye, if one came.
    pub(crate) async fn end(&mut self) -> Option<mvm_proto::wire::session::v1::Goodbye> {
        let mut last = None;
        while let Some(body) = self.next().await {
            if let coordinator_frame::Body::Goodbye(goodbye) = body {
                last = Some(goodbye);
            }
        }
        last
    }

    /// Nothing but what was asked for comes: a heartbeat is answered next.
    pub(crate) async fn expect_quiet(&mut self) {
        let heartbeat = mvm_proto::wire::session::v1::Heartbeat { sequence: 77, info: None };
        self.send(agent_frame::Body::Heartbeat(heartbeat)).await;
        match self.next().await {
            Some(coordinator_frame::Body::HeartbeatAck(ack)) => assert_eq!(ack.sequence, 77),
            other => panic!("expected the answer to a heartbeat, found {other:?}"),
        }
    }
}

pub(crate) fn mark_of(document: &Verified<SignedDocument>) -> Mark {
    let provenance = &document.get().provenance;
    Mark::new(provenance.epoch, provenance.generation, document.digest())
}

/// A valid document with one pool that wants this many running.
pub(crate) fn document(node: &str, running: u32) -> Value {
    json!({
        "schema_version": 1,
        "node_id": node,
        "tenants": [{
            "tenant_id": "acme",
            "network": { "tenant_net_id": 1, "ipv4_subnet": "10.240.1.0/24" },
            "quotas": {
                "max_vcpus": 16, "max_mem_mib": 8192, "max_running": 8, "max_warm": 8, "max_pools": 4,
                "max_instances_per_pool": 16, "max_disk_gib": 10
            },
            "pools": [{
                "pool_id": "web",
                "flake_ref": "github:org/hello",
                "profile": "minimal",
                "instance_resources": { "vcpus": 1, "mem_mib": 128, "data_disk_mib": 0 },
                "desired_counts": { "running": running, "warm": 0, "sleeping": 0 }
            }]
        }]
    })
}
