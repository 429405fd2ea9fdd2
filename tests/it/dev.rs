//! `mvm dev`: a cluster by one command, also after its processes died, and nothing of it afterwards.

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::time::Duration;

use mvm_needs::{Need, can_run};
use mvm_tests::{NetNs, PATIENCE, copy_dir, mvm_binary, path_text, test_images, wait_for, wait_until};
use serde_json::Value;
use tempfile::TempDir;

/// A first boot on two cores without KVM that others use, too.
const BOOT: &str = "120s";
const NOBODY: u32 = 65_534;
/// The files of a cluster in the order in which `mvm dev up` makes them.
const MADE: [&str; 5] =
    ["dev.json", "coordinator/cluster.json", "coordinator.pid", "node/certs/node.pem", "agent.pid"];

/// A user with a home of their own. Whatever a failed test leaves running is ended.
struct Home {
    dir: TempDir,
    namespace: Option<NetNs>,
    /// Another user than the test's, with the program that they run.
    user: Option<(u32, PathBuf)>,
}

impl Home {
    fn new() -> Self {
        Self { dir: TempDir::new().unwrap(), namespace: None, user: None }
    }

    /// Root with links and firewall of its own.
    fn in_namespace() -> Self {
        let mut home = Self::new();
        home.namespace = Some(NetNs::new("dev"));
        home
    }

    /// An ordinary user, who may not look where this workspace is.
    fn of_nobody() -> Self {
        let mut home = Self::new();
        let program = home.dir.path().join("mvm");
        fs::copy(mvm_binary(), &program).unwrap();
        home.user = Some((NOBODY, program));
        chown(home.dir.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        home
    }

    fn path(&self) -> &Path {
        self.dir.path()
    }

    /// Where the cluster is unless a flag says otherwise.
    fn cluster(&self) -> PathBuf {
        self.path().join(".local/state/mvm/dev")
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = match (&self.namespace, &self.user) {
            (Some(namespace), _) => namespace.command(mvm_binary()),
            (None, Some((_, program))) => Command::new(program),
            (None, None) => Command::new(mvm_binary()),
        };
        command.args(args).env_clear().env("HOME", self.path()).env("NO_COLOR", "1").current_dir("/");
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        if let Some((user, _)) = self.user {
            command.uid(user).gid(user);
        }
        command
    }

    fn mvm(&self, args: &[&str]) -> Output {
        self.command(args).output().unwrap()
    }

    /// Runs `mvm ARGS`, which must succeed; gives what it says.
    fn ok(&self, args: &[&str]) -> (String, String) {
        let output = self.mvm(args);
        let (told, said) = texts(&output);
        assert!(output.status.success(), "mvm {args:?}: {said}\n{}", self.logs());
        (told, said)
    }

    /// Runs `mvm ARGS`, which must fail with `code`; gives its standard error.
    fn fails(&self, args: &[&str], code: i32) -> String {
        let output = self.mvm(args);
        let (_, said) = texts(&output);
        assert_eq!(output.status.code(), Some(code), "mvm {args:?}: {said}");
        said
    }

    fn json(&self, args: &[&str]) -> Value {
        let (told, _) = self.ok(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&told).unwrap()
    }

    /// The living processes of the cluster in `dir`, by name, as `status` tells them.
    fn processes(&self, dir: &Path) -> BTreeMap<String, u64> {
        let output = self.mvm(&["dev", "status", "--dir", path_text(dir), "-o", "json"]);
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        let processes = told["processes"].as_array().unwrap().iter();
        let living =
            processes.filter_map(|process| Some((process["name"].as_str()?, process["pid"].as_u64()?)));
        living.map(|(name, pid)| (name.to_owned(), pid)).collect()
    }

    /// The ids of all instances.
    fn instances(&self) -> Vec<String> {
        let told = self.json(&["instance", "list"]);
        let listed = told.as_array().or_else(|| told["instances"].as_array()).unwrap();
        listed.iter().map(|one| one["instance_id"].as_str().unwrap().to_owned()).collect()
    }

    fn logs(&self) -> String {
        let log = |name: &str| fs::read_to_string(self.cluster().join(name)).unwrap_or_default();
        format!("--- coordinator\n{}\n--- agent\n{}", log("coordinator.log"), log("agent.log"))
    }

    /// All processes whose command line holds this text.
    fn naming(text: &str) -> Vec<u32> {
        let all = fs::read_dir("/proc").unwrap().flatten();
        let pids = all.filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
        let names = |pid: &u32| {
            let line = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(text)
        };
        pids.filter(names).collect()
    }
}

impl Drop for Home {
    fn drop(&mut self) {
        if std::thread::panicking() {
            Self::naming(path_text(self.path())).into_iter().for_each(kill);
        }
    }
}

fn kill(pid: u32) {
    use nix::sys::signal::{Signal, kill};
    let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap());
    // It may have ended by itself.
    let _ = kill(pid, Signal::SIGKILL);
}

fn kill_all(processes: &BTreeMap<String, u64>) {
    for pid in processes.values() {
        let pid = u32::try_from(*pid).unwrap();
        kill(pid);
        // A process without a parent is no longer there once the init of this machine has seen its end.
        wait_until("a killed process to end", PATIENCE, || {
            let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
            stat.rsplit_once(')').is_none_or(|(_, rest)| rest.starts_with(" Z"))
        });
    }
}

fn texts(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

fn up(home: &Home, dir: &Path) -> String {
    home.ok(&["dev", "up", "--driver", "fake", "--dir", path_text(dir)]).1
}

#[test]
fn a_cluster_of_one_command_survives_kill_9_with_its_instances_and_leaves_nothing() {
    if !can_run(&[Need::Root, Need::NetworkNamespaces, Need::Tun, Need::MicroVms, Need::Program("nft")]) {
        return;
    }
    let home = Home::in_namespace();
    let namespace = home.namespace.as_ref().unwrap();
    let rules = namespace.ok(&["nft", "list", "ruleset"]);
    let images = test_images();
    let (_, said) = home.ok(&["dev", "up", "--images-dir", path_text(&images)]);
    assert!(said.contains("context dev is the current one") && said.contains("\nready after "), "{said}");
    let pools = home.ok(&["get", "nodes,pools", "-A"]).0;
    assert!(pools.contains("Ready") && pools.contains("default"), "{pools}");
    home.ok(&["wait", "pool", "dev/default", "--for", "condition=Ready", "--timeout", BOOT]);
    let instances = home.instances();
    let [id] = instances.as_slice() else { panic!("{instances:?}") };
    assert!(home.ok(&["instance", "exec", id, "--", "uname", "-a"]).0.starts_with("Linux "));
    home.ok(&["instance", "exec", id, "--", "sh", "-c", "echo remembered > /run/mark"]);
    let status = home.json(&["dev", "status"]);
    assert_eq!((&status["running"], &status["context"]["current"]), (&true.into(), &true.into()), "{status}");
    assert_eq!(status["nodes"][0]["status"]["state"], "Ready", "{status}");
    assert_eq!(status["isolation"]["network"], "bridges", "{status}");

    // The networks of one machine are one cluster's.
    let other = home.path().join("other");
    let with_images = ["dev", "up", "--images-dir", path_text(&images), "--dir", path_text(&other)];
    let (_, said) = home.ok(&with_images);
    let holder = format!("mvm dev down --dir {}", home.cluster().display());
    assert!(said.contains("instances have no network card") && said.contains(&holder), "{said}");
    assert!(said.contains("give commands --context dev-2"), "{said}");
    home.ok(&["dev", "down", "--dir", path_text(&other)]);
    assert!(!other.exists());

    let before = home.processes(&home.cluster());
    let vmms = Home::naming(id);
    assert_eq!((before.len(), vmms.is_empty()), (2, false), "{before:?} {vmms:?}");
    kill_all(&before);
    let said = home.fails(&["dev", "status"], 1);
    assert!(said.contains("to go on with it: mvm dev up"), "{said}");
    let (_, said) = home.ok(&["dev", "up"]);
    assert!(said.contains("of which nothing runs") && said.contains("adopted 1 microVM"), "{said}");
    let after = home.processes(&home.cluster());
    assert!(after.len() == 2 && after["agent"] != before["agent"], "{before:?} {after:?}");
    assert_eq!((home.instances(), Home::naming(id)), (instances.clone(), vmms.clone()));
    assert_eq!(home.ok(&["instance", "exec", id, "--", "cat", "/run/mark"]).0, "remembered\n");

    // The agent alone, while the coordinator believes that it is still there.
    kill_all(&BTreeMap::from([("agent".to_owned(), after["agent"])]));
    let (_, said) = home.ok(&["dev", "up"]);
    assert!(said.contains("whose agent does not run"), "{said}");
    // It is there, and not only believed to be.
    assert_eq!(home.ok(&["instance", "exec", id, "--", "cat", "/run/mark"]).0, "remembered\n");
    let again = home.processes(&home.cluster());
    assert!(again["coordinator"] == after["coordinator"] && again["agent"] != after["agent"], "{again:?}");
    assert_eq!(Home::naming(id), vmms);

    let (_, said) = home.ok(&["dev", "up"]);
    assert!(said.contains("runs already"), "{said}");
    assert_eq!(home.processes(&home.cluster()), again);

    let (_, said) = home.ok(&["dev", "down"]);
    assert!(said.contains("ended 1 microVM") && said.contains("forgot the context dev"), "{said}");
    assert_eq!(Home::naming(id), [0; 0]);
    assert_eq!(Home::naming(path_text(home.path())), [0; 0]);
    assert_eq!(namespace.ok(&["ip", "-o", "link"]).lines().count(), 1, "only loopback is left");
    assert_eq!(namespace.ok(&["nft", "list", "ruleset"]), rules);
    assert!(!home.cluster().exists());
    assert_eq!(home.json(&["context", "list"]), serde_json::json!([]));
    let (_, said) = home.ok(&["dev", "down"]);
    assert!(said.contains("nothing to do"), "{said}");
}

#[test]
fn an_ordinary_user_gets_microvms_without_isolation_and_is_told_so() {
    if !can_run(&[Need::Root, Need::MicroVms]) {
        return;
    }
    let home = Home::of_nobody();
    // As an earlier `up` has left it: sealed.
    let images = home.cluster().join("images");
    copy_dir(&test_images().canonicalize().unwrap(), &images).unwrap();
    let program = "find . -exec chown --no-dereference 65534:65534 {} +; find .local -path '*/sha256/*' -type d -exec chmod a-w {} +";
    let sealed = Command::new("sh").args(["-c", program]).current_dir(home.path()).status().unwrap();
    assert!(sealed.success());
    let (_, said) = home.ok(&["dev", "up"]);
    assert!(said.contains("no network card, no limits and no jail; for those: sudo mvm dev up"), "{said}");
    assert!(!said.contains("making the image"), "{said}");
    home.ok(&["wait", "pool", "dev/default", "--for", "condition=Ready", "--timeout", BOOT]);
    let instances = home.instances();
    assert_eq!(home.ok(&["instance", "exec", &instances[0], "--", "echo", "here"]).0, "here\n");
    let said = home.fails(&["dev", "up", "--network", "bridges"], 2);
    assert!(said.contains("needs root") && said.contains("sudo mvm dev up"), "{said}");
    home.ok(&["dev", "down"]);
    assert_eq!(Home::naming(&instances[0]), [0; 0]);
    assert!(images.is_dir(), "images stay");
    home.ok(&["dev", "down", "--purge"]);
    assert!(!home.cluster().exists());
}

#[test]
fn an_up_that_is_killed_anywhere_is_made_good_by_the_next_one_with_one_process_of_each_kind() {
    let home = Home::new();
    for made in MADE {
        let dir = home.path().join(made.replace('/', "-"));
        let mut cut_off = begin_up(&home, &dir);
        wait_until(made, PATIENCE, || dir.join(made).exists());
        cut_off.kill().unwrap();
        cut_off.wait().unwrap();
        let said = up(&home, &dir);
        assert!(said.contains("ready after"), "{said}");
        let of = |word: &str| {
            let text = format!("{word}\0serve\0--data-dir\0{}", dir.display());
            Home::naming(&text).len()
        };
        assert_eq!((of("coordinator"), of("agent")), (1, 1), "after {made}");
        home.ok(&["dev", "down", "--dir", path_text(&dir)]);
        assert!(!dir.exists());
    }
}

fn begin_up(home: &Home, dir: &Path) -> Child {
    let mut command = home.command(&["dev", "up", "--driver", "fake", "--dir", path_text(dir)]);
    command.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn two_at_once_in_one_directory_make_one_cluster_and_in_two_directories_two() {
    let home = Home::new();
    let (one, two) = (home.path().join("one"), home.path().join("two"));
    let all: Vec<Child> = [&one, &one, &two].map(|dir| begin_up(&home, dir)).into();
    for mut child in all {
        assert!(child.wait().unwrap().success(), "{}", home.logs());
    }
    let (first, second) = (home.processes(&one), home.processes(&two));
    assert_eq!((first.len(), second.len()), (2, 2));
    assert_eq!(Home::naming(path_text(&one)).len(), 2);
    let contexts = home.json(&["context", "list"]);
    let names: Vec<_> = contexts.as_array().unwrap().iter().map(|context| &context["name"]).collect();
    assert_eq!(names, ["dev", "dev-2"]);
    // Each context is of its own cluster.
    for context in ["dev", "dev-2"] {
        let nodes = home.json(&["get", "nodes", "--context", context]);
        assert_eq!(nodes[0]["status"]["state"], "Ready", "{nodes}");
    }
    home.ok(&["dev", "down", "--dir", path_text(&one)]);
    assert_eq!(home.processes(&two), second);
    home.ok(&["dev", "down", "--dir", path_text(&two)]);
}

#[test]
fn what_is_kept_goes_on_with_its_objects_on_other_ports_where_others_took_its_own() {
    let home = Home::new();
    let dir = home.path().join("dev");
    up(&home, &dir);
    let tenant = home.path().join("tenant.yaml");
    fs::write(&tenant, "api_version: mvm/v1\nkind: Tenant\nmetadata: { name: mine }\n").unwrap();
    home.ok(&["apply", "-f", path_text(&tenant)]);
    home.ok(&["delete", "pool", "dev/default", "--wait"]);
    let metrics = home.json(&["dev", "status", "--dir", path_text(&dir)])["processes"][1]["metrics"].clone();
    let (_, said) = home.ok(&["dev", "down", "--keep", "--dir", path_text(&dir)]);
    assert!(said.contains("`mvm dev up` goes on with them"), "{said}");
    assert_eq!(Home::naming(path_text(&dir)), [0; 0]);
    home.fails(&["dev", "status", "--dir", path_text(&dir)], 1);

    let address = metrics.as_str().unwrap().trim_start_matches("http://").trim_end_matches("/metrics");
    let _taken = wait_for("the port to be free", PATIENCE, || std::net::TcpListener::bind(address).ok());
    let said = up(&home, &dir);
    assert!(said.contains("is taken by another program; using"), "{said}");
    // What its user made is there, and what its user deleted is not made again.
    let names = home.ok(&["get", "tenants,pools", "-A", "-o", "name"]).0;
    assert_eq!(names.lines().collect::<Vec<_>>(), ["tenant/dev", "tenant/mine"]);
    home.ok(&["dev", "down", "--dir", path_text(&dir)]);
}

#[test]
fn what_keeps_a_newcomer_from_a_cluster_is_told_with_what_to_do() {
    let home = Home::new();
    let fails = |args: &[&str], code: i32, words: &[&str]| {
        let said = home.fails(args, code);
        for word in words {
            assert!(said.contains(word), "{args:?}: {word} is not in: {said}");
        }
    };
    fails(&["dev", "status"], 1, &["there is no development cluster", "mvm dev up"]);
    let (_, said) = home.ok(&["dev", "down"]);
    assert!(said.contains("nothing to do; `mvm dev up` makes one"), "{said}");

    let work = home.path().join("work");
    fs::create_dir(&work).unwrap();
    fs::write(work.join("thesis.txt"), "all of it").unwrap();
    fails(&["dev", "up", "--dir", path_text(&work)], 2, &["thesis.txt", "--dir DIR"]);
    let file = work.join("thesis.txt");
    fails(&["dev", "up", "--dir", path_text(&file)], 1, &["could not make the directory", "--dir DIR"]);
    let broken = home.path().join("broken");
    fs::create_dir(&broken).unwrap();
    fs::write(broken.join("dev.json"), "{").unwrap();
    fails(&["dev", "up", "--dir", path_text(&broken)], 1, &["dev.json", "remove its directory"]);

    let mut no_qemu = home.command(&["dev", "up"]);
    let output = no_qemu.env("PATH", "/nowhere").output().unwrap();
    let (_, said) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("qemu-system-x86_64") && said.contains("apt-get install"), "{said}");
    assert_eq!(Home::naming(path_text(home.path())), [0; 0], "nothing was started");
    // What was begun is no obstacle, and goes.
    home.ok(&["dev", "down", "--purge"]);
    assert!(!home.cluster().exists());
}

#[test]
fn a_directory_of_another_user_and_a_full_disk_are_told_with_what_to_do() {
    if !can_run(&[Need::Root, Need::Mounts]) {
        return;
    }
    let nobody = Home::of_nobody();
    let roots = TempDir::new().unwrap();
    fs::set_permissions(roots.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let (own, theirs) = (roots.path().join("dev"), roots.path().to_owned());
    for (dir, code, what) in [(own, 1, "could not make"), (theirs, 2, "others may write to it")] {
        let said = nobody.fails(&["dev", "up", "--driver", "fake", "--dir", path_text(&dir)], code);
        assert!(said.contains(what), "{said}");
        assert!(said.contains("another user's") && said.contains("--dir DIR"), "{said}");
    }
    let full = roots.path().join("full");
    fs::create_dir(&full).unwrap();
    let mount = format!("mount -t tmpfs -o size=64k,mode=0755 tmpfs {0} && exec \"$@\"", full.display());
    let mut command = Command::new("unshare");
    command.args(["--mount", "--propagation", "private", "sh", "-c", &mount, "sh"]).arg(mvm_binary());
    command.args(["dev", "up", "--driver", "fake", "--dir", path_text(&full)]);
    command.env("HOME", roots.path()).env("NO_COLOR", "1");
    let output = command.output().unwrap();
    let (_, said) = texts(&output);
    assert_eq!(output.status.code(), Some(1), "{said}");
    assert!(said.contains("No space left on device"), "{said}");
    assert!(said.contains("make room") || said.contains("--dir"), "{said}");
}

#[test]
fn a_context_of_another_cluster_stays_the_current_one_and_settings_do_not_reach_the_processes() {
    let home = Home::new();
    home.ok(&["context", "set", "prod", "--coordinator", "https://c1.example:4433"]);
    let dir = home.path().join("dev");
    // An agent with these would not start, and a coordinator would be elsewhere.
    let mut command = home.command(&["dev", "up", "--driver", "fake", "--dir", path_text(&dir)]);
    command.env("MVM_AGENT_DESIRED", "/nowhere").env("MVM_COORDINATOR_LISTEN", "192.0.2.1:1");
    command.env("MVM_COORDINATOR", "https://192.0.2.1:4433").env("NOTIFY_SOCKET", "/nowhere/socket");
    let output = command.output().unwrap();
    let (_, said) = texts(&output);
    assert!(output.status.success(), "{said}");
    assert!(said.contains("MVM_COORDINATOR is set and beats the context"), "{said}");
    assert!(said.contains("mvm context use dev"), "{said}");
    assert_eq!(home.ok(&["context", "current"]).0, "prod\n");
    home.ok(&["get", "nodes", "--context", "dev"]);
    home.ok(&["dev", "down", "--dir", path_text(&dir)]);
    assert_eq!(home.ok(&["context", "current"]).0, "prod\n");
    let limit = Duration::from_secs(1);
    wait_until("the processes to be gone", limit, || Home::naming(path_text(&dir)).is_empty());
}
