//! Gives the kernel's random generator a new beginning.
//!
//! Copies of one snapshot have the same generator and would draw the same keys; writing to the device alone does not
//! change what is drawn next. Two ioctls do, and no safe wrapper has them: this is the only unsafe code of the guest.

#![allow(unsafe_code, reason = "two ioctls of the random device that no safe wrapper has")]

use std::fs::File;
use std::io;
use std::sync::OnceLock;

use rustix::ioctl::{NoArg, Setter, ioctl, opcode};

/// As much as one request takes: more than any generator keeps.
const MOST_BYTES: usize = 256;

/// `struct rand_pool_info` with a buffer of fixed size.
#[repr(C)]
struct PoolInfo {
    entropy_bits: i32,
    buffer_bytes: i32,
    buffer: [u8; MOST_BYTES],
}

/// The kernel declares it with two ints, though more follows.
const ADD_ENTROPY: rustix::ioctl::Opcode = opcode::write::<[i32; 2]>(b'R', 3);
const RESEED: rustix::ioctl::Opcode = opcode::none(b'R', 7);

/// Open from the beginning: a guest that just woke has better to do.
static DEVICE: OnceLock<File> = OnceLock::new();

pub(super) fn device() -> io::Result<&'static File> {
    if let Some(open) = DEVICE.get() {
        return Ok(open);
    }
    let device = File::open("/dev/urandom")?;
    Ok(DEVICE.get_or_init(|| device))
}

pub(super) fn reseed(entropy: &[u8]) -> io::Result<()> {
    let length = entropy.len().min(MOST_BYTES);
    let mut buffer = [0; MOST_BYTES];
    buffer[..length].copy_from_slice(&entropy[..length]);
    let length = i32::try_from(length).unwrap_or(0);
    let info = PoolInfo { entropy_bits: length * 8, buffer_bytes: length, buffer };
    let device = device()?;
    // SAFETY: the kernel reads the two ints and then `buffer_bytes` bytes, which is at most the size of `buffer`.
    unsafe { ioctl(device, Setter::<ADD_ENTROPY, PoolInfo>::new(info))? };
    // SAFETY: it takes no argument.
    unsafe { ioctl(device, NoArg::<RESEED>::new())? };
    Ok(())
}
