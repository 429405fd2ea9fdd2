//! What an instance writes to its console, which is also what its workload prints: from where a caller wants it, and on as it
//! grows, through sleep, wake, restart and a new agent.
//!
//! A reader pulls: nothing is held for one that is slow but the piece that it asked for. What was cut off the console before it
//! was read is told, to the byte. The HTTP API and the data plane both call [`NodeHandle::logs`].

use std::time::Duration;

use futures::{Stream, stream};
use mvm_proto::{InstanceId, Timestamp};
use mvm_vmm::{ConsolePiece, Driver};
use tokio::time::sleep;

use super::error::ActionError;
use super::handle::NodeHandle;

/// What is read at once: a follower holds no more.
pub const LOGS_PIECE_BYTES: usize = 64 * 1024;
/// How often a console is looked at for more: soon after there was some, then ever more rarely.
const LOOK_AGAIN: Duration = Duration::from_millis(50);
const LOOK_AT_LEAST: Duration = Duration::from_millis(500);

/// From where on: the latest of what is said, or from the first byte that is kept.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogsFrom {
    /// As many bytes from the end.
    pub bytes: Option<u64>,
    /// As many lines from the end.
    pub lines: Option<u64>,
    /// What was written at or after this time. To within the ten seconds in which consoles are looked at: never less.
    pub since: Option<Timestamp>,
    /// This byte of all that was ever written.
    pub offset: Option<u64>,
}

/// A part of a console.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogsPiece {
    /// Of the first byte, of all that was ever written. Less than before: the console began anew.
    pub offset: u64,
    pub data: Vec<u8>,
    /// Bytes before these that were cut off since the reader came by there.
    pub lost: u64,
}

impl NodeHandle {
    /// The instance's console in pieces: to its end as it is now, or with `follow` until the instance is gone.
    pub fn logs(
        &self,
        instance: InstanceId,
        from: LogsFrom,
        follow: bool,
    ) -> impl Stream<Item = Result<LogsPiece, ActionError>> + Send + use<> {
        let reader = Reader { node: self.clone(), instance, at: At::Before(from), until: None, follow };
        stream::unfold(Some(reader), |reader| async move {
            let mut reader = reader?;
            match reader.next().await {
                Ok(Some(piece)) => Some((Ok(piece), Some(reader))),
                Ok(None) => None,
                Err(error) => Some((Err(error), None)),
            }
        })
    }

    async fn console_from(&self, instance: &InstanceId, from: u64) -> Result<ConsolePiece, ActionError> {
        let read = self.shared.actor.executor.driver.console_from(instance, from, LOGS_PIECE_BYTES).await;
        read.map_err(|cause| ActionError::NoConsole { instance: instance.clone(), cause })
    }

    /// How much was written in all.
    async fn console_end(&self, instance: &InstanceId) -> Result<u64, ActionError> {
        loop {
            // While it is being cut nothing is told but what was asked.
            let piece = self.console_from(instance, u64::MAX).await?;
            if piece.end < u64::MAX {
                return Ok(piece.end);
            }
            sleep(LOOK_AGAIN).await;
        }
    }

    /// Where reading begins.
    async fn logs_begin(&self, instance: &InstanceId, from: LogsFrom) -> Result<u64, ActionError> {
        let end = self.console_end(instance).await?;
        let mut begin = from.offset.unwrap_or(0);
        if let Some(bytes) = from.bytes {
            begin = begin.max(end.saturating_sub(bytes));
        }
        if let Some(since) = from.since {
            let found = self.shared.actor.executor.driver.console_since(instance, since).await;
            let found =
                found.map_err(|cause| ActionError::NoConsole { instance: instance.clone(), cause })?;
            begin = begin.max(found);
        }
        if let Some(lines) = from.lines {
            begin = begin.max(self.last_lines(instance, end, lines, begin).await?);
        }
        // What was gone before the reader came is no loss of its, unless it was there before.
        if from.offset == Some(begin) {
            return Ok(begin);
        }
        Ok(self.console_from(instance, begin).await?.offset)
    }

    /// Where the last lines before `end` begin, looked for back to `from` or to what is kept.
    async fn last_lines(
        &self,
        instance: &InstanceId,
        end: u64,
        lines: u64,
        from: u64,
    ) -> Result<u64, ActionError> {
        let mut counted = LastLines { wanted: lines, end };
        let mut block = end;
        while block > from && lines > 0 {
            let before = block.saturating_sub(LOGS_PIECE_BYTES as u64).max(from);
            let (offset, part) = self.console_part(instance, before, block).await?;
            if let Some(begin) = counted.look_back(&part, offset) {
                return Ok(begin);
            }
            if offset > before {
                return Ok(offset);
            }
            block = before;
        }
        Ok(block)
    }

    /// The part between two bytes, of which the first may be gone: then from where it is kept.
    async fn console_part(
        &self,
        instance: &InstanceId,
        from: u64,
        to: u64,
    ) -> Result<(u64, Vec<u8>), ActionError> {
        let first = self.console_from(instance, from).await?;
        let (offset, mut part) = (first.offset, first.data);
        loop {
            let at = offset + part.len() as u64;
            if at >= to {
                part.truncate(usize::try_from(to.saturating_sub(offset)).unwrap_or(usize::MAX));
                return Ok((offset, part));
            }
            let more = self.console_from(instance, at).await?;
            if more.data.is_empty() || more.offset != at {
                // It is cut at this moment: as if all before it were gone.
                return Ok((to, Vec::new()));
            }
            part.extend(more.data);
        }
    }
}

/// Counts lines from a text's end on.
struct LastLines {
    wanted: u64,
    end: u64,
}

impl LastLines {
    /// Looks through the part that begins at `offset`, from its end: where the first of the lines begins, if that is in it.
    fn look_back(&mut self, part: &[u8], offset: u64) -> Option<u64> {
        for (at, byte) in part.iter().enumerate().rev() {
            let next = offset + at as u64 + 1;
            // The end of the last line begins none.
            if *byte == b'\n' && next < self.end {
                self.wanted -= 1;
                if self.wanted == 0 {
                    return Some(next);
                }
            }
        }
        None
    }
}

enum At {
    Before(LogsFrom),
    /// The next byte.
    Byte(u64),
}

struct Reader {
    node: NodeHandle,
    instance: InstanceId,
    at: At,
    /// The first byte not to read any more.
    until: Option<u64>,
    follow: bool,
}

impl Reader {
    /// The next piece that has anything; none at the end.
    async fn next(&mut self) -> Result<Option<LogsPiece>, ActionError> {
        let mut at = match self.at {
            At::Byte(at) => at,
            At::Before(from) => {
                let begin = self.node.logs_begin(&self.instance, from).await?;
                if !self.follow {
                    self.until = Some(self.node.console_end(&self.instance).await?);
                }
                self.at = At::Byte(begin);
                begin
            }
        };
        let mut wait = LOOK_AGAIN;
        loop {
            if self.until.is_some_and(|until| at >= until) {
                return Ok(None);
            }
            let mut piece = self.node.console_from(&self.instance, at).await?;
            if piece.end < at {
                (at, self.at) = (0, At::Byte(0));
                continue;
            }
            if let Some(until) = self.until {
                piece
                    .data
                    .truncate(usize::try_from(until.saturating_sub(piece.offset)).unwrap_or(usize::MAX));
            }
            if !piece.data.is_empty() {
                let lost = piece.offset.saturating_sub(at);
                self.at = At::Byte(piece.offset + piece.data.len() as u64);
                return Ok(Some(LogsPiece { offset: piece.offset, data: piece.data, lost }));
            }
            if self.until.is_some() && piece.offset > at {
                // All that was left of it was cut meanwhile.
                return Ok(None);
            }
            if self.follow && self.node.records().get(&self.instance).is_none() {
                return Ok(None);
            }
            sleep(wait).await;
            wait = (wait * 2).min(LOOK_AT_LEAST);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn last(text: &[u8], lines: u64, block: usize) -> u64 {
        let mut counted = LastLines { wanted: lines, end: text.len() as u64 };
        let mut end = text.len();
        while end > 0 {
            let begin = end.saturating_sub(block);
            if let Some(found) = counted.look_back(&text[begin..end], begin as u64) {
                return found;
            }
            end = begin;
        }
        0
    }

    #[test]
    fn the_last_lines_are_found_whatever_blocks_they_are_read_in() {
        for block in 1..12 {
            for (text, lines, from) in [
                ("one\ntwo\nthree\n", 1, 8),
                ("one\ntwo\nthree\n", 2, 4),
                ("one\ntwo\nthree\n", 3, 0),
                ("one\ntwo\nthree\n", 9, 0),
                ("one\ntwo\nthree", 1, 8),
                ("\n\n\n", 2, 1),
                ("no end", 1, 0),
                ("", 1, 0),
            ] {
                assert_eq!(last(text.as_bytes(), lines, block), from, "{text:?} {lines} {block}");
            }
        }
    }
}
