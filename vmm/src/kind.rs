//! The drivers by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// Which driver is asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DriverKind {
    /// In memory, with state and laws; runs no guest.
    #[default]
    Fake,
    Qemu,
    Firecracker,
}

impl DriverKind {
    pub const ALL: [DriverKind; 3] = [DriverKind::Fake, DriverKind::Qemu, DriverKind::Firecracker];

    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            DriverKind::Fake => "fake",
            DriverKind::Qemu => "qemu",
            DriverKind::Firecracker => "firecracker",
        }
    }

    /// Whether instances use the host's processors, memory and disk: then the host's size is the node's capacity.
    #[must_use]
    pub fn uses_host_resources(self) -> bool {
        self != DriverKind::Fake
    }
}

impl fmt::Display for DriverKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.as_str())
    }
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("there is no driver of this name; known are fake, qemu and firecracker")]
pub struct UnknownDriver;

impl FromStr for DriverKind {
    type Err = UnknownDriver;
    fn from_str(text: &str) -> Result<Self, UnknownDriver> {
        Self::ALL.into_iter().find(|kind| kind.as_str() == text).ok_or(UnknownDriver)
    }
}
