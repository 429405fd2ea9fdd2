//! The operations on run directories, `<data>/vms/<instance>`: by names that are checked, in directories that are open.

use std::fs::DirBuilder;
use std::io;
use std::os::unix::fs::DirBuilderExt as _;
use std::path::Path;

use mvm_proto::InstanceId;

use rustix::fs::Mode;

use super::{Dir, FILE_MODE, OpenHow, RUN_DIR_MODE, failed, free_space, holes};
use crate::{DiskUse, HostError};

/// A directory that nobody but its owner looks into, with those above it that are missing.
pub(crate) fn create_private_dir(dir: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(RUN_DIR_MODE).create(dir)
}

/// The run directory of an instance.
pub(crate) fn open(vms_dir: &Path, instance: &InstanceId) -> Result<Dir, HostError> {
    Dir::open_root(vms_dir)?.sub(instance.as_str())
}

pub(crate) fn make(vms_dir: &Path, instance: &InstanceId) -> Result<(), HostError> {
    create_private_dir(vms_dir).map_err(failed("make", vms_dir))?;
    // One that was there may be looser than it should be.
    Dir::open_root(vms_dir)?.make(instance.as_str(), RUN_DIR_MODE, None).map(|_| ())
}

pub(crate) fn remove(vms_dir: &Path, instance: &InstanceId) -> Result<(), HostError> {
    match Dir::open_root(vms_dir) {
        Err(error) if error.is_not_found() => Ok(()),
        vms => vms?.remove_tree(instance.as_str()),
    }
}

/// A file, or a directory with all in it. Where its directory is gone, so is it.
pub(crate) fn remove_file(vms_dir: &Path, instance: &InstanceId, name: &str) -> Result<(), HostError> {
    super::name::parts(name)?;
    let found = open(vms_dir, instance).and_then(|run_dir| {
        let (dir, name) = run_dir.place(name)?;
        dir.remove_tree(name)
    });
    match found {
        Err(error) if error.is_not_found() => Ok(()),
        removed => removed,
    }
}

pub(crate) fn measure(vms_dir: &Path, instance: &InstanceId) -> Result<Option<DiskUse>, HostError> {
    match open(vms_dir, instance) {
        Err(error) if error.is_not_found() => Ok(None),
        dir => {
            let dir = dir?;
            Ok(Some(DiskUse { used_bytes: dir.usage()?, free_bytes: free_space(&dir)? }))
        }
    }
}

/// Whole or not at all for whoever reads it. What a power cut may take with it is gone with the VMs anyway.
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

/// Whoever may look into a run directory that it lies in may map it; only the directories keep others away.
const SHARED_MEMORY_MODE: u32 = 0o666;

/// A second name for the memory of a template. QEMU opens it to write although its guest's writes stay its own.
pub(crate) fn share_memory(run_dir: &Dir, template: &Dir, memory: &str, name: &str) -> Result<(), HostError> {
    let (from, memory) = template.place(memory)?;
    let file = from.open_file(memory, OpenHow::ReadShared)?;
    let path = from.path().join(memory);
    let share = || {
        // The VMM that made it is gone; its user may be another's by the time this one is used.
        if rustix::process::geteuid().is_root() {
            super::dir::give(&file, (0, 0))?;
        }
        rustix::fs::fchmod(&file, Mode::from_raw_mode(SHARED_MEMORY_MODE))
    };
    share().map_err(|errno| failed("share", &path)(errno.into()))?;
    let (dir, name) = run_dir.place(name)?;
    dir.remove_tree(name)?;
    dir.link_shared(&file, name)
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
