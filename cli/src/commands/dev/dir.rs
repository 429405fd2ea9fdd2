//! The directory of a development cluster: where what lies in it, and that one command at a time works in it.

use std::ffi::OsStr;
use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use anyhow::{Context as _, anyhow};

use super::DirArgs;
use super::process::Part;
use crate::exit::Outcome;
use crate::progress::Progress;

const IMAGES: &str = "images";
const LOCK: &str = "lock";
/// All that is made in the directory, by how its name begins. Files are replaced by hidden ones of the same name.
const OURS: [&str; 7] = ["coordinator", "agent", "node", IMAGES, "secrets", "dev.json", LOCK];

#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct DevDir(PathBuf);

/// Held by the one command that changes the cluster.
#[derive(Debug)]
pub(super) struct DirLock(#[expect(dead_code, reason = "it is the lock for as long as it is open")] File);

impl DevDir {
    /// The one that was named, else this user's.
    pub(super) fn chosen(args: &DirArgs) -> Result<Self, Outcome> {
        let named = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let home = || named("HOME").map(|home| home.join(".local/state"));
        let usual = || named("XDG_STATE_HOME").or_else(home).map(|state| state.join("mvm").join("dev"));
        let chosen = args.dir.clone().or_else(usual);
        chosen.map(Self).ok_or_else(|| {
            Outcome::Usage(anyhow!(
                "there is no directory for the cluster's state\nset HOME, or name one: mvm dev up --dir DIR"
            ))
        })
    }

    pub(super) fn path(&self) -> &Path {
        &self.0
    }

    pub(super) fn state_file(&self) -> PathBuf {
        self.0.join("dev.json")
    }

    /// The coordinator's data directory.
    pub(super) fn coordinator(&self) -> PathBuf {
        self.0.join("coordinator")
    }

    pub(super) fn operator(&self) -> PathBuf {
        self.coordinator().join("operator")
    }

    /// The agent's data directory.
    pub(super) fn node(&self) -> PathBuf {
        self.0.join("node")
    }

    pub(super) fn images(&self) -> PathBuf {
        self.0.join(IMAGES)
    }

    /// Where tenants' secrets bundles may be put.
    pub(super) fn secrets(&self) -> PathBuf {
        self.0.join("secrets")
    }

    pub(super) fn pid_file(&self, part: Part) -> PathBuf {
        self.0.join(format!("{part}.pid"))
    }

    pub(super) fn log(&self, part: Part) -> PathBuf {
        self.0.join(format!("{part}.log"))
    }

    /// Makes the directory if it is missing and takes its lock. One that holds something else is refused.
    pub(super) fn make_and_lock(&self, progress: Progress) -> Result<DirLock, Outcome> {
        mvm_pki::files::create_private_dir(&self.0).map_err(|cause| self.unusable(cause, "make"))?;
        self.refuse_others()?;
        self.refuse_foreign()?;
        self.lock(progress)?.ok_or_else(|| {
            Outcome::Failed(anyhow!("{} was removed meanwhile\nrun this again", self.0.display()))
        })
    }

    /// Takes the lock of a directory that is there; none where there is none.
    pub(super) fn lock(&self, progress: Progress) -> Result<Option<DirLock>, Outcome> {
        let path = self.0.join(LOCK);
        let is_gone = |cause: &io::Error| cause.kind() == io::ErrorKind::NotFound;
        if self.0.exists() {
            self.refuse_others()?;
        }
        loop {
            let lock = match File::options().create(true).append(true).open(&path) {
                Err(cause) if is_gone(&cause) => return Ok(None),
                opened => opened.map_err(|cause| self.unusable(cause, "write to"))?,
            };
            match lock.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    progress.say(format!("waiting for another `mvm dev` that works in {}", self.0.display()));
                    lock.lock().map_err(|cause| self.unusable(cause, "lock"))?;
                }
                Err(TryLockError::Error(cause)) => return Err(self.unusable(cause, "lock")),
            }
            // Whoever had it may have removed it with the directory.
            let held = lock.metadata().map_err(|cause| self.unusable(cause, "lock"))?;
            match fs::metadata(&path) {
                Ok(there) if (there.dev(), there.ino()) == (held.dev(), held.ino()) => {
                    return Ok(Some(DirLock(lock)));
                }
                Ok(_) => {}
                Err(cause) if is_gone(&cause) => {}
                Err(cause) => return Err(self.unusable(cause, "lock")),
            }
        }
    }

    /// What is in the directory of another user, or in one that others write to, is theirs to choose: which processes are
    /// ended, and which files are written.
    fn refuse_others(&self) -> Result<(), Outcome> {
        let there = fs::symlink_metadata(&self.0).map_err(|cause| self.unusable(cause, "read"))?;
        let is_own = there.is_dir() && there.uid() == nix::unistd::geteuid().as_raw();
        if is_own && there.mode() & 0o022 == 0 {
            return Ok(());
        }
        Err(Outcome::Usage(anyhow!(
            "{} is a link, another user's, or others may write to it\nname a directory of your own: --dir DIR",
            self.0.display()
        )))
    }

    fn refuse_foreign(&self) -> Result<(), Outcome> {
        let entries = fs::read_dir(&self.0).map_err(|cause| self.unusable(cause, "read"))?;
        for entry in entries {
            let name = entry.map_err(|cause| self.unusable(cause, "read"))?.file_name();
            if !is_ours(&name) {
                return Err(Outcome::Usage(anyhow!(
                    "{} holds {}, which is of no development cluster\nname an empty directory: --dir DIR",
                    self.0.display(),
                    Path::new(&name).display()
                )));
            }
        }
        Ok(())
    }

    /// Removes what was made in the directory, and the directory where nothing else is in it. `keep_images`: all but those.
    pub(super) fn remove(&self, keep_images: bool) -> anyhow::Result<()> {
        let context = || format!("could not remove all of {}\nrun this again", self.0.display());
        let mut names = Vec::new();
        for entry in fs::read_dir(&self.0).with_context(context)? {
            let name = entry.with_context(context)?.file_name();
            let is_kept = keep_images && name == IMAGES;
            if is_ours(&name) && name != LOCK && !is_kept {
                names.push(name);
            }
        }
        // What says that there is a cluster goes last, so that what fails can be repeated.
        names.sort_by_key(|name| name == "dev.json");
        for name in names {
            let path = self.0.join(name);
            let is_dir = path.symlink_metadata().with_context(context)?.is_dir();
            if is_dir {
                open_up(&path).and_then(|()| fs::remove_dir_all(&path)).with_context(context)?;
            } else {
                fs::remove_file(&path).with_context(context)?;
            }
        }
        fs::remove_file(self.0.join(LOCK)).with_context(context)?;
        match fs::remove_dir(&self.0) {
            Err(cause) if cause.kind() != io::ErrorKind::DirectoryNotEmpty => {
                Err(cause).with_context(context)
            }
            _ => Ok(()),
        }
    }

    /// Says what to do about a directory that can't be used.
    fn unusable(&self, cause: io::Error, attempt: &str) -> Outcome {
        let dir = self.0.display();
        let advice = match cause.kind() {
            io::ErrorKind::PermissionDenied => {
                "it is another user's: run this as that user (sudo mvm dev ...), or name a directory of yours: --dir DIR"
            }
            io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
                "make room there, or name a directory on another disk: --dir DIR"
            }
            _ => "name another directory: --dir DIR",
        };
        Outcome::Failed(
            anyhow::Error::new(cause).context(format!("could not {attempt} the directory {dir}\n{advice}")),
        )
    }
}

/// Lets its owner remove what is in a directory: images are sealed against changes.
fn open_up(dir: &Path) -> io::Result<()> {
    fs::set_permissions(dir, fs::Permissions::from_mode(0o700))?;
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            open_up(&entry.path())?;
        }
    }
    Ok(())
}

fn is_ours(name: &OsStr) -> bool {
    let Some(name) = name.to_str() else { return false };
    let bare = name.strip_prefix('.').unwrap_or(name);
    OURS.iter()
        .any(|ours| bare.strip_prefix(ours).is_some_and(|rest| rest.is_empty() || rest.starts_with('.')))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn dev(path: &Path) -> DevDir {
        DevDir(path.to_owned())
    }

    #[test]
    fn a_directory_that_holds_something_else_is_refused_and_nothing_of_it_is_ever_removed() {
        let folder = tempfile::tempdir().unwrap();
        let dev = dev(folder.path());
        drop(dev.make_and_lock(Progress::new(true)).unwrap());
        for name in ["dev.json", ".dev.json.0123.tmp", "agent.log.old", "coordinator.pid.lock", "thesis.txt"]
        {
            fs::write(folder.path().join(name), "").unwrap();
        }
        fs::create_dir_all(dev.images().join("sha256")).unwrap();
        fs::create_dir_all(folder.path().join(".coordinator.init-1-2")).unwrap();
        let refused = dev.make_and_lock(Progress::new(true)).unwrap_err();
        assert!(
            matches!(&refused, Outcome::Usage(told) if told.to_string().contains("thesis.txt")),
            "{refused:?}"
        );
        dev.remove(true).unwrap();
        let left = || {
            let mut left: Vec<_> =
                fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
            left.sort();
            left
        };
        assert_eq!(left(), ["images", "thesis.txt"]);
        fs::remove_file(folder.path().join("thesis.txt")).unwrap();
        drop(dev.make_and_lock(Progress::new(true)).unwrap());
        dev.remove(false).unwrap();
        assert!(!folder.path().exists());
    }

    #[test]
    fn one_command_at_a_time_has_the_lock_and_a_directory_that_is_gone_has_none() {
        let folder = tempfile::tempdir().unwrap();
        let dir = dev(&folder.path().join("dev"));
        assert!(dir.lock(Progress::new(true)).unwrap().is_none());
        let lock = dir.make_and_lock(Progress::new(true)).unwrap();
        let other = File::options().append(true).open(dir.path().join(LOCK)).unwrap();
        assert!(matches!(other.try_lock(), Err(TryLockError::WouldBlock)));
        drop(lock);
        assert!(dir.lock(Progress::new(true)).unwrap().is_some());
    }
}
