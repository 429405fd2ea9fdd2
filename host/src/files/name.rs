//! Names of what lies in a directory: one plain component, so that a name can never be a way out.

use std::ffi::OsStr;
use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::os::unix::ffi::OsStrExt as _;

use crate::HostError;

/// How many names an operation's name may have: `data.img`, `snapshot/memory`.
const MAX_PARTS: usize = 2;

fn is_plain(name: &OsStr) -> bool {
    let bytes = name.as_bytes();
    !bytes.is_empty() && bytes != b"." && bytes != b".." && !bytes.iter().any(|byte| matches!(byte, b'/' | 0))
}

/// One component that leads nowhere else.
pub(super) fn plain(name: &OsStr) -> Result<&OsStr, HostError> {
    if is_plain(name) {
        return Ok(name);
    }
    Err(HostError::Refused(format!("{} is not a plain name", name.display())))
}

/// The components of a name in a run directory, or in a directory in it.
pub(super) fn parts(name: &str) -> Result<Vec<&str>, HostError> {
    let parts: Vec<_> = name.split('/').collect();
    if parts.len() <= MAX_PARTS && parts.iter().all(|part| is_plain(OsStr::new(part))) {
        return Ok(parts);
    }
    Err(HostError::Refused(format!("{name:?} is not a name in a run directory")))
}

/// What a file is called while it is written: `.data.img.0123456789abcdef.tmp`. It can't exist already, and
/// if it does, creating the file fails.
pub(crate) fn temporary(name: &OsStr) -> String {
    let random = RandomState::new().build_hasher().finish();
    format!("{}{random:016x}{TEMPORARY}", temporary_prefix(name))
}

/// Whether `found` is what a crash left of writing `name`.
pub(super) fn is_temporary_of(found: &OsStr, name: &OsStr) -> bool {
    let (found, prefix) = (found.as_bytes(), temporary_prefix(name));
    found.starts_with(prefix.as_bytes())
        && found.ends_with(TEMPORARY.as_bytes())
        && found.len() == prefix.len() + 16 + TEMPORARY.len()
}

const TEMPORARY: &str = ".tmp";

fn temporary_prefix(name: &OsStr) -> String {
    format!(".{}.", name.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_plain_components_are_names() {
        for name in ["data.img", ".x", "...", "a b", "jail"] {
            assert!(plain(OsStr::new(name)).is_ok(), "{name}");
        }
        for name in ["", ".", "..", "a/b", "/", "a/", "a\0b"] {
            assert!(plain(OsStr::new(name)).is_err(), "{name}");
        }
        assert_eq!(parts("snapshot/memory").unwrap(), ["snapshot", "memory"]);
        for name in ["", "a/b/c", "a//b", "../a", "a/..", "/a", "a/"] {
            assert!(parts(name).is_err(), "{name}");
        }
    }

    #[test]
    fn temporaries_differ_and_are_told_from_other_names() {
        let name = OsStr::new("data.img");
        let (one, other) = (temporary(name), temporary(name));
        assert_ne!(one, other);
        assert!(is_temporary_of(OsStr::new(&one), name));
        for wrong in ["data.img", "data.img.tmp", ".data.img.tmp", ".data.img2.0123456789abcdef.tmp"] {
            assert!(!is_temporary_of(OsStr::new(wrong), name), "{wrong}");
        }
    }
}
