//! The settings of the Firecracker driver: program, jailer and timeouts.

use std::ffi::OsStr;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use super::version::{OLDEST, Version};
use crate::settings::VmmSettings;

/// How long a healthy program takes to print its version is milliseconds.
const VERSION_LIMIT: Duration = Duration::from_secs(5);
const VERSION_POLL: Duration = Duration::from_millis(2);

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FirecrackerSettings {
    /// Absent: `firecracker` in `PATH`.
    pub program: Option<PathBuf>,
    /// Absent: Firecracker runs with the agent's own rights, held by its seccomp filters alone.
    pub jailer: Option<JailerSettings>,
    /// Whether it is not to be run without one.
    pub jailed: bool,
    pub limits: Limits,
    /// Whether a snapshot's memory is hashed before it is loaded. Without it a damaged file is noticed by its length
    /// only, and a wake is faster by the time it takes to read it.
    pub verify_memory: bool,
}

impl Default for FirecrackerSettings {
    fn default() -> Self {
        Self { program: None, jailer: None, jailed: false, limits: Limits::default(), verify_memory: true }
    }
}

/// The user of a jailed VMM unless told otherwise: outside of what distributions give to people and services.
pub const DEFAULT_JAIL_USER: u32 = 61_000;

impl FirecrackerSettings {
    /// With the programs that the operator named. A jailer that is not named is taken from `PATH` where it can work,
    /// which is as root.
    #[must_use]
    pub fn with_programs(vmm: &VmmSettings) -> Self {
        let path = std::env::var_os("PATH").filter(|_| nix::unistd::geteuid().is_root());
        let found = || crate::programs::find_program(None, "jailer", path.as_deref()).ok();
        let jailed = |jailer| JailerSettings::new(jailer, DEFAULT_JAIL_USER, DEFAULT_JAIL_USER);
        // One that is not there stays as it was named, and is missed when it is looked for.
        let absolute = |named: &Path| std::path::absolute(named).unwrap_or_else(|_| named.to_owned());
        let jailer = vmm.jailer.as_deref().map(absolute).or_else(found).map(jailed);
        Self { program: vmm.firecracker.clone(), jailer, jailed: vmm.jailed, ..Self::default() }
    }
}

/// How long each kind of call may take before the VMM counts as stuck, and how often it is looked after.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// From the spawn to the first connection: 6 to 33 ms where there is nothing else to do.
    pub socket: Duration,
    /// A call that changes or asks something: at most 35 ms under load.
    pub call: Duration,
    /// Starting and loading: at most 52 ms.
    pub start: Duration,
    /// What a snapshot takes beside its memory.
    pub snapshot: Duration,
    /// From a resume to an answer over vsock.
    pub vsock: Duration,
    /// Between two looks at how long its logs are.
    pub trim: Duration,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            socket: Duration::from_secs(10),
            call: Duration::from_secs(5),
            start: Duration::from_secs(30),
            snapshot: Duration::from_secs(30),
            vsock: Duration::from_secs(5),
            trim: Duration::from_secs(10),
        }
    }
}

/// The slowest disk that is waited for, in MiB per second. The slowest write seen was ten times as fast.
const SLOWEST_WRITE_MIB: u64 = 10;

impl Limits {
    #[must_use]
    pub fn snapshot_of(&self, mem_mib: u64) -> Duration {
        self.snapshot + Duration::from_secs(mem_mib / SLOWEST_WRITE_MIB)
    }
}

/// What the jailer is told. Each field is one of its options.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JailerSettings {
    pub program: PathBuf,
    /// The user that the VMM runs as.
    pub uid: u32,
    pub gid: u32,
    /// Absent: each instance's jail lies in its run directory. Must be on the data directory's filesystem, for the
    /// instance's own disk is linked into the jail.
    pub chroot_base: Option<PathBuf>,
    pub new_pid_ns: bool,
    pub daemonize: bool,
}

impl JailerSettings {
    #[must_use]
    pub fn new(program: PathBuf, uid: u32, gid: u32) -> Self {
        Self { program, uid, gid, chroot_base: None, new_pid_ns: false, daemonize: false }
    }

    /// Whether the process that is started ends at once and leaves another behind.
    #[must_use]
    pub fn forks(&self) -> bool {
        self.new_pid_ns || self.daemonize
    }
}

/// Why Firecracker can't be used on this machine.
#[derive(Debug, thiserror::Error)]
pub enum FirecrackerUnavailable {
    #[error(
        "{what}; install Firecracker {OLDEST} or newer from its releases, or name the program by `--firecracker`"
    )]
    Missing { what: String },
    #[error(
        "Firecracker is started through its jailer here, and there is none in PATH; it comes in the same archive: install it, \
         name it by `--jailer`, or choose another driver"
    )]
    Unjailed,
    #[error("the jailer {program} is not there; it comes in the same archive as Firecracker")]
    NoJailer { program: PathBuf },
    #[error("{program} is Firecracker {found}; {OLDEST} is the oldest that works, install a newer one")]
    TooOld { program: PathBuf, found: Version },
    #[error(
        "the jailer starts only a program whose file name has `firecracker` in it, and {program} has not; rename it"
    )]
    BadName { program: PathBuf },
    #[error("{program} did not say which Firecracker it is: {reason}")]
    Broken { program: PathBuf, reason: String },
}

/// The jailer's own rule for the name of what it starts.
const NAME_IN_JAIL: &str = "firecracker";

/// Finds the program and asks which version it is. It is named by its real path: the jailer follows links before it
/// names a jail after the program.
pub fn find(
    settings: &FirecrackerSettings,
    path: Option<&OsStr>,
) -> Result<(PathBuf, Version), FirecrackerUnavailable> {
    let found = crate::programs::find_program(settings.program.as_deref(), "firecracker", path);
    let named = found.map_err(|what| FirecrackerUnavailable::Missing { what })?;
    let program = std::fs::canonicalize(&named)
        .map_err(|cause| FirecrackerUnavailable::Broken { program: named, reason: cause.to_string() })?;
    if settings.jailed && settings.jailer.is_none() {
        return Err(FirecrackerUnavailable::Unjailed);
    }
    if let Some(jailer) = &settings.jailer {
        if !jailer.program.is_file() {
            return Err(FirecrackerUnavailable::NoJailer { program: jailer.program.clone() });
        }
        let name = program.file_name().unwrap_or_default().to_string_lossy();
        if !name.contains(NAME_IN_JAIL) {
            return Err(FirecrackerUnavailable::BadName { program });
        }
    }
    let version = ask_version(&program)?;
    if version < OLDEST {
        return Err(FirecrackerUnavailable::TooOld { program, found: version });
    }
    Ok((program, version))
}

fn ask_version(program: &Path) -> Result<Version, FirecrackerUnavailable> {
    let broken = |reason: String| FirecrackerUnavailable::Broken { program: program.to_owned(), reason };
    let mut child = Command::new(program)
        .arg("--version")
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .map_err(|cause| broken(cause.to_string()))?;
    let deadline = Instant::now() + VERSION_LIMIT;
    loop {
        match child.try_wait() {
            Ok(Some(_)) => break,
            Ok(None) if Instant::now() < deadline => std::thread::sleep(VERSION_POLL),
            other => {
                // It may have ended in the meantime; then there is nothing to end.
                let _ = child.kill();
                let _ = child.wait();
                let reason = other.map_or_else(|cause| cause.to_string(), |_| "it hangs".to_owned());
                return Err(broken(reason));
            }
        }
    }
    let output = child.wait_with_output().map_err(|cause| broken(cause.to_string()))?;
    Version::from_program(&String::from_utf8_lossy(&output.stdout)).map_err(|error| broken(error.to_string()))
}
