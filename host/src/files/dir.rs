//! A directory that is held open, and what may be opened in it.
//!
//! A process that can write to a directory may put anything under any of its names at any instant: a link to a file of the
//! host's, a second name of one, a pipe, a directory. So nothing here is done by path. A name is looked up once, below
//! an open directory and without following anything; what was found is pinned before it is opened, looked at while it
//! is pinned, and only then opened, through the pin. What it is called meanwhile makes no difference any more.

use std::ffi::OsStr;
use std::fs::File;
use std::io::{self, Read as _, Seek as _, SeekFrom};
use std::os::fd::{AsFd, AsRawFd as _, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use rustix::fs::{self, AtFlags, CWD, FileType, Gid, Mode, OFlags, RawMode, ResolveFlags, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use super::name::{parts, plain};
use super::{failed, refused};
use crate::HostError;

/// Nothing but what is below, by no link of either kind, and on no other file system.
const BENEATH: ResolveFlags = ResolveFlags::BENEATH
    .union(ResolveFlags::NO_SYMLINKS)
    .union(ResolveFlags::NO_MAGICLINKS)
    .union(ResolveFlags::NO_XDEV);

/// How often a name is looked up again that others change meanwhile: a file that is replaced while it is opened, or
/// written to while it is looked at.
const LOOKS: usize = 32;

const WRITABLE_BY_OTHERS: RawMode = 0o022;
const STICKY: RawMode = 0o1000;

/// What an opened file is for. Only regular files are ever opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OpenHow {
    Read,
    /// A file that may have names elsewhere: an image, or what a jail has a name for.
    ReadShared,
    /// To read and write.
    Write,
    Append,
}

/// A directory by its descriptor. The path is for messages alone.
#[derive(Debug)]
pub struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

/// Nothing of ours has it, and anything else by that name is removed.
const NO_SUCH_NAME: &str = ".mvm-no-such-name";

/// The user and group that something is given to.
pub type Owner = (u32, u32);

impl AsFd for Dir {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Dir {
    /// A directory that the operator named. It must belong to this user or root, and be writable by no other.
    pub fn open_root(path: &Path) -> Result<Self, HostError> {
        let dir = Self::named(path)?;
        dir.check_trusted(false)?;
        Ok(dir)
    }

    /// The same for one in which others may make entries of their own and change no others', as in `/tmp`.
    pub(crate) fn open_shared_root(path: &Path) -> Result<Self, HostError> {
        let dir = Self::named(path)?;
        dir.check_trusted(true)?;
        Ok(dir)
    }

    /// The same as [`Dir::open_root`], made with those above it if need be, and private then.
    pub(crate) fn make_root(path: &Path) -> Result<Self, HostError> {
        super::run::create_private_dir(path).map_err(failed("make", path))?;
        Self::open_root(path)
    }

    /// A directory in this one that is this user's or root's alone; made if need be, and private then. It may be on
    /// another file system, where an operator mounts one.
    pub(crate) fn open_own(&self, name: &str) -> Result<Self, HostError> {
        let name = plain(OsStr::new(name))?;
        match fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(cause) => return Err(self.fault("make the directory", name, cause)),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let fd = fs::openat(&self.fd, name, flags, Mode::empty())
            .map_err(|cause| self.fault("open the directory", name, cause))?;
        let dir = Self { fd, path: self.path.join(name) };
        dir.check_trusted(false)?;
        Ok(dir)
    }

    fn named(path: &Path) -> Result<Self, HostError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let fd = fs::open(path, flags, Mode::empty()).map_err(|cause| failed("open", path)(cause.into()))?;
        Ok(Self { fd, path: path.to_owned() })
    }

    fn check_trusted(&self, sticky_is_enough: bool) -> Result<(), HostError> {
        let stat = self.stat()?;
        let user = rustix::process::geteuid().as_raw();
        if stat.st_uid != user && stat.st_uid != 0 {
            let why = format!("belongs to user {}; give it to {user} with chown", stat.st_uid);
            return Err(refused(&self.path, &why));
        }
        let private = stat.st_mode & WRITABLE_BY_OTHERS == 0;
        if private || (sticky_is_enough && stat.st_mode & STICKY != 0) {
            return Ok(());
        }
        Err(refused(&self.path, "can be written to by others than its owner; forbid it with chmod go-w"))
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn stat(&self) -> Result<Stat, HostError> {
        fs::fstat(&self.fd).map_err(|cause| self.fault("look at", OsStr::new(""), cause))
    }

    pub(super) fn fault(&self, attempt: &str, name: &OsStr, cause: Errno) -> HostError {
        failed(attempt, &self.path.join(name))(cause.into())
    }

    /// One look-up. The kernel asks for another one when directories were moved meanwhile.
    fn look_up(&self, name: &OsStr, flags: OFlags, mode: Mode) -> Result<OwnedFd, Errno> {
        let flags = flags | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut last = Errno::AGAIN;
        for _ in 0..LOOKS {
            match fs::openat2(&self.fd, name, flags, mode, BENEATH) {
                Err(Errno::AGAIN | Errno::INTR) => last = Errno::AGAIN,
                Err(cause) => return Err(cause),
                Ok(fd) => return Ok(fd),
            }
        }
        Err(last)
    }

    /// A directory in this one.
    pub fn sub(&self, name: impl AsRef<OsStr>) -> Result<Self, HostError> {
        let name = plain(name.as_ref())?;
        let found = self.look_up(name, OFlags::RDONLY | OFlags::DIRECTORY, Mode::empty());
        let fd = found.map_err(|cause| self.fault("open the directory", name, cause))?;
        Ok(Self { fd, path: self.path.join(name) })
    }

    /// The directory in which a name like `snapshot/memory` lies, and what it is called there.
    pub(crate) fn place<'a>(&self, name: &'a str) -> Result<(Self, &'a OsStr), HostError> {
        match *parts(name)?.as_slice() {
            [name] => Ok((self.again()?, OsStr::new(name))),
            [dir, name] => Ok((self.sub(dir)?, OsStr::new(name))),
            _ => Err(HostError::Refused(format!("{name:?} is not a name in a run directory"))),
        }
    }

    /// A second descriptor of the same directory.
    pub fn again(&self) -> Result<Self, HostError> {
        let fd = self.fd.try_clone().map_err(failed("hold", &self.path))?;
        Ok(Self { fd, path: self.path.clone() })
    }

    /// A directory in this one with this mode, and this owner if one is given; one that is there is made so.
    pub fn make(
        &self,
        name: impl AsRef<OsStr>,
        mode: RawMode,
        owner: Option<Owner>,
    ) -> Result<Self, HostError> {
        let name = plain(name.as_ref())?;
        match fs::mkdirat(&self.fd, name, Mode::RWXU) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(cause) => return Err(self.fault("make the directory", name, cause)),
        }
        let dir = self.sub(name)?;
        fs::fchmod(&dir.fd, Mode::from_raw_mode(mode)).map_err(|cause| self.fault("make", name, cause))?;
        if let Some(owner) = owner {
            give(&dir.fd, owner).map_err(|cause| self.fault("give away", name, cause))?;
        }
        Ok(dir)
    }

    /// What is under a name, itself; none when there is nothing.
    pub fn look(&self, name: impl AsRef<OsStr>) -> Result<Option<Stat>, HostError> {
        let name = plain(name.as_ref())?;
        match fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => Ok(Some(stat)),
            Err(Errno::NOENT) => Ok(None),
            Err(cause) => Err(self.fault("look at", name, cause)),
        }
    }

    /// A regular file. Except to be read as a shared one it must have no name but this: the second name of a file
    /// elsewhere is refused.
    pub fn open_file(&self, name: impl AsRef<OsStr>, how: OpenHow) -> Result<File, HostError> {
        let name = plain(name.as_ref())?;
        let pin = self.pin(name, FileType::RegularFile, how == OpenHow::ReadShared)?;
        let flags = match how {
            OpenHow::Read | OpenHow::ReadShared => OFlags::RDONLY,
            OpenHow::Write => OFlags::RDWR,
            OpenHow::Append => OFlags::WRONLY | OFlags::APPEND,
        };
        reopen(&pin, flags).map_err(|cause| self.fault("open", name, cause))
    }

    /// Finds what is under a name without opening it, and makes sure that it is of this kind and, unless `shared`, in
    /// this directory alone.
    fn pin(&self, name: &OsStr, kind: FileType, shared: bool) -> Result<OwnedFd, HostError> {
        let fault = |cause| self.fault("open", name, cause);
        for _ in 0..LOOKS {
            let pin = self.look_up(name, OFlags::PATH, Mode::empty()).map_err(fault)?;
            let stat = fs::fstat(&pin).map_err(fault)?;
            if FileType::from_raw_mode(stat.st_mode) != kind {
                let found = words(FileType::from_raw_mode(stat.st_mode));
                return Err(refused(&self.path.join(name), &format!("is {found}, not {}", words(kind))));
            }
            if shared {
                return Ok(pin);
            }
            if stat.st_nlink > 1 {
                return Err(refused(&self.path.join(name), "has a second name elsewhere"));
            }
            if self.is_only_name(name, &pin).map_err(fault)? {
                return Ok(pin);
            }
        }
        Err(refused(&self.path.join(name), "is being changed by another process"))
    }

    /// Whether what is pinned has one name only, and this is it. That there is one name does not say which it is, and
    /// which one it is can change between two looks; but every change of names changes the inode's own time, so that
    /// nothing has changed when that is the same before and after. A name that is being removed is still found for a
    /// moment after its file has one name less: that is waited for in between.
    fn is_only_name(&self, name: &OsStr, pin: &OwnedFd) -> Result<bool, Errno> {
        let before = fs::fstat(pin)?;
        self.settle();
        let named = match fs::statat(&self.fd, name, AtFlags::SYMLINK_NOFOLLOW) {
            Err(Errno::NOENT) => return Ok(false),
            named => named?,
        };
        let after = fs::fstat(pin)?;
        let time = |stat: &Stat| (stat.st_ctime, stat.st_ctime_nsec);
        let same = |other: &Stat| {
            (other.st_dev, other.st_ino) == (before.st_dev, before.st_ino) && time(other) == time(&before)
        };
        Ok(before.st_nlink == 1 && after.st_nlink == 1 && same(&named) && same(&after))
    }

    /// Waits for changes of names in this directory that are under way. Every one holds the directory's lock from before
    /// it changes a file's number of names until after the name itself has changed; so does the removal of a name that
    /// does not exist, which is all that is needed here.
    fn settle(&self) {
        let _ = fs::unlinkat(&self.fd, NO_SUCH_NAME, AtFlags::empty());
    }

    /// A file that was not there, to read and write.
    pub fn create_new(&self, name: impl AsRef<OsStr>, mode: RawMode) -> Result<File, HostError> {
        let name = plain(name.as_ref())?;
        let fault = |cause| self.fault("make", name, cause);
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL;
        let file = self.look_up(name, flags, Mode::RUSR | Mode::WUSR).map_err(fault)?;
        fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(fault)?;
        Ok(file.into())
    }

    /// A file to read and write, made if need be. What is in its way is refused, and stays.
    pub fn open_or_make(&self, name: impl AsRef<OsStr>, mode: RawMode) -> Result<File, HostError> {
        let name = plain(name.as_ref())?;
        match self.open_file(name, OpenHow::Write) {
            Err(error) if error.is_not_found() => self.create_new(name, mode),
            file => file,
        }
    }

    /// A file to append to, made if need be. What is in its way is removed: it is no log of ours.
    pub fn open_log(&self, name: impl AsRef<OsStr>, mode: RawMode) -> Result<File, HostError> {
        let name = plain(name.as_ref())?;
        for _ in 0..LOOKS {
            match self.open_file(name, OpenHow::Append) {
                Ok(file) => return Ok(file),
                Err(HostError::Io { cause, .. }) if is_scarce(&cause) => {
                    return Err(failed("open", &self.path.join(name))(cause));
                }
                Err(_) => self.remove_tree(name)?,
            }
            let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::CREATE | OFlags::EXCL;
            match self.look_up(name, flags, Mode::from_raw_mode(mode)) {
                Ok(file) => return Ok(file.into()),
                Err(Errno::EXIST) => {}
                Err(cause) => return Err(self.fault("make", name, cause)),
            }
        }
        Err(refused(&self.path.join(name), "is being changed by another process"))
    }

    /// All of a small file; none when there is none.
    pub fn read(
        &self,
        name: impl AsRef<OsStr>,
        how: OpenHow,
        max_bytes: u64,
    ) -> Result<Option<Vec<u8>>, HostError> {
        let name = name.as_ref();
        let file = match self.open_file(name, how) {
            Err(error) if error.is_not_found() => return Ok(None),
            file => file?,
        };
        let mut bytes = Vec::new();
        let path = self.path.join(name);
        file.take(max_bytes.saturating_add(1)).read_to_end(&mut bytes).map_err(failed("read", &path))?;
        if bytes.len() as u64 > max_bytes {
            return Err(refused(&path, &format!("is longer than {max_bytes} bytes")));
        }
        Ok(Some(bytes))
    }

    /// The end of what was written behind `from`, or of the whole file if it is shorter by now; nothing when there is
    /// no file.
    pub fn tail(&self, name: impl AsRef<OsStr>, from: u64, max_bytes: usize) -> Result<Vec<u8>, HostError> {
        let name = name.as_ref();
        let mut file = match self.open_file(name, OpenHow::Read) {
            Err(error) if error.is_not_found() => return Ok(Vec::new()),
            file => file?,
        };
        let mut read = || -> io::Result<Vec<u8>> {
            let length = file.metadata()?.len();
            let from = if from > length { 0 } else { from };
            file.seek(SeekFrom::Start(length.saturating_sub(max_bytes as u64).max(from)))?;
            let mut bytes = Vec::new();
            // It may grow meanwhile.
            (&mut file).take(max_bytes as u64).read_to_end(&mut bytes)?;
            Ok(bytes)
        };
        read().map_err(failed("read", &self.path.join(name)))
    }

    /// Gives a file to someone.
    pub fn chown(&self, name: impl AsRef<OsStr>, owner: Owner) -> Result<(), HostError> {
        let name = name.as_ref();
        let file = self.open_file(name, OpenHow::Read)?;
        give(&file, owner).map_err(|cause| self.fault("give away", name, cause))
    }

    pub fn chmod(&self, name: impl AsRef<OsStr>, mode: RawMode) -> Result<(), HostError> {
        let name = name.as_ref();
        let file = self.open_file(name, OpenHow::Read)?;
        fs::fchmod(file, Mode::from_raw_mode(mode))
            .map_err(|cause| self.fault("change the mode of", name, cause))
    }

    /// Gives the directory itself to a group, with this mode. Its owner stays.
    pub(super) fn share_with(&self, group: u32, mode: RawMode) -> Result<(), HostError> {
        let fault = |cause: Errno| failed("share", &self.path)(cause.into());
        fs::fchown(&self.fd, None, Some(fs::Gid::from_raw(group))).map_err(fault)?;
        fs::fchmod(&self.fd, Mode::from_raw_mode(mode)).map_err(fault)
    }

    /// The directory itself: what it is called in, and what is called what in it.
    pub fn sync(&self) -> Result<(), HostError> {
        fs::fsync(&self.fd).map_err(|cause| self.fault("sync", OsStr::new(""), cause))
    }

    /// A second name, in this directory, for a file that is open. Both must be on one file system.
    pub fn link_shared(&self, file: impl AsFd, name: impl AsRef<OsStr>) -> Result<(), HostError> {
        let name = plain(name.as_ref())?;
        fs::linkat(CWD, pin_path(file), &self.fd, name, AtFlags::SYMLINK_FOLLOW)
            .map_err(|cause| self.fault("link", name, cause))
    }

    /// Connects to the listener of a socket in it. Neither this nor the connection blocks: a full queue is an error
    /// of kind `WouldBlock`.
    pub fn connect_socket(&self, name: impl AsRef<OsStr>) -> Result<UnixStream, HostError> {
        let name = plain(name.as_ref())?;
        let pin = self.pin(name, FileType::Socket, false)?;
        let connect = || {
            let flags = SocketFlags::CLOEXEC | SocketFlags::NONBLOCK;
            let socket = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
            rustix::net::connect(&socket, &SocketAddrUnix::new(pin_path(&pin))?)?;
            Ok(UnixStream::from(socket))
        };
        connect().map_err(|cause| self.fault("connect to", name, cause))
    }
}

/// Gives what is open to a user and group.
pub(crate) fn give(file: impl AsFd, (uid, gid): Owner) -> Result<(), Errno> {
    fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))
}

fn words(kind: FileType) -> &'static str {
    match kind {
        FileType::RegularFile => "a regular file",
        FileType::Directory => "a directory",
        FileType::Symlink => "a link",
        FileType::Fifo => "a pipe",
        FileType::Socket => "a socket",
        FileType::CharacterDevice | FileType::BlockDevice => "a device",
        FileType::Unknown => "of no known kind",
    }
}

/// Want of descriptors, memory or rights says nothing about what is under a name.
fn is_scarce(cause: &io::Error) -> bool {
    let scarce =
        [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::ACCESS, Errno::PERM, Errno::ROFS, Errno::IO];
    Errno::from_io_error(cause).is_some_and(|errno| scarce.contains(&errno))
}

/// The kernel's own way to what a descriptor holds, whatever it is called by now.
pub(crate) fn pin_path(fd: impl AsFd) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd()))
}

/// Opens what is pinned. Never waits: the owner of a file can hold a lease on it, which a plain open waits for.
pub(crate) fn reopen(pin: impl AsFd, flags: OFlags) -> Result<File, Errno> {
    fs::open(pin_path(pin), flags | OFlags::CLOEXEC | OFlags::NONBLOCK, Mode::empty()).map(File::from)
}
