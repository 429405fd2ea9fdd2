//! The trust root and the images statement, shown and updated by operators.

use mvm_client::problem_of;
use mvm_coordinator::InitReport;
use mvm_pki::trust::{RoleSpec, RootSpec};
use mvm_pki::{ImagesMetadata, SigningKey, TrustStore};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::envelope::Payload as _;
use mvm_proto::status::Mark;
use mvm_proto::wire::control::v1::{
    GetDocumentRequest, GetNodeRequest, GetTrustRequest, TrustState, UpdateTrustRequest,
};
use mvm_proto::{Digest, Envelope, SignedDocument};
use mvm_store::{Settings as StoreSettings, SledStore, Store as _, Transaction};

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
async fn documents_of_a_replaced_director_are_signed_again_for_nodes_that_need_them() {
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

/// Puts `key` in the director's place while the coordinator is down.
async fn restart_with(running: Running, report: &InitReport, key: &SigningKey) -> Running {
    running.stop().await;
    std::fs::remove_file(&report.director_key).unwrap();
    key.to_file(&report.director_key).unwrap();
    Running::start(&report.data_dir).await
}

#[tokio::test]
async fn what_a_past_director_signs_later_is_not_signed_anew_and_the_node_s_row_says_what_to_do() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut node = running.enrol("n1").await;
    running.push(&document("n1", 3), 0).await;
    let old = SigningKey::from_file(&report.director_key).unwrap();
    let new = SigningKey::generate().unwrap();
    next_root(&running, &report, |spec| spec.director = RoleSpec::single(new.public())).await;
    let running = restart_with(running, &report, &new).await;
    let stored = running.operator().await.get_document(GetDocumentRequest { node_id: "n1".into() }).await;
    let stored = stored.unwrap().into_inner().envelope;
    running.stop().await;

    // A thief with the old key and a way into the store: other content under the same numbers.
    let mut document = SignedDocument::parse(&Envelope::from_json(&stored).unwrap().payload).unwrap();
    document.desired.tenants[0].pools[0].desired_counts.running = 7;
    let forged = mvm_pki::seal(DOCUMENT_PAYLOAD_TYPE, document.to_payload(), &[&old]).to_json();
    plant(&report, "n1", forged).await;

    let running = Running::start(&report.data_dir).await;
    (node.address, node.trust) = (running.addresses.quic, TrustStore::load(&report.trust_file).unwrap());
    let mut session = node.connect(None).await;
    session.expect_quiet().await;
    let request = GetNodeRequest { node_id: "n1".into() };
    let events = running.operator().await.get_node(request).await.unwrap().into_inner().events;
    let told = events.iter().find(|event| event.kind == "DocumentNotSent").unwrap();
    assert!(told.message.contains("Push the node's document again"), "{told:?}");

    running.push(&crate::support::document("n1", 4), 0).await;
    let received = session.document().await;
    assert_eq!(received.get().desired.tenants[0].pools[0].desired_counts.running, 4);
}

/// Replaces a stored envelope, as only a program that opens the store itself can.
async fn plant(report: &InitReport, node: &str, envelope: Vec<u8>) {
    let store = SledStore::open(report.data_dir.join("store"), StoreSettings::default()).await.unwrap();
    let key = format!("assigned/{node}");
    let assigned = store.get(&key).await.unwrap().unwrap();
    let both = Transaction::new().put(key, assigned.value).put(format!("envelopes/{node}"), envelope);
    store.commit(both).await.unwrap();
    store.close().await;
}

#[tokio::test]
async fn a_document_goes_on_being_issued_through_two_changes_of_the_director() {
    let (_dir, report) = new_cluster();
    let mut running = Running::start(&report.data_dir).await;
    let mut node = running.enrol("n1").await;
    running.push(&document("n1", 3), 0).await;
    // The node is away all the while, so that the document is issued again by none of those in between.
    for _ in 0..2 {
        let key = SigningKey::generate().unwrap();
        next_root(&running, &report, |spec| spec.director = RoleSpec::single(key.public())).await;
        running = restart_with(running, &report, &key).await;
    }
    (node.address, node.trust) = (running.addresses.quic, TrustStore::load(&report.trust_file).unwrap());
    let mut session = node.connect(None).await;
    let received = session.document().await;
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
async fn a_root_goes_into_force_though_the_images_statement_beside_it_is_refused() {
    let (_dir, report) = new_cluster_with(|_| {});
    let key = |name: &str| SigningKey::from_file(&report.data_dir.join("signing").join(name)).unwrap();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    let store = TrustStore::load(&report.trust_file).unwrap();
    let next = store.root().next(&store.root().spec(), now()).unwrap().seal(&[&key("root.key")]);
    let conflicting = statement(1, vec![Digest::of(b"evil")]).seal(&[&key("image.key")]);
    let update = UpdateTrustRequest { roots: vec![next.to_json()], images: vec![conflicting.to_json()] };
    let problem = problem_of(&running.operator().await.update_trust(update).await.unwrap_err()).unwrap();
    assert_eq!(problem.code, "trust_conflict");
    assert!(problem.detail.contains("root version 2 is in force"), "{}", problem.detail);
    assert_eq!(session.trust().await.roots, [next.to_json()]);
    let held = TrustStore::load(&report.trust_file).unwrap();
    assert_eq!((held.root_version(), held.images_version()), (2, 1));
    assert_eq!(held.images().unwrap().digests, []);
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
