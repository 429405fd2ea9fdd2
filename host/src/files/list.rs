//! The names in a directory. Others may have put any number of them there: no more than a bound is ever in memory.

use std::ffi::{OsStr, OsString};
use std::os::unix::ffi::OsStringExt as _;

use rustix::fs;

use super::{Dir, refused};
use crate::HostError;

/// More than a run directory, `vms/` or `jails/` has by far. Of the longest names it is 4 MiB, in each of the helper's
/// threads at most.
pub(crate) const MAX_NAMES: usize = 16 * 1024;

/// How many names are looked at for one request. Some file systems show what is made while they are read, so that
/// reading would not end before the process ends that makes it.
pub(super) const MAX_LOOKED_AT: usize = 10_000_000;

impl Dir {
    /// One after the other as the kernel gives them, which may be without end. Names that are no text are names all the
    /// same. Holds a second descriptor while it lives.
    pub(super) fn names(&self) -> Result<impl Iterator<Item = Result<OsString, HostError>> + '_, HostError> {
        let fault = |cause| self.fault("list", OsStr::new(""), cause);
        let entries = fs::Dir::read_from(self).map_err(fault)?;
        let name = |entry: fs::DirEntry| OsString::from_vec(entry.file_name().to_bytes().to_vec());
        let names = entries.map(move |entry| entry.map(name).map_err(fault));
        Ok(names.filter(|name| !name.as_ref().is_ok_and(|name| name == "." || name == "..")))
    }

    /// What is in it, in order; an error where that is more than anything of ours has.
    pub fn list(&self) -> Result<Vec<OsString>, HostError> {
        self.list_if(|_| true)
    }

    /// The same of those names alone that are to be kept, whatever else there is.
    pub(crate) fn list_if(&self, keep: impl Fn(&OsStr) -> bool) -> Result<Vec<OsString>, HostError> {
        let mut kept = Vec::new();
        for (looked_at, name) in self.names()?.enumerate() {
            let name = name?;
            if keep(&name) {
                kept.push(name);
            }
            if kept.len() > MAX_NAMES || looked_at >= MAX_LOOKED_AT {
                let why = format!("has more than {MAX_NAMES} names; remove what does not belong there");
                return Err(refused(self.path(), &why));
            }
        }
        kept.sort();
        Ok(kept)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_directory_with_more_names_than_ours_have_is_not_listed_and_still_searched_and_removed() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_root(place.path()).unwrap();
        let full = dir.make("full", 0o700, None).unwrap();
        let file = full.create_new("0", 0o600).unwrap();
        // Second names: however many there are, it is one inode.
        for number in 1..MAX_NAMES {
            full.link_shared(&file, number.to_string()).unwrap();
        }
        assert_eq!(full.list().unwrap().len(), MAX_NAMES);
        full.link_shared(&file, "one-more").unwrap();
        let refused = full.list().unwrap_err();
        assert!(refused.to_string().contains("more than 16384 names"), "{refused}");
        assert_eq!(full.list_if(|name| name == "one-more").unwrap(), ["one-more"]);
        full.usage().unwrap();
        dir.remove_tree("full").unwrap();
        assert_eq!(dir.list().unwrap(), Vec::<OsString>::new());
    }
}
