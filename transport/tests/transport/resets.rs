//! A server that is killed, and the one that takes its port.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use futures::FutureExt as _;
use mvm_pki::{ClientAuth, Role};
use mvm_proto::wire::session::v1::{AgentFrame, Heartbeat, agent_frame};
use mvm_transport::{
    Client, ClientSession, Limits, RequestError, ResetKey, Server, ServerSession, SessionError, dial_session,
};
use tokio::runtime::Builder;
use tokio::time::{Instant, timeout};
use tokio_util::sync::CancellationToken;

use crate::support::{Lab, within};

/// Far below the idle timeout of 30 s, far above a round trip on a busy machine.
const AT_ONCE: Duration = Duration::from_secs(2);

fn heartbeat(sequence: u64) -> AgentFrame {
    AgentFrame { body: Some(agent_frame::Body::Heartbeat(Heartbeat { sequence, info: None })) }
}

/// A server in a runtime of its own: dropping the runtime ends it as a kill does, in mid-sentence and without a goodbye.
/// It has one thread, so that nothing runs any more while its tasks are dropped.
struct Process {
    stop: CancellationToken,
    thread: JoinHandle<()>,
    address: SocketAddr,
}

impl Process {
    fn start(lab: &Lab, address: SocketAddr, key: Option<&ResetKey>) -> Self {
        let runtime = Builder::new_current_thread().enable_all().build().expect("a runtime");
        let inside = runtime.enter();
        let (tls, limits) = (lab.server_tls(ClientAuth::Required), Limits::default());
        let server = match key {
            Some(key) => Server::bind_with(address, tls, limits, key),
            None => Server::bind(address, tls, limits),
        };
        let server = server.expect("a server");
        let address = server.local_addr();
        let echo = |_peer, _address, mut session: ServerSession| -> futures::future::BoxFuture<'static, ()> {
            Box::pin(async move {
                while let Ok(Some(_)) = session.frames_in.recv().await {
                    session.frames_out.send(&Default::default()).await.ok();
                }
            })
        };
        let router = axum::Router::new().route("/", axum::routing::get(|| async { "here" }));
        runtime.spawn(server.serve(Some(router), Some(Arc::new(echo)), CancellationToken::new()));
        drop(inside);
        let stop = CancellationToken::new();
        let stopped = stop.clone();
        let thread = std::thread::spawn(move || runtime.block_on(stopped.cancelled()));
        Self { stop, thread, address }
    }

    /// Returns once the socket is closed, which frees the port.
    async fn kill(self) {
        self.stop.cancel();
        tokio::task::spawn_blocking(move || self.thread.join()).await.expect("a thread").expect("the end");
    }
}

fn any_port() -> SocketAddr {
    SocketAddr::from((Ipv4Addr::LOCALHOST, 0))
}

/// A session on which a frame went there and back.
async fn session(lab: &Lab, address: SocketAddr) -> ClientSession {
    let tls = lab.client_tls(Some(&lab.credential(Role::Node, "n1")));
    let mut agent = dial_session(address, "localhost", tls, &Limits::default()).await.expect("a session");
    agent.frames_out.send(&heartbeat(0)).await.expect("room");
    assert!(within("an answer", agent.frames_in.recv()).await.expect("a frame").is_some());
    agent
}

#[tokio::test]
async fn a_session_with_a_killed_server_ends_with_the_first_frame_to_its_successor() {
    let (lab, key) = (Lab::new(), ResetKey::generate().expect("a key"));
    let first = Process::start(&lab, any_port(), Some(&key));
    let address = first.address;
    let mut agent = session(&lab, address).await;
    first.kill().await;
    let _second = Process::start(&lab, address, Some(&key));

    let sent_at = Instant::now();
    agent.frames_out.send(&heartbeat(1)).await.expect("room");
    let (received, closed) = timeout(AT_ONCE, async {
        tokio::join!(agent.frames_in.recv(), agent.control.closed()) //
    })
    .await
    .expect("the reset is noticed at once");
    assert!(matches!(received, Err(SessionError::Forgotten)), "{received:?}");
    assert!(matches!(closed, SessionError::Forgotten), "{closed}");
    assert!(closed.to_string().contains("reset by peer"), "{closed}");
    let sent = agent.frames_out.send(&heartbeat(2)).await;
    assert!(matches!(sent, Err(SessionError::Forgotten)), "{sent:?}");
    // The successor serves who dials again.
    session(&lab, address).await;
    assert!(sent_at.elapsed() < Limits::default().idle_timeout);
}

#[tokio::test]
async fn a_keep_alive_is_enough_to_learn_of_the_restart() {
    let (lab, key) = (Lab::new(), ResetKey::generate().expect("a key"));
    let first = Process::start(&lab, any_port(), Some(&key));
    let address = first.address;
    let tls = lab.client_tls(Some(&lab.credential(Role::Node, "n1")));
    let limits = Limits { keep_alive: Duration::from_millis(100), ..Limits::default() };
    let mut agent = dial_session(address, "localhost", tls, &limits).await.expect("a session");
    agent.frames_out.send(&heartbeat(0)).await.expect("room");
    assert!(within("an answer", agent.frames_in.recv()).await.expect("a frame").is_some());
    first.kill().await;
    let _second = Process::start(&lab, address, Some(&key));
    let received = timeout(AT_ONCE, agent.frames_in.recv()).await.expect("the reset is noticed at once");
    assert!(matches!(received, Err(SessionError::Forgotten)), "{received:?}");
}

#[tokio::test]
async fn a_request_to_a_restarted_server_fails_at_once() {
    let (lab, key) = (Lab::new(), ResetKey::generate().expect("a key"));
    let first = Process::start(&lab, any_port(), Some(&key));
    let address = first.address;
    let tls = lab.client_tls(Some(&lab.credential(Role::Node, "n1")));
    let client = Client::connect(address, "localhost", tls, &Limits::default()).await.expect("a connection");
    let request = || http::Request::get("https://localhost/").body(bytes::Bytes::new()).expect("a request");
    client.request(request()).await.expect("an answer");
    first.kill().await;
    let _second = Process::start(&lab, address, Some(&key));
    let answer: Result<_, RequestError> = timeout(AT_ONCE, client.request(request())).await.expect("at once");
    assert!(answer.is_err());
}

/// One after another so quickly that quinn's usual pause between resets would make the last ones wait.
#[tokio::test]
async fn a_whole_fleet_learns_of_the_restart() {
    const SESSIONS: usize = 40;
    let (lab, key) = (Lab::new(), ResetKey::generate().expect("a key"));
    let first = Process::start(&lab, any_port(), Some(&key));
    let address = first.address;
    let mut agents = Vec::new();
    for _ in 0..SESSIONS {
        let name = format!("n{}", agents.len());
        let tls = lab.node_tls(&name);
        let mut agent = dial_session(address, "localhost", tls, &Limits::default()).await.expect("a session");
        agent.frames_out.send(&heartbeat(0)).await.expect("room");
        assert!(within("an answer", agent.frames_in.recv()).await.expect("a frame").is_some());
        agents.push(agent);
    }
    first.kill().await;
    let _second = Process::start(&lab, address, Some(&key));
    for agent in &mut agents {
        agent.frames_out.send(&heartbeat(1)).await.expect("room");
    }
    let ends = futures::future::join_all(agents.iter().map(|agent| agent.control.closed()));
    let ends = within("the resets", ends).await;
    assert!(ends.iter().all(|end| matches!(end, SessionError::Forgotten)), "{ends:?}");
}

#[tokio::test]
async fn a_server_with_another_key_can_not_end_a_session() {
    let lab = Lab::new();
    let keys = [ResetKey::generate().expect("a key"), ResetKey::generate().expect("a key")];
    for successor in [None, Some(&keys[1])] {
        let first = Process::start(&lab, any_port(), Some(&keys[0]));
        let address = first.address;
        let mut agent = session(&lab, address).await;
        first.kill().await;
        let _second = Process::start(&lab, address, successor);
        agent.frames_out.send(&heartbeat(1)).await.expect("room");
        // The successor has read that frame before the packets of one that came later, and answered it if it does.
        session(&lab, address).await;
        let ended = agent.control.closed().now_or_never();
        assert!(ended.is_none(), "{ended:?}");
    }
}
