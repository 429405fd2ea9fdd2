//! Disks by their serial number, at the paths that the agent names.

use std::fs;
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, mount};

use crate::boot;
use crate::limits;
use crate::protocol::Mount;
use crate::refusal::Refusal;

pub(super) fn mount_all(mounts: &[Mount]) -> Result<(), Refusal> {
    mounts.iter().try_for_each(mount_one)
}

fn mount_one(wanted: &Mount) -> Result<(), Refusal> {
    let path = Path::new(&wanted.path);
    if !path.is_absolute() {
        return Err(Refusal::invalid(format!("{:?} is not absolute", wanted.path)));
    }
    if is_mounted(&wanted.path) {
        return Ok(());
    }
    let found = || device(&wanted.serial);
    let device = boot::wait_for(limits::DISK, found)
        .ok_or_else(|| Refusal::new("not_found", format!("no disk has the serial {:?}", wanted.serial)))?;
    let failed = |error| Refusal::io(&wanted.path, &error);
    fs::create_dir_all(path).map_err(failed)?;
    let filesystem = if wanted.filesystem.is_empty() { "ext4" } else { &wanted.filesystem };
    let mut flags = MountFlags::NODEV | MountFlags::NOSUID;
    flags.set(MountFlags::RDONLY, wanted.read_only);
    mount(&device, path, filesystem, flags, None).map_err(|error| failed(error.into()))
}

fn is_mounted(path: &str) -> bool {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    mounts.lines().any(|line| line.split(' ').nth(1) == Some(path.trim_end_matches('/')))
}

/// The block device of a virtio disk with this serial.
fn device(serial: &str) -> Option<PathBuf> {
    let entries = fs::read_dir("/sys/block").ok()?;
    for entry in entries.flatten() {
        let found = fs::read_to_string(entry.path().join("serial")).unwrap_or_default();
        if !serial.is_empty() && found.trim() == serial {
            return Some(Path::new("/dev").join(entry.file_name())).filter(|device| device.exists());
        }
    }
    None
}
