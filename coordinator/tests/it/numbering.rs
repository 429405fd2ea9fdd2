//! Nodes that remember more than the store: restored backups and nodes from elsewhere.

use std::time::Duration;

use mvm_proto::Digest;
use mvm_proto::status::Mark;
use mvm_proto::wire::control::v1::{GetNodeRequest, RemoveNodeRequest};
use mvm_proto::wire::session::v1::{Ack, Acks, Stage, agent_frame};

use crate::support::{Running, document, mark_of, new_cluster, now, wait_until};

fn copy_dir(from: &std::path::Path, to: &std::path::Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let target = to.join(entry.file_name());
        match entry.path().is_dir() {
            true => copy_dir(&entry.path(), &target),
            false => drop(std::fs::copy(entry.path(), target).unwrap()),
        }
    }
}

#[tokio::test]
async fn a_coordinator_restored_from_an_old_backup_leaves_nodes_as_they_are_and_goes_on_above_their_marks() {
    let (dir, report) = new_cluster();
    // So short a life that the document is due to be issued again when it comes back from the backup.
    let life = Duration::from_secs(8);
    let running = Running::start_with(&report.data_dir, |settings| settings.document_life = life).await;
    let mut node = running.enrol("n1").await;
    running.push(&document("n1", 1), 0).await;
    let due = now() + life / 2;
    running.stop().await;
    let (store, backup) = (report.data_dir.join("store"), dir.path().join("backup"));
    copy_dir(&store, &backup);

    // Two more starts and three more documents that the backup knows nothing of.
    let mut newest = None;
    for count in [2, 3, 4] {
        let running = Running::start(&report.data_dir).await;
        node.address = running.addresses.quic;
        running.push(&document("n1", count), 0).await;
        let mut session = node.connect(newest).await;
        newest = Some(mark_of(&session.document().await));
        drop(session);
        running.stop().await;
    }
    let newest = newest.unwrap();
    assert_eq!((newest.epoch, newest.generation), (4, 4));

    wait_until("the backup's document to be due", || async { now() > due }).await;
    std::fs::remove_dir_all(&store).unwrap();
    copy_dir(&backup, &store);
    let running = Running::start_with(&report.data_dir, |settings| settings.document_life = life).await;
    node.address = running.addresses.quic;
    for _ in 0..2 {
        let mut session = node.connect(Some(newest.clone())).await;
        session.expect_quiet().await;
    }
    let mut session = node.connect(Some(newest.clone())).await;
    session.expect_quiet().await;
    let known = running.operator().await.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap();
    let known = known.into_inner();
    let kinds: Vec<_> = known.events.iter().map(|event| event.kind.as_str()).collect();
    assert_eq!(kinds, ["StoredDocumentOlder"], "told once, however often the node dials");
    assert_eq!(known.assigned.unwrap().generation, 1);

    running.push(&document("n1", 6), 0).await;
    let received = session.document().await;
    let mark = mark_of(&received);
    assert_eq!((mark.epoch, mark.generation), (4, 5));
    assert_eq!(received.get().desired.tenants[0].pools[0].desired_counts.running, 6);
    // From here on it is issued again like any other.
    assert_eq!(mark_of(&session.document().await).generation, 6);
}

#[tokio::test]
async fn the_mark_of_a_node_without_a_document_is_remembered_for_its_first() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mark = Mark::new(7, 41, Digest::of(b"elsewhere"));
    let mut session = node.connect(Some(mark)).await;
    session.expect_quiet().await;
    drop(session);
    running.push(&document("n1", 1), 0).await;
    let known = running.operator().await.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap();
    let assigned = known.into_inner().assigned.unwrap();
    assert_eq!((assigned.epoch, assigned.generation), (7, 42));
}

#[tokio::test]
async fn a_node_that_refuses_because_it_is_ahead_gets_the_document_under_higher_numbers() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    running.push(&document("n1", 1), 0).await;
    let mark = mark_of(&session.document().await);
    let ack = Ack {
        mark: Some(mark),
        stage: Stage::Refused.into(),
        problem: Vec::new(),
        high_water: Some(Mark::new(3, 9, Digest::of(b"x"))),
    };
    session.send(agent_frame::Body::Acks(Acks { acks: vec![ack] })).await;
    let again = mark_of(&session.document().await);
    assert_eq!((again.epoch, again.generation), (3, 10));
}

#[tokio::test]
async fn a_node_that_claims_the_highest_numbers_harms_only_itself_and_until_it_is_enrolled_again() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let liar = running.enrol("n1").await;
    running.enrol("n2").await;
    let mark = Mark::new((1 << 53) - 1, (1 << 53) - 1, Digest::of(b"x"));
    let mut session = liar.connect(Some(mark)).await;
    session.expect_quiet().await;
    let mut operator = running.operator().await;
    let mut stream =
        operator.push(crate::support::push_request(&document("n1", 1), 0)).await.unwrap().into_inner();
    let status = loop {
        match stream.message().await {
            Ok(stage) => assert_eq!(stage.unwrap().stage, "validated"),
            Err(status) => break status,
        }
    };
    assert_eq!(mvm_client::problem_of(&status).unwrap().code, "numbers_exhausted");
    let other = running.push(&document("n2", 1), 0).await;
    let mark = other.last().unwrap().mark.clone().unwrap();
    assert_eq!((mark.epoch, mark.generation), (1, 1));

    // Installed anew and enrolled again, it is a node like any other.
    drop(session);
    operator.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    let honest = running.enrol("n1").await;
    let mut session = honest.connect(None).await;
    running.push(&document("n1", 1), 0).await;
    assert_eq!(mark_of(&session.document().await).generation, 1);
}

#[tokio::test]
async fn a_removed_node_that_comes_back_goes_on_from_its_numbers() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    running.push(&document("n1", 1), 0).await;
    running.push(&document("n1", 2), 0).await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    session.expect_quiet().await;
    running.push(&document("n1", 3), 0).await;
    assert_eq!(mark_of(&session.document().await).generation, 3);
}
