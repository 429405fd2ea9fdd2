//! An agent whose files were damaged while it was stopped: it says which and what to do, changes nothing, and ends.

use std::path::{Path, PathBuf};

use mvm_tests::{PATIENCE, path_text};

use crate::bad_input::one_agent::{NODE, OneAgent, UNHURRIED};

/// What becomes of a file's bytes.
type Damage = fn(&[u8]) -> Vec<u8>;

fn halved(bytes: &[u8]) -> Vec<u8> {
    bytes[..bytes.len() / 2].to_vec()
}

fn without_its_end(bytes: &[u8]) -> Vec<u8> {
    bytes[..bytes.len() - bytes.len() / 8].to_vec()
}

fn emptied(_: &[u8]) -> Vec<u8> {
    Vec::new()
}

fn overwritten(bytes: &[u8]) -> Vec<u8> {
    bytes.iter().map(|byte| byte ^ 0x5a).collect()
}

fn of_a_later_format(bytes: &[u8]) -> Vec<u8> {
    String::from_utf8(bytes.to_vec()).unwrap().replace("\"format\":1", "\"format\":2").into_bytes()
}

fn with_another_mark(bytes: &[u8]) -> Vec<u8> {
    let text = String::from_utf8(bytes.to_vec()).unwrap();
    let other = text.replace("\"generation\":1,", "\"generation\":9,");
    assert_ne!(other, text);
    other.into_bytes()
}

/// Starts the agent, which must fail; gives what it said.
fn fails_to_start(agent: &mut OneAgent, name: &str) -> String {
    let log = agent.cluster.path().join(format!("{NODE}.log"));
    std::fs::write(&log, "").unwrap();
    agent.cluster.start_agent(NODE, UNHURRIED);
    let process = &mut agent.cluster.agents.get_mut(NODE).unwrap().process;
    let status = process.wait_exit(PATIENCE);
    let told = process.log();
    assert_eq!(status.code(), Some(1), "{name}: {told}");
    assert!(!told.contains("panicked"), "{name}: {told}");
    told
}

/// Every file under `dir` with its bytes, in order.
fn files(dir: &Path) -> Vec<(PathBuf, Vec<u8>)> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            found.extend(files(&path));
        } else if path.is_file() {
            let bytes = std::fs::read(&path).unwrap();
            found.push((path, bytes));
        }
    }
    found.sort();
    found
}

#[test]
fn a_damaged_file_is_named_with_what_to_do_and_left_as_it_is() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    agent.cluster.kill_agent(NODE);
    agent.forget_connection();
    let dir = agent.cluster.agent_dir(NODE);
    let cases: [(&str, Damage, &str); 13] = [
        ("ledger.json", halved, "restore it from a backup"),
        ("ledger.json", emptied, "restore it from a backup"),
        ("ledger.json", overwritten, "restore it from a backup"),
        ("ledger.json", of_a_later_format, "its format is 2"),
        ("ledger.json", with_another_mark, "does not match its recorded digest"),
        ("certs/trust.json", halved, "enrol again"),
        ("certs/trust.json", emptied, "enrol again"),
        ("certs/node.pem", halved, "enrol again"),
        ("certs/node.pem", emptied, "enrol again"),
        ("certs/node.pem", overwritten, "enrol again"),
        ("certs/ca.crt", halved, "enrol again"),
        ("certs/ca.crt", emptied, "enrol again"),
        ("certs/ca.crt", overwritten, "enrol again"),
    ];
    for (file, damage, what_to_do) in cases {
        let path = dir.join(file);
        let whole = std::fs::read(&path).unwrap();
        let damaged = damage(&whole);
        std::fs::write(&path, &damaged).unwrap();
        let told = fails_to_start(&mut agent, file);
        assert!(told.contains(path_text(&path)) && told.contains(what_to_do), "{file}: {told}");
        assert_eq!(std::fs::read(&path).unwrap(), damaged, "{file} was changed");
        std::fs::write(&path, &whole).unwrap();
    }
    agent.cluster.start_agent(NODE, UNHURRIED);
    let after = agent.converged();
    assert_eq!((&after.accepted, &after.instances), (&before.accepted, &before.instances));
    assert_eq!(agent.push_good().instances, before.instances);
}

#[test]
fn a_truncated_state_directory_is_named_with_what_to_do() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    agent.cluster.kill_agent(NODE);
    agent.forget_connection();
    let dir = agent.cluster.agent_dir(NODE).join("state");
    let whole = files(&dir);
    let ledger = agent.cluster.agent_dir(NODE).join("ledger.json");
    let recorded = std::fs::read(&ledger).unwrap();
    let cases: [(&str, Damage); 6] = [
        ("db", without_its_end),
        ("db", halved),
        ("db", emptied),
        ("db", overwritten),
        ("conf", halved),
        ("conf", overwritten),
    ];
    for (file, damage) in cases {
        let path = dir.join(file);
        std::fs::write(&path, damage(&std::fs::read(&path).unwrap())).unwrap();
        let told = fails_to_start(&mut agent, file);
        let says = [path_text(&dir), "is damaged", "restore it from a backup"];
        assert!(says.iter().all(|words| told.contains(words)), "{file}: {told}");
        // What was accepted is apart from the records, and stays.
        assert_eq!(std::fs::read(&ledger).unwrap(), recorded, "{file}");
        std::fs::remove_dir_all(&dir).unwrap();
        std::fs::create_dir(&dir).unwrap();
        for (path, bytes) in &whole {
            std::fs::write(path, bytes).unwrap();
        }
    }
    agent.cluster.start_agent(NODE, UNHURRIED);
    let after = agent.converged();
    assert_eq!((&after.accepted, &after.instances), (&before.accepted, &before.instances));
    assert_eq!(agent.push_good().instances, before.instances);
}
