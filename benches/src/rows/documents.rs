//! Documents verified and validated: from an envelope's JSON to a document that a planner may see.
//!
//! The floor does the same bytes with nothing around them: one raw ed25519 check of the signed bytes and one typed
//! serde_json reading of the payload. Ours adds the envelope (JSON, base64), the digest, every rule, and error paths.

use std::hint::black_box;
use std::time::{Duration, Instant};

use anyhow::{Context, Result};
use aws_lc_rs::signature::{ED25519, Ed25519KeyPair, KeyPair as _, UnparsedPublicKey};
use mvm_pki::SigningKey;
use mvm_pki::trust::{RoleSpec, RootMetadata, RootSpec, TrustStore};
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::{ClusterId, Envelope, SignedDocument, Timestamp, Unverified};
use rustls_pki_types::PrivatePkcs8KeyDer;
use rustls_pki_types::pem::PemObject as _;

use crate::authority::now;
use crate::document::{BareDocument, signed_document};
use crate::effort::Effort;
use crate::machine::{Core, pin_this_thread};
use crate::row::{Row, Subject, Unit};

const SIZES: [(&str, usize); 2] = [("1 KiB", 1 << 10), ("1 MiB", 1 << 20)];
const YEAR: Duration = Duration::from_secs(365 * 24 * 3600);

pub(super) fn measure(effort: &Effort) -> Result<Vec<Row>> {
    pin_this_thread(Core::Load)?;
    let now = now();
    let cluster: ClusterId = "bench".parse()?;
    let director = SigningKey::generate()?;
    let trust = trust(&cluster, &director, now)?;
    let raw_key = raw_public(&director)?;
    SIZES.iter().map(|(name, bytes)| row(name, *bytes, effort, &trust, &director, &raw_key, now)).collect()
}

fn row(
    name: &str,
    bytes: usize,
    effort: &Effort,
    trust: &TrustStore,
    director: &SigningKey,
    raw_key: &[u8],
    now: Timestamp,
) -> Result<Row> {
    let document = signed_document(trust.cluster(), "node-a", bytes, now)?;
    let envelope = mvm_pki::seal(DOCUMENT_PAYLOAD_TYPE, document.to_payload(), &[director]);
    let json = envelope.to_json();
    let signed = envelope.signed_bytes();

    let ours = || -> Result<()> {
        let unverified = Unverified::<SignedDocument>::from_json(black_box(&json))?;
        black_box(trust.verify_document(unverified, now)?);
        Ok(())
    };
    let verify_alone = || raw_verify(raw_key, black_box(&signed), &envelope);
    let floor = || -> Result<()> {
        verify_alone()?;
        black_box(serde_json::from_slice::<BareDocument>(black_box(&envelope.payload))?);
        Ok(())
    };
    let pairs = (0..effort.pairs)
        .map(|_| Ok((rate(effort.document_batch, ours)?, rate(effort.document_batch, floor)?)))
        .collect::<Result<Vec<(f64, f64)>>>()?;
    let verify = rate(effort.document_batch, verify_alone)?;
    let rates: Vec<f64> = pairs.iter().map(|(ours, _)| *ours).collect();
    Ok(Row::of(
        Subject::Documents,
        format!("documents verified and validated, {name}"),
        &rates,
        Unit::PerSecond,
    )
    .beside("raw ed25519 + typed serde_json", &pairs)
    .note(format!("payload {} bytes; the signature check alone: {verify:.0} /s", envelope.payload.len())))
}

/// How often per second `act` can be done, over about `span`.
fn rate(span: Duration, act: impl Fn() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    let mut done = 0u32;
    while begun.elapsed() < span {
        act()?;
        done += 1;
    }
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

fn raw_verify(key: &[u8], signed: &[u8], envelope: &Envelope) -> Result<()> {
    let signature = envelope.signatures.first().context("the envelope is signed")?;
    let checked = UnparsedPublicKey::new(&ED25519, key).verify(signed, &signature.bytes);
    checked.ok().context("the bench's own signature does not verify")
}

fn trust(cluster: &ClusterId, director: &SigningKey, now: Timestamp) -> Result<TrustStore> {
    let (root, image) = (SigningKey::generate()?, SigningKey::generate()?);
    let role = |key: &SigningKey| RoleSpec { keys: vec![key.public()], threshold: 1, expires_at: None };
    let spec = RootSpec {
        cluster: cluster.clone(),
        expires_at: now + YEAR,
        dev: true,
        resets_high_water: false,
        root: role(&root),
        director: role(director),
        image: role(&image),
    };
    Ok(TrustStore::pin(RootMetadata::first(&spec, now)?.seal(&[&root]), now)?)
}

/// The key's 32 bytes, by way of its file: keys do not show them otherwise.
fn raw_public(key: &SigningKey) -> Result<Vec<u8>> {
    let dir = tempfile::tempdir()?;
    let path = dir.path().join("director.key");
    key.to_file(&path)?;
    let der =
        PrivatePkcs8KeyDer::from_pem_slice(&std::fs::read(&path)?).context("a signing key is PKCS#8")?;
    let pair = Ed25519KeyPair::from_pkcs8(der.secret_pkcs8_der()).ok().context("a signing key is ed25519")?;
    Ok(pair.public_key().as_ref().to_vec())
}
