//! Files of the image store that VMMs are given to read.
//!
//! The store belongs to an agent, which may put anything under any name in it at any instant. So a helper holds the
//! store's directory from its start, looks a name up once below it, and goes on with the descriptor of what it found:
//! that is looked at, linked, copied or mounted, whatever its name is by then.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, FileType, Mode, OFlags, ResolveFlags, Stat, fstat, openat, openat2};
use rustix::io::Errno;

use super::HostError;
use super::files::{failed, refused};

/// Where the images are that VMMs of this host are given.
#[derive(Debug)]
pub(crate) enum Images {
    /// Anywhere: this process found them itself.
    Named,
    /// In a store of this user's.
    Held { path: PathBuf, store: OwnedFd, owner: u32 },
}

/// A regular file. Its path is what it was asked for by.
#[derive(Debug)]
pub(crate) struct Image {
    pub(crate) path: PathBuf,
    /// Opened as a path only.
    pub(crate) pin: OwnedFd,
    pub(crate) stat: Stat,
}

const PIN: OFlags = OFlags::PATH.union(OFlags::CLOEXEC);

/// How often a name is looked up again when the kernel asks for it: directories were moved meanwhile.
const LOOKS: usize = 32;

impl Images {
    /// Opens the store of `owner`, which must be a directory of its own or of root's.
    pub(crate) fn hold(path: &Path, owner: u32) -> Result<Self, HostError> {
        let fault = |cause: Errno| failed("open", path)(cause.into());
        let flags = PIN | OFlags::DIRECTORY | OFlags::NOFOLLOW;
        let store = openat(CWD, path, flags, Mode::empty()).map_err(fault)?;
        let stat = fstat(&store).map_err(fault)?;
        if stat.st_uid != owner && stat.st_uid != 0 {
            return Err(refused(path, &format!("belongs to user {}, not to the agent's", stat.st_uid)));
        }
        Ok(Self::Held { path: path.to_owned(), store, owner })
    }

    /// The file at `path`. In a store: reached through no link, and the owner's own. How many names it has makes no
    /// difference: what is the agent's it can read itself, and a VMM is not given it to write.
    pub(crate) fn pin(&self, path: &Path) -> Result<Image, HostError> {
        if !path.is_absolute() {
            return Err(refused(path, "is not an absolute path"));
        }
        let fault = |cause: Errno| failed("open", path)(cause.into());
        let (pin, owner) = match self {
            Self::Named => (openat(CWD, path, PIN, Mode::empty()).map_err(fault)?, None),
            Self::Held { path: store_path, store, owner } => {
                let inside =
                    path.strip_prefix(store_path).ok().filter(|inside| !inside.as_os_str().is_empty());
                let inside = inside.ok_or_else(|| refused(path, "is not in the image store"))?;
                (look_up(store, inside).map_err(fault)?, Some(*owner))
            }
        };
        let stat = fstat(&pin).map_err(fault)?;
        if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
            return Err(refused(path, "is no regular file"));
        }
        if owner.is_some_and(|owner| owner != stat.st_uid) {
            let todo = match stat.st_nlink {
                0 | 1 => "give it to that one, or start the agent again",
                _ => {
                    "it has another name elsewhere, so it is not given away: put a copy in its place, and give that one"
                }
            };
            let why = format!("belongs to user {}, not to the agent's; {todo}", stat.st_uid);
            return Err(refused(path, &why));
        }
        Ok(Image { path: path.to_owned(), pin, stat })
    }
}

fn look_up(store: &OwnedFd, inside: &Path) -> Result<OwnedFd, Errno> {
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS | ResolveFlags::NO_MAGICLINKS;
    for _ in 0..LOOKS {
        match openat2(store, inside, PIN | OFlags::NOFOLLOW, Mode::empty(), resolve) {
            Err(Errno::AGAIN | Errno::INTR) => {}
            found => return found,
        }
    }
    Err(Errno::AGAIN)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn an_image_is_a_regular_file_of_the_owner_s_below_the_store_reached_through_no_link() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("images");
        std::fs::create_dir_all(path.join("a")).unwrap();
        std::fs::write(path.join("a/kernel"), "image").unwrap();
        std::fs::write(dir.path().join("secret"), "of the host").unwrap();
        symlink(dir.path().join("secret"), path.join("a/link")).unwrap();
        symlink("kernel", path.join("a/near")).unwrap();
        symlink(dir.path(), path.join("up")).unwrap();
        nix::unistd::mkfifo(&path.join("a/pipe"), nix::sys::stat::Mode::S_IRWXU).unwrap();
        let user = rustix::process::geteuid().as_raw();
        let images = Images::hold(&path, user).unwrap();
        let found = images.pin(&path.join("a/kernel")).unwrap();
        assert_eq!((found.stat.st_size, found.stat.st_uid), (5, user));
        for wrong in
            ["", "a", "a/link", "a/near", "a/pipe", "up/secret", "a/../../secret", "../secret", "absent"]
        {
            assert!(images.pin(&path.join(wrong)).is_err(), "{wrong}");
        }
        assert!(images.pin(&dir.path().join("secret")).is_err());
        // Held from the start: another directory under its name is not the store.
        std::fs::rename(&path, dir.path().join("before")).unwrap();
        symlink(dir.path(), &path).unwrap();
        assert!(images.pin(&path.join("secret")).is_err());
        assert!(images.pin(&path.join("a/kernel")).is_ok());
        Images::hold(&path, user).unwrap_err();
        if user == 0 {
            // Root's file in a store of someone else's, even without a second name.
            let before = dir.path().join("before");
            let images = Images::hold(&before, 12_345).unwrap();
            assert!(matches!(images.pin(&before.join("a/kernel")), Err(HostError::Refused(_))));
        }
    }
}
