//! Requests that nobody may make, or that nothing answers, and bodies of the wrong kind.

use bytes::Bytes;
use http::{Request, header};
use mvm_pki::trust::ROOT_PAYLOAD_TYPE;
use mvm_pki::{SigningKey, seal};
use serde_json::{Value, json};

use crate::bad_input::one_agent::{OneAgent, UNHURRIED};

const EVERY_CALL: [(&str, &str); 8] = [
    ("POST", "/v1/reconcile"),
    ("POST", "/v1/trust"),
    ("GET", "/v1/node/info"),
    ("GET", "/v1/node/stats"),
    ("GET", "/v1/node/watch"),
    ("GET", "/v1/tenants"),
    ("GET", "/v1/tenants/acme/instances"),
    ("POST", "/v1/tenants/acme/pools/hello/instances/i-00000001/wake"),
];

#[test]
fn a_certificate_of_the_wrong_role_is_forbidden_what_its_role_may_not_do() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let (node, operator) = (agent.node(), agent.operator());
    let (node, operator) = (agent.connect(Some(&node)).unwrap(), agent.connect(Some(&operator)).unwrap());
    // A good document: only who brings it is wrong.
    let document = agent.sealed(&agent.next());
    let bundle = serde_json::to_vec(&agent.trust.bundle()).unwrap();
    let body = |path: &str| match path {
        "/v1/reconcile" => document.clone(),
        "/v1/trust" => bundle.clone(),
        _ => Vec::new(),
    };

    for (method, path) in EVERY_CALL {
        let answer = agent.call_as(&node, method, path, body(path));
        assert_eq!(answer.refusal(), (403, "forbidden"), "node: {method} {path}");
        let detail = answer.body["detail"].as_str().unwrap();
        assert!(detail.contains("spiffe://test/node/node-a") && detail.contains(path_kind(path)), "{detail}");
    }
    for path in ["/v1/reconcile", "/v1/trust"] {
        let answer = agent.call_as(&operator, "POST", path, body(path));
        assert_eq!(answer.refusal(), (403, "forbidden"), "operator: {path}");
        assert!(answer.body["remediation"].as_str().unwrap().contains("coordinator"), "{answer:?}");
    }
    assert_eq!(agent.call_as(&operator, "GET", "/v1/node/info", "").status, 200);

    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
}

/// The part of a path that its route's pattern has too.
fn path_kind(path: &str) -> &str {
    if path.starts_with("/v1/tenants/") { "/v1/tenants/{tenant}" } else { path }
}

#[test]
fn what_nothing_answers_is_a_problem_and_not_a_page() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let wake = "/v1/tenants/acme/pools/hello/instances";
    let long_id = format!("/v1/tenants/{}/instances", "a".repeat(3000));
    let cases = [
        ("GET", "/", 404, "not_found"),
        ("GET", "/v1", 404, "not_found"),
        ("GET", "/v2/node/info", 404, "not_found"),
        ("GET", "/v1/node/info/", 404, "not_found"),
        ("GET", "/v1/../etc/passwd", 404, "not_found"),
        ("GET", "/metrics", 404, "not_found"),
        ("GET", "/v1/reconcile", 405, "method_not_allowed"),
        ("PUT", "/v1/reconcile", 405, "method_not_allowed"),
        ("DELETE", "/v1/node/info", 405, "method_not_allowed"),
        ("FROBNICATE", "/v1/tenants", 405, "method_not_allowed"),
        ("GET", "/v1/tenants/NOT%20AN%20ID/instances", 400, "bad_id"),
        ("GET", "/v1/tenants/..%2f..%2fetc/instances", 400, "bad_id"),
        ("GET", "/v1/tenants/%ff%fe/instances", 400, "bad_id"),
        ("GET", &long_id, 400, "bad_id"),
        ("POST", &format!("{wake}/nobody/wake"), 400, "bad_id"),
        ("POST", &format!("{wake}/i-ffffffff/wake"), 404, "unknown_instance"),
        ("GET", "/v1/node/info?verbose=1", 400, "bad_query"),
        ("GET", "/v1/tenants/acme/instances?phase=happy", 400, "bad_query"),
        ("GET", "/v1/tenants/acme/instances?colour=red", 400, "bad_query"),
        ("POST", "/v1/reconcile?force=true", 400, "bad_query"),
    ];
    for (method, path, status, code) in cases {
        let answer = agent.call(method, path, "");
        assert_eq!(answer.refusal(), (status, code), "{method} {path}: {answer:?}");
    }
    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
}

#[test]
fn a_body_of_the_wrong_kind_or_size_is_refused() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let credential = agent.coordinator();
    let client = agent.connect(Some(&credential)).unwrap();
    let document = agent.sealed(&agent.next());
    let kinds =
        [None, Some("text/plain"), Some("application/x-www-form-urlencoded"), Some("json"), Some("\t")];
    for kind in kinds {
        let mut request = Request::post("/v1/reconcile");
        if let Some(kind) = kind {
            request = request.header(header::CONTENT_TYPE, kind);
        }
        let answer = agent.send(&client, request.body(Bytes::from(document.clone())).unwrap());
        assert_eq!(answer.refusal(), (415, "unsupported_media_type"), "{kind:?}");
    }
    // Announced, it is refused before any of it is read.
    let long = vec![b' '; 10 << 20];
    let request = Request::post("/v1/reconcile")
        .header(header::CONTENT_TYPE, "application/json")
        .header(header::CONTENT_LENGTH, long.len());
    let answer = agent.send(&client, request.body(Bytes::from(long.clone())).unwrap());
    assert_eq!(answer.refusal(), (413, "body_too_large"));
    assert_eq!(agent.call("POST", "/v1/trust", long).refusal(), (413, "body_too_large"));
    // What carries no document has far less room.
    let wake = "/v1/tenants/acme/pools/hello/instances/i-00000001/wake";
    assert_eq!(agent.call("POST", wake, vec![b' '; 64 << 10]).refusal(), (413, "body_too_large"));

    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
}

/// The root after the one in force, signed by `key`, whoever holds that.
pub(crate) fn next_root(agent: &OneAgent, key: &SigningKey) -> Value {
    let newest = agent.trust.root_envelopes().last().unwrap().payload.clone();
    let mut root: Value = serde_json::from_slice(&newest).unwrap();
    root["version"] = json!(root["version"].as_u64().unwrap() + 1);
    let envelope = seal(ROOT_PAYLOAD_TYPE, root.to_string().into_bytes(), &[key]);
    serde_json::from_slice(&envelope.to_json()).unwrap()
}

#[test]
fn trust_that_does_not_follow_from_the_trust_in_force_is_refused() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let stranger = next_root(&agent, &SigningKey::generate().unwrap());
    let director = next_root(&agent, &agent.director);
    let document: Value = serde_json::from_slice(&agent.sealed(&agent.next())).unwrap();
    let bodies = [
        ("no JSON", "trust me".to_owned(), 400, "bad_body"),
        ("a list", "[[],[]]".to_owned(), 400, "bad_body"),
        ("an unknown member", json!({"roots": [], "keys": []}).to_string(), 400, "bad_body"),
        ("a bomb of brackets", "[".repeat(100_000), 400, "bad_body"),
        ("a bomb inside", format!("{{\"roots\":{}", "[".repeat(100_000)), 400, "bad_body"),
        ("no envelope", json!({"roots": [5]}).to_string(), 400, "bad_envelope"),
        ("a document", json!({"roots": [document]}).to_string(), 400, "bad_envelope"),
        ("a stranger's root", json!({"roots": [stranger]}).to_string(), 403, "signature_insufficient"),
        ("the director's root", json!({"roots": [director]}).to_string(), 403, "signature_insufficient"),
    ];
    for (name, body, status, code) in bodies {
        let answer = agent.call("POST", "/v1/trust", body);
        assert_eq!(answer.refusal(), (status, code), "{name}: {answer:?}");
        assert_eq!(agent.state(), before, "{name}");
    }
    let bundle = serde_json::to_vec(&agent.trust.bundle()).unwrap();
    assert_eq!(agent.call("POST", "/v1/trust", bundle).status, 204);
    assert_eq!(agent.push_good().instances, before.instances);
}
