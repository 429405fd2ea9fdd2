//! The text form of observations: strict, complete in its errors, and the same as its schema.

use mvm_planner::Observation;
use mvm_planner::observation::schema::observation_schema;
use serde_json::{Value, json};

fn full() -> Value {
    json!({
        "capacity": { "vcpus": 8, "mem_mib": 8192, "disk_mib": 100_000, "max_instances": 100 },
        "instances": [{
            "tenant": "acme", "pool": "web", "id": "i-00000001", "phase": "running",
            "since": "2026-01-31T09:30:00Z",
            "revision": format!("sha256:{}", "0".repeat(64)),
            "resources": { "vcpus": 1, "mem_mib": 128, "data_disk_mib": 0 },
            "last_used_at": "2026-01-31T09:31:00Z", "idle_since": "2026-01-31T09:32:00Z",
            "override_until": "2026-01-31T09:40:00Z", "claimed": true, "moving": true, "on_demand": true,
            "home": "sleeping", "staging": "warm", "moving_to": "stopped",
            "retry_not_before": "2026-01-31T09:33:00Z", "failures": 2,
            "workload": { "state": "failed", "since": "2026-01-31T09:33:00Z", "restarts": 4 },
            "offset": 65535
        }],
        "blocked": [{ "tenant": "acme", "pool": "web", "reason": "no image" }],
        "memory_pressure": true
    })
}

fn errors(value: &Value) -> Vec<String> {
    let errors = Observation::parse(value.to_string().as_bytes()).unwrap_err();
    errors.0.into_iter().map(|error| error.path).collect()
}

#[test]
fn an_observation_reads_back_from_its_own_text() {
    let read = Observation::parse(full().to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::to_value(&read).unwrap(), full());
}

#[test]
fn without_memory_pressure_the_text_is_what_it_was_before_there_was_such_a_field() {
    let mut old = full();
    old.as_object_mut().unwrap().remove("memory_pressure");
    let read = Observation::parse(old.to_string().as_bytes()).unwrap();
    assert!(!read.memory_pressure);
    assert_eq!(serde_json::to_value(&read).unwrap(), old);
    assert_eq!(serde_json::from_value::<Observation>(old).unwrap(), read);
    let required = &observation_schema()["required"];
    assert_eq!(required, &json!(["capacity", "instances"]));
}

#[test]
fn every_mistake_is_named_by_its_path_at_once() {
    let mut bad = full();
    bad["capacity"]["vcpus"] = json!("8");
    bad["instances"][0]["phase"] = json!("asleep");
    bad["instances"][0]["since"] = json!("yesterday");
    bad["instances"][0]["home"] = Value::Null;
    bad["instances"][0]["offset"] = json!(65536);
    bad["instances"][0]["colour"] = json!("blue");
    bad["memory_pressure"] = json!("some");
    bad["blocked"][0].as_object_mut().unwrap().remove("reason");
    let expected = [
        "blocked[0].reason",
        "capacity.vcpus",
        "instances[0].colour",
        "instances[0].home",
        "instances[0].offset",
        "instances[0].phase",
        "instances[0].since",
        "memory_pressure",
    ];
    let mut found = errors(&bad);
    found.sort();
    assert_eq!(found, expected);
}

#[test]
fn an_instance_that_is_there_twice_is_refused() {
    let mut bad = full();
    let twice = bad["instances"][0].clone();
    bad["instances"].as_array_mut().unwrap().push(twice);
    assert_eq!(errors(&bad), ["instances[1]"]);
}

/// A field that the type has and the decoder or the schema lacks, or the other way round, is found here.
#[test]
fn type_decoder_and_schema_know_the_same_fields() {
    let schema = observation_schema();
    let keys = |value: &Value| -> Vec<String> { value.as_object().unwrap().keys().cloned().collect() };
    assert_eq!(keys(&schema["properties"]), keys(&full()));
    let instance = &schema["$defs"]["ObservedInstance"];
    assert_eq!(keys(&instance["properties"]), keys(&full()["instances"][0]));
    assert_eq!(instance["additionalProperties"], json!(false));
}
