//! The demand webhook: a program hears what lacks a place, signed, again after it failed, and once.

use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::sync::Arc;

use mvm_coordinator::WebhookSettings;
use mvm_pki::mac::Mac;
use rustls::ServerConfig;
use rustls::pki_types::PrivateKeyDer;
use serde_json::{Value, json};
use tokio::io::{
    AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, BufReader,
};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::objects::{POOL, acme, join, pool};
use crate::rest::Rest;
use crate::support::{Running, new_cluster, soon, wait_until};

/// Takes one post and answers it; its signature's time and code, and its body.
async fn take(listener: &TcpListener, status: &str) -> (String, String, Vec<u8>) {
    let (stream, _) = soon("a post", listener.accept()).await.unwrap();
    take_from(stream, status).await
}

async fn take_from(stream: impl AsyncRead + AsyncWrite + Unpin, status: &str) -> (String, String, Vec<u8>) {
    let mut stream = BufReader::new(stream);
    let (mut length, mut signature, mut line) = (0, String::new(), String::new());
    loop {
        line.clear();
        stream.read_line(&mut line).await.unwrap();
        let Some((name, value)) = line.trim().split_once(": ") else {
            if line.trim().is_empty() {
                break;
            }
            assert!(line.starts_with("POST /grow?zone=a HTTP/1.1"), "{line}");
            continue;
        };
        match name.to_ascii_lowercase().as_str() {
            "content-length" => length = value.parse().unwrap(),
            "x-mvm-signature" => signature = value.to_owned(),
            _ => {}
        }
    }
    let mut body = vec![0; length];
    stream.read_exact(&mut body).await.unwrap();
    let answer = format!("HTTP/1.1 {status}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
    stream.write_all(answer.as_bytes()).await.unwrap();
    stream.shutdown().await.unwrap();
    let (at, code) = signature.split_once(',').unwrap();
    (at.trim_start_matches("t=").to_owned(), code.trim_start_matches("v1=").to_owned(), body)
}

fn key_file(dir: &Path, mode: u32) -> std::path::PathBuf {
    let path = dir.join("webhook.key");
    std::fs::write(&path, "a shared key\n").unwrap();
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
    path
}

#[tokio::test]
async fn what_lacks_a_place_is_posted_signed_until_it_is_taken_and_told_when_it_has_one() {
    let (dir, report) = new_cluster();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/grow?zone=a", listener.local_addr().unwrap());
    let key_file = key_file(dir.path(), 0o600);
    let running = Running::start_with(&report.data_dir, |settings| {
        settings.demand_webhook = Some(WebhookSettings { url, key_file, ca_file: None });
    })
    .await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &pool(2)).await.status, 201);
    take(&listener, "503 Service Unavailable").await;
    let (at, code, body) = take(&listener, "204 No Content").await;
    assert_eq!(code, Mac::new(b"a shared key").hex(&[at.as_bytes(), b".", &body]));
    let told: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((told["at"].to_string(), &told["cluster"]), (at, &json!("test")));
    let counts = json!({ "running": 2, "warm": 0, "sleeping": 0 });
    assert_eq!(told["unplaced"], json!([{ "vcpus": 1, "mem_mib": 64, "counts": counts }]));
    // The next post is that it has one.
    let (_node, mut session) = join(&running, "n1", 4).await;
    session.obey().await;
    let (.., body) = take(&listener, "200 OK").await;
    let told: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!((&told["unplaced"], &told["empty_nodes"]), (&json!([]), &json!([])));
    assert_eq!(running.metric("mvm_coordinator_demand_webhooks_total").await, 3);
    running.stop().await;
}

/// A server of TLS with a certificate of its own, and that certificate.
fn tls_server() -> (TlsAcceptor, String) {
    let made = rcgen::generate_simple_self_signed(["localhost".to_owned()]).unwrap();
    let key = PrivateKeyDer::try_from(made.signing_key.serialize_der()).unwrap();
    let config = ServerConfig::builder_with_provider(mvm_pki::tls::provider())
        .with_safe_default_protocol_versions()
        .unwrap()
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .unwrap();
    (TlsAcceptor::from(Arc::new(config)), made.cert.pem())
}

#[tokio::test]
async fn over_tls_only_the_program_whose_authority_was_named_is_told() {
    let (dir, report) = new_cluster();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("https://localhost:{}/grow?zone=a", listener.local_addr().unwrap().port());
    let key_file = key_file(dir.path(), 0o600);
    let ((known, pem), (unknown, _)) = (tls_server(), tls_server());
    let ca_file = dir.path().join("ca.pem");
    std::fs::write(&ca_file, pem).unwrap();
    let running = Running::start_with(&report.data_dir, |settings| {
        settings.demand_webhook = Some(WebhookSettings { url, key_file, ca_file: Some(ca_file) });
    })
    .await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &pool(2)).await.status, 201);
    let (stream, _) = soon("a connection", listener.accept()).await.unwrap();
    soon("a refusal", unknown.accept(stream)).await.unwrap_err();
    let (stream, _) = soon("another try", listener.accept()).await.unwrap();
    let stream = soon("a handshake", known.accept(stream)).await.unwrap();
    let (at, code, body) = soon("a post", take_from(stream, "204 No Content")).await;
    assert_eq!(code, Mac::new(b"a shared key").hex(&[at.as_bytes(), b".", &body]));
    wait_until("it to be noted", async || running.metric("mvm_coordinator_demand_webhooks_total").await == 2)
        .await;
    running.stop().await;
}

/// An answer that leads elsewhere leads nowhere: only what the operator named is ever connected to.
#[tokio::test]
async fn a_webhook_follows_no_redirect() {
    let (dir, report) = new_cluster();
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let elsewhere = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}/grow?zone=a", listener.local_addr().unwrap());
    let key_file = key_file(dir.path(), 0o600);
    let running = Running::start_with(&report.data_dir, |settings| {
        settings.demand_webhook = Some(WebhookSettings { url, key_file, ca_file: None });
    })
    .await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &pool(2)).await.status, 201);
    let to = format!("307 Temporary Redirect\r\nlocation: http://{}/", elsewhere.local_addr().unwrap());
    take(&listener, &to).await;
    // It is a failure: the same is told again here.
    tokio::select! {
        _ = take(&listener, "204 No Content") => {}
        _ = elsewhere.accept() => panic!("it went where the answer led"),
    }
    running.stop().await;
}

/// Ends with the test, also when that fails.
struct Program(std::process::Child);

impl Drop for Program {
    fn drop(&mut self) {
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

#[tokio::test]
async fn the_example_program_runs_its_command_for_what_lacks_a_place_and_refuses_what_is_not_signed() {
    let (dir, report) = new_cluster();
    let (key_file, added) = (key_file(dir.path(), 0o600), dir.path().join("added"));
    let add = dir.path().join("add");
    let text = "$DEMAND_COUNT of $DEMAND_VCPUS and $DEMAND_MEM_MIB";
    let script = format!("#!/bin/sh\necho \"{text}\" > {0}.new && mv {0}.new {0}\n", added.display());
    std::fs::write(&add, script).unwrap();
    std::fs::set_permissions(&add, std::fs::Permissions::from_mode(0o755)).unwrap();
    let program = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/autoscale/on-demand");
    let mut command = std::process::Command::new("python3");
    command.arg(program).arg("--key").arg(&key_file).arg("--add").arg(&add);
    command.args(["--listen", "127.0.0.1:0"]).stdout(std::process::Stdio::piped());
    let mut program = Program(command.spawn().unwrap());
    let mut line = String::new();
    // Held until the end: the program goes on writing.
    let mut stdout = std::io::BufReader::new(program.0.stdout.take().unwrap());
    std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
    let address = line.trim().trim_start_matches("listening on ").to_owned();

    let mut forged = tokio::net::TcpStream::connect(&address).await.unwrap();
    let body = r#"{"unplaced":[{"vcpus":9,"mem_mib":9,"counts":{"running":9,"warm":0}}]}"#;
    let request = format!(
        "POST / HTTP/1.1\r\nhost: x\r\nx-mvm-signature: t=1,v1=00\r\ncontent-length: {}\r\n\r\n{body}",
        body.len()
    );
    forged.write_all(request.as_bytes()).await.unwrap();
    let mut answer = String::new();
    soon("a refusal", forged.read_to_string(&mut answer)).await.unwrap();
    assert!(answer.contains(" 403 "), "{answer}");

    let running = Running::start_with(&report.data_dir, |settings| {
        settings.demand_webhook =
            Some(WebhookSettings { url: format!("http://{address}/"), key_file, ca_file: None });
    })
    .await;
    let mut rest = Rest::operator(&running).await;
    acme(&mut rest).await;
    assert_eq!(rest.put(POOL, &pool(2)).await.status, 201);
    wait_until("the command to be run", async || added.exists()).await;
    assert_eq!(
        std::fs::read_to_string(&added).unwrap(),
        "2 of 1 and 64
"
    );
    running.stop().await;
}

#[tokio::test]
async fn a_webhook_that_could_not_be_used_is_told_at_the_start() {
    let (dir, report) = new_cluster();
    for (url, mode, why) in [
        ("ftp://localhost/x", 0o600, "must be http"),
        ("https://localhost/x", 0o600, "--demand-webhook-ca"),
        ("http://me:secret@localhost/x", 0o600, "a user or a password"),
        ("http://localhost/x", 0o644, "webhook.key"),
    ] {
        let mut settings = mvm_coordinator::CoordinatorSettings::new(&report.data_dir);
        settings.listen = "127.0.0.1:0".parse().unwrap();
        settings.metrics_listen = None;
        let key_file = key_file(dir.path(), mode);
        settings.demand_webhook = Some(WebhookSettings { url: url.to_owned(), key_file, ca_file: None });
        let shutdown = tokio_util::sync::CancellationToken::new();
        let error = soon("the refusal", mvm_coordinator::serve(settings, shutdown)).await.unwrap_err();
        assert!(error.to_string().contains(why), "{error}");
    }
}
