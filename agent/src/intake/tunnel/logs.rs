//! `logs`: what an instance wrote to its console, from where the caller wants it, and on as it grows.
//!
//! It wakes no instance and holds none: the console of one that sleeps is read as it is. A piece is read when the caller has
//! room for it, so that a slow one costs no more than a piece. Each stream is one line of the tenant's audit log.

use std::pin::pin;

use futures::StreamExt as _;
use mvm_proto::wire::tunnel::v1::{LogPiece, Logs, frame};
use mvm_proto::{Problem, Timestamp};
use mvm_transport::SessionError;

use super::stream::{Answers, Frames, Opening, bad, end, finish, framed, lost};
use crate::node::handle::DEFAULT_LOG_BYTES;
use crate::node::logs::{LogsFrom, LogsPiece};

/// Of the console in one frame.
const FRAME_BYTES: usize = 32 * 1024;
/// What the audit log calls it.
const ACTION: &str = "logs";

pub(super) async fn run(
    opening: &Opening,
    asked: &Logs,
    frames_in: Frames,
    frames_out: &mut Answers,
) -> Result<(), Problem> {
    let from = from(asked)?;
    let (node, place) = (&opening.shared.parts.node, &opening.place);
    let _slot = opening.shared.limits.take(&place.tenant, &opening.actor)?;
    node.find(&place.tenant, &place.pool, &place.instance)?;
    let what = if asked.follow { "followed" } else { "read" };
    node.audit(&place.instance, &opening.actor, ACTION, format!("asked by {}", opening.actor), Ok(what));
    let pieces = node.logs(place.instance.clone(), from, asked.follow);
    let gone = frames_out.gone();
    let told = async {
        let mut pieces = pin!(pieces);
        frames_out.send(&opening.opened(String::new(), false)).await?;
        while let Some(piece) = pieces.next().await {
            match piece {
                Ok(piece) => tell(&piece, frames_out).await?,
                Err(error) => return Ok(Some(Problem::from(error))),
            }
        }
        Ok(None)
    };
    let told: Result<Option<Problem>, SessionError> = tokio::select! {
        told = told => told,
        problem = unasked(frames_in) => Ok(Some(problem)),
        // Nothing is written while nothing comes: a caller that left is heard of by this alone.
        () = gone => return Ok(()),
        // Not finished: there is more, which the next agent tells.
        () = opening.shared.parts.shutdown.cancelled() => return Ok(()),
    };
    match told {
        Ok(None) => finish(frames_out).await,
        Ok(Some(problem)) => end(frames_out, &problem).await,
        Err(error) => lost(&error),
    }
    Ok(())
}

fn from(asked: &Logs) -> Result<LogsFrom, Problem> {
    let since = match asked.since.as_str() {
        "" => None,
        since => Some(since.parse::<Timestamp>().map_err(|_| bad("`since` is no time of RFC 3339".into()))?),
    };
    let is_said = asked.tail_lines.is_some() || since.is_some() || asked.offset.is_some();
    let bytes = match asked.tail_bytes {
        0 if is_said => None,
        0 => Some(DEFAULT_LOG_BYTES as u64),
        bytes => Some(bytes),
    };
    Ok(LogsFrom { bytes, lines: asked.tail_lines, since, offset: asked.offset })
}

async fn tell(piece: &LogsPiece, frames_out: &mut Answers) -> Result<(), SessionError> {
    let (mut offset, mut lost) = (piece.offset, piece.lost);
    for data in piece.data.chunks(FRAME_BYTES) {
        let next = offset + data.len() as u64;
        let frame = LogPiece { data: data.to_vec().into(), lost: std::mem::take(&mut lost), offset };
        frames_out.send(&framed(frame::Body::Log(frame))).await?;
        offset = next;
    }
    Ok(())
}

/// A caller has nothing to say to a console; one that does is told so.
async fn unasked(mut frames_in: Frames) -> Problem {
    loop {
        match frames_in.recv().await {
            Ok(Some(frame)) if frame.body.is_none() => {}
            Ok(Some(_)) => return bad("a stream of logs takes no frames".to_owned()),
            // What it still listens to is told; its end is seen where that is written.
            Ok(None) | Err(_) => return std::future::pending().await,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_a_console_is_told_unless_its_caller_says_from_where_on() {
        let default = LogsFrom { bytes: Some(DEFAULT_LOG_BYTES as u64), ..LogsFrom::default() };
        assert_eq!(from(&Logs::default()), Ok(default));
        let since = "2026-01-31T12:00:00Z";
        let all = Logs { tail_lines: Some(3), since: since.into(), offset: Some(0), ..Logs::default() };
        let expected = LogsFrom {
            bytes: None,
            lines: Some(3),
            since: Some(since.parse().expect("a time")),
            offset: Some(0),
        };
        assert_eq!(from(&all), Ok(expected));
        assert_eq!(from(&Logs { since: "yesterday".into(), ..all }).unwrap_err().code, "bad_request");
    }
}
