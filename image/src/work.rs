//! Runs the programs of a build, reports progress, and can be cancelled.
//!
//! Programs are run in a process group of their own, with a deadline; all of it is killed when that passes.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, Signal, kill_process_group, pidfd_open};

use super::ImageError;

/// How soon a call to stop is noticed.
const LOOK_UP: Timespec = Timespec { tv_sec: 0, tv_nsec: 200_000_000 };
/// As much of a program's last words as fits an error that a person reads.
const TAIL_BYTES: u64 = 2048;

/// One piece of work: passed down to everything that takes its time.
#[derive(Clone, Copy)]
pub struct Work<'a> {
    pub(super) tell: &'a (dyn Fn(&str) + Send + Sync),
    pub(super) cancelled: &'a AtomicBool,
}

impl std::fmt::Debug for Work<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Work").field("cancelled", self.cancelled).finish_non_exhaustive()
    }
}

impl<'a> Work<'a> {
    /// Work that tells its progress to `tell`, and ends early once `cancelled` is set.
    #[must_use]
    pub fn new(tell: &'a (dyn Fn(&str) + Send + Sync), cancelled: &'a AtomicBool) -> Self {
        Self { tell, cancelled }
    }

    pub(super) fn say(&self, line: impl AsRef<str>) {
        (self.tell)(line.as_ref());
    }

    pub(super) fn check(&self) -> Result<(), ImageError> {
        if self.cancelled.load(Ordering::Relaxed) { Err(ImageError::Cancelled) } else { Ok(()) }
    }

    /// Runs a program to its end and gives what it wrote to standard output.
    pub(super) fn run(
        &self,
        command: &mut Command,
        limit: Duration,
        advice: &'static str,
    ) -> Result<String, ImageError> {
        use std::os::unix::process::CommandExt;
        let program = command.get_program().to_string_lossy().into_owned();
        let start = |cause: std::io::Error| ImageError::Start { program: program.clone(), cause };
        // Files and not pipes, which would have to be emptied while the program runs.
        let (mut output, mut errors) = (scratch().map_err(start)?, scratch().map_err(start)?);
        command.stdin(Stdio::null());
        command.stdout(output.try_clone().map_err(start)?).stderr(errors.try_clone().map_err(start)?);
        command.process_group(0);
        let child = command.spawn().map_err(|cause| match cause.kind() {
            std::io::ErrorKind::NotFound => ImageError::ProgramMissing { program: program.clone(), advice },
            _ => start(cause),
        })?;
        let status = match self.wait(child, Instant::now() + limit).map_err(start)? {
            Some(status) => status,
            None => {
                self.check()?;
                return Err(ImageError::TooSlow { program, limit, output: tail(&mut errors) });
            }
        };
        if !status.success() {
            return Err(ImageError::Failed {
                program,
                status: status.to_string(),
                output: tail(&mut errors),
            });
        }
        let mut text = String::new();
        output.seek(SeekFrom::Start(0)).and_then(|_| output.read_to_string(&mut text)).map_err(start)?;
        Ok(text)
    }

    /// `None` when the program had to be killed: it took too long, or the build was cancelled.
    fn wait(&self, mut child: Child, deadline: Instant) -> std::io::Result<Option<ExitStatus>> {
        let group = i32::try_from(child.id()).ok().and_then(Pid::from_raw);
        let group = group.ok_or_else(|| std::io::Error::other("a child without a pid"))?;
        let handle = pidfd_open(group, PidfdFlags::empty())?;
        while !self.cancelled.load(Ordering::Relaxed) && Instant::now() < deadline {
            let mut ended = [PollFd::new(&handle, PollFlags::IN)];
            match poll(&mut ended, Some(&LOOK_UP)) {
                Ok(0) | Err(rustix::io::Errno::INTR) => {}
                Ok(_) => return child.wait().map(Some),
                Err(error) => return Err(error.into()),
            }
        }
        // The group is its leader's, which is not reaped yet: the number belongs to no other group.
        let killed = kill_process_group(group, Signal::KILL);
        child.wait()?;
        killed.map(|()| None).map_err(Into::into)
    }
}

/// A file without a name.
fn scratch() -> std::io::Result<File> {
    use rustix::fs::{MemfdFlags, memfd_create};
    Ok(memfd_create("mvm-image-output", MemfdFlags::CLOEXEC).map(File::from)?)
}

/// The last words of a program, on lines of their own.
fn tail(errors: &mut File) -> String {
    let length = errors.metadata().map(|metadata| metadata.len()).unwrap_or(0);
    let mut words = Vec::new();
    let from = SeekFrom::Start(length.saturating_sub(TAIL_BYTES));
    // Without its words a failure is still told.
    let _ = errors.seek(from).and_then(|_| errors.take(TAIL_BYTES).read_to_end(&mut words));
    let words = String::from_utf8_lossy(&words);
    let words = words.trim();
    if words.is_empty() { String::new() } else { format!(":\n{words}") }
}
