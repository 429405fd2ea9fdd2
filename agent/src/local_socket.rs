//! The unix socket for the local operator: the same API, no certificate, only for root and the agent's own user.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::serve::Listener;
use tokio::net::{UnixListener, UnixStream};
use tracing::warn;

/// Only the owner may connect.
const SOCKET_MODE: u32 = 0o600;

/// How long to wait when the process is out of file descriptors before asking again.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// A listening socket that turns away everyone but root and this process's own user.
#[derive(Debug)]
pub(crate) struct LocalSocket {
    listener: UnixListener,
    path: PathBuf,
    owner: u32,
}

impl LocalSocket {
    /// Listens at `path`. The socket is given its mode under another name and only then moved to `path`, so that it is
    /// at no instant open to others, and so that one that a killed agent left behind is simply replaced.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let text = "another agent answers on it: stop that one, or give this one another --data-dir";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        let listener = UnixListener::bind(&fresh)?;
        std::fs::set_permissions(&fresh, std::fs::Permissions::from_mode(SOCKET_MODE))?;
        std::fs::rename(&fresh, path)?;
        Ok(Self { listener, path: path.to_owned(), owner: nix::unistd::geteuid().as_raw() })
    }

    fn welcomes(&self, stream: &UnixStream) -> bool {
        stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == self.owner)
    }
}

impl Listener for LocalSocket {
    type Io = UnixStream;
    type Addr = ();

    async fn accept(&mut self) -> (UnixStream, ()) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) if self.welcomes(&stream) => return (stream, ()),
                Ok(_) => warn!("turned away a local user that is neither root nor the agent's own"),
                Err(error) => {
                    warn!(%error, "could not accept on the unix socket");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }

    fn local_addr(&self) -> io::Result<()> {
        Ok(())
    }
}

impl Drop for LocalSocket {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}
