//! Starts a process directly inside its cgroup.
//!
//! A process that is moved into a cgroup after its start has already run, forked and used memory outside of its limits;
//! `clone3` with `CLONE_INTO_CGROUP` avoids that. Where the kernel or a seccomp filter refuses that call, the child moves
//! itself before it executes its program, and the parent waits for that, so the guarantee to the caller is the same.
#![allow(
    unsafe_code,
    reason = "neither std nor rustix nor nix starts a process inside a control group: clone3 has to be called bare"
)]

use std::ffi::{CString, OsStr};
use std::io::{self, Read as _};
use std::mem::{MaybeUninit, size_of};
use std::os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd};
use std::os::unix::ffi::OsStrExt as _;
use std::path::Path;
use std::{fs, ptr};

use nix::libc;
use rustix::fs::{Mode, OFlags, openat};
use rustix::pipe::{PipeFlags, pipe_with};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

/// All handlers as they were before any was set: none of this process's may run in the child.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
/// The C library's constant is cut to 32 bits.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
const CLONE_PIDFD: u64 = 0x1000;

/// What a caller may add: namespaces of its own. Anything that shares memory or files with the child is refused.
const NAMESPACES: u64 = (libc::CLONE_NEWNS
    | libc::CLONE_NEWCGROUP
    | libc::CLONE_NEWUTS
    | libc::CLONE_NEWIPC
    | libc::CLONE_NEWUSER
    | libc::CLONE_NEWPID
    | libc::CLONE_NEWNET) as u64;

/// The kernel's structure of this name, as far as the field `cgroup`.
#[repr(C, align(8))]
#[derive(Default)]
struct CloneArgs {
    flags: u64,
    pidfd: u64,
    child_tid: u64,
    parent_tid: u64,
    exit_signal: u64,
    stack: u64,
    stack_size: u64,
    tls: u64,
    set_tid: u64,
    set_tid_size: u64,
    cgroup: u64,
}

/// A child and the handle that means it and no later process with its pid.
#[derive(Debug)]
pub struct Child {
    pub pid: Pid,
    pub pidfd: OwnedFd,
}

/// On which side of the fork the caller finds itself.
#[derive(Debug)]
pub(crate) enum Forked {
    Parent(Child),
    Child,
}

/// Forks; the child is in `cgroup` (a directory of a cgroup v2 file system, `O_PATH` suffices) before this returns in
/// it, with every signal handler at its default. An error means that there is no child.
///
/// `extra_clone_flags` may hold `CLONE_NEW*` flags and nothing else. The child's end is told by `SIGCHLD`; the parent
/// must wait for it as for any child.
///
/// # Safety
///
/// In [`Forked::Child`] only the forking thread exists, and whatever lock another thread held stays held for ever,
/// the allocator's included. Until `execve` or `_exit` the child may make bare system calls only (rustix's, or what
/// signal-safety(7) lists): no allocation, no printing, no `std` beyond plain memory, and no return to a caller that
/// does not know this. All that `execve` needs must be made before the fork.
pub(crate) unsafe fn fork_into(cgroup: Option<BorrowedFd<'_>>, extra_clone_flags: u64) -> io::Result<Forked> {
    if extra_clone_flags & !NAMESPACES != 0 {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "only new namespaces can be asked for"));
    }
    // SAFETY: the caller keeps to this function's contract, which is the same for both.
    unsafe {
        match clone_into(cgroup, extra_clone_flags) {
            Err(cause) if is_refused(&cause) => fork_and_enter(cgroup, extra_clone_flags),
            answer => answer,
        }
    }
}

/// Whether a child can be had in these namespaces: one is made, and ends at once.
pub(crate) fn is_possible(namespaces: u64) -> bool {
    // SAFETY: the child makes no call but `_exit`.
    match unsafe { fork_into(None, namespaces) } {
        Ok(Forked::Parent(child)) => {
            // It has nothing to tell but that it was there.
            let _ = rustix::process::waitpid(Some(child.pid), rustix::process::WaitOptions::empty());
            true
        }
        // SAFETY: ends the child without running anything of its parent's.
        Ok(Forked::Child) => unsafe { libc::_exit(0) },
        Err(_) => false,
    }
}

/// Whether a kernel before 5.7, or a filter on system calls, does not let `clone3` do this.
fn is_refused(cause: &io::Error) -> bool {
    matches!(cause.raw_os_error(), Some(libc::ENOSYS | libc::E2BIG | libc::EINVAL | libc::EPERM))
}

/// # Safety
///
/// As for [`fork_into`].
unsafe fn clone_into(cgroup: Option<BorrowedFd<'_>>, extra_clone_flags: u64) -> io::Result<Forked> {
    let mut pidfd: RawFd = -1;
    let mut args = CloneArgs {
        flags: CLONE_PIDFD | CLONE_CLEAR_SIGHAND | extra_clone_flags,
        pidfd: ptr::from_mut(&mut pidfd) as u64,
        exit_signal: libc::SIGCHLD as u64,
        ..CloneArgs::default()
    };
    if let Some(cgroup) = cgroup {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = cgroup.as_raw_fd() as u64;
    }
    // SAFETY: without CLONE_VM and with no stack given this is a fork; `args` and `pidfd` outlive the call.
    let pid = unsafe { libc::syscall(libc::SYS_clone3, ptr::from_mut(&mut args), size_of::<CloneArgs>()) };
    if pid == 0 {
        return Ok(Forked::Child);
    }
    let pid = child_pid(pid)?;
    // SAFETY: the kernel just made this descriptor for us, close-on-exec, and no other code has it.
    Ok(Forked::Parent(Child { pid, pidfd: unsafe { OwnedFd::from_raw_fd(pidfd) } }))
}

/// What a fork that returned this to the parent made; must be asked before any other call.
fn child_pid(returned: libc::c_long) -> io::Result<Pid> {
    let positive = i32::try_from(returned).ok().filter(|pid| *pid > 0);
    positive.and_then(Pid::from_raw).ok_or_else(io::Error::last_os_error)
}

/// The way for old kernels and strict filters: the child enters the group itself and tells how that went.
///
/// # Safety
///
/// As for [`fork_into`].
unsafe fn fork_and_enter(cgroup: Option<BorrowedFd<'_>>, extra_clone_flags: u64) -> io::Result<Forked> {
    let (told, tell) = pipe_with(PipeFlags::CLOEXEC)?;
    let masked = MaskedSignals::all()?;
    let none = ptr::null_mut::<libc::c_void>();
    let flags = extra_clone_flags | libc::SIGCHLD as u64;
    // SAFETY: with no stack given and no memory shared this is a fork, as `libc::fork` is, with namespaces.
    let pid = unsafe { libc::syscall(libc::SYS_clone, flags, none, none, none, none) };
    if pid == 0 {
        default_handlers();
        drop(masked);
        let entered = cgroup.map_or(Ok(()), enter);
        let code = entered.err().map_or(0, rustix::io::Errno::raw_os_error);
        let heard = rustix::io::write(&tell, &code.to_ne_bytes());
        if code != 0 || heard.is_err() {
            // SAFETY: ends the child at once, without running anything of its parent's.
            unsafe { libc::_exit(127) };
        }
        return Ok(Forked::Child);
    }
    let pid = child_pid(pid);
    drop((masked, tell));
    let pid = pid?;
    let child = pidfd_open(pid, PidfdFlags::empty()).map_err(io::Error::from);
    let mut code = [0; 4];
    let answer = fs::File::from(told).read_exact(&mut code).and_then(|()| match i32::from_ne_bytes(code) {
        0 => child,
        code => Err(io::Error::from_raw_os_error(code)),
    });
    match answer {
        Ok(pidfd) => Ok(Forked::Parent(Child { pid, pidfd })),
        Err(cause) => {
            // It may be past the telling when only its handle could not be had; nothing of it may stay.
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            let _ = rustix::process::waitpid(Some(pid), rustix::process::WaitOptions::empty());
            Err(cause)
        }
    }
}

/// Moves the calling process into a group: `0` names the writer, in whatever pid namespace it is.
fn enter(cgroup: BorrowedFd<'_>) -> rustix::io::Result<()> {
    let procs = openat(cgroup, c"cgroup.procs", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(&procs, b"0").map(|_| ())
}

/// Signals held back in this thread: between the fork and [`default_handlers`] a handler of the parent's would run
/// in the child, on pipes that both share.
struct MaskedSignals(libc::sigset_t);

impl MaskedSignals {
    fn all() -> io::Result<Self> {
        let (mut every, mut before) = (MaybeUninit::uninit(), MaybeUninit::uninit());
        // SAFETY: both sets are valid for writing, and each is filled before it is read.
        let code = unsafe {
            libc::sigfillset(every.as_mut_ptr());
            libc::pthread_sigmask(libc::SIG_SETMASK, every.as_ptr(), before.as_mut_ptr())
        };
        match code {
            // SAFETY: the call that fills it succeeded.
            0 => Ok(Self(unsafe { before.assume_init() })),
            code => Err(io::Error::from_raw_os_error(code)),
        }
    }
}

impl Drop for MaskedSignals {
    fn drop(&mut self) {
        // SAFETY: the set is the one that the kernel gave; nothing is written to.
        unsafe { libc::pthread_sigmask(libc::SIG_SETMASK, &raw const self.0, ptr::null_mut()) };
    }
}

/// What `CLONE_CLEAR_SIGHAND` does: every handler at its default, what was ignored stays ignored.
fn default_handlers() {
    for signal in 1..=libc::SIGRTMAX() {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: async-signal-safe calls on a structure of our own; all zeroes is a valid one.
        unsafe {
            if libc::sigaction(signal, ptr::null(), action.as_mut_ptr()) == 0
                && (*action.as_ptr()).sa_sigaction != libc::SIG_IGN
            {
                (*action.as_mut_ptr()).sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, action.as_ptr(), ptr::null_mut());
            }
        }
    }
}

/// Starts `program` inside `cgroup` with these arguments (the first is its own name, as always), an empty environment
/// and this process's standard streams. An error of `execve` is this function's error.
pub fn spawn_into<A: AsRef<OsStr>>(
    cgroup: Option<BorrowedFd<'_>>,
    program: &Path,
    args: &[A],
) -> io::Result<Child> {
    let program = CString::new(program.as_os_str().as_bytes())?;
    let args: Vec<CString> =
        args.iter().map(|arg| CString::new(arg.as_ref().as_bytes())).collect::<Result<_, _>>()?;
    let mut arg_pointers: Vec<_> = args.iter().map(|arg| arg.as_ptr()).collect();
    arg_pointers.push(ptr::null());
    let no_environment = [ptr::null()];
    let (told, tell) = pipe_with(PipeFlags::CLOEXEC)?;
    // SAFETY: the child calls execve, write and _exit only, on what was made before the fork.
    let child = match unsafe { fork_into(cgroup, 0) }? {
        Forked::Parent(child) => child,
        Forked::Child => unsafe {
            libc::execve(program.as_ptr(), arg_pointers.as_ptr(), no_environment.as_ptr());
            let code = (*libc::__errno_location()).to_ne_bytes();
            let _ = rustix::io::write(tell.as_fd(), &code);
            libc::_exit(127)
        },
    };
    drop(tell);
    let mut code = Vec::new();
    fs::File::from(told).read_to_end(&mut code)?;
    // Nothing is written, and the pipe is closed, when the program runs.
    let Ok(code) = <[u8; 4]>::try_from(code.as_slice()) else { return Ok(child) };
    let _ = rustix::process::waitpid(Some(child.pid), rustix::process::WaitOptions::empty());
    Err(io::Error::from_raw_os_error(i32::from_ne_bytes(code)))
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd as _;

    use rustix::process::{WaitId, WaitIdOptions, waitid};

    use super::*;

    fn exit_code(child: &Child) -> Option<i32> {
        let ended = waitid(WaitId::PidFd(child.pidfd.as_fd()), WaitIdOptions::EXITED).unwrap();
        ended.and_then(|status| status.exit_status())
    }

    #[test]
    fn a_program_runs_with_its_arguments_and_a_handle_that_tells_its_end() {
        let child = spawn_into(None, Path::new("/bin/sh"), &["sh", "-c", "exit $1", "sh", "41"]).unwrap();
        assert_eq!(exit_code(&child), Some(41));
    }

    #[test]
    fn a_program_that_can_not_be_run_is_an_error_and_leaves_no_child() {
        let cause = spawn_into(None, Path::new("/no/such/program"), &["x"]).unwrap_err();
        assert_eq!(cause.kind(), io::ErrorKind::NotFound);
    }

    #[test]
    fn what_shares_memory_or_files_with_its_child_is_refused() {
        for flag in [libc::CLONE_VM, libc::CLONE_FILES, libc::CLONE_THREAD, libc::CLONE_VFORK] {
            // SAFETY: it is refused before anything is forked.
            let cause = unsafe { fork_into(None, flag as u64) }.unwrap_err();
            assert_eq!(cause.kind(), io::ErrorKind::InvalidInput);
        }
    }

    #[test]
    fn a_group_that_is_none_is_an_error() {
        let not_a_group = fs::File::open("/proc/self").unwrap();
        let cause = spawn_into(Some(not_a_group.as_fd()), Path::new("/bin/true"), &["true"]).unwrap_err();
        assert_eq!(cause.raw_os_error(), Some(libc::EBADF));
    }

    #[test]
    fn without_clone3_the_child_enters_its_group_before_it_does_anything_else() {
        let group = tempfile::tempdir().unwrap();
        fs::write(group.path().join("cgroup.procs"), "").unwrap();
        let directory = fs::File::open(group.path()).unwrap();
        // SAFETY: the child does nothing but end.
        let child = match unsafe { fork_and_enter(Some(directory.as_fd()), 0) }.unwrap() {
            Forked::Parent(child) => child,
            Forked::Child => unsafe { libc::_exit(3) },
        };
        // Before the parent went on, that is: nothing waits here.
        assert_eq!(fs::read_to_string(group.path().join("cgroup.procs")).unwrap(), "0");
        assert_eq!(exit_code(&child), Some(3));
    }

    #[test]
    fn without_clone3_a_group_that_can_not_be_entered_is_an_error_and_leaves_no_child() {
        let group = tempfile::tempdir().unwrap();
        let directory = fs::File::open(group.path()).unwrap();
        // SAFETY: there is no child: it ends before it would return.
        let cause = unsafe { fork_and_enter(Some(directory.as_fd()), 0) }.unwrap_err();
        assert_eq!(cause.kind(), io::ErrorKind::NotFound);
    }
}
