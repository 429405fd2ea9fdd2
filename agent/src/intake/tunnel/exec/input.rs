//! Input that the program has yet to take. It waits here and not in the stream, so that what comes behind it is heard: a
//! program that waits for its output to be read takes no input until it is.

use std::collections::VecDeque;

use mvm_proto::guest::WINDOW_BYTES;
use mvm_proto::wire::frames::MAX_TUNNEL_FRAME_BYTES;
use mvm_proto::wire::tunnel::v1::Input;
use parking_lot::Mutex;
use tokio::sync::Notify;

use crate::guest::ExecHandle;

/// A caller sends at most a window beyond what it was told of as taken; its last frame may overstep that.
const MAX_WAITING_BYTES: usize = WINDOW_BYTES + MAX_TUNNEL_FRAME_BYTES;
/// Frames that wait, empty ones among them.
const MAX_WAITING: usize = 1024;
/// Small pieces are joined up to this: more would be copied too often.
const MERGED_BYTES: usize = 4096;

#[derive(Debug, Default)]
pub(super) struct InputQueue {
    waiting: Mutex<(VecDeque<Input>, usize)>,
    arrived: Notify,
}

impl InputQueue {
    /// Whether there was room.
    pub(super) fn push(&self, piece: Input) -> bool {
        let mut waiting = self.waiting.lock();
        let (pieces, bytes) = &mut *waiting;
        let is_full = pieces.len() >= MAX_WAITING && !pieces.back().is_some_and(|it| goes_on(it, &piece));
        if *bytes + piece.data.len() > MAX_WAITING_BYTES || is_full {
            return false;
        }
        *bytes += piece.data.len();
        match pieces.back_mut().filter(|before| goes_on(before, &piece)) {
            Some(before) => {
                before.data = [&before.data[..], &piece.data].concat().into();
                before.last = piece.last;
            }
            None => pieces.push_back(piece),
        }
        drop(waiting);
        self.arrived.notify_one();
        true
    }

    fn pop(&self) -> Option<Input> {
        let mut waiting = self.waiting.lock();
        let piece = waiting.0.pop_front()?;
        waiting.1 -= piece.data.len();
        Some(piece)
    }

    /// Passes pieces on as the program takes them. Runs for ever: that a program has ended is told by its output.
    pub(super) async fn pass_on(&self, handle: &ExecHandle) {
        loop {
            match self.pop() {
                Some(Input { data, last, offset }) => {
                    // A program that ended, or does not read its input, is no error.
                    let _ = handle.write_at(offset, &data, last).await;
                }
                None => self.arrived.notified().await,
            }
        }
    }
}

/// Whether a piece is the rest of the one before it, and both are small: a caller that writes byte by byte may have a window of them.
fn goes_on(before: &Input, piece: &Input) -> bool {
    let length = before.data.len();
    let is_small = !piece.data.is_empty() && length + piece.data.len() <= MERGED_BYTES;
    is_small && !before.last && before.offset + length as u64 == piece.offset
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_waits_is_bounded_in_bytes_and_pieces() {
        let queue = InputQueue::default();
        let piece = |bytes: usize| Input { data: vec![0; bytes].into(), ..Input::default() };
        assert!(queue.push(piece(WINDOW_BYTES)) && queue.push(piece(MAX_TUNNEL_FRAME_BYTES)));
        assert!(!queue.push(piece(1)), "a byte too many");
        assert_eq!(queue.pop().map(|piece| piece.data.len()), Some(WINDOW_BYTES));
        assert!(queue.push(piece(1)));
        let empty = InputQueue::default();
        assert_eq!((0..2 * MAX_WAITING).filter(|_| empty.push(piece(0))).count(), MAX_WAITING);
    }

    #[test]
    fn a_window_that_comes_byte_by_byte_has_room_and_keeps_its_order() {
        let queue = InputQueue::default();
        let byte = |at: usize| Input {
            data: vec![u8::try_from(at % 251).unwrap()].into(),
            offset: at as u64,
            ..Input::default()
        };
        assert!((0..WINDOW_BYTES).all(|at| queue.push(byte(at))));
        let mut at = 0;
        while let Some(piece) = queue.pop() {
            assert_eq!(piece.offset, at as u64);
            assert!(piece.data.iter().zip(at..).all(|(byte, at)| usize::from(*byte) == at % 251));
            at += piece.data.len();
        }
        assert_eq!(at, WINDOW_BYTES);
    }
}
