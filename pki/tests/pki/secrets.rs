//! No secret is ever shown: not by `Debug`, not in an error, not in a log.

use std::io;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use mvm_pki::{
    Authority, BoxError, Credential, CsrNames, JoinToken, LEAF_LIFE, LeafKey, LeafProfile, LiveCredential,
    Renew, Renewed, Role, SigningKey, renewal_task,
};
use mvm_proto::{Digest, Timestamp, digest};
use tokio_util::sync::CancellationToken;
use tracing_subscriber::fmt::MakeWriter;

use crate::support::*;

/// Every way in which a secret's bytes could be written.
struct Canary {
    name: &'static str,
    traces: Vec<String>,
}

impl Canary {
    /// `secret` is the part that must not be seen; windows of it are looked for, so that a part is found too.
    fn new(name: &'static str, secret: &[u8]) -> Self {
        let mut traces = Vec::new();
        for window in secret.windows(6) {
            traces.push(digest::hex(window));
            traces.push(digest::hex(window).to_uppercase());
            let listed: Vec<String> = window.iter().map(u8::to_string).collect();
            traces.push(listed.join(", "));
        }
        Self { name, traces }
    }

    /// Of a PEM text: the private scalar or seed, and each line of base64.
    fn of_key_pem(name: &'static str, pem: &str) -> Self {
        let start = pem.find("-----BEGIN PRIVATE KEY-----").expect("a key");
        let body: Vec<&str> =
            pem[start..].lines().skip(1).take_while(|line| !line.starts_with("-----")).collect();
        let der = STANDARD.decode(body.concat()).unwrap();
        // P-256: after SEC1's version; Ed25519: after the nested octet string. Both are 32 bytes.
        let at = if der.len() > 100 { 36 } else { 16 };
        let mut canary = Self::new(name, &der[at..at + 32]);
        canary.traces.extend(body.iter().map(|line| line[..16.min(line.len())].to_owned()).skip(1));
        canary
    }

    fn check(&self, output: &str) {
        for trace in &self.traces {
            assert!(!output.contains(trace.as_str()), "{} shows {trace}", self.name);
        }
    }
}

fn read(path: &Path) -> String {
    std::fs::read_to_string(path).unwrap()
}

#[test]
fn debug_output_holds_no_key_material() {
    let dir = tempfile::tempdir().unwrap();
    let pki = Pki::new();
    pki.root.save(&dir.path().join("root")).unwrap();
    pki.issuing.save(&dir.path().join("issuing")).unwrap();
    let signing = SigningKey::generate().unwrap();
    signing.to_file(&dir.path().join("signing.key")).unwrap();
    let credential = pki.credential(Role::Node, "n");
    let token = JoinToken::generate(Digest::of(b"root"), Digest::of(b"trust")).unwrap();
    let secret = token.expose().split('.').nth(2).unwrap().to_owned();
    let canaries = [
        Canary::of_key_pem("root", &read(&dir.path().join("root/ca.key"))),
        Canary::of_key_pem("issuing", &read(&dir.path().join("issuing/ca.key"))),
        Canary::of_key_pem("signing", &read(&dir.path().join("signing.key"))),
        Canary::of_key_pem("leaf", &credential.to_pem()),
        Canary { name: "token", traces: vec![secret] },
    ];
    // The canaries sing: each finds its own secret in what does hold it.
    assert!(canaries[3].traces.iter().any(|trace| credential.to_pem().contains(trace.as_str())));

    let leaf_key = LeafKey::generate().unwrap();
    let live = LiveCredential::new(pki.credential(Role::Node, "n"));
    let server = server(&live, &pki.anchors());
    let output = format!(
        "{:?} {:#?} {:?} {:#?} {signing:?} {signing:#?} {credential:?} {credential:#?} {token:?} {token:#?} \
         {leaf_key:?} {live:?} {live:#?} {server:#?}",
        pki.root, pki.root, pki.issuing, pki.issuing
    );
    canaries.iter().for_each(|canary| canary.check(&output));
    let live_canary = Canary::of_key_pem("live", &live.current().to_pem());
    live_canary.check(&output);
}

#[derive(Clone, Default)]
struct Captured(Arc<Mutex<Vec<u8>>>);

impl io::Write for Captured {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Captured {
    type Writer = Self;
    fn make_writer(&'a self) -> Self {
        self.clone()
    }
}

/// Fails once, then renews, and logs everything that it is given.
struct Chatty {
    authority: Authority,
    profile: LeafProfile,
    failed: Mutex<bool>,
}

impl Renew for Chatty {
    async fn renew(&self, key: &LeafKey, csr_der: Vec<u8>) -> Result<Renewed, BoxError> {
        tracing::trace!(?key, ?csr_der, "asked");
        if !std::mem::replace(&mut *self.failed.lock().unwrap(), true) {
            return Err("not yet".into());
        }
        let issued = self.authority.issue(&csr_der, &self.profile, Timestamp::from(SystemTime::now()))?;
        Ok(Renewed { chain_pem: issued.chain_pem(), ..Renewed::default() })
    }
}

#[tokio::test(start_paused = true)]
async fn logs_of_a_failed_and_a_good_renewal_hold_no_key_material() {
    let captured = Captured::default();
    let subscriber = tracing_subscriber::fmt()
        .with_max_level(tracing::Level::TRACE)
        .with_writer(captured.clone())
        .with_ansi(false)
        .finish();
    let _guard = tracing::subscriber::set_default(subscriber);

    let real = Timestamp::from(SystemTime::now());
    let root = mvm_pki::RootAuthority::create(&cluster(), real - LEAF_LIFE).unwrap();
    let authority = root.create_issuing(real - LEAF_LIFE).unwrap();
    let profile =
        LeafProfile { identity: identity(Role::Node, "n"), dns: vec![], ips: vec![], life: LEAF_LIFE };
    let key = LeafKey::generate().unwrap();
    let csr = key.csr_der(&CsrNames::default()).unwrap();
    // Most of its life is over, so that it is due at once.
    let issued = authority.issue(&csr, &profile, real - LEAF_LIFE * 3 / 4).unwrap();
    let live = LiveCredential::new(Credential::new(key, issued.chain).unwrap());
    let old = Canary::of_key_pem("old leaf", &live.current().to_pem());
    let shutdown = CancellationToken::new();
    let task = tokio::spawn(renewal_task(
        live.clone(),
        mvm_pki::LiveAnchors::new(root.anchors()),
        |credential: &Credential, anchors: &mvm_pki::Anchors| {
            tracing::trace!(?credential, ?anchors, "saved");
            Ok(())
        },
        Chatty { authority, profile, failed: Mutex::new(false) },
        CsrNames::default(),
        shutdown.clone(),
    ));
    tokio::time::timeout(Duration::from_secs(60), live.changed().changed()).await.unwrap().unwrap();
    shutdown.cancel();
    task.await.unwrap();

    let output = String::from_utf8(captured.0.lock().unwrap().clone()).unwrap();
    for expected in ["could not renew", "not yet", "renewed the certificate", "LeafKey(secret)"] {
        assert!(output.contains(expected), "{expected} is missing in {output}");
    }
    old.check(&output);
    Canary::of_key_pem("new leaf", &live.current().to_pem()).check(&output);
}
