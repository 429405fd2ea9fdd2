//! A disk that is full when a document or a root is to be recorded.
//!
//! The agent runs in a mount namespace of its own, where a small file system covers its data folder. That needs root.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use mvm_needs::{Need, can_run};
use mvm_pki::SigningKey;
use mvm_tests::{AgentProcess, Process, free_port, mvm_binary, path_text};
use serde_json::json;

use crate::bad_input::one_agent::{NODE, OneAgent, UNHURRIED};
use crate::bad_input::requests::next_root;

/// Room for the agent's state several times over, and quickly filled.
const DISK: &str = "size=16m";
/// More than the disk holds: the loop that fills it ends.
const MOST_BLOCKS: usize = 64 * 1024;
const BLOCK: [u8; 512] = [0; 512];

/// Covers the folder `$1` with a small file system that holds what the folder held, then becomes the agent.
const COVER: &str = r#"
set -e
dir=$1; shift
cp -a "$dir" "$dir.copy"
mount -t tmpfs -o "$1,mode=700" tmpfs "$dir"; shift
cp -a "$dir.copy/." "$dir"
exec "$@"
"#;

fn start_on_a_small_disk(agent: &mut OneAgent) {
    let cluster = &mut agent.cluster;
    let (port, metrics_port) = (free_port(), free_port());
    let (listen, metrics) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{metrics_port}"));
    let dir = cluster.agent_dir(NODE);
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", COVER, "sh", path_text(&dir), DISK]);
    command.arg(mvm_binary()).args(["agent", "serve", "--data-dir", path_text(&dir), "--driver", "fake"]);
    command.args(["--listen", &listen, "--metrics-listen", &metrics]).args(UNHURRIED);
    let process = Process::start(command, &cluster.path().join(format!("{NODE}.log")));
    cluster.agents.insert(NODE.to_owned(), AgentProcess { process, port, metrics_port });
}

/// The agent's data folder as the agent sees it.
fn seen_by_the_agent(agent: &OneAgent) -> PathBuf {
    let root = format!("/proc/{}/root", agent.cluster.agents[NODE].process.pid());
    Path::new(&root).join(agent.cluster.agent_dir(NODE).strip_prefix("/").unwrap())
}

/// Writes until there is no room for another byte.
fn fill(path: &Path) {
    let mut file = File::create(path).unwrap();
    let mut blocks = (0..MOST_BLOCKS).map(|_| file.write_all(&BLOCK));
    let full = blocks.find_map(Result::err).expect("the disk is smaller than what was written");
    assert_eq!(full.kind(), ErrorKind::StorageFull);
}

fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries.map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn what_a_full_disk_can_not_record_is_refused_and_the_last_good_state_stays() {
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let mut agent = OneAgent::enrolled();
    start_on_a_small_disk(&mut agent);
    let before = agent.push_good();
    let dir = seen_by_the_agent(&agent);
    let (ledger, filler) = (dir.join("ledger.json"), dir.join("filler"));
    let recorded = std::fs::read(&ledger).unwrap();
    fill(&filler);
    let (listed, certs) = (names(&dir), names(&dir.join("certs")));

    // More instances than before: nothing of this may begin.
    let mut document = agent.next();
    document.desired.tenants[0].pools[0].desired_counts.running += 1;
    let envelope = agent.sealed(&document);
    for _ in 0..3 {
        let answer = agent.push(envelope.clone());
        assert_eq!(answer.refusal(), (507, "storage_full"), "{answer:?}");
        assert_eq!(agent.state(), before);
        assert_eq!(std::fs::read(&ledger).unwrap(), recorded);
        assert_eq!(names(&dir), listed, "something half-written was left");
    }

    // The same for trust: this root is a good one.
    let root_key = SigningKey::from_file(&agent.data_dir().signing_dir().join("root.key")).unwrap();
    let trust = json!({ "roots": [next_root(&agent, &root_key)] }).to_string();
    let answer = agent.call("POST", "/v1/trust", trust.clone());
    assert_eq!(answer.refusal(), (507, "storage_full"), "{answer:?}");
    assert_eq!(agent.state(), before);
    assert_eq!(names(&dir.join("certs")), certs, "something half-written was left");

    std::fs::remove_file(&filler).unwrap();
    assert_eq!(agent.call("POST", "/v1/trust", trust).status, 204);
    assert_ne!(agent.state().trust_root_version, before.trust_root_version);
    assert_eq!(agent.push_good().instances, before.instances);
    assert!(agent.cluster.agents.get_mut(NODE).unwrap().process.is_running());
}
