//! Documents that an agent must not obey, each pushed with the coordinator's own certificate.

use std::time::Duration;

use mvm_pki::{SigningKey, seal};
use mvm_proto::document::{DOCUMENT_PAYLOAD_TYPE, MAX_DOCUMENT_BYTES};
use mvm_proto::envelope::MAX_SIGNATURES;
use mvm_proto::{Envelope, SignedDocument};
use serde_json::{Value, json};

use crate::bad_input::one_agent::{EPOCH, OneAgent, UNHURRIED, now};

const MINUTE: Duration = Duration::from_secs(60);

/// Far beyond any honest document, and beyond the stack of a parser that recurses.
const BOMB_DEPTH: usize = 200_000;

/// A name, what to push, and the status and code to get for it.
type Case = (&'static str, fn(&OneAgent) -> Vec<u8>, u16, &'static str);

const WRONG_SIGNATURES: &[Case] = &[
    ("nobody signed it", |agent| signed_by(agent, &[]), 403, "unsigned"),
    (
        "a key signed it that nobody knows",
        |agent| signed_by(agent, &[&SigningKey::generate().unwrap()]),
        403,
        "bad_signature",
    ),
    ("the image key signed it", |agent| signed_by_file(agent, "image.key"), 403, "wrong_key_role"),
    ("the root key signed it", |agent| signed_by_file(agent, "root.key"), 403, "wrong_key_role"),
    (
        "an unknown key signed it under the director's id",
        |agent| {
            let mut envelope = envelope_of(agent, &[&SigningKey::generate().unwrap()]);
            envelope.signatures[0].key_id = agent.director.key_id();
            envelope.to_json()
        },
        403,
        "bad_signature",
    ),
    (
        "the director signed another document",
        |agent| {
            let mut envelope = envelope_of(agent, &[&agent.director]);
            envelope.payload = edited(agent, |document| document.desired.prune_unknown_tenants = true);
            envelope.to_json()
        },
        403,
        "bad_signature",
    ),
    (
        "the director signed it as something else",
        |agent| {
            let mut envelope = seal("application/json", agent.next().to_payload(), &[&agent.director]);
            envelope.payload_type = DOCUMENT_PAYLOAD_TYPE.to_owned();
            envelope.to_json()
        },
        403,
        "bad_signature",
    ),
    (
        "it is signed more often than anyone checks",
        |agent| signed_by(agent, &[&agent.director; MAX_SIGNATURES + 1]),
        400,
        "bad_envelope",
    ),
];

const WRONG_PLACE_OR_TIME: &[Case] = &[
    (
        "it is for another node",
        |agent| sealed(agent, |document| document.desired.node_id = "node-b".parse().unwrap()),
        403,
        "wrong_node",
    ),
    (
        "it is for another cluster",
        |agent| sealed(agent, |document| document.provenance.cluster = "other".parse().unwrap()),
        403,
        "wrong_cluster",
    ),
    (
        "its generation is older",
        |agent| sealed(agent, |document| document.provenance.generation = agent.generation - 1),
        409,
        "stale_generation",
    ),
    (
        "its epoch is older, its generation newer",
        |agent| sealed(agent, |document| document.provenance.epoch = EPOCH - 1),
        409,
        "stale_generation",
    ),
    (
        "its generation was already accepted with different content",
        |agent| {
            sealed(agent, |document| {
                document.provenance.generation = agent.generation;
                document.desired.prune_unknown_pools = true;
            })
        },
        409,
        "generation_conflict",
    ),
    (
        "it has expired",
        |agent| {
            sealed(agent, |document| {
                document.provenance.issued_at = now() - MINUTE * 10;
                document.provenance.expires_at = now() - MINUTE;
            })
        },
        422,
        "expired",
    ),
    (
        "it comes from the future",
        |agent| sealed(agent, |document| document.provenance.issued_at = now() + MINUTE * 6),
        422,
        "from_the_future",
    ),
];

/// All signed by the right key, so that they reach the reader of documents.
const WRONG_CONTENT: &[Case] = &[
    (
        "its schema is of a later version",
        |agent| sealed_json(agent, |document| document["schema_version"] = json!(2)),
        422,
        "schema_version_unknown",
    ),
    (
        "it has a field that nobody knows",
        |agent| sealed_json(agent, |document| document["frobnicate"] = json!(true)),
        422,
        "document_invalid",
    ),
    (
        "a pool has a field that nobody knows",
        |agent| sealed_json(agent, |document| document["tenants"][0]["pools"][0]["frobnicate"] = json!(1)),
        422,
        "document_invalid",
    ),
    (
        "it has no generation",
        |agent| sealed_json(agent, |document| drop(document.as_object_mut().unwrap().remove("generation"))),
        422,
        "document_invalid",
    ),
    ("it is a bomb of brackets", |agent| agent.sealed_payload(nested(b"[")), 422, "document_invalid"),
    ("it is a bomb of objects", |agent| agent.sealed_payload(nested(b"{\"a\":")), 422, "document_invalid"),
    (
        "a field of it is a bomb of brackets",
        |agent| {
            let bomb = [&nested(b"[")[..], &b"]".repeat(BOMB_DEPTH)].concat();
            agent.sealed_payload(with_first_member(agent, &[b"\"tenants\":", &bomb[..]].concat()))
        },
        422,
        "document_invalid",
    ),
    (
        "a key is in it twice",
        |agent| agent.sealed_payload(with_first_member(agent, br#""node_id":"node-a""#)),
        422,
        "document_invalid",
    ),
    (
        "a key is in it a hundred thousand times",
        |agent| {
            let member = vec!["\"tenants\":[]"; 100_000].join(",");
            agent.sealed_payload(with_first_member(agent, member.as_bytes()))
        },
        422,
        "document_invalid",
    ),
    (
        "it is a million zeros",
        |agent| agent.sealed_payload([&b"[0"[..], &b",0".repeat(1_000_000), b"]"].concat()),
        422,
        "document_invalid",
    ),
    (
        "it is longer than any document",
        |agent| {
            let mut payload = agent.next().to_payload();
            payload.resize(MAX_DOCUMENT_BYTES + 1, b' ');
            agent.sealed_payload(payload)
        },
        422,
        "document_invalid",
    ),
    ("it is empty", |agent| agent.sealed_payload(Vec::new()), 422, "document_invalid"),
    ("it is not text", |agent| agent.sealed_payload(vec![0xff; 64]), 422, "document_invalid"),
    (
        "it is of another type",
        |agent| {
            let payload = agent.next().to_payload();
            seal("application/vnd.mvm.root.v1+json", payload, &[&agent.director]).to_json()
        },
        400,
        "bad_envelope",
    ),
];

/// Not even envelopes.
const WRONG_ENVELOPES: &[Case] = &[
    ("there is nothing", |_| Vec::new(), 400, "bad_envelope"),
    ("it is not JSON", |_| b"document".to_vec(), 400, "bad_envelope"),
    ("it is the bare document", |agent| agent.next().to_payload(), 400, "bad_envelope"),
    ("it is cut short", |agent| cut(agent.sealed(&agent.next())), 400, "bad_envelope"),
    ("it is a bomb of brackets", |_| nested(b"["), 400, "bad_envelope"),
    (
        "its signatures are a bomb of brackets",
        |_| {
            let head = br#"{"payloadType":"t","payload":"","signatures":"#;
            [&head[..], &nested(b"[")].concat()
        },
        400,
        "bad_envelope",
    ),
    (
        "its payload is in it twice",
        |agent| {
            let envelope = agent.sealed(&agent.next());
            [&br#"{"payload":"","#[..], &envelope[1..]].concat()
        },
        400,
        "bad_envelope",
    ),
    (
        "it has a member that nobody knows",
        |agent| {
            let envelope = agent.sealed(&agent.next());
            [&br#"{"extra":1,"#[..], &envelope[1..]].concat()
        },
        400,
        "bad_envelope",
    ),
    ("it is 10 MiB long", |_| vec![b' '; 10 << 20], 413, "body_too_large"),
];

fn envelope_of(agent: &OneAgent, keys: &[&SigningKey]) -> Envelope {
    seal(DOCUMENT_PAYLOAD_TYPE, agent.next().to_payload(), keys)
}

fn signed_by(agent: &OneAgent, keys: &[&SigningKey]) -> Vec<u8> {
    envelope_of(agent, keys).to_json()
}

fn signed_by_file(agent: &OneAgent, file: &str) -> Vec<u8> {
    let key = SigningKey::from_file(&agent.data_dir().signing_dir().join(file)).unwrap();
    signed_by(agent, &[&key])
}

fn edited(agent: &OneAgent, edit: impl FnOnce(&mut SignedDocument)) -> Vec<u8> {
    let mut document = agent.next();
    edit(&mut document);
    document.to_payload()
}

fn sealed(agent: &OneAgent, edit: impl FnOnce(&mut SignedDocument)) -> Vec<u8> {
    agent.sealed_payload(edited(agent, edit))
}

fn sealed_json(agent: &OneAgent, edit: impl FnOnce(&mut Value)) -> Vec<u8> {
    let mut document: Value = serde_json::from_slice(&agent.next().to_payload()).unwrap();
    edit(&mut document);
    agent.sealed_payload(document.to_string().into_bytes())
}

/// The next document with one more member in front.
fn with_first_member(agent: &OneAgent, member: &[u8]) -> Vec<u8> {
    [b"{", member, b",", &agent.next().to_payload()[1..]].concat()
}

fn nested(opening: &[u8]) -> Vec<u8> {
    opening.repeat(BOMB_DEPTH)
}

fn cut(mut bytes: Vec<u8>) -> Vec<u8> {
    bytes.truncate(bytes.len() / 2);
    bytes
}

fn refuse_all(cases: &[Case]) {
    let mut agent = OneAgent::start(UNHURRIED);
    // A second document, so that there is an older generation to go back to.
    let mut before = agent.push_good();
    for (name, make, status, code) in cases {
        let body = make(&agent);
        let answer = agent.push(body);
        assert_eq!(answer.refusal(), (*status, *code), "{name}: {answer:?}");
        assert_eq!(agent.state(), before, "{name}");
        let after = agent.push_good();
        assert_eq!(after.instances, before.instances, "{name}: a good document must move nothing else");
        before = after;
    }
}

#[test]
fn a_document_without_the_directors_signature_is_refused() {
    refuse_all(WRONG_SIGNATURES);
}

#[test]
fn a_document_for_another_place_or_time_is_refused() {
    refuse_all(WRONG_PLACE_OR_TIME);
}

#[test]
fn a_signed_document_that_breaks_the_schema_or_its_limits_is_refused() {
    refuse_all(WRONG_CONTENT);
}

#[test]
fn a_body_that_is_no_envelope_is_refused() {
    refuse_all(WRONG_ENVELOPES);
}

#[test]
fn a_refused_document_names_every_field_that_is_wrong() {
    let mut agent = OneAgent::start(UNHURRIED);
    let envelope = sealed_json(&agent, |document| {
        document["frobnicate"] = json!(true);
        document["tenants"][0]["pools"][0]["profile"] = json!(7);
        document["tenants"][0]["quotas"]["max_vcpus"] = json!(-1);
    });
    let answer = agent.push(envelope);
    assert_eq!(answer.refusal(), (422, "document_invalid"));
    let mut paths = answer.paths();
    paths.sort_unstable();
    assert_eq!(paths, ["frobnicate", "tenants[0].pools[0].profile", "tenants[0].quotas.max_vcpus"]);
}

#[test]
fn the_document_in_force_may_come_again_and_changes_nothing() {
    let mut agent = OneAgent::start(UNHURRIED);
    let document = agent.next();
    let envelope = agent.sealed(&document);
    assert_eq!(agent.push(envelope.clone()).status, 202);
    agent.generation = document.provenance.generation;
    let before = agent.converged();
    for _ in 0..3 {
        let answer = agent.push(envelope.clone());
        assert_eq!((answer.status, &answer.body["generation"]), (202, &json!(agent.generation)));
        assert_eq!(agent.state(), before);
    }
    agent.push_good();
}

#[test]
fn a_clock_that_is_four_minutes_ahead_is_borne() {
    let mut agent = OneAgent::start(UNHURRIED);
    let envelope = sealed(&agent, |document| document.provenance.issued_at = now() + MINUTE * 4);
    assert_eq!(agent.push(envelope).status, 202);
    agent.generation += 1;
    agent.push_good();
}
