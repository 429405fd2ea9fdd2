//! What differs between a guest in a microVM and one in a test.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use crate::protocol;

/// Whose machine this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Machine {
    /// A microVM of our own: its name, clock, disks and power are ours to change.
    Own,
    /// Someone else's, as in tests: requests that would change it are answered and change nothing.
    Borrowed,
}

#[derive(Debug, Clone)]
pub struct Settings {
    pub machine: Machine,
    /// Where the workload says how it fares, and is told that sleep comes.
    pub run_dir: PathBuf,
    /// What the image says about its workload; it may be absent.
    pub config: PathBuf,
    /// The folder of `passwd` and `group`.
    pub etc: PathBuf,
    /// The newest version of the protocol to speak; lower it to be an older guest.
    pub max_version: u32,
}

impl Settings {
    /// For the microVM that this program runs in.
    #[must_use]
    pub fn own() -> Self {
        Self {
            machine: Machine::Own,
            run_dir: "/run/mvm".into(),
            config: "/etc/mvm/guest.json".into(),
            etc: "/etc".into(),
            max_version: protocol::MAX_VERSION,
        }
    }

    /// For an ordinary process whose files are all in one folder: `guest.json`, and `run`.
    #[must_use]
    pub fn borrowed(folder: &Path) -> Self {
        Self {
            machine: Machine::Borrowed,
            run_dir: folder.join("run"),
            config: folder.join("guest.json"),
            etc: folder.join("etc"),
            max_version: protocol::MAX_VERSION,
        }
    }
}

/// `/etc/mvm/guest.json`.
#[derive(Debug, Clone, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(crate) struct ImageConfig {
    /// The program that this image is for, and its arguments.
    pub(crate) workload: Vec<String>,
    pub(crate) ready: ReadyWhen,
    pub(crate) env: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum ReadyWhen {
    /// As soon as the workload was started.
    #[default]
    Start,
    /// When it says so, by the file `worker-ready`.
    File,
}

impl ImageConfig {
    /// An image without this file has no workload. One that can't be read is an error that the agent gets to see.
    pub(crate) fn read(path: &Path) -> Result<Self, String> {
        match std::fs::read(path) {
            Ok(text) => serde_json::from_slice(&text).map_err(|fault| format!("{}: {fault}", path.display())),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(Self::default()),
            Err(error) => Err(format!("{}: {error}", path.display())),
        }
    }
}
