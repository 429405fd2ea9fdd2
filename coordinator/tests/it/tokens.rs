//! Join tokens: made, used once, raced for, expired, revoked.

use mvm_client::problem_of;
use mvm_coordinator::CoordinatorError;
use mvm_proto::wire::control::v1::{CreateTokenRequest, ListTokensRequest, RevokeTokenRequest};
use nix::sys::resource::{Resource, getrlimit, setrlimit};
use nix::sys::signal::{SigSet, Signal};

use crate::support::{Running, enrol_body, new_cluster, new_request, post, soon};

async fn started() -> (tempfile::TempDir, Running) {
    let (dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    (dir, running)
}

async fn states(running: &Running) -> Vec<String> {
    let list = running.operator().await.list_tokens(ListTokensRequest {}).await.unwrap().into_inner();
    list.tokens.into_iter().map(|token| token.state).collect()
}

async fn refusal(running: &Running, token: &str, node: &str) -> String {
    let (_, csr) = new_request();
    let http = running.http(None).await;
    post(&http, "/v1/enrol", &enrol_body(token, &csr, node)).await.unwrap_err().code
}

#[tokio::test]
async fn a_token_enrols_its_node_once() {
    let (_dir, running) = started().await;
    let token = running.token("n1").await;
    assert_eq!(states(&running).await, ["live"]);
    let (_, csr) = new_request();
    let http = running.http(None).await;
    let answer = post(&http, "/v1/enrol", &enrol_body(&token, &csr, "n1")).await.unwrap();
    assert_eq!((answer["node_id"].as_str(), answer["cluster"].as_str()), (Some("n1"), Some("test")));
    assert_eq!(states(&running).await, ["used"]);
    assert_eq!(refusal(&running, &token, "n1").await, "token_used");
}

#[tokio::test(flavor = "multi_thread")]
async fn of_a_thousand_simultaneous_uses_of_one_token_exactly_one_gets_a_certificate() {
    let (_dir, report) = new_cluster();
    let running = Running::start_with(&report.data_dir, |settings| {
        settings.limits.max_streams = 100;
        settings.enrol_burst = 10_000.0;
    })
    .await;
    let token = running.token("n1").await;
    let clients = futures::future::join_all((0..20).map(|_| running.http(None))).await;
    let (_, csr) = new_request();
    let body = enrol_body(&token, &csr, "n1");
    let uses = (0..1000).map(|n| post(&clients[n % clients.len()], "/v1/enrol", &body));
    let answers = futures::future::join_all(uses).await;
    assert_eq!(answers.iter().filter(|answer| answer.is_ok()).count(), 1);
    let codes: std::collections::BTreeSet<_> =
        answers.into_iter().filter_map(|answer| answer.err().map(|problem| problem.code)).collect();
    assert_eq!(codes.into_iter().collect::<Vec<_>>(), ["token_used"]);
}

#[tokio::test]
async fn a_token_is_for_one_node_only() {
    let (_dir, running) = started().await;
    let token = running.token("n1").await;
    assert_eq!(refusal(&running, &token, "n2").await, "token_wrong_node");
    assert_eq!(states(&running).await, ["live"]);
}

#[tokio::test]
async fn a_token_that_was_changed_to_name_another_root_is_refused_and_not_used_up() {
    let (_dir, running) = started().await;
    let token = running.token("n1").await;
    let ours = running.anchors().current().fingerprints()[0].hex();
    assert!(token.contains(&ours));
    let changed = token.replace(&ours, &mvm_proto::Digest::of(b"another root").hex());
    assert_eq!(refusal(&running, &changed, "n1").await, "token_invalid");
    assert_eq!(states(&running).await, ["live"]);
}

#[tokio::test]
async fn a_revoked_token_is_useless_and_a_used_one_can_not_be_revoked() {
    let (_dir, running) = started().await;
    let mut operator = running.operator().await;
    let request =
        CreateTokenRequest { node_id: "n1".into(), ttl_seconds: 60, ..CreateTokenRequest::default() };
    let created = operator.create_token(request).await.unwrap().into_inner();
    let token_id = created.record.unwrap().token_id;
    let revoked = operator.revoke_token(RevokeTokenRequest { token_id: token_id.clone() }).await.unwrap();
    assert_eq!(revoked.into_inner().record.unwrap().state, "revoked");
    assert_eq!(refusal(&running, &created.token, "n1").await, "token_revoked");

    running.enrol("n2").await;
    let tokens = operator.list_tokens(ListTokensRequest {}).await.unwrap().into_inner().tokens;
    let used = tokens.into_iter().find(|token| token.state == "used").unwrap();
    let status = operator.revoke_token(RevokeTokenRequest { token_id: used.token_id }).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "token_used");
    let status = operator.revoke_token(RevokeTokenRequest { token_id: "../x".into() }).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "token_unknown");
}

#[tokio::test]
async fn an_expired_token_is_refused() {
    let (_dir, running) = started().await;
    let request =
        CreateTokenRequest { node_id: "n1".into(), ttl_seconds: 1, ..CreateTokenRequest::default() };
    let created = running.operator().await.create_token(request).await.unwrap().into_inner();
    crate::support::wait_until("the token to expire", || async { states(&running).await == ["expired"] })
        .await;
    assert_eq!(refusal(&running, &created.token, "n1").await, "token_expired");
}

#[tokio::test]
async fn a_life_beyond_a_day_is_refused() {
    let (_dir, running) = started().await;
    let request =
        CreateTokenRequest { node_id: "n1".into(), ttl_seconds: 25 * 3600, ..CreateTokenRequest::default() };
    let status = running.operator().await.create_token(request).await.unwrap_err();
    assert_eq!(problem_of(&status).unwrap().code, "ttl_too_long");
}

#[tokio::test]
async fn garbage_and_wrong_secrets_get_one_and_the_same_answer() {
    let (_dir, running) = started().await;
    let good = running.token("n1").await;
    let mut parts: Vec<&str> = good.split('.').collect();
    let other = running.token("n1").await;
    let other: Vec<&str> = other.split('.').collect();
    parts[2] = other[2];
    let wrong_secret = parts.join(".");
    parts[1] = "0123456789abcdef";
    let unknown_id = parts.join(".");
    for token in ["", "x", "mvmj1.a.b.c", &"y".repeat(4000), &wrong_secret, &unknown_id] {
        assert_eq!(refusal(&running, token, "n1").await, "token_invalid");
    }
}

#[tokio::test]
async fn the_store_never_holds_a_secret() {
    let (dir, report) = new_cluster();
    let running = Running::start(&report.data_dir).await;
    let token = running.token("n1").await;
    running.stop().await;
    let secret = token.split('.').nth(2).unwrap().to_owned();
    for entry in walk(dir.path()) {
        let bytes = std::fs::read(&entry).unwrap();
        let found = bytes.windows(secret.len()).any(|window| window == secret.as_bytes());
        assert!(!found, "{} holds the token's secret", entry.display());
    }
}

fn walk(dir: &std::path::Path) -> Vec<std::path::PathBuf> {
    let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path());
    entries.flat_map(|path| if path.is_dir() { walk(&path) } else { vec![path] }).collect()
}

/// Limits of a process hold for all of its threads, so this one gets a process of its own.
const BROKEN_DISK: &str = "MVM_TEST_BROKEN_DISK";

#[test]
fn a_coordinator_whose_store_failed_says_so_and_stops_with_an_error() {
    let child = "tokens::child_with_a_broken_disk";
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", child, "--ignored", "--nocapture"])
        .env(BROKEN_DISK, "1")
        .output()
        .unwrap();
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "run by the test above, as its child"]
fn child_with_a_broken_disk() {
    assert!(std::env::var_os(BROKEN_DISK).is_some(), "its parent says so");
    // Before the runtime has threads, which inherit it: a write over the limit is then an error and no signal.
    let mut signals = SigSet::empty();
    signals.add(Signal::SIGXFSZ);
    signals.thread_block().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(async {
        let (_dir, report) = new_cluster();
        let running = Running::start(&report.data_dir).await;
        let mut operator = running.operator().await;
        let (_, most) = getrlimit(Resource::RLIMIT_FSIZE).unwrap();
        setrlimit(Resource::RLIMIT_FSIZE, 1, most).unwrap();
        let request =
            CreateTokenRequest { node_id: "n1".into(), ttl_seconds: 600, ..CreateTokenRequest::default() };
        let problem = problem_of(&operator.create_token(request).await.unwrap_err()).unwrap();
        assert_eq!((problem.status, problem.code.as_str()), (503, "store_unwritable"));
        assert!(problem.to_string().contains("restart the coordinator"), "{problem}");
        let ended = soon("the coordinator's end", running.task).await.unwrap();
        assert!(matches!(ended, Err(CoordinatorError::Stopped { what: "store", .. })), "{ended:?}");
    });
}
