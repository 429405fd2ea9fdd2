//! One bit of a good envelope turned: wherever it lies, the document is not the director's any more.

use mvm_pki::seal;
use mvm_proto::Envelope;
use mvm_proto::document::DOCUMENT_PAYLOAD_TYPE;

use crate::bad_input::one_agent::{OneAgent, UNHURRIED};

/// How many places of the JSON text are tried.
const PLACES_IN_TEXT: usize = 200;
/// How many places of each decoded part: payload, signature, type, key id.
const PLACES_IN_PART: usize = 50;

/// Up to `count` places in `length`, from the first to the last.
fn places(length: usize, count: usize) -> impl Iterator<Item = usize> {
    let count = count.min(length);
    (0..count).map(move |n| n * (length - 1) / (count - 1).max(1))
}

/// `bytes` with one bit turned; which one differs from place to place.
fn turned(bytes: &[u8], place: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[place] ^= 1 << (place % 8);
    bytes
}

/// A turned bit in text, among the seven that keep it ASCII.
fn turned_text(text: &str, place: usize) -> String {
    let mut bytes = text.as_bytes().to_vec();
    bytes[place] ^= 1 << (place % 7);
    String::from_utf8(bytes).unwrap()
}

fn parts(good: &Envelope) -> Vec<(String, Envelope)> {
    let mut all = Vec::new();
    for place in places(good.payload.len(), PLACES_IN_PART) {
        let payload = turned(&good.payload, place);
        all.push((format!("payload byte {place}"), Envelope { payload, ..good.clone() }));
    }
    for place in places(good.payload_type.len(), PLACES_IN_PART) {
        let payload_type = turned_text(&good.payload_type, place);
        all.push((format!("type byte {place}"), Envelope { payload_type, ..good.clone() }));
    }
    for place in places(good.signatures[0].bytes.len(), PLACES_IN_PART) {
        let mut envelope = good.clone();
        envelope.signatures[0].bytes = turned(&good.signatures[0].bytes, place);
        all.push((format!("signature byte {place}"), envelope));
    }
    for place in places(good.signatures[0].key_id.len(), PLACES_IN_PART) {
        let mut envelope = good.clone();
        envelope.signatures[0].key_id = turned_text(&good.signatures[0].key_id, place);
        all.push((format!("key id byte {place}"), envelope));
    }
    all
}

#[test]
fn an_envelope_with_one_turned_bit_is_refused_wherever_the_bit_lies() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let good = seal(DOCUMENT_PAYLOAD_TYPE, agent.next().to_payload(), &[&agent.director]);

    let text = good.to_json();
    for place in places(text.len(), PLACES_IN_TEXT) {
        let answer = agent.push(turned(&text, place));
        let refused = [(400, "bad_envelope"), (403, "bad_signature")].contains(&answer.refusal());
        assert!(refused, "byte {place} of the text: {answer:?}");
    }
    for (place, envelope) in parts(&good) {
        let answer = agent.push(envelope.to_json());
        // A type or key id with a character that no label may have does not get as far as the signature.
        let refused = match place.split(' ').next() {
            Some("payload" | "signature") => answer.refusal() == (403, "bad_signature"),
            Some("type") => answer.refusal() == (400, "bad_envelope"),
            _ => [(400, "bad_envelope"), (403, "bad_signature")].contains(&answer.refusal()),
        };
        assert!(refused, "{place}: {answer:?}");
    }

    assert_eq!(agent.state(), before);
    // The same envelope as it was signed.
    assert_eq!(agent.push(text).status, 202);
    agent.generation += 1;
    assert_eq!(agent.converged().instances, before.instances);
}
