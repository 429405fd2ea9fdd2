//! What a restarted coordinator still knows, and what it renews while it runs.

use std::time::Duration;

use mvm_coordinator::{CoordinatorError, CoordinatorSettings, serve};
use mvm_proto::wire::control::v1::{GetInfoRequest, GetNodeRequest, ListTokensRequest};
use mvm_proto::wire::session::v1::{AgentFrame, Heartbeat, agent_frame};
use mvm_transport::SessionError;
use tokio_util::sync::CancellationToken;

use crate::support::{Running, document, mark_of, new_cluster, soon};

#[tokio::test]
async fn documents_nodes_and_tokens_survive_a_restart_and_the_epoch_grows() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut node = running.enrol("n1").await;
    running.push(&document("n1", 1), 0).await;
    let mut session = node.connect(None).await;
    let mark = session.obey().await;
    session.expect_quiet().await;
    running.stop().await;

    let running = Running::start(&report.data_dir).await;
    node.address = running.addresses.quic;
    let mut operator = running.operator().await;
    assert_eq!(operator.get_info(GetInfoRequest {}).await.unwrap().into_inner().epoch, 2);
    assert_eq!(operator.list_tokens(ListTokensRequest {}).await.unwrap().into_inner().tokens.len(), 1);
    let known = operator.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap().into_inner();
    assert_eq!(known.assigned, Some(mark.clone()));
    assert_eq!(known.status.unwrap().converged, Some(mark.clone()));

    // What the node has already is not sent again; what is new comes above it.
    let mut session = node.connect(Some(mark.clone())).await;
    session.expect_quiet().await;
    running.push(&document("n1", 2), 0).await;
    let next = mark_of(&session.document().await);
    assert_eq!((next.epoch, next.generation), (2, mark.generation + 1));
}

#[tokio::test]
async fn a_session_with_a_killed_coordinator_ends_as_soon_as_it_is_back() {
    let (_dir, report) = new_cluster();
    // Dropping its runtime ends the coordinator as a kill does: no goodbye, no close. It has one thread, so that
    // nothing runs any more while its tasks are dropped.
    let data_dir = report.data_dir.clone();
    let (started, start) = tokio::sync::oneshot::channel();
    let (kill, killed) = tokio::sync::oneshot::channel::<()>();
    let doomed = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let running = Running::start(&data_dir).await;
            let node = running.enrol("n1").await;
            started.send((running, node)).ok();
            killed.await.ok();
        });
    });
    let (running, node) = soon("the coordinator", start).await.unwrap();
    let mut session = node.connect(None).await;
    session.expect_quiet().await;
    kill.send(()).unwrap();
    tokio::task::spawn_blocking(move || doomed.join().unwrap()).await.unwrap();

    let again = Running::start_with(&report.data_dir, |settings| settings.listen = running.addresses.quic);
    let again = again.await;
    let heartbeat =
        AgentFrame { body: Some(agent_frame::Body::Heartbeat(Heartbeat { sequence: 1, info: None })) };
    // It may have learnt of it already, by a packet that it sent meanwhile.
    session.session.frames_out.send(&heartbeat).await.ok();
    let far_below_the_idle_timeout = Duration::from_secs(5);
    let end = tokio::time::timeout(far_below_the_idle_timeout, session.session.control.closed()).await;
    assert!(matches!(end, Ok(SessionError::Forgotten)), "{end:?}");
    node.connect(None).await.expect_quiet().await;
    again.stop().await;
}

#[tokio::test]
async fn only_one_process_runs_on_a_data_directory() {
    let (_dir, report) = new_cluster();
    let _running = Running::start(&report.data_dir).await;
    let mut settings = CoordinatorSettings::new(&report.data_dir);
    settings.listen = "127.0.0.1:0".parse().unwrap();
    settings.metrics_listen = None;
    let second = serve(settings, CancellationToken::new()).await;
    assert!(matches!(second, Err(CoordinatorError::Store { .. })), "{second:?}");
}

#[tokio::test]
async fn a_directory_without_a_cluster_is_told_what_to_do() {
    let dir = tempfile::tempdir().unwrap();
    let error = serve(CoordinatorSettings::new(dir.path()), CancellationToken::new()).await.unwrap_err();
    assert!(error.to_string().contains("mvm coordinator init"), "{error}");
}

#[tokio::test]
async fn the_keys_that_belong_offline_are_not_needed_to_run() {
    let (_dir, report) = new_cluster();
    for key in &report.offline_keys {
        std::fs::remove_file(&key.path).unwrap();
    }
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    running.push(&document("n1", 1), 0).await;
    running.stop().await;
}

#[tokio::test]
async fn the_own_certificate_is_renewed_while_running_and_sessions_stay() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| {
        settings.leaf_life = Duration::from_secs(12);
    })
    .await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let leaf = || mvm_pki::Credential::load(&report.coordinator_credential).unwrap().serial_hex().to_owned();
    let first = leaf();
    let mut look = tokio::time::interval(Duration::from_millis(50));
    let renewed = async {
        while leaf() == first {
            session.expect_quiet().await;
            look.tick().await;
        }
    };
    crate::support::soon("the renewal", renewed).await;
    session.expect_quiet().await;
    running.operator().await.get_info(GetInfoRequest {}).await.unwrap();
}
