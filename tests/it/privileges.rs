//! `mvm agent serve` as root: the process that speaks to the network has no privileges, its helper has few, and VMs
//! outlive both.
//!
//! Needs root; the second half needs QEMU and the test image. What is missing is said, and fails where `CI` is set.

use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{LoneAgent, PATIENCE, path_text, small_pool, wait_until};

const NOBODY: u32 = 65_534;
const LONG: Duration = Duration::from_secs(120);

/// A line of `/proc/PID/status`.
fn status(pid: u32, name: &str) -> String {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    let line = text.lines().find_map(|line| line.strip_prefix(&format!("{name}:")));
    line.unwrap_or_else(|| panic!("{name} in {text}")).split_whitespace().collect::<Vec<_>>().join(" ")
}

const NO_CAPABILITIES: &str = "0000000000000000";

fn assert_without_privileges(pid: u32) {
    let nobody = vec![NOBODY.to_string(); 4].join(" ");
    for (name, expected) in [
        ("Uid", nobody.as_str()),
        ("Gid", nobody.as_str()),
        ("Groups", &NOBODY.to_string()),
        ("CapInh", NO_CAPABILITIES),
        ("CapPrm", NO_CAPABILITIES),
        ("CapEff", NO_CAPABILITIES),
        ("CapBnd", NO_CAPABILITIES),
        ("CapAmb", NO_CAPABILITIES),
        ("NoNewPrivs", "1"),
    ] {
        assert_eq!(status(pid, name), expected, "{name}");
    }
}

/// The helper of an agent: its only child that is root.
fn helper_of(agent: u32) -> u32 {
    let children = std::fs::read_to_string(format!("/proc/{agent}/task/{agent}/children")).unwrap();
    let mut children = children.split_whitespace().map(|pid| pid.parse::<u32>().unwrap());
    children.find(|pid| status(*pid, "Uid").starts_with("0 ")).expect("a helper")
}

fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}

fn signal(pid: u32, signal: nix::sys::signal::Signal) {
    nix::sys::signal::kill(nix::unistd::Pid::from_raw(pid.try_into().unwrap()), signal).unwrap();
}

/// An agent of root's that goes on as nobody, in a folder that nobody can reach.
fn agent(driver: &str, flags: &[&str]) -> LoneAgent {
    let agent = LoneAgent::new(driver, &[flags, &["--user", "nobody"]].concat());
    let dir = agent.data_dir().parent().unwrap().to_owned();
    std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o755)).unwrap();
    agent
}

#[test]
fn an_agent_of_root_serves_without_privileges_and_goes_on_where_a_privileged_one_was() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let mut agent = agent("fake", &[]);
    agent.declare(&small_pool(2, 1, 1));
    agent.start();
    agent.wait_counts(2, 1, 1, LONG);
    let pid = agent.process().pid();
    assert_without_privileges(pid);
    let helper = helper_of(pid);
    assert_eq!(status(helper, "NoNewPrivs"), "1");
    assert_ne!(status(helper, "CapEff"), NO_CAPABILITIES);
    assert_eq!(status(helper, "CapEff"), status(helper, "CapBnd"), "what it may have is what it has");
    let info = agent.mvm_ok(&["node", "get", "-o", "json"]);
    let info: serde_json::Value = serde_json::from_str(&info).unwrap();
    let conditions = info["conditions"].as_array().unwrap();
    let dropped = conditions.iter().find(|condition| condition["type"] == "PrivilegesDropped").unwrap();
    assert_eq!(dropped["status"], "True", "{dropped}");

    let owner = |path: &Path| std::fs::metadata(path).unwrap().uid();
    assert_eq!((owner(&agent.data_dir()), owner(&agent.data_dir().join("vms"))), (0, 0));
    assert_eq!(owner(&agent.data_dir().join("agent.sock")), NOBODY);

    // Told to stop, with its helper told the same: the helper takes no notice, and ends with its agent.
    signal(helper, nix::sys::signal::Signal::SIGTERM);
    signal(helper, nix::sys::signal::Signal::SIGINT);
    agent.wait_counts(2, 1, 1, LONG);
    signal(pid, nix::sys::signal::Signal::SIGTERM);
    assert!(agent.process().wait_exit(PATIENCE).success(), "{}", agent.log());
    wait_until("the helper to end", PATIENCE, || is_gone(helper));

    // Without its helper it can do nothing, and says so.
    agent.start();
    let helper = helper_of(agent.process().pid());
    signal(helper, nix::sys::signal::Signal::SIGKILL);
    let status = agent.process().wait_exit(PATIENCE);
    assert!(!status.success());
    assert!(agent.log().contains("the privileged helper ended"), "{}", agent.log());
}

#[test]
fn users_that_are_not_there_are_refused_and_root_is_kept_only_by_name_or_for_want_of_a_user() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let mut agent = LoneAgent::new("fake", &["--user", "mvm-no-such-user"]);
    agent.declare(&small_pool(1, 0, 0));
    agent.launch(&[]);
    assert!(!agent.process().wait_exit(PATIENCE).success());
    assert!(agent.log().contains("there is no user mvm-no-such-user"), "{}", agent.log());

    let mut agent = LoneAgent::new("fake", &["--user", "root"]);
    agent.declare(&small_pool(1, 0, 0));
    agent.start();
    let pid = agent.process().pid();
    assert_eq!(status(pid, "Uid"), "0 0 0 0");
    let info = agent.mvm_ok(&["node", "get", "-o", "json"]);
    assert!(info.contains("PrivilegesDropped") && info.contains("AsAsked"), "{info}");
}

#[test]
fn microvms_of_an_agent_without_privileges_answer_sleep_wake_and_outlive_agent_and_helper() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    // A copy: the store is given to the agent's user.
    let images = tempfile::tempdir().unwrap();
    std::fs::set_permissions(images.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let copied = std::process::Command::new("cp")
        .arg("-r")
        .arg(mvm_tests::test_images())
        .arg(images.path().join("images"))
        .status();
    assert!(copied.unwrap().success());
    let store = images.path().join("images");
    let mut agent = agent("qemu", &["--images-dir", path_text(&store)]);
    agent.declare(&small_pool(1, 0, 0));
    agent.start();
    let census = agent.wait_counts(1, 0, 0, LONG);
    let id = census["running"].first().unwrap().clone();
    let pid = agent.process().pid();
    assert_without_privileges(pid);
    let helper = helper_of(pid);
    let kernel = agent.mvm_ok(&["instance", "exec", &id, "--", "uname", "-a"]);
    assert!(kernel.starts_with("Linux "), "{kernel}");
    agent.mvm_ok(&["instance", "exec", &id, "--", "sh", "-c", "echo remembered > /run/mark"]);

    // Memory is written and read through descriptors that the helper opened.
    agent.declare(&small_pool(0, 0, 1));
    agent.wait_counts(0, 0, 1, LONG);
    assert!(agent.vmms().is_empty());
    agent.declare(&small_pool(1, 0, 0));
    agent.wait_counts(1, 0, 0, LONG);
    assert_eq!(agent.mvm_ok(&["instance", "exec", &id, "--", "cat", "/run/mark"]), "remembered\n");

    let vmms = agent.vmms();
    agent.kill();
    wait_until("the helper to end", PATIENCE, || is_gone(helper));
    assert_eq!(agent.vmms(), vmms);
    agent.start();
    agent.wait_counts(1, 0, 0, LONG);
    assert_eq!(agent.vmms(), vmms);
    assert_eq!(agent.mvm_ok(&["instance", "exec", &id, "--", "cat", "/run/mark"]), "remembered\n");
    agent.declare(&mvm_tests::nothing());
    wait_until("everything to be pruned", LONG, || agent.census().is_some_and(|census| census.is_empty()));
    assert!(agent.vmms().is_empty());
}
