//! A small cluster of certificates, a running server, and peers that do not use our client.

use std::net::{Ipv4Addr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use axum::Router;
use bytes::{BufMut, Bytes, BytesMut};
use mvm_pki::tls::{client_config, server_config};
use mvm_pki::{
    Anchors, Authority, ClientAuth, Credential, CsrNames, ExpectedPeer, Identity, LEAF_LIFE, LeafKey,
    LeafProfile, LiveAnchors, LiveCredential, Role, RootAuthority,
};
use mvm_proto::{ClusterId, Timestamp};
use mvm_transport::{ALPN_H3, ALPN_SESSION, Client, Limits, Server, ServerStats, SessionHandler};
use quinn::crypto::rustls::QuicClientConfig;
use tokio::task::JoinHandle;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

/// Longer than anything here takes on a busy machine.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);

fn hours_ago(hours: u64) -> Timestamp {
    Timestamp::from(SystemTime::now() - Duration::from_secs(hours * 3600))
}

/// Waits until `condition` holds.
pub(crate) async fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    let mut look = tokio::time::interval(Duration::from_millis(5));
    while !condition() {
        assert!(Instant::now() < deadline, "waited in vain until {what}");
        look.tick().await;
    }
}

pub(crate) async fn within<F: Future>(what: &str, future: F) -> F::Output {
    match tokio::time::timeout(PATIENCE, future).await {
        Ok(output) => output,
        Err(_) => panic!("{what} took too long"),
    }
}

/// The certificates of one cluster.
pub(crate) struct Lab {
    pub(crate) cluster: ClusterId,
    anchors: Anchors,
    issuing: Authority,
}

impl Lab {
    pub(crate) fn new() -> Self {
        let cluster: ClusterId = "lab".parse().expect("a cluster");
        let root = RootAuthority::create(&cluster, hours_ago(2)).expect("a root");
        let issuing = root.create_issuing(hours_ago(2)).expect("an issuing authority");
        Self { cluster, anchors: root.anchors(), issuing }
    }

    pub(crate) fn credential(&self, role: Role, name: &str) -> LiveCredential {
        self.issue(role, name, hours_ago(0), LEAF_LIFE)
    }

    /// A certificate that has ended half an hour ago.
    pub(crate) fn expired_credential(&self, role: Role, name: &str) -> LiveCredential {
        self.issue(role, name, hours_ago(1), Duration::from_secs(1800))
    }

    fn issue(&self, role: Role, name: &str, at: Timestamp, life: Duration) -> LiveCredential {
        let key = LeafKey::generate().expect("a key");
        let csr = key.csr_der(&CsrNames::default()).expect("a request");
        let identity = Identity::new(self.cluster.clone(), role, name).expect("an identity");
        let ips = vec![Ipv4Addr::LOCALHOST.into()];
        let profile = LeafProfile { identity, dns: vec!["localhost".to_owned()], ips, life };
        let issued = self.issuing.issue(&csr, &profile, at).expect("a leaf");
        LiveCredential::new(Credential::new(key, issued.chain).expect("a credential"))
    }

    pub(crate) fn anchors(&self) -> LiveAnchors {
        LiveAnchors::new(self.anchors.clone())
    }

    pub(crate) fn server_tls(&self, auth: ClientAuth) -> rustls::ServerConfig {
        let credential = self.credential(Role::Coordinator, "c1");
        server_config(&credential, &self.anchors(), &self.cluster, auth, &[ALPN_H3, ALPN_SESSION])
            .expect("TLS")
    }

    pub(crate) fn client_tls(&self, credential: Option<&LiveCredential>) -> rustls::ClientConfig {
        let expected = ExpectedPeer {
            cluster: self.cluster.clone(),
            role: Role::Coordinator,
            name: None,
            check_host: true,
        };
        client_config(credential, &self.anchors(), expected, &[ALPN_H3]).expect("TLS")
    }

    pub(crate) fn node_tls(&self, name: &str) -> rustls::ClientConfig {
        self.client_tls(Some(&self.credential(Role::Node, name)))
    }
}

/// A server in a task of its own.
pub(crate) struct Running {
    pub(crate) address: SocketAddr,
    pub(crate) stats: Arc<ServerStats>,
    pub(crate) shutdown: CancellationToken,
    pub(crate) task: JoinHandle<()>,
    pub(crate) lab: Lab,
}

impl Running {
    pub(crate) fn start(
        auth: ClientAuth,
        limits: Limits,
        http: Option<Router>,
        sessions: Option<Arc<dyn SessionHandler>>,
    ) -> Self {
        let lab = Lab::new();
        let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
        let server = Server::bind(listen, lab.server_tls(auth), limits).expect("a server");
        let (address, stats, shutdown) = (server.local_addr(), server.stats(), CancellationToken::new());
        let task = tokio::spawn(server.serve(http, sessions, shutdown.clone()));
        Self { address, stats, shutdown, task, lab }
    }

    pub(crate) fn http(limits: Limits, router: Router) -> Self {
        Self::start(ClientAuth::Required, limits, Some(router), None)
    }

    pub(crate) async fn client(&self) -> Client {
        self.client_with(&Limits::default()).await
    }

    pub(crate) async fn client_with(&self, limits: &Limits) -> Client {
        let tls = self.lab.node_tls("n1");
        Client::connect(self.address, "localhost", tls, limits).await.expect("a connection")
    }

    /// A bare QUIC connection from a given local address.
    pub(crate) async fn raw(&self, local: [u8; 4], alpn: &[u8], tls: rustls::ClientConfig) -> Raw {
        Raw::connect(self.address, local, alpn, tls).await.expect("a connection")
    }
}

/// A QUIC peer without any of our client's manners.
pub(crate) struct Raw {
    pub(crate) endpoint: quinn::Endpoint,
    pub(crate) connection: quinn::Connection,
}

impl Raw {
    pub(crate) async fn connect(
        address: SocketAddr,
        local: [u8; 4],
        alpn: &[u8],
        tls: rustls::ClientConfig,
    ) -> Result<Self, quinn::ConnectionError> {
        let endpoint = raw_endpoint(local);
        let config = raw_config(alpn, tls);
        let connection = endpoint.connect_with(config, address, "localhost").expect("dialling").await?;
        Ok(Self { endpoint, connection })
    }
}

pub(crate) fn raw_endpoint(local: [u8; 4]) -> quinn::Endpoint {
    quinn::Endpoint::client(SocketAddr::from((local, 0))).expect("an endpoint")
}

pub(crate) fn raw_config(alpn: &[u8], mut tls: rustls::ClientConfig) -> quinn::ClientConfig {
    tls.alpn_protocols = vec![alpn.to_vec()];
    quinn::ClientConfig::new(Arc::new(QuicClientConfig::try_from(tls).expect("QUIC settings")))
}

pub(crate) fn udp_socket() -> UdpSocket {
    UdpSocket::bind((Ipv4Addr::LOCALHOST, 0)).expect("a socket")
}

/// A variable-length integer of four bytes.
fn number(value: usize) -> [u8; 4] {
    (0x8000_0000 | u32::try_from(value).expect("a small number")).to_be_bytes()
}

/// An HTTP/3 frame.
pub(crate) fn h3_frame(kind: u8, payload: &[u8]) -> Bytes {
    let mut frame = BytesMut::new();
    frame.put_u8(kind);
    frame.put_slice(&number(payload.len()));
    frame.put_slice(payload);
    frame.freeze()
}

/// A HEADERS frame, its fields spelled out as QPACK literals.
pub(crate) fn headers_frame(fields: &[(&str, &str)]) -> Bytes {
    let mut section = BytesMut::new();
    section.put_slice(&[0, 0]);
    for (name, value) in fields {
        prefixed(&mut section, 0x20, 7, name.as_bytes());
        prefixed(&mut section, 0x00, 127, value.as_bytes());
    }
    h3_frame(1, &section)
}

pub(crate) fn request_head(method: &str, path: &str, more: &[(&str, &str)]) -> Bytes {
    let mut fields =
        vec![(":method", method), (":scheme", "https"), (":authority", "localhost"), (":path", path)];
    fields.extend_from_slice(more);
    headers_frame(&fields)
}

fn prefixed(out: &mut BytesMut, flags: u8, most: usize, text: &[u8]) {
    if text.len() < most {
        out.put_u8(flags | u8::try_from(text.len()).expect("below the prefix"));
    } else {
        out.put_u8(flags | u8::try_from(most).expect("a prefix"));
        let mut rest = text.len() - most;
        while rest >= 128 {
            out.put_u8(u8::try_from(rest % 128).expect("seven bits") | 0x80);
            rest /= 128;
        }
        out.put_u8(u8::try_from(rest).expect("seven bits"));
    }
    out.put_slice(text);
}
