//! What a pool may say of its workload.

use serde_json::{Value, json};

use super::super::local;
use super::super::tests::{errors, minimal, with};
use crate::document::{MAX_WORKLOAD_BYTES, MAX_WORKLOAD_TEXT_BYTES, User, WorkloadOverride};
use crate::guest;

fn pool(workload: &Value) -> Value {
    with(minimal(), "/tenants/0/pools/0/workload", workload.clone())
}

fn read(workload: &Value) -> WorkloadOverride {
    let document = local(pool(workload).to_string().as_bytes()).unwrap();
    *document.tenants[0].pools[0].workload.clone().unwrap()
}

#[test]
fn each_part_may_be_absent_and_is_then_not_written_either() {
    let all = json!({
        "command": ["/bin/sh", "-c"], "args": ["echo \"$GREETING\"\n", ""], "env": { "GREETING": "grüß dich", "_2": "" },
        "working_dir": "/srv/app", "user": "nobody",
    });
    for (name, value) in all.as_object().unwrap() {
        let one = json!({ name: value });
        assert_eq!(serde_json::to_value(read(&one)).unwrap(), one);
    }
    let whole = read(&all);
    assert_eq!(serde_json::to_value(&whole).unwrap(), all);
    assert_eq!(whole.bytes(), 7 + 2 + 17 + 8 + 11 + 2);
    assert_eq!(read(&json!({ "user": 1000 })).user, Some(User::Id(1000)));
    assert_eq!(read(&json!({ "working_dir": "/" })).working_dir.as_deref(), Some("/"));
    // No arguments at all is another thing than to say nothing of them.
    assert_eq!(read(&json!({ "args": [] })).args, Some(Vec::new()));
    // A document without one is written as it was before there were any: to the byte, for it may be signed.
    let without = serde_json::to_string(&local(minimal().to_string().as_bytes()).unwrap()).unwrap();
    assert!(!without.contains("\"workload\"") && !without.contains("secrets_hash"), "{without}");
}

#[test]
fn a_guest_is_told_what_the_document_says() {
    let told = guest::WorkloadOverride::from(&read(&json!({ "args": [], "env": { "A": "b" }, "user": 7 })));
    assert_eq!((told.command, told.args), (None, Some(guest::Words { words: Vec::new() })));
    assert_eq!(told.env.into_iter().collect::<Vec<_>>(), [("A".to_owned(), "b".to_owned())]);
    assert_eq!((told.directory.as_str(), told.user), ("", Some(guest::workload_override::User::Id(7))));
    let told = guest::WorkloadOverride::from(&read(&json!({ "working_dir": "/srv", "user": "app" })));
    assert_eq!(told.directory, "/srv");
    assert_eq!(told.user, Some(guest::workload_override::User::Name("app".to_owned())));
}

#[test]
fn each_part_says_what_it_must_be_and_what_it_was() {
    let long = "x".repeat(MAX_WORKLOAD_TEXT_BYTES + 1);
    let many = |count: usize| vec!["a"; count];
    let variables = |count: usize| (0..count).map(|at| (format!("V{at}"), json!(""))).collect::<Value>();
    let cases = [
        (json!(["/bin/sh"]), "workload: must be an object"),
        (json!(null), "workload: must be an object, found null"),
        (json!({}), "workload: must have at least one of command, args, env, working_dir, user"),
        (json!({ "env": {} }), "workload: must have at least one of command, args, env, working_dir, user"),
        (
            json!({ "user": 0, "image": "x" }),
            "workload.image: must not be there: the fields here are command",
        ),
        (json!({ "command": "/bin/sh" }), "workload.command: must be an array"),
        (json!({ "command": [] }), "workload.command: must begin with a program"),
        (json!({ "command": ["", "x"] }), "workload.command: must begin with a program"),
        (json!({ "command": ["sh", 1] }), "workload.command[1]: must be a string, found 1"),
        (json!({ "command": ["s\u{0}h"] }), "workload.command[0]: must be at most 16384 bytes"),
        (json!({ "command": many(65) }), "workload.command: must be at most 64 strings"),
        (json!({ "args": many(257) }), "workload.args: must be at most 256 strings"),
        (json!({ "args": [long] }), "workload.args[0]: must be at most 16384 bytes"),
        (json!({ "env": ["A=b"] }), "workload.env: must be an object"),
        (json!({ "env": { "A": 1 } }), "workload.env.A: must be a string, found 1"),
        (
            json!({ "env": { "A": "\u{0}" } }),
            "workload.env.A: must be at most 16384 bytes, none of them zero",
        ),
        (json!({ "env": { "1A": "" } }), "workload.env.1A: must be named by 1 to 128 letters"),
        (json!({ "env": { "": "" } }), "workload.env[\"\"]: must be named by 1 to 128 letters"),
        (json!({ "env": { "A-B": "" } }), "workload.env.A-B: must be named by 1 to 128 letters"),
        (json!({ "env": variables(129) }), "workload.env: must be at most 128 variables"),
        (json!({ "working_dir": "srv" }), "workload.working_dir: must be an absolute path without"),
        (json!({ "working_dir": "/srv/../etc" }), "workload.working_dir: must be an absolute path without"),
        (json!({ "working_dir": "//" }), "workload.working_dir: must be an absolute path without"),
        (json!({ "user": "" }), "workload.user: must be a number, or a name of 1 to 32 of"),
        (json!({ "user": "1000" }), "workload.user: must be a number, or a name of 1 to 32 of"),
        (json!({ "user": "app:app" }), "workload.user: must be a number, or a name of 1 to 32 of"),
        (json!({ "user": -1 }), "workload.user: must be 0..=4294967294, found -1"),
        (json!({ "user": 4_294_967_295_u32 }), "workload.user: must be 0..=4294967294, found 4294967295"),
        (json!({ "user": null }), "workload.user: must be an integer, 0..=4294967294, found null"),
    ];
    for (workload, message) in cases {
        let found = errors(&pool(&workload));
        assert_eq!(found.len(), 1, "{message}: {found:?}");
        assert!(found[0].starts_with(&format!("tenants[0].pools[0].{message}")), "{message}: {found:?}");
    }
}

#[test]
fn all_of_it_together_has_a_limit_too() {
    let of = |bytes: usize| {
        let part = MAX_WORKLOAD_TEXT_BYTES - 1;
        let rest = "x".repeat(bytes - 2 * part - 1);
        json!({ "args": ["x".repeat(part), "x".repeat(part)], "env": { "A": rest } })
    };
    assert_eq!(errors(&pool(&of(MAX_WORKLOAD_BYTES))), [""; 0]);
    let line = "tenants[0].pools[0].workload: must have at most 32768 bytes in all words, names and values, \
                found 32769 bytes";
    assert_eq!(errors(&pool(&of(MAX_WORKLOAD_BYTES + 1))), [line]);
}

#[test]
fn a_pools_own_secrets_come_before_its_tenants() {
    let digest = |byte: &str| format!("sha256:{}", byte.repeat(32));
    let document = with(minimal(), "/tenants/0/secrets_hash", json!(digest("aa")));
    let secrets = |document: &Value| {
        let desired = local(document.to_string().as_bytes()).unwrap();
        desired.tenants[0].pools[0].secrets_of(&desired.tenants[0]).map(|digest| digest.to_string())
    };
    assert_eq!(secrets(&document), Some(digest("aa")));
    let own = with(document, "/tenants/0/pools/0/secrets_hash", json!(digest("bb")));
    assert_eq!(secrets(&own), Some(digest("bb")));
    let bad = with(minimal(), "/tenants/0/pools/0/secrets_hash", json!("sha256:abc"));
    let found = errors(&bad);
    assert_eq!(found.len(), 1);
    assert!(found[0].starts_with("tenants[0].pools[0].secrets_hash: must be `sha256:` followed by 64"));
}
