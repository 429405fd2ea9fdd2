//! Makes a file take no more of the disk than it has to say: pages of zeros become holes, which read the same.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt as _;

use rustix::fs::{FallocateFlags, SeekFrom, fallocate, seek};
use rustix::io::Errno;

/// What file systems give back: no part of a page.
const PAGE_BYTES: usize = 4096;

/// At once: much enough for the disk, little enough for the cache of a processor.
const READ_BYTES: usize = 256 * 1024;

/// No process may write to the file meanwhile. Where the file system has no holes it stays as it is.
pub(super) fn dig(file: &File) -> io::Result<()> {
    let length = file.metadata()?.len();
    let mut buffer = vec![0; READ_BYTES];
    let mut at = 0;
    while at < length {
        let begin = match seek(file, SeekFrom::Data(at)) {
            // Nothing but a hole is left.
            Err(Errno::NXIO) => break,
            begin => begin?,
        };
        let end = seek(file, SeekFrom::Hole(begin))?.min(length);
        at = end.max(begin + 1);
        let mut from = begin;
        while from < end {
            let wanted = usize::try_from(end - from).unwrap_or(READ_BYTES).min(READ_BYTES);
            file.read_exact_at(&mut buffer[..wanted], from)?;
            for (offset, pages) in zeros(&buffer[..wanted]) {
                let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
                match fallocate(file, flags, from + offset, pages) {
                    Err(Errno::OPNOTSUPP | Errno::NOSYS) => return Ok(()),
                    dug => dug?,
                }
            }
            from += wanted as u64;
        }
    }
    Ok(())
}

/// Where whole pages of zeros begin, and how many bytes each run of them has.
fn zeros(bytes: &[u8]) -> Vec<(u64, u64)> {
    let mut found: Vec<(u64, u64)> = Vec::new();
    for (number, page) in bytes.chunks_exact(PAGE_BYTES).enumerate() {
        if page.iter().any(|byte| *byte != 0) {
            continue;
        }
        let begin = (number * PAGE_BYTES) as u64;
        match found.last_mut() {
            Some((from, length)) if *from + *length == begin => *length += PAGE_BYTES as u64,
            _ => found.push((begin, PAGE_BYTES as u64)),
        }
    }
    found
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt as _;

    use super::*;

    #[test]
    fn zeros_take_no_place_and_all_reads_as_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        let mut content = vec![0_u8; 3 * READ_BYTES + 100];
        for at in [0, READ_BYTES - 1, 2 * READ_BYTES + 5 * PAGE_BYTES, 3 * READ_BYTES + 99] {
            content[at] = 7;
        }
        std::fs::write(&path, &content).unwrap();
        let file = File::options().read(true).write(true).open(&path).unwrap();
        let before = file.metadata().unwrap().blocks();
        dig(&file).unwrap();
        dig(&file).unwrap();
        file.sync_all().unwrap();
        assert_eq!(std::fs::read(&path).unwrap(), content);
        let after = file.metadata().unwrap().blocks();
        assert!(after * 512 <= 8 * PAGE_BYTES as u64 && after < before, "{before} -> {after}");
    }

    #[test]
    fn runs_of_zeros_are_found_by_whole_pages() {
        let mut bytes = vec![0; 5 * PAGE_BYTES];
        bytes[PAGE_BYTES + 3] = 1;
        let page = PAGE_BYTES as u64;
        assert_eq!(zeros(&bytes), [(0, page), (2 * page, 3 * page)]);
        assert_eq!(zeros(&bytes[..PAGE_BYTES - 1]), []);
    }
}
