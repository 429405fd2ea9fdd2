//! One declared change that reaches several nodes: its documents share a signature, older agents get one of their own, and a
//! node that does not answer keeps no other from its document.

use mvm_pki::batch::is_of_batch;
use mvm_proto::Envelope;
use mvm_proto::status::{Capacity, NodeInfo};
use mvm_proto::wire::session::v1::{Document, Hello, Stage, agent_frame, coordinator_frame};
use serde_json::{Value, json};

use crate::objects::{POOL, acme, connect, until};
use crate::rest::Rest;
use crate::support::{Node, Running, Session, mark_of, new_cluster};

/// One instance on each of so many nodes; `text` is what changes.
fn everywhere(running: u32, text: &str) -> Value {
    json!({ "spec": {
        "image": { "ref": "builtin:busybox" },
        "resources": { "vcpus": 1, "mem_mib": 64 },
        "counts": { "running": running },
        "placement": { "max_per_node": 1 },
        "health": { "exec": { "command": ["/bin/check", text.repeat(300)] } },
    } })
}

/// A session of an agent from before documents were signed together.
async fn connect_old(node: &Node) -> Session {
    let mut session = node.dial().await.unwrap();
    let hello = node.hello(None);
    let features = vec![mvm_proto::wire::FEATURE_STATUS_DELTAS.to_owned()];
    let capacity = Capacity { vcpus: 4, mem_mib: 65_536, disk_mib: 65_536, max_instances: 100 };
    let info = hello.info.clone().map(|info| NodeInfo { capacity: Some(capacity), ..info });
    session.send(agent_frame::Body::Hello(Hello { info, features, ..hello })).await;
    session.welcome().await;
    session
}

/// The envelope of the next document, which is whole and is verified as an agent verifies it.
async fn whole(session: &mut Session) -> Envelope {
    loop {
        let body = session.next().await;
        let verified = session.document_in(body.as_ref()).await;
        match body {
            Some(coordinator_frame::Body::Document(Document { envelope, .. })) => {
                assert!(verified.is_some());
                return Envelope::from_json(&envelope).unwrap();
            }
            Some(coordinator_frame::Body::DocumentDelta(_)) | None => panic!("expected a whole document"),
            Some(_) => {}
        }
    }
}

#[tokio::test]
async fn documents_of_one_change_share_a_signature_and_an_older_agent_gets_its_own() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let nodes = [running.enrol("a").await, running.enrol("b").await, running.enrol("c").await];
    let mut new = [connect(&nodes[0], 4, None).await, connect(&nodes[1], 4, None).await];
    let mut old = connect_old(&nodes[2]).await;
    let made = rest.put(POOL, &everywhere(3, "one")).await;
    assert_eq!(made.status, 201, "{}", made.body);
    // Each has one; now all change at once. No node accepted any, so none is sent as a delta.
    for session in new.iter_mut().chain([&mut old]) {
        whole(session).await;
    }
    assert_eq!(rest.put(POOL, &everywhere(3, "two")).await.status, 200);
    let mut signed = Vec::new();
    for session in &mut new {
        let envelope = whole(session).await;
        let signature = envelope.signatures[0].bytes.clone();
        assert!(is_of_batch(&signature), "{} bytes", signature.len());
        signed.push(signature);
    }
    let ed25519 = |signature: &[u8]| signature[signature.len() - 64..].to_vec();
    assert_eq!(ed25519(&signed[0]), ed25519(&signed[1]), "one signature");
    let of_old = whole(&mut old).await;
    assert!(!is_of_batch(&of_old.signatures[0].bytes));

    // What is stored is the shared one: an agent that was replaced by an older program meanwhile gets its own again.
    drop(old);
    let mut old = connect_old(&nodes[2]).await;
    assert_eq!(whole(&mut old).await, of_old, "the same bytes, signed the same way");
    drop(old);
    let mut renewed = connect(&nodes[2], 4, None).await;
    let again = whole(&mut renewed).await;
    assert_eq!(again.payload, of_old.payload);
    assert!(is_of_batch(&again.signatures[0].bytes));
    running.stop().await;
}

#[tokio::test]
async fn a_node_that_never_answers_keeps_no_other_from_its_document() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    let nodes = [running.enrol("a").await, running.enrol("b").await, running.enrol("c").await];
    let mut sessions = Vec::new();
    for node in &nodes {
        sessions.push(connect(node, 4, None).await);
    }
    let mut silent = sessions.remove(1);
    for text in ["one", "two", "three"] {
        let put = rest.put(POOL, &everywhere(3, text)).await;
        assert!(matches!(put.status, 200 | 201), "{}", put.body);
        for session in &mut sessions {
            let mark = loop {
                let body = session.next().await;
                if let Some(document) = session.document_in(body.as_ref()).await {
                    break mark_of(&document);
                }
            };
            session.ack(mark.clone(), Stage::Accepted).await;
        }
    }
    until(&mut rest, POOL, "/status/observed_generation", &json!(3)).await;
    // It is sent each of them whole: it never said that it has any.
    for _ in 0..3 {
        whole(&mut silent).await;
    }
    running.stop().await;
}
