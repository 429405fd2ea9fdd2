//! Tells when a file may have changed: inotify on its directory, because files are replaced by rename.
//!
//! Only a hint. The caller reads the file again and compares, and also polls now and then:
//! a network file system, or a directory that was itself replaced, sends no events.

use std::os::fd::OwnedFd;
use std::path::Path;

use nix::sys::inotify::{AddWatchFlags, InitFlags, Inotify};
use tokio::net::unix::pipe;
use tracing::debug;

/// Room for a few events with their names; what does not fit is read the next time.
const EVENT_BYTES: usize = 4096;

/// A watch on one directory; without one (the system ran out of watches, say) it never tells anything.
pub(crate) struct DirWatch(Option<pipe::Receiver>);

impl DirWatch {
    /// Watches the directory that `file` is in.
    pub(crate) fn around(file: &Path) -> Self {
        let dir = match file.parent() {
            Some(dir) if !dir.as_os_str().is_empty() => dir,
            _ => Path::new("."),
        };
        match Self::open(dir) {
            Ok(watch) => Self(Some(watch)),
            Err(error) => {
                debug!(%error, dir = %dir.display(), "inotify is not available; polling for changes");
                Self(None)
            }
        }
    }

    /// tokio reads an inotify descriptor as it reads a pipe. What the events say is not looked at: that there are some
    /// is all that is needed.
    fn open(dir: &Path) -> std::io::Result<pipe::Receiver> {
        let inotify = Inotify::init(InitFlags::IN_NONBLOCK | InitFlags::IN_CLOEXEC)?;
        let finished = AddWatchFlags::IN_CLOSE_WRITE | AddWatchFlags::IN_MOVED_TO | AddWatchFlags::IN_DELETE;
        inotify.add_watch(dir, finished)?;
        pipe::Receiver::from_owned_fd_unchecked(OwnedFd::from(inotify))
    }

    /// Waits until something in the directory changed. Cancel-safe.
    pub(crate) async fn changed(&mut self) {
        let mut events = [0; EVENT_BYTES];
        while let Some(watch) = &self.0 {
            let read = match watch.readable().await {
                Ok(()) => watch.try_read(&mut events),
                Err(error) => Err(error),
            };
            match read {
                Ok(_) => return,
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) => {
                    debug!(%error, "inotify ended");
                    self.0 = None;
                }
            }
        }
        std::future::pending::<()>().await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_file_that_is_renamed_into_place_is_noticed() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("desired.json");
        let mut watch = DirWatch::around(&file);
        std::fs::write(dir.path().join("new"), b"{}").unwrap();
        std::fs::rename(dir.path().join("new"), &file).unwrap();
        tokio::time::timeout(std::time::Duration::from_secs(5), watch.changed()).await.unwrap();
    }

    #[tokio::test(start_paused = true)]
    async fn a_directory_that_can_not_be_watched_is_silent() {
        let mut watch = DirWatch::around(Path::new("/nonexistent/desired.json"));
        let waited = tokio::time::timeout(std::time::Duration::from_secs(60), watch.changed()).await;
        assert!(waited.is_err());
    }
}
