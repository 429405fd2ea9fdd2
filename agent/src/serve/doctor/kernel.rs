//! What the kernel offers: TAP devices, nftables, cgroup v2.

use std::fs::{self, OpenOptions};
use std::io;
use std::os::fd::AsRawFd as _;
use std::path::{Path, PathBuf};

use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;

use super::Check;

const TUN: &str = "/dev/net/tun";

pub(super) fn tun() -> Check {
    const NAME: &str = "tun";
    match OpenOptions::new().read(true).write(true).open(TUN) {
        Ok(_) => Check::ok(NAME, format!("{TUN} opens")),
        Err(cause) => Check::failed(
            NAME,
            format!("{TUN} can't be opened: {cause}"),
            "load it (modprobe tun, and a line `tun` in /etc/modules-load.d/mvm.conf), and run the agent as root",
        ),
    }
}

/// Asks nf_tables itself, so that a kernel without it is told from a user without the right.
pub(super) fn nft() -> Check {
    judge_nft(nft_generation())
}

fn judge_nft(answer: io::Result<()>) -> Check {
    const NAME: &str = "nft";
    match answer {
        Ok(()) => Check::ok(NAME, "the kernel answers for nf_tables"),
        Err(cause) if cause.raw_os_error() == Some(nix::errno::Errno::EPERM as i32) => {
            Check::warning(NAME, format!("no permission to query it: {cause}"), "run this check as root")
        }
        Err(cause) => Check::failed(
            NAME,
            format!("the kernel does not answer for nf_tables: {cause}"),
            "load it (modprobe nf_tables), or use a kernel with CONFIG_NF_TABLES",
        ),
    }
}

/// nf_tables' generation number, the cheapest question there is.
fn nft_generation() -> io::Result<()> {
    const SUBSYSTEM_NFTABLES: u16 = 10;
    const GET_GENERATION: u16 = 16;
    const ERROR: u16 = 2;
    const REQUEST: u16 = 1;
    const LENGTH: u32 = 20;
    /// A kernel that has nf_tables answers in microseconds.
    const ANSWER_WITHIN_SECONDS: i64 = 2;
    let netlink = socket(
        AddressFamily::Netlink,
        SockType::Raw,
        SockFlag::SOCK_CLOEXEC,
        SockProtocol::NetlinkNetFilter,
    )?;
    setsockopt(&netlink, sockopt::ReceiveTimeout, &TimeVal::new(ANSWER_WITHIN_SECONDS, 0))?;
    // A netlink header (length, type, flags, sequence, sender), then nfnetlink's four bytes.
    let mut question = Vec::with_capacity(LENGTH as usize);
    question.extend(LENGTH.to_ne_bytes());
    question.extend((SUBSYSTEM_NFTABLES << 8 | GET_GENERATION).to_ne_bytes());
    question.extend(REQUEST.to_ne_bytes());
    question.extend([0; 12]);
    sendto(netlink.as_raw_fd(), &question, &NetlinkAddr::new(0, 0), MsgFlags::empty())?;
    let mut answer = [0; 1024];
    let length = recv(netlink.as_raw_fd(), &mut answer, MsgFlags::empty())?;
    let word = |at: usize| answer.get(at..at + 4).and_then(|bytes| <[u8; 4]>::try_from(bytes).ok());
    let kind = word(4).map(u32::from_ne_bytes).unwrap_or_default() as u16;
    match word(16).map(i32::from_ne_bytes) {
        Some(error) if length >= 20 && kind == ERROR && error != 0 => {
            Err(io::Error::from_raw_os_error(error.saturating_neg()))
        }
        Some(_) if length >= 20 => Ok(()),
        _ => Err(io::Error::other("its answer is cut off")),
    }
}

/// What instances are held in. `io` and `cpuset` are used where they are there.
const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

pub(super) fn cgroups() -> Check {
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    let root = cgroup2_root(&mounts);
    let controllers = root.as_deref().map(|root| fs::read_to_string(root.join("cgroup.controllers")));
    judge_cgroups(root.as_deref(), controllers.and_then(Result::ok).as_deref())
}

/// Where cgroup v2 is mounted.
fn cgroup2_root(mounts: &str) -> Option<PathBuf> {
    let mut fields = mounts.lines().map(|line| line.split(' '));
    fields.find_map(|mut line| match (line.next(), line.next(), line.next()) {
        (_, Some(place), Some("cgroup2")) => Some(PathBuf::from(place)),
        _ => None,
    })
}

fn judge_cgroups(root: Option<&Path>, controllers: Option<&str>) -> Check {
    const NAME: &str = "cgroup v2";
    const FIX: &str = "boot with cgroup v2 alone: add `systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all` to the \
                       kernel's command line (on Debian: GRUB_CMDLINE_LINUX in /etc/default/grub, then update-grub)";
    let Some(root) = root else { return Check::failed(NAME, "is not mounted", FIX) };
    let there: Vec<&str> = controllers.unwrap_or_default().split_ascii_whitespace().collect();
    let missing: Vec<&str> = NEEDED.into_iter().filter(|needed| !there.contains(needed)).collect();
    if missing.is_empty() {
        return Check::ok(NAME, format!("{} has {}", root.display(), there.join(", ")));
    }
    let found = format!("{} lacks {}", root.display(), missing.join(", "));
    Check::failed(NAME, format!("{found}: limits would not hold"), FIX)
}

#[cfg(test)]
mod tests {
    use super::super::Health;
    use super::*;

    #[test]
    fn every_needed_controller_must_be_there() {
        let root = Path::new("/sys/fs/cgroup");
        let all = judge_cgroups(Some(root), Some("cpuset cpu io memory pids\n"));
        assert_eq!(all.health, Health::Ok, "{}", all.found);
        let some = judge_cgroups(Some(root), Some("hugetlb cpu\n"));
        assert_eq!(some.found, "/sys/fs/cgroup lacks memory, pids: limits would not hold");
        assert_eq!(judge_cgroups(None, None).health, Health::Failed);
    }

    #[test]
    fn the_mount_is_found_beside_version_one() {
        let mounts =
            "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\nnone /sys/fs/cgroup/unified cgroup2 rw 0 0\n";
        assert_eq!(cgroup2_root(mounts), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        assert_eq!(cgroup2_root("proc /proc proc rw 0 0\n"), None);
    }

    #[test]
    fn a_right_that_is_missing_is_no_missing_nf_tables() {
        let failed = |errno: nix::errno::Errno| judge_nft(Err(io::Error::from_raw_os_error(errno as i32)));
        assert_eq!(failed(nix::errno::Errno::EPERM).health, Health::Warning);
        assert_eq!(failed(nix::errno::Errno::EINVAL).health, Health::Failed);
        assert_eq!(judge_nft(Ok(())).health, Health::Ok);
    }
}
