//! Files on their way in: beside the old one until the last piece is there, then in its place.

use std::collections::VecDeque;
use std::fs::{self, File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use super::absolute;
use crate::limits;
use crate::protocol::{FailureCode, WriteFile};
use crate::refusal::Refusal;

#[derive(Debug, Default)]
pub(crate) struct Uploads {
    /// The one that was begun first is the first.
    open: VecDeque<Upload>,
    /// Names the next file.
    next: u64,
}

#[derive(Debug)]
struct Upload {
    path: PathBuf,
    beside: PathBuf,
    file: File,
    written: u64,
}

impl Drop for Upload {
    fn drop(&mut self) {
        // Gone already when it was put in place.
        let _ = fs::remove_file(&self.beside);
    }
}

impl Uploads {
    pub(crate) fn write(&mut self, piece: &WriteFile) -> Result<(), Refusal> {
        let path = Path::new(&piece.path);
        absolute(&piece.path)?;
        if piece.offset == 0 {
            self.begin(path, &piece.path)?;
        }
        let at = self.open.iter().position(|upload| upload.path == path);
        let at = at.ok_or_else(|| {
            Refusal::new(FailureCode::NotFound, format!("{}: begin at its first byte", piece.path))
        })?;
        let outcome = self.open[at].add(piece);
        if outcome.is_err() || piece.last {
            self.open.remove(at);
        }
        outcome
    }

    fn begin(&mut self, path: &Path, shown: &str) -> Result<(), Refusal> {
        self.open.retain(|upload| upload.path != path);
        let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(Refusal::invalid(format!("{shown} is not the name of a file")));
        };
        let failed = |error| Refusal::io(shown, &error);
        fs::create_dir_all(folder).map_err(failed)?;
        self.next += 1;
        let beside =
            folder.join(format!(".{}.mvm-{}-{}", name.to_string_lossy(), std::process::id(), self.next));
        // What an earlier run of this program left there is of no use.
        let _ = fs::remove_file(&beside);
        let file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&beside).map_err(failed)?;
        if self.open.len() == limits::MAX_UPLOADS {
            self.open.pop_front();
        }
        self.open.push_back(Upload { path: path.to_owned(), beside, file, written: 0 });
        Ok(())
    }
}

impl Upload {
    fn add(&mut self, piece: &WriteFile) -> Result<(), Refusal> {
        let failed = |error| Refusal::io(&piece.path, &error);
        if piece.offset > self.written {
            return Err(Refusal::invalid(format!("{}: byte {} comes next", piece.path, self.written)));
        }
        let end = piece.offset + piece.data.len() as u64;
        if end > self.written {
            self.file.write_all_at(&piece.data, piece.offset).map_err(failed)?;
            self.written = end;
        }
        if piece.last {
            let mode = if piece.mode == 0 { 0o644 } else { piece.mode & 0o7777 };
            self.file.set_permissions(Permissions::from_mode(mode)).map_err(failed)?;
            self.file.sync_all().map_err(failed)?;
            fs::rename(&self.beside, &self.path).map_err(failed)?;
            // The name is as durable as the bytes.
            if let Some(folder) = self.path.parent() {
                File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn piece(path: &Path, offset: u64, data: &str, last: bool) -> WriteFile {
        WriteFile { path: path.to_str().unwrap().to_owned(), offset, data: data.into(), last, mode: 0 }
    }

    #[test]
    fn a_file_appears_whole_with_its_last_piece() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("new/file");
        let mut uploads = Uploads::default();
        uploads.write(&piece(&path, 0, "one ", false)).unwrap();
        uploads.write(&piece(&path, 4, "two ", false)).unwrap();
        // Again: it counts once.
        uploads.write(&piece(&path, 4, "two ", false)).unwrap();
        assert!(!path.exists());
        uploads.write(&piece(&path, 8, "three", true)).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "one two three");
        assert_eq!(fs::read_dir(path.parent().unwrap()).unwrap().count(), 1);
    }

    #[test]
    fn a_gap_ends_the_upload_and_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let mut uploads = Uploads::default();
        uploads.write(&piece(&path, 0, "one", false)).unwrap();
        assert!(uploads.write(&piece(&path, 9, "x", true)).unwrap_err().to_string().starts_with("invalid"));
        assert!(uploads.write(&piece(&path, 3, "x", true)).unwrap_err().to_string().starts_with("not_found"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn too_many_uploads_end_the_oldest() {
        let folder = tempfile::tempdir().unwrap();
        let mut uploads = Uploads::default();
        for name in 0..=limits::MAX_UPLOADS {
            uploads.write(&piece(&folder.path().join(name.to_string()), 0, "x", false)).unwrap();
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), limits::MAX_UPLOADS);
        assert!(uploads.write(&piece(&folder.path().join("0"), 1, "y", true)).is_err());
    }
}
