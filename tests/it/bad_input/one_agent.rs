//! One enrolled agent without a session, the keys of its cluster, and a client that shows the coordinator's certificate.

use std::net::SocketAddr;
use std::time::SystemTime;

use bytes::Bytes;
use http::{Request, header};
use mvm_coordinator::DataDir;
use mvm_pki::tls::client_config;
use mvm_pki::{
    Anchors, Credential, ExpectedPeer, LiveAnchors, LiveCredential, Role, SigningKey, TrustStore, seal,
};
use mvm_proto::document::{DOCUMENT_PAYLOAD_TYPE, Provenance};
use mvm_proto::{DesiredState, SignedDocument, Timestamp};
use mvm_tests::{Cluster, PATIENCE, wait_for};
use mvm_transport::{ALPN_H3, Client, ConnectError, Limits};
use serde_json::Value;
use tokio::runtime::Runtime;

pub(crate) const NODE: &str = "node-a";
/// Above the first, so that there is an older epoch to be refused.
pub(crate) const EPOCH: u64 = 2;
/// For tests that ask more often than a peer should.
pub(crate) const UNHURRIED: &[&str] =
    &["--no-session", "--rate-per-second", "1000000", "--rate-burst", "1000000"];

const HOUR: std::time::Duration = std::time::Duration::from_secs(3600);
const MAX_ANSWER_BYTES: usize = 1 << 20;

pub(crate) struct OneAgent {
    pub(crate) cluster: Cluster,
    pub(crate) runtime: Runtime,
    pub(crate) anchors: LiveAnchors,
    pub(crate) director: SigningKey,
    pub(crate) trust: TrustStore,
    /// The last one that was accepted.
    pub(crate) generation: u64,
    client: Option<Client>,
}

/// What a refused request must leave as it was.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct State {
    pub(crate) accepted: Value,
    pub(crate) converged: Value,
    pub(crate) instances: Value,
    pub(crate) trust_root_version: Value,
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) media_type: String,
    pub(crate) retry_after: Option<u64>,
    pub(crate) body: Value,
}

impl Answer {
    /// Status and code of a refusal that says all that a refusal must say.
    pub(crate) fn refusal(&self) -> (u16, &str) {
        assert_eq!(self.media_type, "application/problem+json", "{self:?}");
        assert_eq!(self.body["status"], self.status, "{self:?}");
        for member in ["type", "title", "code", "detail", "remediation"] {
            let text = self.body[member].as_str();
            assert!(text.is_some_and(|text| !text.is_empty()), "{member} in {self:?}");
        }
        (self.status, self.body["code"].as_str().unwrap())
    }

    /// The paths of the mistakes that the refusal lists.
    pub(crate) fn paths(&self) -> Vec<&str> {
        let errors = self.body["errors"].as_array().into_iter().flatten();
        errors.filter_map(|error| error["path"].as_str()).collect()
    }
}

pub(crate) fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}

/// Sends a request and reads the whole answer.
pub(crate) async fn exchange(client: &Client, request: Request<Bytes>) -> Answer {
    let what = format!("{} {}", request.method(), request.uri());
    let answer = client.request(request).await.unwrap_or_else(|error| panic!("{what}: {error}"));
    let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
    let media_type = header(header::CONTENT_TYPE).unwrap_or_default().to_owned();
    let retry_after = header(header::RETRY_AFTER).and_then(|text| text.parse().ok());
    let status = answer.status().as_u16();
    let body = answer.into_body().bytes(MAX_ANSWER_BYTES).await.unwrap();
    Answer { status, media_type, retry_after, body: serde_json::from_slice(&body).unwrap_or_default() }
}

impl OneAgent {
    /// Enrols `node-a`, starts its agent with `flags`, and makes a first document true.
    pub(crate) fn start(flags: &[&str]) -> Self {
        let mut agent = Self::enrolled();
        agent.cluster.start_agent(NODE, flags);
        agent.push_good();
        agent
    }

    /// `node-a` with its certificates; no process runs.
    pub(crate) fn enrolled() -> Self {
        let mut cluster = Cluster::start();
        cluster.enrol(NODE);
        // Nothing here needs it any more; it would only take time from the agent.
        cluster.kill_coordinator();
        let dir = DataDir::new(cluster.coordinator_dir());
        let runtime =
            tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_all().build().unwrap();
        Self {
            anchors: LiveAnchors::new(Anchors::load(&dir.root_ca_cert()).unwrap()),
            director: SigningKey::from_file(&dir.director_key()).unwrap(),
            trust: TrustStore::load(&dir.trust_file()).unwrap(),
            generation: 0,
            client: None,
            cluster,
            runtime,
        }
    }

    pub(crate) fn data_dir(&self) -> DataDir {
        DataDir::new(self.cluster.coordinator_dir())
    }

    pub(crate) fn address(&self) -> SocketAddr {
        SocketAddr::from(([127, 0, 0, 1], self.cluster.agents[NODE].port))
    }

    pub(crate) fn expected(&self) -> ExpectedPeer {
        let cluster = self.trust.cluster().clone();
        ExpectedPeer { cluster, role: Role::Node, name: Some(NODE.to_owned()), check_host: true }
    }

    pub(crate) fn coordinator(&self) -> LiveCredential {
        LiveCredential::new(Credential::load(&self.data_dir().leaf()).unwrap())
    }

    pub(crate) fn operator(&self) -> LiveCredential {
        let path = self.data_dir().operator_dir().join("operator.pem");
        LiveCredential::new(Credential::load(&path).unwrap())
    }

    pub(crate) fn node(&self) -> LiveCredential {
        let path = self.cluster.agent_dir(NODE).join("certs/node.pem");
        LiveCredential::new(Credential::load(&path).unwrap())
    }

    pub(crate) fn connect(&self, credential: Option<&LiveCredential>) -> Result<Client, ConnectError> {
        let tls = client_config(credential, &self.anchors, self.expected(), &[ALPN_H3]).unwrap();
        let limits = Limits::default();
        self.runtime.block_on(Client::connect(self.address(), "127.0.0.1", tls, &limits))
    }

    /// Forgets the connection to an agent that was stopped.
    pub(crate) fn forget_connection(&mut self) {
        self.client = None;
    }

    /// The coordinator's connection, made when it is first needed.
    fn client(&mut self) -> &Client {
        if self.client.as_ref().is_none_or(Client::is_closed) {
            let what = format!("the agent to answer\n{}", self.cluster.logs());
            let credential = self.coordinator();
            self.client = Some(wait_for(&what, PATIENCE, || self.connect(Some(&credential)).ok()));
        }
        self.client.as_ref().unwrap()
    }

    /// Sends a request as the coordinator.
    pub(crate) fn call(&mut self, method: &str, path: &str, body: impl Into<Bytes>) -> Answer {
        self.client();
        self.call_as(self.client.as_ref().unwrap(), method, path, body)
    }

    pub(crate) fn call_as(
        &self,
        client: &Client,
        method: &str,
        path: &str,
        body: impl Into<Bytes>,
    ) -> Answer {
        let request = Request::builder().method(method).uri(path);
        self.send(client, request.header(header::CONTENT_TYPE, "application/json").body(body.into()).unwrap())
    }

    pub(crate) fn send(&self, client: &Client, request: Request<Bytes>) -> Answer {
        self.runtime.block_on(Box::pin(exchange(client, request)))
    }

    pub(crate) fn push(&mut self, envelope: impl Into<Bytes>) -> Answer {
        self.call("POST", "/v1/reconcile", envelope)
    }

    /// The next document for the agent; nothing is wrong with it.
    pub(crate) fn next(&self) -> SignedDocument {
        let example = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/minimal.json");
        let desired = DesiredState::parse(&std::fs::read(example).unwrap()).unwrap();
        let provenance = Provenance {
            cluster: self.trust.cluster().clone(),
            epoch: EPOCH,
            generation: self.generation + 1,
            issued_at: now(),
            expires_at: now() + HOUR,
        };
        SignedDocument { provenance, desired }
    }

    pub(crate) fn sealed(&self, document: &SignedDocument) -> Vec<u8> {
        self.sealed_payload(document.to_payload())
    }

    /// Any bytes, signed as a document by the key whose documents the agent obeys.
    pub(crate) fn sealed_payload(&self, payload: Vec<u8>) -> Vec<u8> {
        seal(DOCUMENT_PAYLOAD_TYPE, payload, &[&self.director]).to_json()
    }

    /// Absent: the agent does not answer now.
    fn try_state(&mut self) -> Option<State> {
        let stats = Some(self.call("GET", "/v1/node/stats", "")).filter(|answer| answer.status == 200)?;
        let listed = self.call("GET", "/v1/tenants/acme/instances", "");
        let info = self.call("GET", "/v1/node/info", "");
        [&listed, &info].iter().all(|answer| answer.status == 200).then(|| State {
            accepted: stats.body["accepted"].clone(),
            converged: stats.body["converged"].clone(),
            instances: listed.body["instances"].clone(),
            trust_root_version: info.body["trust_root_version"].clone(),
        })
    }

    pub(crate) fn state(&mut self) -> State {
        wait_for("the agent to tell its state", PATIENCE, || self.try_state())
    }

    /// Pushes a good document, which must be accepted and made true.
    pub(crate) fn push_good(&mut self) -> State {
        let document = self.next();
        let envelope = self.sealed(&document);
        let answer = self.push(envelope);
        assert_eq!(answer.status, 202, "{answer:?}\n{}", self.cluster.logs());
        assert_eq!(answer.body["generation"], document.provenance.generation, "{answer:?}");
        self.generation = document.provenance.generation;
        self.converged()
    }

    /// Waits until the last accepted document is true.
    pub(crate) fn converged(&mut self) -> State {
        let generation = self.generation;
        let state = wait_for("the document to be made true", PATIENCE, || {
            self.try_state().filter(|state| state.converged["generation"] == generation)
        });
        assert_eq!(state.accepted, state.converged);
        assert_eq!(state.instances.as_array().map(Vec::len), Some(2), "{state:?}");
        state
    }
}
