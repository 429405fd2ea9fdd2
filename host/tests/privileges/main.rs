//! An agent and its helper as they are in life: two processes, one of them root and one that is nobody.
//!
//! This program is all of them. Without arguments it is the test; `agent` is a process that starts a helper, drops
//! what it has and does what it is told; `helper` is that helper. Privileges are given up before a process has a
//! second thread, so there is no test harness around it.

#![allow(clippy::unwrap_used)] // A test may end at the first surprise.

#[path = "../it/support/ending.rs"]
mod ending;

use std::io::{BufRead as _, BufReader, Write as _};
use std::os::fd::{AsFd as _, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use mvm_host::privileges::{Account, HELPER_CAPABILITIES, Held, drop_to};
use mvm_host::{
    Access, Handover, Host as _, LocalHost, Operation, Outcome, Policy, RemoteHost, SpawnVmm, VmmProcess,
    VmmProgram, hand_over, run_helper, start_helper,
};
use mvm_proto::InstanceId;

const PATIENCE: Duration = Duration::from_secs(20);
const NOBODY: u32 = 65_534;

type Test = fn(&Site);

const TESTS: [(&str, Test); 3] = [
    ("an_agent_without_privileges_drives_its_helper_and_can_do_nothing_else", drives),
    ("a_helper_ends_with_its_agent_and_vmms_outlive_both", agent_dies),
    ("an_agent_learns_at_once_that_its_helper_is_gone", helper_dies),
];

fn main() {
    let args: Vec<_> = std::env::args().skip(1).collect();
    match args.iter().map(String::as_str).collect::<Vec<_>>().as_slice() {
        ["helper"] => helper(),
        ["agent", dir] => agent(Path::new(dir)),
        // What a runner of tests asks first, and how it then names one.
        words if words.contains(&"--list") => {
            if !words.contains(&"--ignored") {
                TESTS.iter().for_each(|(name, _)| say(&format!("{name}: test")));
            }
        }
        words => {
            let named = TESTS.iter().filter(|(name, _)| words.contains(name));
            let any = TESTS.iter().any(|(name, _)| words.contains(name));
            let chosen: Vec<_> = if any { named.collect() } else { TESTS.iter().collect() };
            for (name, test) in chosen {
                run(name, *test);
            }
        }
    }
}

fn say(text: &str) {
    let mut out = std::io::stdout().lock();
    writeln!(out, "{text}").unwrap();
    out.flush().unwrap();
}

fn run(name: &str, test: Test) {
    if !mvm_needs::can_run(&[mvm_needs::Need::Root]) {
        return;
    }
    test(&Site::new());
    say(&format!("{name} ... ok"));
}

/// A data directory that the agent's user can reach.
struct Site {
    dir: tempfile::TempDir,
}

impl Drop for Site {
    fn drop(&mut self) {
        ending::end_all_below(self.dir.path());
    }
}

impl Site {
    fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
        let program = dir.path().join("qemu");
        std::fs::write(&program, "#!/bin/sh\nmkfifo never; read line < never\n").unwrap();
        std::fs::set_permissions(&program, std::fs::Permissions::from_mode(0o755)).unwrap();
        std::fs::write(dir.path().join("secret"), "of root").unwrap();
        std::fs::set_permissions(dir.path().join("secret"), std::fs::Permissions::from_mode(0o600)).unwrap();
        Self { dir }
    }

    fn data_dir(&self) -> PathBuf {
        data_dir(self.dir.path())
    }
}

fn data_dir(dir: &Path) -> PathBuf {
    dir.join("agent")
}

fn id() -> InstanceId {
    InstanceId::from_bits(0xa9e7)
}

fn helper() {
    let socket = std::io::stdin().as_fd().try_clone_to_owned().unwrap();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(run_helper(socket)).unwrap();
}

/// Starts a helper as root, drops everything, then does one thing a line and says how it went.
fn agent(dir: &Path) {
    let data_dir = data_dir(dir);
    let account = Account { name: "nobody".to_owned(), uid: NOBODY, gid: NOBODY };
    hand_over(&Handover { data_dir: &data_dir, own: vec![data_dir.join("images")] }, &account).unwrap();
    let policy = Policy {
        data_dir: data_dir.clone(),
        images_dir: data_dir.join("images"),
        programs: vec![(dir.join("qemu"), VmmProgram::Qemu)],
        jail_base: None,
        agent_uid: NOBODY,
        agent_gids: account.groups().unwrap(),
        vmm_ids: vec![(61_000, 61_000)],
        demand: None,
        groups: None,
    };
    let me = std::env::current_exe().unwrap();
    let (helper, socket) = start_helper(&me, &["helper"], &policy).unwrap();
    drop_to(&account).unwrap();
    say(&format!("helper {}", helper.id()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(obey(dir, socket));
}

async fn obey(dir: &Path, socket: OwnedFd) {
    let host = RemoteHost::new(socket, &data_dir(dir)).unwrap();
    let (tell, mut told) = tokio::sync::mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            tell.send(line.unwrap()).unwrap();
        }
    });
    while let Some(order) = told.recv().await {
        let done = match order.as_str() {
            "spawn" => {
                host.perform(&Operation::MakeRunDir { instance: id() }).await.unwrap();
                let args = ["-name".to_owned(), format!("mvm-{}", id())].to_vec();
                let (program, log) = (dir.join("qemu"), "vmm.log".to_owned());
                let spawn = Operation::SpawnVmm(SpawnVmm {
                    instance: id(),
                    program,
                    args,
                    log,
                    tap: None,
                    group: None,
                    confine: None,
                });
                match host.perform(&spawn).await {
                    Ok(Outcome::Process(process)) => format!("pid {}", process.pid),
                    other => format!("{other:?}"),
                }
            }
            "files" => {
                let text = "written by root".to_owned();
                let write = Operation::WriteFile { instance: id(), name: "vmm.json".to_owned(), text };
                host.perform(&write).await.unwrap();
                let file = host.open_file(&id(), "vmm.json", Access::Read).await.unwrap().unwrap();
                let direct = std::fs::read(host.run_dir(&id()).join("vmm.json")).unwrap_err().kind();
                format!("{} / {direct:?}", std::io::read_to_string(file).unwrap())
            }
            // Everything that it must not be able to do any more.
            "escape" => {
                let kind = |error: std::io::Error| error.kind();
                let tries = [
                    nix::unistd::setuid(nix::unistd::Uid::from_raw(0)).map_err(Into::into),
                    nix::unistd::setgid(nix::unistd::Gid::from_raw(0)).map_err(Into::into),
                    std::fs::read(dir.join("secret")).map(|_| ()),
                    std::fs::rename(data_dir(dir).join("vms"), data_dir(dir).join("mine")),
                    std::fs::write(data_dir(dir).join("vms/mine"), "x"),
                    std::os::unix::fs::chown(data_dir(dir).join("images"), Some(0), None),
                    std::fs::create_dir("/mvm-made-by-nobody"),
                ];
                let denied = |tried: std::io::Result<()>| {
                    tried.map_err(kind) == Err(std::io::ErrorKind::PermissionDenied)
                };
                let made = std::fs::write(data_dir(dir).join("ledger"), "its own").is_ok();
                format!("{:?} {made}", tries.map(denied))
            }
            "gone" => {
                tokio::time::timeout(PATIENCE, host.gone()).await.unwrap();
                format!("{}", host.vmms().await.is_err())
            }
            other => format!("unknown order {other}"),
        };
        say(&done);
    }
}

/// An agent process, as the test sees it; what it started is ended with its site.
struct Agent {
    child: Child,
    said: BufReader<ChildStdout>,
    helper: u32,
}

impl Agent {
    fn start(site: &Site) -> Self {
        let me = std::env::current_exe().unwrap();
        let mut child = Command::new(me)
            .arg("agent")
            .arg(site.dir.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let said = BufReader::new(child.stdout.take().unwrap());
        let mut agent = Self { child, said, helper: 0 };
        agent.helper = agent.heard().strip_prefix("helper ").unwrap().parse().unwrap();
        agent
    }

    fn heard(&mut self) -> String {
        let mut line = String::new();
        self.said.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn told(&mut self, order: &str) -> String {
        writeln!(self.child.stdin.as_mut().unwrap(), "{order}").unwrap();
        self.heard()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn wait_for<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap().block_on(work)
}

fn vmms(site: &Site) -> Vec<VmmProcess> {
    wait_for(LocalHost::new(&site.data_dir()).vmms()).unwrap()
}

fn until(what: &str, mut holds: impl FnMut() -> bool) {
    let deadline = Instant::now() + PATIENCE;
    while !holds() {
        assert!(Instant::now() < deadline, "waited for {what}");
        std::thread::yield_now();
    }
}

/// Ended, whether or not somebody has waited for it yet.
fn is_gone(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.is_empty() || stat.contains(") Z ")
}

fn drives(site: &Site) {
    let mut agent = Agent::start(site);
    let held = Held::by(agent.child.id()).unwrap();
    let expected =
        Held { uids: vec![NOBODY; 4], gids: vec![NOBODY; 4], no_new_privileges: true, ..Held::default() };
    assert_eq!(held, expected);
    assert_eq!(agent.told("escape"), "[true, true, true, true, true, true, true] true");
    let said = agent.told("spawn");
    let pid: u32 = said.strip_prefix("pid ").unwrap_or_else(|| panic!("{said}")).parse().unwrap();
    assert_eq!(vmms(site).iter().map(|vmm| vmm.process.pid).collect::<Vec<_>>(), [pid]);
    assert_eq!(agent.told("files"), "written by root / PermissionDenied");
    // The helper has what is on its list, and its children can't get more.
    let all = HELPER_CAPABILITIES.iter().fold(0, |all, (one, _)| all | one.bits());
    let mine = Held::by_this_process().unwrap();
    let helper = Held::by(agent.helper).unwrap();
    assert_eq!((helper.effective, helper.permitted), (all & mine.permitted, all & mine.permitted));
    assert_eq!(helper.bounding & !all, 0);
    assert!(helper.no_new_privileges && helper.inheritable == 0 && helper.ambient == 0);
}

fn agent_dies(site: &Site) {
    let mut agent = Agent::start(site);
    agent.told("spawn");
    let before = vmms(site);
    assert_eq!(before.len(), 1);
    agent.child.kill().unwrap();
    agent.child.wait().unwrap();
    until("the helper's end", || is_gone(agent.helper));
    assert_eq!(vmms(site), before);
    // The next one finds it.
    let mut next = Agent::start(site);
    assert_eq!(next.told("spawn"), format!("pid {}", before[0].process.pid));
}

fn helper_dies(site: &Site) {
    let mut agent = Agent::start(site);
    agent.told("spawn");
    let before = vmms(site);
    let helper = nix::unistd::Pid::from_raw(agent.helper.try_into().unwrap());
    nix::sys::signal::kill(helper, nix::sys::signal::Signal::SIGKILL).unwrap();
    assert_eq!(agent.told("gone"), "true");
    assert_eq!(vmms(site), before);
}
