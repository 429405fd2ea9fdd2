//! Disks of instances: sparse files with a file system in them.

use std::ffi::OsStr;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use rustix::fs::FileType;

use super::name::{is_temporary_of, plain};
use super::{Dir, FILE_MODE, failed, refused};
use crate::HostError;

/// Where Debian keeps what only administrators run, which is not in everyone's `PATH`.
const MKFS: [&str; 3] = ["mkfs.ext4", "/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"];

/// What `mkfs.ext4` finds on its input: the file itself, whatever its name is by now.
const INPUT: &str = "/proc/self/fd/0";

/// The metadata of an empty ext4, at the least: what has to fit for a disk to be made at all.
const FORMAT_BYTES: u64 = 1 << 20;

/// No reserved blocks: the guest's disk has no other user. Tables are written as they are used.
const OPTIONS: [&str; 6] = ["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1"];

impl Dir {
    /// A sparse file, formatted as ext4, on the disk before it has its name; one that is there stays as it is.
    pub fn make_disk(&self, name: impl AsRef<OsStr>, size_mib: u64) -> Result<(), HostError> {
        let name = plain(name.as_ref())?;
        let path = self.path().join(name);
        if let Some(stat) = self.look(name)? {
            if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile {
                return Ok(());
            }
            return Err(refused(&path, "exists and is not a disk; remove it"));
        }
        for left in self.list_if(|found| is_temporary_of(found, name))? {
            self.remove(left)?;
        }
        self.put(name, FILE_MODE, FORMAT_BYTES, |file| {
            file.set_len(size_mib.saturating_mul(1024 * 1024)).map_err(failed("make", &path))?;
            format_ext4(file, &path)?;
            file.sync_all().map_err(failed("sync", &path))
        })?;
        self.sync()
    }
}

/// Formats the file that is open.
fn format_ext4(file: &File, path: &Path) -> Result<(), HostError> {
    for program in MKFS {
        let input = file.try_clone().map_err(failed("format", path))?;
        let mut command = Command::new(program);
        command.args(OPTIONS).stdin(Stdio::from(input)).stdout(Stdio::null());
        match command.arg(INPUT).output() {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                let kind = match said.contains("No space left") {
                    true => io::ErrorKind::StorageFull,
                    false => io::ErrorKind::Other,
                };
                return Err(failed("format", path)(io::Error::new(kind, said.trim().replace('\n', "; "))));
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(failed("format", path)(cause)),
        }
    }
    Err(HostError::ProgramMissing { program: PathBuf::from(MKFS[0]) })
}
