//! Enrolment over HTTP/3: certificates by token, renewal, and what is refused.

use std::net::IpAddr;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::Request;
use mvm_coordinator::CoordinatorSettings;
use mvm_pki::{Anchors, Credential, CsrNames, LeafKey, LiveCredential, Role, TrustBundle, TrustStore};
use mvm_proto::wire::control::v1::{CreateTokenRequest, GetNodeRequest, RemoveNodeRequest};
use mvm_proto::wire::session::v1::agent_frame;
use serde_json::json;

use crate::support::{
    Running, cluster_id, enrol_body, fetch, new_cluster, new_cluster_with, new_request, now, post,
};

fn get(path: &str) -> Request<Bytes> {
    Request::get(format!("https://127.0.0.1{path}")).body(Bytes::new()).unwrap()
}

#[tokio::test]
async fn anyone_may_fetch_the_roots_and_the_trust_which_prove_themselves() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let http = running.http(None).await;
    let (status, media, body) = fetch(&http, get("/v1/ca")).await;
    assert_eq!((status.as_u16(), media.as_str()), (200, "application/x-pem-file"));
    let anchors = Anchors::from_pem(std::str::from_utf8(&body).unwrap()).unwrap();
    assert_eq!(anchors.fingerprints(), [report.ca_fingerprint]);
    let (_, _, body) = fetch(&http, get("/v1/trust")).await;
    let bundle: TrustBundle = serde_json::from_slice(&body).unwrap();
    let (trust, _) = TrustStore::pin_digest(&bundle, report.trust_digest, now()).unwrap();
    assert_eq!(trust.cluster(), &cluster_id());
}

#[tokio::test]
async fn what_is_not_there_is_answered_with_a_problem() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let http = running.http(None).await;
    for (path, code) in [("/nothing", 404), ("/v1/enrol", 405)] {
        let (status, media, _) = fetch(&http, get(path)).await;
        assert_eq!((status.as_u16(), media.as_str()), (code, "application/problem+json"), "{path}");
    }
}

#[tokio::test]
async fn the_identity_comes_from_the_token_and_never_from_the_request() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let identity = node.credential.current().identity().clone();
    assert_eq!((identity.role(), identity.name(), identity.cluster()), (Role::Node, "n1", &cluster_id()));
    let known = running.operator().await.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap();
    let known = known.into_inner();
    assert_eq!(known.certificate_not_after, node.credential.current().not_after().to_string());
    assert!(!known.connected);
}

#[tokio::test]
async fn a_request_whose_key_is_not_proven_is_refused_and_does_not_use_up_the_token() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let token = running.token("n1").await;
    let http = running.http(None).await;
    let (_, csr) = new_request();
    let mut forged = csr.clone();
    *forged.last_mut().unwrap() ^= 1;
    for (bad, code) in [(forged.as_slice(), "csr_refused"), (b"junk".as_slice(), "csr_refused")] {
        let problem = post(&http, "/v1/enrol", &enrol_body(&token, bad, "n1")).await.unwrap_err();
        assert_eq!(problem.code, code);
    }
    let not_base64 = json!({ "token": token, "csr": "***", "node_id": "n1" });
    assert_eq!(post(&http, "/v1/enrol", &not_base64).await.unwrap_err().code, "bad_request");
    post(&http, "/v1/enrol", &enrol_body(&token, &csr, "n1")).await.unwrap();
}

#[tokio::test]
async fn odd_bodies_are_refused_without_repeating_what_was_sent() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let http = running.http(None).await;
    let extra = json!({ "token": "canary", "csr": "", "node_id": "n1", "admin": true });
    let problem = post(&http, "/v1/enrol", &extra).await.unwrap_err();
    assert_eq!(problem.code, "body_invalid");
    assert!(!problem.to_string().contains("canary"));
    let large = json!({ "token": "x".repeat(100_000), "csr": "", "node_id": "n1" });
    let problem = post(&http, "/v1/enrol", &large).await.unwrap_err();
    assert_eq!((problem.status, problem.code.as_str()), (413, "body_refused"));
    let bad_id = json!({ "token": "x", "csr": "", "node_id": "../n1" });
    assert_eq!(post(&http, "/v1/enrol", &bad_id).await.unwrap_err().code, "bad_request");
}

#[tokio::test]
async fn enrolment_from_one_address_is_rate_limited() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| settings.enrol_burst = 3.0).await;
    let http = running.http(None).await;
    let (_, csr) = new_request();
    let mut heard = 0;
    // They come back at two a second, so on a slow machine it takes a few more to run out.
    let refused = loop {
        let code = post(&http, "/v1/enrol", &enrol_body("x", &csr, "n1")).await.unwrap_err().code;
        if code != "token_invalid" || heard == 200 {
            break code;
        }
        heard += 1;
    };
    assert!(heard >= 3, "a burst is heard");
    assert_eq!(refused, "too_many_requests");
}

#[tokio::test]
async fn renewal_keeps_the_identity_and_needs_a_certificate() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let (key, csr) = new_request();
    let body = json!({ "csr": STANDARD.encode(&csr) });
    let problem = post(&running.http(None).await, "/v1/renew", &body).await.unwrap_err();
    assert_eq!((problem.status, problem.code.as_str()), (401, "certificate_required"));

    let http = running.http(Some(&node.credential)).await;
    let answer = post(&http, "/v1/renew", &body).await.unwrap();
    let renewed = Credential::with_chain_pem(key, answer["chain_pem"].as_str().unwrap()).unwrap();
    let before = node.credential.current();
    assert_eq!(renewed.identity(), before.identity());
    assert_ne!(renewed.serial_hex(), before.serial_hex());
}

#[tokio::test]
async fn renewals_of_one_identity_are_rate_limited_and_others_are_served() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let (busy, other) = (running.enrol("n1").await, running.enrol("n2").await);
    let http = running.http(Some(&busy.credential)).await;
    let body = Bytes::from(json!({ "csr": STANDARD.encode(new_request().1) }).to_string());
    let mut granted = 0;
    // They come back at one a second, so on a slow machine it takes a few more to run out.
    let refused = loop {
        let request = Request::post("https://127.0.0.1/v1/renew").body(body.clone()).unwrap();
        let response = http.request(request).await.unwrap();
        if response.status() != 200 || granted == 200 {
            break response;
        }
        granted += 1;
    };
    assert!(granted >= 10, "a burst is granted");
    assert_eq!(
        (refused.status().as_u16(), &refused.headers()["retry-after"]),
        (429, &http::HeaderValue::from_static("1"))
    );
    assert!(renew(&running, &other.credential).await.is_ok());
}

#[tokio::test]
async fn a_removed_node_is_refused_until_a_token_made_after_its_removal() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let node = running.enrol("n1").await;
    let mut operator = running.operator().await;
    let early =
        CreateTokenRequest { node_id: "n1".into(), ttl_seconds: 600, ..CreateTokenRequest::default() };
    let early = operator.create_token(early).await.unwrap().into_inner().token;
    operator.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();

    let (_, csr) = new_request();
    let http = running.http(Some(&node.credential)).await;
    let problem = post(&http, "/v1/renew", &json!({ "csr": STANDARD.encode(&csr) })).await.unwrap_err();
    assert_eq!(problem.code, "node_removed");
    let anonymous = running.http(None).await;
    let problem = post(&anonymous, "/v1/enrol", &enrol_body(&early, &csr, "n1")).await.unwrap_err();
    assert_eq!(problem.code, "node_removed");
    let missing = operator.get_node(GetNodeRequest { node_id: "n1".into() }).await.unwrap_err();
    assert_eq!(mvm_client::problem_of(&missing).unwrap().code, "node_removed");

    running.enrol("n1").await;
    assert!(operator.get_node(GetNodeRequest { node_id: "n1".into() }).await.is_ok());
}

/// A new certificate over HTTP/3, with this one, or the code of the refusal.
async fn renew(running: &Running, credential: &LiveCredential) -> Result<LiveCredential, String> {
    let (key, csr) = new_request();
    let http = running.http(Some(credential)).await;
    let answer = post(&http, "/v1/renew", &json!({ "csr": STANDARD.encode(&csr) })).await;
    let answer = answer.map_err(|problem| problem.code)?;
    let chain = answer["chain_pem"].as_str().unwrap();
    Ok(LiveCredential::new(Credential::with_chain_pem(key, chain).unwrap()))
}

#[tokio::test]
async fn certificates_from_before_a_removal_stay_refused_when_the_node_is_back() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let mut old = running.enrol("n1").await;
    let older = old.credential.clone();
    old.credential = renew(&running, &older).await.unwrap();
    // A connection from before, too, is judged by the certificate that it was opened with.
    let lasting = running.http(Some(&older)).await;
    running.operator().await.remove_node(RemoveNodeRequest { node_id: "n1".into() }).await.unwrap();
    let new = running.enrol("n1").await;
    let mut session = new.connect(None).await;

    for credential in [&older, &old.credential] {
        assert_eq!(renew(&running, credential).await.err().as_deref(), Some("certificate_revoked"));
    }
    let (_, csr) = new_request();
    let problem = post(&lasting, "/v1/renew", &json!({ "csr": STANDARD.encode(&csr) })).await.unwrap_err();
    assert_eq!((problem.status, problem.code.as_str()), (403, "certificate_revoked"));
    let mut refused = old.dial().await.unwrap();
    refused.send(agent_frame::Body::Hello(old.hello(None))).await;
    let goodbye = refused.end().await.unwrap();
    assert!(!goodbye.redial && goodbye.reason.contains("before the node was removed"), "{goodbye:?}");

    // The node that came back did not even lose its session over it, and goes on through renewals and restarts.
    session.expect_quiet().await;
    let mut renewed = running.enrol("n1").await;
    renewed.credential = renew(&running, &new.credential).await.unwrap();
    running.stop().await;
    let running = Running::start(&report.data_dir).await;
    renewed.address = running.addresses.quic;
    renewed.connect(None).await.expect_quiet().await;
    assert!(renew(&running, &new.credential).await.is_ok());
    assert_eq!(renew(&running, &old.credential).await.err().as_deref(), Some("certificate_revoked"));
}

#[tokio::test]
async fn a_known_node_enrols_again_and_keeps_its_record() {
    let (_dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    running.enrol("n1").await;
    let mut operator = running.operator().await;
    let get = || GetNodeRequest { node_id: "n1".into() };
    let before = operator.get_node(get()).await.unwrap().into_inner();
    let again = running.enrol("n1").await;
    let after = operator.get_node(get()).await.unwrap().into_inner();
    assert_eq!(after.enrolled_at, before.enrolled_at);
    assert_eq!(after.certificate_not_after, again.credential.current().not_after().to_string());
}

fn request_for(names: &[&str]) -> (LeafKey, Vec<u8>) {
    let key = LeafKey::generate().unwrap();
    let ips = names.iter().filter_map(|name| name.parse().ok()).collect();
    let dns = names.iter().filter(|name| name.parse::<IpAddr>().is_err()).map(|name| (*name).to_owned());
    let csr = key.csr_der(&CsrNames { dns: dns.collect(), ips }).unwrap();
    (key, csr)
}

#[tokio::test]
async fn a_node_gets_the_names_in_its_token_and_where_it_came_from_and_not_what_it_claims() {
    let (_dir, report) = new_cluster_with(|settings| settings.ips.push("192.0.2.1".parse().unwrap()));
    let running = Running::start(&report.data_dir).await;
    let asked = ["n1.example", "bank.example", "192.0.2.7", "192.0.2.8", "192.0.2.1", "127.0.0.1"];
    for (granted, expected) in [
        (&[][..], &["n1", "127.0.0.1"][..]),
        (&["n1.example", "192.0.2.7"], &["n1", "n1.example", "192.0.2.7", "127.0.0.1"]),
    ] {
        let token = running.token_for("n1", granted).await;
        let (key, csr) = request_for(&asked);
        let http = running.http(None).await;
        let answer = post(&http, "/v1/enrol", &enrol_body(&token, &csr, "n1")).await.unwrap();
        let credential = Credential::with_chain_pem(key, answer["chain_pem"].as_str().unwrap()).unwrap();
        assert_eq!(credential.hosts(), expected);
    }
    for bad in ["192.0.2.1", "n2", "*.example", "a b.example", ""] {
        let request = CreateTokenRequest {
            node_id: "n1".into(),
            names: vec![bad.to_owned()],
            ..CreateTokenRequest::default()
        };
        let refused = running.operator().await.create_token(request).await.unwrap_err();
        assert_eq!(mvm_client::problem_of(&refused).unwrap().code, "name_refused", "{bad:?}");
    }
}

#[tokio::test]
async fn a_node_gets_no_name_of_the_coordinator_or_of_another_node_and_no_more_by_renewing() {
    let (_dir, report) = new_cluster_with(|settings| settings.dns.push("coordinator.example".into()));
    let change = |settings: &mut CoordinatorSettings| settings.dns.push("also.example".into());
    let running = Running::start_with(&report.data_dir, change).await;
    let token = running.token_for("n1", &["N1.example"]).await;
    let (key, csr) = request_for(&["coordinator.example", "also.example", "n1.example", "n2", "localhost"]);
    let answer = post(&running.http(None).await, "/v1/enrol", &enrol_body(&token, &csr, "n1")).await.unwrap();
    let credential = Credential::with_chain_pem(key, answer["chain_pem"].as_str().unwrap()).unwrap();
    assert_eq!(credential.hosts(), ["n1", "n1.example", "localhost"]);

    let (key, csr) = request_for(&["n1.example", "bank.example", "n2"]);
    let http = running.http(Some(&LiveCredential::new(credential))).await;
    let answer = post(&http, "/v1/renew", &json!({ "csr": STANDARD.encode(&csr) })).await.unwrap();
    let renewed = Credential::with_chain_pem(key, answer["chain_pem"].as_str().unwrap()).unwrap();
    assert_eq!(renewed.hosts(), ["n1", "n1.example"]);
}
