//! What a hostile node, guest or coordinator can make appear: every renderer, with control sequences in every string.

use mvm_agent::isolation::NetworkReport;
use mvm_proto::object::{FleetChange, Object, PoolExplanation, kind_named};
use mvm_proto::status::{
    Capability, Capacity, Condition, Event, InstanceStatus, NodeInfo, NodeStatus, PassedOver, PoolStatus,
};
use mvm_proto::wire::control::v1::{Node, Operator, Token, TrustState};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::*;
use crate::commands::{
    audit, describe, events, explain, instance, net, node, operator, plan_objects, tenant, token, trust,
};
use crate::instances::Found;
use crate::objects::table;

/// Each moves the cursor, hides, reorders, sets a title, rings, or begins a line.
const SEQUENCES: [&str; 20] = [
    "\x1b[2J\x1b[H",
    "\x1b[1A\x1b[2K",
    "\x1b]0;title\x07",
    "\x1b]8;;http://evil.example/\x1b\\link\x1b]8;;\x1b\\",
    "\x1b]52;c;ZXZpbA==\x07",
    "\x1bP$q\x1b\\",
    "\x1bc",
    "\u{9b}2J",
    "\u{9d}0;title\u{9c}",
    "\u{85}next line",
    "\r\nnode-b  yes  1.1  1.1  1.1",
    "\roverwritten",
    "\ttab\x0b\x0c\x08\x08",
    "\0\x07\x7f",
    "\u{202e}desrever\u{202c}",
    "\u{2066}\u{2067}\u{2068}\u{2069}\u{61c}\u{200e}\u{200f}",
    "a\u{200b}\u{200c}\u{200d}\u{2060}\u{feff}\u{ad}b",
    "\u{2028}\u{2029}",
    "\u{e0041}\u{fe0f}\u{1bca0}",
    "Z\u{301}\u{36f}\u{489}",
];

fn corpus() -> Vec<String> {
    let mut all: Vec<_> = SEQUENCES.iter().map(ToString::to_string).collect();
    all.push(SEQUENCES.concat());
    all.push("x".repeat(2 * MAX_LINE_BYTES));
    all
}

/// The value with `text` in place of each string.
fn with_text<T: Serialize + DeserializeOwned>(value: &T, text: &str) -> T {
    fn replace(value: &mut Value, text: &str) {
        match value {
            Value::String(old) => text.clone_into(old),
            Value::Array(items) => items.iter_mut().for_each(|item| replace(item, text)),
            Value::Object(fields) => fields.values_mut().for_each(|item| replace(item, text)),
            _ => {}
        }
    }
    let mut value = serde_json::to_value(value).unwrap();
    replace(&mut value, text);
    serde_json::from_value(value).unwrap()
}

/// As many lines as rows, and nothing but what is shown.
fn assert_safe(what: &str, rendered: &str, lines: usize) {
    let acts = rendered.chars().find(|c| !text::is_printable(*c) && *c != '\n');
    assert_eq!(acts, None, "{what}: {rendered:?}");
    assert_eq!(rendered.lines().count(), lines, "{what}: {rendered:?}");
}

/// All strings of these are a peer's to choose.
fn renderers(text: &str) -> Vec<(&'static str, String)> {
    let status = with_text(&InstanceStatus::default(), text);
    let found = Found { node_id: text.to_owned(), instance: status.clone(), wake: None };
    let pool = with_text(&PoolStatus { deferred: vec![String::new()], ..PoolStatus::default() }, text);
    let condition = Condition::default();
    let info = with_text(
        &NodeInfo {
            capacity: Some(Capacity::default()),
            passed_over: vec![PassedOver::default()],
            roots: vec![String::new()],
            capabilities: vec![Capability::default()],
            conditions: vec![condition.clone()],
            ..NodeInfo::default()
        },
        text,
    );
    let node_status = with_text(
        &NodeStatus { pools: vec![pool.clone()], conditions: vec![condition], ..NodeStatus::default() },
        text,
    );
    let event = with_text(&Event::default(), text);
    let node = with_text(
        &Node {
            connected: true,
            info: Some(info.clone()),
            status: Some(node_status),
            events: vec![event.clone()],
            ..Node::default()
        },
        text,
    );
    let on = tenant::On { node_id: text.to_owned(), connected: false, last_seen_at: text.to_owned() };
    let placed = tenant::Placed { node: Some(on), pool: pool.clone(), node_capacity: None };
    let event = events::Told { node_id: text.to_owned(), event };
    let trusted = with_text(&TrustState { keys: vec![Default::default()], ..TrustState::default() }, text);
    let report = json!({ "enabled": true, "holds": true, "repaired": [""], "foreign": [""], "tenants": [{
        "tenant": "", "bridge": "", "subnet": "", "egress": "", "instances": 1,
        "checks": [{ "what": "", "holds": false, "detail": "" }],
    }] });
    let report: NetworkReport = with_text(&serde_json::from_value(report).unwrap(), text);
    let line = serde_json::from_value(json!({
        "seq": 1, "at": "2026-01-01T00:00:00Z", "tenant": "acme", "actor": text, "action": text, "reason": text,
        "outcome": text, "prev": mvm_proto::Digest::of(b""), "hash": mvm_proto::Digest::of(b""),
    }));
    let one_pool = json!({ "tenant_id": text, "pool_id": text, "managed": true, "status": pool,
        "instances": [status], "desired": { "flake_ref": text, "instance_resources": { text: text } } });
    let one_tenant = json!({ "tenant_id": text, "managed": text, "instances": text, "pools": [pool],
        "desired": { "network": { "ipv4_subnet": text }, "quotas": { text: text } } });
    let condition = json!({ "type": text, "status": text, "reason": text, "message": text, "since": text });
    let object: Object = serde_json::from_value(json!({
        "api_version": text, "kind": "Pool",
        "metadata": { "name": text, "tenant": "acme", "labels": { text: text }, "finalizers": [text],
            "deleting_since": "2026-01-01T00:00:00Z" },
        "spec": { "image": { "ref": text }, "more": [{ "x": text }] },
        "status": { "ready": text, "conditions": [condition] },
    }))
    .unwrap();
    let counts = json!({ "running": 1, "warm": 0, "sleeping": 0 });
    let why: PoolExplanation = serde_json::from_value(json!({
        "pool": text, "wanted": counts, "quota": text, "deferred": [text],
        "unplaced": { "counts": counts, "reason": text },
        "nodes": [{ "node": "n1", "has": 1, "obstacle": text }],
    }))
    .unwrap();
    let change: FleetChange = serde_json::from_value(json!({
        "objects": [{ "object": text, "outcome": "configured",
            "fields": [{ "path": text, "from": text, "to": [text] }] }],
        "nodes": [{ "node": "n1", "steps": [{ "pool": text, "action": text, "phase": text, "count": 1,
            "reason": text }] }],
        "unplaced": [{ "pool": text, "counts": counts, "reason": text }],
    }))
    .unwrap();
    let now = "2026-01-01T00:00:00Z".parse().unwrap();
    let pools = kind_named("pools").unwrap();
    let several = [
        ("describe", describe::tables(&object, Some(&why))),
        ("explain", explain::tables(&why)),
        ("plan -f", plan_objects::tables(&change, true)),
        ("get pools", vec![table::table(pools, &[&object], true, true, now)]),
    ];
    let several = several.into_iter().map(|(command, tables)| (command, joined(&tables, None)));
    let shown = trust::TrustOutput { state: &trusted, root_digest: text.to_owned(), pinned: "no" };
    let tables = [
        ("instance list", instance::table(std::slice::from_ref(&found), false)),
        ("instance list -o wide", instance::table(std::slice::from_ref(&found), true)),
        ("instance get", instance::details(&found)),
        ("node list", node::nodes(std::slice::from_ref(&node), false)),
        ("node list -o wide", node::nodes(std::slice::from_ref(&node), true)),
        ("node get NODE", node::details(&node, true)),
        ("node get", properties(node::info_rows(&info))),
        ("node stats", properties(node::status_rows(&node))),
        ("events", events::table(std::slice::from_ref(&event), true)),
        ("tenant list", tenant::tenant_table(&tenant::by_tenant(std::slice::from_ref(&placed)), true)),
        ("tenant get", tenant::tenant_details(&one_tenant)),
        ("pool list", tenant::pool_table(std::slice::from_ref(&placed), false)),
        ("pool list -o wide", tenant::pool_table(std::slice::from_ref(&placed), true)),
        ("pool get", tenant::pool_details(&serde_json::from_value(one_pool).unwrap())),
        ("token list", token::table(&[with_text(&Token::default(), text)], true)),
        ("operator list", operator::table(&[with_text(&Operator::default(), text)], true)),
        ("trust get", trust::table(&shown)),
        ("net verify", net::table(&report)),
        ("audit get", audit::lines_table(&[line.unwrap()])),
    ];
    tables.into_iter().map(|(command, table)| (command, table.render())).chain(several).collect()
}

#[test]
fn no_list_gets_a_row_or_a_control_character_from_a_peers_text() {
    let honest = renderers("x");
    for text in corpus() {
        for ((command, shown), (_, honest)) in renderers(&text).iter().zip(&honest) {
            assert_safe(command, shown, honest.lines().count());
        }
    }
}

#[test]
fn json_and_yaml_hold_a_peers_text_whole_and_do_nothing_to_a_terminal() {
    for text in corpus() {
        let value = json!([{ "reason": &text, &text: 1 }]);
        for format in [Format::Json, Format::Yaml] {
            let shown = rendered(format, &value, |_| plain()).unwrap();
            let acts = shown.chars().find(|c| !text::is_printable(*c) && *c != '\n');
            assert_eq!(acts, None, "{format:?}: {shown:?}");
            let back: Value = match format {
                Format::Json => serde_json::from_str(&shown).unwrap(),
                _ => serde_yaml_ng::from_str(&shown).unwrap(),
            };
            assert_eq!(back, value, "{format:?}: {shown}");
        }
        let event = with_text(&Event::default(), &text);
        for format in [Format::Json, Format::Table] {
            let parts = [event.at.as_str(), &event.kind, &event.subject, &event.message];
            assert_safe("events --follow", &rendered_line(format, &event, parts).unwrap(), 1);
        }
    }
    let plain_value = json!({ "name": "zażółć", "lines": "a\nb" });
    assert!(rendered(Format::Yaml, &plain_value, |_| plain()).unwrap().contains("name: zażółć\n"));
}

#[test]
fn a_table_that_is_drawn_again_never_leaves_its_terminal() {
    let text = "NAME\na\nb\nc\n";
    assert_eq!(fitting(text, None), text);
    assert_eq!(fitting(text, Some(5)), text);
    assert_eq!(fitting(text, Some(4)), "NAME\na\n... 2 more\n");
    assert_eq!(fitting(text, Some(2)), "... 4 more\n");
    assert_eq!((redraw(0).as_str(), redraw(3).as_str()), ("", "\x1b[3A\r\x1b[J"));
}

#[test]
fn an_error_never_begins_a_line_of_its_own() {
    for text in corpus() {
        let shown = shown_error(&format!("refused: {text}\nwhat to do"));
        let acts = shown.chars().find(|c| !text::is_printable(*c) && !matches!(c, '\n' | '\t'));
        assert_eq!(acts, None, "{shown:?}");
        assert!(shown.lines().skip(1).all(|line| line.starts_with("  ")), "{shown:?}");
    }
    assert_eq!(shown_error("a\n  b\nc"), "a\n  b\n  c");
}

#[test]
fn a_console_is_escaped_for_a_terminal_and_for_nothing_else() {
    let console = b"boot\r\n\x1b[2J\x1b]0;x\x07done\xff\n";
    assert_eq!(shown_console(console, false), console);
    assert_eq!(
        String::from_utf8(shown_console(console, true)).unwrap(),
        "boot\n\\x1b[2J\\x1b]0;x\\x07done\u{fffd}\n"
    );
}

#[test]
fn a_list_is_cut_to_its_terminal_and_is_whole_elsewhere() {
    let mut list = table(["NODE", "REASON", "MESSAGE"]);
    let (long, longer) = ("because ".repeat(6), "é".repeat(80));
    list.add_row(["node-a", &long, &longer]);
    let cut = list.rendered(Some(60));
    assert!(cut.lines().all(|line| line.chars().count() <= 60) && cut.contains('…'), "{cut}");
    assert!(cut.contains("node-a") && cut.contains("because because"), "{cut}");
    assert!(list.rendered(None).contains(&longer) && list.rendered(Some(400)).contains(&longer));
    // However narrow, a cell says something.
    assert!(list.rendered(Some(10)).contains("because bec…"));
    // Properties are read one by one.
    assert!(properties([("message", longer.clone())]).rendered(Some(60)).contains(&longer));
}

#[test]
fn a_column_that_says_nothing_is_left_out() {
    let mut list = table(["NODE", "REASON"]);
    list.add_row(["node-a", "-"]);
    list.drop_empty(&["REASON", "NO SUCH"]);
    assert_eq!(list.render(), "NODE\nnode-a\n");
    list = table(["NODE", "REASON"]);
    list.add_row(["node-a", "-"]);
    list.add_row(["node-b", "it broke"]);
    list.drop_empty(&["REASON"]);
    assert_eq!(list.render(), "NODE    REASON\nnode-a  -\nnode-b  it broke\n");
}

#[test]
fn times_are_ages_and_sizes_have_one_decimal_and_a_unit() {
    let at = Timestamp::from_unix_ms;
    let seen = |ms: i64| distance(at(1_000_000_000), at(1_000_000_000 + ms));
    assert_eq!(
        [seen(0), seen(-119_999), seen(-120_000), seen(7_200_000), seen(-48 * 3_600_000)],
        ["0s ago", "119s ago", "2m ago", "in 2h", "2d ago"]
    );
    assert_eq!(
        (when("", false), when("", true), when("soon", false)),
        ("-".into(), "-".into(), "soon".into())
    );
    assert_eq!(when("2026-01-31T09:30:00Z", true), "2026-01-31T09:30:00Z");
    assert_eq!(
        [bytes(0), bytes(512 * 1024), bytes(1024 * 1024 - 1), mib(64), mib(1024), mib(16 * 1024 * 1024)],
        ["0.0 MiB", "0.5 MiB", "1.0 MiB", "64.0 MiB", "1.0 GiB", "16.0 TiB"]
    );
}
