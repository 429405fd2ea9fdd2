//! What lies in a run directory: made, written, renamed and removed by name.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use super::HostError;

/// Private to whoever runs the agent: there is guest memory in it.
const RUN_DIR_MODE: u32 = 0o700;
const FILE_MODE: u32 = 0o600;

/// How much of a log's end is kept when it is cut.
const KEPT_LOG_BYTES: u64 = 256 * 1024;

/// Where Debian keeps what only administrators run, which is not in everyone's `PATH`.
const MKFS: [&str; 3] = ["mkfs.ext4", "/usr/sbin/mkfs.ext4", "/sbin/mkfs.ext4"];

/// Says what was attempted on what.
pub(super) fn failed(attempt: &str, path: &Path) -> impl FnOnce(io::Error) -> HostError {
    let attempt = format!("{attempt} {}", path.display());
    move |cause| HostError::Io { attempt, cause }
}

/// A name inside a run directory, or inside a directory in it; never a path that leads out.
pub(super) fn inside(dir: &Path, name: &str) -> Result<PathBuf, HostError> {
    let plain = |part: &str| !part.is_empty() && part != "." && part != ".." && !part.contains('\0');
    if name.split('/').count() <= 2 && name.split('/').all(plain) {
        return Ok(dir.join(name));
    }
    Err(HostError::Refused(format!("{name:?} is not a name in a run directory")))
}

pub(super) fn make_run_dir(dir: &Path) -> Result<(), HostError> {
    mvm_pki::files::create_private_dir(dir).map_err(failed("make", dir))?;
    // One that was there may be looser than it should be.
    fs::set_permissions(dir, fs::Permissions::from_mode(RUN_DIR_MODE)).map_err(failed("make", dir))
}

/// A file, or a directory with all in it.
pub(super) fn remove(path: &Path) -> Result<(), HostError> {
    let removed = match fs::symlink_metadata(path) {
        Ok(meta) if meta.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(cause) => Err(cause),
    };
    match removed {
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other.map_err(failed("remove", path)),
    }
}

/// Whole or not at all for whoever reads it. What a power cut may take with it is gone with the VMs anyway.
pub(super) fn write(path: &Path, text: &str) -> Result<(), HostError> {
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(true).mode(FILE_MODE);
    let written = options.open(&temporary).and_then(|mut file| file.write_all(text.as_bytes()));
    let written = written.and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    written.map_err(failed("write", path))
}

pub(super) fn link(source: &Path, path: &Path) -> Result<(), HostError> {
    remove(path)?;
    std::os::unix::fs::symlink(source, path).map_err(failed("make", path))
}

pub(super) fn make_dir(path: &Path) -> Result<(), HostError> {
    remove(path)?;
    mvm_pki::files::create_private_dir(path).map_err(failed("make", path))
}

pub(super) fn rename(from: &Path, to: &Path) -> Result<(), HostError> {
    let exists = |path: &Path| path.try_exists().map_err(failed("look at", path));
    if !exists(from)? && exists(to)? {
        return Ok(());
    }
    sync(from).map_err(failed("sync", from))?;
    if from != to {
        remove(to)?;
    }
    fs::rename(from, to).map_err(failed("rename", from))?;
    let dir = to.parent().unwrap_or(to);
    File::open(dir).and_then(|dir| dir.sync_all()).map_err(failed("sync", dir))
}

/// A file, or a directory and the files in it.
fn sync(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    if file.metadata()?.is_dir() {
        for entry in fs::read_dir(path)? {
            File::open(entry?.path())?.sync_all()?;
        }
    }
    file.sync_all()
}

/// Whoever writes the log appends, so that it goes on at the new end.
pub(super) fn trim_log(path: &Path, max_bytes: u64) -> Result<(), HostError> {
    let mut log = match OpenOptions::new().read(true).write(true).open(path) {
        Ok(log) => log,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(()),
        Err(cause) => return Err(failed("open", path)(cause)),
    };
    let length = log.metadata().map_err(failed("look at", path))?.len();
    if length <= max_bytes {
        return Ok(());
    }
    let mut end = Vec::new();
    log.seek(SeekFrom::Start(length.saturating_sub(KEPT_LOG_BYTES)))
        .and_then(|_| (&mut log).take(KEPT_LOG_BYTES).read_to_end(&mut end))
        .map_err(failed("read", path))?;
    let mut old = path.as_os_str().to_owned();
    old.push(".old");
    // The disk may be full of this very log: cutting it comes first, keeping its end is a courtesy.
    log.set_len(0).map_err(failed("cut", path))?;
    fs::write(&old, end).map_err(failed("write", Path::new(&old)))
}

pub(super) fn make_disk(path: &Path, size_mib: u64) -> Result<(), HostError> {
    if path.try_exists().map_err(failed("look at", path))? {
        return Ok(());
    }
    let mut temporary = path.as_os_str().to_owned();
    temporary.push(".tmp");
    let temporary = PathBuf::from(temporary);
    let made = sparse(&temporary, size_mib)
        .and_then(|()| format_ext4(&temporary))
        .and_then(|()| rename(&temporary, path));
    if made.is_err() {
        // The first error is the one to report.
        let _ = fs::remove_file(&temporary);
    }
    made
}

fn sparse(path: &Path, size_mib: u64) -> Result<(), HostError> {
    let file = File::create(path).map_err(failed("make", path))?;
    let private = fs::Permissions::from_mode(FILE_MODE);
    file.set_permissions(private)
        .and_then(|()| file.set_len(size_mib.saturating_mul(1024 * 1024)))
        .map_err(failed("make", path))
}

fn format_ext4(path: &Path) -> Result<(), HostError> {
    for program in MKFS {
        // No reserved blocks: the guest's disk has no other user. Tables are written as they are used.
        let run = Command::new(program)
            .args(["-q", "-F", "-m", "0", "-E", "lazy_itable_init=1,lazy_journal_init=1"])
            .arg(path)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .output();
        match run {
            Ok(output) if output.status.success() => return Ok(()),
            Ok(output) => {
                let said = String::from_utf8_lossy(&output.stderr);
                let cause = io::Error::other(said.trim().replace('\n', "; "));
                return Err(failed("format", path)(cause));
            }
            Err(cause) if cause.kind() == io::ErrorKind::NotFound => {}
            Err(cause) => return Err(failed("format", path)(cause)),
        }
    }
    Err(HostError::ProgramMissing { program: PathBuf::from(MKFS[0]) })
}
