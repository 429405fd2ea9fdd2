//! From the initramfs to a disk: read-only, with a layer of memory above it that takes what is written.

use std::fs;
use std::io;
use std::path::Path;

use rustix::mount::{MountFlags, mount, mount_move};

use super::wait_for;
use crate::limits;

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Root {
    pub(super) device: String,
    filesystem: String,
}

impl Root {
    /// `mvm.root=/dev/vda mvm.rootfstype=erofs` on the kernel's command line.
    pub(super) fn named_by(command_line: &str) -> Option<Self> {
        let value =
            |key: &str| command_line.split_whitespace().filter_map(|word| word.strip_prefix(key)).next_back();
        let device = value("mvm.root=")?.to_owned();
        Some(Self { device, filesystem: value("mvm.rootfstype=").unwrap_or("ext4").to_owned() })
    }

    /// Makes the disk the root of this process and all that it starts.
    pub(super) fn switch(&self) -> io::Result<()> {
        wait_for(limits::DISK, || Path::new(&self.device).exists().then_some(()))
            .ok_or_else(|| io::Error::new(io::ErrorKind::NotFound, "no such disk"))?;
        // All of it under one mount of memory, so that nothing depends on what the initramfs is made of.
        fs::create_dir_all("/mvm-root")?;
        mount("tmpfs", "/mvm-root", "tmpfs", MountFlags::empty(), Some(c"mode=0755"))?;
        for folder in ["disk", "upper", "work", "new"] {
            fs::create_dir_all(Path::new("/mvm-root").join(folder))?;
        }
        mount(&self.device, "/mvm-root/disk", &self.filesystem, MountFlags::RDONLY, None)?;
        let layers = c"lowerdir=/mvm-root/disk,upperdir=/mvm-root/upper,workdir=/mvm-root/work";
        mount("overlay", "/mvm-root/new", "overlay", MountFlags::empty(), Some(layers))?;
        for folder in ["proc", "sys", "dev", "run", "tmp"] {
            let target = Path::new("/mvm-root/new").join(folder);
            fs::create_dir_all(&target)?;
            mount_move(Path::new("/").join(folder), &target)?;
        }
        std::env::set_current_dir("/mvm-root/new")?;
        mount_move(".", "/")?;
        rustix::process::chroot(".")?;
        std::env::set_current_dir("/")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_names_the_root_and_the_last_word_counts() {
        let root =
            |device: &str, filesystem: &str| Root { device: device.into(), filesystem: filesystem.into() };
        assert_eq!(Root::named_by("quiet mvm.root=/dev/vda"), Some(root("/dev/vda", "ext4")));
        let line = "mvm.root=/dev/vda mvm.rootfstype=erofs mvm.root=/dev/vdb";
        assert_eq!(Root::named_by(line), Some(root("/dev/vdb", "erofs")));
        assert_eq!(Root::named_by("root=/dev/vda"), None);
    }
}
