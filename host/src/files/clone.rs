//! A second file with the same content: without copying where the file system can share blocks, else with its holes.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, Write as _};

use rustix::fs::{SeekFrom, copy_file_range, ioctl_ficlone, seek};
use rustix::io::Errno;

use super::dir::{Dir, OpenHow};
use super::{FILE_MODE, failed};
use crate::HostError;

/// How a copy came about.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CloneKind {
    /// The blocks are shared until one of the two is written to.
    Reflinked,
    Copied,
}

/// At once, where the kernel does not copy between two files itself.
const COPY_BYTES: usize = 1 << 20;

/// Puts a copy of a file under a name, whole and on the disk, or not at all. Holes stay holes. The source must not be
/// written to meanwhile.
pub fn clone_file(
    from: &Dir,
    from_name: impl AsRef<OsStr>,
    to: &Dir,
    to_name: impl AsRef<OsStr>,
) -> Result<CloneKind, HostError> {
    let (from_name, to_name) = (from_name.as_ref(), to_name.as_ref());
    let source = from.open_file(from_name, OpenHow::ReadShared)?;
    let path = from.path().join(from_name);
    let length = source.metadata().map_err(failed("look at", &path))?.len();
    let mut kind = CloneKind::Copied;
    to.put(to_name, FILE_MODE, length, |target| {
        let copied = copy(&source, target, length).and_then(|kind| target.sync_all().map(|()| kind));
        kind = copied.map_err(failed("copy", &path))?;
        Ok(())
    })?;
    to.sync()?;
    Ok(kind)
}

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
