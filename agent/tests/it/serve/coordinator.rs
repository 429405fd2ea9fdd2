//! Just enough of a coordinator: enrolment and renewal as the real one answers them, and sessions by hand.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use axum::{Json, Router};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use futures::future::BoxFuture;
use mvm_pki::{Anchors, ClientAuth, Identity, JoinToken, LiveAnchors, LiveCredential, Role, tls};
use mvm_proto::Problem;
use mvm_transport::{ALPN_H3, ALPN_SESSION, Limits, Peer, Server, ServerSession, SessionHandler, Target};
use parking_lot::Mutex;
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::serve::cluster::{Cluster, NODE, now};

pub(crate) struct Coordinator {
    pub(crate) address: SocketAddr,
    pub(crate) sessions: mpsc::Receiver<ServerSession>,
    shutdown: CancellationToken,
    task: tokio::task::JoinHandle<()>,
}

struct Desk {
    cluster: Arc<Cluster>,
    /// Whose authority signs what is answered, and the roots that come with it.
    issuer: Arc<Cluster>,
    roots_pem: String,
    /// Tokens that were not used yet.
    tokens: Mutex<Vec<JoinToken>>,
    life: Duration,
}

struct Sessions(mpsc::Sender<ServerSession>);

impl SessionHandler for Sessions {
    fn handle(&self, peer: Identity, _: SocketAddr, session: ServerSession) -> BoxFuture<'static, ()> {
        assert_eq!(peer.role(), Role::Node);
        let sender = self.0.clone();
        Box::pin(async move {
            let control = session.control.clone();
            // The session lives for as long as the test keeps it.
            if sender.send(session).await.is_ok() {
                control.closed().await;
            }
        })
    }
}

impl Coordinator {
    pub(crate) fn start(cluster: &Arc<Cluster>) -> Self {
        Self::start_with(cluster, "127.0.0.1:0".parse().unwrap(), Vec::new(), Duration::from_secs(3600))
    }

    pub(crate) fn start_with(
        cluster: &Arc<Cluster>,
        address: SocketAddr,
        tokens: Vec<JoinToken>,
        life: Duration,
    ) -> Self {
        Self::start_within(&Limits::default(), cluster, address, tokens, life)
    }

    /// A thief: it shows the certificate of `cluster`'s coordinator, and answers with certificates of an authority of
    /// its own and with `roots`.
    pub(crate) fn start_thief(
        cluster: &Arc<Cluster>,
        issuer: &Arc<Cluster>,
        roots: &Anchors,
        tokens: Vec<JoinToken>,
    ) -> Self {
        let desk = Desk {
            cluster: Arc::clone(cluster),
            issuer: Arc::clone(issuer),
            roots_pem: roots.to_pem(),
            tokens: Mutex::new(tokens),
            life: Duration::from_secs(3600),
        };
        Self::start_desk(&Limits::default(), "127.0.0.1:0".parse().unwrap(), desk)
    }

    /// One that takes in no more than `stream_window` bytes before it reads them.
    pub(crate) fn start_narrow(cluster: &Arc<Cluster>, stream_window: u32) -> Self {
        let limits = Limits { stream_window, ..Limits::default() };
        let address = "127.0.0.1:0".parse().unwrap();
        Self::start_within(&limits, cluster, address, Vec::new(), Duration::from_secs(3600))
    }

    fn start_within(
        limits: &Limits,
        cluster: &Arc<Cluster>,
        address: SocketAddr,
        tokens: Vec<JoinToken>,
        life: Duration,
    ) -> Self {
        let desk = Desk {
            cluster: Arc::clone(cluster),
            issuer: Arc::clone(cluster),
            roots_pem: cluster.anchors().to_pem(),
            tokens: Mutex::new(tokens),
            life,
        };
        Self::start_desk(limits, address, desk)
    }

    fn start_desk(limits: &Limits, address: SocketAddr, desk: Desk) -> Self {
        let cluster = Arc::clone(&desk.cluster);
        let credential = LiveCredential::new(cluster.credential(Role::Coordinator, "c1"));
        let anchors = LiveAnchors::new(cluster.anchors());
        let alpn: [&[u8]; 2] = [ALPN_H3, ALPN_SESSION];
        let tls =
            tls::server_config(&credential, &anchors, &cluster.id, ClientAuth::Optional, &alpn).unwrap();
        let server = Server::bind(address, tls, limits.clone()).unwrap();
        let address = server.local_addr();
        let desk = Arc::new(desk);
        let router = Router::new()
            .route("/v1/ca", get(ca))
            .route("/v1/enrol", post(enrol))
            .route("/v1/renew", post(renew))
            .with_state(desk);
        let (sender, sessions) = mpsc::channel(4);
        let shutdown = CancellationToken::new();
        let serving = server.serve(Some(router), Some(Arc::new(Sessions(sender))), shutdown.clone());
        Self { address, sessions, shutdown, task: tokio::spawn(serving) }
    }

    pub(crate) fn target(&self) -> Target {
        self.address.to_string().parse().unwrap()
    }

    pub(crate) async fn stop(self) {
        self.shutdown.cancel();
        drop(self.sessions);
        self.task.await.unwrap();
    }
}

async fn ca(State(desk): State<Arc<Desk>>) -> String {
    desk.cluster.anchors().to_pem()
}

async fn enrol(State(desk): State<Arc<Desk>>, Json(body): Json<Value>) -> Response {
    let token = JoinToken::parse(body["token"].as_str().unwrap()).unwrap();
    let mut tokens = desk.tokens.lock();
    let Some(index) = tokens.iter().position(|known| token.check(&known.secret_hash())) else {
        let problem = Problem::new(403, "token_refused", "the token was used", "Make a new token.");
        return (http::StatusCode::FORBIDDEN, Json(problem)).into_response();
    };
    tokens.remove(index);
    let (chain_pem, roots_pem) = issue(&desk, &body);
    let trust = serde_json::to_value(desk.cluster.trust.bundle()).unwrap();
    Json(json!({
        "chain_pem": chain_pem, "roots_pem": roots_pem, "cluster": desk.cluster.id, "node_id": NODE, "trust": trust,
    }))
    .into_response()
}

async fn renew(State(desk): State<Arc<Desk>>, peer: Peer, Json(body): Json<Value>) -> Response {
    assert_eq!(peer.identity.as_ref().map(Identity::name), Some(NODE));
    let (chain_pem, roots_pem) = issue(&desk, &body);
    Json(json!({ "chain_pem": chain_pem, "roots_pem": roots_pem })).into_response()
}

fn issue(desk: &Desk, body: &Value) -> (String, String) {
    let csr = STANDARD.decode(body["csr"].as_str().unwrap()).unwrap();
    let profile = desk.issuer.profile(Role::Node, NODE, desk.life);
    let issued = desk.issuer.issuing.issue(&csr, &profile, now()).unwrap();
    (issued.chain_pem(), desk.roots_pem.clone())
}
