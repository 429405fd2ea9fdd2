//! What is kept of an exec's output: both streams together, in the order in which they were read.

use std::collections::VecDeque;

use crate::protocol::{CHUNK_BYTES, Output};

#[derive(Debug, Default)]
pub(crate) struct Kept {
    pieces: VecDeque<Piece>,
    /// The offset of the first byte that is kept, and how many are.
    start: u64,
    length: usize,
}

#[derive(Debug)]
struct Piece {
    stderr: bool,
    data: Vec<u8>,
}

impl Kept {
    pub(crate) fn len(&self) -> usize {
        self.length
    }

    pub(crate) fn start(&self) -> u64 {
        self.start
    }

    /// The offset of the byte that comes next.
    pub(crate) fn end(&self) -> u64 {
        self.start + self.length as u64
    }

    /// Adds what was read; then drops the oldest until no more than `keep` bytes are left.
    pub(crate) fn add(&mut self, stderr: bool, data: &[u8], keep: usize) {
        self.length += data.len();
        match self.pieces.back_mut() {
            // A program that writes byte by byte must not cost a piece for each.
            Some(last) if last.stderr == stderr && last.data.len() + data.len() <= CHUNK_BYTES => {
                last.data.extend_from_slice(data);
            }
            _ => self.pieces.push_back(Piece { stderr, data: data.to_vec() }),
        }
        self.keep_at_most(keep);
    }

    pub(crate) fn keep_at_most(&mut self, keep: usize) {
        while self.length > keep {
            let surplus = self.length - keep;
            let Some(first) = self.pieces.front_mut() else { return };
            let dropped = first.data.len().min(surplus);
            if dropped == first.data.len() {
                self.pieces.pop_front();
            } else {
                first.data.drain(..dropped);
            }
            self.start += dropped as u64;
            self.length -= dropped;
        }
    }

    /// The output from this byte on: at most so many bytes, of one stream. Says what was lost before it.
    pub(crate) fn piece(&self, from: u64, most: usize) -> Option<Output> {
        let lost = self.start.saturating_sub(from);
        let from = from.max(self.start);
        let mut offset = self.start;
        for piece in &self.pieces {
            let end = offset + piece.data.len() as u64;
            if from < end {
                let at = usize::try_from(from - offset).ok()?;
                let data = &piece.data[at..piece.data.len().min(at + most)];
                return Some(Output { stderr: piece.stderr, data: data.to_vec(), offset: from, lost });
            }
            offset = end;
        }
        // Everything was dropped: an empty piece tells how much.
        (lost > 0).then(|| Output { stderr: false, data: Vec::new(), offset: self.start, lost })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn output_is_told_in_order_and_by_stream() {
        let mut kept = Kept::default();
        kept.add(false, b"out", 100);
        kept.add(true, b"err", 100);
        kept.add(true, b"or", 100);
        let output = |stderr, data: &[u8], offset| Output { stderr, data: data.to_vec(), offset, lost: 0 };
        assert_eq!(kept.piece(0, 10), Some(output(false, b"out", 0)));
        assert_eq!(kept.piece(1, 1), Some(output(false, b"u", 1)));
        assert_eq!(kept.piece(3, 10), Some(output(true, b"error", 3)));
        assert_eq!(kept.piece(8, 10), None);
    }

    #[test]
    fn the_oldest_output_gives_way_and_the_loss_is_told() {
        let mut kept = Kept::default();
        kept.add(false, b"0123456789", 4);
        assert_eq!((kept.start(), kept.end(), kept.len()), (6, 10, 4));
        assert_eq!(
            kept.piece(2, 10),
            Some(Output { stderr: false, data: b"6789".to_vec(), offset: 6, lost: 4 })
        );
        kept.keep_at_most(0);
        assert_eq!(kept.piece(2, 10), Some(Output { stderr: false, data: Vec::new(), offset: 10, lost: 8 }));
    }
}
