//! Where a jailed VMM lives: a directory that becomes its root, made anew for each start.
//!
//! What belongs to an instance stays in its run directory; the jail has second names for those files. So a jail can be
//! removed at any time when no process lives in it, and nothing is lost.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _, PermissionsExt as _, chown, symlink};
use std::path::{Path, PathBuf};

use mvm_proto::InstanceId;
use serde::{Deserialize, Serialize};

use super::HostError;
use super::files::{self, failed};

/// The name in a run directory that leads to the jail of its instance, wherever that is.
pub(crate) const JAIL: &str = "jail";

const CGROUP_ROOT: &str = "/sys/fs/cgroup";
/// A jailer makes its groups below a parent, and that below each controller where there are several.
const CGROUP_DEPTH: usize = 4;
const READABLE_BY_ALL: u32 = 0o004;

/// A jail: `<base>/<program>/<instance>/root`, by the jailer's rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Jail {
    pub instance: InstanceId,
    pub root: PathBuf,
    /// Who the VMM runs as.
    pub uid: u32,
    pub gid: u32,
}

/// A file that a jailed VMM sees.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct JailFile {
    pub source: PathBuf,
    /// In the jail's root; no `/`.
    pub name: String,
    /// The VMM's to write, and the very same file: it must be on one filesystem with the jail. One that is not there
    /// is made. Without it the file may be a copy.
    pub writable: bool,
}

/// The directory that is the instance's alone: all in it may be removed.
fn own_dir(jail: &Jail) -> Result<&Path, HostError> {
    let own = jail.root.parent().filter(|_| jail.root.ends_with("root"));
    let named = own.filter(|own| own.file_name().is_some_and(|name| name == jail.instance.as_str()));
    named.ok_or_else(|| {
        HostError::Refused(format!("{} is not a jail of {}", jail.root.display(), jail.instance))
    })
}

/// An empty jail with these files, and a way to it from the run directory.
pub(super) fn make(jail: &Jail, run_dir: &Path, list: &[JailFile]) -> Result<(), HostError> {
    remove(jail, run_dir)?;
    let root = &jail.root;
    fs::create_dir_all(root).map_err(failed("make", root))?;
    fs::set_permissions(root, fs::Permissions::from_mode(0o700)).map_err(failed("make", root))?;
    own(root, jail)?;
    let link = run_dir.join(JAIL);
    symlink(root, &link).map_err(failed("make", &link))?;
    share(jail, list)
}

/// A name in the jail's root itself: what is below may lead anywhere, for the root is the VMM's own.
fn in_root(jail: &Jail, name: &str) -> Result<PathBuf, HostError> {
    own_dir(jail)?;
    if name.contains('/') {
        return Err(HostError::Refused(format!("{name:?} is not a name in a jail")));
    }
    files::inside(&jail.root, name)
}

pub(super) fn unshare(jail: &Jail, names: &[String]) -> Result<(), HostError> {
    names.iter().try_for_each(|name| files::remove(&in_root(jail, name)?))
}

pub(super) fn share(jail: &Jail, list: &[JailFile]) -> Result<(), HostError> {
    for file in list {
        let target = in_root(jail, &file.name)?;
        files::remove(&target)?;
        if file.writable {
            OpenOptions::new()
                .create(true)
                .append(true)
                .mode(0o600)
                .open(&file.source)
                .map_err(failed("make", &file.source))?;
            own(&file.source, jail)?;
            fs::hard_link(&file.source, &target).map_err(failed("link into the jail", &file.source))?;
        } else {
            lend(jail, &file.source, &target)?;
        }
    }
    Ok(())
}

/// A file to read: a second name for it if its mode lets the VMM read it, else a copy of its own. The owner of a
/// shared file is never changed.
fn lend(jail: &Jail, source: &Path, target: &Path) -> Result<(), HostError> {
    let meta = fs::metadata(source).map_err(failed("read", source))?;
    let readable = meta.mode() & READABLE_BY_ALL != 0 || meta.uid() == jail.uid;
    if readable && fs::hard_link(source, target).is_ok() {
        return Ok(());
    }
    fs::copy(source, target).map_err(failed("copy into the jail", source))?;
    fs::set_permissions(target, fs::Permissions::from_mode(0o400))
        .map_err(failed("copy into the jail", target))?;
    own(target, jail)
}

/// Gives a file to the VMM's user. Without the right to do so there is nobody to give it to but oneself.
fn own(path: &Path, jail: &Jail) -> Result<(), HostError> {
    match chown(path, Some(jail.uid), Some(jail.gid)) {
        Err(cause)
            if cause.kind() == io::ErrorKind::PermissionDenied && !rustix::process::geteuid().is_root() =>
        {
            Ok(())
        }
        done => done.map_err(failed("give away", path)),
    }
}

/// The jail and the control groups that its jailer made; it leaves both behind.
pub(super) fn remove(jail: &Jail, run_dir: &Path) -> Result<(), HostError> {
    files::remove(&run_dir.join(JAIL))?;
    files::remove(own_dir(jail)?)?;
    for group in groups_of(&jail.instance, Path::new(CGROUP_ROOT), CGROUP_DEPTH) {
        match fs::remove_dir(&group) {
            Err(cause) if cause.kind() != io::ErrorKind::NotFound => {
                return Err(failed("remove", &group)(cause));
            }
            _ => {}
        }
    }
    Ok(())
}

/// Control groups that bear the instance's name. Its id is random, so nobody else's do.
fn groups_of(instance: &InstanceId, dir: &Path, depth: usize) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let Ok(entries) = fs::read_dir(dir) else { return found };
    for entry in entries.flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())) {
        if entry.file_name() == instance.as_str() {
            found.push(entry.path());
        } else if depth > 1 {
            found.extend(groups_of(instance, &entry.path(), depth - 1));
        }
    }
    found
}

/// Which instances have a jail, and which directory on which device it is: a jailed process has it as its root, under
/// a name that means nothing outside.
pub(super) fn roots(vms_dir: &Path) -> io::Result<Vec<((u64, u64), InstanceId)>> {
    let entries = match fs::read_dir(vms_dir) {
        Ok(entries) => entries,
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(cause) => return Err(cause),
    };
    let root = |entry: fs::DirEntry| {
        let instance = entry.file_name().to_str()?.parse().ok()?;
        let meta = fs::metadata(entry.path().join(JAIL)).ok()?;
        Some(((meta.dev(), meta.ino()), instance))
    };
    Ok(entries.flatten().filter_map(root).collect())
}

/// The instance in whose jail a process lives. Its paths mean nothing outside; which directory its root is, does.
pub(super) fn inmate(process: &Path, jails: &[((u64, u64), InstanceId)]) -> Option<InstanceId> {
    if jails.is_empty() {
        return None;
    }
    let meta = fs::metadata(process.join("root/.")).ok()?;
    let root = (meta.dev(), meta.ino());
    jails.iter().find(|(jail, _)| *jail == root).map(|(_, instance)| instance.clone())
}

#[cfg(test)]
#[path = "jail_tests.rs"]
mod tests;
