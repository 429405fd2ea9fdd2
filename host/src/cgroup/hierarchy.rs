//! Where control groups are on this machine, and which controllers reach ours.
//!
//! A controller limits what is in a group only when every group above hands it down. All but the topmost hand it down
//! only while they hold no process themselves, so processes are in instances' groups and nowhere above.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Component, Path, PathBuf};

use super::error::{CgroupError, failed};
use super::file;

/// What every limit that we promise needs.
pub(super) const NEEDED: [&str; 3] = ["cpu", "memory", "pids"];

/// Used when it is there: limits on disks are for who asks for them.
pub(super) const WELCOME: [&str; 1] = ["io"];

const AVAILABLE: &str = "cgroup.controllers";
pub(super) const HANDED_DOWN: &str = "cgroup.subtree_control";

/// Names of controllers.
pub(super) type Controllers = BTreeSet<String>;

/// Where the whole cgroup v2 hierarchy is mounted, from the text of `/proc/self/mountinfo`. A bind mount of a part of
/// it is not it.
pub(super) fn mount_point(mountinfo: &str) -> Option<PathBuf> {
    mountinfo.lines().find_map(|line| {
        let (place, kind) = line.split_once(" - ")?;
        let mut fields = place.split(' ').skip(3);
        let (root, path) = (fields.next()?, fields.next()?);
        (kind.split(' ').next() == Some("cgroup2") && root == "/").then(|| PathBuf::from(unescaped(path)))
    })
}

/// Spaces and the like are written as a backslash and three octal digits.
pub(super) fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_owned();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// This process's own group in the v2 hierarchy, from the text of `/proc/self/cgroup`: a path that starts with `/`.
pub(super) fn own_group(text: &str) -> Option<&Path> {
    text.lines().find_map(|line| line.strip_prefix("0::")).map(Path::new)
}

/// The path of our own topmost group below the mount. It is never below the agent's: a service that ends takes all
/// groups below its own with it, and microVMs are to outlive their agent.
pub(super) fn below_mount(
    parent: Option<&Path>,
    name: &str,
    own: Option<&Path>,
) -> Result<PathBuf, CgroupError> {
    let wanted = parent.unwrap_or(Path::new("")).join(name);
    let plain = |part: Component<'_>| matches!(part, Component::Normal(_));
    if name.is_empty() || !wanted.components().all(plain) || !wanted.ends_with(name) {
        return Err(CgroupError::BadParent(wanted));
    }
    let own = own.and_then(|own| own.strip_prefix("/").ok()).filter(|own| *own != Path::new(""));
    match own {
        Some(own) if wanted.starts_with(own) => {
            Err(CgroupError::InsideOwnUnit { own: own.to_owned(), wanted })
        }
        _ => Ok(wanted),
    }
}

/// What a group can use: what the one above hands down to it.
pub(super) fn available(group: &Path) -> io::Result<Controllers> {
    words(&group.join(AVAILABLE))
}

/// What a group hands down to those below.
pub(super) fn handed_down(group: &Path) -> io::Result<Controllers> {
    words(&group.join(HANDED_DOWN))
}

fn words(file: &Path) -> io::Result<Controllers> {
    Ok(fs::read_to_string(file)?.split_whitespace().map(str::to_owned).collect())
}

/// Makes `group` hand these controllers down, one by one: one that can't be does not keep the others. Says which were
/// added, and which are not handed down now and why.
pub(super) fn hand_down(
    group: &Path,
    wanted: &Controllers,
) -> io::Result<(Controllers, Vec<(String, io::Error)>)> {
    let before = handed_down(group)?;
    let mut refused = Vec::new();
    for controller in wanted.difference(&before) {
        if let Err(cause) = file::write(&group.join(HANDED_DOWN), &format!("+{controller}")) {
            refused.push((controller.clone(), cause));
        }
    }
    let now = handed_down(group)?;
    for controller in wanted.difference(&now) {
        if !refused.iter().any(|(name, _)| name == controller) {
            refused.push((controller.clone(), io::Error::other("the kernel took it and does not show it")));
        }
    }
    Ok((now.difference(&before).cloned().collect(), refused))
}

/// Hands controllers down from the mount to `below`, which is made if it is not there, and from `below` itself.
/// Whatever can't be is told: all of it goes into `lost`.
pub(super) fn delegate(
    mount: &Path,
    below: &Path,
    wanted: &Controllers,
    lost: &mut Vec<CgroupError>,
) -> Result<(Controllers, bool), CgroupError> {
    let mut group = mount.to_owned();
    let have = available(&group).map_err(failed(format!("read the controllers of {}", group.display())))?;
    let mut reach: Controllers = wanted.intersection(&have).cloned().collect();
    let absent: Vec<String> = wanted.difference(&have).cloned().collect();
    if !absent.is_empty() {
        lost.push(CgroupError::Unavailable { controllers: absent, group: group.clone() });
    }
    let mut changed = false;
    let mut rest = below.components();
    while !reach.is_empty() {
        let (added, refused) = hand_down(&group, &reach)
            .map_err(failed(format!("hand controllers down from {}", group.display())))?;
        changed |= !added.is_empty();
        for (controller, cause) in refused {
            reach.remove(&controller);
            lost.push(CgroupError::NotDelegated {
                controllers: vec![controller],
                group: group.clone(),
                cause,
            });
        }
        let Some(name) = rest.next() else { break };
        group.push(name);
        if !reach.is_empty() {
            changed |=
                file::make_group(&group).map_err(failed(format!("make the group {}", group.display())))?;
        }
    }
    Ok((reach, changed))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(list: &[&str]) -> Controllers {
        list.iter().map(|name| (*name).to_owned()).collect()
    }

    #[test]
    fn the_hierarchy_is_found_where_it_is_mounted_as_a_whole() {
        let unified = "22 1 0:20 / /sys rw - sysfs sysfs rw\n\
                       30 22 0:26 / /sys/fs/cgroup rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n";
        assert_eq!(mount_point(unified), Some(PathBuf::from("/sys/fs/cgroup")));
        let hybrid = "31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw,mode=755\n\
                      35 31 0:32 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                      41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(hybrid), Some(PathBuf::from("/sys/fs/cgroup/unified")));
        let odd = "50 1 0:38 /a/part /mnt/part rw - cgroup2 cgroup2 rw\n\
                   51 1 0:38 / /mnt/all\\040of\\134it rw master:3 shared:1 - cgroup2 cgroup2 rw\n";
        assert_eq!(mount_point(odd), Some(PathBuf::from("/mnt/all of\\it")));
        assert_eq!(mount_point("31 23 0:28 / /sys/fs/cgroup rw - tmpfs tmpfs rw\nnonsense\n"), None);
    }

    #[test]
    fn our_group_is_at_the_top_or_below_a_parent_and_never_below_the_agents_own() {
        let service = own_group("12:pids:/x\n0::/system.slice/mvm.service\n");
        assert_eq!(service, Some(Path::new("/system.slice/mvm.service")));
        assert_eq!(below_mount(None, "mvm", service).unwrap(), Path::new("mvm"));
        let slice = below_mount(Some(Path::new("machine.slice")), "mvm", service).unwrap();
        assert_eq!(slice, Path::new("machine.slice/mvm"));
        let below_top = below_mount(Some(Path::new("a/b")), "mvm", Some(Path::new("/"))).unwrap();
        assert_eq!(below_top, Path::new("a/b/mvm"));
        let own = below_mount(Some(Path::new("system.slice/mvm.service")), "mvm", service);
        assert!(matches!(own, Err(CgroupError::InsideOwnUnit { .. })), "{own:?}");
        for (parent, name) in
            [(Some("/abs"), "mvm"), (Some("../up"), "mvm"), (None, ""), (None, "/mvm"), (Some("a"), "..")]
        {
            let refused = below_mount(parent.map(Path::new), name, service);
            assert!(matches!(refused, Err(CgroupError::BadParent(_))), "{parent:?} {name:?} {refused:?}");
        }
    }

    #[test]
    fn a_controller_that_the_machine_lacks_is_told_with_what_to_do() {
        let mount = tempfile::tempdir().unwrap();
        fs::write(mount.path().join(AVAILABLE), "hugetlb rdma\n").unwrap();
        let mut lost = Vec::new();
        let (reach, changed) =
            delegate(mount.path(), Path::new("mvm"), &names(&["cpu", "memory"]), &mut lost).unwrap();
        assert!(reach.is_empty() && !changed, "{reach:?}");
        assert!(!mount.path().join("mvm").exists(), "nothing is made where nothing can be limited");
        let told = lost[0].to_string();
        assert!(told.contains("cpu, memory") && told.contains("unified_cgroup_hierarchy"), "{told}");
    }

    #[test]
    fn a_controller_that_is_taken_but_not_shown_is_not_relied_on() {
        let group = tempfile::tempdir().unwrap();
        std::os::unix::fs::symlink("/dev/null", group.path().join(HANDED_DOWN)).unwrap();
        let (added, refused) = hand_down(group.path(), &names(&["memory"])).unwrap();
        assert!(added.is_empty());
        assert_eq!(refused.len(), 1);
    }
}
