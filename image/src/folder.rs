//! `path:DIR`: imports the image in a folder.
//!
//! Nothing in it is trusted: files are regular, lie inside the folder, have a sane size and look like what they are
//! named. What is imported is a copy.

use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::os::fd::AsFd;
use std::path::{Path, PathBuf};

use rustix::fs::{CWD, Mode, OFlags, ResolveFlags, open, openat2};
use rustix::io::Errno;

use super::compression::Compression;
use super::disk_image;
use super::error::{ImageError, OnPath};
use super::kernel;
use super::manifest::Part;
use super::staging::Staging;
use super::work::Work;

const MAX_KERNEL_BYTES: u64 = 1 << 30;
const MAX_INITRD_BYTES: u64 = 4 << 30;
const MAX_ROOTFS_BYTES: u64 = 64 << 30;
/// As much as the kernel takes.
const MAX_CMDLINE_BYTES: u64 = 2048;
/// For an image that is a kernel and a disk and says nothing else.
const ROOT_ON_DISK: &str = "root=/dev/vda ro";

/// Where links in a folder may lead.
#[derive(Debug, Clone)]
pub(super) enum Links {
    /// Nowhere outside the folder.
    Inside,
    /// Anywhere below this one: a Nix store is made of links.
    Below(PathBuf),
}

/// Copies the folder's files into `staging`.
pub(super) fn import(
    folder: &Path,
    links: &Links,
    staging: &mut Staging,
    work: &Work<'_>,
) -> Result<(), ImageError> {
    let files = Folder::open(folder, links)?;
    let Some((mut kernel, path)) = files.get(Part::Kernel, MAX_KERNEL_BYTES)? else {
        return Err(ImageError::invalid(folder, "no file `kernel` in it"));
    };
    let mut content = Vec::new();
    kernel.read_to_end(&mut content).on("read", &path)?;
    staging.add_bytes(Part::Kernel, &kernel::bootable(content, &path)?)?;
    work.check()?;

    let initrd = files.get(Part::Initrd, MAX_INITRD_BYTES)?;
    let rootfs = files.get(Part::Rootfs, MAX_ROOTFS_BYTES)?;
    let on_disk_alone = initrd.is_none();
    if initrd.is_none() && rootfs.is_none() {
        return Err(ImageError::invalid(
            folder,
            "neither `initrd` nor `rootfs` in it: a kernel alone does nothing",
        ));
    }
    if let Some((mut file, path)) = initrd {
        check_initrd(&mut file, &path)?;
        staging.add_file(Part::Initrd, file, &path, work)?;
    }
    if let Some((mut file, path)) = rootfs {
        disk_image::check(&mut file, &path)?;
        staging.add_file(Part::Rootfs, file, &path, work)?;
    }
    let cmdline = match files.get(Part::Cmdline, MAX_CMDLINE_BYTES)? {
        Some((file, path)) => Some(read_cmdline(file, &path)?),
        None => on_disk_alone.then(|| ROOT_ON_DISK.to_owned()),
    };
    if let Some(cmdline) = cmdline {
        staging.add_bytes(Part::Cmdline, cmdline.as_bytes())?;
    }
    Ok(())
}

struct Folder<'a> {
    path: &'a Path,
    links: &'a Links,
    handle: File,
}

impl<'a> Folder<'a> {
    fn open(path: &'a Path, links: &'a Links) -> Result<Self, ImageError> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let handle = open(path, flags, Mode::empty()).on("open the folder", path)?;
        Ok(Self { path, links, handle: handle.into() })
    }

    /// The file of this part, if there is one.
    fn get(&self, part: Part, max_bytes: u64) -> Result<Option<(File, PathBuf)>, ImageError> {
        let path = self.path.join(part.file_name());
        let file = match self.open_part(part, &path) {
            Err(Errno::NOENT) => return Ok(None),
            Err(Errno::XDEV | Errno::LOOP) => {
                return Err(ImageError::invalid(&path, "a link that leads out of the folder"));
            }
            opened => File::from(opened.on("open", &path)?),
        };
        let metadata = file.metadata().on("read", &path)?;
        if !metadata.is_file() {
            return Err(ImageError::invalid(&path, "not a regular file"));
        }
        match metadata.len() {
            0 => Err(ImageError::invalid(&path, "empty")),
            size if size > max_bytes => {
                Err(ImageError::invalid(&path, format!("{size} bytes, and {max_bytes} are the most")))
            }
            _ => Ok(Some((file, path))),
        }
    }

    fn open_part(&self, part: Part, path: &Path) -> rustix::io::Result<std::os::fd::OwnedFd> {
        // Opening a pipe would wait for its other end.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        match self.links {
            Links::Inside => {
                let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_MAGICLINKS;
                openat2(self.handle.as_fd(), part.file_name(), flags, Mode::empty(), resolve)
            }
            Links::Below(root) => {
                let real =
                    path.canonicalize().map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
                if !real.starts_with(root) {
                    return Err(Errno::XDEV);
                }
                openat2(CWD, &real, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)
            }
        }
    }
}

/// What the kernel unpacks as a first root: a cpio archive, packed or not.
fn check_initrd(file: &mut File, path: &Path) -> Result<(), ImageError> {
    let mut begin = [0; 8];
    let read = file.read(&mut begin).on("read", path)?;
    file.seek(SeekFrom::Start(0)).on("read", path)?;
    let begin = &begin[..read];
    if begin.starts_with(b"07070") || Compression::of(begin).is_some() || begin.starts_with(b"BZh") {
        Ok(())
    } else {
        Err(ImageError::invalid(path, "not an initrd: neither a cpio archive nor a packed one"))
    }
}

fn read_cmdline(mut file: File, path: &Path) -> Result<String, ImageError> {
    let mut text = String::new();
    file.read_to_string(&mut text).on("read", path)?;
    let text = text.trim();
    if text.bytes().any(|b| b != b' ' && !b.is_ascii_graphic()) {
        return Err(ImageError::invalid(path, "must be one line of printable ASCII characters"));
    }
    Ok(text.to_owned())
}
