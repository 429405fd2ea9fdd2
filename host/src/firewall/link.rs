//! The netlink socket to the kernel's packet filter, in the network namespace of the thread that opens it.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::atomic::{AtomicU32, Ordering};

use nftnl::FinalizedBatch;
use nftnl_sys::libc;
use nix::errno::Errno;
use nix::sys::socket::{
    AddressFamily, MsgFlags, SockFlag, SockProtocol, SockType, recv, send, setsockopt, socket, sockopt,
};

use super::FirewallError;
use super::wire::{Reply, Writer, attribute, request};

/// A batch is one datagram: a thousand tenants with ten instances each make about six million bytes.
const SEND_BUFFER_BYTES: usize = 32 << 20;
/// Every message of a batch is answered before the batch's sender reads the first answer.
const RECEIVE_BUFFER_BYTES: usize = 8 << 20;
/// The kernel's own limit for one part of a dump is half of it.
const DATAGRAM_BYTES: usize = 64 << 10;
/// Rules changed in the midst of a dump so many times in a row: someone else is busy with them.
const DUMP_TRIES: u32 = 20;

pub(super) struct Link {
    socket: OwnedFd,
    sequence: AtomicU32,
}

impl Link {
    pub(super) fn open() -> Result<Self, FirewallError> {
        let failed = |cause: Errno| FirewallError::Netlink {
            attempt: "open a netlink socket to the packet filter".to_owned(),
            cause: cause.into(),
        };
        let socket = socket(
            AddressFamily::Netlink,
            SockType::Raw,
            SockFlag::SOCK_CLOEXEC,
            SockProtocol::NetlinkNetFilter,
        )
        .map_err(failed)?;
        setsockopt(&socket, sockopt::SndBufForce, &SEND_BUFFER_BYTES).map_err(failed)?;
        setsockopt(&socket, sockopt::RcvBufForce, &RECEIVE_BUFFER_BYTES).map_err(failed)?;
        Ok(Self { socket, sequence: AtomicU32::new(1) })
    }

    /// All of the batch, or nothing and the first error.
    pub(super) fn commit(&self, attempt: &str, batch: &FinalizedBatch) -> Result<(), FirewallError> {
        // The pages of a batch belong into one datagram: apart they would be no batch.
        let bytes: Vec<u8> = batch.iter().flatten().copied().collect();
        let last = batch.sequence_numbers().end - 1;
        let failed =
            |cause: Errno| FirewallError::Netlink { attempt: attempt.to_owned(), cause: cause.into() };
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()).map_err(failed)?;
        let (mut first_error, mut done) = (None, false);
        let mut buffer = vec![0; DATAGRAM_BYTES];
        // The kernel has answered before `send` returned, so that nothing is waited for.
        loop {
            let length = match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(Errno::EAGAIN) => break,
                Err(Errno::EINTR) => continue,
                Err(error) => return Err(failed(error)),
            };
            for reply in Reply::all(&buffer[..length]) {
                match reply.errno() {
                    Some(0) => done |= reply.sequence == last,
                    Some(errno) => {
                        first_error.get_or_insert((reply.sequence, errno));
                    }
                    None => {}
                }
            }
        }
        match first_error {
            Some((message, errno)) => Err(FirewallError::Batch {
                attempt: attempt.to_owned(),
                message,
                cause: Errno::from_raw(errno).into(),
            }),
            None if done => Ok(()),
            None => Err(FirewallError::Silent { attempt: attempt.to_owned() }),
        }
    }

    /// Changes with every batch of anyone in this network namespace.
    pub(super) fn generation(&self) -> Result<u32, FirewallError> {
        let mut generation = None;
        self.ask(
            "read the rules' generation",
            libc::NFT_MSG_GETGEN,
            0,
            0,
            &Writer::default(),
            &mut |reply| {
                generation = reply.attributes().u32(attribute::GENERATION_ID).or(generation);
            },
        )?;
        generation.ok_or_else(|| FirewallError::Silent { attempt: "read the rules' generation".to_owned() })
    }

    /// Every message of a listing, as a whole from one generation. What is not there is an empty listing.
    pub(super) fn dump(
        &self,
        attempt: &str,
        message: i32,
        family: u8,
        attributes: &Writer,
        take: &mut dyn FnMut(&Reply<'_>),
    ) -> Result<bool, FirewallError> {
        match self.ask(attempt, message, family, libc::NLM_F_DUMP, attributes, take) {
            Err(FirewallError::Netlink { cause, .. }) if cause.raw_os_error() == Some(libc::ENOENT) => {
                Ok(true)
            }
            other => other,
        }
    }

    /// False when the kernel says that what it listed changed meanwhile.
    fn ask(
        &self,
        attempt: &str,
        message: i32,
        family: u8,
        flags: i32,
        attributes: &Writer,
        take: &mut dyn FnMut(&Reply<'_>),
    ) -> Result<bool, FirewallError> {
        let failed =
            |cause: Errno| FirewallError::Netlink { attempt: attempt.to_owned(), cause: cause.into() };
        let sequence = self.sequence.fetch_add(1, Ordering::Relaxed);
        let bytes =
            request(message, family, flags | libc::NLM_F_REQUEST | libc::NLM_F_ACK, sequence, attributes);
        send(self.socket.as_raw_fd(), &bytes, MsgFlags::empty()).map_err(failed)?;
        let mut buffer = vec![0; DATAGRAM_BYTES];
        let mut whole = true;
        loop {
            let length = match recv(self.socket.as_raw_fd(), &mut buffer, MsgFlags::MSG_DONTWAIT) {
                Ok(length) => length,
                Err(Errno::EINTR) => continue,
                Err(Errno::EAGAIN) => return Err(FirewallError::Silent { attempt: attempt.to_owned() }),
                Err(error) => return Err(failed(error)),
            };
            for reply in Reply::all(&buffer[..length]).iter().filter(|reply| reply.sequence == sequence) {
                whole &= reply.flags & libc::NLM_F_DUMP_INTR == 0;
                match reply.errno() {
                    Some(0) => return Ok(whole),
                    Some(errno) => return Err(failed(Errno::from_raw(errno))),
                    None if reply.kind == libc::NLMSG_DONE => return Ok(whole),
                    None => take(reply),
                }
            }
        }
    }

    /// Reads until nothing changed meanwhile.
    pub(super) fn steady<T>(
        &self,
        read: impl Fn() -> Result<(T, bool), FirewallError>,
    ) -> Result<(T, u32), FirewallError> {
        for _ in 0..DUMP_TRIES {
            let before = self.generation()?;
            let (value, whole) = read()?;
            if whole && self.generation()? == before {
                return Ok((value, before));
            }
        }
        Err(FirewallError::Unsteady)
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").finish_non_exhaustive()
    }
}
