//! The agent without a coordinator: one-shot reconcile, a watched file, damaged state, a full disk, no root.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Output};

use mvm_needs::{Need, can_run};
use mvm_tests::{PATIENCE, Process, free_port, metric, mvm_binary, path_text, ready, wait_until};
use serde_json::Value;
use tempfile::TempDir;

fn example(name: &str) -> String {
    format!("{}/../examples/{name}.json", env!("CARGO_MANIFEST_DIR"))
}

fn mvm(args: &[&str]) -> Command {
    let mut command = Command::new(mvm_binary());
    command
        .args(args)
        .env_clear()
        .env("NO_COLOR", "1")
        .env("PATH", std::env::var_os("PATH").unwrap_or_default());
    command
}

fn reconcile(data_dir: &Path, more: &[&str]) -> Output {
    mvm(&[
        &["agent", "reconcile", "--driver", "fake", "--node-id", "node-a", "--data-dir", path_text(data_dir)],
        more,
    ]
    .concat())
    .output()
    .expect("mvm runs")
}

fn json(output: &Output) -> Value {
    serde_json::from_slice(&output.stdout)
        .unwrap_or_else(|_| panic!("no JSON: {}", String::from_utf8_lossy(&output.stderr)))
}

#[test]
fn reconcile_converges_and_a_second_run_has_nothing_to_do() {
    let dir = TempDir::new().unwrap();
    let document = example("pools");
    let dry = reconcile(dir.path(), &["--desired", &document, "--dry-run", "-o", "json"]);
    assert_eq!(dry.status.code(), Some(0));
    assert!(!json(&dry)["steps"].as_array().unwrap().is_empty());
    let first = reconcile(dir.path(), &["--desired", &document, "-o", "json"]);
    assert_eq!(first.status.code(), Some(0), "{}", String::from_utf8_lossy(&first.stderr));
    assert_eq!(json(&first)["converged"], true);
    assert!(!json(&first)["steps"].as_array().unwrap().is_empty(), "the dry run must not have acted");
    let second = reconcile(dir.path(), &["--desired", &document, "-o", "json"]);
    assert_eq!(json(&second)["steps"].as_array().map(Vec::len), Some(0), "{}", json(&second));
}

#[test]
fn exit_codes_tell_errors_from_usage() {
    let dir = TempDir::new().unwrap();
    let bad = dir.path().join("bad.json");
    std::fs::write(&bad, r#"{"schema_version": 1, "node_id": "NODE", "tenants": {}, "extra": 1}"#).unwrap();
    let output = reconcile(dir.path(), &["--desired", path_text(&bad)]);
    let told = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(output.status.code(), Some(1), "{told}");
    for path in ["node_id", "tenants", "extra"] {
        assert!(told.contains(path), "{path} is not in: {told}");
    }
    assert_eq!(mvm(&["agent", "reconcile"]).output().unwrap().status.code(), Some(2));
    let wrong_node = reconcile(dir.path(), &["--desired", &example("pools"), "--node-id", "node-b"]);
    assert!(matches!(wrong_node.status.code(), Some(1 | 2)));
}

#[test]
fn root_is_not_needed_with_the_fake_driver() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let dir = TempDir::new().unwrap();
    let nobody = 65_534;
    std::os::unix::fs::chown(dir.path(), Some(nobody), Some(nobody)).unwrap();
    let document = dir.path().join("document.json");
    std::fs::copy(example("minimal"), &document).unwrap();
    // The binary may lie where nobody can't look.
    let binary = dir.path().join("mvm");
    std::fs::copy(mvm_binary(), &binary).unwrap();
    let data_dir = dir.path().join("data");
    let output = Command::new(binary)
        .args([
            "agent",
            "reconcile",
            "--driver",
            "fake",
            "--desired",
            path_text(&document),
            "--data-dir",
            path_text(&data_dir),
        ])
        .args(["--node-id", "node-a"])
        .current_dir("/")
        .env_clear()
        .uid(nobody)
        .gid(nobody)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(0), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn a_watched_file_is_followed_and_a_broken_edit_changes_nothing() {
    let dir = TempDir::new().unwrap();
    let document = dir.path().join("desired.json");
    std::fs::copy(example("minimal"), &document).unwrap();
    let port = free_port();
    let (metrics, data_dir) = (format!("127.0.0.1:{port}"), dir.path().join("data"));
    let args =
        ["agent", "serve", "--driver", "fake", "--node-id", "node-a", "--desired", path_text(&document)];
    let mut command = mvm(&args);
    command.args([
        "--data-dir",
        path_text(&data_dir),
        "--metrics-listen",
        &metrics,
        "--listen",
        "127.0.0.1:0",
    ]);
    let mut agent = Process::start(command, &dir.path().join("agent.log"));
    wait_until("the agent to be ready", PATIENCE, || ready(port));
    let running = || metric(port, "mvm_agent_instances{phase=\"running\"}");
    // Ready is who follows a document, before all of it is so.
    wait_until("all that the file wants to run", PATIENCE, || running() == Some(2.0));

    std::fs::write(&document, "{ broken").unwrap();
    wait_until("the broken edit to be told", PATIENCE, || agent.log().contains("refused the file"));
    assert_eq!(running(), Some(2.0));

    let mut edited: Value =
        serde_json::from_str(&std::fs::read_to_string(example("minimal")).unwrap()).unwrap();
    edited["tenants"][0]["pools"][0]["desired_counts"]["running"] = 3.into();
    std::fs::write(&document, edited.to_string()).unwrap();
    wait_until("the edit to be followed", PATIENCE, || running() == Some(3.0));
    assert!(agent.is_running());
}
