//! The API over HTTP/3: who may call what, and that every error is problem+json.

use http::{Method, StatusCode};
use mvm_agent::intake::authz::TABLE;
use mvm_agent::{AgentSettings, RateSettings};
use mvm_pki::Role;
use mvm_transport::{Client, Limits};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use crate::serve::cluster::{Cluster, NODE, Running, body_of, digest_of, problem_of, request, wait_until};

/// More than any test here asks for.
const UNLIMITED: RateSettings = RateSettings { per_second: 10_000, burst: 10_000 };

async fn agent(cluster: &Cluster, change: impl FnOnce(&mut AgentSettings)) -> Running {
    let mut settings = cluster.settings();
    settings.rate = UNLIMITED;
    change(&mut settings);
    cluster.enrol(&settings);
    Running::start(settings).await
}

const COORDINATOR: Option<(Role, &str)> = Some((Role::Coordinator, "c1"));
const OPERATOR: Option<(Role, &str)> = Some((Role::Operator, "alice"));

#[tokio::test]
async fn a_coordinators_document_is_accepted_made_true_and_reported() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    let client = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    let envelope = cluster.document(7, 2);

    let answer = client
        .request(request(Method::POST, agent.api(), "/v1/reconcile", envelope.to_json()))
        .await
        .unwrap();
    assert_eq!(answer.status(), StatusCode::ACCEPTED);
    let body: serde_json::Value = serde_json::from_slice(&body_of(answer).await).unwrap();
    let expected = serde_json::json!({ "generation": 7, "epoch": 1, "digest": digest_of(&envelope) });
    assert_eq!(body, expected);

    agent.wait_for_running(2).await;
    let path = "/v1/tenants/acme/instances?pool=workers&phase=running";
    let answer = client.request(request(Method::GET, agent.api(), path, "")).await.unwrap();
    let body: serde_json::Value = serde_json::from_slice(&body_of(answer).await).unwrap();
    assert_eq!(body["instances"].as_array().unwrap().len(), 2);
    let answer = client.request(request(Method::GET, agent.api(), "/v1/tenants", "")).await.unwrap();
    let body: serde_json::Value = serde_json::from_slice(&body_of(answer).await).unwrap();
    assert_eq!(
        (&body["tenants"][0]["tenant_id"], &body["tenants"][0]["instances"]),
        (&"acme".into(), &2.into())
    );
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn every_route_answers_each_role_as_the_table_says() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    for (role, name) in
        [(Role::Coordinator, "c1"), (Role::Operator, "alice"), (Role::Node, "node-2"), (Role::Node, NODE)]
    {
        let client = cluster.client(agent.api(), Some((role, name))).await.unwrap();
        for rule in TABLE {
            let path = rule
                .path
                .replace("{tenant}", "acme")
                .replace("{pool}", "workers")
                .replace("{instance}", "i-00000000");
            let answer =
                client.request(request(rule.method.clone(), agent.api(), &path, "{}")).await.unwrap();
            let status = answer.status();
            if rule.allows.contains(&role) {
                assert_ne!(status, StatusCode::FORBIDDEN, "{role} {} {path}", rule.method);
            } else {
                assert_eq!(problem_of(answer).await.code, "forbidden", "{role} {} {path}", rule.method);
            }
        }
    }
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_peer_without_a_certificate_gets_no_further_than_tls() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    let refused = match cluster.client(agent.api(), None).await {
        Err(_) => true,
        // TLS 1.3 tells a client late: then the first request finds the connection closed.
        Ok(client) => client.request(request(Method::GET, agent.api(), "/v1/node/info", "")).await.is_err(),
    };
    assert!(refused);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_coordinator_of_another_cluster_gets_no_further_than_tls() {
    let (cluster, other) = (Cluster::new(), Cluster::named("other"));
    let agent = agent(&cluster, |_| {}).await;
    let foreign = mvm_pki::LiveCredential::new(other.credential(Role::Coordinator, "c1"));
    let expected =
        mvm_pki::ExpectedPeer { cluster: cluster.id.clone(), role: Role::Node, name: None, check_host: true };
    let anchors = mvm_pki::LiveAnchors::new(cluster.anchors());
    let tls =
        mvm_pki::tls::client_config(Some(&foreign), &anchors, expected, &[mvm_transport::ALPN_H3]).unwrap();
    let refused = match Client::connect(agent.api(), "127.0.0.1", tls, &Limits::default()).await {
        Err(_) => true,
        Ok(client) => client.request(request(Method::GET, agent.api(), "/v1/node/info", "")).await.is_err(),
    };
    assert!(refused);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn every_bad_request_is_answered_with_its_own_problem() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |settings| settings.limits.max_body_bytes = 64 * 1024).await;
    let client = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    let at = agent.api();
    let cases = [
        (request(Method::GET, at, "/v2/anything", ""), 404, "not_found"),
        (request(Method::GET, at, "/", ""), 404, "not_found"),
        (request(Method::DELETE, at, "/v1/node/info", ""), 405, "method_not_allowed"),
        (request(Method::GET, at, "/v1/tenants/UPPER/instances", ""), 400, "bad_id"),
        (request(Method::GET, at, "/v1/tenants/%2e%2e/instances", ""), 400, "bad_id"),
        (request(Method::GET, at, "/v1/tenants/%ff/instances", ""), 400, "bad_id"),
        (request(Method::GET, at, "/v1/tenants/acme/instances?colour=red", ""), 400, "bad_query"),
        (request(Method::GET, at, "/v1/tenants/acme/instances?phase=asleep", ""), 400, "bad_query"),
        (request(Method::GET, at, "/v1/node/info?verbose=1", ""), 400, "bad_query"),
        (request(Method::POST, at, "/v1/tenants/acme/pools/workers/instances/7/wake", ""), 400, "bad_id"),
        (request(Method::POST, at, "/v1/trust", "[]"), 400, "bad_body"),
        (request(Method::POST, at, "/v1/trust", r#"{"roots": [], "roots": []}"#), 400, "bad_body"),
        (request(Method::POST, at, "/v1/trust", r#"{"roots": [{"a": 1, "a": 2}]}"#), 400, "bad_body"),
    ];
    for (request, status, code) in cases {
        let what = format!("{} {}", request.method(), request.uri());
        let problem = problem_of(client.request(request).await.unwrap()).await;
        assert_eq!((problem.status, problem.code.as_str()), (status, code), "{what}");
        assert!(!problem.detail.is_empty() && !problem.remediation.is_empty(), "{what}");
    }

    let mut text = request(Method::POST, at, "/v1/reconcile", "hello");
    text.headers_mut().insert("content-type", "text/plain".parse().unwrap());
    assert_eq!(problem_of(client.request(text).await.unwrap()).await.code, "unsupported_media_type");

    let large = request(Method::POST, at, "/v1/reconcile", vec![b' '; 65 * 1024]);
    assert_eq!(problem_of(client.request(large).await.unwrap()).await.status, 413);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_document_that_is_not_signed_or_is_older_is_refused_and_the_old_one_stays() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    let client = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    let push = async |body: Vec<u8>| {
        client.request(request(Method::POST, agent.api(), "/v1/reconcile", body)).await.unwrap()
    };
    assert_eq!(push(cluster.document(5, 1).to_json()).await.status(), StatusCode::ACCEPTED);
    let mut unsigned = cluster.document(6, 2);
    unsigned.signatures.clear();
    for (bad, what) in [
        (unsigned.to_json(), "unsigned"),
        (cluster.document(4, 2).to_json(), "older"),
        (cluster.document(5, 2).to_json(), "same generation, other content"),
        (b"{}".to_vec(), "no envelope"),
    ] {
        let problem = problem_of(push(bad).await).await;
        assert!((400..500).contains(&problem.status), "{what}: {problem:?}");
    }
    let status = agent.node.status();
    wait_until(|| status.borrow().accepted.as_ref().is_some_and(|mark| mark.generation == 5)).await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_peer_that_asks_too_often_is_told_when_to_come_back_and_others_are_served() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |settings| settings.rate = RateSettings { per_second: 1, burst: 3 }).await;
    let noisy = cluster.client(agent.api(), OPERATOR).await.unwrap();
    let ask = async |client: &Client| {
        client.request(request(Method::GET, agent.api(), "/v1/node/info", "")).await.unwrap()
    };
    let mut limited = None;
    for _ in 0..8 {
        let answer = ask(&noisy).await;
        if answer.status() == StatusCode::TOO_MANY_REQUESTS {
            limited = Some(answer);
        }
    }
    let limited = limited.expect("eight calls at once are more than three");
    let wait: u64 = limited.headers()["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((1..=2).contains(&wait));
    assert_eq!(problem_of(limited).await.code, "too_many_requests");
    let quiet = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    assert_eq!(ask(&quiet).await.status(), StatusCode::OK);
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_watcher_sees_a_document_being_accepted() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    let client = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    let watch = client.request(request(Method::GET, agent.api(), "/v1/node/watch", "")).await.unwrap();
    let mut body = watch.into_body();
    assert!(body.chunk().await.unwrap().is_some(), "the present status comes at once");
    let pushed = request(Method::POST, agent.api(), "/v1/reconcile", cluster.document(3, 1).to_json());
    client.request(pushed).await.unwrap();

    let mut text = Vec::new();
    let seen = async {
        while !String::from_utf8_lossy(&text).contains("\"generation\":3") {
            text.extend_from_slice(&body.chunk().await.unwrap().expect("the stream goes on"));
        }
    };
    tokio::time::timeout(crate::serve::cluster::PATIENCE, seen).await.unwrap();
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_command_in_a_guest_is_in_the_tenants_audit_log_without_its_arguments() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    let coordinator = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    let document = request(Method::POST, agent.api(), "/v1/reconcile", cluster.document(1, 1).to_json());
    assert_eq!(coordinator.request(document).await.unwrap().status(), StatusCode::ACCEPTED);
    agent.wait_for_running(1).await;
    let id = agent.node.instances(None).remove(0).instance_id;

    let operator = cluster.client(agent.api(), OPERATOR).await.unwrap();
    let path = format!("/v1/tenants/acme/pools/workers/instances/{id}/exec");
    let env = serde_json::json!({ "TOKEN": "hunter2" });
    for command in [&["echo", "--password=hunter2", "x"][..], &["false"], &["no-such-program"]] {
        let body = serde_json::json!({ "command": command, "env": env, "stdin": "aHVudGVyMg==" });
        let answer = operator.request(request(Method::POST, agent.api(), &path, body.to_string())).await;
        body_of(answer.unwrap()).await;
    }
    // This one goes on until its caller leaves.
    let body = serde_json::json!({ "command": ["sleep", "1000"] }).to_string();
    let asked = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut stream = tokio::net::UnixStream::connect(&agent.socket).await.unwrap();
    tokio::io::AsyncWriteExt::write_all(&mut stream, asked.as_bytes()).await.unwrap();
    tokio::io::AsyncReadExt::read_u8(&mut stream).await.unwrap();
    drop(stream);

    let (data_dir, acme) = (cluster.data_dir(), "acme".parse().unwrap());
    let lines = || {
        let mut lines = Vec::new();
        let _ = mvm_agent::audit::lines_of(&data_dir, &acme, |line| {
            if line.action == "exec" {
                assert_eq!(line.instance.unwrap().to_string(), id);
                lines.push(format!("{}: {} -> {}", line.actor, line.reason, line.outcome));
            }
        });
        lines
    };
    wait_until(|| lines().len() == 8).await;
    let said = lines();
    let alice = said[0].split_once(": ").unwrap().0.to_owned();
    assert!(alice.contains("alice"), "{alice}");
    let echo = format!("{alice}: \"echo\" with 2 argument(s), asked by {alice}");
    assert_eq!(said[..2], [format!("{echo} -> begun"), format!("{echo} -> exited with 0")]);
    assert!(
        said[3].contains("\"false\" with 0 argument(s)") && said[3].ends_with("exited with 1"),
        "{said:?}"
    );
    assert!(said[5].contains("-> failed: the guest refused (not_found)"), "{said:?}");
    assert!(!said[6].contains("alice") && said[7].contains("-> failed: the caller left"), "{said:?}");
    agent.stop().await.unwrap();
    let report = mvm_agent::audit::verify_tenant(&data_dir, &acme).unwrap();
    assert_eq!(report.broken, None);
    let log = std::fs::read_to_string(data_dir.join("tenants/acme/audit.log")).unwrap();
    assert!(!log.contains("hunter2") && !log.contains("1000\""), "{log}");
}

/// One piece of a body whose length is not known beforehand.
fn chunk(line: &serde_json::Value) -> Vec<u8> {
    let line = format!("{line}\n");
    format!("{:x}\r\n{line}\r\n", line.len()).into_bytes()
}

#[tokio::test]
async fn input_is_streamed_to_a_command_while_its_output_comes_and_over_the_socket_alone() {
    let cluster = Cluster::new();
    let agent = agent(&cluster, |_| {}).await;
    let coordinator = cluster.client(agent.api(), COORDINATOR).await.unwrap();
    let document = request(Method::POST, agent.api(), "/v1/reconcile", cluster.document(1, 1).to_json());
    assert_eq!(coordinator.request(document).await.unwrap().status(), StatusCode::ACCEPTED);
    agent.wait_for_running(1).await;
    let id = agent.node.instances(None).remove(0).instance_id;
    let path = format!("/v1/tenants/acme/pools/workers/instances/{id}/exec");

    let mut stream = tokio::net::UnixStream::connect(&agent.socket).await.unwrap();
    let head = format!(
        "POST {path} HTTP/1.1\r\nhost: a\r\ncontent-type: application/x-ndjson\r\ntransfer-encoding: chunked\r\n\r\n"
    );
    let tty = serde_json::json!({ "rows": 24, "columns": 80 });
    let first = chunk(&serde_json::json!({ "command": ["cat"], "tty": tty, "user": "0" }));
    stream.write_all(&[head.into_bytes(), first].concat()).await.unwrap();
    let mut answer = String::new();
    let mut until = async |stream: &mut tokio::net::UnixStream, wanted: &str| {
        while !answer.contains(wanted) {
            let mut buffer = [0; 4096];
            let read = tokio::time::timeout(crate::serve::cluster::PATIENCE, stream.read(&mut buffer));
            let length = read.await.unwrap().unwrap();
            assert!(length > 0, "{wanted:?} is not in {answer:?}");
            answer.push_str(&String::from_utf8_lossy(&buffer[..length]));
        }
    };
    until(&mut stream, "200 OK").await;
    // Each is echoed before the next is sent: "one" and "two".
    for (sent, echoed) in [("b25l", "b25l"), ("dHdv", "dHdv")] {
        stream.write_all(&chunk(&serde_json::json!({ "stdin": sent, "resize": tty }))).await.unwrap();
        until(&mut stream, &format!("{{\"stdout\":\"{echoed}\"}}")).await;
    }
    stream.write_all(&chunk(&serde_json::json!({ "end": true }))).await.unwrap();
    until(&mut stream, "\"exit\":{").await;

    let operator = cluster.client(agent.api(), OPERATOR).await.unwrap();
    let mut over_the_network = request(Method::POST, agent.api(), &path, "{}".to_owned());
    let ndjson = http::HeaderValue::from_static("application/x-ndjson");
    over_the_network.headers_mut().insert("content-type", ndjson);
    let refused = operator.request(over_the_network).await.unwrap();
    assert_eq!(problem_of(refused).await.code, "only_local");
    agent.stop().await.unwrap();
}
