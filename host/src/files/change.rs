//! What is written, renamed and removed in a directory.

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{Read as _, Seek as _, SeekFrom, Write as _};
use std::path::Path;

use rustix::fs::{self, AtFlags, FallocateFlags, FileType, RawMode, Stat};
use rustix::io::Errno;

use super::dir::{Dir, OpenHow};
use super::list::MAX_LOOKED_AT;
use super::log_marks::{LogMarks, MARKS_SUFFIX};
use super::name::{plain, temporary};
use super::space::write_failed;
use super::{failed, refused};
use crate::HostError;

/// How much of a log's end is kept when it is cut.
const KEPT_LOG_BYTES: u64 = 256 * 1024;

/// What is remembered of a log is a few KiB.
const MAX_MARKS_BYTES: u64 = 64 * 1024;

/// What the kernel counts a file's blocks in, and what file systems give back no part of.
const BLOCK_BYTES: u64 = 512;
const PAGE_BYTES: u64 = 4096;

/// How many directories are held open on the way down, each with two descriptors. What lies deeper is moved up first.
const MAX_OPEN: usize = 16;

/// How often a directory is emptied again that someone fills meanwhile; and again because part of it was moved up.
const MAX_ROUNDS: usize = 64;
const MAX_MOVES: usize = 100_000;

/// How far the removal of a tree has come.
struct Removal {
    /// How many names may still be looked at: a process that goes on making new ones does not keep it going.
    names_left: usize,
    /// How many directories were moved up.
    moves: usize,
}

impl Dir {
    /// Puts a whole file under a name, on the disk before anyone can see it; what was there is replaced.
    pub fn write_atomic(
        &self,
        name: impl AsRef<OsStr>,
        bytes: &[u8],
        mode: RawMode,
    ) -> Result<(), HostError> {
        let name = name.as_ref();
        self.put(name, mode, bytes.len() as u64, |file| {
            file.write_all(bytes)
                .and_then(|()| file.sync_all())
                .map_err(failed("write", &self.path().join(name)))
        })?;
        self.sync()
    }

    /// The same for what a power cut may take.
    pub fn replace(&self, name: impl AsRef<OsStr>, bytes: &[u8], mode: RawMode) -> Result<(), HostError> {
        let name = name.as_ref();
        self.put(name, mode, bytes.len() as u64, |file| {
            file.write_all(bytes).map_err(failed("write", &self.path().join(name)))
        })
    }

    /// Fills a new file and gives it its name; one that could not be filled is removed.
    pub(super) fn put(
        &self,
        name: &OsStr,
        mode: RawMode,
        wanted_bytes: u64,
        fill: impl FnOnce(&mut File) -> Result<(), HostError>,
    ) -> Result<(), HostError> {
        let fresh = temporary(plain(name)?);
        let mut file =
            self.create_new(&fresh, mode).map_err(|error| write_failed(self, wanted_bytes, error))?;
        let filled = fill(&mut file).and_then(|()| {
            let renamed = fs::renameat(self, &*fresh, self, name);
            renamed.map_err(|cause| self.fault("write", name, cause))
        });
        filled.map_err(|error| {
            // Counted before it is removed, and gone before anything is said. The first error is the one to report.
            let error = write_failed(self, wanted_bytes, error);
            let _ = fs::unlinkat(self, &*fresh, AtFlags::empty());
            error
        })
    }

    /// A symbolic link to a path that others follow, never this process; what was there is replaced.
    pub fn link_path(&self, target: &Path, name: impl AsRef<OsStr>) -> Result<(), HostError> {
        let name = plain(name.as_ref())?;
        self.remove_tree(name)?;
        fs::symlinkat(target, self, name).map_err(|cause| self.fault("make", name, cause))
    }

    /// Gives what is under one name another, here or in another directory, in place of a file that has it.
    pub fn rename(
        &self,
        from: impl AsRef<OsStr>,
        to_dir: &Self,
        to: impl AsRef<OsStr>,
    ) -> Result<(), HostError> {
        let (from, to) = (plain(from.as_ref())?, plain(to.as_ref())?);
        fs::renameat(self, from, to_dir, to).map_err(|cause| self.fault("rename", from, cause))
    }

    /// Makes a file durable, or a directory and the files in it. What is neither has nothing to lose.
    pub fn sync_tree(&self, name: impl AsRef<OsStr>) -> Result<(), HostError> {
        let name = name.as_ref();
        match self.sub(name) {
            Ok(dir) => {
                for entry in dir.list()? {
                    dir.sync_file(&entry)?;
                }
                dir.sync()
            }
            Err(_) => self.sync_file(name),
        }
    }

    fn sync_file(&self, name: &OsStr) -> Result<(), HostError> {
        match self.open_file(name, OpenHow::ReadShared) {
            Ok(file) => file.sync_all().map_err(failed("sync", &self.path().join(name))),
            Err(HostError::Refused(_)) => Ok(()),
            Err(HostError::Io { cause, .. }) if cause.raw_os_error() == Some(Errno::LOOP.raw_os_error()) => {
                Ok(())
            }
            Err(error) if error.is_not_found() => Ok(()),
            Err(error) => Err(error),
        }
    }

    /// Takes away the name of a file, link, pipe or socket. One that is gone is done.
    pub fn remove(&self, name: impl AsRef<OsStr>) -> Result<(), HostError> {
        let name = plain(name.as_ref())?;
        match fs::unlinkat(self, name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(()),
            Err(cause) => Err(self.fault("remove", name, cause)),
        }
    }

    /// Whatever is under a name, with all that is in it if it is a directory. Links are removed and not followed; what
    /// is mounted in it stays, and is an error.
    pub fn remove_tree(&self, name: impl AsRef<OsStr>) -> Result<(), HostError> {
        self.remove_tree_within(plain(name.as_ref())?, MAX_LOOKED_AT)
    }

    /// The same, as far as `max_names` go: the next call goes on from there.
    fn remove_tree_within(&self, name: &OsStr, max_names: usize) -> Result<(), HostError> {
        let mut removal = Removal { names_left: max_names, moves: 0 };
        let mut rounds = 0;
        while rounds < MAX_ROUNDS && removal.moves < MAX_MOVES {
            match fs::unlinkat(self, name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                // Linux says the first; POSIX would have the second.
                Err(Errno::ISDIR | Errno::PERM) => {}
                Err(cause) => return Err(self.fault("remove", name, cause)),
            }
            let top = match self.sub(name) {
                Ok(top) => top,
                // It became something else, or went away.
                Err(error) if error.is_one_of(&CHANGED) => {
                    rounds += 1;
                    continue;
                }
                Err(error) => return Err(error),
            };
            let before = removal.moves;
            top.empty(&top, 0, &mut removal)?;
            rounds += usize::from(removal.moves == before);
            match fs::unlinkat(self, name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT) => return Ok(()),
                Err(Errno::NOTEMPTY | Errno::NOTDIR) => {}
                Err(cause) => return Err(self.fault("remove", name, cause)),
            }
        }
        Err(refused(&self.path().join(name), "gets new files faster than they are removed"))
    }

    /// Removes what is in this directory as it is now, name by name as they are read.
    fn empty(&self, top: &Self, depth: usize, removal: &mut Removal) -> Result<(), HostError> {
        for name in self.names()? {
            let name = name?;
            let more = "has more names than are removed at once; ask again to go on";
            removal.names_left =
                removal.names_left.checked_sub(1).ok_or_else(|| refused(top.path(), more))?;
            match fs::unlinkat(self, &*name, AtFlags::empty()) {
                Ok(()) | Err(Errno::NOENT) => continue,
                Err(Errno::ISDIR | Errno::PERM) => {}
                Err(cause) => return Err(self.fault("remove", &name, cause)),
            }
            match fs::unlinkat(self, &*name, AtFlags::REMOVEDIR) {
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => continue,
                Err(Errno::NOTEMPTY) => {}
                Err(cause) => return Err(self.fault("remove", &name, cause)),
            }
            if depth >= MAX_OPEN {
                // However deep a tree is, it is removed with few descriptors: this part is found again at the top.
                match fs::renameat(self, &*name, top, temporary(OsStr::new("deep"))) {
                    Ok(()) => removal.moves += 1,
                    Err(Errno::NOENT) => {}
                    Err(cause) => return Err(self.fault("remove", &name, cause)),
                }
                continue;
            }
            match self.sub(&name) {
                Ok(dir) => dir.empty(top, depth + 1, removal)?,
                Err(error) if error.is_one_of(&CHANGED) => continue,
                Err(error) => return Err(error),
            }
            match fs::unlinkat(self, &*name, AtFlags::REMOVEDIR) {
                // What was put there meanwhile is for the next round.
                Ok(()) | Err(Errno::NOENT | Errno::NOTDIR | Errno::NOTEMPTY) => {}
                Err(cause) => return Err(self.fault("remove", &name, cause)),
            }
        }
        Ok(())
    }

    /// Cuts a log that others append to once it is longer than `max_bytes`: its end is kept in `<name>.old`, and what was cut
    /// is counted in `<name>.marks`. What is written in the instant of the cut alone is neither kept nor counted.
    pub fn trim_log(&self, name: impl AsRef<OsStr>, max_bytes: u64, mode: RawMode) -> Result<(), HostError> {
        let name = plain(name.as_ref())?;
        let path = self.path().join(name);
        let Some(stat) = self.look(name)? else { return Ok(()) };
        let mut marks = self.marks_of(name);
        let length = u64::try_from(stat.st_size).unwrap_or(0);
        if FileType::from_raw_mode(stat.st_mode) == FileType::RegularFile && length <= max_bytes {
            let settled = marks.settle(length);
            if marks.note(modified_ms(&stat), length) || settled {
                self.write_marks(name, &marks, mode)?;
            }
            return Ok(());
        }
        let mut log = match self.open_file(name, OpenHow::Write) {
            Err(error) if error.is_not_found() => return Ok(()),
            log => log?,
        };
        let length = log.metadata().map_err(failed("look at", &path))?.len();
        if length <= max_bytes {
            return Ok(());
        }
        marks.settle(length);
        marks.note(modified_ms(&stat), length);
        // A reader that counts bytes waits meanwhile. The disk may be full of this very log: then there is no room for that.
        marks.cutting = Some(length);
        let _ = self.write_marks(name, &marks, mode);
        let mut end = Vec::new();
        let from = length.saturating_sub(KEPT_LOG_BYTES);
        // All that there is by now, so that what is counted as cut is what is cut.
        log.seek(SeekFrom::Start(from))
            .and_then(|_| (&mut log).take(2 * KEPT_LOG_BYTES).read_to_end(&mut end))
            .map_err(failed("read", &path))?;
        let length = from + end.len() as u64;
        // For the same reason cutting it comes first, and keeping its end is a courtesy.
        log.set_len(0).map_err(failed("cut", &path))?;
        marks.cutting = None;
        marks.cut = marks.cut.saturating_add(length);
        let kept = self.replace(beside(name, ".old"), &end, mode);
        self.write_marks(name, &marks, mode)?;
        kept
    }

    /// What can't be read is no reason to leave a log as long as it is.
    fn marks_of(&self, name: &OsStr) -> LogMarks {
        let read = self.read(beside(name, MARKS_SUFFIX), OpenHow::Read, MAX_MARKS_BYTES);
        LogMarks::read(&read.ok().flatten().unwrap_or_default())
    }

    fn write_marks(&self, name: &OsStr, marks: &LogMarks, mode: RawMode) -> Result<(), HostError> {
        self.replace(beside(name, MARKS_SUFFIX), marks.written().as_bytes(), mode)
    }

    /// Gives all but the end of a log back to the disk once more than `max_bytes` of it are there. Its writer keeps its own
    /// place in it: cut, it would be as long again with the next line, so that its length is left alone.
    pub fn punch_log(&self, name: impl AsRef<OsStr>, max_bytes: u64) -> Result<(), HostError> {
        let name = plain(name.as_ref())?;
        let path = self.path().join(name);
        let is_short =
            |blocks: u64| blocks.saturating_mul(BLOCK_BYTES) <= max_bytes.max(KEPT_LOG_BYTES + PAGE_BYTES);
        if self.look(name)?.is_none_or(|stat| u64::try_from(stat.st_blocks).is_ok_and(is_short)) {
            return Ok(());
        }
        let log = self.open_file(name, OpenHow::Write)?;
        let length = log.metadata().map_err(failed("look at", &path))?.len();
        let end = length.saturating_sub(KEPT_LOG_BYTES) / PAGE_BYTES * PAGE_BYTES;
        if end == 0 {
            return Ok(());
        }
        let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        match fs::fallocate(&log, flags, 0, end) {
            // Without its end it is as short.
            Err(Errno::OPNOTSUPP | Errno::NOSYS) => log.set_len(0).map_err(failed("cut", &path)),
            punched => punched.map_err(|cause| self.fault("cut", name, cause)),
        }
    }
}

fn beside(name: &OsStr, suffix: &str) -> OsString {
    let mut name = name.to_owned();
    name.push(suffix);
    name
}

fn modified_ms(stat: &Stat) -> i64 {
    stat.st_mtime
        .saturating_mul(1000)
        .saturating_add(i64::try_from(stat.st_mtime_nsec).unwrap_or(0) / 1_000_000)
}

/// What a look-up says when a name is no directory any more.
const CHANGED: [Errno; 3] = [Errno::NOENT, Errno::NOTDIR, Errno::LOOP];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_log_whose_writer_keeps_its_place_loses_all_but_its_end_and_goes_on() {
        use std::os::unix::fs::MetadataExt as _;

        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_root(place.path()).unwrap();
        let mut writer = dir.create_new("log", 0o600).unwrap();
        let mut written = 0;
        let mut most = 0;
        for number in 0..40_u32 {
            let line = format!("{number:0>65535}\n");
            writer.write_all(line.as_bytes()).unwrap();
            written += line.len() as u64;
            dir.punch_log("log", 1 << 20).unwrap();
            let meta = writer.metadata().unwrap();
            assert_eq!(meta.len(), written);
            most = most.max(meta.blocks() * BLOCK_BYTES);
        }
        assert!(most <= (1 << 20) + 65_536 && written > 2 * most, "{most} of {written}");
        let end = dir.tail("log", 0, 100_000).unwrap();
        assert!(end.ends_with(b"39\n") && !end.contains(&0), "its end is whole");
        dir.punch_log("none", 1 << 20).unwrap();
        std::os::unix::fs::symlink("log", place.path().join("led")).unwrap();
        std::fs::hard_link(place.path().join("log"), place.path().join("second")).unwrap();
        writer.write_all(&vec![b'x'; 2 << 20]).unwrap();
        dir.punch_log("second", 1 << 20).unwrap_err();
        assert!(
            writer.metadata().unwrap().blocks() * BLOCK_BYTES > 2 << 20,
            "what has two names is left alone"
        );
        dir.punch_log("led", 0).unwrap();
    }

    #[test]
    fn what_is_cut_off_a_log_is_counted_and_its_end_is_where_the_count_says() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_root(place.path()).unwrap();
        let read = |name: &str| std::fs::read(place.path().join(name)).unwrap_or_default();
        dir.trim_log("log", 1 << 20, 0o600).unwrap();
        assert!(!place.path().join("log.marks").exists(), "there is no log");
        let mut all = Vec::new();
        for round in 0..200_u32 {
            let line = format!("{round:0>9999}\n");
            let log = std::fs::File::options().append(true).create(true).open(place.path().join("log"));
            log.unwrap().write_all(line.as_bytes()).unwrap();
            all.extend(line.into_bytes());
            dir.trim_log("log", 300_000, 0o600).unwrap();
            let (marks, old, new) = (LogMarks::read(&read("log.marks")), read("log.old"), read("log"));
            let cut = usize::try_from(marks.cut).unwrap();
            assert_eq!((marks.cutting, cut + new.len()), (None, all.len()));
            assert!(all[cut..] == new && all[cut - old.len()..cut] == old, "round {round}");
            assert!(new.len() <= 300_000 && old.len() <= 2 * 256 * 1024);
        }
        // One that ended in the middle of a cut, before and after the log was cut.
        for (length, cut) in [(10, 1500), (500, 1000)] {
            std::fs::write(place.path().join("log.marks"), "cut 1000\ncutting 500\n").unwrap();
            std::fs::write(place.path().join("log"), vec![b'x'; length]).unwrap();
            dir.trim_log("log", 300_000, 0o600).unwrap();
            let found = LogMarks::read(&read("log.marks"));
            assert_eq!((found.cut, found.cutting), (cut, None));
        }
    }

    #[test]
    fn a_removal_ends_after_so_many_names_and_the_next_one_goes_on_from_there() {
        let place = tempfile::tempdir().unwrap();
        let dir = Dir::open_root(place.path()).unwrap();
        let full = dir.make("full", 0o700, None).unwrap();
        for number in 0..25 {
            full.create_new(number.to_string(), 0o600).unwrap();
        }
        for left in [15, 5] {
            let refused = dir.remove_tree_within(OsStr::new("full"), 10).unwrap_err();
            assert!(refused.to_string().contains("ask again"), "{refused}");
            assert_eq!(full.list().unwrap().len(), left);
        }
        dir.remove_tree_within(OsStr::new("full"), 10).unwrap();
        assert!(dir.look("full").unwrap().is_none());
    }
}
