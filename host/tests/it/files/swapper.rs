//! Someone who swaps what is under a name, as fast as it goes, and a canary outside that must never notice.

use std::fs;
use std::io;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::JoinHandle;

use rustix::fs::{CWD, FileType, Mode, RenameFlags, mknodat, renameat_with};
use tempfile::TempDir;

pub(crate) const CANARY: &[u8] = b"the canary's own bytes, which nobody inside may ever see";

/// What lies outside, and the directory that the swapper has got into.
pub(crate) struct Scene {
    place: TempDir,
    before: Outside,
    listener: UnixListener,
}

/// All of what is outside that an operation could change.
#[derive(Debug, PartialEq, Eq)]
struct Outside(Vec<Seen>);

#[derive(Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Seen {
    path: PathBuf,
    mode: u32,
    owner: (u32, u32),
    names: u64,
    modified: (i64, i64),
    content: Vec<u8>,
}

impl Scene {
    pub(crate) fn new() -> Self {
        let place = crate::files::in_memory();
        let outside = place.path().join("outside");
        fs::create_dir_all(outside.join("dir/deep")).unwrap();
        fs::create_dir_all(place.path().join("vms/run")).unwrap();
        for name in ["canary", "dir/file", "dir/deep/file"] {
            fs::write(outside.join(name), CANARY).unwrap();
            fs::set_permissions(outside.join(name), fs::Permissions::from_mode(0o640)).unwrap();
        }
        let listener = UnixListener::bind(outside.join("socket")).unwrap();
        listener.set_nonblocking(true).unwrap();
        let before = Outside::look(&outside);
        Self { place, before, listener }
    }

    pub(crate) fn outside(&self) -> PathBuf {
        self.place.path().join("outside")
    }

    pub(crate) fn data_dir(&self) -> &Path {
        self.place.path()
    }

    pub(crate) fn run_dir(&self) -> PathBuf {
        self.place.path().join("vms/run")
    }

    /// What differs outside once all second names in the run directory are gone; none if nothing does.
    pub(crate) fn damage(&self) -> Option<String> {
        fs::remove_dir_all(self.run_dir()).unwrap();
        let after = Outside::look(&self.outside());
        if let Ok((_, address)) = self.listener.accept() {
            return Some(format!("the socket outside was connected to by {address:?}"));
        }
        (after != self.before).then(|| format!("before: {:?}\nafter: {after:?}", self.before))
    }
}

impl Outside {
    fn look(dir: &Path) -> Self {
        let mut found = Vec::new();
        let mut dirs = vec![dir.to_owned()];
        while let Some(dir) = dirs.pop() {
            for entry in fs::read_dir(&dir).unwrap().map(Result::unwrap) {
                let (path, meta) = (entry.path(), entry.metadata().unwrap());
                let content = if meta.is_file() { fs::read(&path).unwrap() } else { Vec::new() };
                if meta.is_dir() {
                    dirs.push(path.clone());
                }
                let (owner, modified) = ((meta.uid(), meta.gid()), (meta.mtime(), meta.mtime_nsec()));
                found.push(Seen { path, mode: meta.mode(), owner, names: meta.nlink(), modified, content });
            }
        }
        found.sort();
        Self(found)
    }
}

/// What is put under a name in turn.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Bait {
    /// A link to the canary.
    Link,
    /// One that begins at the root, which is another file system.
    AbsoluteLink,
    /// A link to a directory outside.
    DirLink,
    /// A second name of the canary, swapped in and out.
    HardLink,
    /// A second name of the canary that is made and removed again, so that its number of names is one half of the time.
    FlickeringHardLink,
    Fifo,
    Dir,
    /// A second name of a socket outside.
    Socket,
}

impl Bait {
    pub(crate) const ALL: [Self; 8] = [
        Self::Link,
        Self::AbsoluteLink,
        Self::DirLink,
        Self::HardLink,
        Self::FlickeringHardLink,
        Self::Fifo,
        Self::Dir,
        Self::Socket,
    ];

    fn put(self, scene: &Outsiders, path: &Path) -> io::Result<()> {
        match self {
            Self::Link => symlink("../../outside/canary", path),
            Self::AbsoluteLink => symlink(scene.0.join("canary"), path),
            Self::DirLink => symlink("../../outside/dir", path),
            Self::HardLink | Self::FlickeringHardLink => fs::hard_link(scene.0.join("canary"), path),
            Self::Fifo => Ok(mknodat(CWD, path, FileType::Fifo, Mode::RUSR | Mode::WUSR, 0)?),
            Self::Dir => fs::create_dir(path),
            Self::Socket => fs::hard_link(scene.0.join("socket"), path),
        }
    }
}

struct Outsiders(PathBuf);

/// What is honestly under the name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Honest {
    File,
    Dir,
    Nothing,
}

impl Honest {
    fn put(self, path: &Path) -> io::Result<()> {
        match self {
            Self::File => fs::write(path, b"honest"),
            Self::Dir => fs::create_dir(path).and_then(|()| fs::write(path.join("file"), b"honest")),
            Self::Nothing => Ok(()),
        }
    }
}

pub(crate) struct Swapper {
    stop: Arc<AtomicBool>,
    swaps: Arc<AtomicU64>,
    thread: JoinHandle<()>,
}

impl Swapper {
    /// Swaps `name` in the run directory until it is stopped. What the operation under test removes or renames is put
    /// there again.
    pub(crate) fn start(scene: &Scene, name: &str, honest: Honest, bait: Bait) -> Self {
        let (run, outside) = (scene.run_dir(), Outsiders(scene.outside()));
        let (name, other) = (run.join(name), run.join("swapped"));
        let (stop, swaps) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
        let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&swaps));
        let thread = std::thread::spawn(move || {
            let flickers = matches!(bait, Bait::FlickeringHardLink) || honest == Honest::Nothing;
            while !stopped.load(Ordering::Relaxed) {
                // Any of these may fail, for the operation under test changes the same names.
                if flickers {
                    // The shorter the bait is there, the more often it is gone again before it is looked at.
                    for _ in 0..16 {
                        let _ = bait.put(&outside, &name);
                        let _ = fs::remove_file(&name).or_else(|_| fs::remove_dir_all(&name));
                    }
                    let _ = honest.put(&name);
                    let _ = fs::remove_file(&name).or_else(|_| fs::remove_dir_all(&name));
                    counted.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                if renameat_with(CWD, &name, CWD, &other, RenameFlags::EXCHANGE).is_ok() {
                    counted.fetch_add(1, Ordering::Relaxed);
                    continue;
                }
                if fs::symlink_metadata(&name).is_err() {
                    let _ = honest.put(&name);
                }
                if fs::symlink_metadata(&other).is_err() {
                    let _ = bait.put(&outside, &other);
                }
            }
        });
        Self { stop, swaps, thread }
    }

    pub(crate) fn swaps(&self) -> u64 {
        self.swaps.load(Ordering::Relaxed)
    }

    pub(crate) fn stop(self) -> u64 {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap();
        self.swaps.load(Ordering::Relaxed)
    }
}
