//! One agent without a coordinator, following a file: what tests of real microVMs are made with.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Write;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::time::Duration;

use serde_json::{Value, json};
use tempfile::TempDir;

use crate::{NetNs, PATIENCE, Process, free_port, mvm_binary, path_text, ready, wait_for_or, wait_until};

/// Instances of a node by phase, from `mvm agent observe`.
pub type Census = BTreeMap<String, BTreeSet<String>>;

#[derive(Debug)]
pub struct LoneAgent {
    dir: TempDir,
    driver: String,
    /// More flags for `mvm agent serve`.
    flags: Vec<String>,
    port: u16,
    /// Where its links are; absent: it makes none.
    namespace: Option<NetNs>,
    process: Option<Process>,
}

impl LoneAgent {
    /// Not started, and with no document yet.
    pub fn new(driver: &str, flags: &[&str]) -> Self {
        let dir = TempDir::new().expect("a temporary folder can be made");
        let flags = flags.iter().map(ToString::to_string).collect();
        Self { dir, driver: driver.to_owned(), flags, port: free_port(), namespace: None, process: None }
    }

    /// The same with tenants' networks, in a network namespace of its own.
    pub fn with_networks(driver: &str, flags: &[&str]) -> Self {
        let mut agent = Self::new(driver, flags);
        agent.namespace = Some(NetNs::new("node"));
        agent
    }

    /// Where its links are.
    pub fn namespace(&self) -> &NetNs {
        self.namespace.as_ref().expect("the agent has networks")
    }

    pub fn data_dir(&self) -> PathBuf {
        self.dir.path().join("data")
    }

    fn desired(&self) -> PathBuf {
        self.dir.path().join("desired.json")
    }

    /// What the node is meant to run from now on.
    pub fn declare(&self, document: &Value) {
        let fresh = self.dir.path().join("desired.json.new");
        std::fs::write(&fresh, document.to_string()).expect("a document can be written");
        std::fs::rename(&fresh, self.desired()).expect("a document can be put in place");
    }

    pub fn start(&mut self) {
        self.start_with(&[]);
    }

    /// Starts the agent with more in its environment, and does not wait for it.
    pub fn launch(&mut self, environment: &[(&str, &str)]) {
        let (data_dir, desired) = (self.data_dir(), self.desired());
        let metrics = format!("127.0.0.1:{}", self.port);
        let mut command = self.command(&["agent", "serve", "--node-id", "node-a", "--interval-secs", "1"]);
        command.args(["--network", if self.namespace.is_some() { "bridges" } else { "none" }]);
        // What else this machine does is nothing to a test.
        command.arg("--ignore-memory-pressure");
        // Machines that build and test this often have no cgroup v2; their own test brings one.
        command.args(["--cgroups", "best-effort"]);
        if !self.flags.iter().any(|flag| flag == "--jail") {
            command.args(["--jail", "best-effort"]);
        }
        command.args(["--driver", &self.driver, "--data-dir", path_text(&data_dir)]);
        command.args(["--desired", path_text(&desired), "--metrics-listen", &metrics]);
        command.args(["--listen", "127.0.0.1:0"]).args(&self.flags);
        command.envs(environment.iter().copied());
        self.process = Some(Process::start(command, &self.dir.path().join("agent.log")));
    }

    /// The same, and waits until it is ready.
    pub fn start_with(&mut self, environment: &[(&str, &str)]) {
        self.launch(environment);
        wait_until("the agent to be ready", PATIENCE, || {
            assert!(self.process().is_running(), "the agent has ended\n{}", self.log());
            // Where it has a namespace, its loopback is not ours.
            if self.namespace.is_some() { self.observe().is_some() } else { ready(self.port) }
        });
    }

    pub fn process(&mut self) -> &mut Process {
        self.process.as_mut().expect("the agent was started")
    }

    /// Waits until an agent that was started with `MVM_CRASH_AT` has ended itself there.
    pub fn wait_crashed(&mut self, point: &str, limit: Duration) {
        let status = self.process().wait_exit(limit);
        assert_eq!(status.signal(), Some(9), "{point} was not passed: {status}\n{}", self.log());
    }

    /// SIGKILL.
    pub fn kill(&mut self) {
        self.process().kill();
    }

    pub fn log(&self) -> String {
        self.process.as_ref().map(Process::log).unwrap_or_default()
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = match &self.namespace {
            Some(namespace) => namespace.command(mvm_binary()),
            None => Command::new(mvm_binary()),
        };
        command.args(args).env_clear().env("NO_COLOR", "1").env("HOME", self.dir.path());
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command
    }

    /// `mvm ARGS` as the operator of this machine.
    pub fn mvm(&self, args: &[&str]) -> Output {
        self.mvm_command(args).output().expect("mvm runs")
    }

    /// The same, to be started by the caller.
    pub fn mvm_command(&self, args: &[&str]) -> Command {
        let endpoint = format!("unix:{}", path_text(&self.data_dir().join("agent.sock")));
        let mut command = self.command(args);
        command.env("MVM_ENDPOINT", endpoint);
        command
    }

    /// The same with this on its standard input.
    pub fn mvm_with_input(&self, args: &[&str], input: Vec<u8>) -> Output {
        let mut command = self.mvm_command(args);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().expect("mvm runs");
        let mut stdin = child.stdin.take().expect("its input is a pipe");
        // Beside the reading of its output, which would fill up otherwise.
        let writer = std::thread::spawn(move || stdin.write_all(&input));
        let output = child.wait_with_output().expect("mvm ends");
        // A command that ended early closed its input.
        let _ = writer.join();
        output
    }

    /// Runs `mvm ARGS`, which must succeed; gives its standard output.
    pub fn mvm_ok(&self, args: &[&str]) -> String {
        let output = self.mvm(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "mvm {args:?} failed, {}: {stderr}\n{}", output.status, self.log());
        String::from_utf8(output.stdout).expect("mvm prints UTF-8")
    }

    /// What the agent sees; absent while it does not answer.
    pub fn observe(&self) -> Option<Value> {
        let data_dir = self.data_dir();
        let output = self.mvm(&["agent", "observe", "-o", "json", "--data-dir", path_text(&data_dir)]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).ok())?
    }

    /// Instances by phase, of those that nothing is being done to; absent while something is.
    pub fn census(&self) -> Option<Census> {
        let seen = self.observe()?;
        let mut census = Census::new();
        for instance in seen["instances"].as_array()? {
            if !instance["moving_to"].is_null() || !instance["staging"].is_null() {
                return None;
            }
            let (phase, id) = (instance["phase"].as_str()?, instance["id"].as_str()?);
            census.entry(phase.to_owned()).or_default().insert(id.to_owned());
        }
        Some(census)
    }

    /// Waits until exactly these counts hold, with nothing under way; stopped ones in reserve don't count.
    pub fn wait_counts(&self, running: usize, warm: usize, sleeping: usize, limit: Duration) -> Census {
        wait_for_or(
            limit,
            || self.with_counts(running, warm, sleeping),
            || {
                let wanted = format!("{running} running, {warm} warm, {sleeping} sleeping");
                format!("{wanted}, not {:?}\n{}", self.census(), self.log())
            },
        )
    }

    /// All instances, if there are this many of each and no others.
    pub fn with_counts(&self, running: usize, warm: usize, sleeping: usize) -> Option<Census> {
        let census = self.census()?;
        let count = |phase: &str| census.get(phase).map_or(0, BTreeSet::len);
        let others = ["created", "ready", "failed"].iter().map(|phase| count(phase)).sum::<usize>();
        let found = (count("running"), count("warm"), count("sleeping"), others);
        (found == (running, warm, sleeping, 0)).then_some(census)
    }

    /// The processes whose working directory lies in this node's, by instance.
    pub fn vmms(&self) -> BTreeMap<String, Vec<u32>> {
        vmms_below(&self.data_dir().join("vms"))
    }
}

impl Drop for LoneAgent {
    /// VMs outlive their agent by design; a test must not leave them behind.
    fn drop(&mut self) {
        if let Some(process) = &mut self.process {
            process.kill();
        }
        end_vmms_below(&self.data_dir().join("vms"));
    }
}

/// Ends the VMs of an agent that is gone.
pub(crate) fn end_vmms_below(vms: &Path) {
    for pid in vmms_below(vms).into_values().flatten() {
        let pid = nix::unistd::Pid::from_raw(i32::try_from(pid).unwrap_or(i32::MAX));
        let _ = nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGKILL);
    }
}

/// Processes by the directory below `vms` that they work in.
fn vmms_below(vms: &Path) -> BTreeMap<String, Vec<u32>> {
    let mut found = BTreeMap::<String, Vec<u32>>::new();
    let vms = vms.canonicalize().unwrap_or_else(|_| vms.to_owned());
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else {
            continue;
        };
        let Ok(directory) = std::fs::read_link(entry.path().join("cwd")) else { continue };
        if let Ok(below) = directory.strip_prefix(&vms)
            && let Some(instance) = below.components().next()
        {
            found.entry(instance.as_os_str().to_string_lossy().into_owned()).or_default().push(pid);
        }
    }
    found
}

/// A process's share of what it has in memory.
pub fn pss_mib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).expect("the VMM is there");
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:")).expect("the kernel tells the share");
    line.trim().trim_end_matches(" kB").trim().parse::<u64>().expect("a number") / 1024
}

/// A document with one tenant and one pool of small instances, no minimum runtimes, and pruning.
pub fn small_pool(running: u32, warm: u32, sleeping: u32) -> Value {
    json!({
        "schema_version": 1, "node_id": "node-a",
        "prune_unknown_tenants": true, "prune_unknown_pools": true,
        "tenants": [{
            "tenant_id": "acme",
            "network": {"tenant_net_id": 7, "ipv4_subnet": "10.77.0.0/24"},
            "quotas": {"max_vcpus": 32, "max_mem_mib": 8192, "max_running": 16, "max_warm": 16, "max_pools": 4,
                       "max_instances_per_pool": 32, "max_disk_gib": 64},
            "pools": [{
                "pool_id": "workers", "flake_ref": "builtin:busybox", "profile": "minimal",
                "instance_resources": {"vcpus": 1, "mem_mib": 128, "data_disk_mib": 0},
                "desired_counts": {"running": running, "warm": warm, "sleeping": sleeping},
                "runtime_policy": {"min_running_seconds": 0, "min_warm_seconds": 0, "drain_timeout_seconds": 5,
                                   "graceful_shutdown_seconds": 5},
                "stopped_retention_seconds": 0
            }]
        }]
    })
}

/// The same node with nothing on it.
pub fn nothing() -> Value {
    let mut document = small_pool(0, 0, 0);
    document["tenants"] = json!([]);
    document
}
