//! Disks by their serial number, at the paths that the agent names.
//!
//! Not every VMM lets its owner name a disk: Firecracker gives each a serial of its own making. There the disk to be
//! written is known by being the only one that can be.

use std::fs;
use std::path::Path;

use rustix::mount::{MountFlags, mount};

use crate::boot;
use crate::limits;
use crate::protocol::{FailureCode, Mount};
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
    let found = || {
        let disk = choose(wanted, &disks()).ok()?;
        Some(Path::new("/dev").join(disk)).filter(|device| device.exists())
    };
    let device = boot::wait_for(limits::DISK, found).ok_or_else(|| {
        let why = choose(wanted, &disks()).map_or_else(|why| why, |disk| format!("/dev/{disk} is not there"));
        Refusal::new(FailureCode::NotFound, why)
    })?;
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

#[derive(Debug, Clone, PartialEq, Eq)]
struct Disk {
    /// As in `/sys/block` and `/dev`.
    name: String,
    serial: String,
    read_only: bool,
}

/// The disks that the kernel has found so far.
fn disks() -> Vec<Disk> {
    let entries = fs::read_dir("/sys/block").into_iter().flatten().flatten();
    let disk = |entry: fs::DirEntry| {
        let read = |name: &str| fs::read_to_string(entry.path().join(name)).unwrap_or_default();
        Disk {
            name: entry.file_name().to_string_lossy().into_owned(),
            serial: read("serial").trim().to_owned(),
            // What does not say that it can be written is left alone.
            read_only: read("ro").trim() != "0",
        }
    };
    entries.map(disk).collect()
}

/// The disk with the serial; where no disk has it and it is to be written, the only virtio disk that can be. Otherwise
/// why there is none.
fn choose(wanted: &Mount, disks: &[Disk]) -> Result<String, String> {
    let named = |disk: &&Disk| !wanted.serial.is_empty() && disk.serial == wanted.serial;
    if let Some(disk) = disks.iter().find(named) {
        return Ok(disk.name.clone());
    }
    let none = format!("no disk has the serial {:?}", wanted.serial);
    if wanted.read_only {
        return Err(none);
    }
    let writable: Vec<&str> = disks
        .iter()
        .filter(|disk| disk.name.starts_with("vd") && !disk.read_only)
        .map(|disk| disk.name.as_str())
        .collect();
    match writable.as_slice() {
        [only] => Ok((*only).to_owned()),
        [] => Err(format!("{none}, and no virtio disk can be written")),
        several => Err(format!("{none}, and several virtio disks can be written: {}", several.join(", "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn disk(name: &str, serial: &str, read_only: bool) -> Disk {
        Disk { name: name.into(), serial: serial.into(), read_only }
    }

    #[test]
    fn a_disk_is_chosen_by_its_serial_else_for_being_the_only_one_that_can_be_written() {
        let wanted = Mount { serial: "data".into(), ..Mount::default() };
        let (root, other) = (disk("vda", "rootfs", true), disk("loop0", "", false));
        let named = [root.clone(), disk("vdb", "other", false), disk("vdc", "data", false)];
        assert_eq!(choose(&wanted, &named), Ok("vdc".to_owned()));
        let unnamed = [root.clone(), other.clone(), disk("vdb", "64768123456", false)];
        assert_eq!(choose(&wanted, &unnamed), Ok("vdb".to_owned()));
        assert_eq!(
            choose(&wanted, &[root, other]),
            Err("no disk has the serial \"data\", and no virtio disk can be written".to_owned())
        );
        assert_eq!(
            choose(&wanted, &named[..2].iter().cloned().chain([disk("vdc", "", false)]).collect::<Vec<_>>()),
            Err("no disk has the serial \"data\", and several virtio disks can be written: vdb, vdc"
                .to_owned())
        );
        let to_read = Mount { read_only: true, ..wanted };
        assert!(choose(&to_read, &unnamed).is_err(), "only a disk to be written is known by that");
    }
}
