//! Requests and responses.

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::{get, post};
use futures::FutureExt as _;
use futures::StreamExt;
use http::{Request, StatusCode};
use mvm_pki::{ClientAuth, Role};
use mvm_proto::{Digest, Problem};
use mvm_transport::{ALPN_H3, Client, Limits, Peer, RequestError};
use parking_lot::Mutex;
use tokio::sync::mpsc;

use crate::support::{Raw, Running, h3_frame, headers_frame, request_head, wait_until, within};

const LOCAL: [u8; 4] = [127, 0, 0, 1];

fn router() -> Router {
    Router::new()
        .route(
            "/who",
            get(|peer: Peer| async move { peer.identity.map_or("nobody".into(), |id| id.to_string()) }),
        )
        .route(
            "/certificate",
            get(|peer: Peer| async move { peer.certificate.map_or("none".into(), |it| it.to_string()) }),
        )
        .route("/echo", post(|body: Bytes| async move { body }))
        .route("/length", post(|body: Bytes| async move { body.len().to_string() }))
        .route("/unread", post(|| async { "did not look" }))
        .route("/panic", get(|| async { panic!("a handler's bug") as String }))
        .route("/never", get(std::future::pending::<String>))
}

fn get_request(path: &str) -> Request<Bytes> {
    Request::get(path).body(Bytes::new()).expect("a request")
}

fn post_request(path: &str, body: impl Into<Bytes>) -> Request<Bytes> {
    Request::post(path).body(body.into()).expect("a request")
}

async fn text(client: &Client, request: Request<Bytes>) -> (StatusCode, String) {
    let response = client.request(request).await.expect("a response");
    let status = response.status();
    let body = response.into_body().bytes(64 << 20).await.expect("a body");
    (status, String::from_utf8_lossy(&body).into_owned())
}

async fn problem(client: &Client, request: Request<Bytes>) -> (StatusCode, String) {
    let response = client.request(request).await.expect("a response");
    let status = response.status();
    assert_eq!(response.headers()["content-type"], "application/problem+json");
    let body = response.into_body().bytes(1 << 20).await.expect("a body");
    (status, serde_json::from_slice::<Problem>(&body).expect("a problem").code)
}

#[tokio::test]
async fn a_handler_sees_which_certificate_its_peer_showed() {
    let server = Running::start(ClientAuth::Optional, Limits::default(), Some(router()), None);
    let credential = server.lab.credential(Role::Node, "n1");
    let fingerprint = Digest::of(&credential.current().chain()[0]).to_string();
    for (credential, expected) in [(Some(&credential), fingerprint.as_str()), (None, "none")] {
        let tls = server.lab.client_tls(credential);
        let client = Client::connect(server.address, "localhost", tls, &Limits::default()).await;
        let client = client.expect("a connection");
        assert_eq!(text(&client, get_request("/certificate")).await, (StatusCode::OK, expected.into()));
    }
}

#[tokio::test]
async fn a_handler_sees_the_identity_of_its_peer() {
    let server = Running::http(Limits::default(), router());
    let client = server.client().await;
    assert_eq!(text(&client, get_request("/who")).await, (StatusCode::OK, "spiffe://lab/node/n1".into()));
    assert_eq!(client.peer().to_string(), "spiffe://lab/coordinator/c1");
}

#[tokio::test]
async fn a_peer_without_a_certificate_has_no_identity_where_none_is_required() {
    let server = Running::start(ClientAuth::Optional, Limits::default(), Some(router()), None);
    let tls = server.lab.client_tls(None);
    let client =
        Client::connect(server.address, "localhost", tls, &Limits::default()).await.expect("a connection");
    assert_eq!(text(&client, get_request("/who")).await.1, "nobody");
}

#[tokio::test]
async fn large_bodies_go_both_ways_whole() {
    let server = Running::http(Limits::default(), router());
    let client = server.client().await;
    let body: Bytes =
        (0..5_000_000_u32).map(|i| i.to_le_bytes()[(i % 3) as usize]).collect::<Vec<_>>().into();
    let response = client.request(post_request("/echo", body.clone())).await.expect("a response");
    let echoed = response.into_body().bytes(body.len()).await.expect("a body");
    assert!(echoed == body, "the body came back changed");
}

#[tokio::test]
async fn requests_on_one_connection_run_side_by_side() {
    let server = Running::http(Limits::default(), router());
    let client = server.client().await;
    let never = client.request(get_request("/never"));
    let other = text(&client, get_request("/who"));
    tokio::select! {
        _ = never => panic!("no answer was to come"),
        (status, _) = other => assert_eq!(status, StatusCode::OK),
    }
}

#[tokio::test]
async fn an_endless_body_arrives_as_it_is_made() {
    let (send, recv) = mpsc::channel::<Bytes>(1);
    let recv = Arc::new(Mutex::new(Some(recv)));
    let stream = move || {
        let recv = recv.lock().take().expect("one request");
        let pieces = futures::stream::unfold(recv, |mut recv| async {
            let piece = recv.recv().await?;
            Some((Ok::<_, std::io::Error>(piece), recv))
        });
        std::future::ready(Body::from_stream(pieces))
    };
    let server = Running::http(Limits::default(), Router::new().route("/watch", get(stream)));
    let client = server.client().await;
    let mut body = client.request(get_request("/watch")).await.expect("a response").into_body();
    for piece in ["one", "two", "three"] {
        send.send(Bytes::from(piece)).await.expect("a reader");
        assert_eq!(within("a piece", body.chunk()).await.expect("a body"), Some(Bytes::from(piece)));
    }
    // The body outlives the client that asked for it.
    drop(client);
    send.send(Bytes::from("four")).await.expect("a reader");
    assert_eq!(within("a piece", body.chunk()).await.expect("a body"), Some(Bytes::from("four")));
    // And its reader's leaving is noticed at the next piece.
    drop(body);
    wait_until("the sender is told", || {
        let _full_or_gone = send.try_send(Bytes::from("more"));
        send.is_closed()
    })
    .await;
}

#[tokio::test]
async fn a_body_above_the_limit_is_answered_with_413() {
    let limits = Limits { max_body_bytes: 10_000, ..Limits::default() };
    let server = Running::http(limits, router());
    let client = server.client().await;
    let fits = text(&client, post_request("/length", vec![0; 10_000])).await;
    assert_eq!(fits, (StatusCode::OK, "10000".into()));
    let expected = (StatusCode::PAYLOAD_TOO_LARGE, "body_too_large".to_owned());
    assert_eq!(problem(&client, post_request("/length", vec![0; 10_001])).await, expected);
    let mut announced = post_request("/length", vec![0; 1_000_000]);
    announced.headers_mut().insert("content-length", "1000000".parse().expect("a value"));
    assert_eq!(problem(&client, announced).await, expected);
    assert_eq!(problem(&client, post_request("/length", vec![0; 10 << 20])).await, expected, "10 MiB");
}

#[tokio::test]
async fn an_unread_body_does_not_spoil_the_answer() {
    let server = Running::http(Limits::default(), router());
    let client = server.client().await;
    for _ in 0..40 {
        assert_eq!(text(&client, post_request("/unread", vec![0; 1 << 20])).await.1, "did not look");
    }
}

#[tokio::test]
async fn a_panic_in_a_handler_is_a_500_and_the_connection_goes_on() {
    let server = Running::http(Limits::default(), router());
    let client = server.client().await;
    let expected = (StatusCode::INTERNAL_SERVER_ERROR, "internal_error".to_owned());
    assert_eq!(problem(&client, get_request("/panic")).await, expected);
    assert_eq!(text(&client, get_request("/who")).await.0, StatusCode::OK);
    assert_eq!(server.stats.panics(), 1);
}

#[tokio::test]
async fn a_client_does_not_wait_for_ever() {
    let server = Running::http(Limits::default(), router());
    let limits = Limits { request_timeout: Duration::from_millis(100), ..Limits::default() };
    let client = server.client_with(&limits).await;
    let error = client.request(get_request("/never")).await.expect_err("no answer");
    assert!(matches!(error, RequestError::TimedOut { .. }), "{error}");
}

#[tokio::test]
async fn a_client_refuses_an_answer_above_its_limit() {
    let server = Running::http(Limits::default(), router());
    let client = server.client().await;
    let response = client.request(post_request("/echo", vec![0; 1000])).await.expect("a response");
    let error = response.into_body().bytes(999).await.expect_err("too large");
    assert!(matches!(error, RequestError::TooLarge { limit: 999 }), "{error}");
}

async fn raw(server: &Running) -> Raw {
    server.raw(LOCAL, ALPN_H3, server.lab.node_tls("n1")).await
}

#[tokio::test]
async fn headers_above_the_limit_are_answered_with_431() {
    let limits = Limits { max_header_bytes: 1024, ..Limits::default() };
    let server = Running::http(limits, router());
    let raw = raw(&server).await;
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    let head = request_head("GET", "/who", &[("x-large", &"x".repeat(1500))]);
    send.write_all(&head).await.expect("room");
    send.finish().expect("an open stream");
    let answer = within("an answer", recv.read_to_end(10_000)).await.expect("an answer");
    // QPACK's table has no entry for 431, so it travels in digits, plain or Huffman-coded.
    let says_431 = answer.windows(3).any(|digits| digits == b"431" || digits == [0x69, 0x90, 0xff]);
    assert!(says_431, "{answer:?}");
    assert_eq!(server.stats.requests(), 0);
    assert_eq!(server.stats.requests_refused(), 1);
}

#[tokio::test]
async fn a_header_section_of_a_gigabyte_is_cut_off_at_its_length() {
    let server = Running::http(Limits::default(), router());
    let raw = raw(&server).await;
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    // HEADERS, then a length of 2^30 - 1.
    send.write_all(&[1, 0xbf, 0xff, 0xff, 0xff, 0, 0]).await.expect("room");
    let stopped = within("the stop", send.stopped()).await.expect("a connection");
    assert!(stopped.is_some(), "the server reads on");
    assert!(within("the reset", recv.read_to_end(100)).await.is_err(), "an answer to nothing");
    // The connection itself is none the worse.
    assert!(answers(&raw).await);
}

async fn answers(raw: &Raw) -> bool {
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&request_head("GET", "/who", &[])).await.expect("room");
    send.finish().expect("an open stream");
    let answer = within("an answer", recv.read_to_end(10_000)).await.expect("an answer");
    answer.windows(6).any(|window| window == b"spiffe")
}

#[tokio::test]
async fn a_settings_frame_without_end_closes_the_connection() {
    let server = Running::http(Limits::default(), router());
    let raw = raw(&server).await;
    let mut control = raw.connection.open_uni().await.expect("a stream");
    // A control stream that begins with SETTINGS of 2^30 - 1 bytes.
    control.write_all(&[0, 4, 0xbf, 0xff, 0xff, 0xff]).await.expect("room");
    within("the close", raw.connection.closed()).await;
}

#[tokio::test]
async fn a_head_that_does_not_arrive_in_time_is_given_up() {
    let limits = Limits { request_timeout: Duration::from_millis(200), ..Limits::default() };
    let server = Running::http(limits, router());
    let raw = raw(&server).await;
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&request_head("GET", "/who", &[])[..5]).await.expect("room");
    assert!(within("the reset", recv.read_to_end(100)).await.is_err(), "an answer to half a head");
    assert_eq!(server.stats.requests_refused(), 1);
    assert!(answers(&raw).await);
}

#[tokio::test]
async fn a_body_that_trickles_is_answered_with_408() {
    let limits = Limits { request_timeout: Duration::from_millis(300), ..Limits::default() };
    let server = Running::http(limits, router());
    let raw = raw(&server).await;
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&request_head("POST", "/length", &[])).await.expect("room");
    let mut drip = tokio::time::interval(Duration::from_millis(20));
    let trickle = async {
        while send.write_all(&h3_frame(0, b"x")).await.is_ok() {
            drip.tick().await;
        }
    };
    let (answer, ()) = within("an answer", async { tokio::join!(recv.read_to_end(10_000), trickle) }).await;
    let answer = String::from_utf8_lossy(&answer.expect("an answer")).into_owned();
    assert!(answer.contains("request_too_slow"), "{answer}");
}

#[tokio::test]
async fn an_unread_answer_is_given_up() {
    let limits = Limits { request_timeout: Duration::from_millis(200), ..Limits::default() };
    let endless = || async {
        Body::from_stream(futures::stream::repeat(Bytes::from(vec![7; 50_000])).map(Ok::<_, std::io::Error>))
    };
    let server = Running::http(limits, Router::new().route("/endless", get(endless)));
    let raw = raw(&server).await;
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&request_head("GET", "/endless", &[])).await.expect("room");
    let reset = within("the reset", recv.received_reset()).await.expect("a connection");
    assert!(reset.is_some());
}

#[tokio::test]
async fn a_malformed_request_is_reset_and_the_connection_goes_on() {
    let server = Running::http(Limits::default(), router());
    let raw = raw(&server).await;
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&headers_frame(&[(":method", "GET"), ("UPPER", "case")])).await.expect("room");
    send.finish().expect("an open stream");
    assert!(within("the reset", recv.read_to_end(100)).await.is_err());
    assert!(answers(&raw).await);
}

#[tokio::test]
async fn a_connection_has_no_more_streams_than_allowed() {
    let limits = Limits { max_streams: 3, ..Limits::default() };
    let server = Running::http(limits, router());
    let raw = raw(&server).await;
    let mut held = Vec::new();
    for _ in 0..3 {
        let (mut send, recv) = raw.connection.open_bi().await.expect("a stream");
        send.write_all(&request_head("GET", "/never", &[])).await.expect("room");
        held.push((send, recv));
    }
    wait_until("all have arrived", || server.stats.requests() == 3).await;
    // What the server allows it has said with the handshake: a stream is there at once or not at all.
    assert!(raw.connection.open_bi().now_or_never().is_none(), "a fourth stream was allowed");
    let mut uni = Vec::new();
    while let Some(stream) = raw.connection.open_uni().now_or_never() {
        uni.push(stream.expect("a stream"));
    }
    assert_eq!(uni.len(), 4);
}

#[tokio::test]
async fn shutdown_finishes_what_is_in_flight_and_begins_nothing() {
    let (release, released) = tokio::sync::oneshot::channel::<()>();
    let released = Arc::new(Mutex::new(Some(released)));
    let slow = move || {
        let released = released.lock().take().expect("one request");
        async move {
            released.await.expect("a release");
            "finished"
        }
    };
    let server = Running::http(Limits::default(), Router::new().route("/slow", get(slow)));
    let client = server.client().await;
    let asking = text(&client, get_request("/slow"));
    let stopping = async {
        wait_until("the request has begun", || server.stats.requests() == 1).await;
        server.shutdown.cancel();
        let tls = server.lab.node_tls("n2");
        let limits = Limits { handshake_timeout: Duration::from_secs(1), ..Limits::default() };
        let refused = Client::connect(server.address, "localhost", tls, &limits).await;
        assert!(refused.is_err(), "a new connection was taken");
        release.send(()).expect("a handler");
    };
    let both = Box::pin(async { tokio::join!(asking, stopping) });
    let (answer, ()) = within("the answer", both).await;
    assert_eq!(answer.1, "finished");
    within("the end", server.task).await.expect("no panic");
    assert!(client.request(get_request("/slow")).await.is_err());
}

#[tokio::test]
async fn shutdown_does_not_wait_for_ever_for_a_request() {
    let limits = Limits { drain_timeout: Duration::from_millis(200), ..Limits::default() };
    let server = Running::http(limits, router());
    let client = server.client().await;
    let asking = client.request(get_request("/never"));
    let stopping = async {
        wait_until("the request has begun", || server.stats.requests() == 1).await;
        server.shutdown.cancel();
    };
    let (answer, ()) = within("the end", async { tokio::join!(asking, stopping) }).await;
    assert!(answer.is_err());
    within("the end", server.task).await.expect("no panic");
}

#[tokio::test]
async fn a_renewed_certificate_is_used_by_the_next_connection() {
    let server = Running::http(Limits::default(), router());
    let credential = server.lab.credential(Role::Node, "n1");
    let tls = server.lab.client_tls(Some(&credential));
    let before =
        Client::connect(server.address, "localhost", tls.clone(), &Limits::default()).await.expect("one");
    let next = server.lab.credential(Role::Node, "n1");
    let pem = next.current().to_pem();
    credential.swap(mvm_pki::Credential::from_pem(&pem).expect("a credential"));
    let after = Client::connect(server.address, "localhost", tls, &Limits::default()).await.expect("another");
    for client in [before, after] {
        assert_eq!(text(&client, get_request("/who")).await.0, StatusCode::OK);
        client.close().await;
    }
}
