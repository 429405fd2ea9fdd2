//! Whether this machine can hold the bounds that the settings ask for: asked by an agent before it starts, and by
//! `mvm doctor`.
//!
//! [`Machine::look`] tries each with the rights of its process, so an agent that gives up root's rights looks before it does.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::AsRawFd as _;

use mvm_host::cgroup::{CgroupSettings, Cgroups};
use mvm_host::sandbox::{self, Capabilities};
use mvm_host::{AnyHost, Host as _, Operation};
use mvm_proto::text::chain;
use mvm_vmm::DriverKind;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, recv, sendto, setsockopt, socket,
    sockopt,
};
use nix::sys::time::TimeVal;

use super::{Effort, IsolationSettings, NetworkMode};

const TUN: &str = "/dev/net/tun";

/// A bound that was asked for and that this machine can't hold.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("this machine can't hold what {setting} asks for: {found}")]
pub struct Unavailable {
    /// The flag with its value, also where that is the default.
    pub setting: &'static str,
    pub found: String,
    /// What to do on the machine, and which weaker setting works on it as it is.
    pub remedy: String,
}

/// What tenants' networks and VMMs' jails can be made of here.
#[derive(Debug, Clone)]
pub struct Machine {
    tun: Result<(), String>,
    nft: Result<(), (String, &'static str)>,
    jail: Capabilities,
}

impl Machine {
    #[must_use]
    pub fn look() -> Self {
        let nft = nft_generation();
        Self { tun: open_tun(), nft: nft.map_err(|cause| nft_lacks(&cause)), jail: sandbox::probe() }
    }

    /// The first bound that is required and can't be held. Control groups are asked of the host: see [`check_groups`].
    pub fn check(&self, settings: &IsolationSettings, driver: DriverKind) -> Result<(), Unavailable> {
        if settings.network == NetworkMode::Bridges {
            self.check_network()?;
        }
        // A Firecracker is confined by its jailer, whose rights are looked at when it is chosen.
        if settings.jail == Effort::Required && driver == DriverKind::Qemu {
            self.check_jail()?;
        }
        Ok(())
    }

    pub(crate) fn check_network(&self) -> Result<(), Unavailable> {
        const SETTING: &str = "--network bridges";
        const WEAKER: &str = "Or start with --network none: instances then have no network card.";
        let lacks = |found: &str, fix: &str| Unavailable {
            setting: SETTING,
            found: found.to_owned(),
            remedy: format!("{fix} {WEAKER}"),
        };
        let load_tun = "Load it (modprobe tun, and a line `tun` in /etc/modules-load.d/mvm.conf), and start the agent as \
                        root.";
        self.tun.as_ref().map_err(|found| lacks(found, load_tun))?;
        self.nft.as_ref().map_err(|(found, fix)| lacks(found, fix))?;
        Ok(())
    }

    pub(crate) fn check_jail(&self) -> Result<(), Unavailable> {
        let missing = self.jail.weaker();
        let missing: Vec<_> =
            missing.iter().filter(|weaker| !weaker.is_minor()).map(ToString::to_string).collect();
        if missing.is_empty() {
            return Ok(());
        }
        Err(Unavailable {
            setting: "--jail required",
            found: format!("a VMM goes without this: {}", missing.join("; ")),
            remedy: "Start the agent as root with all of root's capabilities, on a kernel with Landlock and seccomp. Or start \
                     with --jail best-effort (VMMs get what there is) or --jail none."
                .to_owned(),
        })
    }
}

/// Has the host try a tenant's network, where there are to be some.
pub(crate) async fn check_networks(settings: &IsolationSettings, host: &AnyHost) -> Result<(), Unavailable> {
    if settings.network == NetworkMode::None {
        return Ok(());
    }
    host.perform(&Operation::TryNetwork).await.map(drop).map_err(|error| networks_lack(&chain(&error)))
}

/// The same by this process itself.
pub(crate) fn try_network() -> Result<(), Unavailable> {
    mvm_host::try_network().map_err(|error| networks_lack(&chain(&error)))
}

fn networks_lack(found: &str) -> Unavailable {
    Unavailable {
        setting: "--network bridges",
        found: format!("a tenant's network could not be made in a trial: {found}"),
        remedy: "Load what is missing (modprobe bridge tun nf_tables), or use a kernel with CONFIG_BRIDGE, CONFIG_NF_TABLES_INET, \
                 CONFIG_NF_TABLES_BRIDGE, CONFIG_NFT_CT, CONFIG_NFT_NAT and CONFIG_NFT_MASQ. Or start with --network none: \
                 instances then have no network card."
            .to_owned(),
    }
}

/// Has the host hand down the control group controllers that `--cgroups required` needs.
pub(crate) async fn check_groups(settings: &IsolationSettings, host: &AnyHost) -> Result<(), Unavailable> {
    if settings.cgroups != Effort::Required {
        return Ok(());
    }
    host.perform(&Operation::LookAtGroups).await.map(drop).map_err(|error| groups_lack(&chain(&error)))
}

/// The same by looking alone.
pub(crate) fn look_at_groups(settings: &CgroupSettings) -> Result<String, Unavailable> {
    Cgroups::look(settings).map_err(|error| groups_lack(&chain(&error)))
}

fn groups_lack(found: &str) -> Unavailable {
    Unavailable {
        setting: "--cgroups required",
        found: found.to_owned(),
        remedy: "On Debian add `systemd.unified_cgroup_hierarchy=1 cgroup_no_v1=all` to GRUB_CMDLINE_LINUX in \
                 /etc/default/grub, run update-grub and boot again. Or start with --cgroups best-effort (limits that can be \
                 set are) or --cgroups none (no limits)."
            .to_owned(),
    }
}

fn open_tun() -> Result<(), String> {
    let opened = OpenOptions::new().read(true).write(true).open(TUN);
    opened.map(drop).map_err(|cause| format!("{TUN} can't be opened: {cause}"))
}

/// A kernel without nf_tables is told from a process without the right.
fn nft_lacks(cause: &io::Error) -> (String, &'static str) {
    if cause.raw_os_error() == Some(Errno::EPERM as i32) {
        let fix = "Start the agent as root with CAP_NET_ADMIN in its network namespace.";
        (format!("nf_tables may not be used: {cause}"), fix)
    } else {
        let fix = "Load it (modprobe nf_tables), or use a kernel with CONFIG_NF_TABLES.";
        (format!("the kernel does not answer for nf_tables: {cause}"), fix)
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

#[cfg(test)]
mod tests {
    use mvm_host::sandbox::Namespace;

    use super::*;

    fn able() -> Machine {
        let namespaces = Namespace::ALL.to_vec();
        let jail = Capabilities { missing: Vec::new(), namespaces, landlock: Some(7), seccomp: true };
        Machine { tun: Ok(()), nft: Ok(()), jail }
    }

    fn refused(machine: &Machine, settings: &IsolationSettings) -> Option<&'static str> {
        machine.check(settings, DriverKind::Qemu).err().map(|lack| lack.setting)
    }

    #[test]
    fn what_is_required_and_missing_is_refused_by_its_setting_and_what_is_not_required_is_not() {
        let no_tun = Machine { tun: Err("no /dev/net/tun".to_owned()), ..able() };
        let no_nft = Machine { nft: Err(("no nf_tables".to_owned(), "load it")), ..able() };
        let no_landlock = Machine { jail: Capabilities { landlock: None, ..able().jail }, ..able() };
        let all = IsolationSettings::ALL;
        assert_eq!(refused(&able(), &all), None);
        assert_eq!(refused(&no_tun, &all), Some("--network bridges"));
        assert_eq!(refused(&no_nft, &all), Some("--network bridges"));
        assert_eq!(refused(&no_landlock, &all), Some("--jail required"));
        for machine in [no_tun, no_nft, no_landlock.clone()] {
            assert_eq!(refused(&machine, &IsolationSettings::NONE), None);
        }
        let best = IsolationSettings { jail: Effort::BestEffort, ..all.clone() };
        assert_eq!(refused(&no_landlock, &best), None);
        assert!(no_landlock.check(&all, DriverKind::Firecracker).is_ok(), "its jailer confines it");
    }

    #[test]
    fn a_missing_right_is_told_from_a_missing_nf_tables() {
        let found = |errno: Errno| nft_lacks(&io::Error::from_raw_os_error(errno as i32)).1;
        assert!(found(Errno::EPERM).contains("CAP_NET_ADMIN"));
        assert!(found(Errno::EINVAL).contains("modprobe nf_tables"));
    }

    #[test]
    fn an_older_landlock_is_no_reason_to_refuse() {
        let older = Machine { jail: Capabilities { landlock: Some(4), ..able().jail }, ..able() };
        assert_eq!(refused(&older, &IsolationSettings::ALL), None);
    }
}
