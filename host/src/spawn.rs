//! Starts a process that outlives this one: confined or not, in a control group or not, with given files and no others.
//!
//! All that can be made beforehand is made here, in the parent; the child makes bare system calls on it and becomes the
//! program. If a step fails, the child says which through a pipe that closes by itself once the program runs, so that
//! the caller gets the error and there is no process.
#![allow(
    unsafe_code,
    reason = "the child of a fork that is not std's has to be known to keep to system calls"
)]

pub(crate) mod failure;
pub(crate) mod sys;
#[cfg(test)]
#[path = "spawn_tests.rs"]
mod tests;

use std::ffi::{CString, OsStr, OsString};
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use nix::libc;
use rustix::fs::Mode;
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{WaitOptions, waitpid};

use super::HostError;
use super::files::failed;
use super::images::Image;
use super::sandbox::{self, Capabilities, Confinement, Holes, Prepared, Seen, Weaker};
use super::spawn_into::{Child, Forked, fork_into};
use failure::{Failure, Step};
use sys::Strings;

/// What to start, and with what.
#[derive(Debug)]
pub(crate) struct Launch<'a> {
    pub(crate) program: &'a Path,
    pub(crate) args: &'a [String],
    /// Its working directory.
    pub(crate) dir: &'a Path,
    /// Takes its output; owned by the user that it runs as.
    pub(crate) log: File,
    pub(crate) confine: Option<&'a Confinement>,
    /// The confinement's images, in its order.
    pub(crate) images: Vec<Image>,
    /// Open files that it gets, each under a number from 3 on.
    pub(crate) inherit: Vec<(OwnedFd, RawFd)>,
    /// A directory of a cgroup v2 file system, in which it is born.
    pub(crate) cgroup: Option<BorrowedFd<'a>>,
}

/// What was started.
#[derive(Debug)]
pub(crate) struct Launched {
    pub(crate) child: Child,
    /// What it was started without.
    pub(crate) weaker: Vec<Weaker>,
}

/// All that the child works with. Nothing in it is changed after the fork.
struct Ready {
    input: OwnedFd,
    log: OwnedFd,
    tell: OwnedFd,
    inherit: Vec<(OwnedFd, RawFd)>,
    dir: CString,
    program: CString,
    args: Strings,
    environment: Strings,
    confinement: Option<Prepared>,
}

/// What this machine can do, asked once.
fn machine() -> &'static Capabilities {
    static MACHINE: OnceLock<Capabilities> = OnceLock::new();
    MACHINE.get_or_init(sandbox::probe)
}

/// Holes are fake beside a balloon only: there the disks offer none (the agent's `driver/qemu/args.rs`). Others are
/// told the truth, because a block that is wrongly believed to be empty would be lost data.
fn holes(args: &[String]) -> Holes {
    let balloon = args.iter().any(|arg| arg.starts_with("virtio-balloon-device"));
    if balloon { Holes::Pretended } else { Holes::Made }
}

/// Whether a guest of this VMM could, by giving memory back, make a hole in a file that others have in memory.
fn gives_back_shared_memory(args: &[String]) -> bool {
    // Private is what QEMU makes of a file unless it is told otherwise.
    let maps = |arg: &String| {
        arg.starts_with("memory-backend-file,") && !arg.split(',').any(|part| part == "share=on")
    };
    holes(args) == Holes::Pretended && args.iter().any(maps)
}

/// Starts it in its own session, with nothing of this process but `PATH`: no terminal, no input, no open files.
pub(crate) fn launch(wanted: &Launch<'_>) -> Result<Launched, HostError> {
    let starting = || failed("start", wanted.program);
    let program = resolve(wanted.program)?;
    let (told, near) = pipe_with(PipeFlags::CLOEXEC).map_err(|errno| starting()(errno.into()))?;
    // What the child uses has numbers above those that it gives away: none is overwritten before its turn.
    let highest =
        wanted.inherit.iter().map(|(_, number)| *number).max().unwrap_or(0).max(libc::STDERR_FILENO);
    if wanted.inherit.iter().any(|(_, number)| *number <= libc::STDERR_FILENO) {
        return Err(HostError::Refused("files are inherited from number 3 on".to_owned()));
    }
    let base = highest.saturating_add(1);
    let lift = |file: BorrowedFd<'_>| {
        rustix::io::fcntl_dupfd_cloexec(file, base).map_err(|errno| starting()(errno.into()))
    };
    let tell = lift(near.as_fd())?;
    // As long as this process can write into the pipe, it never closes.
    drop(near);
    let confinement = match wanted.confine {
        None => None,
        Some(confine) => {
            let taken = tell.as_raw_fd();
            let (holes, images) = (holes(wanted.args), wanted.images.as_slice());
            let seen = Seen { program: &program, run_dir: wanted.dir, images, holes };
            Some(sandbox::prepare(confine, &seen, machine(), base, taken)?)
        }
    };
    let filtered = confinement.as_ref().is_some_and(|prepared| prepared.measures.filter);
    if !filtered && gives_back_shared_memory(wanted.args) {
        let why =
            "a guest that shares its template's memory gives none back without a filter on system calls";
        return Err(HostError::Refused(why.to_owned()));
    }
    let program = confinement.as_ref().map_or(program, |prepared| prepared.program.clone());
    let null = File::open("/dev/null").map_err(failed("open", Path::new("/dev/null")))?;
    if let Some(prepared) = &confinement {
        give_log(&wanted.log, prepared)
            .map_err(|errno| failed("give away the log in", wanted.dir)(errno.into()))?;
    }
    let inherit: Result<Vec<_>, HostError> =
        wanted.inherit.iter().map(|(file, number)| Ok((lift(file.as_fd())?, *number))).collect();
    let path = std::env::var_os("PATH").map(|path| {
        let mut pair = OsString::from("PATH=");
        pair.push(path);
        pair
    });
    let args = [program.as_os_str()].into_iter().chain(wanted.args.iter().map(OsStr::new));
    let ready = Ready {
        input: lift(null.as_fd())?,
        log: lift(wanted.log.as_fd())?,
        tell,
        inherit: inherit?,
        dir: terminated(wanted.dir.as_os_str())?,
        program: terminated(program.as_os_str())?,
        args: Strings::new(args.map(terminated).collect::<Result<_, _>>()?),
        environment: Strings::new(path.iter().map(|path| terminated(path)).collect::<Result<_, _>>()?),
        confinement,
    };
    let namespaces = ready.confinement.as_ref().map_or(0, |prepared| prepared.measures.clone_flags());
    // SAFETY: in the child `become_program` is all that happens, and it keeps to system calls on what is ready.
    let child = match unsafe { fork_into(wanted.cgroup, namespaces) } {
        Ok(Forked::Parent(child)) => child,
        Ok(Forked::Child) => {
            let failure = become_program(&ready);
            // Without a receiver the result is dropped.
            let _ = rustix::io::write(&ready.tell, &failure.to_bytes());
            sys::give_up()
        }
        Err(cause) => return Err(starting()(cause)),
    };
    let Ready { tell, confinement, .. } = ready;
    drop(tell);
    match heard(told) {
        None => {
            let weaker = confinement.map(|prepared| prepared.measures.weaker).unwrap_or_default();
            Ok(Launched { child, weaker })
        }
        Some(failure) => {
            // It ends by itself; what it has to say it has said.
            let _ = waitpid(Some(child.pid), WaitOptions::empty());
            Err(explain(failure, wanted.program, confinement.as_ref()))
        }
    }
}

/// In the child: bare system calls only. Returns only if a step failed.
fn become_program(ready: &Ready) -> Failure {
    match prepare_child(ready) {
        Err(failure) => failure,
        Ok(()) => {
            let errno = match &ready.confinement {
                Some(prepared) => sys::become_file(prepared.launch(), &ready.args, &ready.environment),
                None => sys::become_path(&ready.program, &ready.args, &ready.environment),
            };
            Failure::new(Step::Execute, errno)
        }
    }
}

fn prepare_child(ready: &Ready) -> Result<(), Failure> {
    let at = |step| move |errno| Failure::new(step, errno);
    sys::reset_signals();
    rustix::process::setsid().map_err(at(Step::Session))?;
    let streams = [
        (&ready.input, libc::STDIN_FILENO),
        (&ready.log, libc::STDOUT_FILENO),
        (&ready.log, libc::STDERR_FILENO),
    ];
    for (file, number) in streams {
        sys::duplicate(file.as_fd(), number, true).map_err(at(Step::Descriptors))?;
    }
    // Everything that this process opened is close-on-exec already; what it was itself started with may not be.
    sys::inherit_nothing().map_err(at(Step::Descriptors))?;
    for (file, number) in &ready.inherit {
        sys::duplicate(file.as_fd(), *number, true).map_err(at(Step::Descriptors))?;
    }
    match &ready.confinement {
        Some(prepared) => sandbox::enter::enter(prepared),
        None => rustix::process::chdir(ready.dir.as_c_str()).map_err(at(Step::WorkingDirectory)),
    }
}

/// What the child said before it gave up; nothing from one that became its program.
fn heard(told: OwnedFd) -> Option<Failure> {
    let mut bytes = [0; Failure::BYTES];
    File::from(told).read_exact(&mut bytes).ok()?;
    Failure::from_bytes(bytes)
}

fn explain(failure: Failure, program: &Path, confinement: Option<&Prepared>) -> HostError {
    let cause = failure.cause();
    match (failure.step, confinement) {
        (Step::Execute, _) if cause.kind() == io::ErrorKind::NotFound => {
            HostError::ProgramMissing { program: program.to_owned() }
        }
        (Step::Execute, _) | (_, None) => failed("start", program)(cause),
        (step, Some(prepared)) => {
            let item = prepared.item(failure.item).map(|item| format!(" {item}")).unwrap_or_default();
            HostError::Io { attempt: format!("confine the VMM: {}{item}", step.words()), cause }
        }
    }
}

/// A bare name is looked for in `PATH`, as a shell does.
fn resolve(program: &Path) -> Result<PathBuf, HostError> {
    let missing = || HostError::ProgramMissing { program: program.to_owned() };
    if program.components().count() > 1 || program.is_absolute() {
        let path = std::path::absolute(program).map_err(failed("find", program))?;
        return if path.exists() { Ok(path) } else { Err(missing()) };
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let executable = |file: &PathBuf| {
        fs::metadata(file).is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path).map(|dir| dir.join(program)).find(executable).ok_or_else(missing)
}

/// Appends, never through a link and never to anything but a file: the directory may be the VMM's own.
/// The log is the VMM's to append to, and its group's to read.
fn give_log(log: &File, prepared: &Prepared) -> rustix::io::Result<()> {
    rustix::fs::fchmod(log, Mode::from_raw_mode(prepared.file_mode()))?;
    match prepared.owner() {
        Some((uid, gid)) => rustix::fs::fchown(log, Some(uid), Some(gid)),
        None => Ok(()),
    }
}

fn terminated(text: &OsStr) -> Result<CString, HostError> {
    CString::new(text.as_bytes())
        .map_err(|_| HostError::Refused(format!("{} has a null in it", text.display())))
}
