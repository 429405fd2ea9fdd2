//! Giving up what root may do: all of it in the agent, all but a list in its helper.
//!
//! Both happen before a process has a second thread, for capabilities are a thread's own; a process that has more is
//! refused. Afterwards the kernel is asked what is left, rather than believed.

use std::ffi::CString;
use std::fs;
use std::io;

use nix::unistd::{Gid, Uid, User, getgrouplist, initgroups, setresgid, setresuid};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, remove_capability_from_bounding_set,
    set_capabilities, set_no_new_privs,
};

use super::HostError;

/// Who an agent goes on as.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Account {
    pub name: String,
    pub uid: u32,
    pub gid: u32,
}

impl Account {
    /// The user of this name, if this machine has one.
    pub fn find(name: &str) -> Result<Option<Self>, HostError> {
        let found = User::from_name(name).map_err(|cause| failed("look for the user", name, cause.into()))?;
        Ok(found.map(|user| Self { name: user.name, uid: user.uid.as_raw(), gid: user.gid.as_raw() }))
    }

    /// Every group that a process of it is in.
    pub fn groups(&self) -> Result<Vec<u32>, HostError> {
        let fault = |cause: io::Error| failed("look for the groups of", &self.name, cause);
        let name = CString::new(self.name.as_str()).map_err(|cause| fault(cause.into()))?;
        let found = getgrouplist(&name, Gid::from_raw(self.gid)).map_err(|cause| fault(cause.into()))?;
        Ok(found.into_iter().map(Gid::as_raw).collect())
    }
}

/// What the helper keeps, and for what. The same table is in `docs/privileges.md`.
pub const HELPER_CAPABILITIES: [(CapabilitySet, &str); 14] = [
    (CapabilitySet::NET_ADMIN, "bridges, TAPs and the firewall"),
    (CapabilitySet::SYS_ADMIN, "namespaces and mounts of VMMs"),
    (CapabilitySet::SYS_CHROOT, "jails"),
    (CapabilitySet::SETUID, "a VMM runs as a user of its own"),
    (CapabilitySet::SETGID, "and in a group of its own"),
    (CapabilitySet::SETPCAP, "a VMM is started without capabilities, and can't get any"),
    (CapabilitySet::CHOWN, "a VMM's files are given to its user"),
    (CapabilitySet::FOWNER, "modes of files that belong to a VMM's user"),
    (CapabilitySet::DAC_OVERRIDE, "files that only a VMM's user may open"),
    (CapabilitySet::KILL, "ending a VMM of another user"),
    (CapabilitySet::SYS_PTRACE, "seeing which instance a process of another user belongs to"),
    (CapabilitySet::SYS_RESOURCE, "limits of VMMs above the helper's own"),
    (CapabilitySet::MKNOD, "devices in a jail"),
    (CapabilitySet::FSETID, "keeping the set-group-id mode of directories that are given away"),
];

/// The kernel knows no capability above this one; asking for more is an error that says so.
const LAST_CAPABILITY: &str = "/proc/sys/kernel/cap_last_cap";

fn failed(attempt: &str, what: &str, cause: io::Error) -> HostError {
    HostError::Io { attempt: format!("{attempt} {what}"), cause }
}

/// Makes this process an ordinary one of `account`, for good.
pub fn drop_to(account: &Account) -> Result<(), HostError> {
    if account.uid == 0 || account.gid == 0 {
        return Err(HostError::Refused(format!("{} is root, or in root's group", account.name)));
    }
    one_thread()?;
    let step = |what: &'static str| move |cause: io::Error| failed("give up", what, cause);
    let name = CString::new(account.name.as_str()).map_err(|cause| step("root")(cause.into()))?;
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    // The bounding set first: it takes a capability to shrink it.
    bound(CapabilitySet::empty()).map_err(step("capabilities"))?;
    initgroups(&name, gid).map_err(|cause| step("root's groups")(cause.into()))?;
    setresgid(gid, gid, gid).map_err(|cause| step("root's group")(cause.into()))?;
    setresuid(uid, uid, uid).map_err(|cause| step("root")(cause.into()))?;
    let none = CapabilitySet::empty();
    let sets = CapabilitySets { effective: none, permitted: none, inheritable: none };
    set_capabilities(None, sets).map_err(|cause| step("capabilities")(cause.into()))?;
    set_no_new_privs(true).map_err(|cause| step("new privileges")(cause.into()))?;
    nothing_left()
}

/// Keeps what a helper needs and nothing else.
pub fn confine_helper() -> Result<(), HostError> {
    if !rustix::process::geteuid().is_root() {
        return Ok(());
    }
    let step = |cause: io::Error| failed("give up", "capabilities", cause);
    let kept = HELPER_CAPABILITIES.iter().fold(CapabilitySet::empty(), |all, (one, _)| all | *one);
    // What this process itself never had (in a container, say) is not to be had.
    let now = rustix::thread::capabilities(None).map_err(|cause| step(cause.into()))?;
    let kept = kept & now.permitted;
    bound(kept).map_err(step)?;
    let sets = CapabilitySets { effective: kept, permitted: kept, inheritable: CapabilitySet::empty() };
    set_capabilities(None, sets).map_err(|cause| step(cause.into()))?;
    set_no_new_privs(true).map_err(|cause| step(cause.into()))?;
    let held = Held::by_this_process()?;
    if held.effective != kept.bits() || held.bounding & !kept.bits() != 0 {
        return Err(HostError::Refused("dropped capabilities are still held".to_owned()));
    }
    Ok(())
}

/// Takes all but `kept` out of what this process and its children can ever have.
fn bound(kept: CapabilitySet) -> io::Result<()> {
    clear_ambient_capability_set()?;
    let last: u32 = fs::read_to_string(LAST_CAPABILITY)?.trim().parse().map_err(io::Error::other)?;
    for bit in 0..=last {
        let one = CapabilitySet::from_bits_retain(1 << bit);
        if !kept.contains(one) {
            remove_capability_from_bounding_set(one)?;
        }
    }
    Ok(())
}

fn one_thread() -> Result<(), HostError> {
    let threads = fs::read_dir("/proc/self/task").map(Iterator::count);
    match threads.map_err(|cause| failed("count", "threads", cause))? {
        1 => Ok(()),
        threads => Err(HostError::Refused(format!("can't drop privileges with {threads} threads running"))),
    }
}

/// Asks the kernel, and tries to get back.
fn nothing_left() -> Result<(), HostError> {
    let root = Uid::from_raw(0);
    if setresuid(root, root, root).is_ok() {
        return Err(HostError::Refused("this process can still become root".to_owned()));
    }
    let held = Held::by_this_process()?;
    let any = held.effective | held.permitted | held.inheritable | held.bounding | held.ambient;
    if any != 0 || !held.no_new_privileges || held.uids.contains(&0) || held.gids.contains(&0) {
        return Err(HostError::Refused(format!("this process still has privileges: {held:?}")));
    }
    Ok(())
}

/// What a process has, as the kernel says.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Held {
    /// Real, effective, saved, and for files.
    pub uids: Vec<u32>,
    pub gids: Vec<u32>,
    pub effective: u64,
    pub permitted: u64,
    pub inheritable: u64,
    pub bounding: u64,
    pub ambient: u64,
    pub no_new_privileges: bool,
}

impl Held {
    pub fn by_this_process() -> Result<Self, HostError> {
        Self::read("/proc/thread-self/status")
    }

    pub fn by(pid: u32) -> Result<Self, HostError> {
        Self::read(&format!("/proc/{pid}/status"))
    }

    fn read(path: &str) -> Result<Self, HostError> {
        let text = fs::read_to_string(path).map_err(|cause| failed("read", path, cause))?;
        Self::parse(&text).ok_or_else(|| failed("understand", path, io::ErrorKind::InvalidData.into()))
    }

    fn parse(status: &str) -> Option<Self> {
        let line = |name: &str| status.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'));
        let ids = |name| line(name)?.split_whitespace().map(|id| id.parse().ok()).collect::<Option<_>>();
        let set = |name| u64::from_str_radix(line(name)?.trim(), 16).ok();
        Some(Self {
            uids: ids("Uid")?,
            gids: ids("Gid")?,
            effective: set("CapEff")?,
            permitted: set("CapPrm")?,
            inheritable: set("CapInh")?,
            bounding: set("CapBnd")?,
            ambient: set("CapAmb")?,
            no_new_privileges: line("NoNewPrivs")?.trim() == "1",
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_kernel_says_is_read_and_root_is_no_account_to_drop_to() {
        let text = "Name:\tx\nUid:\t1\t2\t3\t4\nGid:\t5\t6\t7\t8\nCapInh:\t01\nCapPrm:\t02\nCapEff:\t04\n\
                    CapBnd:\t08\nCapAmb:\t10\nNoNewPrivs:\t1\n";
        let held = Held::parse(text).unwrap();
        assert_eq!((held.uids, held.gids), (vec![1, 2, 3, 4], vec![5, 6, 7, 8]));
        let sets = [held.inheritable, held.permitted, held.effective, held.bounding, held.ambient];
        assert_eq!((sets, held.no_new_privileges), ([1, 2, 4, 8, 16], true));
        assert_eq!(Held::parse("Uid:\t1"), None);
        let root = Account { name: "root".to_owned(), uid: 0, gid: 0 };
        assert!(matches!(drop_to(&root), Err(HostError::Refused(_))));
    }

    #[test]
    fn the_documentation_has_the_list_that_the_helper_keeps() {
        let docs = include_str!("../../docs/privileges.md");
        for (one, why) in HELPER_CAPABILITIES {
            let name = format!("CAP_{}", one.iter_names().next().unwrap().0);
            assert!(docs.contains(&format!("| `{name}` | {why} |")), "{name}: {why}");
        }
    }
}
