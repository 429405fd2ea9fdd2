//! A compromised agent that asks its helper for anything, in any order, while it changes its own files meanwhile, together
//! with a VMM that changes what it may: nothing outside may notice. Needs root.
//!
//! The requests are random and valid in form; the seed is printed and can be given (`MVM_HOSTILE_SEED`), as can the
//! number of requests (`MVM_HOSTILE_TRIES`).

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::Write as _;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastrand::Rng;
use mvm_host::cgroup::{CgroupSettings, InstanceGroup, InstanceLimits, Mode, TenantLimits, VmmCost, fake};
use mvm_host::{
    Access, Confinement, EndSignal, HELPER_THREADS, Host as _, HostError, Jail, JailFile, Operation,
    ProcessIdentity, RemoteHost, SpawnVmm, VmmProcess, serve_helper,
};
use mvm_needs::{Need, can_run};
use mvm_proto::InstanceId;
use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use parking_lot::RwLock;

use crate::remote::escape::{AGENT, Scene};
use crate::remote::suite::{JAILED, PATIENCE};

const TRIES: &str = "MVM_HOSTILE_TRIES";
const SEED: &str = "MVM_HOSTILE_SEED";

/// Requests in a row by one of several who ask at once.
const SEQUENCE: usize = 20;
const AT_ONCE: usize = 4;

/// However many tries there are: with the usual number the time is a few seconds.
const AT_MOST: Duration = Duration::from_secs(600);

/// What the agent swaps in its store and its data directory.
const IMAGES: [&str; 4] = ["a", "b", "dir/c", "snapshot/memory"];
const DATA: [&str; 3] = ["plain", "sub", "images2"];

/// What requests name: what drivers use, and parts of jails.
const NAMES: [&str; 22] = [
    "data.img",
    "console.log",
    "vmm.json",
    "memory",
    "base",
    "k",
    "snapshot",
    "snapshot/memory",
    "snapshot/state",
    "snapshot-1/mem",
    "snapshot-1/memory",
    "snapshot.tmp",
    "snapshot.tmp/memory",
    "api.sock",
    "jail",
    "jail/s",
    "jail/memory",
    "firecracker",
    "firecracker/i-00000001",
    "y/root",
    "z/s",
    "i-00000001",
];

/// What groups of tenants and pools are called.
const TENANTS: [&str; 2] = ["acme", "mvm"];

const IN_JAIL: [&str; 4] = ["s", "kernel", "memory", "firecracker"];

/// Files of root's outside: for root alone, to read, and to write.
const CANARIES: [&str; 3] = ["secret", "world", "shared"];

fn any<'a>(random: &mut Rng, from: &[&'a str]) -> &'a str {
    from[random.usize(..from.len())]
}

fn setting(name: &str) -> Option<u64> {
    std::env::var(name).ok().and_then(|text| text.parse().ok())
}

/// One that makes up requests.
struct Attacker {
    random: Rng,
    data_dir: PathBuf,
    outside: PathBuf,
    program: PathBuf,
    /// A process that is no VMM.
    stranger: ProcessIdentity,
}

impl Attacker {
    fn instance(&mut self) -> InstanceId {
        InstanceId::from_bits(self.random.u32(1..=3))
    }

    fn pick(&mut self, from: &[&str]) -> String {
        any(&mut self.random, from).to_owned()
    }

    fn name(&mut self) -> String {
        self.pick(&NAMES)
    }

    fn run_dir(&mut self) -> PathBuf {
        self.data_dir.join("vms").join(self.instance().as_str())
    }

    fn path(&mut self) -> PathBuf {
        match self.random.u32(..8) {
            0..=3 => {
                let name = self.pick(&IMAGES);
                self.data_dir.join("images").join(name)
            }
            4 => self.run_dir().join(self.name()),
            5 => {
                let name = self.pick(&DATA);
                self.data_dir.join(name)
            }
            6 => {
                let name = self.pick(&CANARIES);
                self.outside.join(name)
            }
            _ => self.data_dir.join("images/../../outside/secret"),
        }
    }

    fn jail(&mut self) -> Jail {
        let instance = self.instance();
        let program = self.pick(&["firecracker", "firecracker", "firecracker-2", "snapshot-1", "images"]);
        let base = match self.random.u32(..8) {
            0 => self.outside.clone(),
            1 => self.data_dir.clone(),
            _ => self.data_dir.join("vms").join(instance.as_str()),
        };
        let root = base.join(program).join(instance.as_str()).join("root");
        Jail { instance, root, uid: JAILED, gid: JAILED }
    }

    fn files(&mut self) -> Vec<JailFile> {
        let number = self.random.usize(..3);
        let mut file =
            || JailFile { source: self.path(), name: self.pick(&IN_JAIL), writable: self.random.bool() };
        (0..number).map(|_| file()).collect()
    }

    /// The stranger, init, or any that may be there.
    fn process(&mut self) -> ProcessIdentity {
        match self.random.u32(..4) {
            0 => ProcessIdentity { pid: 1, start_time: self.random.u64(..), boot_id: String::new() },
            1 => ProcessIdentity { start_time: self.random.u64(..), ..self.stranger.clone() },
            _ => self.stranger.clone(),
        }
    }

    fn group(&mut self) -> InstanceGroup {
        let (tenant, pool) = (self.pick(&TENANTS).parse().unwrap(), self.pick(&TENANTS).parse().unwrap());
        InstanceGroup { tenant, pool, instance: self.instance() }
    }

    fn of_groups_and_logs(&mut self) -> Operation {
        let (group, cost) = (self.group(), VmmCost { mem_mib: 1, pids: 1 });
        let tenant = group.tenant.clone();
        match self.random.u32(..9) {
            0 => Operation::EnsureTenantGroup { tenant, limits: TenantLimits::new(1, 64, 1, cost) },
            1 => Operation::RemoveTenantGroup { tenant },
            2 => Operation::EnsureGroup { group, limits: InstanceLimits::new(1, 64, cost) },
            3 => Operation::LimitIo { group, limits: None },
            4 => Operation::RemoveGroup { group },
            5 => Operation::ConfirmGroup { group, process: self.process() },
            6 => Operation::PunchLog { instance: self.instance(), name: self.name(), max_bytes: 0 },
            7 => Operation::MakeReadOnly { instance: self.instance(), name: self.name() },
            _ => Operation::LookAtGroups,
        }
    }

    fn operation(&mut self) -> Operation {
        let (instance, name) = (self.instance(), self.name());
        match self.random.u32(..28) {
            0..=2 => Operation::MakeRunDir { instance },
            3 if self.random.u32(..8) == 0 => Operation::RemoveRunDir { instance },
            3 | 4 => Operation::RemoveFile { instance, name },
            5 => Operation::WriteFile { instance, name, text: "written".to_owned() },
            6 => Operation::MakeDir { instance, name },
            7..=9 => Operation::Rename { instance, from: name, to: self.name() },
            10 => Operation::TrimLog { instance, name, max_bytes: 0 },
            11 | 12 => Operation::LinkFile { instance, source: self.path(), name },
            13..=15 => Operation::MakeJail { jail: self.jail(), files: self.files() },
            16 | 17 => Operation::ShareWithJail { jail: self.jail(), files: self.files() },
            18 => Operation::UnshareFromJail { jail: self.jail(), names: vec![self.pick(&IN_JAIL)] },
            19 if self.random.u32(..4) == 0 => Operation::RemoveJail { jail: self.jail() },
            // A program formats it, which takes long.
            19 if self.random.u32(..8) == 0 => Operation::MakeDisk { instance, name, size_mib: 1 },
            19 | 20 => Operation::DigHoles { instance, name },
            21 | 22 => {
                let template = self.instance();
                Operation::ShareMemory { instance, template, memory: name, name: self.name() }
            }
            23 => Operation::AdmitVmm { instance, user: JAILED, files: vec![name] },
            24 => {
                let signal = [EndSignal::Terminate, EndSignal::Kill][self.random.usize(..2)];
                match self.random.u32(..4) {
                    0 | 1 => Operation::EndProcess { process: self.process(), signal },
                    2 => Operation::MeasureMemory { instances: vec![instance, self.instance()] },
                    _ => Operation::MeasureDisk { instance },
                }
            }
            25 => self.of_groups_and_logs(),
            _ => {
                let images = vec![self.path()];
                let confine = Confinement { images, ..Confinement::qemu(JAILED, JAILED) };
                Operation::SpawnVmm(SpawnVmm {
                    args: ["-name".to_owned(), format!("mvm-{instance}")].to_vec(),
                    instance,
                    program: self.program.clone(),
                    log: self.pick(&["vmm.log", "k", "firecracker"]),
                    tap: None,
                    group: (self.random.u32(..4) == 0).then(|| self.group()),
                    confine: self.random.bool().then_some(confine),
                })
            }
        }
    }
}

/// A process that is no VMM, ended with the test.
struct Bystander(std::process::Child);

impl Bystander {
    fn start() -> Self {
        Self(std::process::Command::new("sleep").arg("infinity").spawn().unwrap())
    }
}

impl Drop for Bystander {
    fn drop(&mut self) {
        // It is gone already if the test has failed.
        let _ = self.0.kill().and_then(|()| self.0.wait());
    }
}

/// What outside must not be read, changed or reached, by device and inode.
struct Canaries {
    outside: PathBuf,
    inodes: BTreeSet<(u64, u64)>,
    contents: Vec<Vec<u8>>,
    opened: Inotify,
}

impl Canaries {
    /// Watches from here on who opens them.
    fn new(outside: &Path) -> Self {
        let (mut inodes, mut contents) = (BTreeSet::new(), Vec::new());
        for entry in fs::read_dir(outside).unwrap().map(Result::unwrap) {
            let meta = entry.metadata().unwrap();
            inodes.insert((meta.dev(), meta.ino()));
            contents.push(fs::read(entry.path()).unwrap());
        }
        let opened = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC).unwrap();
        let touched = AddWatchFlags::IN_OPEN
            | AddWatchFlags::IN_ACCESS
            | AddWatchFlags::IN_MODIFY
            | AddWatchFlags::IN_CREATE
            | AddWatchFlags::IN_DELETE
            | AddWatchFlags::IN_MOVE;
        opened.add_watch(outside, touched).unwrap();
        for entry in fs::read_dir(outside).unwrap().map(Result::unwrap) {
            // Listing the directory is this test's own, and is read away below.
            opened.add_watch(&entry.path(), touched).unwrap();
        }
        let canaries = Self { outside: outside.to_owned(), inodes, contents, opened };
        canaries.touched();
        canaries
    }

    /// What was opened, read or changed since this was last asked.
    fn touched(&self) -> Vec<String> {
        let mut all = Vec::new();
        while let Ok(events) = self.opened.read_events() {
            all.extend(events.into_iter().map(|event| format!("{:?} {:?}", event.mask, event.name)));
        }
        all
    }

    fn is_one(&self, file: &File) -> bool {
        let meta = file.metadata().unwrap();
        self.inodes.contains(&(meta.dev(), meta.ino()))
    }

    /// A file below `dir` that is one of them, or a copy of one.
    fn found_in(&self, dir: &Path) -> Option<PathBuf> {
        let mut dirs = vec![dir.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir).into_iter().flatten().flatten() {
                let (path, Ok(meta)) = (entry.path(), entry.metadata()) else { continue };
                if meta.is_dir() {
                    dirs.push(path);
                    continue;
                }
                if !meta.is_file() {
                    continue;
                }
                if self.inodes.contains(&(meta.dev(), meta.ino())) {
                    return Some(path);
                }
                if fs::read(&path).is_ok_and(|content| self.contents.contains(&content)) {
                    return Some(path);
                }
            }
        }
        None
    }
}

/// Puts one thing after another under a name.
fn swap(random: &mut Rng, path: &Path, outside: &Path, links: bool) {
    let _ = fs::remove_file(path).or_else(|_| fs::remove_dir_all(path));
    let canary = outside.join(any(random, &CANARIES));
    // Any of these may fail: what is there is changed by others, too.
    let _ = match random.u32(..8) {
        // Never through a link that someone else has just put there.
        0..=2 => File::options()
            .write(true)
            .create_new(true)
            .open(path)
            .and_then(|mut file| file.write_all(b"an image")),
        3 => symlink(&canary, path),
        4 => symlink(outside, path),
        5 if links => fs::hard_link(&canary, path),
        5 => symlink("../../../outside/secret", path),
        6 => nix::unistd::mkfifo(path, nix::sys::stat::Mode::S_IRWXU).map_err(Into::into),
        _ => match random.bool() {
            true => fs::DirBuilder::new().mode(0o755).create(path),
            false => UnixListener::bind(path).map(drop),
        },
    };
}

/// Whoever changes files meanwhile. What it made is left when it is dropped.
struct Swappers {
    stop: Arc<AtomicBool>,
    /// Whoever writes to it has them wait.
    pause: Arc<RwLock<()>>,
    swaps: Arc<AtomicU64>,
    threads: Vec<std::thread::JoinHandle<()>>,
}

impl Swappers {
    fn start(scene: &Scene, seed: u64) -> Self {
        let mut swappers =
            Self { stop: Arc::default(), pause: Arc::default(), swaps: Arc::default(), threads: Vec::new() };
        let (images, data, outside) = (scene.images(), scene.data_dir(), scene.outside());
        // The agent: its rights are this thread's own, so that what it can't do it does not do.
        let own = [images.clone(), data.clone(), outside.clone()];
        swappers.thread(seed, move |random, turn| {
            let [images, data, outside] = &own;
            if turn == 0 {
                become_agent();
            }
            match turn % 4 {
                0 => {
                    let path = data.join(any(random, &DATA));
                    swap(random, &path, outside, true);
                }
                1 if random.u32(..16) == 0 => {
                    // The store itself, under its name.
                    let (aside, other) = (data.join("aside"), data.join("images"));
                    if fs::rename(&other, &aside).is_ok() {
                        let _ = symlink(outside, &other).and_then(|()| fs::remove_file(&other));
                        let _ = fs::rename(&aside, &other);
                    }
                }
                _ => {
                    let path = images.join(any(random, &IMAGES));
                    swap(random, &path, outside, true);
                }
            }
        });
        // Names of root's files in the store, as where `fs.protected_hardlinks` is off; and a VMM, in its jail and where
        // it was admitted.
        let store = File::open(&images).unwrap();
        swappers.thread(seed ^ 1, move |random, turn| {
            if turn % 2 == 0 {
                // By descriptor: its name may be a link to the outside just now.
                let images = PathBuf::from(format!("/proc/self/fd/{}", store.as_raw_fd()));
                let image = images.join(any(random, &IMAGES));
                let _ = fs::remove_file(&image);
                let _ = fs::hard_link(outside.join("world"), &image);
                return;
            }
            let id = InstanceId::from_bits(random.u32(1..=3));
            let run_dir = data.join("vms").join(id.as_str());
            let jail = run_dir.join("firecracker").join(id.as_str()).join("root");
            let admitted = fs::metadata(&run_dir).is_ok_and(|meta| meta.gid() == JAILED);
            let name = any(random, &IN_JAIL);
            if jail.is_dir() && !jail.is_symlink() {
                swap(random, &jail.join(name), &outside, false);
            } else if admitted {
                let path = run_dir.join(any(random, &["data.img", "memory", "console.log"]));
                swap(random, &path, &outside, false);
            }
        });
        swappers
    }

    fn thread(&mut self, seed: u64, mut act: impl FnMut(&mut Rng, u64) + Send + 'static) {
        let (stop, pause, swaps) = (Arc::clone(&self.stop), Arc::clone(&self.pause), Arc::clone(&self.swaps));
        self.threads.push(std::thread::spawn(move || {
            let mut random = Rng::with_seed(seed);
            let mut turn = 0;
            while !stop.load(Ordering::Relaxed) {
                let _running = pause.read();
                act(&mut random, turn);
                turn += 1;
                swaps.fetch_add(1, Ordering::Relaxed);
            }
        }));
    }

    fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().unwrap());
        self.swaps.load(Ordering::Relaxed)
    }
}

/// Gives this thread the agent's rights, and no others.
fn become_agent() {
    let (uid, gid) = (rustix::fs::Uid::from_raw(AGENT), rustix::fs::Gid::from_raw(AGENT));
    rustix::thread::set_thread_groups(&[]).unwrap();
    rustix::thread::set_thread_res_gid(gid, gid, gid).unwrap();
    rustix::thread::set_thread_res_uid(uid, uid, uid).unwrap();
}

#[derive(Default)]
struct Tally {
    done: AtomicU64,
    refused: AtomicU64,
}

impl Tally {
    fn count<T>(&self, answer: &Result<T, HostError>) {
        let counter = if answer.is_ok() { &self.done } else { &self.refused };
        counter.fetch_add(1, Ordering::Relaxed);
    }
}

/// One request, and a look at the descriptor that came of it.
async fn ask(host: &RemoteHost, attacker: &mut Attacker, canaries: &Canaries, tally: &Tally) {
    let (instance, name) = (attacker.instance(), attacker.name());
    match attacker.random.u32(..10) {
        0 | 1 => {
            let access = [Access::Read, Access::ReadShared, Access::Create][attacker.random.usize(..3)];
            let opened = host.open_file(&instance, &name, access).await;
            tally.count(&opened);
            if let Ok(Some(file)) = opened {
                assert!(!canaries.is_one(&file), "{instance} {name} {access:?} was opened outside");
                assert!(file.metadata().unwrap().is_file());
            }
        }
        2 => tally.count(&host.connect(&instance, &name).await),
        3 => match attacker.random.u32(..5) {
            4 => {
                let process = attacker.process();
                let vmm = VmmProcess { instance, process };
                // One that is not waited for any more is to be forgotten, which is a request as well.
                let patience = if attacker.random.bool() { Duration::ZERO } else { PATIENCE };
                if let Ok(ended) = tokio::time::timeout(patience, host.wait_end(&vmm)).await {
                    assert!(ended.is_err() || vmm.process != attacker.stranger, "{ended:?}");
                    tally.count(&ended);
                }
            }
            0 => tally.count(&host.names(&instance).await),
            1 => tally.count(&host.jail_root(&instance).await),
            2 => tally.count(&host.run_dirs().await),
            _ => tally.count(&host.vmms().await),
        },
        _ => {
            let operation = attacker.operation();
            let answer = tokio::time::timeout(PATIENCE * 6, host.perform(&operation)).await;
            tally.count(&answer.unwrap_or_else(|_| panic!("{operation:?} has no answer")));
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[allow(clippy::print_stdout, reason = "says how much was tried")]
async fn whatever_a_hostile_agent_asks_for_in_whatever_order_nothing_outside_is_opened_changed_or_linked() {
    if !can_run(&[Need::Root]) {
        return;
    }
    let tries = usize::try_from(setting(TRIES).unwrap_or(4000)).unwrap();
    let seed = setting(SEED).unwrap_or_else(|| fastrand::u64(..));
    println!("{SEED}={seed}");
    let scene = Scene::in_memory();
    let shared = scene.outside().join("shared");
    fs::write(&shared, "for all to write").unwrap();
    fs::set_permissions(&shared, fs::Permissions::from_mode(0o666)).unwrap();
    fs::write(scene.outside().join("world"), "for all to read").unwrap();
    for dir in ["dir", "snapshot"] {
        fs::create_dir(scene.images().join(dir)).unwrap();
        std::os::unix::fs::chown(scene.images().join(dir), Some(AGENT), Some(AGENT)).unwrap();
    }
    let before = scene.kept();
    let canaries = Arc::new(Canaries::new(&scene.outside()));
    let (ours, theirs) = UnixStream::pair().unwrap();
    let groups = scene.dir.path().join("groups");
    for dir in [groups.clone(), groups.join("mvm")] {
        fake::group(&dir, "cpu memory pids").unwrap();
    }
    let listed = || {
        let names = fs::read_dir(&groups).unwrap().map(|entry| entry.unwrap().file_name());
        names.collect::<BTreeSet<_>>()
    };
    let listed_before = listed();
    let settings =
        CgroupSettings { mode: Mode::BestEffort, mount: Some(groups.clone()), ..CgroupSettings::default() };
    let policy = mvm_host::Policy { groups: Some(settings), ..scene.policy() };
    let serving = std::thread::spawn(move || {
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .max_blocking_threads(HELPER_THREADS)
            .build()
            .unwrap();
        runtime.block_on(serve_helper(OwnedFd::from(theirs), policy))
    });
    let host = Arc::new(RemoteHost::new(ours.into(), &scene.data_dir()).unwrap());
    let mut bystander = Bystander::start();
    let stranger = crate::remote::identity(bystander.0.id());
    let swappers = Swappers::start(&scene, seed);
    let tally = Arc::new(Tally::default());
    let deadline = Instant::now() + AT_MOST;
    let mut sequences = 0;
    while sequences * SEQUENCE < tries && Instant::now() < deadline {
        let round: Vec<_> = (0..AT_ONCE)
            .map(|_| {
                sequences += 1;
                let (host, canaries, tally) = (Arc::clone(&host), Arc::clone(&canaries), Arc::clone(&tally));
                let mut attacker = Attacker {
                    random: Rng::with_seed(seed.wrapping_add(sequences as u64)),
                    data_dir: scene.data_dir(),
                    outside: scene.outside(),
                    program: scene.program("qemu"),
                    stranger: stranger.clone(),
                };
                tokio::spawn(async move {
                    for _ in 0..SEQUENCE {
                        ask(&host, &mut attacker, &canaries, &tally).await;
                    }
                })
            })
            .collect();
        for task in round {
            task.await.unwrap();
        }
        // What is looked at must stay as it is, for this must not follow a link either.
        let _paused = swappers.pause.write();
        assert_eq!(canaries.touched(), Vec::<String>::new(), "after {sequences} sequences, {SEED}={seed}");
        for dir in ["vms", "jails"] {
            let found = canaries.found_in(&scene.data_dir().join(dir));
            assert_eq!(found, None, "after {sequences} sequences, {SEED}={seed}");
        }
    }
    let swaps = swappers.stop();
    host.perform(&Operation::LookAtGroups).await.unwrap();
    drop(host);
    assert_eq!(bystander.0.try_wait().unwrap(), None, "a process that is no VMM was ended");
    serving.join().unwrap().unwrap();
    // The second names that the swappers made go with the store; then all is as it was.
    fs::remove_dir_all(scene.data_dir()).unwrap();
    assert_eq!(canaries.touched(), Vec::<String>::new());
    assert_eq!(scene.kept(), before);
    assert_eq!(listed(), listed_before, "a group was made beside ours");
    assert_eq!(fs::read_dir(&canaries.outside).unwrap().count(), before.len());
    let (done, refused) = (tally.done.load(Ordering::Relaxed), tally.refused.load(Ordering::Relaxed));
    println!(
        "{sequences} sequences, {} requests: {done} done, {refused} refused; {swaps} swaps",
        done + refused
    );
    assert!(done > 0 && refused > 0 && swaps > 100, "{done} {refused} {swaps}");
}
