//! What the machine writes for people: its log, and a line of metrics each minute. As with the real one neither file is
//! opened to append, so that what others cut off it is a hole in it.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};

use serde_json::json;

use super::say;

/// A line of the real one's metrics is about as long: 9.5 MB a day.
const METRICS_BYTES: usize = 6600;

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Level {
    Error,
    Warning,
    Info,
}

impl Level {
    pub fn parse(name: &str) -> Result<Self, String> {
        match name {
            "Error" => Ok(Self::Error),
            "Warning" => Ok(Self::Warning),
            "Info" | "Debug" | "Trace" => Ok(Self::Info),
            other => Err(format!("Invalid value for logger level: {other}")),
        }
    }
}

fn create(path: &str) -> io::Result<File> {
    OpenOptions::new().create(true).truncate(false).read(true).write(true).open(path)
}

/// On the console until it has a file.
#[derive(Debug)]
pub struct Log {
    file: Option<File>,
    level: Level,
}

impl Log {
    pub fn new(path: Option<&str>, level: Option<Level>) -> io::Result<Self> {
        Ok(Self { file: path.map(create).transpose()?, level: level.unwrap_or(Level::Warning) })
    }

    pub fn update(&mut self, path: Option<&str>, level: Option<Level>) -> io::Result<()> {
        if let Some(path) = path {
            self.file = Some(create(path)?);
        }
        self.level = level.unwrap_or(self.level);
        Ok(())
    }

    pub fn line(&mut self, level: Level, text: &str) {
        if level > self.level {
            return;
        }
        match &mut self.file {
            // One that can't be written is counted, and that is all.
            Some(file) => drop(writeln!(file, "[{level:?}] {text}")),
            None => say(text),
        }
    }
}

/// The file that lines of metrics go to, once it is named.
#[derive(Debug, Default)]
pub struct MetricsFile(Option<File>);

impl MetricsFile {
    pub fn name(&mut self, path: &str) -> io::Result<()> {
        self.0 = Some(create(path)?);
        Ok(())
    }

    pub fn flush(&mut self) {
        let Some(file) = &mut self.0 else { return };
        let mut line = json!({
            "utc_timestamp_ms": 1, "vmm": {"panic_count": 0}, "vcpu": {"failures": 0}, "vsock": {"conns_added": 1},
        });
        line["rest"] = "0".repeat(METRICS_BYTES).into();
        let _ = writeln!(file, "{line}");
    }
}
