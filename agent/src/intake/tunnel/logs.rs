//! `logs`: the end of what an instance wrote to its console.
//!
//! It wakes no instance and holds none: the console of one that sleeps is read as it is.

use mvm_proto::Problem;
use mvm_proto::wire::tunnel::v1::{LogPiece, Logs, frame};

use super::stream::{Answers, Frames, Opening, bad, finish, framed, lost};
use crate::node::handle::{DEFAULT_LOG_BYTES, MAX_LOG_BYTES};

/// Of the console in one frame.
const PIECE_BYTES: usize = 32 * 1024;

pub(super) async fn run(
    opening: &Opening,
    asked: &Logs,
    _frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    if asked.follow || !asked.since.is_empty() {
        return Err(bad("this agent can't follow a console".to_owned()));
    }
    let node = &opening.shared.parts.node;
    let _slot = opening.shared.limits.take(&opening.place.tenant, &opening.actor)?;
    node.find(&opening.place.tenant, &opening.place.pool, &opening.place.instance)?;
    let bytes = match asked.tail_bytes {
        0 if asked.tail_lines > 0 => MAX_LOG_BYTES,
        0 => DEFAULT_LOG_BYTES,
        bytes => usize::try_from(bytes).unwrap_or(MAX_LOG_BYTES).min(MAX_LOG_BYTES),
    };
    let console = node.console(&opening.place.instance, bytes).await?;
    let tail = last_lines(&console, asked.tail_lines);
    let told = async {
        frames_out.send(&opening.opened(String::new(), false)).await?;
        for piece in tail.chunks(PIECE_BYTES) {
            let piece = LogPiece { data: piece.to_vec().into(), lost: 0 };
            frames_out.send(&framed(frame::Body::Log(piece))).await?;
        }
        Ok(())
    };
    match told.await {
        Ok(()) => finish(frames_out).await,
        Err(error) => lost(&error),
    }
    Ok(())
}

/// The last `lines` lines, also where the last of them has no end; all when that is 0.
fn last_lines(text: &[u8], lines: u64) -> &[u8] {
    let Ok(lines @ 1..) = usize::try_from(lines) else { return text };
    let body = text.strip_suffix(b"\n").unwrap_or(text);
    let ends = body.iter().enumerate().rev().filter(|(_, byte)| **byte == b'\n');
    let from = ends.map(|(at, _)| at + 1).nth(lines - 1);
    &text[from.unwrap_or(0)..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_counted_with_and_without_an_end() {
        for (text, lines, expected) in [
            ("a\nb\nc\n", 2, "b\nc\n"),
            ("a\nb\nc", 2, "b\nc"),
            ("a\nb\nc\n", 9, "a\nb\nc\n"),
            ("a\nb\n", 0, "a\nb\n"),
            ("\n\n\n", 1, "\n"),
            ("", 3, ""),
        ] {
            assert_eq!(last_lines(text.as_bytes(), lines), expected.as_bytes(), "{text:?} {lines}");
        }
    }
}
