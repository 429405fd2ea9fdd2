//! How long work stands still for want of memory (or time, or disks), and waking up when that is too long.
//!
//! The kernel counts the time; it is asked to tell when a share of a window is lost. Of a group by the group's own
//! `memory.pressure`, of the whole machine by `/proc/pressure/memory`: both read and take the same.

use std::fs::{self, OpenOptions};
use std::io::{self, Write as _};
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;

use nix::libc;
use serde::{Deserialize, Serialize};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;

use super::file;

/// The whole machine's, where groups' files of the same kind are `memory.pressure`.
pub const NODE_MEMORY_PRESSURE: &str = "/proc/pressure/memory";

/// Lost time: shares in per cent over the last 10, 60 and 300 seconds, and microseconds in all.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Stall {
    pub avg10: f64,
    pub avg60: f64,
    pub avg300: f64,
    pub total_us: u64,
}

/// What a pressure file says.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Pressure {
    /// At least one that could have run waited.
    pub some: Stall,
    /// None ran, all waited. Absent where there is no such thing.
    pub full: Option<Stall>,
}

/// Reads and understands a pressure file.
pub fn read_pressure(file: &Path) -> io::Result<Pressure> {
    let text = fs::read_to_string(file)?;
    parse_pressure(&text).ok_or_else(|| {
        io::Error::new(
            io::ErrorKind::InvalidData,
            format!("{} is not what pressure looks like", file.display()),
        )
    })
}

/// What the text of a pressure file says; nothing when it is something else.
#[must_use]
pub fn parse_pressure(text: &str) -> Option<Pressure> {
    let stall = |kind: &str| {
        text.lines().find_map(|line| line.strip_prefix(kind)?.strip_prefix(' ')).map(parse_stall)
    };
    let full = match stall("full") {
        Some(full) => Some(full?),
        None => None,
    };
    Some(Pressure { some: stall("some")??, full })
}

fn parse_stall(fields: &str) -> Option<Stall> {
    let mut stall = Stall::default();
    let mut seen = 0;
    for field in fields.split_whitespace() {
        let (name, value) = field.split_once('=')?;
        match name {
            "avg10" => stall.avg10 = value.parse().ok()?,
            "avg60" => stall.avg60 = value.parse().ok()?,
            "avg300" => stall.avg300 = value.parse().ok()?,
            "total" => stall.total_us = value.parse().ok()?,
            // Kernels to come may tell more.
            _ => continue,
        }
        seen += 1;
    }
    (seen == 4).then_some(stall)
}

/// Wakes the waiting task when work was stalled for too much of a window. It tells at most once in a window, and nothing
/// once it is dropped.
#[derive(Debug)]
pub struct PressureWatch {
    file: AsyncFd<OwnedFd>,
}

impl PressureWatch {
    /// Told when, for `threshold_us` out of any `window_us`, at least one task of what `file` is about waited. The
    /// kernel takes windows of 500 ms to 10 s. Must be made inside a tokio runtime.
    pub fn new(file: &Path, threshold_us: u32, window_us: u32) -> io::Result<Self> {
        let mut opened =
            OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(file)?;
        // All at once and with an end: each write is a trigger of its own.
        opened.write_all(format!("some {threshold_us} {window_us}\0").as_bytes())?;
        Ok(Self { file: file::awaitable(opened.into(), Interest::PRIORITY)? })
    }

    /// Returns when the kernel tells. A group that is removed may tell nothing: drop its watch with it.
    pub async fn pressed(&self) -> io::Result<()> {
        let mut guard = self.file.ready(Interest::PRIORITY | Interest::ERROR).await?;
        let gone = guard.ready().is_error();
        guard.clear_ready();
        if gone { Err(io::Error::new(io::ErrorKind::NotFound, "the group is gone")) } else { Ok(()) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pressure_is_read_with_and_without_its_second_line() {
        let some = "some avg10=1.50 avg60=0.25 avg300=0.00 total=12345\n";
        let stall = Stall { avg10: 1.5, avg60: 0.25, avg300: 0.0, total_us: 12_345 };
        assert_eq!(parse_pressure(some), Some(Pressure { some: stall, full: None }));
        let both = format!("{some}full avg10=0.00 avg60=0.00 avg300=0.00 total=7 new=1\n");
        let full = Some(Stall { total_us: 7, ..Stall::default() });
        assert_eq!(parse_pressure(&both), Some(Pressure { some: stall, full }));
    }

    #[test]
    fn what_is_no_pressure_is_not_taken_for_none() {
        for text in ["", "some", "some avg10=1", "some avg10=x avg60=0 avg300=0 total=0", "full avg10=0.00"] {
            assert_eq!(parse_pressure(text), None, "{text:?}");
        }
        let broken_full = "some avg10=0.00 avg60=0.00 avg300=0.00 total=0\nfull avg10=\n";
        assert_eq!(parse_pressure(broken_full), None);
    }
}
