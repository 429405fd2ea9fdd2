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
        if *bytes + piece.data.len() > MAX_WAITING_BYTES || pieces.len() >= MAX_WAITING {
            return false;
        }
        *bytes += piece.data.len();
        pieces.push_back(piece);
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
}
