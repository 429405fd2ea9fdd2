//! The unix socket for the local operator: the same API, no certificate, only for root, the agent's own user and the
//! members of the group `mvm` where the machine has one. Who can open it owns the node.

use std::io;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::serve::Listener;
use nix::unistd::{Gid, Group};
use tokio::net::{UnixListener, UnixStream};
use tracing::warn;

/// Only the owner may connect.
const SOCKET_MODE: u32 = 0o600;

/// The owner and the operators' group may connect.
const GROUP_SOCKET_MODE: u32 = 0o660;

/// The operators' group may pass through the socket's directory, and see nothing of it.
const GROUP_DIR_MODE: u32 = 0o710;

/// Whose members may use the socket.
const OPERATORS: &str = "mvm";

/// How long to wait when the process is out of file descriptors before asking again.
const ACCEPT_PAUSE: Duration = Duration::from_secs(1);

/// A listening socket that turns away everyone but root, this process's own user and the operators' group.
#[derive(Debug)]
pub(crate) struct LocalSocket {
    listener: UnixListener,
    path: PathBuf,
    owner: u32,
    has_group: bool,
}

/// The operators' group, if this machine has one and this process may give files to it.
pub(crate) fn operators_group() -> Option<Gid> {
    let group = Group::from_name(OPERATORS).ok().flatten()?;
    let mine = || nix::unistd::getegid() == group.gid;
    (nix::unistd::geteuid().is_root() || mine()).then_some(group.gid)
}

impl LocalSocket {
    /// Listens at `path`. The socket is given its mode under another name and only then moved to `path`, so that it is
    /// at no instant open to others, and so that one that a killed agent left behind is simply replaced.
    pub(crate) fn bind(path: &Path, group: Option<Gid>) -> io::Result<Self> {
        if std::os::unix::net::UnixStream::connect(path).is_ok() {
            let text = "another agent answers on it: stop that one, or give this one another --data-dir";
            return Err(io::Error::new(io::ErrorKind::AddrInUse, text));
        }
        let fresh = path.with_extension(format!("{}.new", std::process::id()));
        let _ = std::fs::remove_file(&fresh);
        let listener = UnixListener::bind(&fresh)?;
        let mode = |path: &Path, mode| std::fs::set_permissions(path, std::fs::Permissions::from_mode(mode));
        mode(&fresh, SOCKET_MODE)?;
        if let Some(group) = group {
            std::os::unix::fs::chown(&fresh, None, Some(group.as_raw()))?;
            mode(&fresh, GROUP_SOCKET_MODE)?;
            if let Some(dir) = path.parent().filter(|dir| is_private(dir)) {
                std::os::unix::fs::chown(dir, None, Some(group.as_raw()))?;
                mode(dir, GROUP_DIR_MODE)?;
            }
        }
        std::fs::rename(&fresh, path)?;
        let (path, owner) = (path.to_owned(), nix::unistd::geteuid().as_raw());
        Ok(Self { listener, path, owner, has_group: group.is_some() })
    }

    /// With a group the socket's own mode says who may connect, for the kernel does not tell a peer's other groups.
    fn welcomes(&self, stream: &UnixStream) -> bool {
        self.has_group || stream.peer_cred().is_ok_and(|peer| peer.uid() == 0 || peer.uid() == self.owner)
    }
}

/// A directory that this agent made for itself. Any other is its owner's to open.
fn is_private(dir: &Path) -> bool {
    let ours = |meta: &std::fs::Metadata| {
        std::os::unix::fs::MetadataExt::uid(meta) == nix::unistd::geteuid().as_raw()
            && meta.permissions().mode() & 0o7777 == 0o700
    };
    std::fs::metadata(dir).is_ok_and(|meta| ours(&meta))
}

impl Listener for LocalSocket {
    type Io = UnixStream;
    type Addr = ();

    async fn accept(&mut self) -> (UnixStream, ()) {
        loop {
            match self.listener.accept().await {
                Ok((stream, _)) if self.welcomes(&stream) => return (stream, ()),
                Ok(_) => warn!("refused a local user that is neither root nor the agent's own"),
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

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt as _;

    fn bound(group: Option<Gid>) -> (u32, u32, u32) {
        let dir = tempfile::tempdir().unwrap();
        let data = dir.path().join("agent");
        mvm_pki::files::create_private_dir(&data).unwrap();
        let path = data.join("agent.sock");
        let _socket = LocalSocket::bind(&path, group).unwrap();
        let meta = std::fs::metadata(&path).unwrap();
        (meta.mode() & 0o777, meta.gid(), std::fs::metadata(&data).unwrap().mode() & 0o777)
    }

    #[tokio::test]
    async fn without_the_group_only_the_owner_may_connect() {
        let (mode, _, dir) = bound(None);
        assert_eq!((mode, dir), (0o600, 0o700));
    }

    #[tokio::test]
    async fn the_group_may_connect_and_pass_through_the_directory_but_not_list_it() {
        let group = nix::unistd::getegid();
        assert_eq!(bound(Some(group)), (0o660, group.as_raw(), 0o710));
    }
}
