//! Whether a file that a VMM is to be given is one of the image store, and whether a program is still what it was.

use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::Path;

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, fstat, openat, openat2};

use super::policy::{is_straight, refused};
use crate::HostError;
use crate::files::failed;

const WRITABLE_BY_OTHERS: u32 = 0o022;

/// A regular file below `images`, reached through no link. It belongs to the agent (or to root), so it is no second
/// name of someone else's file.
pub(super) fn check(images: &Path, path: &Path, agent: u32) -> Result<(), HostError> {
    let inside = path.strip_prefix(images).ok().filter(|inside| !inside.as_os_str().is_empty());
    let Some(inside) = inside.filter(|_| is_straight(path)) else {
        return refused(format!("{} is not in the image store", path.display()));
    };
    let look = || -> io::Result<(FileType, u32, bool)> {
        let path_only = OFlags::PATH | OFlags::CLOEXEC;
        let store = openat(CWD, images, path_only | OFlags::DIRECTORY, Mode::empty())?;
        let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
        let file = openat2(store, inside, path_only | OFlags::NOFOLLOW, Mode::empty(), resolve)?;
        let stat = fstat(file)?;
        Ok((FileType::from_raw_mode(stat.st_mode), stat.st_uid, stat.st_nlink == 1))
    };
    match look().map_err(failed("look at", path))? {
        (FileType::RegularFile, owner, _) if owner == agent => Ok(()),
        // One that root made: it has this name only, or the agent did not give it this one.
        (FileType::RegularFile, 0, true) => Ok(()),
        _ => refused(format!("{} is not an image file of this agent", path.display())),
    }
}

/// A program that nobody but root can have changed.
pub(super) fn check_program(program: &Path) -> Result<(), HostError> {
    let meta = match std::fs::metadata(program) {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => {
            return Err(HostError::ProgramMissing { program: program.to_owned() });
        }
        meta => meta.map_err(failed("look at", program))?,
    };
    // Without root there is no one to protect from the agent.
    let trusted = meta.uid() == 0 || meta.uid() == rustix::process::geteuid().as_raw();
    if meta.is_file() && trusted && meta.permissions().mode() & WRITABLE_BY_OTHERS == 0 {
        return Ok(());
    }
    refused(format!("{} may be changed by others than root; give it to root", program.display()))
}
