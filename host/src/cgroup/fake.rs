//! Groups and disks as plain files, for tests of their users: what a kernel would have made is made here.
//!
//! Nothing is limited by such files. That is shown on a real hierarchy, inside a microVM.

use std::fs;
use std::io;
use std::os::unix::fs::symlink;
use std::path::Path;

use super::Machine;

/// What a kernel gives a group, as far as it is used here, besides its list of controllers.
const FILES: [(&str, &str); 5] = [
    ("memory.max", "max\n"),
    ("memory.oom.group", "0\n"),
    ("cpu.max", "max 100000\n"),
    ("cpu.weight", "100\n"),
    ("pids.max", "max\n"),
];

/// Makes a directory a group with these controllers. What is in it already stays.
pub fn group(directory: &Path, controllers: &str) -> io::Result<()> {
    fs::create_dir_all(directory)?;
    let listed = format!("{controllers}\n");
    let lists = ["cgroup.controllers", "cgroup.subtree_control"].map(|name| (name, listed.as_str()));
    let io = controllers.split(' ').any(|controller| controller == "io").then_some(("io.max", ""));
    for (name, text) in lists.into_iter().chain(FILES).chain(io) {
        let file = directory.join(name);
        if !file.exists() {
            fs::write(file, text)?;
        }
    }
    Ok(())
}

/// A machine whose files, below `directory`, are all on a file system of this kind on a partition of the disk 8:16.
pub fn machine(directory: &Path, file_system: &str) -> io::Result<Machine> {
    let (sys, mounts) = (directory.join("sys"), directory.join("mountinfo"));
    let partition = sys.join("devices/sdb/sdb1");
    fs::create_dir_all(&partition)?;
    fs::create_dir_all(sys.join("dev/block"))?;
    fs::write(sys.join("devices/sdb/dev"), "8:16\n")?;
    fs::write(partition.join("partition"), "1\n")?;
    let link = sys.join("dev/block/8:17");
    if !link.exists() {
        symlink(&partition, link)?;
    }
    fs::write(&mounts, format!("1 0 8:17 / / rw - {file_system} /dev/sdb1 rw\n"))?;
    Ok(Machine { sys, mounts, proc: directory.join("proc") })
}
