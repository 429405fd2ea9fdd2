//! What a VMM's process does before it becomes the VMM: it locks itself in.
//!
//! Runs between a fork and `execve`. Every call here is a bare system call on what was prepared: no allocation, no
//! locks, no `?` into an error type that boxes. The order matters: what needs rights comes first, then the rights go,
//! then what binds also those without rights, and the filter on system calls last.

use std::ffi::CStr;
use std::os::fd::{AsFd as _, BorrowedFd, OwnedFd};

use rustix::fs::{AtFlags, CWD, FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{
    FsMountFlags, FsOpenFlags, MountAttrFlags, MountPropagationFlags, MoveMountFlags, OpenTreeFlags,
    UnmountFlags,
};
use rustix::process::{DumpableBehavior, Resource, Rlimit};
use rustix::thread::{CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

use super::root::{Entry, Kind};
use super::{Namespace, Prepared};
use crate::spawn::failure::{Failure, Step};
use crate::spawn::sys;

type Done<T> = Result<T, Failure>;

const READ_ONLY: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_RDONLY;
const HARMLESS: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOSUID.union(MountAttrFlags::MOUNT_ATTR_NODEV);
const NOT_EXECUTED: MountAttrFlags = MountAttrFlags::MOUNT_ATTR_NOEXEC;

/// Name, major and minor number, of the memory devices; each for everyone.
const DEVICES: [(&CStr, u32, u32); 3] = [(c"null", 1, 3), (c"zero", 1, 5), (c"urandom", 1, 9)];
const KVM: (&CStr, u32, u32) = (c"kvm", 10, 232);

fn at<T>(step: Step, done: rustix::io::Result<T>) -> Done<T> {
    done.map_err(|errno| Failure::new(step, errno))
}

/// Locks this process in. Afterwards only [`Prepared::launch`] is left to execute.
pub(crate) fn enter(confinement: &Prepared) -> Done<()> {
    let measures = &confinement.measures;
    at(Step::OomScore, oom_score(confinement.oom_score.as_bytes()))?;
    if measures.has(Namespace::Uts) {
        at(Step::HostName, rustix::system::sethostname(b"vmm"))?;
    }
    rustix::process::umask(Mode::empty());
    if measures.has(Namespace::Mount) {
        new_root(confinement)?;
    }
    at(Step::WorkingDirectory, rustix::process::chdir(confinement.run_dir.as_c_str()))?;
    for (resource, limit) in &confinement.limits {
        at(Step::Limits, rustix::process::setrlimit(*resource, *limit))?;
    }
    if measures.own_user {
        drop_rights(confinement.uid, confinement.gid)?;
    }
    match sys::join_new_keyring() {
        // A kernel without keys has none to leave behind.
        Ok(()) | Err(Errno::NOSYS) => {}
        Err(errno) => return Err(Failure::new(Step::Keyring, errno)),
    }
    at(Step::Dumpable, rustix::process::set_dumpable_behavior(DumpableBehavior::NotDumpable))?;
    rustix::process::umask(confinement.umask);
    at(Step::NoNewPrivileges, rustix::thread::set_no_new_privs(true))?;
    at(Step::Program, take_program(confinement))?;
    if let Some(ruleset) = &confinement.ruleset {
        at(Step::Landlock, sys::landlock_restrict(ruleset.as_fd()))?;
    }
    for program in &confinement.filters {
        at(Step::Filter, sys::filter(program))?;
    }
    Ok(())
}

fn oom_score(text: &[u8]) -> rustix::io::Result<()> {
    let file =
        rustix::fs::open(c"/proc/self/oom_score_adj", OFlags::WRONLY | OFlags::CLOEXEC, Mode::empty())?;
    rustix::io::write(file, text).map(|_| ())
}

/// A root of memory with what was laid out in it, in place of the host's.
fn new_root(confinement: &Prepared) -> Done<()> {
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    at(Step::PrivateMounts, rustix::mount::mount_change(c"/", private))?;
    let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
    let run_dir = confinement.run_dir.as_c_str();
    // Whatever is mounted in it belongs to it.
    let held =
        at(Step::RunDirectory, rustix::mount::open_tree(CWD, run_dir, clone | OpenTreeFlags::AT_RECURSIVE))?;
    let attributes = u64::from((HARMLESS | NOT_EXECUTED).bits());
    at(Step::RunDirectory, sys::restrict_mount(held.as_fd(), attributes, true))?;
    let root = at(Step::NewRoot, memory(HARMLESS | NOT_EXECUTED))?;
    // Somewhere it must be mounted before it can be a root; this directory is sure to exist, and is held already.
    at(Step::NewRoot, attach(root.as_fd(), run_dir))?;
    at(Step::NewRoot, rustix::process::fchdir(&root))?;
    for (index, entry) in confinement.entries.iter().enumerate() {
        show(entry, &confinement.mounts).map_err(|errno| Failure::with_item(Step::Entry, index, errno))?;
    }
    at(Step::RunDirectory, attach(held.as_fd(), confinement.run_dir_name.as_c_str()))?;
    at(Step::Devices, devices(confinement))?;
    at(Step::NewRoot, sys::restrict_mount(root.as_fd(), u64::from(READ_ONLY.bits()), false))?;
    at(Step::PivotRoot, pivot())
}

/// A file system in memory, empty and small: it holds directories and names only.
fn memory(attributes: MountAttrFlags) -> rustix::io::Result<rustix::fd::OwnedFd> {
    let made = rustix::mount::fsopen(c"tmpfs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&made, c"mode", c"0755")?;
    rustix::mount::fsconfig_set_string(&made, c"size", c"64k")?;
    rustix::mount::fsconfig_set_string(&made, c"nr_inodes", c"1024")?;
    rustix::mount::fsconfig_create(&made)?;
    rustix::mount::fsmount(&made, FsMountFlags::FSMOUNT_CLOEXEC, attributes)
}

fn attach(mount: BorrowedFd<'_>, path: &CStr) -> rustix::io::Result<()> {
    rustix::mount::move_mount(mount, c"", CWD, path, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)
}

fn show(entry: &Entry, mounts: &[OwnedFd]) -> rustix::io::Result<()> {
    let directory = Mode::from_raw_mode(0o755);
    match entry {
        Entry::Directory { name } => rustix::fs::mkdirat(CWD, name.as_c_str(), directory),
        Entry::Link { name, target } => rustix::fs::symlinkat(target.as_c_str(), CWD, name.as_c_str()),
        Entry::BindMount { source, name, kind, executable } => {
            if *kind == Kind::Directory {
                rustix::fs::mkdirat(CWD, name.as_c_str(), directory)?;
            } else {
                empty_file(name)?;
            }
            let clone = OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC;
            let shown = rustix::mount::open_tree(CWD, source.as_c_str(), clone)?;
            let executed = if *executable { MountAttrFlags::empty() } else { NOT_EXECUTED };
            let attributes = READ_ONLY | HARMLESS | executed;
            sys::restrict_mount(shown.as_fd(), u64::from(attributes.bits()), false)?;
            attach(shown.as_fd(), name.as_c_str())
        }
        Entry::Image { name, number } => {
            empty_file(name)?;
            let image = mounts.get(*number).ok_or(Errno::NOENT)?;
            let attributes = READ_ONLY | HARMLESS | NOT_EXECUTED;
            sys::restrict_mount(image.as_fd(), u64::from(attributes.bits()), false)?;
            attach(image.as_fd(), name.as_c_str())
        }
    }
}

/// Somewhere for a file to be mounted.
fn empty_file(name: &CStr) -> rustix::io::Result<()> {
    let flags = OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::CLOEXEC;
    rustix::fs::openat(CWD, name, flags, Mode::from_raw_mode(0o444)).map(|_| ())
}

/// The only devices, in a directory that can't be written.
fn devices(confinement: &Prepared) -> rustix::io::Result<()> {
    let held = memory(MountAttrFlags::MOUNT_ATTR_NOSUID | NOT_EXECUTED)?;
    attach(held.as_fd(), c"dev")?;
    let make = |(name, major, minor): (&CStr, u32, u32), mode| {
        let device = rustix::fs::makedev(major, minor);
        rustix::fs::mknodat(&held, name, FileType::CharacterDevice, Mode::from_raw_mode(mode), device)
    };
    for device in DEVICES {
        make(device, 0o666)?;
    }
    if confinement.kvm {
        make(KVM, 0o600)?;
        let (uid, gid) = (Some(confinement.uid), Some(confinement.gid));
        rustix::fs::chownat(&held, KVM.0, uid, gid, AtFlags::SYMLINK_NOFOLLOW)?;
    }
    if let Some(ruleset) = &confinement.ruleset {
        sys::landlock_allow(ruleset.as_fd(), held.as_fd(), confinement.device_access)?;
    }
    sys::restrict_mount(held.as_fd(), u64::from(READ_ONLY.bits()), false)
}

/// Makes the working directory the root, and lets go of the one before.
fn pivot() -> rustix::io::Result<()> {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let before = rustix::fs::open(c"/", flags, Mode::empty())?;
    rustix::process::pivot_root(c".", c".")?;
    rustix::process::fchdir(&before)?;
    rustix::mount::unmount(c".", UnmountFlags::DETACH)?;
    rustix::process::chdir(c"/")
}

/// Another user, and no capability in any set, nor any way to one.
fn drop_rights(uid: Uid, gid: Gid) -> Done<()> {
    for number in 0..u64::BITS {
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match rustix::thread::remove_capability_from_bounding_set(capability) {
            Ok(()) => {}
            // Beyond the last that the kernel knows.
            Err(Errno::INVAL) if number > 0 => break,
            Err(errno) => return Err(Failure::new(Step::BoundingSet, errno)),
        }
    }
    let bits = CapabilitiesSecureBits::NO_ROOT
        | CapabilitiesSecureBits::NO_ROOT_LOCKED
        | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
        | CapabilitiesSecureBits::KEEP_CAPS_LOCKED
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
        | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED;
    at(Step::SecureBits, rustix::thread::set_capabilities_secure_bits(bits))?;
    at(Step::User, rustix::thread::set_thread_groups(&[]))?;
    at(Step::User, rustix::thread::set_thread_res_gid(gid, gid, gid))?;
    at(Step::User, rustix::thread::set_thread_res_uid(uid, uid, uid))?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    at(Step::Capabilities, rustix::thread::set_capabilities(None, sets))?;
    at(Step::Capabilities, rustix::thread::clear_ambient_capability_set())
}

/// The program under the one number that it is executed from, which is then beyond the limit for ever.
fn take_program(confinement: &Prepared) -> rustix::io::Result<()> {
    let number = confinement.launch;
    let limit = |files: u64| Rlimit { current: Some(files), maximum: Some(files) };
    let files = u64::from(number.unsigned_abs());
    let flags = OFlags::PATH | OFlags::CLOEXEC;
    let program = rustix::fs::open(confinement.program_text.as_c_str(), flags, Mode::empty())?;
    rustix::process::setrlimit(Resource::Nofile, limit(files + 1))?;
    sys::duplicate(program.as_fd(), number, false)?;
    rustix::process::setrlimit(Resource::Nofile, limit(files))
}
