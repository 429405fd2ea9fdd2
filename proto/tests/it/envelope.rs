//! Envelopes: no bit of one can be changed without it being another envelope, and problems have one shape.

use crate::arbitrary::signed_document;
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;
use mvm_proto::envelope::Payload as _;
use mvm_proto::envelope::{
    CheckSignatures, EnvelopeError, MAX_ENVELOPE_BYTES, MAX_SIGNATURES, Signature, Signed, VerifyError,
};
use mvm_proto::{DesiredState, Digest, Envelope, FieldError, Problem, SignedDocument, Unverified};
use proptest::prelude::*;
use proptest::strategy::ValueTree as _;
use proptest::test_runner::TestRunner;
use serde_json::json;

/// Stands for a key: a signature is right when it is the digest of what is signed.
struct DigestIsSignature;

#[derive(Debug, PartialEq)]
struct Wrong;

impl CheckSignatures for DigestIsSignature {
    type Error = Wrong;
    fn check(&self, signed: &Signed<'_>, signatures: &[Signature]) -> Result<(), Wrong> {
        let right = Digest::of(&signed.encoding());
        if signatures.iter().any(|s| s.bytes == right.as_bytes()) { Ok(()) } else { Err(Wrong) }
    }
}

fn sealed(payload_type: &str, payload: Vec<u8>) -> Envelope {
    let mut envelope = Envelope { payload_type: payload_type.to_owned(), payload, signatures: Vec::new() };
    let bytes = Digest::of(&envelope.signed_bytes()).as_bytes().to_vec();
    envelope.signatures.push(Signature { key_id: "k1".to_owned(), bytes });
    envelope
}

fn a_document() -> SignedDocument {
    signed_document().new_tree(&mut TestRunner::deterministic()).unwrap().current()
}

fn verify(
    envelope: Envelope,
) -> Result<SignedDocument, VerifyError<Wrong, mvm_proto::document::DocumentErrors>> {
    Unverified::<SignedDocument>::new(envelope)
        .verify(&DigestIsSignature)
        .map(|document| document.into_inner())
}

proptest! {
    #[test]
    fn an_envelope_reads_back_from_its_own_json(
        payload in prop::collection::vec(any::<u8>(), 0..200),
        signatures in prop::collection::vec(("[0-9a-f]{0,64}", prop::collection::vec(any::<u8>(), 0..64)), 0..4),
    ) {
        let signatures = signatures.into_iter().map(|(key_id, bytes)| Signature { key_id, bytes }).collect();
        let envelope = Envelope { payload_type: "text/plain".to_owned(), payload, signatures };
        prop_assert_eq!(Envelope::from_json(&envelope.to_json()), Ok(envelope));
    }

    #[test]
    fn a_payload_is_what_is_declared_with_the_provenance_beside_it(document in signed_document()) {
        let cluster = document.provenance.cluster.clone();
        let desired = DesiredState { cluster: Some(cluster.clone()), ..document.desired.clone() };
        let content = desired.to_content(&cluster);
        prop_assert_eq!(&content, &serde_json::to_vec(&desired).unwrap());
        prop_assert_eq!(&SignedDocument::parse(&document.to_payload()).unwrap(), &document);
        let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
        let mut expected = value(&content);
        let provenance = value(&serde_json::to_vec(&document.provenance).unwrap());
        expected.as_object_mut().unwrap().extend(provenance.as_object().unwrap().clone());
        prop_assert_eq!(value(&document.to_payload()), expected);
    }

    #[test]
    fn a_signed_document_survives_its_envelope(document in signed_document()) {
        let envelope = sealed(DOCUMENT_PAYLOAD_TYPE, document.to_payload());
        let read = Envelope::from_json(&envelope.to_json()).unwrap();
        prop_assert_eq!(verify(read).unwrap(), document);
    }
}

#[test]
fn no_bit_of_an_envelope_can_be_flipped_unnoticed() {
    let envelope = sealed(DOCUMENT_PAYLOAD_TYPE, a_document().to_payload());
    let json = envelope.to_json();
    for at in 0..json.len() {
        for bit in 0..8 {
            let mut flipped = json.clone();
            flipped[at] ^= 1 << bit;
            if let Ok(read) = Envelope::from_json(&flipped) {
                assert_ne!(read, envelope, "byte {at}, bit {bit}");
                // The key id is only a hint; everything else is under the signature or is the signature.
                let only_hint = read.payload == envelope.payload
                    && read.payload_type == envelope.payload_type
                    && read.signatures[0].bytes == envelope.signatures[0].bytes;
                assert!(only_hint || verify(read).is_err(), "byte {at}, bit {bit}");
            }
        }
    }
}

#[test]
fn an_envelope_of_another_type_is_refused_even_when_signed() {
    let other = sealed("application/vnd.mvm.images.v1+json", a_document().to_payload());
    assert!(matches!(verify(other), Err(VerifyError::PayloadType { .. })));
    let mut retyped = sealed("application/vnd.mvm.images.v1+json", a_document().to_payload());
    retyped.payload_type = DOCUMENT_PAYLOAD_TYPE.to_owned();
    assert!(matches!(verify(retyped), Err(VerifyError::Signatures(Wrong))));
}

#[test]
fn a_payload_is_read_only_after_its_signatures_sufficed() {
    let mut envelope = sealed(DOCUMENT_PAYLOAD_TYPE, b"not a document".to_vec());
    assert!(matches!(verify(envelope.clone()), Err(VerifyError::Payload(_))));
    envelope.signatures.clear();
    assert!(matches!(verify(envelope), Err(VerifyError::Signatures(Wrong))));
}

#[test]
fn what_is_not_an_envelope_is_refused_in_a_short_line() {
    let shape = |text: &str| Envelope::from_json(text.as_bytes()).unwrap_err();
    let good = r#"{"payloadType":"t","payload":"","signatures":[]}"#;
    assert!(Envelope::from_json(good.as_bytes()).is_ok());
    let broken = [
        "".to_owned(),
        "[]".to_owned(),
        "\u{feff}{}".to_owned(),
        good.replace("\"t\"", "7"),
        good.replace("[]", "[],\"extra\":1"),
        good.replace("[]", "[],\"\u{202e}\":1"),
        good.replace("[]", "[],\"payload\":\"\""),
        good.replace("[]", "[{\"keyid\":\"k\",\"sig\":\"\",\"cert\":\"\"}]"),
        good.replace("[]", &format!("\"{}\"", "x".repeat(1_000_000))),
        format!("{good}{good}"),
    ];
    for text in &broken {
        let error = shape(text);
        let shown = error.to_string();
        assert!(matches!(error, EnvelopeError::Shape(_)), "{shown}");
        assert!(shown.len() < 200 && shown.bytes().all(|b| (b' '..=b'~').contains(&b)), "{shown:?}");
    }
    assert_eq!(
        shape(&good.replace("\"payload\":\"\"", "\"payload\":\"====\"")),
        EnvelopeError::Base64("payload")
    );
    // Two texts for the same bytes would make two envelopes of one.
    assert_eq!(
        shape(&good.replace("\"payload\":\"\"", "\"payload\":\"AB==\"")),
        EnvelopeError::Base64("payload")
    );
    assert_eq!(shape(&good.replace("\"t\"", "\"a b\"")), EnvelopeError::Label("payloadType"));
    let long = format!("[{{\"keyid\":\"{}\",\"sig\":\"\"}}]", "k".repeat(129));
    assert_eq!(shape(&good.replace("[]", &long)), EnvelopeError::Label("keyid"));
}

#[test]
fn an_envelope_too_large_or_with_too_many_signatures_is_refused() {
    let found = MAX_ENVELOPE_BYTES + 1;
    assert_eq!(Envelope::from_json(&vec![b' '; found]), Err(EnvelopeError::TooLarge { found }));
    let mut envelope = sealed(DOCUMENT_PAYLOAD_TYPE, Vec::new());
    let one = envelope.signatures[0].clone();
    envelope.signatures = vec![one; MAX_SIGNATURES + 1];
    let error = EnvelopeError::TooManySignatures { found: MAX_SIGNATURES + 1 };
    assert_eq!(Envelope::from_json(&envelope.to_json()), Err(error));
}

#[test]
fn a_problem_has_the_members_of_rfc_9457_and_ours() {
    let error =
        FieldError { path: "node_id".into(), expected: "must be there".into(), found: "nothing".into() };
    let problem = Problem::new(422, "document_invalid", "the document has 1 error(s)", "Correct it.")
        .with_errors(vec![error]);
    let shape = json!({
        "type": "urn:mvm:problem:document_invalid",
        "title": "document invalid",
        "status": 422,
        "code": "document_invalid",
        "detail": "the document has 1 error(s)",
        "remediation": "Correct it.",
        "errors": [{ "path": "node_id", "expected": "must be there", "found": "nothing" }],
    });
    assert_eq!(serde_json::to_value(&problem).unwrap(), shape);
    assert_eq!(serde_json::from_value::<Problem>(shape).unwrap(), problem);
}
