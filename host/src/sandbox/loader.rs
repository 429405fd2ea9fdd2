//! Which loader a program names: Landlock must let it be executed, and nothing else beside the program.

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::unix::ffi::OsStringExt as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};

const HEADER_BYTES: usize = 64;
const MAGIC: [u8; 5] = [0x7f, b'E', b'L', b'F', 2];
const NAMES_LOADER: u32 = 3;
const LONGEST_PATH: u64 = 4096;

/// The loader of a 64-bit ELF program; none for one that needs none.
pub(super) fn loader(program: &Path) -> io::Result<Option<PathBuf>> {
    let file = File::open(program)?;
    let mut header = [0; HEADER_BYTES];
    file.read_exact_at(&mut header, 0)?;
    if !header.starts_with(&MAGIC) {
        return Err(io::Error::new(io::ErrorKind::InvalidData, "it is not a 64-bit program"));
    }
    let table = u64::from_ne_bytes(part(&header, 32));
    let (size, count) = (u16::from_ne_bytes(part(&header, 54)), u16::from_ne_bytes(part(&header, 56)));
    for index in 0..u64::from(count) {
        let mut entry = [0; 56];
        file.read_exact_at(&mut entry, table.saturating_add(index.saturating_mul(u64::from(size))))?;
        if u32::from_ne_bytes(part(&entry, 0)) != NAMES_LOADER {
            continue;
        }
        let (at, length) = (u64::from_ne_bytes(part(&entry, 8)), u64::from_ne_bytes(part(&entry, 32)));
        let mut name = vec![0; usize::try_from(length.min(LONGEST_PATH)).unwrap_or(0)];
        file.read_exact_at(&mut name, at)?;
        name.truncate(name.iter().position(|byte| *byte == 0).unwrap_or(name.len()));
        return Ok(Some(PathBuf::from(OsString::from_vec(name))));
    }
    Ok(None)
}

/// A number's bytes in a structure; the offsets here are constants inside of it.
fn part<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut taken = [0; N];
    if let Some(found) = bytes.get(at..at + N) {
        taken.copy_from_slice(found);
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_of_this_very_program_is_found_and_a_static_one_and_a_text_have_none() {
        let here = std::env::current_exe().unwrap();
        let found = loader(&here).unwrap().unwrap();
        assert!(found.is_absolute(), "{}", found.display());
        // The kernel has mapped it into this process.
        let mapped = std::fs::read_to_string("/proc/self/maps").unwrap();
        let real = found.canonicalize().unwrap();
        assert!(
            mapped.lines().any(|line| line.ends_with(real.to_str().unwrap())),
            "{}: {mapped}",
            real.display()
        );
        let fixed = tempfile::NamedTempFile::new().unwrap();
        let mut header = [0; HEADER_BYTES];
        header[..MAGIC.len()].copy_from_slice(&MAGIC);
        std::fs::write(fixed.path(), header).unwrap();
        assert_eq!(loader(fixed.path()).unwrap(), None);
        let text = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(text.path(), "#!/bin/sh\n".repeat(10)).unwrap();
        loader(text.path()).unwrap_err();
    }
}
