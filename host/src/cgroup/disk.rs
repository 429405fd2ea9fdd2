//! Which whole disk a directory's files are on: `io.max` knows disks, and no partitions, mounts or files.
//!
//! From the machine's list of mounts and its `/sys`. A directory that lies on no disk, or on several, has none that could be
//! limited; neither has one whose file system does not tell whose writes it carries out.

use std::fmt;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::error::CgroupError;
use super::hierarchy::unescaped;

/// File systems whose delayed writes are charged to who made them. Those of others are the machine's own, which has no limit.
const KNOWS_WRITERS: [&str; 6] = ["ext2", "ext3", "ext4", "xfs", "btrfs", "f2fs"];

/// A whole disk, by its numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Disk {
    pub major: u32,
    pub minor: u32,
}

impl fmt::Display for Disk {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.major, self.minor)
    }
}

impl std::str::FromStr for Disk {
    type Err = std::num::ParseIntError;
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let (major, minor) = text.trim().split_once(':').unwrap_or((text, ""));
        Ok(Self { major: major.parse()?, minor: minor.parse()? })
    }
}

/// Where a machine says what it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Machine {
    /// Where sysfs is mounted.
    pub sys: PathBuf,
    /// The list of mounts as this process sees them.
    pub mounts: PathBuf,
    /// Where each process says which groups it is in.
    #[serde(default = "proc")]
    pub proc: PathBuf,
}

impl Default for Machine {
    fn default() -> Self {
        Self { sys: "/sys".into(), mounts: "/proc/self/mountinfo".into(), proc: proc() }
    }
}

fn proc() -> PathBuf {
    "/proc".into()
}

/// What a directory is mounted from.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    device: String,
    kind: String,
    source: PathBuf,
}

impl Machine {
    /// The disk of a directory, or why it has none. What is not there yet will be on the disk of what it is in.
    pub(super) fn disk_of(&self, directory: &Path) -> Result<Disk, CgroupError> {
        let refused = |reason: String| CgroupError::NoDisk { directory: directory.to_owned(), reason };
        let mut there = directory;
        let real = loop {
            match (fs::canonicalize(there), there.parent()) {
                (Ok(real), _) => break real,
                (Err(cause), Some(parent)) if cause.kind() == io::ErrorKind::NotFound => there = parent,
                (Err(cause), _) => return Err(refused(cause.to_string())),
            }
        };
        let mounts = fs::read_to_string(&self.mounts)
            .map_err(|cause| refused(format!("{} can't be read: {cause}", self.mounts.display())))?;
        let mount = mount_of(&mounts, &real).ok_or_else(|| refused("it is on no mount".to_owned()))?;
        if !KNOWS_WRITERS.contains(&mount.kind.as_str()) {
            let reason =
                format!("its file system is {}, which does not say whose writes it does", mount.kind);
            return Err(refused(reason));
        }
        let found = if mount.kind == "btrfs" { self.btrfs(&mount) } else { self.whole(&mount.device) };
        found.map_err(refused)
    }

    /// The disk that a device is, or is a partition of.
    fn whole(&self, device: &str) -> Result<Disk, String> {
        let link = self.sys.join("dev/block").join(device);
        let place = fs::canonicalize(&link).map_err(|_| format!("its device {device} is no disk"))?;
        let disk = if place.join("partition").exists() { place.parent().unwrap_or(&place) } else { &place };
        number(disk)
    }

    /// A file system that may lie on several disks, and whose own device is none of them. On several, each would have the
    /// limit for itself, and together they would not have it.
    fn btrfs(&self, mount: &Mount) -> Result<Disk, String> {
        // What a volume manager names is a link to the device.
        let node = fs::canonicalize(&mount.source).unwrap_or_else(|_| mount.source.clone());
        let name = node.file_name().ok_or_else(|| format!("{} is no device", mount.source.display()))?;
        let known =
            fs::read_dir(self.sys.join("fs/btrfs")).map_err(|cause| format!("/sys/fs/btrfs: {cause}"))?;
        let devices = known.flatten().map(|volume| volume.path().join("devices"));
        let devices = { devices }.find(|devices| devices.join(name).exists());
        let devices = devices.ok_or_else(|| format!("no btrfs is known on {}", mount.source.display()))?;
        let members = fs::read_dir(&devices).map_err(|cause| format!("{}: {cause}", devices.display()))?;
        let mut disks = Vec::new();
        for member in members.flatten() {
            let place = fs::canonicalize(member.path()).map_err(|cause| cause.to_string())?;
            disks.push(self.whole(&number(&place)?.to_string())?);
        }
        disks.sort_unstable();
        disks.dedup();
        match disks[..] {
            [disk] => Ok(disk),
            _ => Err(format!("its btrfs lies on {} disks", disks.len())),
        }
    }
}

/// What `dev` in a device's folder says.
fn number(device: &Path) -> Result<Disk, String> {
    let text = fs::read_to_string(device.join("dev"))
        .map_err(|cause| format!("{} can't be read: {cause}", device.join("dev").display()))?;
    text.parse().map_err(|_| format!("{} has no number", device.display()))
}

/// The mount that a path without links is on: of those above it the lowest, and of several in one place the last.
fn mount_of(mountinfo: &str, path: &Path) -> Option<Mount> {
    let mut found: Option<(usize, Mount)> = None;
    for line in mountinfo.lines() {
        let Some((place, kind)) = line.split_once(" - ") else { continue };
        let mut fields = place.split(' ').skip(2);
        let (Some(device), Some(_), Some(point)) = (fields.next(), fields.next(), fields.next()) else {
            continue;
        };
        let mut kind = kind.split(' ');
        let (Some(kind), Some(source)) = (kind.next(), kind.next()) else { continue };
        let point = PathBuf::from(unescaped(point));
        let depth = point.components().count();
        if path.starts_with(&point) && found.as_ref().is_none_or(|(deepest, _)| depth >= *deepest) {
            let (device, kind) = (device.to_owned(), kind.to_owned());
            found = Some((depth, Mount { device, kind, source: PathBuf::from(unescaped(source)) }));
        }
    }
    found.map(|(_, mount)| mount)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A machine of plain files: a disk with two partitions, one without, a volume on one, two of btrfs.
    struct Fake {
        dir: tempfile::TempDir,
        machine: Machine,
    }

    fn fake() -> Fake {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let sys = root.join("sys");
        let devices = [
            ("pci0/block/sda", "8:0", false),
            ("pci0/block/sda/sda1", "8:1", true),
            ("pci0/block/sda/sda2", "8:2", true),
            ("pci1/nvme/nvme0/nvme0n1", "259:0", false),
            ("pci1/nvme/nvme0/nvme0n1/nvme0n1p3", "259:3", true),
            ("virtual/block/dm-0", "253:0", false),
            ("pci2/block/sdb", "8:16", false),
        ];
        fs::create_dir_all(sys.join("dev/block")).unwrap();
        for (path, number, partition) in devices {
            let device = sys.join("devices").join(path);
            fs::create_dir_all(&device).unwrap();
            fs::write(device.join("dev"), format!("{number}\n")).unwrap();
            if partition {
                fs::write(device.join("partition"), "1\n").unwrap();
            }
            symlink(Path::new("../../devices").join(path), sys.join("dev/block").join(number)).unwrap();
        }
        for (volume, members) in [
            ("one", &["pci1/nvme/nvme0/nvme0n1/nvme0n1p3"][..]),
            ("two", &["pci0/block/sda/sda2", "pci2/block/sdb"]),
            ("same", &["pci0/block/sda/sda1", "pci0/block/sda"]),
        ] {
            let folder = sys.join("fs/btrfs").join(volume).join("devices");
            fs::create_dir_all(&folder).unwrap();
            for member in members {
                let device = sys.join("devices").join(member);
                symlink(&device, folder.join(device.file_name().unwrap())).unwrap();
            }
        }
        let machine = Machine { sys, mounts: root.join("mountinfo"), ..Machine::default() };
        Fake { dir, machine }
    }

    impl Fake {
        /// What is said of a folder that is on this mount: numbers, kind, source.
        fn disk_on(&self, device: &str, kind: &str, source: &str) -> Result<String, String> {
            let root = self.dir.path().canonicalize().unwrap();
            let lines = format!(
                "1 0 254:9 / / rw - ext4 /dev/root rw\n\
                 2 1 {device} / {} rw shared:1 - {kind} {source} rw\n\
                 3 1 0:9 / {}/elsewhere rw - tmpfs tmpfs rw\n",
                root.display(),
                root.display()
            );
            fs::write(&self.machine.mounts, lines).unwrap();
            let disk = self.machine.disk_of(&root.join("data/vms"));
            disk.map(|disk| disk.to_string()).map_err(|error| error.to_string())
        }
    }

    #[test]
    fn a_directory_is_on_the_disk_that_its_partition_is_of() {
        let fake = fake();
        assert_eq!(fake.disk_on("8:1", "ext4", "/dev/sda1").unwrap(), "8:0");
        assert_eq!(fake.disk_on("259:3", "xfs", "/dev/nvme0n1p3").unwrap(), "259:0");
        assert_eq!(fake.disk_on("8:16", "ext4", "/dev/sdb").unwrap(), "8:16");
        // A volume is limited as what it is, whatever it is made of.
        assert_eq!(fake.disk_on("253:0", "ext4", "/dev/mapper/data").unwrap(), "253:0");
    }

    #[test]
    fn btrfs_is_on_a_disk_when_all_its_devices_are() {
        let fake = fake();
        assert_eq!(fake.disk_on("0:33", "btrfs", "/dev/nvme0n1p3").unwrap(), "259:0");
        assert_eq!(fake.disk_on("0:33", "btrfs", "/dev/sda1").unwrap(), "8:0");
        let several = fake.disk_on("0:33", "btrfs", "/dev/sda2").unwrap_err();
        assert!(several.contains("its btrfs lies on 2 disks"), "{several}");
        let unknown = fake.disk_on("0:33", "btrfs", "/dev/sdz").unwrap_err();
        assert!(unknown.contains("no btrfs is known on /dev/sdz"), "{unknown}");
    }

    #[test]
    fn what_has_no_disk_to_limit_is_told_with_its_reason() {
        let fake = fake();
        for (device, kind, source) in [
            ("0:40", "tmpfs", "tmpfs"),
            ("0:41", "overlay", "overlay"),
            ("0:42", "nfs4", "host:/x"),
            ("8:1", "vfat", "/dev/sda1"),
        ] {
            let told = fake.disk_on(device, kind, source).unwrap_err();
            assert!(told.contains(&format!("its file system is {kind}")), "{told}");
            assert!(told.contains("io_limits"), "{told}");
        }
        let gone = fake.disk_on("8:77", "ext4", "/dev/sdx1").unwrap_err();
        assert!(gone.contains("its device 8:77 is no disk"), "{gone}");
    }

    #[test]
    fn the_lowest_mount_above_a_path_is_the_one_that_it_is_on() {
        let text = "1 0 8:1 / / rw - ext4 /dev/sda1 rw\n\
                    2 1 8:2 / /var rw - xfs /dev/sda2 rw\n\
                    3 1 8:16 / /var/lib/my\\040data rw - ext4 /dev/sdb rw\n\
                    4 1 0:7 / /var rw - tmpfs none rw\n\
                    nonsense\n";
        let device = |path: &str| mount_of(text, Path::new(path)).map(|mount| mount.device);
        assert_eq!(device("/home").as_deref(), Some("8:1"));
        assert_eq!(device("/var/lib/my data/vms").as_deref(), Some("8:16"));
        assert_eq!(device("/var/lib").as_deref(), Some("0:7"), "what was mounted last is on top");
        assert_eq!(device("/various").as_deref(), Some("8:1"));
        assert_eq!(mount_of("", Path::new("/")), None);
    }

    #[test]
    fn numbers_of_a_disk_are_read_as_they_are_written() {
        assert_eq!("259:3\n".parse::<Disk>().unwrap().to_string(), "259:3");
        for text in ["", "8", "8:", ":1", "8:1:2", "-1:0", "a:b"] {
            assert!(text.parse::<Disk>().is_err(), "{text:?}");
        }
    }
}
