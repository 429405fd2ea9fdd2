//! A second file with the same content: without copying where the file system can share blocks, else with its holes.

use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};

use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

/// How a copy came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum CloneKind {
    /// The blocks are shared until one of the two is written to.
    Reflinked,
    Copied,
}

/// At once, where the kernel does not copy between two files itself.
const COPY_BYTES: usize = 1 << 20;

/// Fills an empty file.
pub(crate) fn copy(source: &File, target: &File, length: u64) -> io::Result<CloneKind> {
    match ioctl_ficlone(target, source) {
        Ok(()) => return Ok(CloneKind::Reflinked),
        Err(cause @ (Errno::NOSPC | Errno::DQUOT | Errno::IO)) => return Err(cause.into()),
        // Another file system, or one that can't.
        Err(_) => {}
    }
    target.set_len(length)?;
    let mut at = 0;
    while at < length {
        let begin = match seek(source, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            // Nothing but a hole is left.
            Err(Errno::NXIO) => break,
            Err(cause) => return Err(cause.into()),
        };
        let end = seek(source, SeekFrom::Hole(begin))?.min(length);
        copy_range(source, target, begin, end)?;
        at = end.max(begin + 1);
    }
    Ok(CloneKind::Copied)
}

fn copy_range(mut source: &File, mut target: &File, begin: u64, end: u64) -> io::Result<()> {
    let mut at = begin;
    while at < end {
        let (mut from, mut to) = (at, at);
        let length = usize::try_from(end - at).unwrap_or(usize::MAX);
        match copy_file_range(source, Some(&mut from), target, Some(&mut to), length) {
            // It is shorter by now, or of a kind that the kernel does not copy: reading tells.
            Ok(0) | Err(Errno::XDEV | Errno::INVAL | Errno::NOSYS | Errno::OPNOTSUPP) => break,
            Ok(copied) => at += copied as u64,
            Err(Errno::INTR) => {}
            Err(cause) => return Err(cause.into()),
        }
    }
    if at == end {
        return Ok(());
    }
    source.seek(io::SeekFrom::Start(at))?;
    target.seek(io::SeekFrom::Start(at))?;
    let mut buffer = vec![0; COPY_BYTES];
    while at < end {
        let wanted = usize::try_from(end - at).unwrap_or(COPY_BYTES).min(COPY_BYTES);
        let read = source.read(&mut buffer[..wanted])?;
        if read == 0 {
            return Err(io::Error::new(io::ErrorKind::UnexpectedEof, "it was cut while it was copied"));
        }
        target.write_all(&buffer[..read])?;
        at += read as u64;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{FileExt as _, MetadataExt as _};
    use std::path::Path;

    use super::*;

    const LENGTH: u64 = (1 << 30) + 7;
    const PIECES: [(u64, usize, u8); 3] = [(0, 100_000, 1), (1 << 29, 5_000_000, 2), ((1 << 30) - 3, 10, 3)];

    fn copied(from: &File, to: &Path) -> (File, CloneKind) {
        let target = File::create_new(to).unwrap();
        let kind = copy(from, &target, LENGTH).unwrap();
        (File::open(to).unwrap(), kind)
    }

    #[test]
    fn a_copy_has_the_same_bytes_and_holes_also_on_another_file_system() {
        let disk = tempfile::tempdir().unwrap();
        let memory = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
        let source = File::create_new(disk.path().join("from")).unwrap();
        source.set_len(LENGTH).unwrap();
        for (at, length, byte) in PIECES {
            source.write_all_at(&vec![byte; length], at).unwrap();
        }
        source.sync_all().unwrap();
        let source = File::open(disk.path().join("from")).unwrap();
        for place in [disk.path(), memory.path()] {
            let (copy, kind) = copied(&source, &place.join("to"));
            assert_eq!(copy.metadata().unwrap().len(), LENGTH);
            let blocks = [&source, &copy].map(|file| file.metadata().unwrap().blocks());
            assert!(kind == CloneKind::Reflinked || blocks[1] <= blocks[0] + 64, "{kind:?} {blocks:?}");
            for (at, length, byte) in PIECES {
                let mut read = vec![0; length];
                copy.read_exact_at(&mut read, at).unwrap();
                assert!(read.iter().all(|found| *found == byte), "{at}");
            }
        }
    }
}
