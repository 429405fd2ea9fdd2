//! Writes a file tree as a `newc` archive, which the kernel unpacks as its initial root.
//!
//! The same tree gives the same bytes: names are sorted, everything belongs to root, and no time is written.

use std::collections::BTreeMap;
use std::io::{self, Write};

const DIRECTORY: u32 = 0o040_000;
const FILE: u32 = 0o100_000;
const LINK: u32 = 0o120_000;
const CHARACTER_DEVICE: u32 = 0o020_000;
/// What the kernel and `cpio` pad an archive to.
const ARCHIVE_BLOCK: usize = 512;

#[derive(Debug)]
enum Node {
    Directory,
    File(Vec<u8>),
    Link(String),
    CharacterDevice { major: u32, minor: u32 },
}

/// Files by path, without a leading slash. The folders above a path come into being with it.
#[derive(Debug, Default)]
pub(super) struct Tree {
    nodes: BTreeMap<String, (u32, Node)>,
}

impl Tree {
    pub(super) fn directory(&mut self, path: &str, mode: u32) {
        self.put(path, mode, Node::Directory);
    }

    pub(super) fn file(&mut self, path: &str, mode: u32, content: impl Into<Vec<u8>>) {
        self.put(path, mode, Node::File(content.into()));
    }

    pub(super) fn link(&mut self, path: &str, target: &str) {
        self.put(path, 0o777, Node::Link(target.to_owned()));
    }

    pub(super) fn character_device(&mut self, path: &str, mode: u32, major: u32, minor: u32) {
        self.put(path, mode, Node::CharacterDevice { major, minor });
    }

    fn put(&mut self, path: &str, mode: u32, node: Node) {
        for (at, _) in path.match_indices('/') {
            self.nodes.entry(path[..at].to_owned()).or_insert((0o755, Node::Directory));
        }
        self.nodes.insert(path.to_owned(), (mode, node));
    }

    pub(super) fn write(&self, out: &mut impl Write) -> io::Result<()> {
        let mut archive = Archive { out, written: 0, inode: 0 };
        // Sorted, so that a folder comes before what is in it.
        for (path, (mode, node)) in &self.nodes {
            match node {
                Node::Directory => archive.member(path, DIRECTORY | mode, (0, 0), &[])?,
                Node::File(content) => archive.member(path, FILE | mode, (0, 0), content)?,
                Node::Link(target) => archive.member(path, LINK | mode, (0, 0), target.as_bytes())?,
                Node::CharacterDevice { major, minor } => {
                    archive.member(path, CHARACTER_DEVICE | mode, (*major, *minor), &[])?;
                }
            }
        }
        archive.member("TRAILER!!!", 0, (0, 0), &[])?;
        archive.pad(ARCHIVE_BLOCK)
    }
}

struct Archive<'a, W> {
    out: &'a mut W,
    written: usize,
    inode: u32,
}

impl<W: Write> Archive<'_, W> {
    fn member(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) -> io::Result<()> {
        let size = u32::try_from(content.len()).map_err(|_| {
            io::Error::new(io::ErrorKind::FileTooLarge, format!("{path} is too large for an archive"))
        })?;
        self.inode += 1;
        let links = if mode & DIRECTORY == DIRECTORY { 2 } else { 1 };
        let name_size = u32::try_from(path.len() + 1).unwrap_or(u32::MAX);
        // Inode, mode, owner, group, links, time, size, device of the file, device itself, name's size, checksum.
        let (major, minor) = device;
        let fields = [self.inode, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0];
        let mut header = String::from("070701");
        for field in fields {
            header.push_str(&format!("{field:08X}"));
        }
        self.put(header.as_bytes())?;
        self.put(path.as_bytes())?;
        self.put(&[0])?;
        self.pad(4)?;
        self.put(content)?;
        self.pad(4)
    }

    fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.written += bytes.len();
        self.out.write_all(bytes)
    }

    fn pad(&mut self, to: usize) -> io::Result<()> {
        let missing = self.written.next_multiple_of(to) - self.written;
        self.put(&[0; ARCHIVE_BLOCK][..missing])
    }
}
