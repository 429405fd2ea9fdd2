//! Node sessions: frames both ways, their limits, and how sessions end.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::FutureExt as _;
use mvm_pki::{ClientAuth, Role};
use mvm_proto::Digest;
use mvm_proto::wire::session::v1::{
    AgentFrame, CoordinatorFrame, Document, Goodbye, Heartbeat, HeartbeatAck, agent_frame, coordinator_frame,
};
use mvm_transport::frame::encode_once;
use mvm_transport::{
    ALPN_SESSION, ClientSession, Limits, ServerSession, SessionError, SessionHandler, close_code,
    dial_session,
};
use tokio::sync::mpsc;

use crate::support::{Raw, Running, wait_until, within};

const LOCAL: [u8; 4] = [127, 0, 0, 1];

fn heartbeat(sequence: u64) -> AgentFrame {
    AgentFrame { body: Some(agent_frame::Body::Heartbeat(Heartbeat { sequence, info: None })) }
}

fn heartbeat_ack(sequence: u64) -> CoordinatorFrame {
    CoordinatorFrame { body: Some(coordinator_frame::Body::HeartbeatAck(HeartbeatAck { sequence })) }
}

fn document(length: usize) -> CoordinatorFrame {
    CoordinatorFrame {
        body: Some(coordinator_frame::Body::Document(Document {
            envelope: vec![7; length].into(),
            traceparent: String::new(),
        })),
    }
}

/// A server that hands every session to the test.
struct Sessions {
    server: Running,
    opened: mpsc::UnboundedReceiver<(ServerSession, tokio::sync::oneshot::Sender<()>)>,
}

impl Sessions {
    fn start(limits: Limits) -> Self {
        let (send, opened) = mpsc::unbounded_channel();
        let handler =
            move |_peer, _address, session: ServerSession| -> futures::future::BoxFuture<'static, ()> {
                let (end, ended) = tokio::sync::oneshot::channel();
                send.send((session, end)).ok();
                Box::pin(async move {
                    ended.await.ok();
                })
            };
        let handler: Arc<dyn SessionHandler> = Arc::new(handler);
        Self { server: Running::start(ClientAuth::Required, limits, None, Some(handler)), opened }
    }

    /// Both ends of a new session, the first heartbeat received and answered: later frames may be large.
    async fn open(
        &mut self,
        limits: &Limits,
    ) -> (ClientSession, ServerSession, tokio::sync::oneshot::Sender<()>) {
        let tls = self.server.lab.node_tls("n1");
        let mut agent = dial_session(self.server.address, "localhost", tls, limits).await.expect("a session");
        agent.frames_out.send(&heartbeat(0)).await.expect("room");
        let (mut coordinator, end) = within("the session", self.opened.recv()).await.expect("a session");
        assert_eq!(coordinator.frames_in.recv().await.expect("a frame"), Some(heartbeat(0)));
        coordinator.frames_out.send(&heartbeat_ack(0)).await.expect("room");
        assert_eq!(agent.frames_in.recv().await.expect("a frame"), Some(heartbeat_ack(0)));
        (agent, coordinator, end)
    }

    /// A peer that speaks the session's protocol by hand, and the coordinator's end.
    async fn open_raw(
        &mut self,
        first: &[u8],
    ) -> (Raw, quinn::SendStream, ServerSession, tokio::sync::oneshot::Sender<()>) {
        let raw = self.server.raw(LOCAL, ALPN_SESSION, self.server.lab.node_tls("n1")).await;
        let (mut send, _recv) = raw.connection.open_bi().await.expect("a stream");
        send.write_all(first).await.expect("room");
        let (coordinator, end) = within("the session", self.opened.recv()).await.expect("a session");
        (raw, send, coordinator, end)
    }
}

#[tokio::test]
async fn frames_go_both_ways_in_order() {
    let mut sessions = Sessions::start(Limits::default());
    let (mut agent, mut coordinator, _end) = sessions.open(&Limits::default()).await;
    for sequence in 1..=500 {
        agent.frames_out.send(&heartbeat(sequence)).await.expect("room");
        coordinator.frames_out.send(&heartbeat_ack(sequence)).await.expect("room");
    }
    for sequence in 1..=500 {
        assert_eq!(coordinator.frames_in.recv().await.expect("a frame"), Some(heartbeat(sequence)));
        assert_eq!(agent.frames_in.recv().await.expect("a frame"), Some(heartbeat_ack(sequence)));
    }
    assert_eq!(agent.peer.to_string(), "spiffe://lab/coordinator/c1");
}

#[tokio::test]
async fn a_document_encoded_once_reaches_many() {
    let mut sessions = Sessions::start(Limits::default());
    let frame = encode_once(&document(1 << 20));
    let mut ends = Vec::new();
    for _ in 0..3 {
        ends.push(sessions.open(&Limits::default()).await);
    }
    for (mut agent, mut coordinator, _end) in ends {
        let send = coordinator.frames_out.send_encoded(frame.clone());
        let (sent, received) = tokio::join!(send, agent.frames_in.recv());
        sent.expect("room");
        assert_eq!(received.expect("a frame"), Some(document(1 << 20)));
    }
}

#[tokio::test]
async fn a_receive_given_up_loses_nothing() {
    let mut sessions = Sessions::start(Limits::default());
    let (mut agent, mut coordinator, _end) = sessions.open(&Limits::default()).await;
    let sending = async {
        coordinator.frames_out.send(&document(3_000_000)).await.expect("room");
        coordinator.frames_out.send(&heartbeat_ack(1)).await.expect("room");
    };
    let receiving = async {
        let mut received = Vec::new();
        while received.len() < 2 {
            tokio::select! {
                biased;
                frame = agent.frames_in.recv() => received.push(frame.expect("a frame").expect("no end")),
                () = tokio::task::yield_now() => {}
            }
        }
        received
    };
    let (received, ()) = within("the frames", async { tokio::join!(receiving, sending) }).await;
    assert!(received == [document(3_000_000), heartbeat_ack(1)]);
}

#[tokio::test]
async fn a_frame_above_the_limit_is_not_sent() {
    let mut sessions = Sessions::start(Limits::default());
    let limits = Limits { max_frame_bytes: 100, ..Limits::default() };
    let (mut agent, _coordinator, _end) = sessions.open(&limits).await;
    let large = AgentFrame {
        body: Some(agent_frame::Body::Reply(mvm_proto::wire::session::v1::Reply {
            id: "x".repeat(100),
            problem: Vec::new(),
            answer: None,
        })),
    };
    let error = agent.frames_out.send(&large).await.expect_err("too large");
    assert!(matches!(error, SessionError::FrameTooLarge { limit: 100, .. }), "{error}");
    agent.frames_out.send(&heartbeat(1)).await.expect("the session goes on");
}

#[tokio::test]
async fn a_claim_above_the_frame_limit_ends_the_session() {
    let mut sessions = Sessions::start(Limits { max_frame_bytes: 1000, ..Limits::default() });
    let (raw, _send, mut coordinator, _end) = sessions.open_raw(&[0, 0, 3, 0xe9]).await;
    let error = coordinator.frames_in.recv().await.expect_err("too large");
    assert!(matches!(error, SessionError::FrameTooLarge { claimed: 1001, limit: 1000 }), "{error}");
    let closed = within("the close", raw.connection.closed()).await;
    assert!(
        matches!(&closed, quinn::ConnectionError::ApplicationClosed(close)
        if close.error_code == close_code::PROTOCOL.into()),
        "{closed}"
    );
}

#[tokio::test]
async fn a_frame_that_is_no_protobuf_ends_the_session() {
    let mut sessions = Sessions::start(Limits::default());
    let (_raw, _send, mut coordinator, _end) = sessions.open_raw(&[0, 0, 0, 2, 0xff, 0xff]).await;
    let error = coordinator.frames_in.recv().await.expect_err("malformed");
    assert!(matches!(error, SessionError::Malformed(_)), "{error}");
    assert!(coordinator.control.is_closed());
}

#[tokio::test]
async fn a_stream_that_ends_inside_a_frame_says_so() {
    let mut sessions = Sessions::start(Limits::default());
    let (_raw, mut send, mut coordinator, _end) = sessions.open_raw(&[0, 0, 0, 9, 1]).await;
    send.finish().expect("an open stream");
    let error = within("the error", coordinator.frames_in.recv()).await.expect_err("truncated");
    assert!(matches!(error, SessionError::Truncated), "{error}");
}

#[tokio::test]
async fn a_frame_that_trickles_is_given_up() {
    let mut sessions =
        Sessions::start(Limits { request_timeout: Duration::from_millis(200), ..Limits::default() });
    let (_raw, mut send, mut coordinator, _end) = sessions.open_raw(&[0, 0, 4]).await;
    let mut drip = tokio::time::interval(Duration::from_millis(20));
    let trickle = async {
        while send.write_all(&[1]).await.is_ok() {
            drip.tick().await;
        }
    };
    let (received, ()) =
        within("the end", async { tokio::join!(coordinator.frames_in.recv(), trickle) }).await;
    assert!(matches!(received, Err(SessionError::SlowFrame { .. })), "{received:?}");
}

#[tokio::test]
async fn a_peer_that_only_keeps_alive_is_silent() {
    let mut sessions = Sessions::start(Limits::default());
    let limits = Limits { keep_alive: Duration::from_millis(20), ..Limits::default() };
    let (_agent, mut coordinator, _end) = sessions.open(&limits).await;
    coordinator.frames_in.set_silence(Some(Duration::from_millis(150)));
    let received = within("the end", coordinator.frames_in.recv()).await;
    assert!(matches!(received, Err(SessionError::Silent { .. })), "{received:?}");
}

#[tokio::test]
async fn a_peer_that_vanishes_is_noticed_by_the_idle_timeout() {
    let mut sessions = Sessions::start(Limits { idle_timeout: Duration::from_secs(2), ..Limits::default() });
    let limits = Limits { keep_alive: Duration::from_secs(100), ..Limits::default() };
    let (_agent, mut coordinator, _end) = sessions.open(&limits).await;
    let received = within("the end", coordinator.frames_in.recv()).await;
    assert!(matches!(received, Err(SessionError::TimedOut)), "{received:?}");
}

#[tokio::test]
async fn keep_alives_of_the_dialling_side_hold_an_idle_session() {
    let limits = Limits {
        idle_timeout: Duration::from_secs(2),
        keep_alive: Duration::from_millis(100),
        ..Limits::default()
    };
    let mut sessions = Sessions::start(limits.clone());
    let (mut agent, mut coordinator, _end) = sessions.open(&limits).await;
    tokio::time::pause();
    let quiet = tokio::time::timeout(10 * limits.idle_timeout, coordinator.frames_in.recv()).await;
    assert!(quiet.is_err(), "{quiet:?}");
    tokio::time::resume();
    agent.frames_out.send(&heartbeat(1)).await.expect("the session lives");
    assert_eq!(coordinator.frames_in.recv().await.expect("a frame"), Some(heartbeat(1)));
}

#[tokio::test]
async fn a_sender_waits_for_a_reader_and_not_for_ever() {
    let mut sessions =
        Sessions::start(Limits { request_timeout: Duration::from_millis(300), ..Limits::default() });
    let (agent, mut coordinator, _end) = sessions.open(&Limits::default()).await;
    let frame = encode_once(&document(100_000));
    let error = loop {
        if let Err(error) = coordinator.frames_out.send_encoded(frame.clone()).await {
            break error;
        }
    };
    assert!(matches!(error, SessionError::SlowFrame { .. }), "{error}");
    let again = coordinator.frames_out.send_encoded(Bytes::from_static(&[0; 4])).await;
    assert!(matches!(again, Err(SessionError::Interrupted)), "{again:?}");
    let closed = within("the close", agent.control.closed()).await;
    assert!(matches!(closed, SessionError::Closed { code, .. } if code == u64::from(close_code::TOO_SLOW)));
}

#[tokio::test]
async fn closing_from_elsewhere_ends_both_sides_at_once() {
    let mut sessions = Sessions::start(Limits::default());
    let (mut agent, mut coordinator, _end) = sessions.open(&Limits::default()).await;
    let control = coordinator.control.clone();
    let closing = async { control.close(close_code::REMOVED, "the node was removed") };
    let (here, there, ()) = within("the end", async {
        tokio::join!(coordinator.frames_in.recv(), agent.frames_in.recv(), closing)
    })
    .await;
    assert!(matches!(here, Err(SessionError::ClosedHere)), "{here:?}");
    let Err(SessionError::Closed { code, reason }) = there else { panic!("{there:?}") };
    assert_eq!((code, reason.as_str()), (u64::from(close_code::REMOVED), "the node was removed"));
}

#[tokio::test]
async fn both_sides_of_a_session_see_which_certificate_the_other_showed() {
    let mut sessions = Sessions::start(Limits::default());
    let credential = sessions.server.lab.credential(Role::Node, "n1");
    let tls = sessions.server.lab.client_tls(Some(&credential));
    let mut agent =
        dial_session(sessions.server.address, "localhost", tls, &Limits::default()).await.expect("a session");
    agent.frames_out.send(&heartbeat(0)).await.expect("room");
    let (coordinator, _end) = within("the session", sessions.opened.recv()).await.expect("a session");
    let fingerprint = Digest::of(&credential.current().chain()[0]);
    assert_eq!(coordinator.control.peer_certificate(), Some(fingerprint));
    assert!(agent.control.peer_certificate().is_some_and(|theirs| theirs != fingerprint));
}

#[tokio::test]
async fn what_was_finished_arrives_before_the_end() {
    let mut sessions = Sessions::start(Limits::default());
    let (mut agent, mut coordinator, end) = sessions.open(&Limits::default()).await;
    let goodbye = CoordinatorFrame {
        body: Some(coordinator_frame::Body::Goodbye(Goodbye { reason: "restart".into(), redial: true })),
    };
    coordinator.frames_out.send(&goodbye).await.expect("room");
    let (finished, received) = tokio::join!(coordinator.frames_out.finish(), agent.frames_in.recv());
    finished.expect("the peer has it");
    assert_eq!(received.expect("a frame"), Some(goodbye));
    assert_eq!(agent.frames_in.recv().await.expect("the end"), None);
    end.send(()).expect("a handler");
    let closed = within("the close", agent.control.closed()).await;
    assert!(matches!(closed, SessionError::Closed { code: 0, .. }), "{closed}");
}

#[tokio::test]
async fn shutdown_closes_sessions_with_its_own_code() {
    let mut sessions = Sessions::start(Limits::default());
    let (agent, coordinator, end) = sessions.open(&Limits::default()).await;
    sessions.server.shutdown.cancel();
    let closed = within("the close", agent.control.closed()).await;
    assert!(matches!(closed, SessionError::Closed { code, .. } if code == u64::from(close_code::SHUTDOWN)));
    drop((coordinator, end));
    within("the server's end", sessions.server.task).await.expect("no panic");
}

#[tokio::test]
async fn a_panic_in_one_session_ends_no_other() {
    let handler = |_peer, _address, mut session: ServerSession| -> futures::future::BoxFuture<'static, ()> {
        Box::pin(async move {
            while let Ok(Some(frame)) = session.frames_in.recv().await {
                assert!(frame != heartbeat(13), "a handler's bug");
                session.frames_out.send(&heartbeat_ack(1)).await.expect("room");
            }
        })
    };
    let server = Running::start(ClientAuth::Required, Limits::default(), None, Some(Arc::new(handler)));
    let dial = async |name: &str| {
        dial_session(server.address, "localhost", server.lab.node_tls(name), &Limits::default()).await
    };
    let (mut lucky, mut unlucky) = (dial("n1").await.expect("one"), dial("n2").await.expect("another"));
    lucky.frames_out.send(&heartbeat(1)).await.expect("room");
    assert!(lucky.frames_in.recv().await.expect("a frame").is_some());
    unlucky.frames_out.send(&heartbeat(13)).await.expect("room");
    within("the end", unlucky.control.closed()).await;
    wait_until("the panic is counted", || server.stats.panics() == 1).await;
    lucky.frames_out.send(&heartbeat(2)).await.expect("room");
    assert!(lucky.frames_in.recv().await.expect("a frame").is_some());
}

#[tokio::test]
async fn a_session_has_one_stream() {
    let mut sessions = Sessions::start(Limits { max_streams: 1, ..Limits::default() });
    let (raw, _send, mut coordinator, _end) = sessions.open_raw(&encode_once(&heartbeat(1))).await;
    assert!(coordinator.frames_in.recv().await.expect("a frame").is_some());
    // What the server allows it has said with the handshake: a stream is there at once or not at all.
    assert!(raw.connection.open_bi().now_or_never().is_none(), "a second stream was allowed");
}

#[tokio::test]
async fn a_peer_that_opens_no_session_is_let_go() {
    let sessions =
        Sessions::start(Limits { handshake_timeout: Duration::from_millis(300), ..Limits::default() });
    let tls = sessions.server.lab.node_tls("n1");
    let raw = sessions.server.raw(LOCAL, ALPN_SESSION, tls).await;
    let closed = within("the close", raw.connection.closed()).await;
    assert!(matches!(closed, quinn::ConnectionError::ApplicationClosed(_)), "{closed}");
}
