//! What is accepted, what is refused and by which code, and that it is durable.

use mvm_agent::clock::Clock;
use mvm_agent::intake::acceptor::{Acceptor, HardLimits};
use mvm_pki::signing::{SigningKey, seal};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::{Digest, Envelope};
use serde_json::json;

use crate::node::cluster::{Cluster, at, payload};
use crate::node::documents::tenant;

async fn code(acceptor: &Acceptor, envelope: &[u8]) -> String {
    match acceptor.accept(envelope).await {
        Ok(accepted) => if accepted.is_new { "new" } else { "same" }.to_owned(),
        Err(problem) => problem.code,
    }
}

/// Accepts generation 5 of epoch 2, then answers what becomes of `payload`.
async fn after_five(change: impl FnOnce(&mut serde_json::Value)) -> String {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    assert_eq!(code(&acceptor, &cluster.sign(&payload(2, 5))).await, "new");
    let mut next = payload(2, 6);
    change(&mut next);
    let answer = code(&acceptor, &cluster.sign(&next)).await;
    let generation = acceptor.high_water().unwrap().generation;
    let moved = if answer == "new" { next["generation"].as_u64().unwrap() } else { 5 };
    assert_eq!(generation, moved, "a refused document leaves the mark alone");
    answer
}

#[tokio::test]
async fn a_higher_generation_is_accepted() {
    assert_eq!(after_five(|_| {}).await, "new");
}

#[tokio::test]
async fn a_document_older_than_the_ledger_is_refused() {
    assert_eq!(after_five(|d| d["generation"] = json!(4)).await, "stale_generation");
}

#[tokio::test]
async fn the_document_in_force_again_is_a_no_op() {
    assert_eq!(after_five(|d| *d = payload(2, 5)).await, "same");
}

#[tokio::test]
async fn the_same_generation_with_other_content_is_a_conflict() {
    let answer = after_five(|d| {
        d["generation"] = json!(5);
        d["prune_unknown_pools"] = json!(true);
    });
    assert_eq!(answer.await, "generation_conflict");
}

#[tokio::test]
async fn a_higher_epoch_may_begin_again_with_a_lower_generation() {
    let answer = after_five(|d| {
        d["epoch"] = json!(3);
        d["generation"] = json!(1);
    });
    assert_eq!(answer.await, "new");
}

#[tokio::test]
async fn a_lower_epoch_is_refused_whatever_its_generation() {
    let answer = after_five(|d| {
        d["epoch"] = json!(1);
        d["generation"] = json!(900);
    });
    assert_eq!(answer.await, "stale_generation");
}

#[tokio::test]
async fn another_nodes_document_is_refused() {
    assert_eq!(after_five(|d| d["node_id"] = json!("node-2")).await, "wrong_node");
}

#[tokio::test]
async fn another_clusters_document_is_refused() {
    assert_eq!(after_five(|d| d["cluster"] = json!("elsewhere")).await, "wrong_cluster");
}

#[tokio::test]
async fn an_expired_document_is_refused() {
    assert_eq!(after_five(|d| d["expires_at"] = json!(at(-1).to_string())).await, "expired");
}

#[tokio::test]
async fn a_document_from_more_than_five_minutes_ahead_is_refused() {
    assert_eq!(after_five(|d| d["issued_at"] = json!(at(301).to_string())).await, "from_the_future");
    assert_eq!(after_five(|d| d["issued_at"] = json!(at(299).to_string())).await, "new");
}

#[tokio::test]
async fn an_unknown_schema_version_is_refused_as_such() {
    assert_eq!(after_five(|d| d["schema_version"] = json!(2)).await, "schema_version_unknown");
}

#[tokio::test]
async fn an_invalid_document_is_refused_with_all_its_errors() {
    let cluster = Cluster::dev();
    let mut bad = payload(1, 1);
    bad["tenants"][0]["pools"][0]["instance_resources"]["vcpus"] = json!(99);
    bad["surprise"] = json!(1);
    let problem = cluster.open().accept(&cluster.sign(&bad)).await.unwrap_err();
    assert_eq!((problem.code.as_str(), problem.status), ("document_invalid", 422));
    assert!(problem.errors.len() >= 2, "{problem}");
}

#[tokio::test]
async fn signatures_are_refused_by_what_is_wrong_with_them() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    let bytes = payload(1, 1).to_string().into_bytes();
    let signed_by = |key: &SigningKey| seal(DOCUMENT_PAYLOAD_TYPE, bytes.clone(), &[key]).to_json();

    assert_eq!(code(&acceptor, &signed_by(&SigningKey::generate().unwrap())).await, "bad_signature");
    assert_eq!(code(&acceptor, &signed_by(&cluster.image)).await, "wrong_key_role");
    assert_eq!(code(&acceptor, &signed_by(&cluster.root)).await, "wrong_key_role");

    let mut envelope = Envelope::from_json(&signed_by(&cluster.director)).unwrap();
    envelope.signatures.clear();
    assert_eq!(code(&acceptor, &envelope.to_json()).await, "unsigned");

    let mut flipped = Envelope::from_json(&signed_by(&cluster.director)).unwrap();
    flipped.payload[20] ^= 1;
    assert_eq!(code(&acceptor, &flipped.to_json()).await, "bad_signature");

    let other_type = seal("text/plain", bytes.clone(), &[&cluster.director]).to_json();
    assert_eq!(code(&acceptor, &other_type).await, "bad_envelope");
    assert_eq!(code(&acceptor, b"{\"payload\":").await, "bad_envelope");
    assert_eq!(code(&acceptor, &vec![b' '; 10 * 1024 * 1024]).await, "document_too_large");
    assert_eq!(acceptor.high_water(), None);
    assert!(!cluster.ledger().exists(), "nothing that was refused is written");
}

#[tokio::test]
async fn outside_a_dev_cluster_only_images_that_are_vouched_for_may_run() {
    let cluster = Cluster::production();
    let acceptor = cluster.open();
    let digest = Digest::of(b"image");
    let mut document = payload(1, 1);
    document["tenants"][0]["pools"][0]["image_digest"] = json!(digest.to_string());
    assert_eq!(code(&acceptor, &cluster.sign(&document)).await, "images_missing");
    acceptor.update_trust(&[], &[cluster.images(&[digest])]).await.unwrap();
    assert_eq!(code(&acceptor, &cluster.sign(&document)).await, "new");
    document["generation"] = json!(2);
    document["tenants"][0]["pools"][0]["image_digest"] = json!(Digest::of(b"other").to_string());
    assert_eq!(code(&acceptor, &cluster.sign(&document)).await, "images_unknown");
    assert_eq!(cluster.open().images_version(), 1, "the statement survives a restart");
}

#[tokio::test]
async fn no_signature_lifts_the_nodes_own_limits() {
    let cluster = Cluster::dev();
    let mut settings = cluster.settings();
    settings.limits = HardLimits { max_tenants: 1, max_instances: 3 };
    let acceptor = Acceptor::open(settings, Clock::new(|| at(0))).unwrap();
    let mut document = payload(1, 1);
    document["tenants"][0]["pools"][0]["desired_counts"] = json!({"running": 2, "warm": 1, "sleeping": 1});
    assert_eq!(code(&acceptor, &cluster.sign(&document)).await, "over_node_limit");
    let mut document = payload(1, 1);
    document["tenants"].as_array_mut().unwrap().push(tenant("other", 4, &[]));
    assert_eq!(code(&acceptor, &cluster.sign(&document)).await, "over_node_limit");
    assert_eq!(code(&acceptor, &cluster.sign(&payload(1, 1))).await, "new");
}

#[tokio::test]
async fn what_was_accepted_is_in_force_after_a_restart_and_past_its_expiry() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    let mut current_document = acceptor.current_document();
    assert!(current_document.borrow_and_update().is_none());
    acceptor.accept(&cluster.sign(&payload(2, 5))).await.unwrap();
    assert!(current_document.has_changed().unwrap());
    let mark = acceptor.high_water();
    drop(acceptor);

    cluster.set_time(10 * 86_400);
    let acceptor = cluster.open();
    assert_eq!(acceptor.high_water(), mark);
    let current_document = acceptor.current_document().borrow().clone().unwrap();
    assert_eq!((current_document.mark.clone(), current_document.expires_at), (mark, Some(at(86_400))));
    assert_eq!(code(&acceptor, &cluster.sign(&payload(2, 6))).await, "expired");
}

#[tokio::test]
async fn a_root_that_resets_marks_lets_a_lower_generation_in_and_keeps_the_document_in_force() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    acceptor.accept(&cluster.sign(&payload(2, 900))).await.unwrap();
    acceptor.update_trust(&[cluster.next_root(true)], &[]).await.unwrap();
    assert_eq!((acceptor.high_water(), acceptor.root_version()), (None, 2));
    assert!(acceptor.current_document().borrow().is_some());
    drop(acceptor);
    let acceptor = cluster.open();
    assert_eq!(acceptor.high_water(), None);
    assert!(acceptor.current_document().borrow().is_some());
    assert_eq!(code(&acceptor, &cluster.sign(&payload(1, 1))).await, "new");
    assert_eq!(cluster.open().high_water().unwrap().generation, 1, "the reset happens once");
}

#[tokio::test]
async fn a_crash_between_the_root_and_the_ledger_still_resets_the_mark() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    acceptor.accept(&cluster.sign(&payload(2, 900))).await.unwrap();
    let before = std::fs::read(cluster.ledger()).unwrap();
    acceptor.update_trust(&[cluster.next_root(true)], &[]).await.unwrap();
    drop(acceptor);
    std::fs::write(cluster.ledger(), before).unwrap();
    assert_eq!(cluster.open().high_water(), None);
}

#[tokio::test]
async fn a_reset_that_failed_is_done_when_the_root_is_sent_again() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    acceptor.accept(&cluster.sign(&payload(2, 900))).await.unwrap();
    // A folder in the ledger's place: nothing can be renamed over it.
    std::fs::remove_file(cluster.ledger()).unwrap();
    std::fs::create_dir_all(cluster.ledger().join("in the way")).unwrap();
    let root = cluster.next_root(true);
    acceptor.update_trust(std::slice::from_ref(&root), &[]).await.unwrap_err();
    assert_eq!((acceptor.high_water().unwrap().generation, acceptor.root_version()), (900, 2));
    std::fs::remove_dir_all(cluster.ledger()).unwrap();
    acceptor.update_trust(&[root], &[]).await.unwrap();
    assert_eq!(acceptor.high_water(), None);
    assert_eq!(cluster.open().high_water(), None);
}

#[tokio::test]
async fn a_root_goes_into_force_though_the_images_statement_beside_it_is_refused() {
    let cluster = Cluster::production();
    let acceptor = cluster.open();
    acceptor.update_trust(&[], &[cluster.images(&[Digest::of(b"good")])]).await.unwrap();
    let conflicting = cluster.images(&[Digest::of(b"evil")]);
    let problem = acceptor.update_trust(&[cluster.next_root(false)], &[conflicting]).await.unwrap_err();
    assert_eq!(problem.code, "trust_conflict");
    assert_eq!((acceptor.root_version(), acceptor.images_version()), (2, 1));
    assert_eq!(cluster.open().root_version(), 2);
}

#[tokio::test]
async fn a_root_that_does_not_ask_for_it_resets_nothing() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    acceptor.accept(&cluster.sign(&payload(2, 9))).await.unwrap();
    acceptor.update_trust(&[cluster.next_root(false)], &[]).await.unwrap();
    assert_eq!(acceptor.high_water().unwrap().generation, 9);
    assert_eq!(cluster.open().high_water().unwrap().generation, 9);
}

#[tokio::test]
async fn a_damaged_ledger_is_an_error_and_never_an_empty_one() {
    let cluster = Cluster::dev();
    cluster.open().accept(&cluster.sign(&payload(2, 9))).await.unwrap();
    let whole = std::fs::read(cluster.ledger()).unwrap();
    for length in [0, 1, whole.len() / 2, whole.len() - 1] {
        std::fs::write(cluster.ledger(), &whole[..length]).unwrap();
        let problem = cluster.try_open().unwrap_err();
        assert_eq!(problem.code, "ledger_damaged", "{length} bytes");
        assert!(problem.detail.contains("ledger.json") && !problem.remediation.is_empty());
    }
    let other = String::from_utf8(whole.clone()).unwrap().replace("\"generation\":9", "\"generation\":1");
    std::fs::write(cluster.ledger(), other).unwrap();
    assert_eq!(cluster.try_open().unwrap_err().code, "ledger_damaged");
    std::fs::write(cluster.ledger(), whole).unwrap();
    assert_eq!(cluster.open().high_water().unwrap().generation, 9);
}

#[tokio::test]
async fn of_many_pushes_at_once_exactly_one_is_new_per_generation() {
    let cluster = Cluster::dev();
    let acceptor = cluster.open();
    let pushes = (0..16).map(|n| {
        let mut document = payload(1, 1);
        document["tenants"][0]["pools"][0]["desired_counts"]["running"] = json!(n);
        let (acceptor, envelope) = (acceptor.clone(), cluster.sign(&document));
        tokio::spawn(async move { code(&acceptor, &envelope).await })
    });
    let mut answers = Vec::new();
    for push in pushes.collect::<Vec<_>>() {
        answers.push(push.await.unwrap());
    }
    assert_eq!(answers.iter().filter(|answer| *answer == "new").count(), 1);
    assert_eq!(answers.iter().filter(|answer| *answer == "generation_conflict").count(), 15);
}
