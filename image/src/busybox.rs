//! `builtin:busybox`: Debian's cloud kernel, its busybox and our guest program, as a kernel and a first root.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use super::cpio::Tree;
use super::debian::{Package, PackageCache, megabytes};
use super::error::{ImageError, OnPath};
use super::kernel;
use super::manifest::Part;
use super::modules::Modules;
use super::staging::Staging;
use super::work::Work;

/// An empty package that depends on the newest kernel for virtual machines.
const KERNEL: &str = "linux-image-cloud-amd64";
const KERNEL_PREFIX: &str = "linux-image-";
const BUSYBOX: &str = "busybox-static";

/// A kernel that is worse than the one before it, and that one. Debian's 6.1.192-1 dies when ext4 needs a block after its map
/// of free ones had to leave memory.
const BROKEN_KERNEL: &str = "linux-image-6.1.0-55-cloud-amd64";
const BEFORE_BROKEN: &str = "linux-image-6.1.0-54-cloud-amd64";

/// What a guest may need before its program runs: devices first, in the order in which they are found fastest.
const MODULES: [&str; 11] = [
    "virtio_mmio",
    "virtio_console",
    "virtio_blk",
    "virtio_net",
    "virtio_rng",
    "virtio_balloon",
    "vmw_vsock_virtio_transport",
    "overlay",
    "squashfs",
    "erofs",
    "ext4",
];

/// Only what makes booting quicker and the console quieter. What protects the guest's kernel stays as it is. `lsm=` names
/// Debian's own list without those that do nothing unless a policy is loaded, which is not in this image: one of
/// them would be on, and asked at every system call.
const CMDLINE: &str = "quiet loglevel=1 no_timer_check random.trust_cpu=on audit=0 lsm=landlock,lockdown,yama,loadpin,safesetid,integrity,bpf ima=off cryptomgr.notests ipv6.disable=1";

/// No program of ours comes near this.
const MAX_GUEST_BYTES: u64 = 256 << 20;

/// Makes the image in `staging`; gives what it was made of, for people.
pub(super) fn build(
    cache: &Path,
    guest: Option<&Path>,
    staging: &mut Staging,
    work: &Work<'_>,
) -> Result<Vec<String>, ImageError> {
    let guest = guest_program(guest)?;
    let cache = PackageCache::open(cache)?;
    work.say("asking apt for the newest kernel");
    let kernel_package = newest_kernel(&cache, work)?;
    let busybox_package = cache.get(BUSYBOX, work)?;
    let unpacked = staging.scratch()?;
    kernel_package.unpack(&unpacked, work)?;
    busybox_package.unpack(&unpacked, work)?;
    work.check()?;

    let began = Instant::now();
    let path = only_file(&unpacked.join("boot"), "vmlinuz-")?;
    let packed = fs::read(&path).on("read", &path)?;
    let elf = kernel::bootable(packed, &path)?;
    staging.add_bytes(Part::Kernel, &elf)?;
    work.say(format!("kernel: {:.1} MB in {:.1} s", megabytes(length(&elf)), began.elapsed().as_secs_f32()));
    work.check()?;

    let began = Instant::now();
    let modules = Modules::below(&unpacked.join("lib/modules"))?.with_dependencies(&MODULES)?;
    let busybox = unpacked.join("bin/busybox");
    let busybox = if busybox.is_file() { busybox } else { unpacked.join("usr/bin/busybox") };
    let mut tree = Tree::default();
    system_files(&mut tree);
    let content = fs::read(&busybox).on("read", &busybox)?;
    for applet in
        applets(&content).ok_or_else(|| ImageError::invalid(&busybox, "no list of applets in it"))?
    {
        tree.link(&format!("bin/{applet}"), "busybox");
    }
    tree.file("bin/busybox", 0o755, content);
    tree.file("init", 0o755, guest);
    let mut list = String::new();
    for module in modules {
        let path = format!("lib/modules/mvm/{}.ko", module.name);
        list.push_str(&format!("/{path}\n"));
        tree.file(&path, 0o644, module.content);
    }
    tree.file("modules.list", 0o644, list);
    let mut initrd = Vec::new();
    tree.write(&mut initrd).on("pack", Path::new("the initrd"))?;
    staging.add_bytes(Part::Initrd, &initrd)?;
    staging.add_bytes(Part::Cmdline, CMDLINE.as_bytes())?;
    work.say(format!(
        "initrd: {:.1} MB in {:.1} s",
        megabytes(length(&initrd)),
        began.elapsed().as_secs_f32()
    ));
    Ok(vec![kernel_package.title, busybox_package.title])
}

/// The newest kernel, or the one before it where that is better and can be had.
fn newest_kernel(cache: &PackageCache, work: &Work<'_>) -> Result<Package, ImageError> {
    let newest = cache.behind(KERNEL, KERNEL_PREFIX, work)?;
    if newest == BROKEN_KERNEL {
        work.say(format!(
            "{newest} loses track of ext4 disks when memory is short: taking the one before it"
        ));
        match cache.get(BEFORE_BROKEN, work) {
            Ok(package) => return Ok(package),
            Err(error) => work.say(format!("it can't be had, so {newest} it is: {error}")),
        }
    }
    cache.get(&newest, work)
}

fn guest_program(path: Option<&Path>) -> Result<Vec<u8>, ImageError> {
    let path = path.ok_or(ImageError::NoGuest)?;
    let size = fs::metadata(path).on("read the guest program", path)?.len();
    if size > MAX_GUEST_BYTES {
        return Err(ImageError::invalid(path, format!("{size} bytes are no guest program")));
    }
    let program = fs::read(path).on("read the guest program", path)?;
    match super::elf::Elf::parse(&program) {
        Some(elf) if elf.needs_interpreter() => Err(ImageError::invalid(
            path,
            "dynamically linked: PID 1 of a guest has no libraries; use scripts/build-guest",
        )),
        Some(elf) if elf.is_whole() => Ok(program),
        _ => Err(ImageError::invalid(path, "not a whole 64-bit x86 program")),
    }
}

fn system_files(tree: &mut Tree) {
    for folder in ["bin", "dev", "etc/mvm", "lib", "mnt", "proc", "run", "sys", "usr", "var/log"] {
        tree.directory(folder, 0o755);
    }
    tree.directory("root", 0o700);
    tree.directory("tmp", 0o1777);
    for (path, target) in [
        ("sbin", "bin"),
        ("usr/bin", "../bin"),
        ("usr/sbin", "../bin"),
        ("var/run", "../run"),
        ("var/tmp", "../tmp"),
    ] {
        tree.link(path, target);
    }
    // The kernel opens it for its first program, before anything could make it.
    tree.character_device("dev/console", 0o600, 5, 1);
    tree.file(
        "etc/passwd",
        0o644,
        "root:x:0:0:root:/root:/bin/sh\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    );
    tree.file("etc/group", 0o644, "root:x:0:\nnogroup:x:65534:\n");
    tree.file("etc/hostname", 0o644, "mvm\n");
    tree.file("etc/hosts", 0o644, "127.0.0.1\tlocalhost\n");
    tree.file("etc/profile", 0o644, "export PATH=/bin HOME=/root\n");
}

/// The names that a busybox answers to: a list inside it, sorted, beginning with `[`. It is not run for that.
fn applets(busybox: &[u8]) -> Option<Vec<String>> {
    const BEGIN: &[u8] = b"\0[\0[[\0";
    let at = busybox.windows(BEGIN.len()).position(|window| window == BEGIN)?;
    let names = busybox[at + 1..].split(|&b| b == 0).take_while(|name| !name.is_empty());
    let plain = |name: &&str| !name.contains('/') && *name != "busybox";
    Some(names.filter_map(|name| std::str::from_utf8(name).ok()).filter(plain).map(str::to_owned).collect())
}

fn only_file(folder: &Path, prefix: &str) -> Result<PathBuf, ImageError> {
    let mut found = None;
    for entry in fs::read_dir(folder).on("read", folder)? {
        let entry = entry.on("read", folder)?;
        if entry.file_name().to_str().is_some_and(|name| name.starts_with(prefix)) {
            found = Some(entry.path());
        }
    }
    found.ok_or_else(|| ImageError::invalid(folder, format!("no {prefix}* in the kernel's package")))
}

fn length(bytes: &[u8]) -> u64 {
    u64::try_from(bytes.len()).unwrap_or(u64::MAX)
}
