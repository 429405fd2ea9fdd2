//! The machine: what it was told, what it does, and every request's effect.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};

use nix::sys::signal::Signal;
use serde_json::{Value, json};

use super::arguments::{Arguments, Fault};
use super::guest::{self, SOCKET};
use super::rules::{self, Answer, MAX_VCPUS, Phase, body, same_id, text};
use super::vsock::{self, Connections};
use super::written::{Level, Log, MetricsFile};
use super::{say, snapshot};

/// The guest's folder, where the machine was started.
const FOLDER: &str = "guest-memory";

const DEFAULT_MEM_MIB: u64 = 128;

/// Where a slow snapshot says that it has begun, and waits to be let on.
pub const SNAPSHOT_BEGUN: &str = "snapshot-begun";
pub const SNAPSHOT_GO_ON: &str = "snapshot-go-on";

/// What follows an answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum After {
    GoOn,
    Exit(i32),
}

#[derive(Debug)]
pub struct Machine {
    arguments: Arguments,
    state: Mutex<State>,
    changed: Condvar,
    start_guest: Mutex<mpsc::Sender<PathBuf>>,
    pub(super) connections: Arc<Connections>,
}

#[derive(Debug)]
struct State {
    phase: Phase,
    /// Something that belongs to a boot was said; the log and the metrics do not.
    configured: bool,
    parts: BTreeMap<String, Value>,
    snapshot_since_pause: bool,
    wedged: bool,
    /// From a snapshot, and not resumed yet: the guest's process begins with the resume.
    asleep: bool,
    guest: Option<u32>,
    log: Log,
    metrics: MetricsFile,
}

type Said = Result<Answer, Refusal>;

/// A refusal, and whether the process ends after it.
pub(super) struct Refusal(String, After);

impl From<String> for Refusal {
    fn from(message: String) -> Self {
        Refusal(message, After::GoOn)
    }
}

/// A load that fails leaves a process nobody can use.
fn fatal(message: impl Into<String>) -> Refusal {
    Refusal(format!("Load snapshot error: {}", message.into()), After::Exit(1))
}

impl Machine {
    pub fn new(arguments: Arguments, start_guest: mpsc::Sender<PathBuf>) -> std::io::Result<Self> {
        let mut log = Log::new(arguments.log_path.as_deref(), arguments.level)?;
        log.line(Level::Info, &format!("Running Firecracker v{}", arguments.version));
        let state = State {
            phase: Phase::NotStarted,
            configured: false,
            parts: BTreeMap::new(),
            snapshot_since_pause: false,
            wedged: false,
            asleep: false,
            guest: None,
            log,
            metrics: MetricsFile::default(),
        };
        Ok(Self {
            arguments,
            state: Mutex::new(state),
            changed: Condvar::new(),
            start_guest: Mutex::new(start_guest),
            connections: Arc::default(),
        })
    }

    pub fn max_payload(&self) -> usize {
        self.arguments.max_payload
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// One request, under the lock: Firecracker does one thing at a time as well.
    pub fn handle(self: &Arc<Self>, method: &str, path: &str, bytes: &[u8]) -> (Answer, After) {
        let mut state = self.lock();
        state.log.line(Level::Info, &format!("The API server received a {method} request on \"{path}\"."));
        let timing = rules::timing(method, path, state.phase, state.configured);
        let said = timing.map_err(Refusal::from).and_then(|()| self.answer(&mut state, method, path, bytes));
        self.changed.notify_all();
        match said {
            Ok(answer) => {
                let done = format!("The request was executed successfully. Status code: {}.", answer.status);
                state.log.line(Level::Info, &done);
                (answer, After::GoOn)
            }
            Err(Refusal(message, after)) => {
                state
                    .log
                    .line(Level::Error, &format!("Received Error. Status code: 400. Message: {message}"));
                (Answer::refused(&message), after)
            }
        }
    }

    fn answer(self: &Arc<Self>, state: &mut State, method: &str, path: &str, bytes: &[u8]) -> Said {
        match (method, path) {
            ("GET", "/") => Ok(Answer::value(&json!({
                "id": self.arguments.id, "state": state.phase.as_str(),
                "vmm_version": self.arguments.says, "app_name": "Firecracker",
            }))),
            ("GET", "/version") => Ok(Answer::value(&json!({ "firecracker_version": self.arguments.says }))),
            ("GET", "/machine-config") => {
                let default = json!({"vcpu_count": 1, "mem_size_mib": DEFAULT_MEM_MIB});
                Ok(Answer::value(state.parts.get(path).unwrap_or(&default)))
            }
            ("GET", "/vm/config") => Ok(Answer::value(&json!(state.parts))),
            ("PUT", "/actions") => self.act(state, bytes),
            ("PATCH", "/vm") => self.change_state(state, bytes),
            ("PUT", "/snapshot/create") => self.create(state, bytes),
            ("PUT", "/snapshot/load") => self.load(state, bytes),
            ("PUT", "/logger") => {
                let fields = ["log_path", "level", "show_level", "show_log_origin", "module"];
                let value = body(bytes, &[], &fields)?;
                let level = value.get("level").and_then(Value::as_str).map(Level::parse).transpose()?;
                let path = value.get("log_path").and_then(Value::as_str);
                state.log.update(path, level).map_err(|cause| cause.to_string())?;
                Ok(Answer::done())
            }
            ("PUT", "/metrics") => {
                let path = text(&body(bytes, &["metrics_path"], &[])?, "metrics_path");
                state.metrics.name(&path).map_err(|cause| cause.to_string())?;
                self.flush_now_and_then();
                Ok(Answer::done())
            }
            ("PUT", _) => {
                let value = self.configure(state, path, bytes)?;
                (state.configured, _) = (true, state.parts.insert(path.to_owned(), value));
                Ok(Answer::done())
            }
            ("PATCH", "/balloon") => {
                let value = body(bytes, &["amount_mib"], &[])?;
                let Some(part) = state.parts.get_mut(path) else {
                    return Err("Invalid device ID".to_owned().into());
                };
                if state.guest.is_none() || !Path::new(FOLDER).join(SOCKET).exists() {
                    return Err("Device not activated yet".to_owned().into());
                }
                // Its guest has no memory to speak of, and gives all that it is asked for at once.
                part["amount_mib"] = value["amount_mib"].clone();
                Ok(Answer::done())
            }
            ("GET", "/balloon/statistics") => {
                let amount = state.parts.get("/balloon").map(|part| part["amount_mib"].clone());
                let amount = amount.ok_or_else(|| "Invalid device ID".to_owned())?;
                Ok(Answer::value(&json!({ "target_mib": amount, "actual_mib": amount })))
            }
            ("GET", "/balloon") => {
                let part = state.parts.get(path).ok_or_else(|| "Invalid device ID".to_owned())?;
                Ok(Answer::value(part))
            }
            ("PATCH", _) => Ok(Answer::done()),
            _ => Err(format!("Invalid request method and/or path: {method} {path}.").into()),
        }
    }

    /// Boot resources: looked at when they are named, as the real one opens files at once.
    fn configure(self: &Arc<Self>, state: &State, path: &str, bytes: &[u8]) -> Result<Value, Refusal> {
        let opens = |file: &str, what: &str| match fs::File::open(file) {
            Ok(_) => Ok(()),
            Err(cause) => Err(Refusal::from(format!("{what}: {cause}"))),
        };
        if path == "/machine-config" {
            let fields = ["smt", "track_dirty_pages", "huge_pages", "cpu_template"];
            let value = body(bytes, &["vcpu_count", "mem_size_mib"], &fields)?;
            let vcpus = value["vcpu_count"].as_u64().unwrap_or(0);
            if vcpus == 0 || vcpus > MAX_VCPUS {
                return Err("The vCPU number is invalid!".to_owned().into());
            }
            return Ok(value);
        }
        if path == "/boot-source" {
            let value = body(bytes, &["kernel_image_path"], &["boot_args", "initrd_path"])?;
            opens(&text(&value, "kernel_image_path"), "The kernel file cannot be opened")?;
            if let Some(initrd) = value.get("initrd_path").and_then(Value::as_str) {
                opens(initrd, "The initrd file cannot be opened")?;
            }
            return Ok(value);
        }
        if path.starts_with("/drives/") {
            let fields = [
                "is_read_only",
                "path_on_host",
                "partuuid",
                "cache_type",
                "rate_limiter",
                "io_engine",
                "socket",
            ];
            let value = body(bytes, &["drive_id", "is_root_device"], &fields)?;
            same_id(path, &value, "drive_id")?;
            opens(&text(&value, "path_on_host"), "Unable to create the block device: BackingFile")?;
            return Ok(value);
        }
        if path.starts_with("/network-interfaces/") {
            let fields = ["guest_mac", "mtu", "rx_rate_limiter", "tx_rate_limiter"];
            let value = body(bytes, &["iface_id", "host_dev_name"], &fields)?;
            same_id(path, &value, "iface_id")?;
            self.tap(&text(&value, "host_dev_name"))?;
            return Ok(value);
        }
        match path {
            // A CID of 2 is taken, although the description says 3 and more.
            "/vsock" => {
                let value = body(bytes, &["guest_cid", "uds_path"], &["vsock_id"])?;
                vsock::listen(&text(&value, "uds_path"), self).map_err(|cause| {
                    Refusal::from(format!("Cannot create backend for vsock device: UnixBind({cause})"))
                })?;
                Ok(value)
            }
            "/entropy" => Ok(body(bytes, &[], &["rate_limiter"])?),
            "/balloon" => {
                let fields = ["stats_polling_interval_s", "free_page_hinting", "free_page_reporting"];
                Ok(body(bytes, &["amount_mib", "deflate_on_oom"], &fields)?)
            }
            "/serial" => Ok(body(bytes, &[], &["serial_out_path", "rate_limiter"])?),
            "/mmds/config" => {
                let fields = ["version", "ipv4_address", "imds_compat"];
                let value = body(bytes, &["network_interfaces"], &fields)?;
                for name in value["network_interfaces"].as_array().into_iter().flatten() {
                    let name = name.as_str().unwrap_or_default();
                    if !state.parts.contains_key(&format!("/network-interfaces/{name}")) {
                        return Err(format!("The list of network interface IDs provided contains at least one ID that does not correspond to any existing network interface: {name}").into());
                    }
                }
                Ok(value)
            }
            "/mmds" | "/cpu-config" => Ok(body(bytes, &[], &[]).unwrap_or_default()),
            _ => {
                Err(format!("Invalid request method and/or path: PUT {}.", path.trim_start_matches('/'))
                    .into())
            }
        }
    }

    /// A TAP that does not exist is made, for whoever runs this may.
    fn tap(&self, name: &str) -> Result<(), String> {
        if self.arguments.busy_taps.iter().any(|busy| busy == name) {
            return Err(format!("Open tap device failed: {name}: Resource busy (os error 16)"));
        }
        Ok(())
    }

    fn act(&self, state: &mut State, bytes: &[u8]) -> Said {
        let value = body(bytes, &["action_type"], &[])?;
        match (text(&value, "action_type").as_str(), state.phase) {
            ("InstanceStart", Phase::NotStarted) => {
                if !state.parts.contains_key("/boot-source") {
                    return Err("Cannot start microvm without kernel configuration.".to_owned().into());
                }
                is_kernel(&text(&state.parts["/boot-source"], "kernel_image_path"))?;
                self.start(state, &fresh_folder()?);
                state.phase = Phase::Running;
                Ok(Answer::done())
            }
            ("InstanceStart", _) => Err(rules::AFTER_START.to_owned().into()),
            ("FlushMetrics", _) => {
                state.metrics.flush();
                Ok(Answer::done())
            }
            ("SendCtrlAltDel", Phase::NotStarted) => Err(rules::BEFORE_START.to_owned().into()),
            ("SendCtrlAltDel", _) => {
                if let Some(pid) = state.guest
                    && self.arguments.fault != Some(Fault::Deaf)
                {
                    guest::signal(pid, Signal::SIGTERM);
                }
                Ok(Answer::done())
            }
            (other, _) => Err(format!("unknown variant `{other}`, expected one of the actions").into()),
        }
    }

    fn start(&self, state: &mut State, folder: &Path) {
        state.asleep = false;
        state.log.line(Level::Info, "Artificially kick devices.");
        let sender = self.start_guest.lock().unwrap_or_else(PoisonError::into_inner);
        // The other end is the main thread, which waits for this.
        let _ = sender.send(folder.to_owned());
    }

    fn change_state(&self, state: &mut State, bytes: &[u8]) -> Said {
        let wanted = text(&body(bytes, &["state"], &[])?, "state");
        match (wanted.as_str(), state.phase) {
            ("Paused", Phase::Running) => {
                if let Some(pid) = state.guest {
                    guest::signal(pid, Signal::SIGSTOP);
                }
                (state.phase, state.snapshot_since_pause) = (Phase::Paused, false);
            }
            ("Resumed", Phase::Paused) => {
                if state.asleep {
                    self.start(state, Path::new(FOLDER));
                } else if rules::loses_vsock(&self.arguments.version, state.snapshot_since_pause) {
                    state.wedged = true;
                }
                if let Some(pid) = state.guest {
                    guest::signal(pid, Signal::SIGCONT);
                }
                state.phase = Phase::Running;
            }
            ("Paused" | "Resumed", _) => {}
            (other, _) => {
                return Err(format!("unknown variant `{other}`, expected `Paused` or `Resumed`").into());
            }
        }
        Ok(Answer::done())
    }

    fn create(&self, state: &mut State, bytes: &[u8]) -> Said {
        let value = body(bytes, &["mem_file_path", "snapshot_path"], &["snapshot_type"])?;
        if state.phase != Phase::Paused {
            return Err("Create snapshot error: save/restore unavailable while running".to_owned().into());
        }
        let full = match value.get("snapshot_type").and_then(Value::as_str).unwrap_or("Full") {
            "Full" => true,
            "Diff" => false,
            other => return Err(format!("unknown variant `{other}`, expected `Full` or `Diff`").into()),
        };
        let (memory, file) = (text(&value, "mem_file_path"), text(&value, "snapshot_path"));
        if self.arguments.fault == Some(Fault::DiskFull) && full {
            return Err("Create snapshot error: No space left on device (os error 28)".to_owned().into());
        }
        if self.arguments.fault == Some(Fault::SlowSnapshot) {
            // Under the lock, as everything: nobody else is answered meanwhile.
            let _ = fs::write(SNAPSHOT_BEGUN, b"");
            crate::wait_until("to be let on", crate::PATIENCE, || Path::new(SNAPSHOT_GO_ON).exists());
        }
        let failed = |cause: std::io::Error| Refusal::from(format!("Create snapshot error: {cause}"));
        snapshot::write_memory(&memory, Path::new(FOLDER), mem_bytes(&state.parts), full).map_err(failed)?;
        if self.arguments.fault == Some(Fault::DieInSnapshot) && full {
            std::process::exit(1);
        }
        snapshot::write_state(&file, &json!({ "parts": state.parts })).map_err(failed)?;
        state.snapshot_since_pause = true;
        // A snapshot resets what is open; who listens in the guest goes on listening.
        self.connections.reset();
        Ok(Answer::done())
    }

    fn load(self: &Arc<Self>, state: &mut State, bytes: &[u8]) -> Said {
        let fields = [
            "mem_file_path",
            "mem_backend",
            "enable_diff_snapshots",
            "track_dirty_pages",
            "resume_vm",
            "network_overrides",
            "vsock_override",
            "clock_realtime",
        ];
        let value = body(bytes, &["snapshot_path"], &fields)?;
        let backend = value.get("mem_backend").map(|backend| text(backend, "backend_path"));
        let memory = match (backend, value.get("mem_file_path").and_then(Value::as_str)) {
            (Some(path), None) => path,
            (None, Some(path)) => path.to_owned(),
            _ => {
                return Err("Invalid request: either `mem_backend` or `mem_file_path` must be there"
                    .to_owned()
                    .into());
            }
        };
        if self.arguments.fault == Some(Fault::DieInLoad) {
            std::process::exit(1);
        }
        let saved = snapshot::read_state(&text(&value, "snapshot_path")).map_err(fatal)?;
        let mut parts: BTreeMap<String, Value> =
            serde_json::from_value(saved["parts"].clone()).map_err(|error| fatal(error.to_string()))?;
        for (id, tap) in overrides(&value) {
            let Some(part) = parts.get_mut(&format!("/network-interfaces/{id}")) else {
                return Err(fatal(format!("Unknown Network Device: {id}")));
            };
            part["host_dev_name"] = tap.into();
        }
        for (path, part) in &parts {
            if path.starts_with("/drives/") {
                let file = text(part, "path_on_host");
                fs::File::open(&file).map_err(|cause| fatal(format!("Block: {file}: {cause}")))?;
            } else if path.starts_with("/network-interfaces/") {
                self.tap(&text(part, "host_dev_name")).map_err(fatal)?;
            }
        }
        let folder = fresh_folder().map_err(|refusal| fatal(refusal.0))?;
        snapshot::read_memory(&memory, &folder, mem_bytes(&parts)).map_err(fatal)?;
        if let Some(part) = parts.get_mut("/vsock") {
            if let Some(other) = value.get("vsock_override") {
                part["uds_path"] = text(other, "uds_path").into();
            }
            let listening = vsock::listen(&text(part, "uds_path"), self);
            listening.map_err(|cause| fatal(format!("Vsock: UnixBind({cause})")))?;
        }
        (state.parts, state.phase, state.asleep, state.configured) = (parts, Phase::Paused, true, true);
        if value.get("resume_vm").and_then(Value::as_bool) == Some(true) {
            self.start(state, Path::new(FOLDER));
            state.phase = Phase::Running;
        }
        say("[    0.0] the guest was restored");
        Ok(Answer::done())
    }

    pub(super) fn guest_started(&self, pid: u32) {
        let mut state = self.lock();
        state.guest = Some(pid);
        if state.phase == Phase::Paused {
            guest::signal(pid, Signal::SIGSTOP);
        }
        self.changed.notify_all();
    }

    /// Waits until the guest runs; no answer at all once new connections are lost.
    pub(super) fn wait_for_guest(&self) {
        let mut state = self.lock();
        while state.wedged || state.phase != Phase::Running || state.guest.is_none() {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    pub(super) fn guest_socket() -> PathBuf {
        Path::new(FOLDER).join(SOCKET)
    }

    pub(super) fn log(&self, line: &str) {
        self.lock().log.line(Level::Info, line);
    }

    pub(super) fn flush_metrics(&self) {
        self.lock().metrics.flush();
    }

    /// Whether anyone wants them or not.
    fn flush_now_and_then(self: &Arc<Self>) {
        let (machine, every) = (Arc::clone(self), self.arguments.metrics_every);
        std::thread::spawn(move || {
            loop {
                std::thread::park_timeout(every);
                machine.flush_metrics();
            }
        });
    }
}

/// Opened when it was named, read only now.
fn is_kernel(path: &str) -> Result<(), String> {
    let bytes = fs::read(path).map_err(|cause| cause.to_string())?;
    if bytes.starts_with(b"\x7fELF") {
        return Ok(());
    }
    Err("Start microvm error: Cannot load kernel due to invalid memory configuration or invalid kernel image: Invalid Elf magic number".to_owned())
}

fn overrides(value: &Value) -> Vec<(String, String)> {
    let list = value.get("network_overrides").and_then(Value::as_array).cloned().unwrap_or_default();
    list.iter().map(|entry| (text(entry, "iface_id"), text(entry, "host_dev_name"))).collect()
}

fn mem_bytes(parts: &BTreeMap<String, Value>) -> u64 {
    let config = parts.get("/machine-config").and_then(|config| config["mem_size_mib"].as_u64());
    config.unwrap_or(DEFAULT_MEM_MIB) << 20
}

fn fresh_folder() -> Result<PathBuf, Refusal> {
    let _ = fs::remove_dir_all(FOLDER);
    fs::create_dir(FOLDER).map_err(|cause| Refusal::from(cause.to_string()))?;
    Ok(PathBuf::from(FOLDER))
}
