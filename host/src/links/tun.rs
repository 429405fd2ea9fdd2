//! The TUN device's own interface: the only way to make a TAP, to say who may open it and to open it.
#![allow(unsafe_code, reason = "TAPs are made by ioctls that no safe wrapper has")]

use std::fs::OpenOptions;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::OpenOptionsExt as _;

use nix::libc;

const DEVICE: &str = "/dev/net/tun";

/// Frames with a virtio header before each and nothing else: what every VMM wants.
const FLAGS: libc::c_int = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR;

/// A TAP that was not there before, down. It is gone with the descriptor until [`keep`] says otherwise.
pub(super) fn create(name: &str) -> io::Result<OwnedFd> {
    attached(name, FLAGS | libc::IFF_TUN_EXCL)
}

/// The TAP's other end. One that is not there is made, and gone with the descriptor: the caller looks who it was.
pub(super) fn attach(name: &str) -> io::Result<OwnedFd> {
    attached(name, FLAGS)
}

/// Who but an administrator may attach to it.
pub(super) fn set_owner(tap: &OwnedFd, uid: u32) -> io::Result<()> {
    with_number(tap, libc::TUNSETOWNER, libc::c_ulong::from(uid))
}

/// Leaves it there when its descriptor is closed.
pub(super) fn keep(tap: &OwnedFd) -> io::Result<()> {
    with_number(tap, libc::TUNSETPERSIST, 1)
}

fn attached(name: &str, flags: libc::c_int) -> io::Result<OwnedFd> {
    let wrong = |what: &'static str| io::Error::new(io::ErrorKind::InvalidInput, what);
    let file = OpenOptions::new().read(true).write(true).custom_flags(libc::O_NONBLOCK).open(DEVICE)?;
    let mut name_field = [0; libc::IFNAMSIZ];
    if name.is_empty() || name.len() >= name_field.len() {
        return Err(wrong("a link's name has 1 to 15 bytes"));
    }
    for (field, byte) in name_field.iter_mut().zip(name.bytes()) {
        *field = libc::c_char::from_ne_bytes([byte]);
    }
    let flags = libc::c_short::from_ne_bytes((flags as u16).to_ne_bytes());
    let request =
        libc::ifreq { ifr_name: name_field, ifr_ifru: libc::__c_anonymous_ifr_ifru { ifru_flags: flags } };
    // SAFETY: TUNSETIFF reads and writes one `ifreq`, which lives until the call returns; the descriptor is open.
    let done = unsafe { libc::ioctl(file.as_raw_fd(), libc::TUNSETIFF as libc::Ioctl, &raw const request) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(file.into()) }
}

fn with_number(tap: &OwnedFd, request: libc::Ioctl, number: libc::c_ulong) -> io::Result<()> {
    // SAFETY: these requests take a number and no pointer; the descriptor is open.
    let done = unsafe { libc::ioctl(tap.as_raw_fd(), request, number) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}
