//! The agent with real microVMs: counts made true and changed, guests that answer, agents and VMs killed at random.
//!
//! Needs QEMU and the test image (`make test` installs and builds both).

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_proto::Digest;
use mvm_tests::{LoneAgent, files_with, nothing, small_pool, wait_until};

/// Cold boots on two cores without KVM take seconds each; a healthy change needs a fraction of this.
const LONG: Duration = Duration::from_secs(120);

fn agent() -> LoneAgent {
    agent_with(&[])
}

fn agent_with(flags: &[&str]) -> LoneAgent {
    let images = mvm_tests::test_images();
    let images = ["--images-dir", mvm_tests::path_text(&images)];
    LoneAgent::new("qemu", &[&images, flags].concat())
}

/// Each instance that should have a VM has exactly one, and nothing else does.
fn assert_no_vm_doubled_or_leaked(agent: &LoneAgent, alive: &BTreeSet<String>) {
    let vmms = agent.vmms();
    let doubled: Vec<_> = vmms.iter().filter(|(_, pids)| pids.len() > 1).collect();
    assert!(doubled.is_empty(), "more than one VMM: {doubled:?}\n{}", agent.log());
    let found: BTreeSet<String> = vmms.into_keys().collect();
    assert_eq!(&found, alive, "{}", agent.log());
}

fn alive(census: &mvm_tests::Census) -> BTreeSet<String> {
    ["running", "warm"].iter().filter_map(|phase| census.get(*phase)).flatten().cloned().collect()
}

/// What the host has that a node could leave behind: links, cgroups, and files of instances.
fn host_state(agent: &LoneAgent) -> (Vec<String>, Vec<String>, Vec<String>) {
    let names = |path: &std::path::Path| {
        let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
        let mut names: Vec<String> =
            entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect();
        names.sort();
        names
    };
    let cgroups: Vec<String> = names("/sys/fs/cgroup".as_ref());
    (names("/sys/class/net".as_ref()), cgroups, names(&agent.data_dir().join("vms")))
}

#[test]
fn counts_are_reached_from_nothing_changed_five_times_exactly_and_pruned_without_a_trace() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut agent = agent();
    let before = host_state(&agent);
    for (step, (running, warm, sleeping)) in
        [(3, 1, 2), (1, 2, 3), (0, 0, 4), (2, 1, 1), (1, 0, 5), (3, 2, 0)].into_iter().enumerate()
    {
        agent.declare(&small_pool(running, warm, sleeping));
        if step == 0 {
            agent.start();
        }
        let (running, warm, sleeping) = (running as usize, warm as usize, sleeping as usize);
        let census = agent.wait_counts(running, warm, sleeping, LONG);
        assert_no_vm_doubled_or_leaked(&agent, &alive(&census));
    }
    agent.declare(&nothing());
    wait_until("everything to be pruned", LONG, || agent.census().is_some_and(|census| census.is_empty()));
    assert_no_vm_doubled_or_leaked(&agent, &BTreeSet::new());
    // The pool's template goes after its last instance.
    wait_until("the host to be as before", LONG, || host_state(&agent) == before);
}

#[test]
fn thirty_random_kills_of_the_agent_lose_double_and_leak_nothing() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut agent = agent();
    agent.declare(&small_pool(2, 1, 1));
    agent.start();
    let first = agent.wait_counts(2, 1, 1, LONG);
    let ids: BTreeSet<String> = first.into_values().flatten().collect();
    let mut random = fastrand::Rng::with_seed(0x006d_766d);
    for kill in 0..30 {
        // Between two shapes of the same four instances, so that every kill finds something under way.
        let (running, warm, sleeping) = if kill % 2 == 0 { (1, 1, 2) } else { (2, 1, 1) };
        agent.declare(&small_pool(running, warm, sleeping));
        // After a few steps of what it has to do, or all of them.
        let (said, steps) = (agent.log().lines().count(), random.usize(0..12));
        wait_until("some of the change to be made", LONG, || {
            agent.log().lines().count() >= said + steps
                || agent.with_counts(running as usize, warm as usize, sleeping as usize).is_some()
        });
        agent.kill();
        for (instance, pids) in agent.vmms() {
            assert_eq!(pids.len(), 1, "{instance} has {pids:?} after kill {kill}");
        }
        agent.start();
    }
    let census = agent.wait_counts(2, 1, 1, LONG);
    assert_no_vm_doubled_or_leaked(&agent, &alive(&census));
    let now: BTreeSet<String> = census.into_values().flatten().collect();
    assert_eq!(now, ids, "instances were lost or made anew\n{}", agent.log());
}

#[test]
fn a_guest_answers_before_and_after_its_agent_was_killed_and_is_the_same_guest() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut agent = agent();
    agent.declare(&small_pool(1, 0, 0));
    agent.start();
    let census = agent.wait_counts(1, 0, 0, LONG);
    let id = census["running"].first().expect("one runs").clone();
    let vmms = agent.vmms();
    let info = agent.mvm_ok(&["node", "get"]);
    assert!(info.contains("qemu (tcg)") || info.contains("qemu (kvm)"), "{info}");
    assert!(info.contains("firecracker: the settings name qemu"), "{info}");
    let kernel = agent.mvm_ok(&["instance", "exec", &id, "--", "uname", "-a"]);
    assert!(kernel.starts_with("Linux "), "{kernel}");
    agent.mvm_ok(&["instance", "exec", &id, "--", "sh", "-c", "echo remembered > /run/mark"]);
    agent.kill();
    agent.start();
    agent.wait_counts(1, 0, 0, LONG);
    assert_eq!(agent.vmms(), vmms);
    assert_eq!(agent.mvm_ok(&["instance", "exec", &id, "--", "cat", "/run/mark"]), "remembered\n");

    // More than every buffer on the way holds, to one that reads late, and back.
    let sent: Vec<u8> = (0..1_500_000_u32).map(|n| (n % 251) as u8).collect();
    let late = ["instance", "exec", "-i", &id, "--", "sh", "-c", "sleep 1; cat"];
    let back = agent.mvm_with_input(&late, sent.clone());
    assert!(back.status.success(), "{}", String::from_utf8_lossy(&back.stderr));
    assert!(back.stdout == sent, "{} of {} bytes came back", back.stdout.len(), sent.len());

    // Asleep and awake again it is still the same guest, in another process.
    agent.declare(&small_pool(0, 0, 1));
    agent.wait_counts(0, 0, 1, LONG);
    assert!(agent.vmms().is_empty());
    agent.declare(&small_pool(1, 0, 0));
    agent.wait_counts(1, 0, 0, LONG);
    assert_eq!(agent.mvm_ok(&["instance", "exec", &id, "--", "cat", "/run/mark"]), "remembered\n");
    let failed = agent.mvm(&["instance", "exec", &id, "--", "sh", "-c", "exit 7"]);
    assert_eq!(failed.status.code(), Some(7));
}

#[test]
fn a_vmm_that_dies_is_noticed_told_and_started_again_under_the_same_name() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let mut agent = agent();
    agent.declare(&small_pool(2, 0, 0));
    agent.start();
    let census = agent.wait_counts(2, 0, 0, LONG);
    let id = census["running"].first().expect("two run").clone();
    let pid = agent.vmms()[&id][0];
    nix::sys::signal::kill(
        nix::unistd::Pid::from_raw(i32::try_from(pid).expect("a pid fits")),
        nix::sys::signal::Signal::SIGKILL,
    )
    .expect("the VMM can be killed");
    wait_until("another VMM of the same instance", LONG, || {
        agent.vmms().get(&id).is_some_and(|pids| pids != &[pid])
    });
    let again = agent.wait_counts(2, 0, 0, LONG);
    assert_eq!(again["running"], census["running"]);
    let events = agent.mvm_ok(&["events"]);
    assert!(events.contains("InstanceFailed"), "{events}");
}

#[test]
fn a_tenants_secrets_are_in_its_guests_memory_and_never_on_the_nodes_disk() {
    if !can_run(&[Need::MicroVms]) {
        return;
    }
    let word = format!("hunter2-{:016x}", fastrand::u64(..));
    // More than one frame, and much more than one buffer of the channel.
    let bundle: String = (0..2000).map(|line| format!("TOKEN_{line}={word}\n")).collect();
    let secrets = tempfile::tempdir().expect("a folder for secrets");
    std::fs::write(secrets.path().join("acme"), &bundle).expect("a bundle can be written");
    let declared = |running, warm, sleeping| {
        let mut document = small_pool(running, warm, sleeping);
        document["tenants"][0]["secrets_hash"] = Digest::of(bundle.as_bytes()).to_string().into();
        document
    };
    let mut agent = agent_with(&["--secrets-dir", mvm_tests::path_text(secrets.path())]);
    agent.declare(&declared(1, 0, 0));
    agent.start();
    let census = agent.wait_counts(1, 0, 0, LONG);
    let id = census["running"].first().expect("one runs").clone();
    let in_guest = |script: &str| agent.mvm_ok(&["instance", "exec", &id, "--", "sh", "-c", script]);
    // Looked at without being read: what a program has read is the program's, and in its memory.
    assert_eq!(in_guest("grep -c '^tmpfs /run/mvm/secrets ' /proc/mounts"), "1\n");
    let listed = in_guest("ls -ldn /run/mvm/secrets /run/mvm/secrets/bundle");
    assert!(listed.contains("drwx------") && listed.contains("-r--------"), "{listed}");
    assert!(listed.contains(&format!(" {} ", bundle.len())), "{listed}");

    // From warm, which wipes nothing, and from there to sleep.
    agent.declare(&declared(0, 1, 0));
    agent.wait_counts(0, 1, 0, LONG);
    agent.declare(&declared(0, 0, 1));
    agent.wait_counts(0, 0, 1, LONG);
    let memory = agent.data_dir().join("vms").join(&id).join("snapshot/state");
    let saved = std::fs::metadata(&memory).expect("its memory was saved").len();
    assert!(saved > 1 << 20, "{saved}");
    assert_eq!(files_with(&agent.data_dir(), word.as_bytes()), Vec::<PathBuf>::new());
    let shown: serde_json::Value =
        serde_json::from_str(&agent.mvm_ok(&["instance", "get", &id, "-o", "json"])).expect("JSON");
    assert!(shown["disk_used_bytes"].as_u64().is_some_and(|bytes| bytes >= saved), "{shown}");

    for _ in 0..2 {
        agent.declare(&declared(1, 0, 0));
        agent.wait_counts(1, 0, 0, LONG);
        assert!(in_guest("cat /run/mvm/secrets/bundle") == bundle, "another bundle, or none");
        agent.declare(&declared(0, 0, 1));
        agent.wait_counts(0, 0, 1, LONG);
    }
}
