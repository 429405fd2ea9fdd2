//! Requests that HTTP/3 calls malformed: each is refused, and the connection goes on.

use axum::Router;
use axum::routing::{get, post};
use bytes::{Bytes, BytesMut};
use mvm_transport::{ALPN_H3, Limits};

use crate::support::{Raw, Running, h3_frame, headers_frame, request_head, within};

/// RFC 9114, section 8.1.
const H3_MESSAGE_ERROR: u32 = 0x10e;
/// RFC 9204, section 6.
const QPACK_DECOMPRESSION_FAILED: u32 = 0x200;

const METHOD: (&str, &str) = (":method", "GET");
const SCHEME: (&str, &str) = (":scheme", "https");
const AUTHORITY: (&str, &str) = (":authority", "localhost");
const PATH: (&str, &str) = (":path", "/");
const FIELD: (&str, &str) = ("x-a", "b");

fn server() -> Running {
    let router = Router::new()
        .route("/", get(|| async { "served" }))
        .route("/length", post(|body: Bytes| async move { format!("served {}", body.len()) }));
    Running::http(Limits::default(), router)
}

#[derive(Debug, PartialEq, Eq)]
enum Outcome {
    Served,
    /// Answered with a problem of this code.
    Refused(&'static str),
    /// The stream was reset with this code.
    Reset(u32),
}

async fn outcome(raw: &Raw, stream: &[u8]) -> Outcome {
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    // The server may stop what it does not want to hear.
    let _stopped = send.write_all(stream).await;
    let _stopped = send.finish();
    match within("an answer", recv.read_to_end(10_000)).await {
        Ok(answer) => {
            let answer = String::from_utf8_lossy(&answer).into_owned();
            let codes = ["malformed_request", "body_too_large"];
            match codes.into_iter().find(|code| answer.contains(code)) {
                Some(code) => Outcome::Refused(code),
                None if answer.contains("served") => Outcome::Served,
                None => panic!("an odd answer: {answer}"),
            }
        }
        Err(quinn::ReadToEndError::Read(quinn::ReadError::Reset(code))) => {
            Outcome::Reset(u32::try_from(code.into_inner()).expect("a small code"))
        }
        Err(error) => panic!("neither an answer nor a reset: {error}"),
    }
}

async fn connect(server: &Running) -> Raw {
    server.raw([127, 0, 0, 1], ALPN_H3, server.lab.node_tls("n1")).await
}

#[tokio::test]
async fn malformed_heads_are_reset() {
    let server = server();
    let raw = connect(&server).await;
    let cases: &[(&str, &[(&str, &str)])] = &[
        (":method twice", &[METHOD, METHOD, SCHEME, AUTHORITY, PATH]),
        (":path twice, differing", &[METHOD, SCHEME, AUTHORITY, (":path", "/length"), PATH]),
        (":authority twice", &[METHOD, SCHEME, AUTHORITY, AUTHORITY, PATH]),
        (":scheme twice", &[METHOD, SCHEME, SCHEME, AUTHORITY, PATH]),
        ("a late :path", &[METHOD, SCHEME, AUTHORITY, FIELD, PATH]),
        ("a late :authority", &[METHOD, SCHEME, PATH, FIELD, AUTHORITY]),
        (":status", &[METHOD, SCHEME, AUTHORITY, PATH, (":status", "200")]),
        (":protocol", &[METHOD, SCHEME, AUTHORITY, PATH, (":protocol", "websocket")]),
        ("an unknown one", &[METHOD, SCHEME, AUTHORITY, PATH, (":x", "y")]),
        ("no :method", &[SCHEME, AUTHORITY, PATH]),
        ("no :scheme", &[METHOD, AUTHORITY, PATH]),
        ("no :path", &[METHOD, SCHEME, AUTHORITY]),
        ("neither :scheme nor :path", &[METHOD, AUTHORITY]),
        ("a fragment", &[METHOD, SCHEME, AUTHORITY, (":path", "/#x")]),
        ("a path that is none", &[METHOD, SCHEME, AUTHORITY, (":path", "x")]),
        ("an empty path", &[METHOD, SCHEME, AUTHORITY, (":path", "")]),
        ("a space in the path", &[METHOD, SCHEME, AUTHORITY, (":path", "/ x")]),
        ("no authority", &[METHOD, SCHEME, PATH]),
        ("another host", &[METHOD, SCHEME, AUTHORITY, PATH, ("host", "elsewhere")]),
        ("upper case", &[METHOD, SCHEME, AUTHORITY, PATH, ("X-A", "b")]),
    ];
    for (what, fields) in cases {
        assert_eq!(outcome(&raw, &headers_frame(fields)).await, Outcome::Reset(H3_MESSAGE_ERROR), "{what}");
    }
    assert_eq!(
        outcome(&raw, &headers_frame(&[METHOD, SCHEME, AUTHORITY, PATH, FIELD])).await,
        Outcome::Served
    );
    assert_eq!(server.stats.requests(), 1, "only the last one reached the router");
}

#[tokio::test]
async fn malformed_header_fields_are_answered_with_400() {
    let server = server();
    let raw = connect(&server).await;
    let cases: &[(&str, &str)] = &[
        ("transfer-encoding", "chunked"),
        ("connection", "close"),
        ("keep-alive", "timeout=5"),
        ("proxy-connection", "close"),
        ("upgrade", "websocket"),
        ("te", "gzip"),
        ("content-length", "-1"),
        ("content-length", "+0"),
        ("content-length", "0x0"),
        ("content-length", ""),
        ("content-length", "99999999999999999999"),
    ];
    for field in cases {
        let head = request_head("GET", "/", &[*field]);
        assert_eq!(outcome(&raw, &head).await, Outcome::Refused("malformed_request"), "{field:?}");
    }
    for fields in
        [[("content-length", "0"), ("content-length", "0")], [("host", "localhost"), ("host", "localhost")]]
    {
        let head = request_head("GET", "/", &fields);
        assert_eq!(outcome(&raw, &head).await, Outcome::Refused("malformed_request"), "{fields:?}");
    }
    let with_user = headers_frame(&[METHOD, SCHEME, (":authority", "a@localhost"), PATH]);
    assert_eq!(outcome(&raw, &with_user).await, Outcome::Refused("malformed_request"));
    assert_eq!(outcome(&raw, &request_head("GET", "/", &[("te", "trailers")])).await, Outcome::Served);
}

#[tokio::test]
async fn a_body_that_is_not_as_long_as_announced_is_answered_with_400() {
    let server = server();
    let raw = connect(&server).await;
    let post = |announced: &str, pieces: &[&[u8]]| {
        let mut stream =
            BytesMut::from(&request_head("POST", "/length", &[("content-length", announced)])[..]);
        for piece in pieces {
            stream.extend_from_slice(&h3_frame(0, piece));
        }
        stream.freeze()
    };
    for (announced, pieces) in [("3", &[&b"ab"[..]][..]), ("3", &[b"ab", b"cd"]), ("3", &[]), ("0", &[b"a"])]
    {
        let refused = outcome(&raw, &post(announced, pieces)).await;
        assert_eq!(refused, Outcome::Refused("malformed_request"), "{announced}: {pieces:?}");
    }
    // Nor is a handler that does not look at the body given such a request's way.
    let unread = request_head("GET", "/", &[("content-length", "3")]);
    assert_eq!(outcome(&raw, &unread).await, Outcome::Refused("malformed_request"));
    assert_eq!(outcome(&raw, &post("4", &[b"ab", b"cd"])).await, Outcome::Served);
    assert_eq!(outcome(&raw, &post("99999999", &[])).await, Outcome::Refused("body_too_large"));
}

#[tokio::test]
async fn pseudo_header_fields_in_trailers_end_the_body() {
    let server = server();
    let raw = connect(&server).await;
    let stream = |trailer| {
        let head = request_head("POST", "/length", &[]);
        [&head[..], &h3_frame(0, b"abc"), &headers_frame(&[trailer])].concat()
    };
    assert_eq!(outcome(&raw, &stream(FIELD)).await, Outcome::Served);
    let (mut send, mut recv) = raw.connection.open_bi().await.expect("a stream");
    send.write_all(&stream(PATH)).await.expect("room");
    assert!(send.finish().is_ok());
    let answer = within("an answer", recv.read_to_end(10_000)).await;
    assert!(!answer.is_ok_and(|answer| String::from_utf8_lossy(&answer).contains("served")));
}

#[tokio::test]
async fn a_header_section_that_can_not_be_decoded_closes_the_connection() {
    let server = server();
    // Refers to a dynamic table that was never offered; then ends inside a string.
    for section in [&[0, 0, 0x80][..], &[0, 0, 0x51, 9, b'/']] {
        let raw = connect(&server).await;
        let (mut send, _recv) = raw.connection.open_bi().await.expect("a stream");
        send.write_all(&h3_frame(1, section)).await.expect("room");
        let closed = within("the close", raw.connection.closed()).await;
        let quinn::ConnectionError::ApplicationClosed(close) = closed else { panic!("{closed}") };
        assert_eq!(close.error_code, QPACK_DECOMPRESSION_FAILED.into());
    }
}
