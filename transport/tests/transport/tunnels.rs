//! Tunnels: streams both ways, a writer that waits for its reader, and ends that end one stream alone.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use mvm_pki::{ClientAuth, ExpectedPeer, Identity, Role, tls};
use mvm_proto::wire::frames::MAX_TUNNEL_FRAME_BYTES;
use mvm_proto::wire::tunnel::v1::{Frame, Hello, Input, frame};
use mvm_transport::{
    ALPN_TUNNEL, ConnectError, Limits, Server, SessionError, Tunnel, close_code, dial_tunnel, tunnel_limits,
};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::support::{Lab, wait_until, within};

/// One end of a tunnel on each side.
struct Pair {
    lab: Lab,
    agent: Tunnel,
    coordinator: Tunnel,
    shutdown: CancellationToken,
}

fn client_tls(lab: &Lab, role: Role) -> rustls::ClientConfig {
    let expected =
        ExpectedPeer { cluster: lab.cluster.clone(), role: Role::Coordinator, name: None, check_host: true };
    let credential = lab.credential(role, "n1");
    tls::client_config(Some(&credential), &lab.anchors(), expected, &[ALPN_TUNNEL]).expect("TLS")
}

async fn pair() -> Pair {
    let lab = Lab::new();
    let credential = lab.credential(Role::Coordinator, "c1");
    let tls =
        tls::server_config(&credential, &lab.anchors(), &lab.cluster, ClientAuth::Required, &[ALPN_TUNNEL])
            .expect("TLS");
    let limits = tunnel_limits(&Limits::default());
    let listen = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let (accepted, mut tunnels) = mpsc::channel(4);
    let handler = move |peer: Identity, tunnel: Tunnel| -> futures::future::BoxFuture<'static, ()> {
        assert_eq!(peer.role(), Role::Node);
        let accepted = accepted.clone();
        Box::pin(async move {
            accepted.send(tunnel.clone()).await.expect("the test listens");
            tunnel.closed().await;
        })
    };
    let server = Server::bind(listen, tls, limits.clone()).expect("a server").with_tunnels(Arc::new(handler));
    let (address, shutdown) = (server.local_addr(), CancellationToken::new());
    tokio::spawn(server.serve(None, None, shutdown.clone()));
    let dialled = dial_tunnel(address, "localhost", client_tls(&lab, Role::Node), &limits).await;
    let (agent, peer) = dialled.expect("a tunnel");
    assert_eq!(peer.role(), Role::Coordinator);
    let coordinator = within("the tunnel", tunnels.recv()).await.expect("a tunnel");
    Pair { lab, agent, coordinator, shutdown }
}

fn input(bytes: usize) -> Frame {
    let data = Bytes::from(vec![7; bytes]);
    Frame { body: Some(frame::Body::Input(Input { data, ..Input::default() })) }
}

#[tokio::test]
async fn either_side_opens_streams_as_far_as_the_other_lets_it() {
    let pair = pair().await;
    let mut hello = pair.agent.open::<Frame>().await.expect("a stream");
    let frame = Frame { body: Some(frame::Body::Hello(Hello { ticket: "t".into(), kinds: Vec::new() })) };
    hello.frames_out.send(&frame).await.expect("sent");
    let mut heard = within("the hello", pair.coordinator.accept::<Frame>()).await.expect("a stream");
    assert_eq!(within("the hello", heard.frames_in.recv()).await.expect("a frame"), Some(frame));

    // The agent may open no second one, and the coordinator none before it is let.
    let mut second = Box::pin(pair.agent.open::<Frame>());
    let mut first = Box::pin(pair.coordinator.open::<Frame>());
    assert!(futures::poll!(&mut second).is_pending() && futures::poll!(&mut first).is_pending());
    pair.agent.let_open(1);
    let mut opened = within("a stream", first).await.expect("a stream");
    opened.frames_out.send(&input(3)).await.expect("sent");
    let mut accepted = within("a stream", pair.agent.accept::<Frame>()).await.expect("a stream");
    assert_eq!(within("a frame", accepted.frames_in.recv()).await.expect("a frame"), Some(input(3)));
    accepted.frames_out.finish();
    assert_eq!(within("the end", opened.frames_in.recv()).await.expect("an end"), None);
    assert!(futures::poll!(&mut second).is_pending());
}

#[tokio::test]
async fn a_reader_that_stops_holds_up_its_own_stream_and_no_other() {
    let pair = pair().await;
    pair.agent.let_open(2);
    let mut stuck = pair.coordinator.open::<Frame>().await.expect("a stream");
    // More than any window: only a reader would let it through.
    let flooding = tokio::spawn(async move {
        for _ in 0..1000 {
            stuck.frames_out.send(&input(MAX_TUNNEL_FRAME_BYTES / 2)).await?;
        }
        Ok::<_, SessionError>(())
    });
    let unread = within("a stream", pair.agent.accept::<Frame>()).await.expect("a stream");
    let mut other = pair.coordinator.open::<Frame>().await.expect("a stream");
    for _ in 0..100 {
        other.frames_out.send(&input(1000)).await.expect("sent");
    }
    other.frames_out.finish();
    let mut read = within("a stream", pair.agent.accept::<Frame>()).await.expect("a stream");
    for _ in 0..100 {
        assert_eq!(within("a frame", read.frames_in.recv()).await.expect("a frame"), Some(input(1000)));
    }
    assert!(!flooding.is_finished(), "nothing took it");
    drop(unread);
    assert!(matches!(within("its end", flooding).await.expect("no panic"), Err(SessionError::Reset { .. })));
    assert!(!pair.agent.is_closed());
}

#[tokio::test]
async fn a_stream_that_breaks_a_rule_or_off_ends_alone() {
    let pair = pair().await;
    pair.agent.let_open(3);
    let mut long = pair.coordinator.open::<Frame>().await.expect("a stream");
    let refused = long.frames_out.send(&input(MAX_TUNNEL_FRAME_BYTES + 1)).await;
    assert!(matches!(refused, Err(SessionError::FrameTooLarge { .. })), "{refused:?}");
    // Bytes that are no frame of any kind.
    let prefix = Bytes::from_static(&[0, 0, 0, 2, 0xff, 0xff]);
    long.frames_out.send_encoded(prefix).await.expect("sent");
    let mut heard = within("a stream", pair.agent.accept::<Frame>()).await.expect("a stream");
    let malformed = within("a frame", heard.frames_in.recv()).await;
    assert!(matches!(malformed, Err(SessionError::Malformed(_))), "{malformed:?}");

    let mut cut = pair.coordinator.open::<Frame>().await.expect("a stream");
    cut.frames_out.send(&input(1)).await.expect("sent");
    drop(cut);
    let mut heard = within("a stream", pair.agent.accept::<Frame>()).await.expect("a stream");
    let mut last = within("a frame", heard.frames_in.recv()).await;
    if matches!(last, Ok(Some(_))) {
        last = within("an end", heard.frames_in.recv()).await;
    }
    assert!(matches!(last, Err(SessionError::Reset { .. })), "not taken for an end: {last:?}");

    let mut fine = pair.coordinator.open::<Frame>().await.expect("a stream");
    fine.frames_out.send(&input(1)).await.expect("sent");
    let mut heard = within("a stream", pair.agent.accept::<Frame>()).await.expect("a stream");
    assert_eq!(within("a frame", heard.frames_in.recv()).await.expect("a frame"), Some(input(1)));
}

#[tokio::test]
async fn a_tunnel_that_is_closed_ends_its_streams_and_says_why() {
    let pair = pair().await;
    pair.agent.let_open(1);
    let mut stream = pair.coordinator.open::<Frame>().await.expect("a stream");
    stream.frames_out.send(&input(1)).await.expect("sent");
    pair.coordinator.close(close_code::REMOVED, "removed");
    let reason = within("the end", pair.agent.closed()).await;
    assert!(matches!(&reason, SessionError::Closed { code, .. } if *code == u64::from(close_code::REMOVED)));
    assert!(stream.frames_in.recv().await.is_err());
    pair.shutdown.cancel();
}

#[tokio::test]
async fn an_endpoint_that_serves_no_tunnels_refuses_them_and_lets_go_at_shutdown() {
    let running = crate::support::Running::start(
        ClientAuth::Required,
        Limits::default(),
        Some(axum::Router::new()),
        None,
    );
    let tls = client_tls(&running.lab, Role::Node);
    let refused = dial_tunnel(running.address, "localhost", tls, &Limits::default()).await;
    assert!(matches!(refused, Err(ConnectError::NoCommonProtocol { .. })), "{refused:?}");

    let pair = pair().await;
    pair.shutdown.cancel();
    let reason = within("the end", pair.agent.closed()).await;
    assert!(matches!(&reason, SessionError::Closed { code, .. } if *code == u64::from(close_code::SHUTDOWN)));
    wait_until("the other end is closed too", || pair.coordinator.is_closed()).await;
    let _ = (pair.lab, Duration::ZERO);
}
