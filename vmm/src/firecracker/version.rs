//! Parses Firecracker's version, and tells which versions the driver has to work around.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

/// The oldest that the driver speaks to: before it, `mem_backend` and the vsock handshake differ in detail.
pub(super) const OLDEST: Version = Version { major: 1, minor: 10, patch: 0 };

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub patch: u32,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("`{0}` is no Firecracker version")]
pub struct NotAVersion(String);

impl Version {
    #[must_use]
    pub const fn new(major: u32, minor: u32, patch: u32) -> Self {
        Self { major, minor, patch }
    }

    /// A resume without a snapshot since the pause leaves new vsock connections unanswered for good.
    #[must_use]
    pub fn loses_vsock_after_a_bare_resume(self) -> bool {
        (Self::new(1, 16, 0)..=Self::new(1, 16, 1)).contains(&self)
    }

    /// From what `firecracker --version` prints: `Firecracker v1.16.1`, then lines about other things.
    pub fn from_program(output: &str) -> Result<Self, NotAVersion> {
        let first = output.lines().next().unwrap_or_default();
        let word = first.split_whitespace().find(|word| word.starts_with('v') && word.contains('.'));
        word.ok_or_else(|| NotAVersion(clip(first)))?.parse()
    }
}

/// What a stranger said, short enough for a log.
fn clip(text: &str) -> String {
    text.chars().take(80).collect()
}

impl FromStr for Version {
    type Err = NotAVersion;
    fn from_str(text: &str) -> Result<Self, NotAVersion> {
        let refused = || NotAVersion(clip(text));
        let bare = text.trim().trim_start_matches('v');
        // A build of one's own says `1.17.0-dev`: the number is what counts.
        let numbers = bare.split(['-', '+']).next().unwrap_or_default();
        let mut parts = numbers.split('.').map(str::parse::<u32>);
        let mut next = || parts.next().and_then(Result::ok).ok_or_else(refused);
        let version = Self::new(next()?, next()?, next()?);
        if parts.next().is_some() {
            return Err(refused());
        }
        Ok(version)
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl From<Version> for String {
    fn from(version: Version) -> String {
        version.to_string()
    }
}

impl TryFrom<String> for Version {
    type Error = NotAVersion;
    fn try_from(text: String) -> Result<Self, NotAVersion> {
        text.parse()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_the_program_and_the_api_print_them() {
        assert_eq!("1.16.1".parse(), Ok(Version::new(1, 16, 1)));
        assert_eq!("1.17.0-dev".parse(), Ok(Version::new(1, 17, 0)));
        let printed = "Firecracker v1.16.1\n\n2026-01-01T00:00:00 [anonymous-instance:main] exiting";
        assert_eq!(Version::from_program(printed), Ok(Version::new(1, 16, 1)));
        for wrong in ["", "v", "1.16", "1.16.1.2", "one.two.three", "QEMU emulator version 7.2.22"] {
            assert!(Version::from_program(wrong).is_err() && wrong.parse::<Version>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn the_vsock_bug_is_in_two_releases() {
        let has = |text: &str| text.parse::<Version>().unwrap().loses_vsock_after_a_bare_resume();
        assert!(has("1.16.0") && has("1.16.1"));
        assert!(!has("1.15.1") && !has("1.14.4") && !has("1.16.2") && !has("1.17.0"));
    }
}
