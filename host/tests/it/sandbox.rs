//! What a confined VMM can do, tried from inside: by a program that tries everything, and by real QEMU.
//!
//! Needs root, for there is no other user without it. `mvm_needs` says when it is missing.

mod attempts;
mod bare;
mod cost;
mod inside;
mod qemu;

use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use mvm_host::sandbox::Confinement;
use mvm_host::{
    EndSignal, Host as _, HostError, LocalHost, Operation, Outcome, ProcessEnd, SpawnVmm, VmmProcess,
};
use mvm_proto::InstanceId;

/// Users that are nobody on the machine.
const FIRST_UID: u32 = 61_184;
const GID: u32 = 61_184;
const LOG: &str = "vmm.log";

/// A data directory that takes its VMMs with it, however the test ends.
struct Machine {
    dir: tempfile::TempDir,
    host: LocalHost,
}

impl Machine {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let host = LocalHost::new(dir.path());
        Self { dir, host }
    }

    fn instance(number: u32) -> InstanceId {
        InstanceId::from_bits(0x5a4d_0000 + number)
    }

    fn uid(number: u32) -> u32 {
        FIRST_UID + number
    }

    /// A run directory as an instance has it: its VMM's own, and reachable for the agent's group.
    async fn run_dir(&self, number: u32) -> PathBuf {
        let instance = Self::instance(number);
        self.host.perform(&Operation::MakeRunDir { instance: instance.clone() }).await.unwrap();
        let dir = self.host.run_dir(&instance);
        if rustix::process::geteuid().is_root() {
            chown(&dir, Some(Self::uid(number)), Some(GID)).unwrap();
            fs::set_permissions(&dir, fs::Permissions::from_mode(0o2770)).unwrap();
        }
        dir
    }

    fn image(&self) -> PathBuf {
        let image = self.dir.path().join("image");
        fs::write(&image, "image").unwrap();
        fs::set_permissions(&image, fs::Permissions::from_mode(0o644)).unwrap();
        image
    }

    async fn start(
        &self,
        number: u32,
        program: &Path,
        args: &[String],
        confine: Option<Confinement>,
    ) -> Result<VmmProcess, HostError> {
        let mut args = args.to_vec();
        args.push(format!("mvm-{}", Self::instance(number)));
        self.start_unnamed(number, program, args, confine).await
    }

    /// Without the argument that names its instance.
    async fn start_unnamed(
        &self,
        number: u32,
        program: &Path,
        args: Vec<String>,
        confine: Option<Confinement>,
    ) -> Result<VmmProcess, HostError> {
        let (instance, log) = (Self::instance(number), LOG.to_owned());
        let (program, tap, group) = (program.to_owned(), None, None);
        let spawn = SpawnVmm { instance: instance.clone(), program, args, log, tap, group, confine };
        match self.host.perform(&Operation::SpawnVmm(spawn)).await? {
            Outcome::Process(process) => Ok(VmmProcess { instance, process }),
            other => panic!("no process: {other:?}"),
        }
    }

    async fn ended(&self, vmm: &VmmProcess) -> ProcessEnd {
        tokio::time::timeout(Duration::from_secs(60), self.host.wait_end(vmm)).await.unwrap().unwrap()
    }

    async fn end(&self, vmm: &VmmProcess, signal: EndSignal) -> ProcessEnd {
        let end = Operation::EndProcess { process: vmm.process.clone(), signal };
        self.host.perform(&end).await.unwrap();
        self.ended(vmm).await
    }

    fn log(&self, number: u32) -> String {
        fs::read_to_string(self.host.run_dir(&Self::instance(number)).join(LOG)).unwrap_or_default()
    }
}

impl Drop for Machine {
    fn drop(&mut self) {
        let data_dir = self.dir.path().to_owned();
        let end = async move {
            let host = LocalHost::new(&data_dir);
            for vmm in host.vmms().await.unwrap_or_default() {
                let end = Operation::EndProcess { process: vmm.process.clone(), signal: EndSignal::Kill };
                let _ = host.perform(&end).await;
                let _ = tokio::time::timeout(Duration::from_secs(10), host.wait_end(&vmm)).await;
            }
        };
        let runtime = || tokio::runtime::Builder::new_current_thread().enable_all().build();
        let _ = std::thread::spawn(move || runtime().map(|runtime| runtime.block_on(end))).join();
    }
}

/// The fields of `/proc/PID/status`.
fn status(vmm: &VmmProcess) -> BTreeMap<String, String> {
    let text = fs::read_to_string(format!("/proc/{}/status", vmm.process.pid)).unwrap();
    let fields = text.lines().filter_map(|line| line.split_once(':'));
    fields.map(|(name, value)| (name.to_owned(), value.trim().to_owned())).collect()
}

/// What the kernel says of a confined process, whoever it is.
fn assert_confined(vmm: &VmmProcess, uid: u32) {
    let status = status(vmm);
    let (users, groups) =
        ([uid; 4].map(|id| id.to_string()).join("\t"), [GID; 4].map(|id| id.to_string()).join("\t"));
    assert_eq!((&status["Uid"], &status["Gid"], status["Groups"].as_str()), (&users, &groups, ""));
    for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
        assert_eq!(status[set], "0000000000000000", "{set}");
    }
    assert_eq!((status["NoNewPrivs"].as_str(), status["Seccomp"].as_str()), ("1", "2"));
    assert_eq!(status["NSpid"].split_whitespace().nth(1), Some("1"));
    let pid = vmm.process.pid;
    for namespace in ["mnt", "pid", "ipc", "uts", "net", "cgroup"] {
        let link = |who: &str| fs::read_link(format!("/proc/{who}/ns/{namespace}")).unwrap();
        assert_ne!(link("self"), link(&pid.to_string()), "{namespace}");
    }
    let score = fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap();
    assert_eq!(score.trim(), "500");
    let limits = fs::read_to_string(format!("/proc/{pid}/limits")).unwrap();
    let limit = |name: &str| limits.lines().find(|line| line.starts_with(name)).unwrap().to_owned();
    assert!(limit("Max open files").contains(" 1024 "), "{limits}");
    assert!(limit("Max core file size").split_whitespace().any(|word| word == "1"), "{limits}");
}

/// Waits for a condition, and fails after a while.
async fn wait_until(what: &str, mut condition: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(120), "waited in vain for {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
