//! What a VMM and its guest wrote: read for people, and kept short.
//!
//! A jailed VMM owns the directory that it writes to, so that a name there may be anything by now: a link to a file of
//! the host's, or a pipe that nobody writes to.

use std::fs::OpenOptions;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::time::Duration;

use nix::libc;

use super::metrics::Metrics;
use super::place::{CONSOLE, METRICS, VMM_LOG};
use super::vmm::{Live, Vmms};
use crate::host::{Host, Operation, ProcessEnd};

/// How much of a log explains an end.
const LOG_TAIL_BYTES: usize = 2048;
const LOG_TAIL_LINES: usize = 4;
/// How much of the metrics file holds its last line.
pub(super) const METRICS_TAIL_BYTES: usize = 64 * 1024;

/// What a guest's kernel says last, wherever it is configured to go on from there.
const PANIC: &str = "Kernel panic";

/// A console is cut when it is longer; a guest can't fill the host's disk by talking.
const MAX_CONSOLE_BYTES: u64 = 4 * 1024 * 1024;
const TRIM_EVERY: Duration = Duration::from_secs(10);

impl<H: Host> Vmms<H> {
    /// Waits for the end of a VMM, and keeps its console short meanwhile.
    pub(super) async fn end_of(&self, live: &Live) -> ProcessEnd {
        let mut trim = tokio::time::interval(TRIM_EVERY);
        loop {
            let waiting = self.host.wait_end(&live.vmm);
            tokio::pin!(waiting);
            let end = loop {
                tokio::select! {
                    end = &mut waiting => break end,
                    _ = trim.tick() => self.trim_console(live).await,
                }
            };
            match end {
                Ok(end) => return end,
                // For want of a descriptor, perhaps: whoever gave up here would never tell the end.
                Err(error) => {
                    tracing::warn!(error = %crate::text::chain(&error), "could not wait for a VMM's end");
                    trim.tick().await;
                }
            }
        }
    }

    async fn trim_console(&self, live: &Live) {
        let (instance, name) = (live.vmm.instance.clone(), CONSOLE.to_owned());
        let trim = Operation::TrimLog { instance, name, max_bytes: MAX_CONSOLE_BYTES };
        if let Err(error) = self.host.perform(&trim).await {
            tracing::warn!(error = %crate::text::chain(&error), "could not cut a console");
        }
    }
}

/// How a VMM ended, for people. Firecracker exits with 0 when its guest shut down and when it panicked alike, so the
/// code alone says little: what the guest and the VMM wrote last says more.
pub(super) fn explain(end: &ProcessEnd, live: &Live) -> String {
    let mut parts = vec![match (end.signal, end.exit_code) {
        (Some(signal), _) => format!("ended by signal {signal}"),
        (None, Some(code)) => format!("exited with code {code}"),
        (None, None) => "ended".to_owned(),
    }];
    let text = |dir: &Path, name: &str, from: u64, bytes: usize| {
        String::from_utf8_lossy(&tail_from(&dir.join(name), from, bytes).unwrap_or_default()).into_owned()
    };
    let place = &live.place;
    let mut console = text(&place.run_dir, CONSOLE, live.file.console_from, LOG_TAIL_BYTES);
    if place.jail.is_some() {
        console.push_str(&text(place.dir(), CONSOLE, 0, LOG_TAIL_BYTES));
    }
    if let Some(line) = console.lines().rev().find(|line| line.contains(PANIC)) {
        parts.push(format!("the guest panicked: {}", line.trim()));
    }
    if let Some(metrics) = Metrics::newest(&text(place.dir(), METRICS, 0, METRICS_TAIL_BYTES)) {
        parts.extend(metrics.troubles());
    }
    let log = text(place.dir(), VMM_LOG, 0, LOG_TAIL_BYTES);
    let last: Vec<_> = log.lines().rev().take(LOG_TAIL_LINES).map(str::trim).collect();
    if !last.is_empty() {
        parts.push(last.into_iter().rev().collect::<Vec<_>>().join(" | "));
    }
    parts.join("; ")
}

/// The end of the console, with that of what was cut off it where it is short.
pub(super) fn console_tail(dir: &Path, max_bytes: usize) -> io::Result<Vec<u8>> {
    let new = tail(&dir.join(CONSOLE), max_bytes)?;
    let mut whole = match max_bytes - new.len() {
        0 => Vec::new(),
        left => tail(&dir.join(format!("{CONSOLE}.old")), left)?,
    };
    whole.extend(new);
    Ok(whole)
}

/// The end of a file; nothing when there is none.
pub(super) fn tail(path: &Path, max_bytes: usize) -> io::Result<Vec<u8>> {
    tail_from(path, 0, max_bytes)
}

/// The end of what was written behind `from`; all of a file that is shorter by now was.
fn tail_from(path: &Path, from: u64, max_bytes: usize) -> io::Result<Vec<u8>> {
    let mut options = OpenOptions::new();
    options.read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_CLOEXEC);
    let mut file = match options.open(path) {
        Ok(file) => file,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
    };
    let meta = file.metadata()?;
    if !meta.is_file() {
        return Err(io::Error::other(format!("{} is no regular file", path.display())));
    }
    let length = meta.len();
    let from = if from > length { 0 } else { from };
    file.seek(SeekFrom::Start(length.saturating_sub(max_bytes as u64).max(from)))?;
    let mut bytes = Vec::new();
    // It may grow meanwhile.
    file.take(max_bytes as u64).read_to_end(&mut bytes)?;
    Ok(bytes)
}

#[cfg(test)]
mod tests {
    use rustix::fs::{CWD, FileType, Mode, mknodat};

    use super::*;

    #[test]
    fn the_end_of_a_log_is_read_from_where_it_begins_to_be_this_process_s() {
        let dir = tempfile::tempdir().unwrap();
        let log = dir.path().join(CONSOLE);
        assert_eq!(tail(&log, 4).unwrap(), b"");
        std::fs::write(&log, b"old new").unwrap();
        assert_eq!(tail(&log, 5).unwrap(), b"d new");
        assert_eq!(tail_from(&log, 4, 5).unwrap(), b"new");
        assert_eq!(tail_from(&log, 7, 5).unwrap(), b"");
        // It was cut since.
        assert_eq!(tail_from(&log, 8, 5).unwrap(), b"d new");
        std::fs::write(dir.path().join("console.log.old"), b"older ").unwrap();
        assert_eq!(console_tail(dir.path(), 9).unwrap(), b"r old new");
        assert_eq!(console_tail(dir.path(), 3).unwrap(), b"new");
    }

    #[test]
    fn what_is_no_file_is_neither_followed_nor_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (link, pipe) = (dir.path().join("link"), dir.path().join("pipe"));
        std::fs::write(dir.path().join("secret"), b"of the host").unwrap();
        std::os::unix::fs::symlink(dir.path().join("secret"), &link).unwrap();
        mknodat(CWD, &pipe, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0).unwrap();
        for wrong in [link, pipe, dir.path().to_owned()] {
            assert!(tail(&wrong, 100).is_err(), "{wrong:?}");
        }
    }
}
