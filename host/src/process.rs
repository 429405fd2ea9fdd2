//! Which processes there are, which of them are VMMs of this data directory, and how one of them is ended or awaited.

use std::fs;
use std::io::{self, Read as _};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Duration;

use mvm_proto::InstanceId;
use rustix::io::Errno;
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::data_dir::DataDir;
use super::{EndSignal, ProcessIdentity, VmmProcess, jail};

/// What the kernel writes behind the name of a directory that was removed under a process.
const REMOVED: &[u8] = b" (deleted)";
/// More than the longest command line that a VMM is started with. A process can make its own as long as its memory.
const MAX_COMMAND_BYTES: u64 = 8 << 20;

/// Fields of a line of `/proc/PID/stat`, counted from one as its manual does.
const PARENT: usize = 4;
const USER_TIME: usize = 14;
const SYSTEM_TIME: usize = 15;
const START_TIME: usize = 22;

/// The second field is a name that may contain anything, in brackets; only what follows it is asked for.
fn field(stat: &str, number: usize) -> Option<u64> {
    stat.rsplit_once(')')?.1.split_ascii_whitespace().nth(number.checked_sub(3)?)?.parse().ok()
}

/// This boot of this machine.
pub fn boot_id() -> io::Result<&'static str> {
    static BOOT_ID: OnceLock<String> = OnceLock::new();
    if let Some(known) = BOOT_ID.get() {
        return Ok(known);
    }
    let text = fs::read_to_string("/proc/sys/kernel/random/boot_id")?;
    Ok(BOOT_ID.get_or_init(|| text.trim().to_owned()))
}

/// Whether exactly this process lives. One that has ended but was not waited for does not.
pub(super) fn lives(process: &ProcessIdentity) -> io::Result<bool> {
    if identify(process.pid)?.as_ref() != Some(process) {
        return Ok(false);
    }
    let stat = unless_scarce(fs::read_to_string(format!("/proc/{}/stat", process.pid)))?;
    let state = stat.as_deref().and_then(|stat| stat.rsplit_once(')')?.1.trim_start().chars().next());
    Ok(!matches!(state, None | Some('Z' | 'X')))
}

/// Who has this pid now, if anyone.
pub(super) fn identify(pid: u32) -> io::Result<Option<ProcessIdentity>> {
    let stat = match fs::read_to_string(format!("/proc/{pid}/stat")) {
        Ok(stat) => stat,
        Err(cause) if is_gone(&cause) => return Ok(None),
        Err(cause) => return Err(cause),
    };
    let start_time =
        field(&stat, START_TIME).ok_or_else(|| io::Error::other("/proc/PID/stat has no start time"))?;
    Ok(Some(ProcessIdentity { pid, start_time, boot_id: boot_id()?.to_owned() }))
}

/// Processor time that exactly this process has taken, all its threads together; none: it is gone.
pub(super) fn cpu_time(process: &ProcessIdentity) -> Option<Duration> {
    let stat = fs::read_to_string(format!("/proc/{}/stat", process.pid)).ok()?;
    let is_it = field(&stat, START_TIME)? == process.start_time && boot_id().ok()? == process.boot_id;
    let ticks = field(&stat, USER_TIME)?.saturating_add(field(&stat, SYSTEM_TIME)?);
    let per_second = nix::unistd::sysconf(nix::unistd::SysconfVar::CLK_TCK).ok()??;
    let per_second = u64::try_from(per_second).ok().filter(|ticks| *ticks > 0)?;
    is_it.then(|| Duration::from_millis(ticks.saturating_mul(1000) / per_second))
}

fn is_gone(cause: &io::Error) -> bool {
    cause.kind() == io::ErrorKind::NotFound || cause.raw_os_error() == Some(nix::errno::Errno::ESRCH as i32)
}

/// The VMMs whose working directory lies in a run directory below `<data>/vms`, and whose command line names that very
/// instance. One pass over `/proc` that reads a single link of everything else.
pub(super) fn scan(data: &DataDir) -> io::Result<Vec<VmmProcess>> {
    let vms_dir = real_path(&data.vms_path())?;
    let jails = jail::roots(data)?;
    let mut found = Vec::new();
    for entry in fs::read_dir("/proc")? {
        let entry = entry?;
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse().ok()) else { continue };
        let process = entry.path();
        // A process of someone else, a kernel thread or one that has just ended can't be read, and is not ours.
        let Some(cwd) = unless_scarce(fs::read_link(process.join("cwd")))? else { continue };
        let of_directory = instance_of(&cwd, &vms_dir).filter(|_| works_in(&process, &cwd, &vms_dir));
        let jailed = || jail::inmate(&process, &jails);
        let Some(instance) = of_directory.or_else(jailed) else { continue };
        let Some(command) = unless_scarce(command_of(&process))? else { continue };
        if !names(&command, &instance) && !has_own_root(&process) {
            continue;
        }
        if let Some(process) = identify(pid)? {
            found.push(VmmProcess { instance, process });
        }
    }
    found.sort_by(|a, b| (&a.instance, a.process.pid).cmp(&(&b.instance, b.process.pid)));
    without_children(&found)
}

/// Whether a process works in the very directory that its link names, or in one of ours that was removed under it. What
/// the link says is what the process's own mounts make of it, and anyone may have mounts of their own.
fn works_in(process: &Path, cwd: &Path, vms_dir: &Path) -> bool {
    let Ok(found) = fs::metadata(process.join("cwd/.")) else { return false };
    let is_it = |own: fs::Metadata| (own.dev(), own.ino()) == (found.dev(), found.ino());
    let is_removed =
        |vms: fs::Metadata| found.nlink() == 0 && (found.dev(), found.uid()) == (vms.dev(), vms.uid());
    fs::symlink_metadata(cwd).is_ok_and(is_it) || fs::metadata(vms_dir).is_ok_and(is_removed)
}

/// The beginning of a process's command line; its name is there. What is confined is known by its root as well.
fn command_of(process: &Path) -> io::Result<Vec<u8>> {
    let mut command = Vec::new();
    fs::File::open(process.join("cmdline"))?.take(MAX_COMMAND_BYTES).read_to_end(&mut command)?;
    Ok(command)
}

/// Nothing of what can't be read; but want of descriptors or memory says nothing about what there is.
fn unless_scarce<T>(read: io::Result<T>) -> io::Result<Option<T>> {
    let scarce = [Errno::MFILE, Errno::NFILE, Errno::NOMEM];
    match read {
        Ok(read) => Ok(Some(read)),
        Err(cause) if Errno::from_io_error(&cause).is_some_and(|errno| scarce.contains(&errno)) => Err(cause),
        Err(_) => Ok(None),
    }
}

/// What a VMM forks has its directory and, until it runs another program, its command line: it is no second VMM.
fn without_children(found: &[VmmProcess]) -> io::Result<Vec<VmmProcess>> {
    let doubled = |vmm: &VmmProcess| found.iter().filter(|other| other.instance == vmm.instance).count() > 1;
    let is_child = |vmm: &VmmProcess| -> io::Result<bool> {
        let stat = unless_scarce(fs::read_to_string(format!("/proc/{}/stat", vmm.process.pid)))?;
        // One that has ended meanwhile is no VMM either.
        let Some(stat) = stat else { return Ok(true) };
        let parent = field(&stat, PARENT);
        let is_parent = |other: &VmmProcess| parent == Some(other.process.pid.into());
        Ok(found.iter().any(|other| other.instance == vmm.instance && is_parent(other)))
    };
    let mut kept = Vec::new();
    for vmm in found {
        if !doubled(vmm) || !is_child(vmm)? {
            kept.push(vmm.clone());
        }
    }
    Ok(kept)
}

/// As the kernel names it in a process's links, even after it was removed under a process.
fn real_path(vms_dir: &Path) -> io::Result<PathBuf> {
    match (fs::canonicalize(vms_dir), vms_dir.parent(), vms_dir.file_name()) {
        (Ok(path), ..) => Ok(path),
        (Err(_), Some(parent), Some(name)) => match fs::canonicalize(parent) {
            Ok(parent) => Ok(parent.join(name)),
            Err(_) => std::path::absolute(vms_dir),
        },
        (Err(_), ..) => std::path::absolute(vms_dir),
    }
}

/// The instance in whose run directory `cwd` lies.
fn instance_of(cwd: &Path, vms_dir: &Path) -> Option<InstanceId> {
    let first = cwd.strip_prefix(vms_dir).ok()?.components().next()?.as_os_str().as_bytes();
    let name = first.strip_suffix(REMOVED).unwrap_or(first);
    std::str::from_utf8(name).ok()?.parse().ok()
}

/// Whether one argument is exactly the instance, or the name that a VMM is given for it. An operator's shell or pager
/// in the same directory has no such argument.
fn names(command: &[u8], instance: &InstanceId) -> bool {
    let id = instance.as_str().as_bytes();
    let bare =
        |arg| [b"mvm-".as_slice(), b"--id="].iter().find_map(|prefix| <[u8]>::strip_prefix(arg, *prefix));
    command.split(|byte| *byte == 0).any(|arg| bare(arg).unwrap_or(arg) == id)
}

/// Whether a process has another root than this one. A confined VMM has: it may write into its own command line what it
/// likes, but can't leave its root nor its working directory.
fn has_own_root(process: &Path) -> bool {
    let which = |path: &Path| fs::metadata(path).map(|meta| (meta.dev(), meta.ino()));
    match (which(&process.join("root/.")), which(Path::new("/"))) {
        (Ok(theirs), Ok(ours)) => theirs != ours,
        _ => false,
    }
}

/// A handle on exactly this process; none when it is gone, even if its pid is someone else's by now.
pub(super) fn open(process: &ProcessIdentity) -> io::Result<Option<OwnedFd>> {
    let Some(pid) = i32::try_from(process.pid).ok().and_then(Pid::from_raw) else { return Ok(None) };
    let handle = match pidfd_open(pid, PidfdFlags::NONBLOCK) {
        Ok(handle) => handle,
        Err(Errno::SRCH | Errno::INVAL) => return Ok(None),
        Err(cause) => return Err(cause.into()),
    };
    // The handle refers to the process that had the pid when it was opened; only now is it certain which one that is.
    Ok((identify(process.pid)?.as_ref() == Some(process)).then_some(handle))
}

/// Signals exactly this process. Whether it was there.
pub(super) fn signal(process: &ProcessIdentity, signal: EndSignal) -> io::Result<bool> {
    let Some(handle) = open(process)? else { return Ok(false) };
    let signal = match signal {
        EndSignal::Terminate => Signal::TERM,
        EndSignal::Kill => Signal::KILL,
    };
    match pidfd_send_signal(handle, signal) {
        Ok(()) => Ok(true),
        Err(Errno::SRCH) => Ok(false),
        Err(cause) => Err(cause.into()),
    }
}

/// Waits until the process of this handle has ended.
#[allow(
    deprecated,
    reason = "what replaces it is unsafe for descriptors that are not owned, and this one is"
)]
pub(super) async fn ended(handle: OwnedFd) -> io::Result<()> {
    AsyncFd::with_interest(handle, Interest::READABLE)?.readable().await?.retain_ready();
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn of_a_command_line_without_end_only_the_beginning_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let endless = fs::File::create(dir.path().join("cmdline")).unwrap();
        endless.set_len(64 * MAX_COMMAND_BYTES).unwrap();
        assert_eq!(command_of(dir.path()).unwrap().len() as u64, MAX_COMMAND_BYTES);
    }

    #[test]
    fn a_process_that_mounts_itself_a_run_directory_is_no_vmm() {
        use std::process::{Command, Stdio};

        // Its own mounts need root, or a user namespace, which not every machine lets everyone have.
        if !mvm_needs::can_run(&[mvm_needs::Need::Root, mvm_needs::Need::Mounts]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (data, id) = (DataDir::named(dir.path()), "i-0000002a");
        fs::create_dir_all(dir.path().join("vms").join(id)).unwrap();
        let waits = r#"cd "$1/vms/$0" && echo in place && exec sh -c "read x" "$0""#;
        let mounts = format!(r#"mount -t tmpfs none "$1" && mkdir -p "$1/vms/$0" && {waits}"#);
        let found_with = |program: &str, script: &str| {
            let mut command = Command::new(program);
            if program == "unshare" {
                command.args(["--mount", "sh"]);
            }
            command.args(["-c", script, id]).arg(dir.path());
            let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
            let mut said = [0; 9];
            child.stdout.take().unwrap().read_exact(&mut said).unwrap();
            let link = fs::read_link(format!("/proc/{}/cwd", child.id())).unwrap();
            assert_eq!(link, dir.path().canonicalize().unwrap().join("vms").join(id));
            let found = scan(&data).unwrap();
            child.kill().unwrap();
            child.wait().unwrap();
            found.len()
        };
        assert_eq!(found_with("sh", waits), 1);
        assert_eq!(found_with("unshare", &mounts), 0);
    }

    #[test]
    fn the_start_time_is_found_behind_any_name() {
        let line = format!("42 (a) b (c)) S {} 777 0", vec!["1"; 18].join(" "));
        assert_eq!((field(&line, START_TIME), field(&line, PARENT)), (Some(777), Some(1)));
        assert_eq!(field("42 (cut off", START_TIME), None);
    }

    #[test]
    fn only_a_command_that_names_the_instance_in_its_directory_is_its_vmm() {
        let id: InstanceId = "i-0000002a".parse().unwrap();
        let vms = Path::new("/data/vms");
        assert_eq!(instance_of(Path::new("/data/vms/i-0000002a/jail"), vms), Some(id.clone()));
        assert_eq!(instance_of(Path::new("/data/vms/i-0000002a (deleted)"), vms), Some(id.clone()));
        assert_eq!(instance_of(Path::new("/data/vms"), vms), None);
        assert_eq!(instance_of(Path::new("/data/vms/lost+found"), vms), None);
        assert!(names(b"qemu\0-name\0mvm-i-0000002a\0", &id));
        assert!(names(b"firecracker\0--id\0i-0000002a\0", &id));
        assert!(!names(b"less\0/data/vms/i-0000002a/console.log\0", &id));
    }
}
