//! A node's certificates from its first token to its second.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use mvm_agent::upkeep::certs::{self, CertsError};
use mvm_pki::{CsrNames, JoinToken, Role};

use crate::serve::cluster::{Cluster, NODE, PATIENCE, Running, now, request, wait_until};
use crate::serve::coordinator::Coordinator;

const HOUR: Duration = Duration::from_secs(3600);

fn token_of(cluster: &Cluster) -> JoinToken {
    JoinToken::generate(cluster.root.fingerprint(), cluster.trust.root_digest()).unwrap()
}

fn desk(cluster: &Arc<Cluster>, tokens: &[&JoinToken], life: Duration) -> Coordinator {
    let tokens = tokens.iter().map(|token| JoinToken::parse(&token.expose()).unwrap()).collect();
    Coordinator::start_with(cluster, "127.0.0.1:0".parse().unwrap(), tokens, life)
}

#[tokio::test]
async fn a_node_enrols_by_the_tokens_fingerprint_once_and_then_rotates() {
    let cluster = Arc::new(Cluster::new());
    let token = token_of(&cluster);
    let coordinator = desk(&cluster, &[&token], HOUR);
    let dir = cluster.dir.path().join("certs");
    let node = Some(NODE.parse().unwrap());
    let status = certs::request(&dir, &coordinator.target(), &token, node, CsrNames::default(), PATIENCE)
        .await
        .unwrap();
    assert_eq!(status.identity, format!("spiffe://demo/node/{NODE}"));
    assert_eq!(certs::status(&dir, now()).unwrap().serial, status.serial);

    let rotated = certs::rotate(&dir, None, PATIENCE).await.expect("the coordinator is remembered");
    assert_ne!(rotated.serial, status.serial);
    assert_eq!(certs::status(&dir, now()).unwrap().serial, rotated.serial);

    let used = certs::request(&dir, &coordinator.target(), &token, None, CsrNames::default(), PATIENCE).await;
    assert!(
        matches!(&used, Err(CertsError::Refused { problem, .. }) if problem.code == "token_refused"),
        "{used:?}"
    );
    assert_eq!(certs::status(&dir, now()).unwrap().serial, rotated.serial, "a refusal changes nothing");
    coordinator.stop().await;
}

#[tokio::test]
async fn a_certificate_past_its_expiry_is_not_rotated_but_replaced_by_a_new_token() {
    let cluster = Arc::new(Cluster::new());
    let token = token_of(&cluster);
    let coordinator = desk(&cluster, &[&token], HOUR);
    let mut settings = cluster.settings();
    settings.certs_dir = cluster.dir.path().join("certs");
    cluster.enrol_with(&settings, &cluster.credential_for(Role::Node, NODE, Duration::from_secs(1)));
    let expiry = certs::status(&settings.certs_dir, now()).unwrap().not_after;
    wait_until(|| now() > expiry).await;

    let target = coordinator.target();
    let rotated = certs::rotate(&settings.certs_dir, Some(&target), PATIENCE).await;
    assert!(matches!(rotated, Err(CertsError::Expired { .. })), "{rotated:?}");
    let fresh = certs::request(&settings.certs_dir, &target, &token, None, CsrNames::default(), PATIENCE)
        .await
        .unwrap();
    assert!(fresh.not_after > now());
    coordinator.stop().await;
}

#[tokio::test]
async fn someone_else_at_the_coordinators_address_gets_no_token() {
    let (ours, theirs) = (Arc::new(Cluster::new()), Arc::new(Cluster::new()));
    let token = token_of(&ours);
    let impostor = desk(&theirs, &[&token], HOUR);
    let dir = ours.dir.path().join("certs");
    let result = certs::request(&dir, &impostor.target(), &token, None, CsrNames::default(), PATIENCE).await;
    assert!(matches!(result, Err(CertsError::RootNotThere { .. })), "{result:?}");

    let ca = ours.dir.path().join("ca.crt");
    ours.anchors().save(&ca).unwrap();
    certs::init(&dir, &ca, false).unwrap();
    let result = certs::request(&dir, &impostor.target(), &token, None, CsrNames::default(), PATIENCE).await;
    assert!(matches!(result, Err(CertsError::Connect { .. })), "{result:?}");
    impostor.stop().await;
}

#[tokio::test]
async fn a_coordinator_that_serves_another_trust_root_than_the_token_names_is_refused() {
    let cluster = Arc::new(Cluster::new());
    let other = Cluster::new();
    let (honest, forged) = (token_of(&cluster), {
        let fingerprint = cluster.root.fingerprint();
        JoinToken::generate(fingerprint, other.trust.root_digest()).unwrap()
    });
    let coordinator = desk(&cluster, &[&honest, &forged], HOUR);
    let dir = cluster.dir.path().join("certs");
    let target = coordinator.target();
    let refused = certs::request(&dir, &target, &forged, None, CsrNames::default(), PATIENCE).await;
    assert!(
        matches!(&refused, Err(CertsError::TrustRootNotThere { cause, .. }) if cause.code() == "trust_root_other"),
        "{refused:?}"
    );
    assert!(!dir.join("trust.json").exists() && !dir.join("node.pem").exists());
    certs::request(&dir, &target, &honest, None, CsrNames::default(), PATIENCE).await.unwrap();
    let pinned = mvm_pki::TrustStore::load(&dir.join("trust.json")).unwrap();
    assert_eq!(pinned.root_digest(), honest.trust_root());
    coordinator.stop().await;
}

#[tokio::test]
async fn a_certificate_for_another_node_than_expected_is_not_stored() {
    let cluster = Arc::new(Cluster::new());
    let token = token_of(&cluster);
    let coordinator = desk(&cluster, &[&token], HOUR);
    let dir = cluster.dir.path().join("certs");
    let other = Some("node-9".parse().unwrap());
    let result =
        certs::request(&dir, &coordinator.target(), &token, other, CsrNames::default(), PATIENCE).await;
    assert!(matches!(result, Err(CertsError::BadAnswer { .. })), "{result:?}");
    assert!(matches!(certs::status(&dir, now()), Err(CertsError::NotEnrolled { .. })));
    coordinator.stop().await;
}

#[tokio::test]
async fn a_stolen_coordinator_certificate_can_not_give_a_node_other_roots() {
    let (cluster, thief) = (Arc::new(Cluster::new()), Arc::new(Cluster::new()));
    let mut old_and_new = cluster.anchors();
    old_and_new.add(thief.root.certificate().clone()).unwrap();
    for roots in [thief.anchors(), old_and_new] {
        let token = token_of(&cluster);
        let tokens = vec![JoinToken::parse(&token.expose()).unwrap()];
        let impostor = Coordinator::start_thief(&cluster, &thief, &roots, tokens);
        let dir = tempfile::tempdir_in(cluster.dir.path()).unwrap();
        let joining = dir.path().join("joining");
        let joined =
            certs::request(&joining, &impostor.target(), &token, None, CsrNames::default(), PATIENCE).await;
        assert!(matches!(joined, Err(CertsError::BadAnswer { .. })), "{joined:?}");
        assert!(matches!(certs::status(&joining, now()), Err(CertsError::NotEnrolled { .. })));

        let mut settings = cluster.settings();
        settings.certs_dir = dir.path().join("member");
        cluster.enrol(&settings);
        let before = certs::status(&settings.certs_dir, now()).unwrap();
        let rotated = certs::rotate(&settings.certs_dir, Some(&impostor.target()), PATIENCE).await;
        assert!(matches!(rotated, Err(CertsError::BadAnswer { .. })), "{rotated:?}");
        let after = certs::status(&settings.certs_dir, now()).unwrap();
        assert_eq!((after.serial, after.roots), (before.serial, before.roots));
        impostor.stop().await;
    }
}

#[test]
fn a_pinned_root_is_not_replaced_by_another_unless_forced() {
    let (first, second) = (Cluster::new(), Cluster::named("other"));
    let dir = first.dir.path().join("certs");
    let save = |cluster: &Cluster, name: &str| {
        let path = first.dir.path().join(name);
        cluster.anchors().save(&path).unwrap();
        path
    };
    let (one, two) = (save(&first, "one.crt"), save(&second, "two.crt"));
    let report = certs::init(&dir, &one, false).unwrap();
    assert_eq!((report.fingerprints, report.unchanged), (vec![first.root.fingerprint()], false));
    assert!(certs::init(&dir, &one, false).unwrap().unchanged);
    assert!(matches!(certs::init(&dir, &two, false), Err(CertsError::OtherRootPinned { .. })));
    assert_eq!(certs::init(&dir, &two, true).unwrap().cluster.as_str(), "other");
    let text = first.dir.path().join("text");
    std::fs::write(&text, "no certificate").unwrap();
    assert!(matches!(certs::init(&dir, &text, true), Err(CertsError::NotARoot { .. })));
}

#[tokio::test]
async fn a_running_agent_goes_over_to_a_rotated_certificate_without_dropping_a_connection() {
    let cluster = Arc::new(Cluster::new());
    let coordinator = desk(&cluster, &[], 2 * HOUR);
    let mut settings = cluster.settings();
    settings.session = false;
    cluster.enrol(&settings);
    let agent = Running::start(settings.clone()).await;
    let client = cluster.client(agent.api(), Some((Role::Operator, "alice"))).await.unwrap();
    let before = certs::status(&settings.certs_dir, now()).unwrap().not_after;

    let rotated = certs::rotate(&settings.certs_dir, Some(&coordinator.target()), PATIENCE).await.unwrap();
    assert_ne!(rotated.not_after, before);
    let expiry =
        format!("mvm_agent_expiry_timestamp_seconds{{of=\"certificate\"}} {}", rotated.not_after.unix_secs());
    let noticed = async {
        while !crate::serve::cluster::get_local(agent.metrics, "/metrics").await.1.contains(&expiry) {}
    };
    tokio::time::timeout(PATIENCE, noticed).await.unwrap();
    let answer = client.request(request(Method::GET, agent.api(), "/v1/node/info", "")).await.unwrap();
    assert_eq!(answer.status(), 200);
    agent.stop().await.unwrap();
    coordinator.stop().await;
}
