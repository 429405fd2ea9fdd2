//! An agent that lives from a local file: with certificates or without, and with nobody else's word counting.

use http::Method;
use mvm_pki::Role;

use crate::serve::cluster::{
    Cluster, NODE, Running, desired_json, get_local, get_socket, problem_of, request, wait_until,
};

#[tokio::test]
async fn without_certificates_a_file_is_followed_and_the_socket_answers() {
    let cluster = Cluster::new();
    let file = cluster.dir.path().join("desired.json");
    std::fs::write(&file, desired_json(NODE, 1)).unwrap();
    let mut settings = cluster.settings();
    settings.desired_file = Some(file.clone());
    settings.node_id = Some(NODE.parse().unwrap());
    let agent = Running::start(settings).await;
    assert_eq!(agent.api, None, "without certificates there is nothing on the network");
    agent.wait_for_running(1).await;

    std::fs::write(file.with_extension("new"), desired_json(NODE, 3)).unwrap();
    std::fs::rename(file.with_extension("new"), &file).unwrap();
    agent.wait_for_running(3).await;

    let (status, body) = get_socket(&agent.socket, "/v1/node/info").await;
    let info: serde_json::Value = serde_json::from_str(&body).unwrap();
    assert_eq!((status, &info["source"], &info["node_id"]), (200, &"file".into(), &NODE.into()));
    assert_eq!(get_local(agent.metrics, "/readyz").await.0, 200);
    assert_eq!(get_local(agent.metrics, "/healthz").await.0, 200);
    let (_, metrics) = get_local(agent.metrics, "/metrics").await;
    assert!(metrics.contains("mvm_agent_instances{phase=\"running\"} 3"), "{metrics}");
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn a_file_that_turns_bad_keeps_the_last_good_state_and_makes_the_agent_not_ready() {
    let cluster = Cluster::new();
    let file = cluster.dir.path().join("desired.json");
    std::fs::write(&file, desired_json(NODE, 2)).unwrap();
    let mut settings = cluster.settings();
    settings.desired_file = Some(file.clone());
    settings.node_id = Some(NODE.parse().unwrap());
    let agent = Running::start(settings).await;
    agent.wait_for_running(2).await;

    let mut events = agent.node.events().subscribe();
    std::fs::write(&file, desired_json("another-node", 0)).unwrap();
    wait_until(|| events.try_recv().is_ok_and(|event| event.kind == "DocumentRefused")).await;
    let (status, body) = get_local(agent.metrics, "/readyz").await;
    assert_eq!(status, 503);
    assert!(body.contains("file_refused") && body.contains("another-node"), "{body}");
    agent.wait_for_running(2).await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn an_enrolled_agent_that_lives_from_a_file_refuses_pushed_documents() {
    let cluster = Cluster::new();
    let file = cluster.dir.path().join("desired.json");
    std::fs::write(&file, desired_json(NODE, 1)).unwrap();
    let mut settings = cluster.settings();
    settings.desired_file = Some(file);
    cluster.enrol(&settings);
    let agent = Running::start(settings).await;
    let client = cluster.client(agent.api(), Some((Role::Coordinator, "c1"))).await.unwrap();
    let pushed = request(Method::POST, agent.api(), "/v1/reconcile", cluster.document(9, 5).to_json());
    let problem = problem_of(client.request(pushed).await.unwrap()).await;
    assert_eq!((problem.status, problem.code.as_str()), (409, "source_is_file"));
    agent.wait_for_running(1).await;
    agent.stop().await.unwrap();
}

#[tokio::test]
async fn without_certificates_and_without_a_file_the_agent_says_what_to_do() {
    let cluster = Cluster::new();
    let error =
        mvm_agent::serve(cluster.settings(), tokio_util::sync::CancellationToken::new()).await.unwrap_err();
    assert!(error.remediation().contains("mvm agent certs request"), "{error}");
}

#[tokio::test]
async fn two_agents_do_not_share_a_data_directory() {
    let cluster = Cluster::new();
    let file = cluster.dir.path().join("desired.json");
    std::fs::write(&file, desired_json(NODE, 0)).unwrap();
    let mut settings = cluster.settings();
    settings.desired_file = Some(file);
    settings.node_id = Some(NODE.parse().unwrap());
    let first = Running::start(settings.clone()).await;
    let second = mvm_agent::serve(settings, tokio_util::sync::CancellationToken::new()).await;
    assert!(matches!(second, Err(mvm_agent::AgentError::Socket { .. })), "{second:?}");
    assert_eq!(get_socket(&first.socket, "/v1/node/stats").await.0, 200, "the first one is undisturbed");
    first.stop().await.unwrap();
}
