//! Objects read, their schemas, and selectors.

use serde_json::{Value, json};

use super::*;

fn read_value(object: &Value) -> Result<Declared, Vec<String>> {
    read(object.to_string().as_bytes()).map_err(|errors| errors.iter().map(ToString::to_string).collect())
}

fn pool(spec: &Value) -> Value {
    json!({ "api_version": "mvm/v1", "kind": "Pool", "metadata": { "tenant": "acme", "name": "workers" }, "spec": spec })
}

fn smallest() -> Value {
    json!({ "image": { "ref": "builtin:busybox" }, "resources": { "vcpus": 1, "mem_mib": 64 } })
}

#[test]
fn a_small_pool_gets_every_default() {
    let declared = read_value(&pool(&smallest())).unwrap();
    assert_eq!(declared.spec["counts"], json!({ "running": 0, "warm": 0, "sleeping": 0 }));
    assert_eq!(declared.spec["restart"], "always");
    assert_eq!(declared.spec["profile"], "default");
    // What was read once reads again, and means the same.
    let again = read_value(&pool(&declared.spec)).unwrap();
    assert_eq!(again.spec, declared.spec);
    let typed: PoolSpec = serde_json::from_value(declared.spec.clone()).unwrap();
    assert_eq!(serde_json::to_value(&typed).unwrap(), declared.spec);
}

#[test]
fn everything_wrong_is_told_at_once_with_its_path_and_what_was_meant() {
    let mut spec = smallest();
    spec["vcpu"] = json!(1);
    spec["resources"]["memmib"] = json!(1);
    spec["counts"] = json!({ "running": -1 });
    spec["placement"] = json!({ "node_labels": { "a b": "c" }, "spread": { "max_skew": 0 }, "colocat": "x" });
    let mut object = pool(&spec);
    object["metadata"]["label"] = json!({});
    let errors = read_value(&object).unwrap_err();
    let has = |start: &str, part: &str| {
        assert!(
            errors.iter().any(|e| e.starts_with(start) && e.contains(part)),
            "{start} {part}: {errors:#?}"
        );
    };
    has("metadata.label:", "did you mean `labels`?");
    has("spec.vcpu:", "an unknown field");
    has("spec.resources.memmib:", "did you mean `mem_mib`?");
    has("spec.counts.running:", "0..=100000");
    has("spec.placement.node_labels[\"a b\"]:", "the key must be");
    has("spec.placement.spread.max_skew:", "1..=1000");
    has("spec.placement.colocat:", "did you mean `colocate`?");
    assert_eq!(errors.len(), 7, "{errors:#?}");
}

#[test]
fn a_tenant_s_images_are_those_of_its_prefixes_and_digests() {
    let digest = format!("sha256:{}", "a".repeat(64));
    let image = |reference: &str, digest: Option<&str>| PoolImage {
        r#ref: reference.to_owned(),
        digest: digest.map(|digest| digest.parse().unwrap()),
    };
    let only =
        |allow: &[&str]| TenantImages { allow: allow.iter().map(|entry| (*entry).to_owned()).collect() };
    let path = image("path:/srv/images/web", None);
    assert!(only(&[]).allows(&path));
    for (allow, expected) in [
        ("path:/srv/images/web", true),
        ("path:/srv/images/", true),
        ("path:/srv/images", true),
        ("path:", true),
        ("path:/srv/ima", false),
        ("builtin:", false),
        (digest.as_str(), false),
    ] {
        assert_eq!(only(&[allow]).allows(&path), expected, "{allow}");
    }
    for (reference, allow, expected) in [
        ("git+https://git.acme/web?ref=main&dir=a", "git+https://git.acme/", true),
        ("git+https://git.acme/web?ref=main&rev=abc", "git+https://git.acme/web?ref=main", false),
        ("github:acme/web?rev=abc", "github:acme/", true),
        ("git+file:///srv/acme/../zeta", "git+file:///srv/acme/", false),
        ("git+file:///srv/acme/%2E%2e/zeta", "git+file:///srv/acme/", false),
        ("git+file:///srv/acme/web?dir=../../zeta", "git+file:///srv/acme/", false),
        ("github:acme/web?host=evil.example", "github:acme/", false),
        ("git+https://git.acme@evil.example/web", "git+https://git.acme", false),
        ("git+https://git.acme:x@evil.example/web", "git+https://git.acme", false),
    ] {
        assert_eq!(only(&[allow]).allows(&image(reference, None)), expected, "{reference}");
    }
    assert!(only(&["builtin:", &digest]).allows(&image("path:/srv/images/web", Some(&digest))));
    let tenant = |allow: Value| json!({ "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": "acme" }, "spec": { "images": { "allow": allow } } });
    assert_eq!(
        read_value(&tenant(json!(["builtin:"]))).unwrap().spec["images"]["allow"],
        json!(["builtin:"])
    );
    let errors = read_value(&tenant(json!(["", "a b"]))).unwrap_err();
    assert!(errors[0].starts_with("spec.images.allow[0]:") && errors.len() == 2, "{errors:?}");
}

#[test]
fn kinds_are_found_by_all_their_names_and_a_wrong_one_is_corrected() {
    for name in ["pool", "pools", "pl", "Pool"] {
        assert_eq!(kind_named(name).unwrap().name, "Pool");
    }
    for name in ["apikey", "api-keys", "apikeys", "ak", "api-key"] {
        assert_eq!(kind_named(name).unwrap().name, "ApiKey");
    }
    assert!(kind_named("tenent").unwrap_err().contains("did you mean Tenant?"));
    let odd = json!({ "api_version": "mvm/v1", "kind": "Poool", "metadata": { "name": "a" } });
    assert!(read_value(&odd).unwrap_err()[0].contains("did you mean"), "{:?}", read_value(&odd));
}

#[test]
fn names_of_kinds_collections_and_short_names_are_unique() {
    let mut names: Vec<&str> = KINDS.iter().flat_map(|kind| [kind.plural, kind.short]).collect();
    names.sort_unstable();
    let all = names.len();
    names.dedup();
    assert_eq!(names.len(), all);
}

#[test]
fn an_object_is_in_the_scope_of_its_kind() {
    let no_tenant =
        json!({ "api_version": "mvm/v1", "kind": "Pool", "metadata": { "name": "a" }, "spec": smallest() });
    assert!(read_value(&no_tenant).unwrap_err()[0].contains("tenant"));
    let tenant =
        json!({ "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": "a", "tenant": "a" } });
    assert!(read_value(&tenant).unwrap_err()[0].contains("must be absent"));
    let tenant = json!({ "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": "a" } });
    assert_eq!(read_value(&tenant).unwrap().spec["quotas"]["max_vcpus"], 64);
}

#[test]
fn what_the_server_shows_is_taken_back() {
    let mut shown = pool(&smallest());
    shown["metadata"]["uid"] = json!("x");
    shown["metadata"]["generation"] = json!(7);
    shown["metadata"]["resource_version"] = json!("42");
    shown["status"] = json!({ "observed_generation": 7, "anything": [1] });
    let declared = read_value(&shown).unwrap();
    assert_eq!((declared.metadata.generation, declared.metadata.resource_version.as_str()), (0, "42"));
}

#[test]
fn every_kind_s_schema_takes_what_its_decoder_takes() {
    let objects = [
        pool(&smallest()),
        json!({ "api_version": "mvm/v1", "kind": "Tenant", "metadata": { "name": "a" }, "spec": { "pinned": true } }),
        json!({ "api_version": "mvm/v1", "kind": "Node", "metadata": { "name": "a", "labels": { "x/y": "1" } },
            "spec": { "overcommit": { "vcpus": 2 }, "taints": [{ "key": "gpu", "effect": "no_place" }] } }),
        json!({ "api_version": "mvm/v1", "kind": "ApiKey", "metadata": { "name": "a" }, "spec": { "role": "viewer" } }),
        json!({ "api_version": "mvm/v1", "kind": "Secret", "metadata": { "tenant": "acme", "name": "a" },
            "spec": { "data": { "A": { "bytes": 1, "digest": "00" } } } }),
    ];
    for object in objects {
        let declared = read_value(&object).unwrap();
        let schema = kind_schema(declared.kind);
        let validator = jsonschema::validator_for(&schema).unwrap();
        let full = json!({ "api_version": "mvm/v1", "kind": object["kind"], "metadata": object["metadata"],
            "spec": declared.spec });
        for object in [&object, &full] {
            let errors: Vec<_> = validator.iter_errors(object).map(|error| error.to_string()).collect();
            assert!(errors.is_empty(), "{errors:#?} in {object}");
        }
        let mut odd = full.clone();
        odd["spec"]["no_such_field"] = json!(1);
        assert!(!validator.is_valid(&odd), "{}", object["kind"]);
        assert!(read_value(&odd).is_err());
    }
}

#[test]
fn selectors_mean_what_kubectl_s_mean() {
    let labels =
        |pairs: &[(&str, &str)]| pairs.iter().map(|(k, v)| ((*k).to_owned(), (*v).to_owned())).collect();
    let has = labels(&[("team", "search"), ("env", "a")]);
    for (selector, expected) in [
        ("", true),
        ("team=search", true),
        ("team==search,env=a", true),
        ("team!=search", false),
        ("gpu!=yes", true),
        ("env in (a, b)", true),
        ("env notin (a,b)", false),
        ("team,!gpu", true),
        ("gpu", false),
    ] {
        assert_eq!(selector.parse::<LabelSelector>().unwrap().matches(&has), expected, "{selector}");
    }
    for bad in ["a b=c", "env in a", "=x", "team=a/b"] {
        assert!(bad.parse::<LabelSelector>().is_err(), "{bad}");
    }
}

#[test]
fn fields_are_selected_by_their_paths() {
    let object = Object {
        api_version: API_VERSION.to_owned(),
        kind: "Node".to_owned(),
        metadata: Metadata { name: "n1".to_owned(), ..Metadata::default() },
        spec: json!({ "cordoned": true }),
        status: Value::Null,
    };
    for (selector, expected) in [
        ("spec.cordoned=true", true),
        ("metadata.name!=n1", false),
        ("status.state=", true),
        ("spec.cordoned=true,metadata.name=n1", true),
    ] {
        assert_eq!(selector.parse::<FieldSelector>().unwrap().matches(&object), expected, "{selector}");
    }
    assert!("name=n1".parse::<FieldSelector>().is_err());
}
