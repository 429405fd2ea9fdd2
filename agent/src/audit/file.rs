//! One tenant's audit log: the file that is written, those it was rotated into, and the head that vouches for its end.
//!
//! `audit.log` is the newest, then `audit.log.1`, `audit.log.2` and so on. `audit.head` names the last line that is
//! known to be on the disk: it is written after each sync, so a log that ends before its head has lost lines.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, Read as _, Seek as _, SeekFrom, Write as _};
use std::os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use mvm_pki::files::{PRIVATE_MODE, create_private_dir};
use mvm_proto::{Digest, TenantId, Timestamp};
use serde::{Deserialize, Serialize};

use super::line::{self, MAX_LINE_BYTES, beginning};
use super::{AuditSettings, Entry};

pub(crate) const LOG: &str = "audit.log";
pub(crate) const HEAD: &str = "audit.head";
/// Beside the head while it is being replaced.
const HEAD_TEMPORARY: &str = ".audit.head.tmp";
/// Symbolic links are not followed: a log is where it is said to be.
const NO_FOLLOW: i32 = nix::libc::O_NOFOLLOW | nix::libc::O_CLOEXEC;

/// A line by its number and what it says. Number 0 and [`beginning`]: before the first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mark {
    pub seq: u64,
    pub hash: Digest,
}

/// What must be there: every line from `from` to the one that is known to be durable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Head {
    pub(crate) from: u64,
    pub(crate) seq: u64,
    pub(crate) hash: Digest,
}

#[derive(Debug)]
pub(crate) struct TenantLog {
    dir: PathBuf,
    tenant: TenantId,
    settings: AuditSettings,
    file: File,
    /// How much of the file is whole lines; more than this is what a failed write left.
    length: u64,
    last: Mark,
    synced: u64,
    /// The oldest line that is kept.
    from: u64,
}

impl TenantLog {
    /// Opens a tenant's log or begins one. What an earlier agent left half-written is cut off, and a line says so.
    pub(crate) fn open(
        data_dir: &Path,
        tenant: &TenantId,
        settings: AuditSettings,
        now: Timestamp,
    ) -> io::Result<Self> {
        let dir = dir_of(data_dir, tenant);
        create_private_dir(&dir)?;
        fs::set_permissions(&dir, fs::Permissions::from_mode(0o700))?;
        let head = match read_head(&dir) {
            Err(cause) if cause.kind() == io::ErrorKind::InvalidData => None,
            head => head?,
        };
        let begun = !files(&dir)?.is_empty();
        let mut file = open_log(&dir.join(LOG))?;
        let (mut tail, mut length, torn) = find_end(&mut file)?;
        if torn > 0 {
            file.set_len(length)?;
        }
        if length == 0 {
            // Rotated, and nothing written since: the chain goes on where the file before ended.
            for (_, path) in files(&dir)?.into_iter().rev().filter(|(number, _)| *number > 0) {
                let mut older = OpenOptions::new().read(true).custom_flags(NO_FOLLOW).open(path)?;
                (tail, ..) = find_end(&mut older)?;
                if tail.is_some() {
                    break;
                }
            }
        }
        length = file.metadata()?.len().min(length);
        let nothing = Mark { seq: 0, hash: beginning(tenant) };
        let last = tail.unwrap_or(nothing);
        let from = head.map_or(1, |head| head.from);
        let mut log =
            Self { dir, tenant: tenant.clone(), settings, file, length, last, synced: last.seq, from };
        match head {
            None => {
                log.write_head(if begun { last } else { nothing })?;
                if begun && last.seq > 0 {
                    let why = "the log's head file was missing, so it is unknown whether entries are missing at its end";
                    log.note_as(now, LOST, why.to_owned())?;
                }
            }
            Some(head) if head.seq > last.seq => {
                let why =
                    format!("the log ended with line {}, its head file says line {}", last.seq, head.seq);
                log.note_as(now, LOST, why)?;
            }
            Some(_) => {}
        }
        if torn > 0 {
            let why = format!("the last {torn} bytes were not a whole line and were cut off");
            log.note_as(now, RECOVERED, why)?;
        }
        Ok(log)
    }

    /// A line about the log itself.
    pub(crate) fn note_as(&mut self, now: Timestamp, action: &str, reason: String) -> io::Result<()> {
        let entry = Entry {
            at: now,
            tenant: self.tenant.clone(),
            pool: None,
            instance: None,
            actor: "agent".to_owned(),
            action: action.to_owned(),
            reason,
            outcome: "done".to_owned(),
        };
        self.append(&[entry]).map_err(|(_, cause)| cause)
    }

    /// Writes lines for these entries; on an error, says how many are written whole. Nothing else of them is left.
    pub(crate) fn append(&mut self, entries: &[Entry]) -> Result<(), (usize, io::Error)> {
        let mut written = 0;
        while written < entries.len() {
            if self.length >= self.settings.max_bytes {
                self.rotate().map_err(|cause| (written, cause))?;
            }
            // As many as fit before the next rotation, in one write.
            let (mut text, mut last, mut taken) = (String::new(), self.last, 0);
            for entry in &entries[written..] {
                let (line, hash) = line::write(entry, last.seq + 1, last.hash)
                    .map_err(|cause| (written, io::Error::other(cause)))?;
                let length = self.length + text.len() as u64;
                if length > 0 && length + line.len() as u64 > self.settings.max_bytes {
                    break;
                }
                text.push_str(&line);
                last = Mark { seq: last.seq + 1, hash };
                taken += 1;
            }
            if taken == 0 {
                self.rotate().map_err(|cause| (written, cause))?;
                continue;
            }
            self.write_whole(text.as_bytes()).map_err(|cause| (written, cause))?;
            self.last = last;
            written += taken;
        }
        Ok(())
    }

    /// All of `bytes` or nothing of them.
    fn write_whole(&mut self, bytes: &[u8]) -> io::Result<()> {
        // What an earlier failure left behind and could not take back.
        if self.file.metadata()?.len() != self.length {
            self.file.set_len(self.length)?;
        }
        if let Err(cause) = self.file.write_all(bytes) {
            // If this fails too, the next write tries again, and so does the next open.
            let _ = self.file.set_len(self.length);
            return Err(cause);
        }
        self.length += bytes.len() as u64;
        Ok(())
    }

    pub(crate) fn is_synced(&self) -> bool {
        self.synced == self.last.seq
    }

    /// Everything appended so far is on the disk, and the head says so.
    pub(crate) fn sync(&mut self) -> io::Result<()> {
        if self.is_synced() {
            return Ok(());
        }
        self.file.sync_data()?;
        self.write_head(self.last)?;
        self.synced = self.last.seq;
        Ok(())
    }

    /// After the lines it speaks of: a head that is older than its log is no harm, only one that is newer would be.
    fn write_head(&self, last: Mark) -> io::Result<()> {
        let head = Head { from: self.from, seq: last.seq, hash: last.hash };
        let temporary = self.dir.join(HEAD_TEMPORARY);
        let mut options = OpenOptions::new();
        options.write(true).create(true).truncate(true).mode(PRIVATE_MODE).custom_flags(NO_FOLLOW);
        let mut file = options.open(&temporary)?;
        file.write_all(serde_json::to_string(&head).map_err(io::Error::other)?.as_bytes())?;
        file.sync_data()?;
        fs::rename(&temporary, self.dir.join(HEAD))
    }

    /// Moves the files up by one number, only as far as the first free one, so that a crash on the way loses nothing.
    fn rotate(&mut self) -> io::Result<()> {
        self.sync()?;
        let keep = self.settings.keep_files.max(1);
        let numbered = |number: u32| self.dir.join(format!("{LOG}.{number}"));
        let free = (1..=keep).find(|number| !numbered(*number).exists());
        let (doomed, kept): (Vec<_>, Vec<_>) = files(&self.dir)?
            .into_iter()
            .partition(|(number, _)| *number > keep || (*number == keep && free.is_none()));
        if !doomed.is_empty() {
            // First the head: lines that it does not ask for may still be there, never the other way round.
            let oldest = kept.first().map(|(_, path)| first_seq(path)).transpose()?.flatten();
            self.from = oldest.unwrap_or(self.last.seq + 1);
            self.write_head(self.last)?;
        }
        for (_, path) in doomed {
            fs::remove_file(path)?;
        }
        for number in (1..free.unwrap_or(keep)).rev() {
            fs::rename(numbered(number), numbered(number + 1))?;
        }
        fs::rename(self.dir.join(LOG), numbered(1))?;
        self.file = open_log(&self.dir.join(LOG))?;
        self.length = 0;
        File::open(&self.dir)?.sync_all()
    }
}

/// The log was repaired at an open.
pub(crate) const RECOVERED: &str = "audit.recovered";
/// Lines that were durable are gone.
pub(crate) const LOST: &str = "audit.lost";
/// Entries were given up because the log could not be written, or not fast enough.
pub(crate) const DROPPED: &str = "audit.dropped";

/// Where a tenant's log lies. A tenant's id has no characters that lead elsewhere.
pub(crate) fn dir_of(data_dir: &Path, tenant: &TenantId) -> PathBuf {
    data_dir.join("tenants").join(tenant.as_str())
}

/// A tenant's files with their numbers, oldest first; the one being written is number 0 and last.
pub(crate) fn files(dir: &Path) -> io::Result<Vec<(u32, PathBuf)>> {
    let mut found = Vec::new();
    for item in fs::read_dir(dir)? {
        let item = item?;
        let name = item.file_name();
        let number = match name.to_str().and_then(|name| name.strip_prefix(LOG)) {
            Some("") => Some(0),
            Some(rest) => rest.strip_prefix('.').and_then(|number| number.parse().ok()),
            None => None,
        };
        found.extend(number.map(|number| (number, item.path())));
    }
    found.sort_by_key(|(number, _)| std::cmp::Reverse(*number));
    Ok(found)
}

/// Absent: there is none. One that can't be read is an error, never taken for none.
pub(crate) fn read_head(dir: &Path) -> io::Result<Option<Head>> {
    match fs::read(dir.join(HEAD)) {
        Ok(bytes) => serde_json::from_slice(&bytes)
            .map(Some)
            .map_err(|cause| io::Error::new(io::ErrorKind::InvalidData, cause)),
        Err(cause) if cause.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(cause) => Err(cause),
    }
}

fn open_log(path: &Path) -> io::Result<File> {
    let mut options = OpenOptions::new();
    options.read(true).append(true).create(true).mode(PRIVATE_MODE).custom_flags(NO_FOLLOW);
    let file = options.open(path)?;
    file.set_permissions(fs::Permissions::from_mode(PRIVATE_MODE))?;
    Ok(file)
}

/// The number of a file's first line, if that can be read.
fn first_seq(path: &Path) -> io::Result<Option<u64>> {
    let file = OpenOptions::new().read(true).custom_flags(NO_FOLLOW).open(path)?;
    let mut bytes = Vec::new();
    io::BufReader::new(file).take(MAX_LINE_BYTES as u64).read_until(b'\n', &mut bytes)?;
    Ok(line::read(bytes.trim_ascii_end()).ok().map(|line| line.seq))
}

/// The last good line of a file, the length of its whole lines, and how many bytes follow that are none.
fn find_end(file: &mut File) -> io::Result<(Option<Mark>, u64, u64)> {
    let size = file.metadata()?.len();
    let mut window = MAX_LINE_BYTES as u64;
    loop {
        let from = size.saturating_sub(window);
        file.seek(SeekFrom::Start(from))?;
        let mut bytes = Vec::new();
        file.take(size - from).read_to_end(&mut bytes)?;
        let whole = bytes.iter().rposition(|byte| *byte == b'\n').map_or(0, |at| at + 1);
        let lines = bytes[..whole].split(|byte| *byte == b'\n').rev();
        let good = lines.filter_map(|line| line::read(line).ok()).next();
        if good.is_some() || from == 0 {
            let torn = (bytes.len() - whole) as u64;
            let last = good.map(|line| Mark { seq: line.seq, hash: line.hash });
            return Ok((last, size - torn, torn));
        }
        window = window.saturating_mul(8);
    }
}
