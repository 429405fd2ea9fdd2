//! The trust root and the images statement, shown and updated by operators.

use mvm_coordinator::{InitReport, problem_of};
use mvm_pki::trust::{RoleSpec, RootSpec};
use mvm_pki::{ImagesMetadata, SigningKey, TrustStore};
use mvm_proto::Digest;
use mvm_proto::status::Mark;
use mvm_proto::wire::control::v1::{GetNodeRequest, GetTrustRequest, TrustState, UpdateTrustRequest};

use crate::support::{
    Running, cluster_id, document, mark_of, new_cluster, new_cluster_with, now, push_request,
};

/// The next image statement, vouching for `digests`.
fn statement(version: u64, digests: Vec<Digest>) -> ImagesMetadata {
    ImagesMetadata {
        cluster: cluster_id(),
        version,
        issued_at: now(),
        expires_at: now() + std::time::Duration::from_secs(3600),
        digests,
        sources: Vec::new(),
    }
}

/// The chain as the coordinator holds it and one root more, sent whole as the command line does.
async fn next_root(running: &Running, report: &InitReport, change: impl FnOnce(&mut RootSpec)) -> TrustState {
    let key = SigningKey::from_file(&report.data_dir.join("signing/root.key")).unwrap();
    let mut store = TrustStore::load(&report.trust_file).unwrap();
    let mut spec = store.root().spec();
    change(&mut spec);
    let next = store.root().next(&spec, now()).unwrap().seal(&[&key]);
    store.advance_root(next, now()).unwrap();
    let bundle = store.bundle();
    let update = UpdateTrustRequest {
        roots: bundle.roots.iter().map(mvm_proto::Envelope::to_json).collect(),
        images: bundle.images.iter().map(mvm_proto::Envelope::to_json).collect(),
    };
    running.operator().await.update_trust(update).await.unwrap().into_inner()
}

#[tokio::test]
async fn a_chain_of_roots_sent_whole_is_followed_from_where_the_coordinator_is() {
    let (_dir, report) = new_cluster_with(|_| {});
    let running = Running::start(&report.data_dir).await;
    for version in [2, 3] {
        let state = next_root(&running, &report, |_| {}).await;
        assert_eq!((state.root_version, state.root_envelopes.len()), (version, version as usize));
    }
}

#[tokio::test]
async fn documents_that_a_replaced_director_signed_are_signed_anew_for_whoever_needs_them() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut node = running.enrol("n1").await;
    running.push(&document("n1", 3), 0).await;
    let key = SigningKey::generate().unwrap();
    next_root(&running, &report, |spec| spec.director = RoleSpec::single(key.public())).await;

    // The old key is of no use any more. That is no reason to end a session.
    let mut session = node.connect(None).await;
    session.trust().await;
    session.expect_quiet().await;
    drop(session);
    running.stop().await;

    std::fs::remove_file(&report.director_key).unwrap();
    key.to_file(&report.director_key).unwrap();
    node.trust = TrustStore::load(&report.trust_file).unwrap();
    let running = Running::start(&report.data_dir).await;
    node.address = running.addresses.quic;
    let mut session = node.connect(None).await;
    let received = session.document().await;
    assert_eq!(mark_of(&received).generation, 2);
    assert_eq!(received.get().desired.tenants[0].pools[0].desired_counts.running, 3);
}

#[tokio::test]
async fn a_root_that_resets_marks_brings_the_document_back_under_the_first_numbers() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let (node, away) = (running.enrol("n1").await, running.enrol("n2").await);
    running.push(&document("n1", 3), 0).await;
    running.push(&document("n2", 4), 0).await;
    let mut session = node.connect(None).await;
    session.obey().await;
    let burnt = Mark::new(1, (1 << 53) - 1, Digest::of(b"by a thief"));
    drop(session);
    let mut session = node.connect(Some(burnt.clone())).await;
    session.expect_quiet().await;

    next_root(&running, &report, |spec| spec.resets_high_water = true).await;
    assert_eq!(session.trust().await.roots.len(), 1);
    let mark = session.obey().await;
    assert_eq!((mark.epoch, mark.generation), (1, 1));
    running.push(&document("n1", 5), 0).await;
    assert_eq!(session.obey().await.generation, 2);

    // One that was away, and still names its burnt mark, forgets it with the trust that it is sent first.
    let mut session = away.connect(Some(burnt)).await;
    assert_eq!(session.trust().await.roots.len(), 1);
    let received = session.document().await;
    assert_eq!(mark_of(&received).generation, 1);
    let known = running.operator().await.get_node(GetNodeRequest { node_id: "n2".into() }).await.unwrap();
    assert_eq!(known.into_inner().events, []);
}

#[tokio::test]
async fn a_new_image_statement_is_checked_stored_and_sent_ahead_of_the_document_that_needs_it() {
    let (_dir, report) = new_cluster_with(|_| {});
    let key = SigningKey::from_file(&report.data_dir.join("signing/image.key")).unwrap();
    let running = Running::start(&report.data_dir).await;
    let mut node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let mut operator = running.operator().await;

    let digest = Digest::of(b"an image");
    let envelope = statement(2, vec![digest]).seal(&[&key]).to_json();
    let update = UpdateTrustRequest { roots: Vec::new(), images: vec![envelope.clone()] };
    let state = operator.update_trust(update).await.unwrap().into_inner();
    assert_eq!((state.images_version, state.image_digests), (2, 1));
    let trust = session.trust().await;
    assert_eq!((trust.roots.len(), trust.images), (0, vec![envelope]));

    let mut wanted = document("n1", 1);
    wanted["tenants"][0]["pools"][0]["image_digest"] = digest.to_string().into();
    running.push(&wanted, 0).await;
    assert_eq!(mark_of(&session.document().await).generation, 1);
    drop(session);
    running.stop().await;

    // It was durable, and a node that was away is told on its next hello.
    assert_eq!(TrustStore::load(&report.trust_file).unwrap().images_version(), 2);
    let running = Running::start(&report.data_dir).await;
    node.address = running.addresses.quic;
    let mut session = node.connect(None).await;
    assert_eq!(session.trust().await.images.len(), 1);
    session.document().await;
}

#[tokio::test]
async fn a_statement_by_the_wrong_key_or_out_of_order_changes_nothing() {
    let (_dir, report) = new_cluster_with(|_| {});
    let image = SigningKey::from_file(&report.data_dir.join("signing/image.key")).unwrap();
    let director = SigningKey::from_file(&report.data_dir.join("signing/director.key")).unwrap();
    let running = Running::start(&report.data_dir).await;
    let mut operator = running.operator().await;
    let before = operator.get_trust(GetTrustRequest {}).await.unwrap().into_inner();
    let wrong_key = statement(2, Vec::new()).seal(&[&director]).to_json();
    let same_version = statement(1, vec![Digest::of(b"other")]).seal(&[&image]).to_json();
    for images in [vec![wrong_key], vec![same_version], vec![b"junk".to_vec()]] {
        let update = UpdateTrustRequest { roots: Vec::new(), images };
        let status = operator.update_trust(update).await.unwrap_err();
        assert!(problem_of(&status).is_some(), "{status:?}");
    }
    assert_eq!(operator.get_trust(GetTrustRequest {}).await.unwrap().into_inner(), before);
}

#[tokio::test]
async fn trust_is_shown_with_its_keys() {
    let (_dir, report) = new_cluster_with(|_| {});
    let running = Running::start(&report.data_dir).await;
    let state = running.operator().await.get_trust(GetTrustRequest {}).await.unwrap().into_inner();
    let roles: Vec<_> = state.keys.iter().map(|key| key.role.as_str()).collect();
    assert_eq!(roles, ["root", "director", "image"]);
    assert!(!state.dev_cluster && state.root_version == 1 && !state.root_envelope.is_empty());
    let director = SigningKey::from_file(&report.director_key).unwrap();
    assert_eq!(state.keys[1].key_id, director.key_id());
}

#[tokio::test]
async fn a_director_that_the_root_does_not_name_signs_nothing() {
    let (_dir, report) = new_cluster_with(|settings| settings.dev = true);
    let stranger = SigningKey::generate().unwrap();
    std::fs::remove_file(&report.director_key).unwrap();
    stranger.to_file(&report.director_key).unwrap();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut stream =
        running.operator().await.push(push_request(&document("n1", 1), 0)).await.unwrap().into_inner();
    assert_eq!(stream.message().await.unwrap().unwrap().stage, "validated");
    let status = stream.message().await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "director_not_trusted");
}
