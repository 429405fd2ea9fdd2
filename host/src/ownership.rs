//! Whose the data directory is when the agent is not root.
//!
//! The directory itself stays root's, with the agent's group and the sticky mode: the agent makes files in it, and can
//! neither rename nor replace what is root's in there, which is `vms/` and `jails/`. Everything else in it is given to
//! the agent. Nothing is followed on the way. A file that has a second name elsewhere is left as it is; in its place the
//! agent gets a copy, if it is root's and for everyone to read.

use std::ffi::{CStr, OsStr};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chownat, fchmod, fchown, fstat, mkdirat,
    openat, renameat, unlinkat,
};
use rustix::io::Errno;

use super::HostError;
use super::data_dir::{JAILS_DIR, VMS_DIR};
use super::files::{self, failed};
use super::privileges::Account;

/// Everyone who owns an entry keeps it; the agent's group makes new ones; VMMs get through to their own directories.
const SHARED_DIR_MODE: u32 = 0o1771;
/// The agent sees which instances and which jails there are; a VMM gets through to its own directory.
const ROOT_DIR_MODE: u32 = 0o751;
const PRIVATE_DIR_MODE: u32 = 0o700;
const PRIVATE_FILE_MODE: u32 = 0o600;
const READABLE_BY_ALL: u32 = 0o004;
/// What of a file's mode a copy has: nothing that changes the user who runs it.
const ALL_MAY: u32 = 0o777;

/// No data directory is deeper; one that is was not made by us.
const MAX_DEPTH: usize = 32;

/// What an agent that is not root is given.
#[derive(Debug, Clone)]
pub struct Handover<'a> {
    pub data_dir: &'a Path,
    /// Directories that belong to it wherever they are: certificates, images, the socket's own.
    pub own: Vec<PathBuf>,
}

/// What stays root's in a data directory.
const ROOTS_OWN: [&str; 2] = [VMS_DIR, JAILS_DIR];

const RECORD_MODE: u32 = 0o644;
/// No path is longer.
const MAX_RECORD_BYTES: u64 = 4096;

/// Records of jails that are not root's are written anew, as files of root's that no process has open: an agent was once
/// given them. What is no record goes.
fn take_back_records(dir: &Path) -> Result<(), HostError> {
    let records = files::Dir::open_root(dir)?;
    for name in records.list()? {
        let Some(found) = records.look(&name)? else { continue };
        if found.st_uid == 0 {
            continue;
        }
        match records.read(&name, files::OpenHow::Read, MAX_RECORD_BYTES) {
            Ok(Some(text)) => records.replace(&name, &text, RECORD_MODE)?,
            _ => records.remove_tree(&name)?,
        }
    }
    Ok(())
}

/// Fails if a directory on the way to `path` is this user's or may be written by one of its groups, or a link on it is
/// this user's: it could then put another in its place.
pub(super) fn check_way(path: &Path, user: u32, groups: &[u32]) -> Result<(), HostError> {
    // Root, and an agent without root, are not protected from themselves.
    if user == 0 || user == rustix::process::geteuid().as_raw() {
        return Ok(());
    }
    let real = path.canonicalize().map_err(failed("find", path))?;
    let named = std::path::absolute(path).map_err(failed("find", path))?;
    for link in named.ancestors() {
        let found = link.symlink_metadata().map_err(failed("look at", link))?;
        if found.is_symlink() && found.uid() == user {
            let link = link.display();
            return Err(HostError::Refused(format!(
                "{link} is a link that user {user} owns and can redirect; give the path that it leads to instead"
            )));
        }
    }
    // Where a link is on the way, the directory that it lies in counts too.
    let mut dirs = real.ancestors().skip(1).chain(named.ancestors().skip(1));
    dirs.try_for_each(|dir| check_dir(path, dir, user, groups))
}

fn check_dir(path: &Path, dir: &Path, user: u32, groups: &[u32]) -> Result<(), HostError> {
    let meta = dir.metadata().map_err(failed("look at", dir))?;
    let by_group = meta.mode() & WRITABLE_BY_GROUP != 0 && groups.contains(&meta.gid());
    let open = (by_group || meta.mode() & WRITABLE_BY_ALL != 0) && meta.mode() & STICKY == 0;
    if meta.uid() != user && !open {
        return Ok(());
    }
    let (path, dir) = (path.display(), dir.display());
    Err(HostError::Refused(format!(
        "user {user} can write to {dir} and so replace {path}; make root its owner, and make it read-only for others"
    )))
}

/// Whether [`hand_over`] would refuse this directory, which need not be there yet, for what lies above it.
pub fn can_be_handed_over(data_dir: &Path, account: &Account) -> Result<(), HostError> {
    let (user, groups) = (account.uid, account.groups()?);
    let data_dir = std::path::absolute(data_dir).map_err(failed("find", data_dir))?;
    let Some(there) = data_dir.ancestors().find(|dir| dir.is_dir()) else { return Ok(()) };
    check_way(there, user, &groups)?;
    if there == data_dir { Ok(()) } else { check_dir(&data_dir, there, user, &groups) }
}

const WRITABLE_BY_GROUP: u32 = 0o020;
const WRITABLE_BY_ALL: u32 = 0o002;
const STICKY: u32 = 0o1000;

/// Prepares directories for `account`. The caller is root; asking twice is asking once.
pub fn hand_over(what: &Handover<'_>, account: &Account) -> Result<(), HostError> {
    let data_dir = make_dir(what.data_dir).map_err(failed("make", what.data_dir))?;
    let shared = |dir: &OwnedFd, mode: u32| -> io::Result<()> {
        fchown(dir, Some(Uid::ROOT), Some(Gid::from_raw(account.gid)))?;
        Ok(fchmod(dir, Mode::from_raw_mode(mode))?)
    };
    shared(&data_dir, SHARED_DIR_MODE).map_err(failed("share", what.data_dir))?;
    check_way(what.data_dir, account.uid, &account.groups()?)?;
    for name in ROOTS_OWN {
        let path = what.data_dir.join(name);
        let dir = make_in(&data_dir, name).map_err(failed("make", &path))?;
        shared(&dir, ROOT_DIR_MODE).map_err(failed("share", &path))?;
    }
    take_back_records(&what.data_dir.join(JAILS_DIR))?;
    give_entries(&data_dir, account, &ROOTS_OWN, 0).map_err(failed("give away", what.data_dir))?;
    for dir in what.own.iter().filter(|dir| !what.data_dir.starts_with(dir)) {
        let (user, groups) = (account.uid, account.groups()?);
        if let Some(there) = dir.ancestors().find(|dir| dir.symlink_metadata().is_ok()) {
            check_way(there, user, &groups)?;
        }
        let opened = make_dir(dir).map_err(failed("make", dir))?;
        check_way(dir, user, &groups)?;
        give_tree(&opened, account, 0).map_err(failed("give away", dir))?;
    }
    Ok(())
}

const OPEN_DIR: OFlags =
    OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// A directory with those above it; private where it is new.
fn make_dir(path: &Path) -> io::Result<OwnedFd> {
    super::files::run::create_private_dir(path)?;
    Ok(openat(CWD, path, OPEN_DIR, Mode::empty())?)
}

fn make_in(dir: &OwnedFd, name: &str) -> io::Result<OwnedFd> {
    match mkdirat(dir, name, Mode::from_raw_mode(PRIVATE_DIR_MODE)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(cause) => return Err(cause.into()),
    }
    Ok(openat(dir, name, OPEN_DIR, Mode::empty())?)
}

fn give_tree(dir: &OwnedFd, account: &Account, depth: usize) -> io::Result<()> {
    give(dir, account)?;
    give_entries(dir, account, &[], depth)
}

fn give_entries(dir: &OwnedFd, account: &Account, but: &[&str], depth: usize) -> io::Result<()> {
    if depth > MAX_DEPTH {
        return Err(io::Error::other("directories are too deep"));
    }
    for entry in Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if [c".", c".."].contains(&name) || but.iter().any(|but| name.to_bytes() == but.as_bytes()) {
            continue;
        }
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let found = match openat(dir, name, flags, Mode::empty()) {
            Ok(found) => found,
            Err(Errno::NOENT) => continue,
            Err(cause) => return Err(cause.into()),
        };
        let stat = fstat(&found)?;
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let inner = openat(dir, name, OPEN_DIR, Mode::empty())?;
                give_tree(&inner, account, depth + 1)?;
            }
            FileType::RegularFile if stat.st_nlink == 1 => give(&found, account)?,
            FileType::RegularFile if !is_of(&stat, account) => {
                let copied = match stat.st_uid == 0 && stat.st_mode & READABLE_BY_ALL != 0 {
                    true => put_copy(dir, name, (&found, &stat), account),
                    false => Err(io::Error::other("it is not root's, or not for everyone to read")),
                };
                if let Err(error) = copied {
                    let name = name.to_string_lossy();
                    tracing::warn!(%name, %error, "a file with a second name elsewhere is not given to the agent");
                }
            }
            // Sockets and links are recreated where they are needed.
            _ => {}
        }
    }
    Ok(())
}

/// Puts a copy of what was found under its name. An image has such names in the jails of VMMs that an agent started as
/// root. What everyone may read, the agent could have read before it put a name for it here.
fn put_copy(
    dir: &OwnedFd,
    name: &CStr,
    (found, stat): (&OwnedFd, &Stat),
    account: &Account,
) -> io::Result<()> {
    let source = files::reopen(found, OFlags::RDONLY)?;
    let fresh = files::temporary(OsStr::from_bytes(name.to_bytes()));
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let target = File::from(openat(dir, &*fresh, flags, Mode::from_raw_mode(PRIVATE_FILE_MODE))?);
    let put = || {
        files::copy(&source, &target, source.metadata()?.len())?;
        fchmod(&target, Mode::from_raw_mode(stat.st_mode & ALL_MAY))?;
        give(&target, account)?;
        target.sync_all()?;
        Ok(renameat(dir, &*fresh, dir, name)?)
    };
    put().inspect_err(|_| {
        // The first error is the one to report.
        let _ = unlinkat(dir, &*fresh, AtFlags::empty());
    })
}

fn is_of(stat: &Stat, account: &Account) -> bool {
    (stat.st_uid, stat.st_gid) == (account.uid, account.gid)
}

fn give(what: &impl AsFd, account: &Account) -> io::Result<()> {
    if is_of(&fstat(what)?, account) {
        return Ok(());
    }
    let (uid, gid) = (Uid::from_raw(account.uid), Gid::from_raw(account.gid));
    Ok(chownat(what, "", Some(uid), Some(gid), AtFlags::EMPTY_PATH)?)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{PermissionsExt as _, chown, symlink};

    use mvm_needs::{Need, can_run};
    use mvm_proto::InstanceId;

    use super::*;
    use crate::data_dir::DataDir;
    use crate::images::Images;

    fn nobody() -> Account {
        Account { name: "nobody".to_owned(), uid: 65_534, gid: 65_534 }
    }

    #[test]
    fn all_but_the_run_directories_is_given_away_and_no_link_leads_out() {
        if !can_run(&[Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (data, foreign) = (dir.path().join("agent"), dir.path().join("foreign"));
        for path in ["certs", "images/deep", "vms/i-00000001"] {
            std::fs::create_dir_all(data.join(path)).unwrap();
        }
        for path in ["ledger.json", "images/deep/kernel", "vms/i-00000001/vmm.json"] {
            std::fs::write(data.join(path), "x").unwrap();
        }
        std::fs::write(&foreign, "of root").unwrap();
        symlink(&foreign, data.join("linked")).unwrap();
        std::fs::hard_link(&foreign, data.join("second-name")).unwrap();
        std::fs::create_dir(dir.path().join("etc")).unwrap();
        symlink(dir.path().join("etc"), data.join("images/etc")).unwrap();
        let account = nobody();
        let own = vec![data.join("certs"), dir.path().join("elsewhere/images")];
        for _ in 0..2 {
            hand_over(&Handover { data_dir: &data, own: own.clone() }, &account).unwrap();
        }
        let owner = |path: &Path| std::fs::metadata(path).unwrap().uid();
        for path in ["certs", "ledger.json", "images", "images/deep", "images/deep/kernel"] {
            assert_eq!(owner(&data.join(path)), 65_534, "{path}");
        }
        assert_eq!(owner(&dir.path().join("elsewhere/images")), 65_534);
        for path in [&data, &data.join("vms"), &data.join("vms/i-00000001/vmm.json"), &foreign] {
            assert_eq!(owner(path), 0, "{}", path.display());
        }
        assert_eq!(owner(&dir.path().join("etc")), 0);
        let mode = |path: &Path| std::fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        assert_eq!((mode(&data), mode(&data.join("vms"))), (0o1771, 0o751));
        // A data directory that is a link is none.
        symlink(&data, dir.path().join("linked")).unwrap();
        hand_over(&Handover { data_dir: &dir.path().join("linked"), own: vec![] }, &account).unwrap_err();
    }

    #[test]
    fn an_image_with_a_second_name_is_copied_for_the_agent_and_what_is_root_s_to_read_is_not() {
        if !can_run(&[Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (data, jail) = (dir.path().join("agent"), dir.path().join("jail"));
        let sealed = data.join("images/sealed");
        for made in [&sealed, &jail] {
            std::fs::create_dir_all(made).unwrap();
        }
        let mode = std::fs::Permissions::from_mode;
        for (name, readable) in [("kernel", 0o444), ("secret", 0o400)] {
            std::fs::write(sealed.join(name), name).unwrap();
            std::fs::set_permissions(sealed.join(name), mode(readable)).unwrap();
            std::fs::hard_link(sealed.join(name), jail.join(name)).unwrap();
        }
        std::fs::set_permissions(&sealed, mode(0o555)).unwrap();
        let image = |name: &str| Images::hold(&data.join("images"), 65_534).unwrap().pin(&sealed.join(name));
        for _ in 0..2 {
            hand_over(&Handover { data_dir: &data, own: vec![] }, &nobody()).unwrap();
            let found = image("kernel").unwrap().stat;
            assert_eq!((found.st_uid, found.st_nlink, found.st_mode & 0o7777), (65_534, 1, 0o444));
            assert_eq!(std::fs::read(sealed.join("kernel")).unwrap(), b"kernel");
            // The VMM whose name it is keeps what it has.
            let other = std::fs::metadata(jail.join("kernel")).unwrap();
            assert_eq!((other.uid(), other.nlink()), (0, 1));
            let why = image("secret").unwrap_err().to_string();
            assert!(why.contains("has another name elsewhere") && why.contains("put a copy"), "{why}");
            assert_eq!(std::fs::metadata(sealed.join("secret")).unwrap().uid(), 0);
            assert_eq!(std::fs::read_dir(&sealed).unwrap().count(), 2, "nothing is left of copying");
        }
    }

    #[test]
    fn records_of_jails_stay_root_s_and_the_search_for_vmms_goes_on_after_every_start() {
        if !can_run(&[Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("agent");
        let id = InstanceId::from_bits(7);
        let root = data.join("vms").join(id.as_str()).join("firecracker").join(id.as_str()).join("root");
        std::fs::create_dir_all(&root).unwrap();
        std::fs::create_dir(data.join("jails")).unwrap();
        let record = data.join("jails").join(id.as_str());
        std::fs::write(&record, root.to_str().unwrap()).unwrap();
        let owner = |path: &Path| std::fs::symlink_metadata(path).unwrap().uid();
        let found = || {
            let data = DataDir::hold(&data).unwrap();
            crate::process::scan(&data).unwrap();
            crate::jail::roots(&data).unwrap().into_iter().map(|(_, instance)| instance).collect::<Vec<_>>()
        };
        for _ in 0..2 {
            hand_over(&Handover { data_dir: &data, own: vec![] }, &nobody()).unwrap();
            assert_eq!((owner(&data.join("jails")), owner(&record)), (0, 0));
            assert_eq!(found(), std::slice::from_ref(&id));
        }
        // As it was left where both were given away: taken back, and by no file that the agent may still have open.
        chown(data.join("jails"), Some(65_534), Some(65_534)).unwrap();
        chown(&record, Some(65_534), Some(65_534)).unwrap();
        symlink("/etc", data.join("jails/i-00000008")).unwrap();
        std::os::unix::fs::lchown(data.join("jails/i-00000008"), Some(65_534), Some(65_534)).unwrap();
        let before = std::fs::metadata(&record).unwrap().ino();
        hand_over(&Handover { data_dir: &data, own: vec![] }, &nobody()).unwrap();
        assert_eq!((owner(&data.join("jails")), owner(&record)), (0, 0));
        assert_ne!(std::fs::metadata(&record).unwrap().ino(), before);
        assert_eq!(found(), [id]);
        assert!(std::fs::symlink_metadata(data.join("jails/i-00000008")).is_err());
        let mode = std::fs::metadata(data.join("jails")).unwrap().permissions().mode() & 0o7777;
        assert_eq!(mode, 0o751);
    }

    #[test]
    fn what_someone_put_in_the_place_of_the_records_is_not_used() {
        if !can_run(&[Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (data, outside) = (dir.path().join("agent"), dir.path().join("outside"));
        for made in [&data, &outside] {
            std::fs::create_dir(made).unwrap();
        }
        symlink(&outside, data.join("jails")).unwrap();
        hand_over(&Handover { data_dir: &data, own: vec![] }, &nobody()).unwrap_err();
        DataDir::hold(&data).unwrap_err();
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 0);
    }

    #[test]
    fn a_data_directory_that_the_agent_could_replace_is_refused() {
        if !can_run(&[Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("home/agent");
        let home = dir.path().join("home");
        std::fs::create_dir(&home).unwrap();
        let given = || hand_over(&Handover { data_dir: &data, own: vec![] }, &nobody());
        given().unwrap();
        chown(&home, Some(65_534), None).unwrap();
        let refused = given().unwrap_err();
        assert!(matches!(&refused, HostError::Refused(why) if why.contains("home")), "{refused:?}");
        chown(&home, Some(0), None).unwrap();
        // A group is as good as its members: one that the agent is in is not to write, another may.
        let (staff, nogroup) = (50, 65_534);
        for (group, mode, refused) in [
            (0, 0o777, true),
            (0, 0o1777, false),
            (nogroup, 0o775, true),
            (nogroup, 0o1775, false),
            (nogroup, 0o755, false),
            (staff, 0o775, false),
        ] {
            chown(&home, None, Some(group)).unwrap();
            std::fs::set_permissions(&home, std::fs::Permissions::from_mode(mode)).unwrap();
            assert_eq!(given().is_err(), refused, "group {group}, mode {mode:o}");
        }
        // What lies behind a link in a directory of the agent's, too.
        let linked = dir.path().join("linked");
        std::fs::create_dir(&linked).unwrap();
        chown(&linked, Some(65_534), None).unwrap();
        symlink(&home, linked.join("home")).unwrap();
        let data_dir = &linked.join("home/agent");
        hand_over(&Handover { data_dir, own: vec![] }, &nobody()).unwrap_err();
    }

    #[test]
    fn a_directory_that_the_agent_made_a_link_to_elsewhere_is_not_given_to_it() {
        if !can_run(&[Need::Root]) {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (data, secret) = (dir.path().join("agent"), dir.path().join("etc"));
        std::fs::create_dir_all(secret.join("images")).unwrap();
        std::fs::write(secret.join("shadow"), "root").unwrap();
        let give = |own: &str| hand_over(&Handover { data_dir: &data, own: vec![data.join(own)] }, &nobody());
        give("images").unwrap();
        give("images").unwrap();
        // Its own entry in a directory that is sticky is its to rename.
        std::fs::rename(data.join("images"), data.join("moved")).unwrap();
        for (link, own) in [("images", "images"), ("a", "a/images")] {
            symlink(&secret, data.join(link)).unwrap();
            std::os::unix::fs::lchown(data.join(link), Some(65_534), Some(65_534)).unwrap();
            let refused = give(own).unwrap_err();
            assert!(
                matches!(&refused, HostError::Refused(why) if why.contains("is a link that user")),
                "{refused:?}"
            );
            for path in [secret.clone(), secret.join("shadow"), secret.join("images")] {
                assert_eq!(path.metadata().unwrap().uid(), 0, "{}", path.display());
            }
        }
    }
}
