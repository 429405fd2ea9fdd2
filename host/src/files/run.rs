//! The operations on run directories, `<data>/vms/<instance>`: by names that are checked, in directories that are open.

use std::fs::{DirBuilder, File};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::Path;

use mvm_proto::InstanceId;

use rustix::fs::Mode;

use super::{Dir, FILE_MODE, OpenHow, RUN_DIR_MODE, failed, free_space, holes, refused};
use crate::data_dir::DataDir;
use crate::{DiskUse, HostError};

/// A directory that only its owner can read, with those above it that are missing.
pub(crate) fn create_private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(RUN_DIR_MODE).create(dir)
}

pub(crate) fn make(data: &DataDir, instance: &InstanceId) -> Result<(), HostError> {
    // One that was there may be looser than it should be.
    data.make_vms()?.make(instance.as_str(), RUN_DIR_MODE, None).map(|_| ())
}

pub(crate) fn remove(data: &DataDir, instance: &InstanceId) -> Result<(), HostError> {
    match data.vms() {
        Err(error) if error.is_not_found() => Ok(()),
        vms => vms?.remove_tree(instance.as_str()),
    }
}

/// A file, or a directory with all in it. Where its directory is gone, so is it.
pub(crate) fn remove_file(data: &DataDir, instance: &InstanceId, name: &str) -> Result<(), HostError> {
    super::name::parts(name)?;
    let found = data.run(instance).and_then(|run_dir| {
        let (dir, name) = run_dir.place(name)?;
        dir.remove_tree(name)
    });
    match found {
        Err(error) if error.is_not_found() => Ok(()),
        removed => removed,
    }
}

pub(crate) fn measure(data: &DataDir, instance: &InstanceId) -> Result<Option<DiskUse>, HostError> {
    match data.run(instance) {
        Err(error) if error.is_not_found() => Ok(None),
        dir => {
            let dir = dir?;
            Ok(Some(DiskUse { used_bytes: dir.usage()?, free_bytes: free_space(&dir)? }))
        }
    }
}

/// Whole or not at all for its readers. What a power cut may take with it is gone with the VMs anyway.
pub(crate) fn write(run_dir: &Dir, name: &str, text: &str) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    dir.replace(name, text.as_bytes(), FILE_MODE)
}

pub(crate) fn link(run_dir: &Dir, source: &Path, name: &str) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    dir.link_path(source, name)
}

pub(crate) fn make_dir(run_dir: &Dir, name: &str) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    dir.remove_tree(name)?;
    dir.make(name, RUN_DIR_MODE, None).map(|_| ())
}

pub(crate) fn rename(run_dir: &Dir, from: &str, to: &str) -> Result<(), HostError> {
    let same = from == to;
    let ((from_dir, from), (to_dir, to)) = (run_dir.place(from)?, run_dir.place(to)?);
    if from_dir.look(from)?.is_none() && to_dir.look(to)?.is_some() {
        return Ok(());
    }
    from_dir.sync_tree(from)?;
    if !same {
        to_dir.remove_tree(to)?;
    }
    from_dir.rename(from, &to_dir, to)?;
    to_dir.sync()
}

/// Others than its owner may add to it, and take away or replace nothing that is not theirs.
const SHARED_DIR_MODE: u32 = 0o1770;

/// Lets a VMM of this user make files of its own in its run directory, and write these that are there already.
pub(crate) fn admit(run_dir: &Dir, user: u32, files: &[String]) -> Result<(), HostError> {
    run_dir.share_with(user, SHARED_DIR_MODE)?;
    for name in files {
        let (dir, name) = run_dir.place(name)?;
        if dir.look(name)?.is_some() {
            dir.chown(name, (user, user))?;
        }
    }
    Ok(())
}

/// Any user that can enter its run directory may map it; only the directories keep others away.
const SHARED_MEMORY_MODE: u32 = 0o666;

/// A second name for the memory of a template. QEMU opens it to write although its guest's writes stay its own.
/// `is_vmm` says whose memory is shared: no other file is given another owner or mode.
pub(crate) fn share_memory(
    run_dir: &Dir,
    template: &Dir,
    memory: &str,
    name: &str,
    is_vmm: impl Fn(u32) -> bool,
) -> Result<(), HostError> {
    let (from, memory) = template.place(memory)?;
    let path = from.path().join(memory);
    let user = rustix::process::geteuid().as_raw();
    let owner = |file: &File| {
        let meta = file.metadata().map_err(failed("look at", &path))?;
        Ok::<_, HostError>((meta.uid(), meta.mode() & 0o7777))
    };
    let mut file = from.open_file(memory, OpenHow::ReadShared)?;
    // One that is shared already has names in the directories of those that load it, and stays as it is.
    if owner(&file)? != (user, SHARED_MEMORY_MODE) {
        file = from.open_file(memory, OpenHow::Read)?;
        if !is_vmm(owner(&file)?.0) {
            return Err(refused(&path, "is no memory of a VMM"));
        }
        let share = || {
            rustix::fs::fchmod(&file, Mode::from_raw_mode(SHARED_MEMORY_MODE))?;
            // The VMM that made it is gone; its user may be another's by the time this one is used.
            if rustix::process::geteuid().is_root() {
                super::dir::give(&file, (0, 0))?;
            }
            Ok(())
        };
        share().map_err(|errno: rustix::io::Errno| failed("share", &path)(errno.into()))?;
    }
    let (dir, name) = run_dir.place(name)?;
    dir.remove_tree(name)?;
    dir.link_shared(&file, name)
}

/// Any VMM may be lent it, and none may write to it.
const KEPT_MODE: u32 = 0o444;

/// Takes a file from the VMM that wrote it. It is looked up once, and must have no name elsewhere.
pub(crate) fn make_read_only(
    run_dir: &Dir,
    name: &str,
    is_vmm: impl Fn(u32) -> bool,
) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    let path = dir.path().join(name);
    let file = dir.open_file(name, OpenHow::Read)?;
    let owner = file.metadata().map_err(failed("look at", &path))?.uid();
    let user = rustix::process::geteuid();
    if owner != user.as_raw() && !is_vmm(owner) {
        return Err(refused(&path, "is no file of a VMM"));
    }
    let take = || {
        // In this order: its owner could give it another mode.
        if user.is_root() {
            super::dir::give(&file, (0, 0))?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(KEPT_MODE))
    };
    take().map_err(|errno| failed("take back", &path)(errno.into()))
}

pub(crate) fn dig_holes(run_dir: &Dir, name: &str) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    let file = dir.open_file(name, OpenHow::Write)?;
    holes::dig(&file).map_err(failed("dig holes in", &dir.path().join(name)))
}

pub(crate) fn trim_log(run_dir: &Dir, name: &str, max_bytes: u64) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    dir.trim_log(name, max_bytes, FILE_MODE)
}

pub(crate) fn make_disk(run_dir: &Dir, name: &str, size_mib: u64) -> Result<(), HostError> {
    let (dir, name) = run_dir.place(name)?;
    dir.make_disk(name, size_mib)
}
