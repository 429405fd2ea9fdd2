//! The same files once more, for Landlock: what may be read, what may be written, and the one program to execute.

use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;

use landlock::{
    ABI, Access as _, AccessFs, AccessNet, BitFlags, PathBeneath, PathFd, Ruleset, RulesetAttr as _,
    RulesetCreated, RulesetCreatedAttr as _, Scope, make_bitflags,
};

use super::root::{Kind, Layout};
use crate::images::Image;

/// All that a VMM does in its run directory. No links and no directories: what it makes there leads nowhere.
const RUN_DIR: BitFlags<AccessFs> =
    make_bitflags!(AccessFs::{ReadFile | WriteFile | Truncate | ReadDir | MakeReg | MakeSock | RemoveFile});

const DEVICE: BitFlags<AccessFs> = make_bitflags!(AccessFs::{ReadFile | WriteFile | IoctlDev});

/// What the rules of its own devices are, for they exist only in the VMM's own root.
const READ_FILE: u64 = 1 << 2;
const WRITE_FILE: u64 = 1 << 1;
const IOCTL_DEV: u64 = 1 << 15;
const IOCTL_DEV_SINCE: u32 = 5;

/// What is allowed below `/dev`, in bits of a kernel with this version.
pub(super) fn device_access(abi: u32) -> u64 {
    READ_FILE | WRITE_FILE | if abi >= IOCTL_DEV_SINCE { IOCTL_DEV } else { 0 }
}

/// Rules that forbid all but what the layout shows. They hold for the files themselves, under whatever name. `devices` are
/// of the host, for a VMM that has none of its own.
pub(super) fn ruleset(
    layout: &Layout,
    images: &[Image],
    run_dir: &Path,
    devices: &[&str],
) -> io::Result<OwnedFd> {
    let other = |cause: landlock::RulesetError| io::Error::other(cause);
    let mut rules = Ruleset::default()
        .handle_access(AccessFs::from_all(ABI::V5))
        .and_then(|rules| rules.handle_access(AccessNet::from_all(ABI::V4)))
        .and_then(|rules| rules.scope(Scope::from_all(ABI::V6)))
        .and_then(Ruleset::create)
        .map_err(other)?;
    for path in &layout.executed {
        rules = allow(rules, path, AccessFs::Execute | AccessFs::ReadFile)?;
    }
    for (path, kind) in &layout.read {
        let access = match kind {
            Kind::Directory => AccessFs::ReadFile | AccessFs::ReadDir,
            _ => AccessFs::ReadFile.into(),
        };
        rules = allow(rules, path, access)?;
    }
    for image in images {
        let rule = PathBeneath::new(&image.pin, AccessFs::ReadFile);
        rules = rules.add_rule(rule).map_err(io::Error::other)?;
    }
    for device in devices.iter().map(Path::new).filter(|device| device.exists()) {
        rules = allow(rules, device, DEVICE)?;
    }
    rules = allow(rules, run_dir, RUN_DIR)?;
    Option::<OwnedFd>::from(rules).ok_or_else(|| io::ErrorKind::Unsupported.into())
}

fn allow(rules: RulesetCreated, path: &Path, access: BitFlags<AccessFs>) -> io::Result<RulesetCreated> {
    let file = PathFd::new(path).map_err(io::Error::other)?;
    rules.add_rule(PathBeneath::new(file, access)).map_err(io::Error::other)
}
