//! Properties of reading documents, over random valid documents and random damage to them.

use crate::arbitrary::{desired_state, desired_state_of, signed_document};
use mvm_proto::document::schema::desired_state_schema;
use mvm_proto::document::{DocumentErrors, MAX_DOCUMENT_BYTES};
use mvm_proto::envelope::Payload as _;
use mvm_proto::json::{Json, MAX_ERRORS};
use mvm_proto::{DesiredState, Problem, SignedDocument};
use proptest::prelude::*;
use serde_json::Value;

use crate::damage::{self, Damage};

fn text_of(document: &DesiredState) -> String {
    serde_json::to_string(document).unwrap()
}

/// The laws that every refusal obeys, whatever was wrong.
fn is_a_good_refusal(errors: &DocumentErrors) -> Result<(), TestCaseError> {
    prop_assert!(!errors.0.is_empty());
    prop_assert!(errors.0.len() <= MAX_ERRORS + 1);
    for error in &errors.0 {
        for text in [&error.path, &error.expected, &error.found] {
            prop_assert!(text.bytes().all(|b| (b' '..=b'~').contains(&b)), "{text:?}");
        }
        prop_assert!(!error.expected.is_empty() && error.found.len() <= 100, "{error:?}");
    }
    let problem = Problem::from(errors.clone());
    let json: Value = serde_json::from_slice(&serde_json::to_vec(&problem).unwrap()).unwrap();
    prop_assert_eq!(json["errors"].as_array().unwrap().len(), errors.0.len());
    Ok(())
}

proptest! {
    #[test]
    fn a_document_reads_back_from_its_own_text(document in desired_state()) {
        prop_assert_eq!(DesiredState::parse(text_of(&document).as_bytes()), Ok(document));
    }

    #[test]
    fn a_signed_document_reads_back_from_its_payload(document in signed_document()) {
        prop_assert_eq!(SignedDocument::parse(&document.to_payload()), Ok(document));
    }

    #[test]
    fn every_valid_document_is_valid_under_the_schema(document in signed_document()) {
        let payload: Value = serde_json::from_slice(&document.to_payload()).unwrap();
        let errors: Vec<_> = schema().iter_errors(&payload).map(|error| error.to_string()).collect();
        prop_assert!(errors.is_empty(), "{errors:?}");
    }

    #[test]
    fn what_the_schema_refuses_the_decoder_refuses_too(
        document in desired_state_of(1..=2, 1..=2),
        damage in prop::collection::vec(damage::any_damage(), 1..4),
    ) {
        let mut value = serde_json::to_value(&document).unwrap();
        for one in &damage {
            one.apply(&mut value);
        }
        let outcome = DesiredState::parse(value.to_string().as_bytes());
        if !schema().is_valid(&value) {
            prop_assert!(outcome.is_err(), "{value}");
        }
        if let Err(errors) = &outcome {
            is_a_good_refusal(errors)?;
        }
    }

    #[test]
    fn every_field_of_the_wrong_type_is_reported_however_many_there_are(
        document in desired_state_of(1..=3, 1..=3),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 1..8),
    ) {
        let mut value = serde_json::to_value(&document).unwrap();
        let scalars = damage::scalars(&value);
        let mut broken: Vec<_> = picks.iter().map(|pick| pick.get(&scalars).clone()).collect();
        broken.sort();
        broken.dedup();
        for pointer in &broken {
            *value.pointer_mut(pointer).unwrap() = Value::Array(Vec::new());
        }
        let errors = DesiredState::parse(value.to_string().as_bytes()).unwrap_err();
        for pointer in &broken {
            let path = damage::path_of(pointer);
            prop_assert!(errors.0.iter().any(|error| error.path == path), "{path} is not in {errors}");
        }
    }

    #[test]
    fn a_missing_field_has_a_default_or_is_reported(
        document in desired_state_of(1..=2, 1..=2),
        pick in any::<prop::sample::Index>(),
    ) {
        let mut value = serde_json::to_value(&document).unwrap();
        let pointer = pick.get(&damage::members(&value)).clone();
        Damage::remove(&pointer).apply(&mut value);
        if let Err(errors) = DesiredState::parse(value.to_string().as_bytes()) {
            let path = damage::path_of(&pointer);
            // A default may be at odds with the rest: a sleep policy left with one of its two times; limits, a check or a workload
            // without any.
            let at_odds = [".sleep_policy", ".io_limits", ".health", ".workload"]
                .into_iter()
                .any(|parent| path.contains(&format!("{parent}.")) && errors.0[0].path.ends_with(parent));
            prop_assert!(at_odds || errors.0.iter().any(|error| error.path == path), "{path}: {errors}");
        }
    }

    #[test]
    fn flipped_bytes_never_panic_and_are_refused_the_same_way_twice(
        document in signed_document(),
        flips in prop::collection::vec((any::<prop::sample::Index>(), 0..8_u8), 1..6),
    ) {
        let mut bytes = document.to_payload();
        for (at, bit) in &flips {
            let at = at.index(bytes.len());
            bytes[at] ^= 1 << bit;
        }
        let outcome = SignedDocument::parse(&bytes);
        prop_assert_eq!(&outcome, &SignedDocument::parse(&bytes));
        if let Err(errors) = &outcome {
            is_a_good_refusal(errors)?;
        }
    }

    #[test]
    fn random_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        if let Err(errors) = DesiredState::parse(&bytes) {
            is_a_good_refusal(&errors)?;
        }
    }

    #[test]
    fn any_json_of_a_few_keys_is_judged_as_serde_json_would_but_for_duplicates(
        text in r#"[\[\]{}",:0-9a\\ue.-]{0,24}"#,
    ) {
        let ours = Json::parse(text.as_bytes(), MAX_DOCUMENT_BYTES);
        let theirs = serde_json::from_str::<Value>(&text);
        match ours {
            Ok(_) => prop_assert!(theirs.is_ok()),
            Err(errors) => prop_assert!(theirs.is_err() || errors[0].expected == "must appear once"),
        }
    }

    #[test]
    fn a_repeated_key_at_any_level_is_refused_by_its_path(
        document in desired_state_of(1..=2, 1..=2),
        pick in any::<prop::sample::Index>(),
    ) {
        let value = serde_json::to_value(&document).unwrap();
        let pointer = pick.get(&damage::members(&value)).clone();
        let text = damage::with_repeated_key(&value, &pointer);
        let errors = DesiredState::parse(text.as_bytes()).unwrap_err();
        prop_assert_eq!(errors.0.len(), 1);
        prop_assert_eq!(&errors.0[0].path, &damage::path_of(&pointer));
        prop_assert_eq!(&errors.0[0].expected, "must appear once");
    }
}

fn schema() -> &'static jsonschema::Validator {
    static SCHEMA: std::sync::OnceLock<jsonschema::Validator> = std::sync::OnceLock::new();
    SCHEMA.get_or_init(|| jsonschema::draft202012::new(&desired_state_schema()).unwrap())
}

#[test]
fn every_example_is_valid_under_the_schema() {
    for example in mvm_examples::ALL {
        let value = serde_json::from_str(example.json).unwrap();
        assert!(schema().is_valid(&value), "{}", example.name);
    }
}

#[test]
fn the_schema_is_a_schema_with_a_name_and_describes_its_fields() {
    let schema = desired_state_schema();
    assert_eq!(schema["$schema"], "https://json-schema.org/draft/2020-12/schema");
    assert_eq!(schema["$id"], "urn:mvm:schema:desired-state:v1");
    assert!(jsonschema::draft202012::meta::is_valid(&schema));
    let required = ["node_id", "schema_version", "tenants"];
    let mut found: Vec<_> =
        schema["required"].as_array().unwrap().iter().map(|name| name.as_str().unwrap()).collect();
    found.sort_unstable();
    assert_eq!(found, required);
    let pool = &schema["$defs"]["Pool"];
    assert_eq!(pool["additionalProperties"], false);
    assert_eq!(pool["properties"]["stopped_retention_seconds"]["default"], 3600);
    assert_eq!(schema["$defs"]["Resources"]["properties"]["vcpus"]["maximum"], 32);
}

#[test]
fn the_schema_refuses_null_where_a_field_may_be_absent() {
    let text = serde_json::to_string(&desired_state_schema()).unwrap();
    assert!(!text.contains("\"null\""), "{text}");
}
