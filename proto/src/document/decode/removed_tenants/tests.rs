//! Tenants that were deleted with their data, as documents say it.

use serde_json::{Value, json};

use super::super::local;
use super::super::tests::{errors, minimal, with};

fn document(removed: &Value) -> Value {
    with(minimal(), "/removed_tenants", removed.clone())
}

#[test]
fn removed_tenants_are_read_and_written_as_they_are_read() {
    let removed = json!([
        { "tenant_id": "gone", "uid": "a1" },
        { "tenant_id": "gone-too", "uid": "b2", "session_stores": ["s3://acme/prod", "file:///var/s", "local"] },
    ]);
    let read = local(document(&removed).to_string().as_bytes()).unwrap();
    assert_eq!(serde_json::to_value(&read.removed_tenants).unwrap(), removed);
    // A document that says nothing of them is written as before: to the byte, for it may be signed.
    let before = local(minimal().to_string().as_bytes()).unwrap();
    assert!(!serde_json::to_string(&before).unwrap().contains("removed_tenants"));
}

#[test]
fn a_removed_tenant_is_named_once_and_is_not_wanted_too() {
    let of = |removed: Value| errors(&document(&removed));
    let wanted = minimal()["tenants"][0]["tenant_id"].clone();
    let both = of(json!([{ "tenant_id": wanted, "uid": "a1" }]));
    assert!(both[0].starts_with("removed_tenants[0].tenant_id: must not be tenants[0] too"), "{both:?}");
    let twice = of(json!([{ "tenant_id": "a", "uid": "1" }, { "tenant_id": "a", "uid": "2" }]));
    assert!(twice[0].starts_with("removed_tenants[1].tenant_id: must be unique"), "{twice:?}");
    for (bad, path) in [
        (json!({ "tenant_id": "a" }), "removed_tenants[0].uid"),
        (json!({ "tenant_id": "a", "uid": "" }), "removed_tenants[0].uid"),
        (
            json!({ "tenant_id": "a", "uid": "1", "session_stores": ["/etc"] }),
            "removed_tenants[0].session_stores[0]",
        ),
        (json!({ "tenant_id": "a", "uid": "1", "stores": [] }), "removed_tenants[0].stores"),
        (
            json!({ "tenant_id": "a", "uid": "1", "session_stores": vec!["local"; 257] }),
            "removed_tenants[0].session_stores",
        ),
    ] {
        let found = of(json!([bad]));
        assert!(found[0].starts_with(path), "{found:?}");
    }
}
