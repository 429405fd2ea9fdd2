//! One child process with its log in a file; ended when dropped.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use crate::wait_for_or;

#[derive(Debug)]
pub struct Process {
    child: Child,
    log: PathBuf,
}

impl Process {
    /// Starts `command` with its output appended to `log`.
    pub fn start(mut command: Command, log: &Path) -> Self {
        let file = File::options().create(true).append(true).open(log).expect("the log file opens");
        let child = command
            .stdin(Stdio::null())
            .stdout(file.try_clone().expect("a file handle can be cloned"))
            .stderr(file)
            .spawn()
            .expect("the process starts");
        Self { child, log: log.to_owned() }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        let pid = Pid::from_raw(i32::try_from(self.child.id()).expect("a pid fits"));
        kill(pid, signal).expect("the process can be signalled");
    }

    /// SIGKILL, and wait for the end.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for the process to end by itself.
    pub fn wait_exit(&mut self, limit: Duration) -> ExitStatus {
        let (child, log) = (&mut self.child, &self.log);
        let said = || format!("the process to exit\n{}", std::fs::read_to_string(log).unwrap_or_default());
        wait_for_or(limit, || child.try_wait().expect("a child can be waited for"), said)
    }

    pub fn is_running(&mut self) -> bool {
        self.child.try_wait().expect("a child can be waited for").is_none()
    }

    /// Everything it has said so far.
    pub fn log(&self) -> String {
        std::fs::read_to_string(&self.log).unwrap_or_default()
    }

    /// Processor time that its threads have had so far.
    pub fn worked(&self) -> Duration {
        let threads = std::fs::read_dir(format!("/proc/{}/task", self.pid())).expect("the process runs");
        // A thread may end between the two looks.
        let of = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("schedstat")).ok();
        let stats = threads.filter_map(|thread| of(thread.expect("a list of threads")));
        let nanoseconds = |stat: String| stat.split(' ').next()?.parse::<u64>().ok();
        Duration::from_nanos(stats.map(|stat| nanoseconds(stat).expect("a time")).sum())
    }

    /// Resident memory now, in bytes.
    pub fn resident_bytes(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.pid())).unwrap_or_default();
        let line = status.lines().find(|line| line.starts_with("VmRSS:")).unwrap_or("VmRSS: 0 kB");
        line.split_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok()).unwrap_or(0) * 1024
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
