//! The guest: the real guest program, as a child process in a folder that stands for its memory.

use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Child, Command, ExitCode, ExitStatus};

use mvm_guest::{Guest, Settings, channel};
use nix::mount::{MsFlags, mount};
use nix::sched::{CloneFlags, unshare};
use nix::sys::prctl::set_pdeathsig;
use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::arguments::{BE_THE_GUEST, NO_GUEST};
use super::machine::Machine;
use super::say;

/// In the guest's folder; a relative name, for a socket's has to be short.
pub const SOCKET: &str = "guest.sock";

/// Starts the guest and stays until it ended.
pub fn run_until_its_end(machine: &Machine, folder: &Path) {
    let mut child = match start(folder) {
        Ok(child) => child,
        Err(cause) => {
            say(&format!("Kernel panic - not syncing: no guest: {cause}"));
            return;
        }
    };
    machine.guest_started(child.id());
    // A guest that hears Ctrl+Alt+Del goes down in order.
    let in_order = |status: ExitStatus| status.success() || status.signal() == Some(Signal::SIGTERM as i32);
    let clean = child.wait().is_ok_and(in_order);
    if !clean {
        say("[    1.0] Kernel panic - not syncing: Attempted to kill init!");
    }
    machine.log("Vmm is stopping.");
    machine.flush_metrics();
}

fn start(folder: &Path) -> std::io::Result<Child> {
    // In a jail there is no /proc to find oneself by: the name one was started with is as good.
    let program = std::env::current_exe()
        .or_else(|_| std::fs::canonicalize(std::env::args().next().unwrap_or_default()))?;
    say("[    0.0] Linux version 0.0.0 (stand-in)");
    let parent = std::process::id().to_string();
    let (mut ours, theirs) = UnixStream::pair()?;
    let mut command = Command::new(program);
    command.args([BE_THE_GUEST, &parent]).current_dir(folder).stdin(OwnedFd::from(theirs));
    let child = command.spawn()?;
    drop(command);
    // A guest that is stopped before it can follow its machine would stay behind; one that ended closes its end.
    let _ = ours.read(&mut [0]);
    Ok(child)
}

/// What the child process does. `parent`: the machine, which may be gone before this process can ask who it was.
pub fn be_the_guest(parent: i32) -> ExitCode {
    // Whatever ends the machine ends its guest, even one that is paused.
    if set_pdeathsig(Signal::SIGKILL).is_err() || nix::unistd::getppid().as_raw() != parent {
        return ExitCode::FAILURE;
    }
    // The machine waits for this word; one that has ended does not need it.
    let _ = nix::unistd::write(std::io::stdin(), b"!");
    if std::env::var("STAND_IN_FAULT").is_ok_and(|fault| fault == NO_GUEST) {
        loop {
            std::thread::park();
        }
    }
    own_tmp();
    // A folder that was restored may have the socket of a guest that is gone.
    let _ = std::fs::remove_file(SOCKET);
    let Ok(guest) = Guest::new(Settings::borrowed(Path::new("."))) else { return ExitCode::FAILURE };
    let serving = guest.clone();
    std::thread::spawn(move || {
        if let Err(cause) = channel::socket::serve_unix(Path::new(SOCKET), &serving) {
            say(&format!("the guest has no channel: {cause}"));
            std::process::exit(1);
        }
    });
    guest.wait_until_ended();
    ExitCode::SUCCESS
}

/// Gives the guest a `/tmp` of its own inside its folder, so that what it keeps there is in its memory. Where that is
/// not allowed the host's serves, which outlives everything.
fn own_tmp() {
    if std::fs::create_dir_all("tmp").is_err() {
        return;
    }
    if !Path::new("/tmp").exists() {
        let here = std::env::current_dir().unwrap_or_default();
        let _ = std::os::unix::fs::symlink(here.join("tmp"), "/tmp");
        return;
    }
    let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
    let _ = unshare(CloneFlags::CLONE_NEWNS)
        .and_then(|()| mount(None::<&str>, "/", None::<&str>, private, None::<&str>))
        .and_then(|()| mount(Some("tmp"), "/tmp", None::<&str>, MsFlags::MS_BIND, None::<&str>));
}

/// Stops or continues the guest, as its processors would be.
pub fn signal(pid: u32, signal: Signal) {
    let Ok(pid) = i32::try_from(pid) else { return };
    // It may have ended just now; then this machine ends, too.
    let _ = kill(Pid::from_raw(pid), signal);
}
