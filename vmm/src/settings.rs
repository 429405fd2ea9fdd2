//! The operator's settings of drivers and their programs.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use crate::DriverKind;

const AUTO: &str = "auto";

/// Which driver the operator asked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum DriverChoice {
    /// The strongest that works on this machine, found by booting. Never the fake one.
    #[default]
    Auto,
    /// This one or none.
    Only(DriverKind),
}

impl FromStr for DriverChoice {
    type Err = UnknownDriverChoice;
    fn from_str(text: &str) -> Result<Self, UnknownDriverChoice> {
        if text == AUTO {
            return Ok(Self::Auto);
        }
        text.parse().map(Self::Only).map_err(|_| UnknownDriverChoice)
    }
}

impl fmt::Display for DriverChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.pad(AUTO),
            Self::Only(kind) => f.pad(kind.as_str()),
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("there is no driver of this name; known are auto, qemu, firecracker and fake")]
pub struct UnknownDriverChoice;

/// Programs named by the operator; what is absent is looked for.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VmmSettings {
    pub qemu: Option<PathBuf>,
    pub firecracker: Option<PathBuf>,
    pub jailer: Option<PathBuf>,
    /// Whether Firecracker is started through its jailer or not at all.
    pub jailed: bool,
    /// The static program that is put into images that a node builds itself.
    pub guest: Option<PathBuf>,
}
