//! Starts a process that outlives this one.
#![allow(unsafe_code, reason = "std can start a process in a session of its own only through `pre_exec`")]

use std::fs::OpenOptions;
use std::io;
use std::os::unix::fs::OpenOptionsExt as _;
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::libc;

/// Runs `program` in `dir`, in its own session, with nothing of this process but its environment's `PATH`: no
/// terminal, no input and no open files. What it prints is appended to `log`.
pub(super) fn detached(program: &Path, args: &[String], dir: &Path, log: &str) -> io::Result<Child> {
    let log = OpenOptions::new().create(true).append(true).mode(0o600).open(dir.join(log))?;
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).env_clear().stdin(Stdio::null()).stdout(log.try_clone()?).stderr(log);
    if let Some(path) = std::env::var_os("PATH") {
        command.env("PATH", path);
    }
    // SAFETY: between fork and exec only async-signal-safe calls are allowed; these are two bare system calls.
    unsafe {
        command.pre_exec(|| {
            rustix::process::setsid()?;
            // Everything that this process opened is close-on-exec already; what it was itself started with may not
            // be. An old kernel without this call loses only that care.
            let flags = libc::CLOSE_RANGE_CLOEXEC;
            libc::syscall(libc::SYS_close_range, 3_u32, u32::MAX, flags);
            Ok(())
        });
    }
    command.spawn()
}
