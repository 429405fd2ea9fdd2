//! Folders, links, and the owners, modes and times of files: what a file's bytes alone don't bring back.

use std::fs::{self, Permissions};
use std::io::ErrorKind;
use std::os::unix::fs::{PermissionsExt, lchown, symlink};
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FileType, Timespec, Timestamps, utimensat};

use super::absolute;
use crate::protocol::SetEntry;
use crate::refusal::Refusal;

pub(crate) fn set_entry(request: &SetEntry) -> Result<(), Refusal> {
    absolute(&request.path)?;
    let path = Path::new(&request.path);
    let failed = |error| Refusal::io(&request.path, &error);
    let kind = FileType::from_raw_mode(request.mode);
    let found = match fs::symlink_metadata(path) {
        Ok(found) => Some(found.file_type()),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(failed(error)),
    };
    match (kind, found) {
        (FileType::Directory, None) => fs::create_dir_all(path).map_err(failed)?,
        (FileType::Directory, Some(found)) if found.is_dir() => {}
        (FileType::RegularFile, Some(found)) if found.is_file() => {}
        (FileType::Symlink, found) => {
            if found.is_some_and(|found| found.is_symlink()) {
                fs::remove_file(path).map_err(failed)?;
            }
            if let Some(folder) = path.parent() {
                fs::create_dir_all(folder).map_err(failed)?;
            }
            symlink(&request.target, path).map_err(failed)?;
        }
        (FileType::RegularFile, None) => return Err(failed(ErrorKind::NotFound.into())),
        (FileType::Directory | FileType::RegularFile, Some(_)) => {
            return Err(failed(ErrorKind::AlreadyExists.into()));
        }
        _ => return Err(Refusal::invalid(format!("{}: only folders, files and links", request.path))),
    }
    lchown(path, Some(request.uid), Some(request.gid)).map_err(failed)?;
    // A link has no mode of its own.
    if kind != FileType::Symlink {
        fs::set_permissions(path, Permissions::from_mode(request.mode & 0o7777)).map_err(failed)?;
    }
    let time = Timespec {
        tv_sec: request.modified_ms.div_euclid(1000),
        tv_nsec: request.modified_ms.rem_euclid(1000) * 1_000_000,
    };
    let times = Timestamps { last_access: time, last_modification: time };
    utimensat(CWD, path, &times, AtFlags::SYMLINK_NOFOLLOW).map_err(|error| failed(error.into()))
}
