//! Tells when a table of ours is changed, by anyone: the kernel sends every change to those who joined its group.

use std::os::fd::{AsRawFd as _, OwnedFd};

use nftnl_sys::libc;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, NetlinkAddr, SockFlag, SockProtocol, SockType, bind, recv, setsockopt, socket,
    sockopt,
};
use tokio::io::unix::AsyncFd;

use super::FirewallError;
use super::ruleset::TABLE;
use super::wire::{Reply, attribute};

/// The bit of the group that is told of tables, chains, rules, sets and their elements.
const GROUP: u32 = 1 << (libc::NFNLGRP_NFTABLES - 1);
/// News of a change of a few thousand elements. What does not fit is told as "something was missed".
const RECEIVE_BUFFER_BYTES: usize = 4 << 20;
const DATAGRAM_BYTES: usize = 64 << 10;
const NEW_GENERATION: i32 = libc::NFNL_SUBSYS_NFTABLES << 8 | libc::NFT_MSG_NEWGEN;

/// The changes in one network namespace since this was opened.
#[derive(Debug)]
pub struct Watch {
    socket: AsyncFd<OwnedFd>,
    buffer: Vec<u8>,
}

impl Watch {
    /// In the network namespace of the calling thread. Needs a runtime.
    #[allow(
        deprecated,
        reason = "what replaces it is unsafe for descriptors that are not owned, and this one is"
    )]
    pub fn open() -> Result<Self, FirewallError> {
        let failed = |cause: std::io::Error| FirewallError::Netlink {
            attempt: "listen for changes of the packet filter".to_owned(),
            cause,
        };
        let flags = SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK;
        let socket = socket(AddressFamily::Netlink, SockType::Raw, flags, SockProtocol::NetlinkNetFilter)
            .map_err(|cause| failed(cause.into()))?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER_BYTES)
            .map_err(|cause| failed(cause.into()))?;
        bind(socket.as_raw_fd(), &NetlinkAddr::new(0, GROUP)).map_err(|cause| failed(cause.into()))?;
        Ok(Self { socket: AsyncFd::new(socket).map_err(failed)?, buffer: vec![0; DATAGRAM_BYTES] })
    }

    /// Waits until a table with our name was changed, or more was than could be told.
    pub async fn changed(&mut self) -> Result<(), FirewallError> {
        let failed = |cause: std::io::Error| FirewallError::Netlink {
            attempt: "hear of changes of the packet filter".to_owned(),
            cause,
        };
        loop {
            let mut ready = self.socket.readable().await.map_err(failed)?;
            let mut ours = false;
            // All that is there, so that one change is one piece of news.
            loop {
                match recv(self.socket.as_raw_fd(), &mut self.buffer, MsgFlags::MSG_DONTWAIT) {
                    Ok(length) => ours |= Reply::all(&self.buffer[..length]).iter().any(is_about_ours),
                    Err(Errno::ENOBUFS) => ours = true,
                    Err(Errno::EINTR) => {}
                    Err(Errno::EAGAIN) => break,
                    Err(error) => return Err(failed(error.into())),
                }
            }
            ready.clear_ready();
            if ours {
                return Ok(());
            }
        }
    }
}

/// Every message but that of a new generation begins with the name of its table.
fn is_about_ours(news: &Reply<'_>) -> bool {
    news.kind != NEW_GENERATION && news.attributes().text(attribute::TABLE_NAME).as_deref() == Some(TABLE)
}
