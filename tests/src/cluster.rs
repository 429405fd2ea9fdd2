//! A cluster of real processes on loopback: one coordinator, any number of agents, an operator.

use std::collections::BTreeMap;
use std::fs::File;
use std::net::{TcpListener, UdpSocket};
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::sync::{Mutex, PoisonError};

use mvm_client::Channel;
use mvm_pki::{Anchors, Credential, LiveAnchors, LiveCredential};
use serde_json::Value;
use tempfile::TempDir;

use crate::lone_agent::end_vmms_below;
use crate::{PATIENCE, Process, mvm_binary, put_snapshot_key, wait_for, wait_until};

/// Below those that the kernel gives to outgoing connections.
const PORTS: std::ops::Range<u16> = 20_000..30_000;

#[derive(Debug, Clone)]
pub struct ClusterSettings {
    pub dev: bool,
    /// More flags for `mvm coordinator serve`.
    pub serve: Vec<String>,
}

impl Default for ClusterSettings {
    fn default() -> Self {
        // A short heartbeat, so that a killed process is missed within seconds.
        Self { dev: true, serve: vec!["--heartbeat".into(), "1s".into()] }
    }
}

impl ClusterSettings {
    /// The defaults with more flags for `mvm coordinator serve`.
    pub fn with(flags: &[&str]) -> Self {
        let mut settings = Self::default();
        settings.serve.extend(flags.iter().map(ToString::to_string));
        settings
    }
}

#[derive(Debug)]
pub struct AgentProcess {
    pub process: Process,
    pub port: u16,
    pub metrics_port: u16,
}

#[derive(Debug)]
pub struct Cluster {
    dir: TempDir,
    settings: ClusterSettings,
    pub port: u16,
    pub metrics_port: u16,
    pub coordinator: Option<Process>,
    pub agents: BTreeMap<String, AgentProcess>,
}

impl Cluster {
    /// A development cluster with its coordinator running.
    pub fn start() -> Self {
        Self::start_with(ClusterSettings::default())
    }

    pub fn start_with(settings: ClusterSettings) -> Self {
        let mut cluster = Self::init(settings);
        cluster.start_coordinator();
        cluster
    }

    /// Keys and certificates only; no process yet.
    pub fn init(settings: ClusterSettings) -> Self {
        let dir = TempDir::new().expect("a temporary folder can be made");
        let (port, metrics_port) = (free_port(), free_port());
        let cluster = Self { dir, settings, port, metrics_port, coordinator: None, agents: BTreeMap::new() };
        let data_dir = cluster.coordinator_dir();
        let mut args =
            vec!["coordinator", "init", "--cluster", "test", "--quiet", "--data-dir", path_text(&data_dir)];
        if cluster.settings.dev {
            args.push("--dev");
        }
        cluster.mvm_ok(&args);
        cluster
    }

    pub fn path(&self) -> &Path {
        self.dir.path()
    }

    pub fn coordinator_dir(&self) -> PathBuf {
        self.path().join("coordinator")
    }

    pub fn agent_dir(&self, node: &str) -> PathBuf {
        self.path().join(node)
    }

    pub fn url(&self) -> String {
        format!("https://127.0.0.1:{}", self.port)
    }

    /// `mvm ARGS` with this cluster's operator and coordinator in its environment.
    pub fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(mvm_binary());
        command.args(args);
        command.env_clear();
        command.env("PATH", std::env::var_os("PATH").unwrap_or_default());
        command.env("HOME", self.path());
        command.env("NO_COLOR", "1");
        command.env("MVM_COORDINATOR", self.url());
        command.env("MVM_OPERATOR_DIR", self.coordinator_dir().join("operator"));
        command
    }

    pub fn mvm(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("mvm runs")
    }

    /// Runs `mvm ARGS`, which must succeed; gives its standard output.
    pub fn mvm_ok(&self, args: &[&str]) -> String {
        let output = self.mvm(args);
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "mvm {args:?} failed: {stderr}\n{}", self.logs());
        String::from_utf8(output.stdout).expect("mvm prints UTF-8")
    }

    /// Runs `mvm ARGS -o json`, which must succeed.
    pub fn mvm_json(&self, args: &[&str]) -> Value {
        let text = self.mvm_ok(&[args, &["-o", "json"]].concat());
        serde_json::from_str(&text)
            .unwrap_or_else(|error| panic!("mvm {args:?} printed no JSON ({error}): {text}"))
    }

    /// Runs `mvm ARGS`, which must fail with `code`; gives its standard error.
    pub fn mvm_fails(&self, args: &[&str], code: i32) -> String {
        let output = self.mvm(args);
        let stderr = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(code), "mvm {args:?}: {stderr}");
        stderr
    }

    pub fn start_coordinator(&mut self) {
        self.start_coordinator_in(&self.coordinator_dir());
    }

    /// Starts a coordinator on another data folder, at this cluster's address.
    pub fn start_coordinator_in(&mut self, data_dir: &Path) {
        self.launch_coordinator(data_dir, &[]);
        wait_until("the coordinator to answer", PATIENCE, || {
            self.mvm(&["node", "list", "--timeout", "2s"]).status.success()
        });
    }

    /// Starts a coordinator that may end before it answers: with `MVM_CRASH_AT` in its environment.
    pub fn launch_coordinator(&mut self, data_dir: &Path, environment: &[(&str, &str)]) {
        let (listen, metrics) =
            (format!("127.0.0.1:{}", self.port), format!("127.0.0.1:{}", self.metrics_port));
        let mut command = self.command(&["coordinator", "serve", "--data-dir", path_text(data_dir)]);
        command.args(["--listen", &listen, "--metrics-listen", &metrics]).args(&self.settings.serve);
        command.envs(environment.iter().copied());
        let process = Process::start(command, &self.path().join("coordinator.log"));
        self.coordinator = Some(process);
    }

    pub fn kill_coordinator(&mut self) {
        drop(self.coordinator.take());
    }

    /// A connection of the operator's.
    pub async fn channel(&self) -> Channel {
        let dir = self.coordinator_dir().join("operator");
        let credential = Credential::load(&dir.join("operator.pem")).expect("the operator has a credential");
        let anchors = LiveAnchors::new(Anchors::load(&dir.join("ca.crt")).expect("the cluster has a root"));
        let name = credential.identity().cluster().clone();
        let target = self.url().parse().expect("a URL");
        let operator = LiveCredential::new(credential);
        let opened = mvm_client::open(&target, &operator, &anchors, &name, PATIENCE).await;
        opened.expect("the coordinator takes the operator's connection")
    }

    /// Token and certificate for `node`; reachable as 127.0.0.1 and localhost.
    pub fn enrol(&self, node: &str) {
        let token = self.mvm_ok(&["coordinator", "token", "create", "--node", node, "--quiet"]);
        let dir = self.agent_dir(node);
        let args = ["agent", "certs", "request", "--data-dir", path_text(&dir), "--token", token.trim()];
        self.mvm_ok(&[&args[..], &["--san", "127.0.0.1", "--san", "localhost", "--quiet"]].concat());
    }

    /// Starts `node`'s agent, on the same ports as before when it ran before; with the fake driver unless `flags` name another.
    pub fn start_agent(&mut self, node: &str, flags: &[&str]) {
        self.launch_agent(node, flags, &[]);
    }

    /// The same with the fake driver, and more in its environment, such as `MVM_CRASH_AT`.
    pub fn start_agent_with(&mut self, node: &str, environment: &[(&str, &str)]) {
        self.launch_agent(node, &[], environment);
    }

    fn launch_agent(&mut self, node: &str, flags: &[&str], environment: &[(&str, &str)]) {
        let before = self.agents.remove(node);
        let (port, metrics_port) = before
            .as_ref()
            .map_or_else(|| (free_port(), free_port()), |agent| (agent.port, agent.metrics_port));
        drop(before);
        let dir = self.agent_dir(node);
        let (listen, metrics) = (format!("127.0.0.1:{port}"), format!("127.0.0.1:{metrics_port}"));
        let mut command = self.command(&["agent", "serve", "--data-dir", path_text(&dir)]);
        if !flags.contains(&"--driver") {
            command.args(["--driver", "fake"]);
        }
        command.args(["--listen", &listen, "--metrics-listen", &metrics]).args(flags);
        command.envs(environment.iter().copied());
        let process = Process::start(command, &self.path().join(format!("{node}.log")));
        self.agents.insert(node.to_owned(), AgentProcess { process, port, metrics_port });
    }

    /// Enrols and starts `node`, and waits for its session.
    pub fn join(&mut self, node: &str) {
        self.enrol(node);
        self.start_agent(node, &[]);
        self.wait_connected(node);
    }

    /// Enrols `node`, and starts its agent for real microVMs.
    pub fn join_with_microvms(&mut self, node: &str) {
        self.enrol(node);
        self.start_with_microvms(node);
    }

    /// Starts the agent of `node` for real microVMs, whatever else this machine does, and waits for its session.
    pub fn start_with_microvms(&mut self, node: &str) {
        let images = crate::test_images();
        let flags = ["--driver", "qemu", "--images-dir", path_text(&images), "--interval-secs", "1"];
        let alone = ["--network", "none", "--cgroups", "best-effort", "--jail", "best-effort"];
        self.start_agent(node, &[&flags[..], &alone, &["--ignore-memory-pressure"]].concat());
        self.wait_connected(node);
    }

    /// The same with the secrets bundle that the examples mean, and a key for the snapshots of its tenant.
    pub fn join_with_secrets(&mut self, node: &str) {
        self.enrol(node);
        let bundle = concat!(env!("CARGO_MANIFEST_DIR"), "/../examples/secrets/acme");
        let secrets = self.path().join(format!("{node}-secrets"));
        std::fs::create_dir(&secrets).expect("a folder can be made");
        std::fs::copy(bundle, secrets.join("acme")).expect("the bundle can be copied");
        put_snapshot_key(&secrets, "acme");
        self.start_agent(node, &["--secrets-dir", path_text(&secrets)]);
        self.wait_connected(node);
    }

    pub fn kill_agent(&mut self, node: &str) {
        self.agents.get_mut(node).expect("the agent was started").process.kill();
    }

    /// What the coordinator knows of `node`.
    pub fn node(&self, node: &str) -> Option<Value> {
        let output = self.mvm(&["node", "get", node, "-o", "json", "--timeout", "5s"]);
        output.status.success().then(|| serde_json::from_slice(&output.stdout).expect("node info is JSON"))
    }

    pub fn wait_connected(&self, node: &str) {
        self.wait_node(node, "connected", |info| info["connected"] == true);
    }

    pub fn wait_node(&self, node: &str, what: &str, mut condition: impl FnMut(&Value) -> bool) -> Value {
        wait_for(&format!("{node}: {what}\n{}", self.logs()), PATIENCE, || {
            self.node(node).filter(|info| condition(info))
        })
    }

    /// Writes `text` to a file of this cluster's folder.
    pub fn file(&self, name: &str, text: &str) -> PathBuf {
        let path = self.path().join(name);
        std::fs::write(&path, text).expect("a file can be written");
        path
    }

    /// The last lines of every process, for failures.
    pub fn logs(&self) -> String {
        let tail = |name: &str, process: &Process| {
            let log = process.log();
            let lines: Vec<&str> = log.lines().collect();
            format!("--- {name}\n{}\n", lines[lines.len().saturating_sub(20)..].join("\n"))
        };
        let coordinator = self.coordinator.iter().map(|process| tail("coordinator", process));
        coordinator.chain(self.agents.iter().map(|(node, agent)| tail(node, &agent.process))).collect()
    }
}

impl Drop for Cluster {
    /// VMs outlive their agents by design; a test must not leave them behind.
    fn drop(&mut self) {
        for (node, agent) in &mut self.agents {
            agent.process.kill();
            end_vmms_below(&self.dir.path().join(node).join("vms"));
        }
    }
}

/// A port on loopback that no other test gets while this process lives, and no outgoing connection ever: whoever is
/// killed and started again finds it free.
pub fn free_port() -> u16 {
    static HELD: Mutex<Vec<File>> = Mutex::new(Vec::new());
    let dir = std::env::temp_dir().join("mvm-test-ports");
    std::fs::create_dir_all(&dir).expect("a folder of locks can be made");
    let mut held = HELD.lock().unwrap_or_else(PoisonError::into_inner);
    for port in PORTS {
        let lock = File::create(dir.join(port.to_string())).expect("a lock can be made");
        if lock.try_lock().is_err() {
            continue;
        }
        let bound = (UdpSocket::bind(("127.0.0.1", port)), TcpListener::bind(("127.0.0.1", port)));
        if let (Ok(_), Ok(_)) = bound {
            held.push(lock);
            return port;
        }
    }
    panic!("no port of {PORTS:?} is free");
}

/// A copy of a folder with everything in it.
pub fn copy_dir(from: &Path, to: &Path) -> std::io::Result<()> {
    std::fs::create_dir_all(to)?;
    for entry in std::fs::read_dir(from)? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_dir(&entry.path(), &target)?;
        } else {
            std::fs::copy(entry.path(), &target)?;
        }
    }
    Ok(())
}

pub fn path_text(path: &Path) -> &str {
    path.to_str().expect("temporary folders have UTF-8 names")
}
