//! Sockets: vsock, where the VMM has it; a unix socket for tests, and wherever a guest stands in for one in a microVM.
//! One agent is served at a time, the newest.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::thread::JoinHandle;

use nix::sys::socket::{AddressFamily, SockFlag, SockType, VsockAddr, bind, socket};
use rustix::net::{Shutdown, SocketFlags, accept_with, listen, shutdown};

use crate::protocol::VSOCK_PORT;
use crate::serve::serve;
use crate::state::{Guest, spawn};

/// `VMADDR_CID_ANY`: whatever number the VMM gave this machine.
const ANY: u32 = u32::MAX;
/// An agent that comes while another is served waits here for a moment only.
const BACKLOG: i32 = 8;

/// Serves connections to our vsock port, for ever.
pub fn serve_vsock(guest: &Guest) -> io::Result<()> {
    let listener = socket(AddressFamily::Vsock, SockType::Stream, SockFlag::SOCK_CLOEXEC, None)?;
    bind(listener.as_raw_fd(), &VsockAddr::new(ANY, VSOCK_PORT))?;
    listen(&listener, BACKLOG)?;
    serve_newest(&listener, guest)
}

/// Serves connections to a unix socket, for ever.
pub fn serve_unix(path: &Path, guest: &Guest) -> io::Result<()> {
    // The socket file of an earlier process, which no longer listens.
    let _ = std::fs::remove_file(path);
    serve_newest(&UnixListener::bind(path)?.into(), guest)
}

fn serve_newest(listener: &OwnedFd, guest: &Guest) -> io::Result<()> {
    let mut last: Option<(File, JoinHandle<()>)> = None;
    loop {
        let stream = match accept_with(listener, SocketFlags::CLOEXEC) {
            Ok(stream) => File::from(stream),
            // The agent thought better of it, or a snapshot was restored.
            Err(rustix::io::Errno::INTR | rustix::io::Errno::CONNABORTED) => continue,
            Err(error) => return Err(error.into()),
        };
        if let Some((stream, thread)) = last.take() {
            let _ = shutdown(&stream, Shutdown::Both);
            let _ = thread.join();
        }
        let (reader, writer) = (stream.try_clone()?, stream.try_clone()?);
        let guest = guest.clone();
        let thread = spawn("connection", move || {
            // How a connection ended makes no difference to what follows it.
            let _ = serve(&reader, writer, &guest);
            // The agent sees the end, though this end of the socket is still open here.
            let _ = shutdown(&reader, Shutdown::Both);
        })?;
        last = Some((stream, thread));
    }
}
