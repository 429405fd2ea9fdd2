//! The tenant's secrets: one file, in memory alone, there before the workload starts and gone while the guest sleeps.
//!
//! They arrive in pieces and are put in place whole. Before memory is saved they are overwritten where they are; what
//! the workload has read of them is the workload's.

use std::fs::{self, DirBuilder, OpenOptions, Permissions};
use std::io::{self, ErrorKind};
use std::os::unix::fs::{DirBuilderExt, FileExt, OpenOptionsExt, PermissionsExt, chown};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, mount};

use crate::boot;
use crate::protocol::{CHUNK_BYTES, MAX_SECRETS_BYTES, SECRETS_DIR, SECRETS_FILE, Secrets};
use crate::refusal::Refusal;
use crate::settings::Machine;
use crate::state::Bundle;
use crate::state::Guest;

/// What is not whole yet, beside what is.
const UNFINISHED: &str = ".new";

/// Room for two bundles, one of which takes the other's place.
const MOUNT: &std::ffi::CStr = c"mode=0700,size=9m,nr_inodes=16";

impl Guest {
    pub(crate) fn take_secrets(&self, piece: &Secrets) -> Result<(), Refusal> {
        let mut incoming = self.0.secrets.lock();
        let dir = self.secrets_dir();
        if piece.offset == 0 {
            *incoming = None;
            self.make_secrets_dir()
                .and_then(|()| begin(&dir))
                .map(|begun| *incoming = Some(begun))
                .map_err(failed)?;
        }
        let Some(bundle) = incoming.as_mut() else {
            return Err(Refusal::invalid("secrets begin at their first byte"));
        };
        let end = piece.offset.saturating_add(piece.data.len() as u64);
        if piece.offset != bundle.written || end > MAX_SECRETS_BYTES {
            let (at, next) = (piece.offset, bundle.written);
            *incoming = None;
            let why = format!(
                "secrets from byte {at} to {end}: {next} comes next, {MAX_SECRETS_BYTES} are the most"
            );
            return Err(Refusal::invalid(why));
        }
        bundle.file.write_all_at(&piece.data, piece.offset).map_err(failed)?;
        bundle.written = end;
        if piece.last {
            *incoming = None;
            let place = dir.join(SECRETS_FILE);
            wipe(&place).and_then(|()| fs::rename(dir.join(UNFINISHED), &place)).map_err(failed)?;
            self.share_secrets().map_err(failed)?;
        }
        Ok(())
    }

    /// Lets the user of the workload read what is there. They stay root's: no one else can put a file in their place, which
    /// root would overwrite for them.
    pub(crate) fn share_secrets(&self) -> io::Result<()> {
        let Some(gid) = self.lock().workload.account.as_ref().map(|account| account.gid) else {
            return Ok(());
        };
        let dir = self.secrets_dir();
        for (path, mode) in [(dir.join(SECRETS_FILE), 0o440), (dir, 0o750)] {
            let shared = chown(&path, None, Some(gid))
                .and_then(|()| fs::set_permissions(&path, Permissions::from_mode(mode)));
            match shared {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        Ok(())
    }

    /// Nothing of them is left in a file afterwards, whole or not.
    pub(crate) fn wipe_secrets(&self) -> Result<(), Refusal> {
        let mut incoming = self.0.secrets.lock();
        *incoming = None;
        let dir = self.secrets_dir();
        [UNFINISHED, SECRETS_FILE].into_iter().try_for_each(|name| wipe(&dir.join(name))).map_err(failed)
    }

    fn secrets_dir(&self) -> PathBuf {
        self.0.settings.run_dir.join(SECRETS_DIR)
    }

    /// A file system of its own: whatever the image made of `/run`, this is memory.
    fn make_secrets_dir(&self) -> io::Result<()> {
        let dir = self.secrets_dir();
        match DirBuilder::new().mode(0o700).create(&dir) {
            Err(error) if error.kind() != ErrorKind::AlreadyExists => return Err(error),
            _ => {}
        }
        if self.0.settings.machine == Machine::Own && !boot::is_mount_point(&dir) {
            let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
            mount("tmpfs", &dir, "tmpfs", flags, Some(MOUNT))?;
        }
        fs::set_permissions(&dir, Permissions::from_mode(0o700))
    }
}

#[allow(clippy::needless_pass_by_value, reason = "the signature that `map_err` asks for")]
fn failed(error: io::Error) -> Refusal {
    Refusal::io("secrets", &error)
}

fn begin(dir: &Path) -> io::Result<Bundle> {
    let path = dir.join(UNFINISHED);
    wipe(&path)?;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o400).open(path)?;
    Ok(Bundle { file, written: 0 })
}

/// Overwrites a file that there may be, and takes its name away.
fn wipe(path: &Path) -> io::Result<()> {
    // It can't be written to otherwise, but by root.
    match fs::set_permissions(path, Permissions::from_mode(0o600)) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
        changed => changed?,
    }
    let file = OpenOptions::new().write(true).open(path)?;
    let (length, zeros) = (file.metadata()?.len(), [0; CHUNK_BYTES]);
    let mut at = 0;
    while at < length {
        let piece = usize::try_from(length - at).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        file.write_all_at(&zeros[..piece], at)?;
        at += piece as u64;
    }
    fs::remove_file(path)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::MetadataExt;

    use std::fs::File;

    use super::*;
    use crate::Settings;

    fn guest() -> (tempfile::TempDir, Guest) {
        let folder = tempfile::tempdir().unwrap();
        let guest = Guest::new(Settings::borrowed(folder.path())).unwrap();
        (folder, guest)
    }

    fn piece(offset: u64, data: &str, last: bool) -> Secrets {
        Secrets { offset, data: data.to_owned().into(), padding: vec![0; 9], last }
    }

    #[test]
    fn a_bundle_is_there_whole_for_its_owner_alone_and_replaced_whole() {
        let (_folder, guest) = guest();
        let place = guest.secrets_dir().join(SECRETS_FILE);
        guest.take_secrets(&piece(0, "TOKEN=", false)).unwrap();
        guest.take_secrets(&piece(6, "first", false)).unwrap();
        assert!(!place.exists());
        guest.take_secrets(&piece(11, "", true)).unwrap();
        assert_eq!(fs::metadata(guest.secrets_dir()).unwrap().mode() & 0o7777, 0o700);
        assert_eq!(fs::metadata(&place).unwrap().mode() & 0o7777, 0o400);
        let read = |file: &File| {
            let mut text = vec![0; 16];
            let length = file.read_at(&mut text, 0).unwrap();
            String::from_utf8(text[..length].to_vec()).unwrap()
        };
        // As one who holds it open sees it.
        fs::set_permissions(&place, Permissions::from_mode(0o600)).unwrap();
        let first = File::open(&place).unwrap();
        assert_eq!(read(&first), "TOKEN=first");
        guest.take_secrets(&piece(0, "second", true)).unwrap();
        fs::set_permissions(&place, Permissions::from_mode(0o600)).unwrap();
        let second = File::open(&place).unwrap();
        assert_eq!((read(&first), read(&second)), ("\0".repeat(11), "second".to_owned()));
        assert_eq!(fs::read_dir(guest.secrets_dir()).unwrap().count(), 1);

        guest.take_secrets(&piece(0, "thi", false)).unwrap();
        guest.wipe_secrets().unwrap();
        guest.wipe_secrets().unwrap();
        assert_eq!(read(&second), "\0".repeat(6));
        assert_eq!(fs::read_dir(guest.secrets_dir()).unwrap().count(), 0);
        guest.take_secrets(&piece(3, "rd", true)).unwrap_err();
        assert!(!place.exists());
    }

    #[test]
    fn gaps_and_bundles_without_an_end_are_refused() {
        let (_folder, guest) = guest();
        guest.wipe_secrets().unwrap();
        guest.take_secrets(&piece(1, "x", true)).unwrap_err();
        guest.take_secrets(&piece(0, "x", false)).unwrap();
        guest.take_secrets(&piece(2, "x", true)).unwrap_err();
        let large = vec![7; usize::try_from(MAX_SECRETS_BYTES).unwrap()];
        guest
            .take_secrets(&Secrets { offset: 0, data: large.into(), padding: Vec::new(), last: false })
            .unwrap();
        guest.take_secrets(&piece(MAX_SECRETS_BYTES, "x", true)).unwrap_err();
        assert!(!guest.secrets_dir().join(SECRETS_FILE).exists());
    }
}
