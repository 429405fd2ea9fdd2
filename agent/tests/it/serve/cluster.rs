//! A cluster in a temporary directory: authorities, signing keys, certificates of every role, and agents in process.

use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{Method, Request, Response};
use mvm_agent::{Agent, AgentError, AgentSettings};
use mvm_pki::tls::{self, ExpectedPeer};
use mvm_pki::trust::{RoleSpec, RootSpec};
use mvm_pki::{
    Anchors, Authority, Credential, CsrNames, Identity, LeafKey, LeafProfile, LiveAnchors, LiveCredential,
    Role, RootAuthority, RootMetadata, SigningKey, TrustStore, seal,
};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::{ClusterId, DesiredState, Digest, Envelope, Problem, Provenance, SignedDocument, Timestamp};
use mvm_transport::{ALPN_H3, Client, ConnectError, Limits, ResponseBody};
use mvm_vmm::DriverChoice;
use mvm_vmm::DriverKind;
use tempfile::TempDir;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

pub(crate) const NODE: &str = "node-1";

/// Long enough for a loaded machine; nothing here waits this long when all is well.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

pub(crate) fn now() -> Timestamp {
    Timestamp::from(SystemTime::now())
}

pub(crate) struct Cluster {
    pub(crate) id: ClusterId,
    pub(crate) root: RootAuthority,
    pub(crate) issuing: Authority,
    pub(crate) director: SigningKey,
    pub(crate) trust: TrustStore,
    root_key: SigningKey,
    spec: RootSpec,
    pub(crate) dir: TempDir,
}

impl Cluster {
    pub(crate) fn new() -> Self {
        Self::named("demo")
    }

    pub(crate) fn named(name: &str) -> Self {
        let id: ClusterId = name.parse().unwrap();
        let root = RootAuthority::create(&id, now()).unwrap();
        let issuing = root.create_issuing(now()).unwrap();
        let (root_key, director, image) = (
            SigningKey::generate().unwrap(),
            SigningKey::generate().unwrap(),
            SigningKey::generate().unwrap(),
        );
        let spec = RootSpec {
            cluster: id.clone(),
            expires_at: now() + Duration::from_secs(86_400),
            dev: true,
            resets_high_water: false,
            root: RoleSpec::single(root_key.public()),
            director: RoleSpec::single(director.public()),
            image: RoleSpec::single(image.public()),
        };
        let first = RootMetadata::first(&spec, now()).unwrap().seal(&[&root_key]);
        let trust = TrustStore::pin(first, now()).unwrap();
        Self { id, root, issuing, director, trust, root_key, spec, dir: tempfile::tempdir().unwrap() }
    }

    pub(crate) fn credential(&self, role: Role, name: &str) -> Credential {
        self.credential_for(role, name, Duration::from_secs(3600))
    }

    pub(crate) fn credential_for(&self, role: Role, name: &str, life: Duration) -> Credential {
        let key = LeafKey::generate().unwrap();
        let csr = key.csr_der(&CsrNames::default()).unwrap();
        let issued = self.issuing.issue(&csr, &self.profile(role, name, life), now()).unwrap();
        Credential::new(key, issued.chain).unwrap()
    }

    pub(crate) fn profile(&self, role: Role, name: &str, life: Duration) -> LeafProfile {
        LeafProfile {
            identity: Identity::new(self.id.clone(), role, name).unwrap(),
            dns: vec!["localhost".to_owned()],
            ips: vec![IpAddr::V4(Ipv4Addr::LOCALHOST)],
            life,
        }
    }

    /// The second version of the root metadata.
    pub(crate) fn second_root(&self) -> Envelope {
        let first = RootMetadata::first(&self.spec, now()).unwrap();
        first.next(&self.spec, now()).unwrap().seal(&[&self.root_key])
    }

    pub(crate) fn anchors(&self) -> Anchors {
        self.root.anchors()
    }

    pub(crate) fn data_dir(&self) -> PathBuf {
        self.dir.path().join("agent")
    }

    /// Settings for an agent that is alone on its ports.
    pub(crate) fn settings(&self) -> AgentSettings {
        let mut settings = AgentSettings::new(&self.data_dir());
        settings.listen = "127.0.0.1:0".parse().unwrap();
        settings.metrics_listen = "127.0.0.1:0".parse().unwrap();
        settings.driver = DriverChoice::Only(DriverKind::Fake);
        settings
    }

    /// Puts certificates in place as an enrolment would.
    pub(crate) fn enrol(&self, settings: &AgentSettings) {
        self.enrol_with(settings, &self.credential(Role::Node, NODE));
    }

    pub(crate) fn enrol_with(&self, settings: &AgentSettings, credential: &Credential) {
        let dir = &settings.certs_dir;
        mvm_pki::files::create_private_dir(dir).unwrap();
        self.anchors().save(&dir.join("ca.crt")).unwrap();
        self.trust.save(&dir.join("trust.json")).unwrap();
        credential.save(&dir.join("node.pem")).unwrap();
    }

    /// An HTTP/3 client of this role, or with no certificate at all.
    pub(crate) async fn client(
        &self,
        address: SocketAddr,
        role: Option<(Role, &str)>,
    ) -> Result<Client, ConnectError> {
        let credential = role.map(|(role, name)| LiveCredential::new(self.credential(role, name)));
        let expected = ExpectedPeer {
            cluster: self.id.clone(),
            role: Role::Node,
            name: Some(NODE.to_owned()),
            check_host: true,
        };
        let anchors = LiveAnchors::new(self.anchors());
        let config = tls::client_config(credential.as_ref(), &anchors, expected, &[ALPN_H3]).unwrap();
        Client::connect(address, "127.0.0.1", config, &Limits::default()).await
    }

    /// A signed document for the node with `running` instances in one pool.
    pub(crate) fn document(&self, generation: u64, running: u32) -> Envelope {
        let desired = DesiredState::parse(desired_json(NODE, running).as_bytes()).unwrap();
        let provenance = Provenance {
            cluster: self.id.clone(),
            epoch: 1,
            generation,
            issued_at: now(),
            expires_at: now() + Duration::from_secs(3600),
        };
        let payload = SignedDocument { provenance, desired }.to_payload();
        seal(DOCUMENT_PAYLOAD_TYPE, payload, &[&self.director])
    }
}

pub(crate) fn desired_json(node: &str, running: u32) -> String {
    format!(
        r#"{{"schema_version":1,"node_id":"{node}","tenants":[{{"tenant_id":"acme",
        "network":{{"tenant_net_id":3,"ipv4_subnet":"10.240.3.0/24"}},
        "quotas":{{"max_vcpus":64,"max_mem_mib":65536,"max_running":32,"max_warm":8,"max_pools":4,
        "max_instances_per_pool":40,"max_disk_gib":100}},
        "pools":[{{"pool_id":"workers","flake_ref":"github:org/demo","profile":"minimal",
        "instance_resources":{{"vcpus":1,"mem_mib":128,"data_disk_mib":0}},
        "desired_counts":{{"running":{running},"warm":0,"sleeping":0}}}}]}}]}}"#
    )
}

/// An agent that runs in this process.
pub(crate) struct Running {
    pub(crate) api: Option<SocketAddr>,
    pub(crate) metrics: SocketAddr,
    pub(crate) socket: PathBuf,
    pub(crate) node: mvm_agent::node::handle::NodeHandle,
    shutdown: CancellationToken,
    task: JoinHandle<Result<(), AgentError>>,
}

impl Running {
    pub(crate) async fn start(settings: AgentSettings) -> Self {
        let shutdown = CancellationToken::new();
        let socket = settings.socket.clone();
        let agent = Box::pin(Agent::start(settings, shutdown.clone())).await.unwrap();
        Self {
            api: agent.api_address(),
            metrics: agent.metrics_address(),
            socket,
            node: agent.node().clone(),
            shutdown,
            task: tokio::spawn(agent.run()),
        }
    }

    pub(crate) fn api(&self) -> SocketAddr {
        self.api.expect("an enrolled agent has an API")
    }

    /// Stops it and returns how it ended.
    pub(crate) async fn stop(self) -> Result<(), AgentError> {
        self.shutdown.cancel();
        self.task.await.expect("the agent did not panic")
    }

    /// Waits until as many instances run.
    pub(crate) async fn wait_for_running(&self, count: usize) {
        let node = self.node.clone();
        wait_until(|| node.instances(None).iter().filter(|i| i.phase == "running").count() == count).await;
    }
}

/// Waits until `condition` holds, looking again and again; fails after [`PATIENCE`].
pub(crate) async fn wait_until(mut condition: impl FnMut() -> bool) {
    let patient = async {
        while !condition() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(PATIENCE, patient).await.expect("the condition came true in time");
}

/// A request as the tests send them.
pub(crate) fn request(
    method: Method,
    address: SocketAddr,
    path: &str,
    body: impl Into<Bytes>,
) -> Request<Bytes> {
    Request::builder()
        .method(method)
        .uri(format!("https://{address}{path}"))
        .header("content-type", "application/json")
        .body(body.into())
        .unwrap()
}

pub(crate) async fn body_of(response: Response<ResponseBody>) -> Bytes {
    response.into_body().bytes(1 << 20).await.unwrap()
}

/// The response's problem; fails when it is not one.
pub(crate) async fn problem_of(response: Response<ResponseBody>) -> Problem {
    let media_type = response.headers().get("content-type").map(|value| value.to_str().unwrap().to_owned());
    assert_eq!(media_type.as_deref(), Some("application/problem+json"), "{response:?}");
    let status = response.status();
    let problem: Problem = serde_json::from_slice(&body_of(response).await).unwrap();
    assert_eq!(problem.status, status.as_u16());
    problem
}

/// One HTTP/1.1 exchange on any stream, by hand: the status and everything after the head.
pub(crate) async fn exchange<S>(mut stream: S, request: &str) -> (u16, String)
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin,
{
    use tokio::io::{AsyncReadExt, AsyncWriteExt};
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    let status = answer.split(' ').nth(1).unwrap().parse().unwrap();
    let body = answer.split_once("\r\n\r\n").map(|(_, body)| body.to_owned()).unwrap_or_default();
    (status, body)
}

pub(crate) async fn get_local(address: SocketAddr, path: &str) -> (u16, String) {
    let stream = tokio::net::TcpStream::connect(address).await.unwrap();
    exchange(stream, &format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")).await
}

pub(crate) async fn get_socket(path: &Path, uri: &str) -> (u16, String) {
    let stream = tokio::net::UnixStream::connect(path).await.unwrap();
    exchange(stream, &format!("GET {uri} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n")).await
}

pub(crate) fn digest_of(envelope: &Envelope) -> String {
    Digest::of(&envelope.payload).to_string()
}
