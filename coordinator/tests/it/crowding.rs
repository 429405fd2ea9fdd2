//! Peers that hold connections for the sake of holding them, and those that are to be served all the same.

use std::sync::Arc;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_client::connect;
use mvm_pki::{Credential, LiveCredential};
use mvm_proto::wire::control::v1::{GetInfoRequest, RemoveNodeRequest};
use mvm_proto::wire::session::v1::{AgentFrame, agent_frame};
use rustls::pki_types::ServerName;
use serde_json::json;
use tokio::io::AsyncReadExt as _;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::{
    Node, PATIENCE, Running, cluster_id, coordinator, document, new_cluster, new_request, post, push_request,
    soon,
};

/// More connections than one identity has slots, and more than `max_grpc_connections` where a test lowers that.
const CROWD: usize = 40;

fn operator(running: &Running) -> LiveCredential {
    LiveCredential::new(Credential::load(&running.data_dir.join("operator/operator.pem")).unwrap())
}

/// Connections to the gRPC port on which nothing is said after the handshake.
async fn silent(running: &Running, credential: &LiveCredential, count: usize) -> Vec<TlsStream<TcpStream>> {
    let tls = mvm_pki::tls::client_config(Some(credential), &running.anchors(), coordinator(), &[b"h2"]);
    let connector = TlsConnector::from(Arc::new(tls.unwrap()));
    let mut held = Vec::new();
    for _ in 0..count {
        let tcp = TcpStream::connect(running.addresses.grpc).await.unwrap();
        let name = ServerName::try_from("127.0.0.1").unwrap();
        // One that was closed by now holds nothing.
        held.extend(soon("a handshake", connector.connect(name, tcp)).await);
    }
    held
}

async fn ended(stream: &mut TlsStream<TcpStream>) {
    let mut rest = Vec::new();
    // By a close or a reset: either is an end.
    let _ = soon("the end of a connection", stream.read_to_end(&mut rest)).await;
}

#[tokio::test]
async fn a_nodes_certificate_takes_no_place_from_operators() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| settings.max_grpc_connections = 8).await;
    let node = running.enrol("n1").await;
    let mut held = silent(&running, &node.credential, CROWD).await;
    for stream in &mut held {
        ended(stream).await;
    }
    running.operator().await.get_info(GetInfoRequest {}).await.unwrap();
}

#[tokio::test]
async fn an_operators_idle_connections_give_way_to_its_newest() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut held = silent(&running, &operator(&running), CROWD).await;
    running.operator().await.get_info(GetInfoRequest {}).await.unwrap();
    ended(&mut held[0]).await;
}

#[tokio::test]
async fn the_idle_connections_of_one_operator_leave_room_for_another() {
    let (dir, report) = new_cluster();
    let out = dir.path().join("bob");
    let life = std::time::Duration::from_secs(600);
    let bob = mvm_coordinator::create_operator(&report.data_dir, "bob", &out, life, crate::support::now());
    let bob = LiveCredential::new(Credential::load(&bob.unwrap().credential).unwrap());
    let running = Running::start_with(&report.data_dir, |settings| settings.max_grpc_connections = 8).await;
    let mut held = silent(&running, &operator(&running), 8).await;
    let client = connect(&running.target(), &bob, &running.anchors(), &cluster_id(), PATIENCE).await;
    client.unwrap().get_info(GetInfoRequest {}).await.unwrap();
    ended(&mut held[0]).await;
}

#[tokio::test]
async fn a_connection_with_a_call_under_way_is_not_displaced() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut client = running.operator().await;
    let mut stages = client.push(push_request(&document("n1", 1), 30)).await.unwrap().into_inner();
    assert_eq!(soon("a stage", stages.message()).await.unwrap().unwrap().stage, "validated");
    let _held = silent(&running, &operator(&running), 2 * CROWD).await;
    let mut session = node.connect(None).await;
    session.obey().await;
    let mut last = String::new();
    while let Some(stage) = soon("a stage", stages.message()).await.unwrap() {
        last = stage.stage;
    }
    assert_eq!(last, "converged");
}

#[tokio::test]
async fn strangers_that_stay_do_not_keep_nodes_out() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| settings.limits.max_connections = 8).await;
    let enrolled = running.enrol("n1").await;
    let (mut held, limits) = (Vec::new(), mvm_transport::Limits::default());
    for _ in 0..CROWD {
        let tls =
            mvm_pki::tls::client_config(None, &running.anchors(), coordinator(), &[mvm_transport::ALPN_H3]);
        let client =
            mvm_transport::Client::connect(running.addresses.quic, "127.0.0.1", tls.unwrap(), &limits);
        held.extend(client.await);
    }
    enrolled.connect(None).await;
    running.enrol("n2").await.connect(None).await;
}

/// A node that was removed and came back: as it was, and as it is.
async fn removed_and_back(running: &Running) -> (Node, Node) {
    let old = running.enrol("n1").await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    (old, running.enrol("n1").await)
}

#[tokio::test]
async fn a_certificate_from_before_a_removal_spends_no_rate_of_who_has_the_name_now() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let (old, new) = removed_and_back(&running).await;
    let renewal = json!({ "csr": STANDARD.encode(new_request().1) });
    let http = running.http(Some(&old.credential)).await;
    for _ in 0..2 * CROWD {
        let mut session = old.dial().await.unwrap();
        let hello = AgentFrame { body: Some(agent_frame::Body::Hello(old.hello(None))) };
        // It may be closed by now.
        let _ = session.session.frames_out.send(&hello).await;
        session.end().await;
        post(&http, "/v1/renew", &renewal).await.unwrap_err();
    }
    new.connect(None).await.expect_quiet().await;
    post(&running.http(Some(&new.credential)).await, "/v1/renew", &renewal).await.unwrap();
}

#[tokio::test]
async fn connections_with_a_certificate_from_before_a_removal_take_no_place_of_who_has_the_name_now() {
    let (_dir, report) = new_cluster();
    let running =
        Running::start_with(&report.data_dir, |limits| limits.limits.max_connections_per_identity = 2).await;
    let (old, new) = removed_and_back(&running).await;
    let _silent = [old.dial().await.unwrap(), old.dial().await.unwrap()];
    let mut held = [new.connect(None).await, new.dial().await.unwrap()];
    let _more = [old.dial().await, old.dial().await, old.dial().await];
    held[0].expect_quiet().await;
    // Nothing was said on the second yet: it is idle, and would be the first to go.
    held[1].send(agent_frame::Body::Hello(new.hello(None))).await;
    held[1].welcome().await;
}
