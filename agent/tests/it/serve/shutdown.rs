//! Stopping: listeners close, what is in flight finishes, instances stay, and all within ten seconds.

use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Method;
use mvm_agent::RateSettings;
use mvm_pki::Role;

use crate::serve::cluster::{Cluster, Running, request, wait_until};

/// What operators are promised.
const PROMISED: Duration = Duration::from_secs(10);

/// Peers that ask without a pause while the agent is told to stop.
const CLIENTS: usize = 4;

#[tokio::test]
async fn an_agent_under_load_stops_in_time_and_a_new_one_finds_its_instances() {
    let cluster = Cluster::new();
    let mut settings = cluster.settings();
    settings.rate = RateSettings { per_second: 100_000, burst: 100_000 };
    cluster.enrol(&settings);
    let agent = Running::start(settings.clone()).await;
    let at = agent.api();
    let coordinator = Some((Role::Coordinator, "c1"));
    let client = cluster.client(at, coordinator).await.unwrap();
    let pushed = request(Method::POST, at, "/v1/reconcile", cluster.document(1, 3).to_json());
    assert_eq!(client.request(pushed).await.unwrap().status(), 202);
    agent.wait_for_running(3).await;

    let begun = Arc::new(tokio::sync::Barrier::new(CLIENTS + 1));
    let mut load = tokio::task::JoinSet::new();
    for _ in 0..CLIENTS {
        let client = cluster.client(at, coordinator).await.unwrap();
        let begun = Arc::clone(&begun);
        load.spawn(async move {
            let watch = client.request(request(Method::GET, at, "/v1/node/watch", "")).await.unwrap();
            let mut served = 0_u32;
            while let Ok(answer) = client.request(request(Method::GET, at, "/v1/node/stats", "")).await {
                assert_eq!(answer.status(), 200);
                served += 1;
                if served == 1 {
                    begun.wait().await;
                }
            }
            drop(watch);
            served
        });
    }
    begun.wait().await;
    let before = Instant::now();
    agent.stop().await.unwrap();
    assert!(before.elapsed() < PROMISED, "{:?}", before.elapsed());
    assert!(load.join_all().await.into_iter().sum::<u32>() > 0);
    assert!(!settings.socket.exists(), "the socket is taken away");

    let again = Running::start(settings).await;
    again.wait_for_running(3).await;
    let status = again.node.status();
    wait_until(|| status.borrow().accepted.as_ref().is_some_and(|mark| mark.generation == 1)).await;
    again.stop().await.unwrap();
}

#[tokio::test]
async fn the_socket_and_what_lies_beside_it_are_for_the_owner_alone() {
    let cluster = Cluster::new();
    let settings = cluster.settings();
    cluster.enrol(&settings);
    let agent = Running::start(settings.clone()).await;
    let mode = |path: &std::path::Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o777;
    assert_eq!((mode(&settings.socket), mode(&settings.data_dir)), (0o600, 0o700));
    assert_eq!(mode(&settings.certs_dir.join("node.pem")), 0o600);
    agent.stop().await.unwrap();
}
