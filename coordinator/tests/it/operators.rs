//! Operators: who is listed, what a removal ends, and what nodes are told of it.

use std::path::Path;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_client::{ControlClient, connect, problem_of};
use mvm_coordinator::create_operator;
use mvm_pki::{Credential, LiveCredential, Role};
use mvm_proto::wire::control::v1::{
    CreateTokenRequest, GetInfoRequest, ListOperatorsRequest, Operator, RemoveOperatorRequest,
    RenewCertificateRequest,
};
use mvm_proto::wire::session::v1::{RemovedOperators, coordinator_frame};
use serde_json::json;

use crate::support::{
    PATIENCE, Running, Session, cluster_id, enrol_body, new_cluster, new_request, now, post, soon,
};

const DAY: Duration = Duration::from_secs(24 * 3600);

/// Makes an operator from the files, as `mvm coordinator operator create` does.
fn make(data_dir: &Path, name: &str) -> LiveCredential {
    let out = data_dir.join(format!("made-{name}-{:08x}", fastrand::u32(..)));
    create_operator(data_dir, name, &out, DAY, now()).unwrap();
    LiveCredential::new(Credential::load(&out.join("operator.pem")).unwrap())
}

async fn client(running: &Running, credential: &LiveCredential) -> ControlClient {
    connect(&running.target(), credential, &running.anchors(), &cluster_id(), PATIENCE).await.unwrap()
}

/// The code of the refusal of a call, if it is refused.
async fn refusal(client: &mut ControlClient) -> Option<String> {
    let answer = client.get_info(GetInfoRequest {}).await;
    answer.err().map(|status| problem_of(&status).unwrap().code)
}

async fn list(running: &Running) -> Vec<Operator> {
    running.operator().await.list_operators(ListOperatorsRequest {}).await.unwrap().into_inner().operators
}

async fn states(running: &Running) -> Vec<(String, String)> {
    list(running).await.into_iter().map(|operator| (operator.name, operator.state)).collect()
}

fn named(pairs: &[(&str, &str)]) -> Vec<(String, String)> {
    pairs.iter().map(|(name, state)| ((*name).to_owned(), (*state).to_owned())).collect()
}

async fn remove(running: &Running, name: &str, force: bool) -> Result<Operator, String> {
    let request = RemoveOperatorRequest { name: name.to_owned(), force };
    match running.operator().await.remove_operator(request).await {
        Ok(answer) => Ok(answer.into_inner().operator.unwrap()),
        Err(status) => Err(problem_of(&status).unwrap().code),
    }
}

async fn told(session: &mut Session) -> RemovedOperators {
    match session.next().await {
        Some(coordinator_frame::Body::RemovedOperators(told)) => told,
        other => panic!("expected removed operators, found {other:?}"),
    }
}

#[tokio::test]
async fn operators_are_listed_from_the_first_on_also_those_made_while_the_coordinator_runs() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    assert_eq!(states(&running).await, named(&[("admin", "active")]));
    let alice = make(&report.data_dir, "alice");
    assert_eq!(states(&running).await, named(&[("admin", "active"), ("alice", "active")]));
    let (key, csr_der) = new_request();
    let request = RenewCertificateRequest { csr_der };
    let answer = client(&running, &alice).await.renew_certificate(request).await.unwrap().into_inner();
    let renewed = Credential::with_chain_pem(key, &answer.chain_pem).unwrap();
    running.stop().await;

    let running = Running::start(&report.data_dir).await;
    let alice = list(&running).await.into_iter().find(|operator| operator.name == "alice").unwrap();
    assert!(!alice.renewed_at.is_empty());
    assert_eq!(alice.not_after, renewed.not_after().to_string());
    let serials: Vec<_> = alice.certificates.iter().map(|certificate| certificate.serial.as_str()).collect();
    assert_eq!((serials.len(), serials[1]), (2, renewed.serial_hex()));
    running.stop().await;
}

#[tokio::test]
async fn a_removed_operator_is_refused_at_once_on_every_way_in_and_after_a_restart() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let alice = make(&report.data_dir, "alice");
    let mut live = client(&running, &alice).await;
    assert_eq!(refusal(&mut live).await, None);
    let http = running.http(Some(&alice)).await;

    assert_eq!(remove(&running, "alice", false).await.unwrap().state, "removed");
    assert_eq!(refusal(&mut live).await.as_deref(), Some("operator_removed"), "a live connection");
    assert_eq!(refusal(&mut client(&running, &alice).await).await.as_deref(), Some("operator_removed"));
    let body = json!({ "csr": STANDARD.encode(new_request().1) });
    assert_eq!(post(&http, "/v1/renew", &body).await.unwrap_err().code, "operator_removed");
    running.stop().await;

    let running = Running::start(&report.data_dir).await;
    assert_eq!(states(&running).await, named(&[("admin", "active"), ("alice", "removed")]));
    assert_eq!(refusal(&mut client(&running, &alice).await).await.as_deref(), Some("operator_removed"));
    running.stop().await;
}

#[tokio::test]
async fn an_operator_that_is_made_again_comes_back_without_its_old_certificates() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let lost = make(&report.data_dir, "alice");
    let mut old = client(&running, &lost).await;
    remove(&running, "alice", false).await.unwrap();
    let new = make(&report.data_dir, "alice");
    assert_eq!(refusal(&mut client(&running, &new).await).await, None);
    assert_eq!(refusal(&mut old).await.as_deref(), Some("certificate_revoked"));
    let body = json!({ "csr": STANDARD.encode(new_request().1) });
    let http = running.http(Some(&lost)).await;
    assert_eq!(post(&http, "/v1/renew", &body).await.unwrap_err().code, "certificate_revoked");
    let http = running.http(Some(&new)).await;
    assert!(post(&http, "/v1/renew", &body).await.is_ok());
    running.stop().await;
}

#[tokio::test]
async fn an_operator_from_before_records_were_kept_gets_one_by_its_first_use_unless_removed_before() {
    let (_dir, report) = new_cluster();
    let [seen, unseen] = ["seen", "unseen"].map(|name| make(&report.data_dir, name));
    // As a data directory of an older version is: no notes.
    std::fs::remove_dir_all(report.data_dir.join("pki/operators")).unwrap();
    let running = Running::start(&report.data_dir).await;
    assert_eq!(states(&running).await, named(&[("admin", "active")]), "seen by asking");
    assert_eq!(refusal(&mut client(&running, &seen).await).await, None);
    assert_eq!(states(&running).await, named(&[("admin", "active"), ("seen", "active")]));

    assert_eq!(remove(&running, "unseen", false).await, Err("operator_unknown".to_owned()));
    assert_eq!(remove(&running, "unseen", true).await.unwrap().state, "removed");
    assert_eq!(refusal(&mut client(&running, &unseen).await).await.as_deref(), Some("operator_removed"));
    running.stop().await;
}

#[tokio::test]
async fn the_last_operator_is_removed_by_force_only() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    assert_eq!(remove(&running, "admin", false).await, Err("last_operator".to_owned()));
    let alice = make(&report.data_dir, "alice");
    assert_eq!(remove(&running, "admin", false).await.unwrap().state, "removed");
    let mut alice = client(&running, &alice).await;
    let request = |force| RemoveOperatorRequest { name: "alice".to_owned(), force };
    let status = alice.remove_operator(request(false)).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "last_operator");
    alice.remove_operator(request(true)).await.unwrap();
    assert_eq!(refusal(&mut alice).await.as_deref(), Some("operator_removed"));
    running.stop().await;
}

#[tokio::test]
async fn nodes_are_told_of_removed_operators_when_it_happens_and_when_they_connect() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut session = node.connect(None).await;
    session.expect_quiet().await;
    let lost = make(&report.data_dir, "alice");
    remove(&running, "alice", false).await.unwrap();
    let first = told(&mut session).await;
    let [entry] = first.operators.as_slice() else { panic!("{first:?}") };
    assert_eq!((entry.name.as_str(), entry.except.len()), ("alice", 0));
    assert!(entry.until.parse::<mvm_proto::Timestamp>().unwrap() > lost.current().not_after());

    let new = make(&report.data_dir, "alice");
    assert_eq!(refusal(&mut client(&running, &new).await).await, None);
    let back = soon("the way back", told(&mut session)).await;
    assert_eq!(back.operators[0].except, [new.current().fingerprint().to_string()]);
    drop(session);
    let mut again = node.connect(None).await;
    assert_eq!(told(&mut again).await, back);
    again.expect_quiet().await;
    assert_eq!(node.credential.current().identity().role(), Role::Node);
    running.stop().await;
}

#[tokio::test]
async fn invented_names_leave_places_for_the_removal_of_those_that_are_there() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    make(&report.data_dir, "thief");
    for number in 0..128 {
        remove(&running, &format!("invented-{number}"), true).await.unwrap();
    }
    assert_eq!(remove(&running, "one-more", true).await.unwrap_err(), "too_many_removed_operators");
    assert_eq!(remove(&running, "thief", false).await.unwrap().state, "removed");
}

#[tokio::test]
async fn the_join_tokens_of_an_operator_end_with_its_removal() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let thief = make(&report.data_dir, "thief");
    let request = CreateTokenRequest { node_id: "n1".to_owned(), ttl_seconds: 86_400, names: Vec::new() };
    let token = client(&running, &thief).await.create_token(request).await.unwrap().into_inner().token;
    remove(&running, "thief", false).await.unwrap();
    let (_, csr) = new_request();
    let refused = post(&running.http(None).await, "/v1/enrol", &enrol_body(&token, &csr, "n1")).await;
    assert_eq!(refused.unwrap_err().code, "token_revoked");
}
