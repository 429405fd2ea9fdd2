//! The two processes of a development cluster: started apart from any terminal, known by more than a pid, ended.
//!
//! `mvm dev exec` is what is started first: it leaves the session of the terminal, records which process it is, and becomes
//! `mvm coordinator serve` or `mvm agent serve`. So the record is there before the process does anything, whatever becomes of
//! the command that started it, and two commands at once start one process.

use std::ffi::{OsStr, OsString};
use std::fmt;
use std::fs::{self, File};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, SystemTime};

use anyhow::{Context as _, anyhow, bail};
use mvm_host::{EndSignal, ProcessIdentity};
use mvm_proto::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::time::Instant;

use super::dir::DevDir;
use crate::exit::Run;

/// Each daemon stops within ten seconds.
const STOPS_WITHIN: Duration = Duration::from_secs(15);
/// A process that is killed goes once the kernel is through with what it does for it.
const DIES_WITHIN: Duration = Duration::from_secs(10);
/// Between two looks at a process or a port.
pub(super) const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Of a log that is longer, the next start begins a new one.
const MAX_LOG_BYTES: u64 = 4 << 20;
/// How much of a log an error repeats.
const LAST_LINES: usize = 8;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Part {
    Coordinator,
    Agent,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Coordinator => "coordinator",
            Self::Agent => "agent",
        })
    }
}

/// The file of a process.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Recorded {
    #[serde(flatten)]
    pub(super) process: ProcessIdentity,
    pub(super) since: Timestamp,
}

/// The process of this file, if exactly that one lives.
pub(super) fn living(pid_file: &Path) -> anyhow::Result<Option<Recorded>> {
    let bytes = match fs::read(pid_file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        bytes => bytes.with_context(|| format!("could not read {}", pid_file.display()))?,
    };
    let recorded: Recorded = serde_json::from_slice(&bytes).with_context(|| {
        format!("could not use {}\nend its process by hand and remove the file", pid_file.display())
    })?;
    let lives = recorded.process.lives().context("could not look at processes")?;
    Ok(lives.then_some(recorded))
}

/// `mvm dev exec`: this process becomes `mvm COMMAND` in a session of its own, recorded in `pid_file`.
pub(super) fn become_recorded(pid_file: &Path, command: &[OsString]) -> Run {
    nix::unistd::setsid().context("could not begin a session")?;
    let write = || format!("could not write {}", pid_file.display());
    let lock = File::create(with_suffix(pid_file, ".lock")).with_context(write)?;
    lock.lock().with_context(write)?;
    if let Some(recorded) = living(pid_file)? {
        return Err(anyhow!("it runs already, as process {}", recorded.process.pid).into());
    }
    let own = ProcessIdentity::of(std::process::id()).context("could not look at processes")?;
    let process = own.context("/proc does not show this process")?;
    let recorded = Recorded { process, since: Timestamp::from(SystemTime::now()) };
    let text = serde_json::to_vec(&recorded).map_err(anyhow::Error::new)?;
    mvm_pki::files::write_private(pid_file, &text).with_context(write)?;
    drop(lock);
    Err(anyhow::Error::new(this_program(command)?.exec()).context("could not start mvm").into())
}

fn with_suffix(path: &Path, suffix: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}

fn this_program(args: &[OsString]) -> anyhow::Result<Command> {
    let program = std::env::current_exe().context("could not find this program")?;
    let mut command = Command::new(program);
    command.args(args);
    Ok(command)
}

/// `mvm ARGS` with nothing of this user's settings and contexts: the cluster is made of what its directory says. What it
/// writes to standard error goes to the log of `part`.
pub(super) fn hermetic(dir: &DevDir, part: Part, args: &[OsString]) -> anyhow::Result<Command> {
    let mut command = this_program(args)?;
    for (name, _) in std::env::vars_os() {
        let is_ours = name.to_str().is_some_and(|name| name.starts_with("MVM_"));
        if is_ours || ["NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"].iter().any(|other| name == *other) {
            command.env_remove(name);
        }
    }
    command.env("MVM_CONFIG", "/dev/null").env("MVM_CONTEXTS", dir.path().join("no-contexts"));
    command.env("NO_COLOR", "1").current_dir("/");
    let path = dir.log(part);
    let context = || format!("could not write to the log {}", path.display());
    if fs::metadata(&path).is_ok_and(|log| log.len() > MAX_LOG_BYTES) {
        fs::rename(&path, with_suffix(&path, ".old")).with_context(context)?;
    }
    let log = File::options().create(true).append(true).open(&path).with_context(context)?;
    command.stdin(Stdio::null()).stdout(log.try_clone().with_context(context)?).stderr(log);
    Ok(command)
}

/// Starts `mvm ARGS` as this part of the cluster.
pub(super) fn start(dir: &DevDir, part: Part, args: &[OsString]) -> anyhow::Result<Child> {
    let mut exec: Vec<OsString> = ["dev", "exec"].map(OsString::from).to_vec();
    exec.extend([dir.pid_file(part).into_os_string(), "--".into()]);
    exec.extend_from_slice(args);
    hermetic(dir, part, &exec)?.spawn().with_context(|| format!("could not start the {part}"))
}

/// The error of a process that has ended although it should run, with the end of its log; nothing while it runs.
pub(super) fn check_runs(dir: &DevDir, part: Part, started: Option<&mut Child>) -> anyhow::Result<()> {
    // Until it has recorded itself only its parent knows it; one that found another there has left it the place.
    let is_starting = match started {
        Some(child) => child.try_wait().context("could not look at a process")?.is_none(),
        None => false,
    };
    if !is_starting && living(&dir.pid_file(part))?.is_none() {
        let log = dir.log(part);
        bail!(
            "the {part} has ended\n{}\nall of its log: {}\nwhen that is mended, run `mvm dev up` again",
            last_lines(&log),
            log.display()
        );
    }
    Ok(())
}

/// For a part that gave no answer in time.
pub(super) fn silent(dir: &DevDir, part: Part, waited: Duration) -> anyhow::Error {
    let log = dir.log(part);
    anyhow!(
        "the {part} did not answer within {}\n{}\nall of its log: {}\nrun `mvm dev up` again, or `mvm dev down` to begin anew",
        humantime::format_duration(waited),
        last_lines(&log),
        log.display()
    )
}

fn last_lines(log: &Path) -> String {
    let text = fs::read(log).unwrap_or_default();
    let text = String::from_utf8_lossy(&text);
    let lines: Vec<&str> = text.lines().collect();
    let last = &lines[lines.len().saturating_sub(LAST_LINES)..];
    last.iter().map(|line| format!("  {line}")).collect::<Vec<_>>().join("\n")
}

/// Ends exactly this process: in order, or by force where it does not stop.
pub(super) async fn stop(part: Part, process: &ProcessIdentity) -> anyhow::Result<()> {
    let context = || format!("could not stop the {part}, process {}", process.pid);
    for (signal, patience) in [(EndSignal::Terminate, STOPS_WITHIN), (EndSignal::Kill, DIES_WITHIN)] {
        process.signal(signal).with_context(context)?;
        let deadline = Instant::now() + patience;
        while Instant::now() < deadline {
            if !process.lives().with_context(context)? {
                return Ok(());
            }
            tokio::time::sleep(LOOK_AGAIN).await;
        }
    }
    bail!("{}: it does not end", context())
}

/// A flag with its value.
pub(super) fn flag(name: &str, value: impl AsRef<OsStr>) -> [OsString; 2] {
    [name.into(), value.as_ref().to_owned()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pid_that_another_process_has_by_now_is_not_ours() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("agent.pid");
        assert_eq!(living(&file).unwrap(), None);
        let own = ProcessIdentity::of(std::process::id()).unwrap().unwrap();
        let since = Timestamp::from(SystemTime::now());
        let other_start = ProcessIdentity { start_time: own.start_time + 1, ..own.clone() };
        let other_boot = ProcessIdentity { boot_id: "another".to_owned(), ..own };
        for (process, lives) in [(own, true), (other_start, false), (other_boot, false)] {
            let recorded = Recorded { process, since };
            fs::write(&file, serde_json::to_vec(&recorded).unwrap()).unwrap();
            assert_eq!(living(&file).unwrap(), lives.then_some(recorded));
        }
    }

    #[test]
    fn an_error_repeats_the_end_of_a_log_alone() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("agent.log");
        fs::write(&log, (0..20).map(|line| format!("line {line}\n")).collect::<String>()).unwrap();
        let last = last_lines(&log);
        assert!(last.starts_with("  line 12\n") && last.ends_with("  line 19"), "{last}");
        assert_eq!(last_lines(&folder.path().join("none")), "");
    }
}
