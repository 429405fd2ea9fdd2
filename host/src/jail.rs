//! Where a jailed VMM lives: a directory that becomes its root, made anew for each start.
//!
//! What belongs to an instance stays in its run directory; the jail has second names for those files. So a jail can be
//! removed at any time when no process lives in it, and nothing is lost.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Component, Path, PathBuf};

use mvm_proto::InstanceId;
use rustix::fs::OFlags;
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::HostError;
use super::data_dir::DataDir;
use super::files::{self, Dir, FILE_MODE, OpenHow, failed, refused};
use super::images::Images;

const RECORD_MODE: u32 = 0o644;
/// No path is longer.
const MAX_RECORD_BYTES: u64 = 4096;

/// What leads to a jail is the agent's; the jail itself is its VMM's alone.
const WAY_MODE: u32 = 0o755;
const ROOT_MODE: u32 = 0o700;
const ROOT: &str = "root";

const READABLE_BY_ALL: u32 = 0o004;
const WRITABLE_BY_OTHERS: u32 = 0o022;
/// What a file of a snapshot has once it was taken from its VMM.
const KEPT_MODE: u32 = 0o444;

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

/// The directory above the one that is the instance's alone, in which all may be removed.
fn way_to(jail: &Jail) -> Result<&Path, HostError> {
    let own = jail.root.parent().filter(|_| jail.root.ends_with(ROOT));
    let named = own.filter(|own| own.file_name().is_some_and(|name| name == jail.instance.as_str()));
    let plain = |path: &&Path| path.components().all(|part| !matches!(part, Component::ParentDir));
    named.and_then(Path::parent).filter(plain).ok_or_else(|| {
        HostError::Refused(format!("{} is not a jail of {}", jail.root.display(), jail.instance))
    })
}

/// Opens that directory; with `make`, one that is missing is made. Below the run directory every step is taken by
/// descriptor, for the names there may be a VMM's. Anything else was named by the operator.
fn open_way(jail: &Jail, data: &DataDir, make: bool) -> Result<Dir, HostError> {
    let way = way_to(jail)?;
    if let Ok(below) = way.strip_prefix(data.run_path(&jail.instance)) {
        let mut dir = data.run(&jail.instance)?;
        for part in below.components() {
            let name = part.as_os_str();
            dir = if make { dir.make(name, WAY_MODE, None)? } else { dir.sub(name)? };
        }
        return Ok(dir);
    }
    if make {
        fs::create_dir_all(way).map_err(failed("make", way))?;
    }
    Dir::open_root(way)
}

fn open_jail(jail: &Jail, data: &DataDir) -> Result<Dir, HostError> {
    open_way(jail, data, false)?.sub(jail.instance.as_str())?.sub(ROOT)
}

/// An empty jail with these files, and a record of where it is.
pub(super) fn make(jail: &Jail, data: &DataDir, images: &Images, list: &[JailFile]) -> Result<(), HostError> {
    remove(jail, data)?;
    let own = open_way(jail, data, true)?.make(jail.instance.as_str(), WAY_MODE, None)?;
    let root = own.make(ROOT, ROOT_MODE, None)?;
    own_by(&root, jail, &jail.root)?;
    let text = jail.root.to_str().ok_or_else(|| refused(&jail.root, "is no text"))?;
    data.make_jails()?.replace(jail.instance.as_str(), text.as_bytes(), RECORD_MODE)?;
    share(jail, data, images, list)
}

/// A name in the jail's root itself: what is below may lead anywhere, for the root is the VMM's own.
fn check_name(jail: &Jail, name: &str) -> Result<(), HostError> {
    way_to(jail)?;
    if name.is_empty() || name == "." || name == ".." || name.contains(['/', '\0']) {
        return Err(HostError::Refused(format!("{name:?} is not a name in a jail")));
    }
    Ok(())
}

/// What the jailer makes in a jail besides its program: it writes there as root, whatever is under these names.
pub(super) const JAILERS_OWN: [&str; 3] = ["dev", "run", "sys"];

/// Where the jailer would go that is told this, and what its program is called there; none for any other program.
fn jailer_place(instance: &InstanceId, args: &[String]) -> Option<(PathBuf, String)> {
    let own = args.split(|word| word == "--").next()?;
    if own.first().is_none_or(|word| word != "--id") {
        return None;
    }
    let said = |option: &str| Some(own.get(own.iter().position(|word| word == option)? + 1)?.as_str());
    let program = Path::new(said("--exec-file")?).file_name()?.to_str()?.to_owned();
    let base = said("--chroot-base-dir").unwrap_or_default();
    Some((Path::new(base).join(&program).join(instance.as_str()).join(ROOT), program))
}

/// Takes away what lies where the jailer is about to write, if it is one that is to be started. It copies its program
/// as root over whatever has that name: in a jail that a VMM has lived in, that may be a link out, or the VMM's name for
/// an image.
pub(super) fn clear_for_jailer(
    data: &DataDir,
    instance: &InstanceId,
    args: &[String],
) -> Result<(), HostError> {
    let Some((place, program)) = jailer_place(instance, args) else { return Ok(()) };
    if recorded_jail(data, instance).as_ref() != Some(&place) {
        return Err(refused(&place, "is not the jail that was made for the instance"));
    }
    let root = open_recorded(data, instance)?;
    let pid_file = format!("{program}.pid");
    JAILERS_OWN.into_iter().chain([&*program, &*pid_file]).try_for_each(|name| root.remove_tree(name))
}

pub(super) fn unshare(jail: &Jail, data: &DataDir, names: &[String]) -> Result<(), HostError> {
    names.iter().try_for_each(|name| check_name(jail, name))?;
    let root = match open_jail(jail, data) {
        Err(error) if error.is_not_found() => return Ok(()),
        root => root?,
    };
    names.iter().try_for_each(|name| root.remove_tree(name))
}

pub(super) fn share(
    jail: &Jail,
    data: &DataDir,
    images: &Images,
    list: &[JailFile],
) -> Result<(), HostError> {
    list.iter().try_for_each(|file| check_name(jail, &file.name))?;
    let root = open_jail(jail, data)?;
    for file in list {
        root.remove_tree(&file.name)?;
        if file.writable {
            let (dir, name) = in_run_dir(jail, data, &file.source)?;
            let source = dir.open_or_make(&name, FILE_MODE)?;
            own_by(&source, jail, &file.source)?;
            root.link_shared(&source, &file.name)?;
        } else {
            lend(jail, &open_to_lend(jail, data, images, &file.source)?, &file.source, &root, &file.name)?;
        }
    }
    Ok(())
}

/// The open directory of a file in the instance's own run directory, and its name. Nothing else is given to a VMM.
fn in_run_dir(jail: &Jail, data: &DataDir, source: &Path) -> Result<(Dir, String), HostError> {
    let below = source.strip_prefix(data.run_path(&jail.instance)).ok().and_then(Path::to_str);
    let below = below.ok_or_else(|| refused(source, "is not in the instance's run directory"))?;
    let (dir, name) = data.run(&jail.instance)?.place(below)?;
    Ok((dir, name.to_string_lossy().into_owned()))
}

/// A file to read: the instance's own, one of a snapshot, or an image. It is looked up once, and what was found stays
/// open until it is linked or copied.
fn open_to_lend(jail: &Jail, data: &DataDir, images: &Images, source: &Path) -> Result<File, HostError> {
    let Ok(below) = source.strip_prefix(data.vms_path()) else {
        let image = images.pin(source)?;
        return files::reopen(&image.pin, OFlags::RDONLY)
            .map_err(|cause| failed("read", source)(cause.into()));
    };
    if source.starts_with(data.run_path(&jail.instance)) {
        let (dir, name) = in_run_dir(jail, data, source)?;
        return dir.open_file(&name, OpenHow::Read);
    }
    let (instance, directory, name) = of_a_snapshot(below)
        .ok_or_else(|| refused(source, "lies in a run directory that is not the instance's own"))?;
    let file = data.run(&instance)?.sub(directory)?.open_file(name, OpenHow::ReadShared)?;
    let meta = file.metadata().map_err(failed("look at", source))?;
    // One that was taken from its VMM has names in the jails of those that were made from it. Any other of root's that has
    // a second name may be anything.
    if meta.nlink() > 1 && meta.uid() == 0 && jail.uid != 0 && meta.mode() & 0o7777 != KEPT_MODE {
        return Err(refused(source, "is root's and has a second name elsewhere"));
    }
    Ok(file)
}

/// A file of a snapshot, which an instance may be forked from: `<instance>/snapshot-<digest>/<file>`.
fn of_a_snapshot(below: &Path) -> Option<(InstanceId, &str, &str)> {
    let parts: Vec<_> = below.iter().filter_map(|part| part.to_str()).collect();
    match parts[..] {
        [instance, directory, name] if directory.starts_with("snapshot-") => {
            Some((instance.parse().ok()?, directory, name))
        }
        _ => None,
    }
}

/// A second name for a file if the VMM may read and not change it, else a copy of its own. The owner of a shared file is
/// never changed. It is looked at and linked by one descriptor.
fn lend(jail: &Jail, file: &File, source: &Path, root: &Dir, name: &str) -> Result<(), HostError> {
    let meta = file.metadata().map_err(failed("read", source))?;
    // A VMM that runs as this very user may do to it what this process may.
    let is_own = jail.uid == rustix::process::geteuid().as_raw();
    let readable = meta.mode() & READABLE_BY_ALL != 0 || is_own;
    let changeable = !is_own && (meta.uid() == jail.uid || meta.mode() & WRITABLE_BY_OTHERS != 0);
    if readable && !changeable && root.link_shared(file, name).is_ok() {
        return Ok(());
    }
    let target = root.create_new(name, 0o400)?;
    let copied = files::copy(file, &target, meta.len()).map_err(failed("copy into the jail", source));
    copied.and_then(|_| own_by(&target, jail, source)).inspect_err(|_| {
        // The first error is the one to report.
        let _ = root.remove(name);
    })
}

/// Gives a file to the VMM's user. Without the right to do so it stays this user's.
fn own_by(file: impl std::os::fd::AsFd, jail: &Jail, path: &Path) -> Result<(), HostError> {
    match files::give(file, (jail.uid, jail.gid)) {
        Err(Errno::PERM | Errno::ACCESS) if !rustix::process::geteuid().is_root() => Ok(()),
        done => done.map_err(|cause| failed("give away", path)(cause.into())),
    }
}

/// The jail, which its jailer leaves behind. Control groups it makes none: it is told to leave them alone.
pub(super) fn remove(jail: &Jail, data: &DataDir) -> Result<(), HostError> {
    way_to(jail)?;
    // The settings may name another place by now than where it was made.
    let made = recorded_jail(data, &jail.instance).filter(|root| *root != jail.root);
    for jail in made.map(|root| Jail { root, ..jail.clone() }).iter().chain([jail]) {
        match open_way(jail, data, false) {
            Err(error) if error.is_not_found() => {}
            way => way?.remove_tree(jail.instance.as_str())?,
        }
    }
    forget(jail, data)
}

fn forget(jail: &Jail, data: &DataDir) -> Result<(), HostError> {
    match data.jails() {
        Err(error) if error.is_not_found() => Ok(()),
        records => records?.remove(jail.instance.as_str()),
    }
}

/// The jail that an instance was last given, open.
pub(super) fn open_recorded(data: &DataDir, instance: &InstanceId) -> Result<Dir, HostError> {
    let none = || failed("open the jail of", &data.run_path(instance))(io::ErrorKind::NotFound.into());
    let root = recorded_jail(data, instance).ok_or_else(none)?;
    open_jail(&Jail { instance: instance.clone(), root, uid: 0, gid: 0 }, data)
}

/// Its root, if it has one.
#[must_use]
pub(super) fn recorded_jail(data: &DataDir, instance: &InstanceId) -> Option<PathBuf> {
    read_record(&data.jails().ok()?, instance)
}

fn read_record(records: &Dir, instance: &InstanceId) -> Option<PathBuf> {
    let text = records.read(instance.as_str(), OpenHow::Read, MAX_RECORD_BYTES).ok()??;
    let root = PathBuf::from(String::from_utf8(text).ok()?);
    let jail = Jail { instance: instance.clone(), root, uid: 0, gid: 0 };
    way_to(&jail).ok()?;
    Some(jail.root)
}

/// Which instances have a jail, and which directory on which device it is: a jailed process has it as its root, under
/// a name that means nothing outside.
pub(super) fn roots(data: &DataDir) -> io::Result<Vec<((u64, u64), InstanceId)>> {
    let records = match data.jails() {
        Err(error) if error.is_not_found() => return Ok(Vec::new()),
        records => records?,
    };
    let mut found = Vec::new();
    for name in records.list()? {
        let Some(instance) = name.to_str().and_then(|name| name.parse::<InstanceId>().ok()) else { continue };
        let Some(root) = read_record(&records, &instance) else { continue };
        let jail = Jail { instance, root, uid: 0, gid: 0 };
        // One that is not there, or that is no directory any more, is the root of no process.
        let Ok(root) = open_jail(&jail, data) else { continue };
        let meta = File::from(std::os::fd::AsFd::as_fd(&root).try_clone_to_owned()?).metadata()?;
        found.push(((meta.dev(), meta.ino()), jail.instance));
    }
    Ok(found)
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
