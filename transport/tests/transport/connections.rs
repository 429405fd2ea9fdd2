//! Limits on connections, address validation, and what QUIC could do but must not.

use std::net::UdpSocket;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use bytes::Bytes;
use http::{Request, StatusCode};
use mvm_pki::ClientAuth;
use mvm_transport::{ALPN_H3, ALPN_SESSION, Client, ConnectError, Limits, ServerSession, SessionError};
use rustls::NamedGroup;
use rustls::client::Tls13ClientSessionValue;
use rustls::client::{ClientSessionMemoryCache, ClientSessionStore, Resumption, Tls12ClientSessionValue};
use rustls_pki_types::ServerName;
use tokio::sync::mpsc;

use crate::support::{Raw, Running, raw_config, raw_endpoint, request_head, wait_until, within};

const HERE: [u8; 4] = [127, 0, 0, 1];
const THERE: [u8; 4] = [127, 0, 0, 2];

fn router() -> Router {
    Router::new().route("/", get(|| async { "ok" })).route("/never", get(std::future::pending::<()>))
}

/// Connections that showed no certificate, from each of the addresses 127.0.`third`.1 and up.
async fn strangers(server: &Running, third: u8, addresses: u8, each: usize) -> Vec<Raw> {
    let mut held = Vec::new();
    for last in 1..=addresses {
        for _ in 0..each {
            let tls = server.lab.client_tls(None);
            // One that is refused holds nothing, which is for the test to find out.
            held.extend(Raw::connect(server.address, [127, 0, third, last], ALPN_H3, tls).await);
        }
    }
    held
}

/// Asks for something that is never answered.
async fn hang(raw: &Raw) -> quinn::SendStream {
    let (mut send, _recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&request_head("GET", "/never", &[])).await.expect("room");
    send
}

async fn ask(client: &Client) -> StatusCode {
    let request = Request::get("/").body(Bytes::new()).expect("a request");
    client.request(request).await.expect("an answer").status()
}

/// Whether a bare connection from `local` is let in and gets an answer.
async fn served(server: &Running, local: [u8; 4], name: &str) -> bool {
    let Ok(raw) = Raw::connect(server.address, local, ALPN_H3, server.lab.node_tls(name)).await else {
        return false;
    };
    let Ok((mut send, mut recv)) = raw.connection.open_bi().await else { return false };
    if send.write_all(&request_head("GET", "/", &[])).await.is_err() || send.finish().is_err() {
        return false;
    }
    within("an answer", recv.read_to_end(10_000)).await.is_ok_and(|answer| answer.ends_with(b"ok"))
}

#[tokio::test]
async fn connections_above_the_limit_are_refused_until_one_ends() {
    let server = Running::http(Limits { max_connections: 2, ..Limits::default() }, router());
    let (first, _second) = (server.client().await, server.client().await);
    let tls = server.lab.node_tls("n2");
    let third = Client::connect(server.address, "localhost", tls, &Limits::default()).await;
    let error = third.expect_err("a third connection");
    assert!(matches!(error, ConnectError::Busy { .. }), "{error}");
    assert_eq!(server.stats.refused_total(), 1);
    first.close().await;
    wait_until("the first has gone", || server.stats.connections_open() == 1).await;
    assert_eq!(ask(&server.client().await).await, StatusCode::OK);
}

#[tokio::test]
async fn one_address_can_not_take_every_connection() {
    let server = Running::http(Limits { max_connections_per_ip: 2, ..Limits::default() }, router());
    let _held = [server.client().await, server.client().await];
    assert!(!served(&server, HERE, "n2").await, "a third from one address");
    assert_eq!(server.stats.refused_per_ip(), 1);
    assert!(served(&server, THERE, "n2").await, "the first from another");
}

#[tokio::test]
async fn strangers_at_one_address_are_few_and_do_not_shut_out_a_node_there() {
    let limits = Limits { max_anonymous_per_ip: 2, ..Limits::default() };
    let server = Running::start(ClientAuth::Optional, limits, Some(router()), None);
    let held = strangers(&server, 0, 1, 2).await;
    let _requests = [hang(&held[0]).await, hang(&held[1]).await];
    wait_until("both ask", || server.stats.requests() == 2).await;
    let third = strangers(&server, 0, 1, 1).await;
    if let Some(third) = third.first() {
        within("the close", third.connection.closed()).await;
    }
    assert_eq!(server.stats.refused_anonymous(), 1);
    assert!(served(&server, HERE, "n1").await, "a node at the same address");
}

#[tokio::test]
async fn strangers_at_many_addresses_do_not_shut_out_nodes() {
    let limits = Limits { max_connections: 32, ..Limits::default() };
    let server = Running::start(ClientAuth::Optional, limits, Some(router()), None);
    let _held = strangers(&server, 2, 16, 6).await;
    for name in ["n1", "n2", "n3"] {
        assert!(served(&server, HERE, name).await, "{name} among strangers");
    }
}

#[tokio::test]
async fn strangers_are_few_in_all_and_the_address_with_most_of_them_makes_room() {
    let limits = Limits { max_anonymous: 6, ..Limits::default() };
    let server = Running::start(ClientAuth::Optional, limits, Some(router()), None);
    let many = strangers(&server, 3, 1, 6).await;
    let _requests = [hang(&many[0]).await, hang(&many[1]).await];
    wait_until("both ask", || server.stats.requests() == 2).await;
    // One address more, and each takes one slot of the first one's.
    let others = strangers(&server, 4, 3, 1).await;
    for evicted in &many[2..5] {
        within("its end", evicted.connection.closed()).await;
    }
    assert_eq!(server.stats.connections_displaced(), 3);
    wait_until("they have gone", || server.stats.connections_open() == 6).await;
    let lasting: Vec<_> =
        others.iter().chain(&many).filter(|raw| raw.connection.close_reason().is_none()).collect();
    assert_eq!(lasting.len(), 6);
}

#[tokio::test]
async fn a_connection_without_a_certificate_is_closed_at_the_end_of_its_life() {
    let limits = Limits { anonymous_life: Duration::from_millis(300), ..Limits::default() };
    let server = Running::start(ClientAuth::Optional, limits, Some(router()), None);
    let node = server.client().await;
    let held = strangers(&server, 0, 1, 1).await;
    let _request = hang(&held[0]).await;
    within("its end", held[0].connection.closed()).await;
    wait_until("its slot is free", || server.stats.connections_open() == 1).await;
    assert_eq!(server.stats.anonymous_expired(), 1);
    assert_eq!(ask(&node).await, StatusCode::OK, "a node's connection lasts");
}

#[tokio::test]
async fn the_newest_connection_of_an_identity_takes_the_place_of_its_longest_idle() {
    let server = Running::http(Limits { max_connections_per_identity: 3, ..Limits::default() }, router());
    let held = [server.client().await, server.client().await, server.client().await];
    // The first is the longest idle but for its request, the second idle for less time than the third.
    let request = Request::get("/never").body(Bytes::new()).expect("a request");
    let asking = tokio::spawn(async move {
        let [busy, recent, idle] = held;
        let hanging = busy.request(request);
        let rest = async {
            wait_until("it asks", || server.stats.requests() == 1).await;
            assert_eq!(ask(&recent).await, StatusCode::OK);
            for _ in 0..20 {
                assert!(served(&server, HERE, "n1").await, "one after another, none of them closed");
            }
            wait_until("it was closed", || idle.is_closed()).await;
            assert!(!busy.is_closed(), "a request is under way");
            assert_eq!(server.stats.refused_per_identity(), 0);
        };
        tokio::select! {
            answer = hanging => panic!("no answer was to come: {answer:?}"),
            () = rest => {}
        }
    });
    within("all of it", asking).await.expect("no panic");
}

#[tokio::test]
async fn an_identity_whose_connections_all_have_requests_gets_no_more() {
    let server = Running::http(Limits { max_connections_per_identity: 2, ..Limits::default() }, router());
    let raw = async || server.raw(HERE, ALPN_H3, server.lab.node_tls("n1")).await;
    let held = [raw().await, raw().await];
    let _requests = [hang(&held[0]).await, hang(&held[1]).await];
    wait_until("both ask", || server.stats.requests() == 2).await;
    assert!(!served(&server, HERE, "n1").await, "a third of one identity");
    assert_eq!(server.stats.refused_per_identity(), 1);
    assert!(served(&server, HERE, "n2").await, "another identity");
}

#[tokio::test]
async fn a_flood_of_full_handshakes_leaves_room_for_others() {
    let limits = Limits { max_connections_per_ip: 32, max_handshakes_per_ip: 8, ..Limits::default() };
    let server = Running::http(limits, router());
    let tls = server.lab.node_tls("n1");
    let endpoint = raw_endpoint(HERE);
    let flood: Vec<_> = (0..300)
        .map(|_| endpoint.connect_with(raw_config(ALPN_H3, tls.clone()), server.address, "localhost"))
        .map(|connecting| tokio::spawn(connecting.expect("dialling").into_future()))
        .collect();
    wait_until("the flood is felt", || server.stats.handshakes_ignored() > 0).await;
    assert!(served(&server, THERE, "n2").await, "another address during the flood");
    assert!(server.stats.connections_open() <= 33 + 1, "{:?}", server.stats.all());
    endpoint.close(0_u32.into(), b"enough");
    for attempt in flood {
        attempt.abort();
    }
    wait_until("the flood has gone", || server.stats.connections_open() == 0).await;
    assert_eq!(ask(&server.client().await).await, StatusCode::OK);
}

#[tokio::test]
async fn an_address_is_validated_before_any_handshake_when_asked_for() {
    let server = Running::http(Limits { retry_above: 0, ..Limits::default() }, router());
    assert_eq!(ask(&server.client().await).await, StatusCode::OK);
    assert_eq!(server.stats.retries_sent(), 1);
}

#[tokio::test]
async fn an_address_is_not_validated_while_few_handshakes_are_open() {
    let server = Running::http(Limits::default(), router());
    assert_eq!(ask(&server.client().await).await, StatusCode::OK);
    assert_eq!(server.stats.retries_sent(), 0);
}

/// A session store that tells whether it was ever given a ticket.
#[derive(Debug)]
struct TicketWatch {
    inner: ClientSessionMemoryCache,
    got_ticket: AtomicBool,
}

impl ClientSessionStore for TicketWatch {
    fn set_kx_hint(&self, server: ServerName<'static>, group: NamedGroup) {
        self.inner.set_kx_hint(server, group);
    }
    fn kx_hint(&self, server: &ServerName<'_>) -> Option<NamedGroup> {
        self.inner.kx_hint(server)
    }
    fn set_tls12_session(&self, _: ServerName<'static>, _: Tls12ClientSessionValue) {}
    fn tls12_session(&self, _: &ServerName<'_>) -> Option<Tls12ClientSessionValue> {
        None
    }
    fn remove_tls12_session(&self, _: &ServerName<'static>) {}
    fn insert_tls13_ticket(&self, server: ServerName<'static>, value: Tls13ClientSessionValue) {
        self.got_ticket.store(true, Ordering::SeqCst);
        self.inner.insert_tls13_ticket(server, value);
    }
    fn take_tls13_ticket(&self, server: &ServerName<'static>) -> Option<Tls13ClientSessionValue> {
        self.inner.take_tls13_ticket(server)
    }
}

#[tokio::test]
async fn no_ticket_is_given_and_no_data_can_come_before_the_handshake() {
    let server = Running::http(Limits::default(), router());
    let watch =
        Arc::new(TicketWatch { inner: ClientSessionMemoryCache::new(8), got_ticket: AtomicBool::new(false) });
    // A client that would resume and send early data if it were let.
    let mut tls = server.lab.node_tls("n1");
    tls.resumption = Resumption::store(Arc::clone(&watch) as Arc<dyn ClientSessionStore>);
    tls.enable_early_data = true;
    let endpoint = raw_endpoint(HERE);
    for _ in 0..2 {
        let config = raw_config(ALPN_H3, tls.clone());
        let connecting = endpoint.connect_with(config, server.address, "localhost").expect("dialling");
        let Err(connecting) = connecting.into_0rtt() else { panic!("0-RTT is possible") };
        let connection = connecting.await.expect("a connection");
        let (mut send, mut recv) = connection.open_bi().await.expect("a stream");
        send.write_all(&request_head("GET", "/", &[])).await.expect("room");
        send.finish().expect("an open stream");
        within("an answer", recv.read_to_end(10_000)).await.expect("an answer");
    }
    assert!(!watch.got_ticket.load(Ordering::SeqCst), "a ticket was given");
}

#[tokio::test]
async fn a_session_does_not_follow_its_peer_to_another_address() {
    let (send, mut opened) = mpsc::unbounded_channel::<ServerSession>();
    let handler = move |_peer, _address, session| -> futures::future::BoxFuture<'static, ()> {
        let send = send.clone();
        Box::pin(async move {
            send.send(session).ok();
            std::future::pending::<()>().await;
        })
    };
    let limits = Limits { idle_timeout: Duration::from_secs(2), ..Limits::default() };
    let server = Running::start(ClientAuth::Required, limits, None, Some(Arc::new(handler)));
    let raw = server.raw(HERE, ALPN_SESSION, server.lab.node_tls("n1")).await;
    let (mut stream, _recv) = raw.connection.open_bi().await.expect("a stream");
    stream.write_all(&[0, 0, 0, 0]).await.expect("room");
    let mut session = within("the session", opened.recv()).await.expect("a session");
    assert!(session.frames_in.recv().await.expect("a frame").is_some());
    let before = session.control.remote_address();

    raw.endpoint.rebind(UdpSocket::bind("127.0.0.1:0").expect("a socket")).expect("a new address");
    stream.write_all(&[0, 0, 0, 0]).await.expect("room");
    let received = within("the end", session.frames_in.recv()).await;
    assert!(matches!(received, Err(SessionError::TimedOut)), "a frame came from elsewhere: {received:?}");
    assert_eq!(session.control.remote_address(), before);
}
