//! Handshakes that must fail, and what the one who dialled is told.

use std::time::Duration;

use axum::Router;
use mvm_pki::{ClientAuth, Refusal, Role};
use mvm_transport::{Client, ConnectError, Limits, dial_session};

use crate::support::{Lab, Running, udp_socket, wait_until};

fn server() -> Running {
    Running::http(Limits::default(), Router::new())
}

async fn refused(server: &Running, tls: rustls::ClientConfig) -> ConnectError {
    Client::connect(server.address, "localhost", tls, &Limits::default()).await.expect_err("a refusal")
}

#[tokio::test]
async fn no_client_certificate_where_one_is_required() {
    let server = server();
    let error = refused(&server, server.lab.client_tls(None)).await;
    assert!(matches!(&error, ConnectError::RefusedByPeer { .. }), "{error}");
    assert!(error.to_string().starts_with("the peer refused our certificate: "), "{error}");
    wait_until("it is counted", || server.stats.handshakes_bad_certificate() == 1).await;
}

#[tokio::test]
async fn a_client_certificate_of_a_foreign_authority() {
    let server = server();
    let foreign = Lab::new().credential(Role::Node, "n1");
    let error = refused(&server, server.lab.client_tls(Some(&foreign))).await;
    assert!(matches!(&error, ConnectError::RefusedByPeer { .. }), "{error}");
}

#[tokio::test]
async fn an_expired_client_certificate() {
    let server = server();
    let expired = server.lab.expired_credential(Role::Node, "n1");
    let error = refused(&server, server.lab.client_tls(Some(&expired))).await;
    assert!(
        error.to_string().starts_with("the peer refused our certificate: the certificate expired"),
        "{error}"
    );
    assert!(matches!(error.refusal(), Some(Refusal::Expired { .. })), "{error}");
}

#[tokio::test]
async fn a_server_of_a_foreign_authority() {
    let server = server();
    let error = refused(&server, Lab::new().node_tls("n1")).await;
    let ConnectError::PeerRefused { refusal, .. } = &error else { panic!("{error}") };
    assert_eq!(refusal, &Refusal::ForeignAuthority);
}

#[tokio::test]
async fn a_server_whose_certificate_is_for_another_name() {
    let server = server();
    let tls = server.lab.node_tls("n1");
    let error = Client::connect(server.address, "elsewhere.example", tls, &Limits::default()).await;
    let error = error.expect_err("a refusal");
    let ConnectError::PeerRefused { refusal, .. } = &error else { panic!("{error}") };
    assert_eq!(refusal.code(), "wrong_name");
}

#[tokio::test]
async fn no_common_protocol() {
    let server = server();
    let tls = server.lab.node_tls("n1");
    let raw = crate::support::Raw::connect(server.address, [127, 0, 0, 1], b"mvm/9", tls).await;
    assert!(raw.is_err(), "a protocol that nobody speaks");
    wait_until("it is counted", || server.stats.handshakes_bad_alpn() == 1).await;
}

#[tokio::test]
async fn a_client_is_told_that_the_peer_speaks_another_protocol() {
    // A server of sessions only, asked for HTTP/3.
    let lab = Lab::new();
    let mut tls = lab.server_tls(ClientAuth::Required);
    tls.alpn_protocols = vec![b"mvm/1".to_vec()];
    let server =
        mvm_transport::Server::bind("127.0.0.1:0".parse().expect("an address"), tls, Limits::default());
    let server = server.expect("a server");
    let address = server.local_addr();
    tokio::spawn(server.serve(None, None, tokio_util::sync::CancellationToken::new()));
    let error = Client::connect(address, "localhost", lab.node_tls("n1"), &Limits::default()).await;
    let error = error.expect_err("a refusal");
    assert!(error.to_string().starts_with("no common protocol (ALPN)"), "{error}");
}

#[tokio::test]
async fn a_protocol_that_is_agreed_on_but_not_served_is_closed() {
    let server = server();
    let session =
        dial_session(server.address, "localhost", server.lab.node_tls("n1"), &Limits::default()).await;
    let closed = match session {
        Ok(session) => session.control.closed().await.to_string(),
        Err(error) => error.to_string(),
    };
    assert!(closed.contains("sessions are not served here"), "{closed}");
}

#[tokio::test]
async fn a_session_without_a_certificate_is_closed() {
    let handler = |_peer, _address, _session| -> futures::future::BoxFuture<'static, ()> {
        panic!("a session of nobody")
    };
    let handler = std::sync::Arc::new(handler);
    let server = Running::start(ClientAuth::Optional, Limits::default(), None, Some(handler));
    let session =
        dial_session(server.address, "localhost", server.lab.client_tls(None), &Limits::default()).await;
    let closed = match session {
        Ok(session) => session.control.closed().await.to_string(),
        Err(error) => error.to_string(),
    };
    assert!(closed.contains("a session needs a certificate"), "{closed}");
}

#[tokio::test]
async fn a_missing_listener_is_reported_within_the_handshake_timeout() {
    let lab = Lab::new();
    let nobody = udp_socket();
    let address = nobody.local_addr().expect("an address");
    let limits = Limits { handshake_timeout: Duration::from_millis(200), ..Limits::default() };
    let error = Client::connect(address, "localhost", lab.node_tls("n1"), &limits).await.expect_err("nobody");
    assert!(matches!(error, ConnectError::TimedOut { .. }), "{error}");
    assert!(error.to_string().contains(&format!("listening on UDP {address}?")), "{error}");
}

#[tokio::test]
async fn a_name_that_no_certificate_could_show() {
    let lab = Lab::new();
    let address = "127.0.0.1:9".parse().expect("an address");
    let error = Client::connect(address, "not a name", lab.node_tls("n1"), &Limits::default()).await;
    assert!(matches!(error, Err(ConnectError::ServerName { .. })), "{error:?}");
}
