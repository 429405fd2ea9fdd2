//! What PID 1 does: mounts, modules, the root; then it starts this program once more to serve the agent, and reaps.
//!
//! Two processes, so that orphans and execs have different parents: PID 1 may reap every child it gets, and the thread that
//! waits for an exec finds its exit code where it left it. And if serving ever fails, it is begun again.

mod root;

use std::fs::{self, File};
use std::io::{self, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, WaitOptions, wait};
use rustix::system::RebootCommand;

/// The argument by which PID 1 starts the process that serves.
pub const SERVICE: &str = "--service";

/// Between two starts of the process that serves, when it fails: at first, and at most.
const FIRST_PAUSE: Duration = Duration::from_millis(100);
const LAST_PAUSE: Duration = Duration::from_secs(5);

/// Is PID 1, until the machine goes down.
pub fn run() -> io::Result<()> {
    mount_basics();
    load_modules(Path::new("/modules.list"));
    if let Some(wanted) = root::Root::named_by(&command_line()) {
        if let Err(error) = wanted.switch() {
            // Without its root this guest is of no use to anyone: the VMM's end tells the agent.
            complain(&format!("could not switch to {}: {error}", wanted.device));
            power_off();
        }
        mount_basics();
    }
    if let Err(error) = crate::network::loopback_up() {
        complain(&format!("no loopback: {error}"));
    }
    let mut pause = FIRST_PAUSE;
    loop {
        let service = Command::new("/proc/self/exe").arg0("mvm-guest").arg(SERVICE).spawn()?;
        reap_until(Pid::from_child(&service));
        // Whatever it had started has lost its keeper.
        complain("the guest program ended; restarting it");
        let _ = nix::sys::signal::kill(nix::unistd::Pid::from_raw(-1), nix::sys::signal::Signal::SIGKILL);
        std::thread::sleep(pause);
        pause = (pause * 2).min(LAST_PAUSE);
    }
}

fn command_line() -> String {
    fs::read_to_string("/proc/cmdline").unwrap_or_default()
}

/// `mvm.max_version=1` on the kernel's command line makes this an older guest.
#[must_use]
pub fn max_version() -> Option<u32> {
    command_line().split_whitespace().find_map(|word| word.strip_prefix("mvm.max_version="))?.parse().ok()
}

fn reap_until(service: Pid) {
    loop {
        match wait(WaitOptions::empty()) {
            Ok(Some((pid, _))) if pid == service => return,
            Ok(_) | Err(Errno::INTR) => {}
            Err(_) => return,
        }
    }
}

/// What is mounted already stays: an initramfs or the root may have brought it.
fn mount_basics() {
    let plain = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    let device = MountFlags::NOSUID | MountFlags::NOEXEC;
    let shared = MountFlags::NOSUID | MountFlags::NODEV;
    for (source, target, kind, flags, data) in [
        ("proc", "/proc", "proc", plain, c""),
        ("sysfs", "/sys", "sysfs", plain, c""),
        ("devtmpfs", "/dev", "devtmpfs", MountFlags::NOSUID, c"mode=0755"),
        ("devpts", "/dev/pts", "devpts", device, c"gid=5,mode=0620,ptmxmode=0666"),
        ("tmpfs", "/dev/shm", "tmpfs", shared, c"mode=1777"),
        ("tmpfs", "/tmp", "tmpfs", shared, c"mode=1777"),
        ("tmpfs", "/run", "tmpfs", shared, c"mode=0755"),
        ("cgroup2", "/sys/fs/cgroup", "cgroup2", plain, c"nsdelegate"),
    ] {
        let _ = fs::create_dir_all(target);
        if !is_mount_point(Path::new(target))
            && let Err(error) = mount(source, target, kind, flags, Some(data))
        {
            // A small kernel may lack some of these; what needs them will say so.
            complain(&format!("could not mount {target}: {error}"));
        }
    }
}

/// Whether a folder is on another device than its parent. Needs no `/proc`, which is the first to be mounted.
pub(crate) fn is_mount_point(path: &Path) -> bool {
    let device = |path: &Path| rustix::fs::stat(path).map(|stat| stat.st_dev).ok();
    path.parent().is_some_and(|parent| device(path) != device(parent))
}

/// Loads what the list names, one path on each line, in order.
fn load_modules(list: &Path) {
    for path in fs::read_to_string(list).unwrap_or_default().split_whitespace() {
        let loaded = File::open(path).and_then(|module| Ok(rustix::system::finit_module(module, c"", 0)?));
        if let Err(error) = loaded
            && error.kind() != io::ErrorKind::AlreadyExists
        {
            complain(&format!("could not load {path}: {error}"));
        }
    }
}

/// Calls until there is something, or the time is over. Devices appear in their own time, and there is nothing to wait
/// on in a kernel that has just booted; it takes milliseconds.
pub(crate) fn wait_for<T>(most: Duration, mut look: impl FnMut() -> Option<T>) -> Option<T> {
    let begin = Instant::now();
    loop {
        let found = look();
        if found.is_some() || begin.elapsed() > most {
            return found;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Ends the machine. The kernel is told to restart, which VMMs are told to take for the end.
pub fn power_off() -> ! {
    rustix::fs::sync();
    unmount_disks();
    let _ = rustix::system::reboot(RebootCommand::Restart);
    // Not permitted here: the caller of this program continues without it.
    std::process::exit(0)
}

/// Disks that are no longer in use are clean the next time.
fn unmount_disks() {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let disks = mounts.lines().filter(|line| line.starts_with("/dev/"));
    let mut paths: Vec<_> =
        disks.filter_map(|line| line.split(' ').nth(1)).filter(|path| *path != "/").collect();
    paths.reverse();
    for path in paths {
        let _ = unmount(path, UnmountFlags::empty());
    }
}

/// Says something on the console.
pub fn complain(what: &str) {
    let _ = writeln!(io::stderr(), "mvm-guest: {what}");
}
