//! Whose the data directory is when the agent is not root.
//!
//! The directory itself stays root's, with the agent's group and the sticky mode: the agent makes files in it, and can
//! neither rename nor replace what is root's in there, which is `vms/`. Everything else in it is given to the agent.
//! Nothing is followed on the way, and a file that has a second name elsewhere is left as it is.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{
    AtFlags, CWD, Dir, FileType, Gid, Mode, OFlags, Stat, Uid, chownat, fchmod, fchown, fstat, mkdirat,
    openat,
};
use rustix::io::Errno;

use super::HostError;
use super::files::failed;
use super::local::VMS_DIR;
use super::privileges::Account;

/// Everyone who owns an entry keeps it; the agent's group makes new ones; VMMs get through to their own directories.
const SHARED_DIR_MODE: u32 = 0o1771;
/// The agent sees which instances there are; a VMM gets through to its own directory.
const VMS_DIR_MODE: u32 = 0o751;
const PRIVATE_DIR_MODE: u32 = 0o700;

/// No data directory is deeper; one that is was not made by us.
const MAX_DEPTH: usize = 32;

/// What an agent that is not root is given.
#[derive(Debug, Clone)]
pub struct Handover<'a> {
    pub data_dir: &'a Path,
    /// Directories that belong to it wherever they are: certificates, images, the socket's own.
    pub own: Vec<PathBuf>,
}

/// Prepares directories for `account`. The caller is root; asking twice is asking once.
pub fn hand_over(what: &Handover<'_>, account: &Account) -> Result<(), HostError> {
    let data_dir = make_dir(what.data_dir).map_err(failed("make", what.data_dir))?;
    let shared = |dir: &OwnedFd, mode: u32| -> io::Result<()> {
        fchown(dir, Some(Uid::ROOT), Some(Gid::from_raw(account.gid)))?;
        Ok(fchmod(dir, Mode::from_raw_mode(mode))?)
    };
    shared(&data_dir, SHARED_DIR_MODE).map_err(failed("share", what.data_dir))?;
    let vms = what.data_dir.join(VMS_DIR);
    let vms_dir = make_in(&data_dir, VMS_DIR).map_err(failed("make", &vms))?;
    shared(&vms_dir, VMS_DIR_MODE).map_err(failed("share", &vms))?;
    give_entries(&data_dir, account, &[VMS_DIR], 0).map_err(failed("give away", what.data_dir))?;
    for dir in what.own.iter().filter(|dir| !what.data_dir.starts_with(dir)) {
        let opened = make_dir(dir).map_err(failed("make", dir))?;
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
                let name = name.to_string_lossy();
                tracing::warn!(%name, "a file with a second name elsewhere is not given to the agent");
            }
            // Sockets and links are made anew by whoever needs them.
            _ => {}
        }
    }
    Ok(())
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
    use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};

    use super::*;

    #[test]
    #[allow(clippy::print_stderr, reason = "a test that did not run must say so where its output is read")]
    fn all_but_the_run_directories_is_given_away_and_no_link_leads_out() {
        if !rustix::process::geteuid().is_root() {
            assert!(std::env::var_os("MVM_REQUIRE_PRIVILEGED").is_none() && std::env::var_os("CI").is_none());
            eprintln!("NOT RUN: giving files away needs root");
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
        let account = Account { name: "nobody".to_owned(), uid: 65_534, gid: 65_534 };
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
}
