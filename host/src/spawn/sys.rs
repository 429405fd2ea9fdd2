//! System calls that no safe wrapper has, each bare: all of them may be made between a fork and its `execve`.
#![allow(
    unsafe_code,
    reason = "mount attributes, Landlock, seccomp and execveat are to be had as bare calls only"
)]

use std::ffi::{CStr, CString, c_char, c_long};
use std::os::fd::{AsRawFd as _, BorrowedFd, RawFd};
use std::ptr;

use nix::libc;
use rustix::io::Errno;
use seccompiler::sock_filter;

pub(crate) type Sys<T> = Result<T, Errno>;

const LANDLOCK_CREATE_RULESET_VERSION: u32 = 1;
const LANDLOCK_RULE_PATH_BENEATH: u32 = 1;
const KEYCTL_JOIN_SESSION_KEYRING: u32 = 1;
const LAST_SIGNAL: i32 = 64;

fn answer(returned: c_long) -> Sys<c_long> {
    if returned >= 0 {
        return Ok(returned);
    }
    // The error number of this thread: reading it allocates nothing.
    let number = std::io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO);
    Err(Errno::from_raw_os_error(number))
}

/// A null-terminated array of strings, as `execve` wants it.
#[derive(Debug)]
pub(crate) struct Strings {
    /// What the pointers lead to.
    _texts: Vec<CString>,
    pointers: Vec<*const c_char>,
}

impl Strings {
    pub(crate) fn new(texts: Vec<CString>) -> Self {
        let pointers = texts.iter().map(|text| text.as_ptr()).chain([ptr::null()]).collect();
        Self { _texts: texts, pointers }
    }
}

/// Marks every descriptor from 3 on as not to be inherited.
pub(crate) fn inherit_nothing() -> Sys<()> {
    // SAFETY: changes flags of descriptors only.
    let done = unsafe { libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, libc::CLOSE_RANGE_CLOEXEC) };
    answer(done).map(|_| ())
}

/// Gives a descriptor a second number, in place of what had it.
pub(crate) fn duplicate(from: BorrowedFd<'_>, to: RawFd, inherited: bool) -> Sys<()> {
    let flags = if inherited { 0 } else { libc::O_CLOEXEC };
    // SAFETY: callers say which number is theirs to take; it is in the child of a fork, where no other code has any.
    let done = unsafe { libc::syscall(libc::SYS_dup3, from.as_raw_fd(), to, flags) };
    answer(done).map(|_| ())
}

/// Every signal as it is for a new program: not blocked, not ignored, not handled.
pub(crate) fn reset_signals() {
    for signal in 1..=LAST_SIGNAL {
        // SAFETY: only ever back to the default; the two that can't be changed refuse, and nothing is lost.
        unsafe { libc::signal(signal, libc::SIG_DFL) };
    }
    let mut none = std::mem::MaybeUninit::<libc::sigset_t>::uninit();
    // SAFETY: `none` is written by the first call and read by the second.
    unsafe {
        libc::sigemptyset(none.as_mut_ptr());
        libc::sigprocmask(libc::SIG_SETMASK, none.as_ptr(), ptr::null_mut());
    }
}

#[repr(C)]
struct MountAttributes {
    set: u64,
    clear: u64,
    propagation: u64,
    user_namespace: u64,
}

/// Restricts a mount (`MOUNT_ATTR_*`), and those below it if asked for. Nothing that is mounted elsewhere shows in it.
pub(crate) fn restrict_mount(mount: BorrowedFd<'_>, attributes: u64, recursive: bool) -> Sys<()> {
    let wanted =
        MountAttributes { set: attributes, clear: 0, propagation: libc::MS_PRIVATE, user_namespace: 0 };
    let flags = libc::AT_EMPTY_PATH | if recursive { libc::AT_RECURSIVE } else { 0 };
    // SAFETY: the path is empty and terminated, and `wanted` has the size that is said.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            mount.as_raw_fd(),
            c"".as_ptr(),
            flags,
            &raw const wanted,
            size_of::<MountAttributes>(),
        )
    };
    answer(done).map(|_| ())
}

/// Leaves the session's keys behind, for a keyring with nothing in it.
pub(crate) fn join_new_keyring() -> Sys<()> {
    // SAFETY: a null name asks for a new one.
    let done = unsafe {
        libc::syscall(libc::SYS_keyctl, KEYCTL_JOIN_SESSION_KEYRING, ptr::null::<c_char>(), 0, 0, 0)
    };
    answer(done).map(|_| ())
}

/// Which Landlock this kernel has switched on.
pub(crate) fn landlock_abi() -> Option<u32> {
    // SAFETY: with this flag nothing is read and nothing is made.
    let version = unsafe {
        libc::syscall(
            libc::SYS_landlock_create_ruleset,
            ptr::null::<libc::c_void>(),
            0_usize,
            LANDLOCK_CREATE_RULESET_VERSION,
        )
    };
    answer(version).ok().and_then(|version| u32::try_from(version).ok()).filter(|version| *version > 0)
}

#[repr(C, packed)]
struct PathBeneath {
    allowed: u64,
    parent: i32,
}

/// Lets a ruleset allow this below a directory.
pub(crate) fn landlock_allow(ruleset: BorrowedFd<'_>, directory: BorrowedFd<'_>, allowed: u64) -> Sys<()> {
    let rule = PathBeneath { allowed, parent: directory.as_raw_fd() };
    // SAFETY: `rule` is the structure that this kind of rule is.
    let done = unsafe {
        libc::syscall(
            libc::SYS_landlock_add_rule,
            ruleset.as_raw_fd(),
            LANDLOCK_RULE_PATH_BENEATH,
            &raw const rule,
            0_u32,
        )
    };
    answer(done).map(|_| ())
}

/// Holds this thread, and all that comes of it, to the ruleset.
pub(crate) fn landlock_restrict(ruleset: BorrowedFd<'_>) -> Sys<()> {
    // SAFETY: takes a descriptor and flags only.
    let done = unsafe { libc::syscall(libc::SYS_landlock_restrict_self, ruleset.as_raw_fd(), 0_u32) };
    answer(done).map(|_| ())
}

/// Whether the kernel can end a process for a call that a filter forbids.
pub(crate) fn can_filter() -> bool {
    let action = libc::SECCOMP_RET_KILL_PROCESS;
    // SAFETY: `action` is read only.
    let done =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_GET_ACTION_AVAIL, 0, &raw const action) };
    answer(done).is_ok()
}

#[repr(C)]
struct Program {
    length: u16,
    instructions: *const sock_filter,
}

/// Adds a filter on system calls to this thread. The strictest answer of all filters counts.
pub(crate) fn filter(instructions: &[sock_filter]) -> Sys<()> {
    let length = u16::try_from(instructions.len()).map_err(|_| Errno::INVAL)?;
    let program = Program { length, instructions: instructions.as_ptr() };
    // SAFETY: the kernel copies the program, whose length is as said.
    let done =
        unsafe { libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, &raw const program) };
    answer(done).map(|_| ())
}

/// Becomes the program of this descriptor. Returns only if that fails.
pub(crate) fn become_file(program: RawFd, args: &Strings, environment: &Strings) -> Errno {
    // SAFETY: the path is empty, and both arrays are terminated and lead to terminated strings that live on.
    let done = unsafe {
        libc::syscall(
            libc::SYS_execveat,
            program,
            c"".as_ptr(),
            args.pointers.as_ptr(),
            environment.pointers.as_ptr(),
            libc::AT_EMPTY_PATH,
        )
    };
    answer(done).err().unwrap_or(Errno::IO)
}

/// Becomes the program of this path, which may be a script. Returns only if that fails.
pub(crate) fn become_path(program: &CStr, args: &Strings, environment: &Strings) -> Errno {
    // SAFETY: as above, with a terminated path.
    let done = unsafe {
        libc::syscall(
            libc::SYS_execve,
            program.as_ptr(),
            args.pointers.as_ptr(),
            environment.pointers.as_ptr(),
        )
    };
    answer(done).err().unwrap_or(Errno::IO)
}

/// Ends a child that could not become what it should.
pub(crate) fn give_up() -> ! {
    // SAFETY: ends the process without running anything of its parent's.
    unsafe { libc::_exit(127) }
}
