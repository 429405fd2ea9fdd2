//! A document from the operator to the node, with all its stages.

use std::time::Duration;

use mvm_client::problem_of;
use mvm_proto::Problem;
use mvm_proto::wire::control::v1::{GetDocumentRequest, GetNodeRequest, PushRequest, RemoveNodeRequest};
use mvm_proto::wire::session::v1::{Ack, Acks, Hello, Stage, agent_frame};
use serde_json::json;

use crate::support::{
    Running, document, mark_of, new_cluster, new_cluster_with, push_request, soon, stages, wait_until,
};

#[tokio::test]
async fn a_push_is_told_from_validated_to_converged() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let document = document("n1", 2);
    let (progress, mark) = tokio::join!(running.push(&document, 20), session.obey());
    assert_eq!(stages(&progress), ["validated", "stored", "sent", "accepted", "converged"]);
    assert_eq!(progress.last().unwrap().mark, Some(mark.clone()));
    assert_eq!((mark.epoch, mark.generation), (1, 1));
    let known = running.operator().await.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap();
    let known = known.into_inner();
    assert_eq!(known.assigned, Some(mark.clone()));
    assert_eq!(known.status.unwrap().converged, Some(mark));
}

#[tokio::test]
async fn a_node_is_sent_what_changed_and_the_whole_when_it_has_another_document() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let deltas = async || running.metric("mvm_coordinator_document_deltas_sent_total").await;
    for (running_count, expected) in [(1, 0), (2, 1), (3, 2)] {
        let wanted = document("n1", running_count);
        let (progress, _) = tokio::join!(running.push(&wanted, 20), session.obey());
        assert_eq!(stages(&progress).last(), Some(&"converged"));
        assert_eq!(deltas().await, expected);
    }
    // It lost what it had, says so, and is believed for as long as the session lasts.
    session.held = None;
    for running_count in [4, 5] {
        let wanted = document("n1", running_count);
        let (_, mark) = tokio::join!(running.push(&wanted, 20), session.obey());
        assert_eq!(mark.generation, u64::from(running_count));
        assert_eq!(deltas().await, 3);
    }
}

#[tokio::test]
async fn a_node_that_knows_of_no_deltas_is_sent_whole_documents() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.dial().await.unwrap();
    let hello = Hello { features: Vec::new(), ..node.hello(None) };
    session.send(agent_frame::Body::Hello(hello)).await;
    session.welcome().await;
    for running_count in [1, 2] {
        let wanted = document("n1", running_count);
        tokio::join!(running.push(&wanted, 20), session.obey());
    }
    assert_eq!(running.metric("mvm_coordinator_document_deltas_sent_total").await, 0);
}

#[tokio::test]
async fn a_node_that_is_away_gets_the_newest_document_when_it_comes() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    for running_count in 1..=3 {
        assert_eq!(stages(&running.push(&document("n1", running_count), 0).await), ["validated", "stored"]);
    }
    let mut session = node.connect(None).await;
    let received = session.document().await;
    assert_eq!(mark_of(&received).generation, 3);
    assert_eq!(received.get().desired.tenants[0].pools[0].desired_counts.running, 3);
    session.expect_quiet().await;
}

#[tokio::test]
async fn a_document_is_sent_again_after_every_reconnect_until_the_node_reports_it() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    running.push(&document("n1", 1), 0).await;
    let mut last = None;
    for _ in 0..3 {
        let mut session = node.connect(None).await;
        last = Some(mark_of(&session.document().await));
        session.session.control.close(0, "crash");
    }
    let mut session = node.connect(last).await;
    session.expect_quiet().await;
}

#[tokio::test]
async fn the_end_of_patience_leaves_the_document_in_force() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let progress = running.push(&document("n1", 1), 1).await;
    assert_eq!(stages(&progress), ["validated", "stored", "waiting", "waiting"]);
    let mut session = node.connect(None).await;
    assert_eq!(mark_of(&session.document().await).generation, 1);
}

#[tokio::test]
async fn hanging_up_does_not_take_the_document_back() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut stream =
        running.operator().await.push(push_request(&document("n1", 1), 60)).await.unwrap().into_inner();
    soon("the first stage", stream.message()).await.unwrap();
    drop(stream);
    let mut operator = running.operator().await;
    wait_until("the document", || {
        let mut operator = operator.clone();
        async move { operator.get_document(GetDocumentRequest { node_id: "n1".into() }).await.is_ok() }
    })
    .await;
    let mut session = node.connect(None).await;
    session.obey().await;
    session.expect_quiet().await;
    let known = operator.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap().into_inner();
    assert_eq!(known.status.unwrap().converged.unwrap().generation, 1);
}

#[tokio::test]
async fn a_refusal_is_told_with_the_nodes_reason() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let problem = Problem::new(422, "no_room", "does not fit", "");
    let refuse = async {
        let mark = mark_of(&session.document().await);
        let ack = Ack {
            mark: Some(mark),
            stage: Stage::Refused.into(),
            problem: serde_json::to_vec(&problem).unwrap(),
            high_water: None,
        };
        session.send(agent_frame::Body::Acks(Acks { acks: vec![ack] })).await;
    };
    let document = document("n1", 1);
    let (progress, ()) = tokio::join!(running.push(&document, 20), refuse);
    let last = progress.last().unwrap();
    assert_eq!((last.stage.as_str(), last.message.as_str()), ("refused", "does not fit"));
    assert_eq!(serde_json::from_slice::<Problem>(&last.problem).unwrap(), problem);
}

#[tokio::test]
async fn a_bad_document_is_refused_whole_with_every_error_and_changes_nothing() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut operator = running.operator().await;
    let mut bad = document("n1", 1);
    bad["surprise"] = json!(1);
    bad["tenants"][0]["pools"][0]["instance_resources"]["vcpus"] = json!(99);
    let status = operator.push(push_request(&bad, 0)).await.unwrap_err();
    let problem = problem_of(&status).unwrap();
    assert_eq!(problem.code, "document_invalid");
    let paths: Vec<_> = problem.errors.iter().map(|error| error.path.as_str()).collect();
    assert!(paths.contains(&"tenants[0].pools[0].instance_resources.vcpus"), "{paths:?}");
    assert!(paths.contains(&"surprise"), "{paths:?}");
    assert!(operator.get_document(GetDocumentRequest { node_id: "n1".into() }).await.is_err());
}

#[tokio::test]
async fn documents_for_strangers_other_clusters_and_removed_nodes_are_refused() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut operator = running.operator().await;
    let status = operator.push(push_request(&document("stranger", 1), 0)).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "node_unknown");
    let mut foreign = document("n1", 1);
    foreign["cluster"] = json!("elsewhere");
    let status = operator.push(push_request(&foreign, 0)).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "wrong_cluster");
    operator.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    let status = operator.push(push_request(&document("n1", 1), 0)).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "node_removed");
}

#[tokio::test]
async fn a_dry_run_validates_asks_the_node_and_stores_nothing() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut operator = running.operator().await;
    let request = PushRequest { dry_run: true, ..push_request(&document("n1", 1), 5) };
    let mut stream = operator.push(request).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().stage, "validated");
    let status = stream.message().await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "node_not_connected");
    assert!(operator.get_document(GetDocumentRequest { node_id: "n1".into() }).await.is_err());
}

#[tokio::test]
async fn a_dry_run_refuses_what_is_too_large_once_its_defaults_are_filled_in() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut large = document("n1", 0);
    let tenant = &mut large["tenants"][0];
    let pool = tenant["pools"][0].clone();
    // Some 200 bytes each as written here, and three times that as sent.
    let pools = (0..8_000).map(|n| {
        let mut pool = pool.clone();
        pool["pool_id"] = format!("p{n}").into();
        pool
    });
    tenant["pools"] = pools.collect::<Vec<_>>().into();
    tenant["quotas"]["max_pools"] = 8_000.into();
    let request = PushRequest { dry_run: true, ..push_request(&large, 0) };
    let status = running.operator().await.push(request).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "document_too_large");
}

#[tokio::test]
async fn the_node_can_be_named_beside_the_document() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n2").await;
    let request = PushRequest { node_id: "n2".into(), ..push_request(&document("n1", 1), 0) };
    let mut stream = running.operator().await.push(request).await.unwrap().into_inner();
    while stream.message().await.unwrap().is_some() {}
    let mut session = node.connect(None).await;
    assert_eq!(session.document().await.get().desired.node_id.as_str(), "n2");
}

#[tokio::test]
async fn outside_a_dev_cluster_images_must_be_vouched_for_at_push_time() {
    let (_dir, report) = new_cluster_with(|_| {});
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let status = running.operator().await.push(push_request(&document("n1", 1), 0)).await.unwrap_err();
    let problem = problem_of(&status).unwrap();
    assert_eq!(problem.errors[0].path, "tenants[0].pools[0].image_digest");
}

#[tokio::test]
async fn fifty_simultaneous_pushes_get_fifty_numbers() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let operator = running.operator().await;
    let push = |n: u32| {
        let mut operator = operator.clone();
        async move {
            let mut stream =
                operator.push(push_request(&document("n1", n % 8), 0)).await.unwrap().into_inner();
            let mut generation = 0;
            while let Some(stage) = stream.message().await.unwrap() {
                generation = stage.mark.map_or(generation, |mark| mark.generation);
            }
            generation
        }
    };
    let mut generations = soon("the pushes", futures::future::join_all((0..50).map(push))).await;
    generations.sort_unstable();
    assert_eq!(generations, (1..=50).collect::<Vec<_>>());
    let mut session = node.connect(None).await;
    assert_eq!(mark_of(&session.document().await).generation, 50);
}

#[tokio::test]
async fn a_document_is_issued_again_at_half_of_its_life_with_the_same_content() {
    let (_dir, report) = new_cluster();
    let life = Duration::from_secs(8);
    let running = Running::start_with(&report.data_dir, |settings| settings.document_life = life).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    running.push(&document("n1", 5), 0).await;
    let first = session.document().await;
    session.ack(mark_of(&first), Stage::Accepted).await;
    let second = session.document().await;
    assert_eq!(second.get().desired, first.get().desired);
    assert_eq!(mark_of(&second).generation, mark_of(&first).generation + 1);
    let (before, after) = (&first.get().provenance, &second.get().provenance);
    assert!(after.issued_at.since(before.issued_at) >= life / 2);
    assert!(after.issued_at < before.expires_at && after.expires_at > before.expires_at);
}
