//! A system call by its number, for what has no safe wrapper: a VMM that was taken over asks for no wrapper either.

#![allow(unsafe_code, reason = "what is tried here is forbidden, and has no safe wrapper")]

use std::io;

use nix::libc;

/// Makes a call with numbers and, where it needs one, the address of a string.
pub(crate) fn call(number: i64, args: [u64; 5]) -> io::Result<i64> {
    let [a, b, c, d, e] = args;
    // SAFETY: callers give numbers and addresses of terminated strings that live on; what is asked for is refused.
    let done = unsafe { libc::syscall(number, a, b, c, d, e) };
    if done >= 0 { Ok(done) } else { Err(io::Error::last_os_error()) }
}

/// Starts a process that ends at once.
pub(crate) fn fork() -> io::Result<()> {
    // SAFETY: the child makes no call but `_exit`.
    match unsafe { libc::fork() } {
        -1 => Err(io::Error::last_os_error()),
        // SAFETY: ends the child without running anything of its parent's.
        0 => unsafe { libc::_exit(0) },
        _ => Ok(()),
    }
}
