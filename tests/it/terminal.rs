//! A hostile agent and the operator's terminal: whatever it answers, `mvm` prints nothing that acts on one.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Command, Output};

use mvm_proto::text::is_printable;
use mvm_tests::{mvm_binary, path_text};
use serde_json::{Value, json};
use tempfile::TempDir;

/// Clears the screen, sets a title, rings, goes back to the first column, reverses, hides, and begins two lines.
const HOSTILE: &str = "x\x1b[2J\x1b]0;owned\x07\u{9b}1A\u{85}\r\u{202e}\u{200b}\u{feff}\x7f\
    \r\nFAKE  acme  web  running\nerror: FAKE";
const ID: &str = "i-00000001";

fn answer(path: &str) -> (u16, Value) {
    let h = HOSTILE;
    // One that is asked for by its id has names that can be asked for again.
    let (tenant, pool, id) = if path.contains("id=") { ("acme", "web", ID) } else { (h, h, h) };
    let instance = json!({ "instance_id": id, "tenant_id": tenant, "pool_id": pool, "phase": h, "since": h, "reason": h,
        "address": h, "revision": h, "last_used_at": h, "session": h, "persist_error": h });
    let pool = json!({ "tenant_id": h, "pool_id": h, "deferred": [h], "revision": h });
    let condition = json!({ "type": h, "status": h, "reason": h, "message": h });
    let all = [
        ("/v1/instances?", json!({ "instances": [instance] })),
        (
            "/v1/tenants/acme/pools/web",
            json!({ "tenant_id": h, "pool_id": h, "managed": true, "status": pool,
            "instances": [instance], "desired": { "flake_ref": h, "instance_resources": { h: h } } }),
        ),
        ("/v1/tenants/acme", json!({ "tenant_id": h, "managed": h, "instances": h, "pools": [pool] })),
        ("/v1/tenants", json!({ "tenants": [{ "pools": [pool] }] })),
        (
            "/v1/node/info",
            json!({ "node_id": h, "cluster": h, "version": h, "conditions": [condition],
            "passed_over": [{ "what": h, "reason": h }], "capabilities": [{ "name": h, "lacking": h }] }),
        ),
        ("/v1/node/stats", json!({ "node_id": h, "conditions": [condition], "pools": [pool] })),
        ("/v1/node/events", json!({ "at": h, "kind": h, "subject": h, "message": h })),
        (
            "/v1/node/network/verify",
            json!({ "enabled": true, "holds": true, "repaired": [h], "foreign": [h],
            "tenants": [{ "tenant": h, "bridge": h, "subnet": h, "egress": h, "instances": 1,
                "checks": [{ "what": h, "holds": false, "detail": h }] }] }),
        ),
        ("/v1/node/desired", json!({ "document": { h: h }, "notes": [h] })),
    ];
    let found = all.into_iter().find(|(prefix, _)| path.starts_with(prefix) && !path.contains("/instances/"));
    found.map_or_else(
        || {
            let problem = json!({ "type": h, "title": h, "status": 409, "code": h, "detail": h,
                "remediation": h, "errors": [{ "path": h, "expected": h, "found": h }] });
            (409, problem)
        },
        |(_, body)| (200, body),
    )
}

/// Answers one request of each connection.
fn serve(listener: &UnixListener) {
    for stream in listener.incoming() {
        let Ok(stream) = stream else { return };
        // A client that went away is none of this test's business.
        let _ = serve_one(stream);
    }
}

fn serve_one(mut stream: UnixStream) -> std::io::Result<()> {
    let mut reader = BufReader::new(stream.try_clone()?);
    let mut line = String::new();
    reader.read_line(&mut line)?;
    let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
    let mut length = 0;
    loop {
        let mut header = String::new();
        reader.read_line(&mut header)?;
        if header.trim().is_empty() {
            break;
        }
        if let Some((name, value)) = header.split_once(':')
            && name.eq_ignore_ascii_case("content-length")
        {
            length = value.trim().parse().unwrap_or(0);
        }
    }
    reader.by_ref().take(length).read_to_end(&mut Vec::new())?;
    let (status, body) = answer(&path);
    let body = format!("{body}\n");
    write!(
        stream,
        "HTTP/1.1 {status} Said\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{body}",
        body.len()
    )
}

fn mvm(socket: &str, args: &[&str]) -> Output {
    let mut command = Command::new(mvm_binary());
    command.args(args).env_clear().env("MVM_ENDPOINT", format!("unix:{socket}")).env("NO_COLOR", "1");
    command.output().expect("mvm runs")
}

#[test]
fn nothing_that_a_hostile_agent_answers_acts_on_a_terminal_or_makes_a_line() {
    let dir = TempDir::new().unwrap();
    let socket = dir.path().join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    std::thread::spawn(move || serve(&listener));
    let start = ["instance", "start", ID];
    let commands: [&[&str]; 14] = [
        &["instance", "list"],
        &["instance", "get", ID],
        &start,
        &["instance", "logs", "acme/web/i-00000001"],
        &["tenant", "list"],
        &["tenant", "get", "acme"],
        &["pool", "list"],
        &["pool", "get", "acme/web"],
        &["node", "get"],
        &["node", "stats"],
        &["events"],
        &["events", "--follow"],
        &["net", "verify"],
        &["agent", "desired"],
    ];
    for args in commands {
        for format in ["table", "wide", "json", "yaml"] {
            let output = mvm(path_text(&socket), &[args, &["-o", format]].concat());
            for (stream, bytes) in [("output", &output.stdout), ("error", &output.stderr)] {
                let text = String::from_utf8(bytes.clone()).unwrap();
                let acts = text.chars().find(|c| !is_printable(*c) && *c != '\n');
                assert_eq!(acts, None, "{args:?} -o {format}, standard {stream}: {text:?}");
                let faked =
                    text.lines().find(|line| line.starts_with("FAKE") || line.starts_with("error: FAKE"));
                assert_eq!(faked, None, "{args:?} -o {format}, standard {stream}: {text:?}");
            }
            let shown = [output.stdout, output.stderr].concat();
            let shown = String::from_utf8(shown).unwrap();
            assert!(shown.contains("FAKE"), "{args:?} -o {format} showed nothing of it: {shown}");
        }
    }
}
