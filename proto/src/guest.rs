//! How bytes between an agent and a guest become messages, on a channel that may begin in the middle of old ones.
//!
//! A frame is a length, a checksum of what follows, and one protobuf message. A virtio-serial port is not a connection:
//! after the agent was away, the rest of an unread frame, or a reply to someone who is gone, comes first.
//! So each side opens with [`OPENING`] and then its hello; the reader skips everything up to an opening, and goes
//! back to skipping when a frame is not whole. A host that gets no hello sends [`filler`] and opens again: the filler
//! completes whatever frame the guest still waits for, and its checksum tells the guest that it was none.
//! Every frame carries the nonce of the host's hello; one with another nonce belongs to a connection that is gone.
//!
//! Secrets pass through here on their way into a guest. No buffer of this module leaves a copy of them behind: not when
//! it grows, nor when it is read, nor when it is dropped.

mod failure;

use std::fmt;

pub use failure::FailureCode;
pub use prost::Message;
use zeroize::{Zeroize as _, Zeroizing};

pub use crate::wire::guest::v1::*;

/// The newest version of this protocol that this build speaks, and the oldest.
pub const MAX_VERSION: u32 = 3;
pub const MIN_VERSION: u32 = 1;

/// What a guest may name in its hello: it can start its workload again, and says how that fares.
pub const FEATURE_RESTART: &str = "restart";
/// It can check the workload's health.
pub const FEATURE_HEALTH: &str = "health";
/// It can run another workload than its image names, as another user and elsewhere.
pub const FEATURE_WORKLOAD: &str = "workload";
/// It can give a program a terminal, and change that terminal's size.
pub const FEATURE_PTY: &str = "pty";
/// It can run a program as a user of its `/etc/passwd`.
pub const FEATURE_EXEC_USER: &str = "exec_user";
/// It can let a program go on that the agent no longer follows.
pub const FEATURE_DETACH: &str = "detach";

/// What a side sends before its hello. Sixteen bytes that no text contains.
pub const OPENING: &[u8; 16] = b"\x00\xffmvm guest 1\x0d\x0a\x00";

/// The vsock port on which a guest listens, where there is vsock.
pub const VSOCK_PORT: u32 = 5252;

/// The name of the virtio-serial port, where there is none.
pub const SERIAL_PORT: &str = "mvm.guest";

/// The longest message. Output, files and relays are cut into pieces well below it.
pub const MAX_MESSAGE_BYTES: usize = 128 * 1024;

/// How much of a stream goes into one frame.
pub const CHUNK_BYTES: usize = 32 * 1024;

/// How many bytes of a stream may be under way beyond what its reader said it has taken; see `Window` in the messages.
pub const WINDOW_BYTES: usize = 256 * 1024;

/// No bundle of secrets is larger: a guest holds it in memory, twice while another takes its place.
pub const MAX_SECRETS_BYTES: u64 = 4 * 1024 * 1024;

/// Where a guest keeps its secrets, below its run directory.
pub const SECRETS_DIR: &str = "secrets";
pub const SECRETS_FILE: &str = "bundle";

const HEADER_BYTES: usize = 8;

impl Drop for Secrets {
    fn drop(&mut self) {
        // The last owner wipes it.
        if let Ok(mut data) = std::mem::take(&mut self.data).try_into_mut() {
            data.as_mut().zeroize();
        }
    }
}

impl fmt::Debug for Secrets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (bytes, padding) = (self.data.len(), self.padding.len());
        write!(
            f,
            "Secrets {{ {bytes} bytes from {}, {padding} of padding, last: {} }}",
            self.offset, self.last
        )
    }
}

/// Enough of nothing to complete any frame that was cut off.
#[must_use]
pub fn filler() -> Vec<u8> {
    vec![0xff; MAX_FRAME_BYTES]
}

/// Which version two sides speak: the newest that both know.
#[must_use]
pub fn negotiate(theirs: (u32, u32), ours: (u32, u32)) -> Option<u32> {
    let newest = theirs.1.min(ours.1);
    (newest >= theirs.0.max(ours.0) && theirs.0 <= theirs.1).then_some(newest)
}

/// A message was longer than any reader would take.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a message of {0} bytes is longer than {MAX_MESSAGE_BYTES}")]
pub struct TooLong(pub usize);

/// Appends one frame to `out`.
pub fn put_frame(out: &mut Vec<u8>, message: &impl Message) -> Result<(), TooLong> {
    let length = message.encoded_len();
    let prefix = u32::try_from(length).map_err(|_| TooLong(length))?;
    if length > MAX_MESSAGE_BYTES {
        return Err(TooLong(length));
    }
    make_room(out, HEADER_BYTES + length);
    out.extend_from_slice(&prefix.to_be_bytes());
    let at = out.len();
    out.extend_from_slice(&[0; 4]);
    message.encode(out).map_err(|_| TooLong(length))?;
    let checksum = crc32fast::hash(&out[at + 4..]);
    out[at..at + 4].copy_from_slice(&checksum.to_be_bytes());
    Ok(())
}

/// Lets a buffer grow without leaving a copy of its content behind.
fn make_room(buffer: &mut Vec<u8>, more: usize) {
    if buffer.capacity() - buffer.len() >= more {
        return;
    }
    let mut larger = Vec::with_capacity((buffer.len() + more).max(buffer.capacity() * 2));
    larger.extend_from_slice(buffer);
    std::mem::replace(buffer, larger).zeroize();
}

/// The most that a reader has to hold of a frame before it can tell that it is none.
pub const MAX_FRAME_BYTES: usize = HEADER_BYTES + MAX_MESSAGE_BYTES;

/// What was found in the bytes so far.
#[derive(Debug, Clone, PartialEq)]
pub enum Found<M> {
    /// The other side opened: what came before is void. Its hello comes next.
    Opening,
    Message(M),
}

/// Finds openings and messages in whatever arrives. Holds at most one frame and a few bytes.
#[derive(Debug, Default)]
pub struct Deframer {
    buffer: Zeroizing<Vec<u8>>,
    /// Where the unread part begins.
    at: usize,
    synced: bool,
    /// How many bytes were thrown away, for metrics and tests.
    pub skipped: u64,
}

impl Deframer {
    /// Takes what was read. Call [`Self::next`] until it has no more before giving it more.
    pub fn push(&mut self, bytes: &[u8]) {
        if self.at > 0 {
            let left = self.buffer.len() - self.at;
            self.buffer.copy_within(self.at.., 0);
            self.buffer[left..].fill(0);
            self.buffer.truncate(left);
            self.at = 0;
        }
        make_room(&mut self.buffer, bytes.len());
        self.buffer.extend_from_slice(bytes);
    }

    /// How many bytes wait to be understood: less than one whole frame once [`Self::next`] has no more.
    #[must_use]
    pub fn held(&self) -> usize {
        self.buffer.len() - self.at
    }

    /// The other side is gone: nothing counts until it opens again.
    pub fn reset(&mut self) {
        self.skipped += self.buffer.len().saturating_sub(self.at) as u64;
        self.buffer.zeroize();
        self.at = 0;
        self.synced = false;
    }

    /// The next opening or message; absent: more bytes are needed.
    #[allow(clippy::should_implement_trait, reason = "what comes next is of the type that the caller names")]
    pub fn next<M: Message + Default>(&mut self) -> Option<Found<M>> {
        loop {
            if !self.synced {
                return self.seek().then_some(Found::Opening);
            }
            let rest = &self.buffer[self.at..];
            // No length is as large as the first bytes of an opening, so the two can't be confused.
            if rest.starts_with(OPENING) {
                self.at += OPENING.len();
                return Some(Found::Opening);
            }
            if OPENING.starts_with(rest) || rest.len() < HEADER_BYTES {
                return None;
            }
            let word = |at: usize| u32::from_be_bytes([rest[at], rest[at + 1], rest[at + 2], rest[at + 3]]);
            let (length, checksum) = (word(0) as usize, word(4));
            if length <= MAX_MESSAGE_BYTES {
                let body = rest.get(HEADER_BYTES..HEADER_BYTES + length)?;
                if crc32fast::hash(body) == checksum
                    && let Ok(message) = M::decode(body)
                {
                    let end = self.at + HEADER_BYTES + length;
                    self.buffer[self.at..end].fill(0);
                    self.at = end;
                    return Some(Found::Message(message));
                }
            }
            // Not a frame of ours: nothing is believed until the other side opens again.
            self.synced = false;
        }
    }

    /// Skips up to the end of the next opening, if there is one; else to where one may begin.
    fn seek(&mut self) -> bool {
        let rest = &self.buffer[self.at..];
        let found = rest.windows(OPENING.len()).position(|window| window == OPENING);
        let keep = (1..OPENING.len()).rev().find(|length| rest.ends_with(&OPENING[..*length])).unwrap_or(0);
        let skipped = found.unwrap_or(rest.len() - keep);
        self.skipped += skipped as u64;
        self.at += skipped;
        if found.is_some() {
            self.at += OPENING.len();
            self.synced = true;
        }
        self.synced
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(request: u64) -> HostFrame {
        HostFrame { nonce: 7, request, body: Some(host_frame::Body::Ping(Ping {})) }
    }

    fn bytes(frames: &[HostFrame]) -> Vec<u8> {
        let mut out = OPENING.to_vec();
        for frame in frames {
            put_frame(&mut out, frame).unwrap();
        }
        out
    }

    fn drain(deframer: &mut Deframer) -> Vec<Found<HostFrame>> {
        std::iter::from_fn(|| deframer.next()).collect()
    }

    #[test]
    fn what_was_sent_arrives_whatever_the_pieces() {
        let sent = bytes(&[frame(1), frame(2)]);
        for piece in 1..sent.len() {
            let mut deframer = Deframer::default();
            let mut found = Vec::new();
            for part in sent.chunks(piece) {
                deframer.push(part);
                found.extend(drain(&mut deframer));
            }
            assert_eq!(found, [Found::Opening, Found::Message(frame(1)), Found::Message(frame(2))]);
        }
    }

    #[test]
    fn the_end_of_an_old_frame_is_skipped() {
        let old = bytes(&[frame(1)]);
        let mut stream = old[old.len() - 5..].to_vec();
        stream.extend(bytes(&[frame(2)]));
        let mut deframer = Deframer::default();
        deframer.push(&stream);
        assert_eq!(drain(&mut deframer), [Found::Opening, Found::Message(frame(2))]);
        assert_eq!(deframer.skipped, 5);
    }

    #[test]
    fn a_reader_in_the_middle_of_a_frame_is_freed_by_filler() {
        let cut = bytes(&[frame(1)]);
        let mut stream = cut[..cut.len() - 1].to_vec();
        // The rest of that frame comes to nothing, for its last byte is not what the filler has.
        stream.extend(filler());
        stream.extend(bytes(&[frame(2)]));
        let mut deframer = Deframer::default();
        deframer.push(&stream);
        assert_eq!(drain(&mut deframer), [Found::Opening, Found::Opening, Found::Message(frame(2))]);
    }

    #[test]
    fn what_was_read_is_overwritten_and_never_shown() {
        let secrets =
            Secrets { offset: 0, data: b"hunter2".to_vec().into(), padding: Vec::new(), last: true };
        let frame = HostFrame { nonce: 7, request: 1, body: Some(host_frame::Body::Secrets(secrets)) };
        assert!(!format!("{frame:?}").contains("104, 117"), "{frame:?}");
        let mut deframer = Deframer::default();
        let sent = bytes(&[frame]);
        let holds = |buffer: &[u8]| buffer.windows(7).any(|window| window == b"hunter2");
        assert!(holds(&sent));
        deframer.push(&sent);
        assert!(holds(&deframer.buffer));
        assert_eq!(drain(&mut deframer).len(), 2);
        assert!(!holds(&deframer.buffer));
    }

    #[test]
    fn the_newest_version_that_both_know_is_spoken() {
        assert_eq!(negotiate((1, 2), (1, 3)), Some(2));
        assert_eq!(negotiate((1, 1), (1, 2)), Some(1));
        assert_eq!(negotiate((3, 4), (1, 2)), None);
        assert_eq!(negotiate((2, 1), (1, 2)), None);
    }
}
