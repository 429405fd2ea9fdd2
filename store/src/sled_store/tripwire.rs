//! Remembers, outside of sled, that there was data and up to which revision.
//!
//! sled opens a log that was cut short as if the rest had never been written, and an emptied one as a new
//! database. This small file makes that visible: it holds the newest revision that was confirmed, written
//! after each flush. It is not synced, which is safe: it may be behind the data after a power loss, but never
//! ahead of it.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;

pub(super) const FILE_NAME: &str = "confirmed";

/// The revision and its checksum, in one disk sector.
const RECORD_BYTES: usize = 12;

#[derive(Debug)]
pub(super) struct Tripwire {
    file: File,
}

/// What the file said when it was opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Confirmed {
    /// No file: a new directory.
    Nothing,
    /// There was data, but the number can't be read.
    Unknown,
    Revision(u64),
}

impl Tripwire {
    pub(super) fn read(directory: &Path) -> io::Result<Confirmed> {
        match std::fs::read(directory.join(FILE_NAME)) {
            Ok(bytes) => Ok(parse(&bytes).map_or(Confirmed::Unknown, Confirmed::Revision)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Confirmed::Nothing),
            Err(error) => Err(error),
        }
    }

    /// Opens the file and brings it up to `revision`, which must be durable.
    pub(super) fn open(directory: &Path, confirmed: Confirmed, revision: u64) -> io::Result<Self> {
        let mut options = OpenOptions::new();
        let options = options.create(true).truncate(false).write(true).mode(0o600);
        let this = Self { file: options.open(directory.join(FILE_NAME))? };
        if confirmed == Confirmed::Revision(revision) {
            return Ok(this);
        }
        this.file.set_len(u64::try_from(RECORD_BYTES).unwrap_or(0))?;
        this.confirm(revision)?;
        if confirmed == Confirmed::Nothing {
            // Its existence says that there is data, so this much must be durable.
            this.file.sync_all()?;
            File::open(directory)?.sync_all()?;
        }
        Ok(this)
    }

    pub(super) fn confirm(&self, revision: u64) -> io::Result<()> {
        let number = revision.to_be_bytes();
        let record = [&number[..], &crc32fast::hash(&number).to_be_bytes()].concat();
        self.file.write_all_at(&record, 0)
    }
}

fn parse(bytes: &[u8]) -> Option<u64> {
    let record: &[u8; RECORD_BYTES] = bytes.try_into().ok()?;
    let (number, sum) = record.split_first_chunk::<8>()?;
    (sum == crc32fast::hash(number).to_be_bytes()).then(|| u64::from_be_bytes(*number))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_confirmed_revision_reads_back() {
        let directory = tempfile::tempdir().unwrap();
        assert_eq!(Tripwire::read(directory.path()).unwrap(), Confirmed::Nothing);
        let tripwire = Tripwire::open(directory.path(), Confirmed::Nothing, 3).unwrap();
        tripwire.confirm(u64::MAX).unwrap();
        assert_eq!(Tripwire::read(directory.path()).unwrap(), Confirmed::Revision(u64::MAX));
    }

    #[test]
    fn a_torn_record_still_says_that_there_was_data() {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join(FILE_NAME), b"").unwrap();
        assert_eq!(Tripwire::read(directory.path()).unwrap(), Confirmed::Unknown);
        Tripwire::open(directory.path(), Confirmed::Unknown, 8).unwrap();
        assert_eq!(Tripwire::read(directory.path()).unwrap(), Confirmed::Revision(8));
    }
}
