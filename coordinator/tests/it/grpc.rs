//! The operators' gRPC port: who gets in, health, reflection.

use std::time::Duration;

use mvm_client::{ClientError, connect, problem_of};
use mvm_coordinator::create_operator;
use mvm_pki::{Anchors, Credential, LiveAnchors, LiveCredential};
use mvm_proto::wire::control::v1::{
    ActOnInstanceRequest, GetDocumentRequest, GetInfoRequest, GetNodeRequest, ListNodesRequest,
    RemoveNodeRequest, RenewCertificateRequest,
};

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::support::{
    PATIENCE, Running, cluster_id, document, new_cluster, new_cluster_with, new_request, now, push_request,
    soon,
};

#[tokio::test]
async fn an_operator_is_served() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut operator = running.operator().await;
    let info = operator.get_info(GetInfoRequest {}).await.unwrap().into_inner();
    assert_eq!((info.cluster.as_str(), info.nodes, info.connected, info.epoch), ("test", 1, 0, 1));
    assert!(info.dev_cluster);
    let nodes = operator.list_nodes(ListNodesRequest::default()).await.unwrap().into_inner().nodes;
    assert_eq!(nodes.into_iter().map(|node| node.node_id).collect::<Vec<_>>(), ["n1"]);
}

#[tokio::test]
async fn a_node_may_call_nothing_on_the_operators_api() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    may_call_nothing(&running, &node.credential).await;
}

#[tokio::test]
async fn a_coordinators_certificate_may_call_nothing_on_the_operators_api() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let credential = mvm_coordinator::coordinator_credential(&report.data_dir, now()).unwrap();
    may_call_nothing(&running, &LiveCredential::new(credential)).await;
}

async fn may_call_nothing(running: &Running, credential: &LiveCredential) {
    // In TLS 1.3 the client finishes first, so that the close may come with the first call.
    let connected = connect(&running.target(), credential, &running.anchors(), &cluster_id(), PATIENCE).await;
    if let Ok(mut client) = connected {
        let node_id = || "n1".to_owned();
        let refusals = [
            client.get_info(GetInfoRequest {}).await.unwrap_err(),
            client.get_node(GetNodeRequest { node_id: node_id() }).await.unwrap_err(),
            client.remove_node(RemoveNodeRequest { node_id: node_id() }).await.unwrap_err(),
            client.push(push_request(&document("n1", 1), 0)).await.unwrap_err(),
            client.get_document(GetDocumentRequest { node_id: node_id() }).await.unwrap_err(),
        ];
        for status in refusals {
            assert!(problem_of(&status).is_none(), "the connection is closed before any call: {status:?}");
        }
    }
    answers_its_operator(running).await;
}

/// So that what was refused was not refused to everyone.
async fn answers_its_operator(running: &Running) {
    running.operator().await.get_info(GetInfoRequest {}).await.unwrap();
}

#[tokio::test]
async fn without_a_certificate_and_without_a_key_nothing_may_be_called() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut anonymous = crate::rest::Rest::with_key(&running, None).await;
    for path in ["/v1/tenants", "/v1/nodes/n1", "/v1/audit"] {
        let refused = anonymous.get(path).await;
        assert_eq!((refused.status, refused.code()), (401, "credential_required"), "{path}");
    }
    // Operators' calls and reflection are refused in gRPC's own way.
    let headers = [("content-type", "application/grpc"), ("te", "trailers")];
    for path in
        ["/mvm.control.v1.Control/GetInfo", "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo"]
    {
        let refused = anonymous.send("POST", path, &headers, None).await;
        assert_eq!(refused.headers()["grpc-status"], "16", "{path}");
    }
    answers_its_operator(&running).await;
}

#[tokio::test]
async fn a_key_gives_no_access_to_what_is_for_operators() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let key = serde_json::json!({ "spec": { "role": "admin" } });
    let made = crate::rest::Rest::operator(&running).await.put("/v1/api-keys/a", &key).await.body;
    let mut keyed = crate::rest::Rest::with_key(&running, made["status"]["secret"].as_str()).await;
    assert_eq!(keyed.get("/v1/tenants").await.status, 200);
    let headers = [("content-type", "application/grpc"), ("te", "trailers")];
    let refused = keyed.send("POST", "/mvm.control.v1.Control/GetInfo", &headers, None).await;
    assert_eq!(refused.headers()["grpc-status"], "16");
}

#[tokio::test]
async fn an_operator_of_another_cluster_is_refused() {
    let (_dir, report) = new_cluster();
    let (_other_dir, other) = new_cluster_with(|settings| settings.cluster = "other".parse().unwrap());
    let running = Running::start(&report.data_dir).await;
    let foreign = LiveCredential::new(Credential::load(&other.operator.credential).unwrap());
    let connected = connect(&running.target(), &foreign, &running.anchors(), &cluster_id(), PATIENCE).await;
    if let Ok(mut client) = connected {
        assert!(soon("an answer", client.get_info(GetInfoRequest {})).await.is_err());
    }
    answers_its_operator(&running).await;
}

#[tokio::test]
async fn an_operator_does_not_talk_to_a_coordinator_of_another_cluster() {
    let (_dir, report) = new_cluster();
    let (_other_dir, other) = new_cluster_with(|settings| settings.cluster = "other".parse().unwrap());
    let running = Running::start(&report.data_dir).await;
    let operator = LiveCredential::new(Credential::load(&other.operator.credential).unwrap());
    let anchors = LiveAnchors::new(Anchors::load(&other.ca_certificate).unwrap());
    let other_cluster = "other".parse().unwrap();
    let error = connect(&running.target(), &operator, &anchors, &other_cluster, PATIENCE).await.unwrap_err();
    assert!(matches!(error, ClientError::NotTheCoordinator { .. }), "{error:?}");
}

#[tokio::test]
async fn operators_renew_their_own_certificate_only() {
    let (dir, report) = new_cluster();
    let out = dir.path().join("bob");
    let files = create_operator(&report.data_dir, "bob", &out, Duration::from_secs(600), now()).unwrap();
    let running = Running::start(&report.data_dir).await;
    let bob = LiveCredential::new(Credential::load(&files.credential).unwrap());
    let mut client =
        connect(&running.target(), &bob, &running.anchors(), &cluster_id(), PATIENCE).await.unwrap();
    let (key, csr_der) = new_request();
    let answer = client.renew_certificate(RenewCertificateRequest { csr_der }).await.unwrap().into_inner();
    let renewed = Credential::with_chain_pem(key, &answer.chain_pem).unwrap();
    assert_eq!(renewed.identity(), bob.current().identity());
    assert!(renewed.not_after() > bob.current().not_after());
}

#[tokio::test]
async fn an_operator_who_renews_without_end_is_told_to_wait() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut operator = running.operator().await;
    let (_, csr_der) = new_request();
    let mut answers = Vec::new();
    while answers.len() < 200 && answers.last().is_none_or(Result::is_ok) {
        answers.push(operator.renew_certificate(RenewCertificateRequest { csr_der: csr_der.clone() }).await);
    }
    let refused = answers.pop().unwrap().unwrap_err();
    assert_eq!(refused.code(), tonic::Code::ResourceExhausted);
    assert_eq!(problem_of(&refused).unwrap().code, "too_many_requests");
    assert!(answers.len() >= 10, "a burst is granted");
    operator.get_info(GetInfoRequest {}).await.unwrap();
}

#[tokio::test]
async fn errors_carry_a_problem_with_its_code() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut operator = running.operator().await;
    let unknown = operator.get_node(GetNodeRequest { node_id: "nope".into() }).await.unwrap_err();
    assert_eq!(problem_of(&unknown).unwrap().code, "node_unknown");
    let odd = operator.get_node(GetNodeRequest { node_id: "../x".into() }).await.unwrap_err();
    assert_eq!(problem_of(&odd).unwrap().code, "bad_request");
    running.enrol("n1").await;
    let none = operator.get_document(GetDocumentRequest { node_id: "n1".into() }).await.unwrap_err();
    assert_eq!(problem_of(&none).unwrap().code, "no_document");
    let wake = ActOnInstanceRequest {
        node_id: "n1".into(),
        tenant_id: "acme".into(),
        pool_id: "web".into(),
        instance_id: "i-00000001".into(),
        action: "wake".into(),
        override_seconds: None,
    };
    let away = operator.act_on_instance(wake).await.unwrap_err();
    assert_eq!(problem_of(&away).unwrap().code, "node_not_connected");
}

#[tokio::test]
async fn a_silent_handshake_is_cut_off_and_others_are_served_meanwhile() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| settings.max_grpc_connections = 8).await;
    let mut silent = tokio::net::TcpStream::connect(running.addresses.grpc).await.unwrap();
    running.operator().await.get_info(GetInfoRequest {}).await.unwrap();
    let mut buffer = [0; 1];
    assert!(matches!(soon("the cut", silent.read(&mut buffer)).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn a_flood_of_silent_connections_does_not_lock_operators_out() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut silent = Vec::new();
    for _ in 0..400 {
        silent.push(tokio::net::TcpStream::connect(running.addresses.grpc).await.unwrap());
    }
    // From the flood's own address, and sooner than the first of its handshakes would have timed out.
    let served = async { running.operator().await.get_info(GetInfoRequest {}).await.unwrap() };
    tokio::time::timeout(Duration::from_secs(4), served).await.expect("an operator is served meanwhile");
    // It was the flood that made room.
    let mut buffer = [0; 1];
    assert!(matches!(soon("the cut", silent[0].read(&mut buffer)).await, Ok(0) | Err(_)));
}

#[tokio::test]
async fn metrics_health_and_readiness_are_served_on_loopback() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    for (path, expected) in [
        ("/healthz", "ok"),
        ("/readyz", "ready"),
        ("/metrics", "mvm_coordinator_sessions 0"),
        ("/metrics", "mvm_coordinator_expiry_timestamp_seconds{of=\"certificate\"}"),
        ("/metrics", "mvm_coordinator_operator_expiry_timestamp_seconds{operator=\"admin\"}"),
    ] {
        let mut tcp = tokio::net::TcpStream::connect(running.addresses.metrics.unwrap()).await.unwrap();
        let request = format!("GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n");
        tcp.write_all(request.as_bytes()).await.unwrap();
        let mut answer = String::new();
        tcp.read_to_string(&mut answer).await.unwrap();
        assert!(answer.starts_with("HTTP/1.1 200") && answer.contains(expected), "{path}: {answer}");
    }
}
