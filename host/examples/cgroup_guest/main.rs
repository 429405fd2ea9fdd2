//! The first and only program of a microVM that tries control groups on a real kernel.
//!
//! Started by the kernel it mounts what it needs, runs every check, prints a line for each and ends the machine. The
//! processes that the checks limit are this same program, started with the name of what to do. `tests/cgroup` boots it
//! and reads the lines: once in a machine without devices, once in one with a disk.
#![allow(
    clippy::unwrap_used,
    clippy::print_stdout,
    reason = "a test that ends at the first surprise, on a console"
)]

mod disk;
mod limits;
mod lives;
mod misbehave;
mod place;

use std::fs;
use std::os::fd::{AsFd as _, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use mvm_host::cgroup::{
    CgroupSettings, Cgroups, Group, InstanceGroup, InstanceLimits, TenantLimits, VmmCost,
};
use mvm_host::{Child, spawn_into};
use mvm_proto::InstanceId;
use rustix::mount::{MountFlags, mount};
use rustix::process::{WaitId, WaitIdOptions, WaitOptions, wait, waitid};

/// In the command line of the machine that has a disk.
const DISK_WORD: &str = "mvm.disk";

/// This program, where the archive that the machine boots from has it.
pub(crate) const SELF: &str = "/init";

/// Emulated, and on a machine whose disk may be busy for many seconds: a healthy run needs a fraction of it.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// What a check returns: a figure worth reading, or what is wrong.
pub(crate) type Checked = Result<String, String>;

type Check = fn(&Bench) -> Checked;

const CHECKS: [(&str, Check); 16] = [
    ("controllers are handed down to our groups", place::delegation),
    ("a parent that holds processes is refused with a reason", place::busy_parent),
    ("limits are kept, and drift is put right and told", place::drift),
    ("a child is born in its group", place::born),
    ("without clone3 a child is in its group before it runs", place::entered),
    ("a process that leaves its group is found out", place::left),
    ("a fork bomb stops at pids.max and is told", limits::fork_bomb),
    ("a whole instance is killed at memory.max and is told", limits::out_of_memory),
    ("a guest within its memory lives", limits::within_memory),
    ("an instance is throttled at its share and is told", limits::throttled),
    ("two instances stay within their tenant's processors", limits::tenant_cpu),
    ("two instances stay within their tenant's memory", limits::tenant_memory),
    ("pressure on a group, and on the machine, wakes who waits", limits::pressure),
    ("a frozen instance stands still until it is thawed", lives::freeze),
    ("a tree of processes goes with its group", lives::tree),
    ("200 instances come and go without a trace", lives::cycles),
];

/// For the machine with a disk.
const DISK_CHECKS: [(&str, Check); 7] = [
    ("a limit on a directory's disk is taken by the kernel for its whole disk", disk::resolved),
    ("writes past the page cache wait for their turn", disk::direct_writes),
    ("writes through the page cache wait for their turn", disk::delayed_writes),
    ("writes to a file that others made come to wait for their turn", disk::others_file),
    ("reads wait for their turn, by bytes and by number", disk::reads),
    ("a limit is changed and taken away under a writer", disk::changed),
    ("a writer that waits for its turn can be killed", disk::killed),
];

/// What the checks share.
pub(crate) struct Bench {
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) runtime: tokio::runtime::Runtime,
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    if let Some(what) = args.get(1).filter(|_| std::process::id() != 1) {
        return misbehave::run(what, &args[2..]);
    }
    mounts();
    let with_disk =
        fs::read_to_string("/proc/cmdline").unwrap().split_whitespace().any(|word| word == DISK_WORD);
    let checks = if with_disk { &DISK_CHECKS[..] } else { &CHECKS };
    if with_disk {
        disk::find();
    }
    let began = Instant::now();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    let mut failed = 0;
    let mut check = |name: &str, checked: Checked, took: Duration| {
        let (mark, told) = match checked {
            Ok(told) => ("PASS", told),
            Err(told) => {
                failed += 1;
                ("FAIL", told)
            }
        };
        println!("{mark} {name}: {told} [{} ms]", took.as_millis());
    };
    let opening = Instant::now();
    match Cgroups::open(&CgroupSettings::default()) {
        Err(cause) => check(
            "delegation",
            Err(format!("{cause}: {:?}", std::error::Error::source(&cause))),
            opening.elapsed(),
        ),
        Ok(cgroups) => {
            let cgroups = cgroups.with_disk_of(disk::VMS.into());
            let bench = Bench { cgroups: Arc::new(cgroups), runtime };
            for (name, run) in checks {
                let began = Instant::now();
                check(name, run(&bench), began.elapsed());
                reap();
            }
        }
    }
    println!("checks took {} ms", began.elapsed().as_millis());
    println!("{}", if failed == 0 { "CGROUP-ALL-PASS" } else { "CGROUP-FAILED" });
    let refused = nix::sys::reboot::reboot(nix::sys::reboot::RebootMode::RB_AUTOBOOT);
    println!("the machine could not be ended: {refused:?}");
}

fn mounts() {
    for (kind, at) in [("proc", "/proc"), ("sysfs", "/sys"), ("devtmpfs", "/dev"), ("tmpfs", "/tmp")] {
        fs::create_dir_all(at).unwrap();
        mount(kind, at, kind, MountFlags::empty(), None).unwrap();
    }
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", MountFlags::empty(), None).unwrap();
}

pub(crate) fn group(tenant: &str, bits: u32) -> InstanceGroup {
    let pool = "pool".parse().unwrap();
    InstanceGroup { tenant: tenant.parse().unwrap(), pool, instance: InstanceId::from_bits(bits) }
}

/// More than any check takes.
pub(crate) fn wide() -> TenantLimits {
    TenantLimits::new(8, 1024, 8, VmmCost { mem_mib: 0, pids: 100 })
}

/// A processor, 32 MiB and 20 processes; checks narrow what they are about.
pub(crate) fn usual() -> InstanceLimits {
    InstanceLimits::new(1, 32, VmmCost { mem_mib: 0, pids: 19 })
}

impl Bench {
    /// A tenant with these limits and nothing in it.
    pub(crate) fn tenant(&self, tenant: &str, limits: &TenantLimits) {
        self.cgroups.ensure_tenant(&tenant.parse().unwrap(), limits).unwrap();
    }

    /// An instance of a tenant with more than it needs.
    pub(crate) fn instance(&self, tenant: &str, bits: u32, limits: &InstanceLimits) -> InstanceGroup {
        let group = group(tenant, bits);
        self.cgroups.ensure_instance(&group, limits).unwrap();
        group
    }

    pub(crate) fn descriptor(&self, group: &InstanceGroup) -> OwnedFd {
        self.cgroups.instance_dir_fd(group).unwrap().unwrap()
    }

    /// Starts this program inside a group.
    pub(crate) fn start(&self, group: &InstanceGroup, what: &[&str]) -> Child {
        let args: Vec<&str> = std::iter::once(SELF).chain(what.iter().copied()).collect();
        spawn_into(Some(self.descriptor(group).as_fd()), Path::new(SELF), &args).unwrap()
    }

    pub(crate) fn read(&self, group: &Group, file: &str) -> String {
        let directory = self.cgroups.directory(group).unwrap();
        fs::read_to_string(directory.join(file)).unwrap().trim().to_owned()
    }

    pub(crate) fn pids(&self, group: &InstanceGroup) -> u64 {
        self.cgroups.usage(&group.clone().into()).unwrap().pids
    }

    /// Ends all that a check made.
    pub(crate) fn clear(&self, groups: &[InstanceGroup]) {
        for group in groups {
            self.cgroups.remove_instance(group, PATIENCE).unwrap();
        }
        for group in groups {
            self.cgroups.remove_pool(&group.tenant, &group.pool).unwrap();
            self.cgroups.remove_tenant(&group.tenant).unwrap();
        }
        reap();
    }
}

/// Waits for a child: its exit code, or the signal that ended it as a negative number.
pub(crate) fn ending(born: &Child) -> i32 {
    wait_until("a child to end", || !lives(born)).unwrap();
    let status = waitid(WaitId::PidFd(born.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap().unwrap();
    status.exit_status().unwrap_or_else(|| -status.terminating_signal().unwrap())
}

/// Whether a child has not ended.
pub(crate) fn lives(born: &Child) -> bool {
    let options = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    waitid(WaitId::PidFd(born.pidfd.as_fd()), options).unwrap().is_none()
}

/// The first process of a machine gets everyone's orphans.
pub(crate) fn reap() {
    while let Ok(Some(_)) = wait(WaitOptions::NOHANG) {}
}

pub(crate) fn wait_until(what: &str, mut condition: impl FnMut() -> bool) -> Result<(), String> {
    let deadline = Instant::now() + PATIENCE;
    while !condition() {
        if Instant::now() > deadline {
            return Err(format!("gave up waiting for: {what}"));
        }
        std::thread::park_timeout(Duration::from_millis(5));
    }
    Ok(())
}

/// Lets time pass, for what is measured over time.
pub(crate) fn pass(time: Duration) {
    let end = Instant::now() + time;
    while let Some(left) = end.checked_duration_since(Instant::now()).filter(|left| !left.is_zero()) {
        std::thread::park_timeout(left);
    }
}

/// What is wrong, unless all is well.
pub(crate) fn expect(well: bool, told: String) -> Checked {
    if well { Ok(told) } else { Err(told) }
}
