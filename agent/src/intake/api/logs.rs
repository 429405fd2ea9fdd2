//! `GET .../logs`: what an instance wrote to its console. Its end as the bytes that they are; or, where the caller says from
//! where on or wants to follow it, one JSON object per line.
//!
//! Such a line has `data` (base64) with the `offset` of its first byte in all that was ever written, or `lost`: bytes that were
//! cut off before they were read. A caller that follows goes on through the instance's sleep, wake and restart until the instance
//! is gone; one that lost its connection goes on from an `offset`.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::response::{IntoResponse, Response};
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http::header;
use mvm_proto::{Problem, Timestamp};
use serde::Deserialize;
use serde_json::json;
use tokio_util::sync::CancellationToken;

use super::Api;
use super::input::InstancePath;
use super::instances::find;
use super::problem::{self, Refused};
use super::watch::NDJSON;
use crate::node::error::ActionError;
use crate::node::handle::{DEFAULT_LOG_BYTES, MAX_LOG_BYTES};
use crate::node::logs::{LogsFrom, LogsPiece};

/// A follower that is gone keeps one of the connection's few slots until the next line fails.
const STILL_HERE: Duration = Duration::from_secs(10);

#[derive(Default, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct LogsQuery {
    bytes: Option<usize>,
    tail: Option<u64>,
    since: Option<Timestamp>,
    offset: Option<u64>,
    follow: bool,
}

pub(super) async fn logs(
    State(api): State<Api>,
    path: Result<Path<(String, String, String)>, PathRejection>,
    query: Result<Query<LogsQuery>, QueryRejection>,
) -> Result<Response, Refused> {
    let path = InstancePath::read(path)?;
    let Query(query) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    find(&api, &path)?;
    let LogsQuery { bytes, tail, since, offset, follow } = query;
    if !follow && tail.is_none() && since.is_none() && offset.is_none() {
        let bytes = bytes.unwrap_or(DEFAULT_LOG_BYTES).min(MAX_LOG_BYTES);
        let end = api.shared.node.console(&path.instance, bytes).await?;
        return Ok(([(header::CONTENT_TYPE, "application/octet-stream")], end).into_response());
    }
    let from = LogsFrom { bytes: bytes.map(|bytes| bytes as u64), lines: tail, since, offset };
    let pieces = api.shared.node.logs(path.instance, from, follow);
    let lines = lines(pieces, api.shared.shutdown.clone());
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(lines)).into_response())
}

fn lines(
    pieces: impl Stream<Item = Result<LogsPiece, ActionError>> + Send + 'static,
    shutdown: CancellationToken,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let state = Some((Box::pin(pieces), shutdown));
    stream::unfold(state, |state| async move {
        let (mut pieces, shutdown) = state?;
        let next = tokio::select! {
            biased;
            () = shutdown.cancelled() => return None,
            next = tokio::time::timeout(STILL_HERE, pieces.next()) => next,
        };
        let (line, goes_on) = match next {
            Err(_) => (Bytes::from_static(b"\n"), true),
            Ok(Some(Ok(piece))) => (line(&piece), true),
            Ok(Some(Err(error))) => (one(&json!({ "error": Problem::from(error) })), false),
            // Not so when the agent stops: then there is more.
            Ok(None) => (one(&json!({ "end": true })), false),
        };
        Some((Ok(line), goes_on.then_some((pieces, shutdown))))
    })
}

fn line(piece: &LogsPiece) -> Bytes {
    let data = one(&json!({ "offset": piece.offset, "data": STANDARD.encode(&piece.data) }));
    match piece.lost {
        0 => data,
        lost => [one(&json!({ "lost": lost })), data].concat().into(),
    }
}

fn one(value: &serde_json::Value) -> Bytes {
    format!("{value}\n").into()
}

#[cfg(test)]
mod tests {
    use std::pin::pin;

    use tokio::sync::mpsc;

    use super::*;

    fn text(line: Option<Result<Bytes, Infallible>>) -> String {
        String::from_utf8(line.unwrap().unwrap().to_vec()).unwrap()
    }

    #[tokio::test(start_paused = true)]
    async fn pieces_losses_and_the_end_are_lines_and_a_reader_hears_that_it_is_still_here() {
        let (tell, mut pieces) = mpsc::channel(4);
        let pieces = stream::poll_fn(move |context| pieces.poll_recv(context));
        let mut lines = pin!(lines(pieces, CancellationToken::new()));
        let piece = |offset, lost| Ok(LogsPiece { offset, data: b"hi".to_vec(), lost });
        tell.send(piece(7, 0)).await.unwrap();
        assert_eq!(text(lines.next().await), "{\"data\":\"aGk=\",\"offset\":7}\n");
        assert_eq!(text(lines.next().await), "\n", "after a while in which nothing came");
        tell.send(piece(12, 3)).await.unwrap();
        assert_eq!(text(lines.next().await), "{\"lost\":3}\n{\"data\":\"aGk=\",\"offset\":12}\n");
        drop(tell);
        assert_eq!(text(lines.next().await), "{\"end\":true}\n");
        assert!(lines.next().await.is_none());
    }

    #[tokio::test]
    async fn at_shutdown_the_lines_end_without_an_end() {
        let shutdown = CancellationToken::new();
        let mut lines = pin!(lines(stream::pending(), shutdown.clone()));
        shutdown.cancel();
        assert!(lines.next().await.is_none());
    }
}
