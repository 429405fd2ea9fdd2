//! Everything that confining a VMM takes, made before it exists: between the fork and the program nothing may be
//! allocated, so all paths are terminated, all filters compiled and all rules written by then.

use std::ffi::CString;
use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::path::{Path, PathBuf};

use rustix::fs::{Gid, Mode, Uid};
use rustix::mount::OpenTreeFlags;
use rustix::process::{Resource, Rlimit, getrlimit};
use seccompiler::BpfProgram;

use super::root::{self, Entry};
use super::{Capabilities, Confinement, Holes, Limits, Measures, Namespace, filter, landlock, loader};
use crate::HostError;
use crate::files::failed;
use crate::images::Image;

/// Descriptors from this number on are where no VMM wants one: an upper limit for the limit of open files.
const MOST_OPEN_FILES: u64 = 1 << 20;
/// What a VMM without a root of its own sees of the host's devices; the last only if it is given KVM.
const HOST_DEVICES: [&str; 4] = ["/dev/null", "/dev/zero", "/dev/urandom", "/dev/kvm"];

/// The least that QEMU needs to begin.
const FEWEST_OPEN_FILES: u64 = 64;

/// A confinement, ready to be entered.
#[derive(Debug)]
pub(crate) struct Prepared {
    pub(crate) measures: Measures,
    /// With no link in it.
    pub(crate) program: PathBuf,
    pub(super) program_text: CString,
    pub(super) uid: Uid,
    pub(super) gid: Gid,
    pub(super) umask: Mode,
    pub(super) run_dir: CString,
    /// The same, as seen from the new root before it is one.
    pub(super) run_dir_name: CString,
    pub(super) entries: Vec<Entry>,
    /// Of images, each a mount that is nowhere yet.
    pub(super) mounts: Vec<OwnedFd>,
    pub(super) kvm: bool,
    pub(super) ruleset: Option<OwnedFd>,
    pub(super) device_access: u64,
    pub(super) filters: Vec<BpfProgram>,
    pub(super) limits: Vec<(Resource, Rlimit)>,
    /// The limit of open files, and the number of the descriptor from which the program is executed.
    pub(super) launch: RawFd,
    pub(super) oom_score: String,
}

impl Prepared {
    /// What the child could not do, in words.
    pub(crate) fn item(&self, index: u16) -> Option<String> {
        let entry = self.entries.get(usize::from(index))?;
        Some(format!("/{}", entry.name().to_string_lossy()))
    }

    /// The mode of files that others make for the VMM.
    pub(crate) fn file_mode(&self) -> u32 {
        0o666 & !self.umask.as_raw_mode()
    }

    /// The number from which the program is executed.
    pub(crate) fn launch(&self) -> RawFd {
        self.launch
    }

    pub(crate) fn owner(&self) -> Option<(Uid, Gid)> {
        self.measures.own_user.then_some((self.uid, self.gid))
    }
}

/// What a VMM is made of and with.
#[derive(Debug)]
pub(crate) struct Seen<'a> {
    pub(crate) program: &'a Path,
    pub(crate) run_dir: &'a Path,
    /// As they were found once: it is these files that it sees, whatever has their names by now.
    pub(crate) images: &'a [Image],
    pub(crate) holes: Holes,
}

/// Decides and makes all of it. `base` is the lowest number that a descriptor of ours may have in the child, and `taken`
/// one that it needs until the end.
pub(crate) fn prepare(
    wanted: &Confinement,
    seen: &Seen<'_>,
    machine: &Capabilities,
    base: RawFd,
    taken: RawFd,
) -> Result<Prepared, HostError> {
    let Seen { program, run_dir, images, holes } = *seen;
    let refused = HostError::Refused;
    if wanted.uid == 0 || wanted.gid == 0 {
        return Err(refused("a VMM never runs as root: give it a user and a group of its own".to_owned()));
    }
    let measures = Measures::decide(machine, wanted.demand).map_err(refused)?;
    let program = fs::canonicalize(program).map_err(failed("find", program))?;
    let run_dir = fs::canonicalize(run_dir).map_err(failed("find", run_dir))?;
    let loader = loader::loader(&program).map_err(failed("read", &program))?;
    let paths: Vec<_> = images.iter().map(|image| image.path.as_path()).collect();
    let shown = root::HostPaths {
        program: &program,
        loader: loader.as_deref(),
        run_dir: &run_dir,
        images: &paths,
        needs: &wanted.needs,
    };
    let layout = root::layout(&shown, root::look).map_err(refused)?;
    if measures.own_user {
        images.iter().try_for_each(|image| readable(image, wanted))?;
    }
    let mounts = if measures.has(Namespace::Mount) {
        images.iter().map(|image| mount_of(image, base)).collect::<Result<_, _>>()?
    } else {
        Vec::new()
    };
    let (ruleset, device_access) = match measures.landlock {
        None => (None, 0),
        Some(abi) => {
            let devices: &[&str] = match (measures.has(Namespace::Mount), wanted.kvm) {
                (true, _) => &[],
                (false, true) => &HOST_DEVICES,
                (false, false) => &HOST_DEVICES[..3],
            };
            let ruleset = landlock::ruleset(&layout, images, &run_dir, devices)
                .and_then(|ruleset| Ok(rustix::io::fcntl_dupfd_cloexec(ruleset, base)?))
                .map_err(failed("write Landlock's rules for", &program))?;
            (Some(ruleset), landlock::device_access(abi))
        }
    };
    let taken = [Some(taken), ruleset.as_ref().map(AsRawFd::as_raw_fd)];
    let launch = launch_number(wanted.limits.open_files, base, &taken)?;
    let filters = if measures.filter {
        let programs = filter::programs(wanted.filter, holes, launch.unsigned_abs(), wanted.kvm);
        programs.map_err(io::Error::other).map_err(failed("write a filter for", &program))?
    } else {
        Vec::new()
    };
    let text = |path: &Path| root::text(path).map_err(HostError::Refused);
    Ok(Prepared {
        program_text: text(&program)?,
        uid: Uid::from_raw(wanted.uid),
        gid: Gid::from_raw(wanted.gid),
        umask: Mode::from_raw_mode(wanted.umask & 0o777),
        run_dir: text(&run_dir)?,
        run_dir_name: root::relative(&run_dir).map_err(HostError::Refused)?,
        mounts,
        entries: if measures.has(Namespace::Mount) { layout.entries } else { Vec::new() },
        kvm: wanted.kvm,
        ruleset,
        device_access,
        filters,
        limits: limits(&wanted.limits, measures.own_user),
        launch,
        oom_score: wanted.oom_score.to_string(),
        program,
        measures,
    })
}

/// A mount of this very file, made here: a descriptor from outside of the VMM's mount namespace can't be mounted in it,
/// but a mount that is in no namespace can be moved there.
fn mount_of(image: &Image, base: RawFd) -> Result<OwnedFd, HostError> {
    let flags =
        OpenTreeFlags::OPEN_TREE_CLONE | OpenTreeFlags::OPEN_TREE_CLOEXEC | OpenTreeFlags::AT_EMPTY_PATH;
    let mount = rustix::mount::open_tree(&image.pin, c"", flags);
    mount
        .and_then(|mount| rustix::io::fcntl_dupfd_cloexec(mount, base))
        .map_err(|errno| failed("show", &image.path)(errno.into()))
}

/// Says which image the VMM's user could not read, before QEMU says something less clear.
fn readable(image: &Image, wanted: &Confinement) -> Result<(), HostError> {
    let stat = &image.stat;
    let mode = stat.st_mode;
    let may = if stat.st_uid == wanted.uid {
        mode & 0o400
    } else if stat.st_gid == wanted.gid {
        mode & 0o040
    } else {
        mode & 0o004
    };
    if may != 0 {
        return Ok(());
    }
    Err(HostError::Refused(format!(
        "{} can't be read by user {} or group {}: its mode is {:03o}",
        image.path.display(),
        wanted.uid,
        wanted.gid,
        mode & 0o777
    )))
}

/// The number from which the program is executed: the highest that is allowed before the limit is lowered to it.
fn launch_number(wanted: u64, base: RawFd, taken: &[Option<RawFd>]) -> Result<RawFd, HostError> {
    let highest = getrlimit(Resource::Nofile).maximum.unwrap_or(MOST_OPEN_FILES).min(MOST_OPEN_FILES);
    let number = wanted.min(highest.saturating_sub(1));
    let lowest = FEWEST_OPEN_FILES.max(u64::from(base.unsigned_abs()));
    if number < lowest {
        return Err(HostError::Refused(format!(
            "{number} open files are too few for a VMM: it needs {lowest}"
        )));
    }
    let mut number = RawFd::try_from(number).unwrap_or(RawFd::MAX);
    while taken.contains(&Some(number)) {
        number -= 1;
    }
    Ok(number)
}

/// What is lowered, never above what this process has itself.
fn limits(wanted: &Limits, own_user: bool) -> Vec<(Resource, Rlimit)> {
    let cut = |resource, value: u64| {
        let value = getrlimit(resource).maximum.map_or(value, |own| own.min(value));
        (resource, Rlimit { current: Some(value), maximum: Some(value) })
    };
    // One byte, not none: with none a dump still goes to a program that the host set up for dumps.
    let mut limits = vec![cut(Resource::Core, 1), cut(Resource::Memlock, wanted.locked_bytes)];
    limits.extend(wanted.file_bytes.map(|bytes| cut(Resource::Fsize, bytes)));
    if own_user {
        // It counts what the user runs, so it means something only for a user with one VMM.
        limits.push(cut(Resource::Nproc, wanted.threads));
    }
    limits
}
