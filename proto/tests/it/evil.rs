//! The evil corpus: ten thousand documents that someone might send on purpose. All are refused, and politely.

use mvm_proto::DesiredState;
use mvm_proto::json::quote;
use serde_json::{Value, json};

/// Texts that are no id, no digest, no subnet, no choice, whatever field they are put in.
fn evil_texts() -> Vec<String> {
    let mut texts: Vec<String> = [
        "",
        " ",
        ".",
        "..",
        "../..",
        "../../../../etc/passwd",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "a\0",
        "\0",
        "a\nb",
        "a\r\nb",
        "a\tb",
        "a b",
        "\u{1b}[2J\u{1b}[31mowned",
        "\u{9b}31m",
        "\u{7}",
        "\u{feff}acme",
        "acme\u{200b}",
        "acme\u{202e}gpj",
        "\u{430}cme",
        "acm\u{435}",
        "ａｃｍｅ",
        "ACME",
        "acme-",
        "-acme",
        "acme_1",
        "acme.corp",
        "$(reboot)",
        "`reboot`",
        "'; drop table tenants; --",
        "%2e%2e",
        "%s%n",
        "{{7*7}}",
        "${jndi:ldap://x}",
        "\u{10ffff}",
        "e\u{301}",
        "\u{fffd}",
        "null\u{0}byte",
    ]
    .map(str::to_owned)
    .into();
    for c in (0..0x20).chain(0x7f..0xa0).filter_map(char::from_u32) {
        texts.push(format!("a{c}b"));
        texts.push(format!("{c}"));
        texts.push(format!("a{c}"));
    }
    // Letters of other scripts that look like Latin ones, and the tricks of hidden direction.
    for c in "аеорсухіјѕԁɡһӏոսացհօɑɩοαυνωⅰⅴⅹｏ\u{2066}\u{2069}\u{200d}\u{2028}\u{2029}".chars()
    {
        texts.push(format!("{c}"));
        texts.push(format!("node-{c}"));
        texts.push(format!("{c}-1"));
    }
    texts.push("a".repeat(5000));
    texts.push("é".repeat(5000));
    texts
}

fn full_document() -> Value {
    let mut document: Value = serde_json::from_str(mvm_examples::PRODUCTION.json).unwrap();
    document["cluster"] = json!("prod");
    document
}

/// Every string in the document, by its pointer.
fn string_fields(value: &Value, at: &str, found: &mut Vec<String>) {
    match value {
        Value::String(_) => found.push(at.to_owned()),
        Value::Object(members) => {
            members.iter().for_each(|(key, value)| string_fields(value, &format!("{at}/{key}"), found));
        }
        Value::Array(items) => {
            items.iter().enumerate().for_each(|(n, value)| string_fields(value, &format!("{at}/{n}"), found));
        }
        _ => {}
    }
}

/// The largest example with one thing in it replaced, which must be there.
fn production_with(there: &str, instead: &str) -> String {
    let text = mvm_examples::PRODUCTION.json;
    assert!(text.contains(there), "the example no longer says {there}");
    text.replacen(there, instead, 1)
}

/// The one error of a document that has exactly one, as people see it.
fn the_error(text: &str) -> mvm_proto::FieldError {
    let errors = DesiredState::parse(text.as_bytes()).expect_err("should be refused").0;
    assert_eq!(errors.len(), 1, "{errors:?}");
    let shown = errors[0].to_string();
    assert!(shown.len() < 500 && shown.bytes().all(|b| (b' '..=b'~').contains(&b)), "{shown:?}");
    errors.into_iter().next().unwrap()
}

#[test]
fn no_evil_text_gets_into_any_field_and_none_reaches_a_terminal() {
    let document = full_document();
    let mut fields = Vec::new();
    string_fields(&document, "", &mut fields);
    let texts = evil_texts();
    let mut refused = 0;
    for pointer in &fields {
        // References and stores are free text of printable ASCII; they have their own test below.
        let free = ["flake_ref", "store", "path"].iter().any(|name| pointer.ends_with(&format!("/{name}")));
        for text in texts.iter().filter(|text| !free || !text.bytes().all(|b| b.is_ascii_graphic())) {
            let mut evil = document.clone();
            *evil.pointer_mut(pointer).unwrap() = json!(text);
            assert_eq!(the_error(&evil.to_string()).found, quote(text));
            refused += 1;
        }
    }
    assert!(refused > 4_000, "{refused}");
}

#[test]
fn no_evil_text_is_a_key_at_any_level() {
    let document = full_document();
    let parents = ["", "/tenants/0", "/tenants/0/network", "/tenants/0/quotas", "/tenants/0/egress"];
    let inner = [
        "",
        "/instance_resources",
        "/desired_counts",
        "/runtime_policy",
        "/sleep_policy",
        "/persist",
        "/io_limits",
    ];
    let inner = inner.map(|name| format!("/tenants/0/pools/1{name}"));
    for parent in parents.iter().copied().chain(inner.iter().map(String::as_str)) {
        for text in evil_texts() {
            let mut evil = document.clone();
            evil.pointer_mut(parent).unwrap().as_object_mut().unwrap().insert(text, json!(0));
            assert_eq!(the_error(&evil.to_string()).found, "an unknown field");
        }
    }
}

#[test]
fn no_evil_text_names_a_variable_or_a_user() {
    // These are no ids, and names all the same.
    let is_user = |text: &str| ["ACME", "acme-", "acme_1", "acme.corp"].contains(&text);
    for text in evil_texts() {
        let with = |workload: Value| {
            let mut evil = full_document();
            evil["tenants"][0]["pools"][1]["workload"] = workload;
            evil.to_string()
        };
        if text != "ACME" && text != "acme_1" {
            let error = the_error(&with(json!({ "env": { &text: "" } })));
            assert_eq!(error.found, "another name");
            assert!(error.path.starts_with("tenants[0].pools[1].workload.env"), "{}", error.path);
        }
        if !is_user(&text) {
            assert_eq!(the_error(&with(json!({ "user": text }))).found, quote(&text));
        }
    }
}

#[test]
fn numbers_that_are_not_what_they_seem_are_refused() {
    let numbers = [
        "-0",
        "-1",
        "0.0",
        "1.0",
        "1e0",
        "1E2",
        "1e-2",
        "0.1e1",
        "4.0",
        "9007199254740992",
        "9007199254740993",
        "18446744073709551615",
        "18446744073709551616",
        "1e308",
        "-9223372036854775808",
        "\"4\"",
        "true",
        "null",
        "[4]",
        "{}",
    ];
    let fields = [
        ("\"max_vcpus\": 64", "tenants[0].quotas.max_vcpus"),
        ("\"max_mem_mib\": 131072", "tenants[0].quotas.max_mem_mib"),
        ("\"max_disk_gib\": 1600", "tenants[0].quotas.max_disk_gib"),
        ("\"tenant_net_id\": 1", "tenants[0].network.tenant_net_id"),
        ("\"sleeping\": 120", "tenants[0].pools[1].desired_counts.sleeping"),
        ("\"stopped_retention_seconds\": 3600", "tenants[0].pools[1].stopped_retention_seconds"),
        ("\"every_seconds\": 300", "tenants[0].pools[1].persist.every_seconds"),
        ("\"write_bytes_per_second\": 52428800", "tenants[0].pools[1].io_limits.write_bytes_per_second"),
    ];
    for (field, path) in fields {
        let (name, _) = field.split_once(':').unwrap();
        for number in numbers {
            let text = production_with(field, &format!("{name}: {number}"));
            assert_eq!(the_error(&text).path, path, "{number}");
        }
    }
}

#[test]
fn the_largest_exact_integer_is_the_largest() {
    let text =
        |number: u64| production_with("\"max_disk_gib\": 1600", &format!("\"max_disk_gib\": {number}"));
    let limit = 1_u64 << 53;
    assert!(DesiredState::parse(text(limit - 1).as_bytes()).is_ok());
    assert_eq!(the_error(&text(limit)).expected, "must be 0..=9007199254740991");
    assert_eq!(the_error(&text(limit + 1)).found, "9007199254740993");
}

#[test]
fn a_string_of_ten_megabytes_is_refused_by_size_and_one_of_three_by_its_field() {
    let text =
        |len: usize| mvm_examples::MINIMAL.json.replacen("\"acme\"", &format!("\"{}\"", "a".repeat(len)), 1);
    assert!(the_error(&text(10_000_000)).expected.starts_with("must be at most 4194304 bytes"));
    let error = the_error(&text(3_000_000));
    assert_eq!(error.path, "tenants[0].tenant_id");
    assert!(error.found.ends_with("(3000000 bytes)"), "{}", error.found);
}

#[test]
fn bombs_are_refused_before_they_go_off() {
    let deep = format!("{{\"tenants\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert_eq!(the_error(&deep).expected, "must nest at most 32 levels deep");
    let deep = "{\"a\":".repeat(100_000);
    assert_eq!(the_error(&deep).expected, "must nest at most 32 levels deep");
    let wide = format!("{{\"tenants\":[{}0]}}", "0,".repeat(2_000_000));
    assert_eq!(the_error(&wide).expected, "must hold at most 524288 values");
}

#[test]
fn texts_that_readers_disagree_about_are_refused() {
    let minimal = mvm_examples::MINIMAL.json;
    let broken: [Vec<u8>; 10] = [
        [b"\xef\xbb\xbf", minimal.as_bytes()].concat(),
        minimal.encode_utf16().flat_map(u16::to_le_bytes).collect(),
        format!("{minimal}\0").into_bytes(),
        format!("{minimal}{minimal}").into_bytes(),
        format!("// a comment\n{minimal}").into_bytes(),
        minimal.replacen("\"acme\"", "\"ac\u{0}me\"", 1).into_bytes(),
        minimal.replacen("\"acme\"", "\"\\ud800\"", 1).into_bytes(),
        minimal.replacen("\"acme\"", "\"\\udfff\\ud800\"", 1).into_bytes(),
        minimal.replacen("\"acme\",", "\"acme\",,", 1).into_bytes(),
        {
            let at = minimal.find("acme").unwrap();
            let mut bytes = minimal.as_bytes().to_vec();
            bytes[at] = 0xff;
            bytes
        },
    ];
    for bytes in broken {
        let errors = DesiredState::parse(&bytes).unwrap_err().0;
        assert_eq!((errors.len(), errors[0].path.as_str()), (1, ""), "{errors:?}");
    }
    // The same key, spelled in two ways, is the same key.
    let twice = minimal.replacen("\"node_id\"", "\"node_id\": \"node-b\", \"n\\u006fde_id\"", 1);
    assert_eq!(the_error(&twice).to_string(), "node_id: must appear once, found the key a second time");
}
