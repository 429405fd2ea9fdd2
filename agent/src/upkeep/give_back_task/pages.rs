//! The pages of the program's code, and the heap's free ones.
#![allow(
    unsafe_code,
    reason = "unmapping pages and trimming the heap are calls that the language can't check"
)]

use std::{fs, io};

use rustix::mm::{Advice, madvise};

/// Unmaps the code of the program and its libraries, and returns what the heap holds and does not use. Says how many
/// bytes of code were resident.
///
/// Whatever runs on is faulted in again from the page cache, where the code stays: this costs a few hundred minor
/// faults, spread over what comes next.
pub(super) fn give_back() -> io::Result<usize> {
    let mut resident = 0;
    for code in code(&fs::read_to_string("/proc/self/smaps")?) {
        // SAFETY: the range is a private mapping of a file that was never written to (see `code`): what is read there
        // afterwards is the same bytes of the same file. Nothing of ours unmaps code, so the range is still what it was.
        unsafe { madvise(code.start as *mut _, code.len, Advice::LinuxDontNeed)? };
        resident += code.resident;
    }
    #[cfg(target_env = "gnu")]
    // SAFETY: it takes the allocator's own locks, and moves nothing that is in use.
    unsafe {
        nix::libc::malloc_trim(0);
    }
    Ok(resident)
}

#[derive(Debug, Default, PartialEq, Eq)]
struct Mapping {
    start: usize,
    len: usize,
    /// In bytes.
    resident: usize,
}

/// The mappings of code in the text of `/proc/PID/smaps`.
///
/// Only what is executable, can't be written, is of a file, and has no page of its own: what relocation or a debugger
/// wrote is not in the file, and would be lost. So data that is read-only after relocation is never among them.
fn code(smaps: &str) -> Vec<Mapping> {
    let mut found = Vec::new();
    let mut current = None;
    for line in smaps.lines() {
        let mut words = line.split_ascii_whitespace();
        let (Some(first), Some(second)) = (words.next(), words.next()) else { continue };
        match first {
            "Rss:" => {
                if let Some(mapping) = &mut current {
                    let Mapping { resident, .. } = mapping;
                    *resident = second.parse::<usize>().unwrap_or(0) * 1024;
                }
            }
            // It comes after `Rss`.
            "Anonymous:" => found.extend(current.take().filter(|_| second == "0")),
            _ if !first.ends_with(':') => current = begun(first, second, words.nth(3)),
            _ => {}
        }
    }
    found
}

/// A mapping of a file's code, by the first line that tells of it.
fn begun(range: &str, rights: &str, path: Option<&str>) -> Option<Mapping> {
    let (start, end) = range.split_once('-')?;
    let (start, end) = (usize::from_str_radix(start, 16).ok()?, usize::from_str_radix(end, 16).ok()?);
    let is_code = rights == "r-xp" && path.is_some_and(|path| path.starts_with('/'));
    is_code.then(|| Mapping { start, len: end.saturating_sub(start), resident: 0 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_code_of_unmodified_files_is_unmapped() {
        let smaps = "\
1000-2000 r--p 00000000 08:01 42    /usr/bin/mvm
Rss:                   4 kB
Anonymous:             0 kB
2000-5000 r-xp 00001000 08:01 42    /usr/bin/mvm (deleted)
Rss:                   8 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
5000-6000 r--p 00004000 08:01 42    /usr/bin/mvm
Rss:                   4 kB
Anonymous:             4 kB
6000-7000 r-xp 00000000 08:01 43    /usr/lib/libc.so.6
Rss:                   4 kB
Anonymous:             4 kB
7000-8000 rwxp 00000000 08:01 44    /usr/lib/odd.so
Rss:                   4 kB
Anonymous:             0 kB
8000-9000 r-xp 00000000 00:00 0
Rss:                   4 kB
Anonymous:             0 kB
9000-a000 r-xp 00000000 00:00 0     [vdso]
Rss:                   4 kB
Anonymous:             0 kB
";
        assert_eq!(code(smaps), [Mapping { start: 0x2000, len: 0x3000, resident: 8192 }]);
    }

    #[test]
    fn the_program_goes_on_without_the_pages_it_gave_back() {
        let resident =
            || code(&fs::read_to_string("/proc/self/smaps").unwrap()).iter().map(|m| m.resident).sum();
        let before: usize = resident();
        assert!(give_back().unwrap() > 0);
        let after: usize = resident();
        assert!(after < before, "{before} bytes of code were resident, and {after} are");
    }
}
