//! `GET /v1/node/watch`: the node's status, and again after every change, one JSON object per line.
//!
//! A slow reader misses states between two reads, never the newest: each line is the status as it is when the line
//! is written. Without a change the last line is repeated now and then, so that a reader that went away is noticed.
//! The stream ends when the agent stops.

use std::convert::Infallible;
use std::time::Duration;

use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, stream};
use http::header;
use mvm_proto::status::NodeStatus;
use tokio::sync::watch::Receiver;
use tokio_util::sync::CancellationToken;

use super::Api;
use super::problem::{self, Refused};

pub(super) const NDJSON: &str = "application/x-ndjson";

/// A stream whose reader is gone keeps one of the connection's few slots until the next line fails.
const REPEAT_AFTER: Duration = Duration::from_secs(10);

pub(super) async fn node_watch(
    State(api): State<Api>,
    RawQuery(query): RawQuery,
) -> Result<Response, Refused> {
    if query.is_some_and(|text| !text.is_empty()) {
        return Err(problem::bad_query("this call takes no parameters"));
    }
    let lines = lines(api.shared.node.status(), api.shared.shutdown.clone());
    Ok(([(header::CONTENT_TYPE, NDJSON)], Body::from_stream(lines)).into_response())
}

fn lines(
    mut status: Receiver<NodeStatus>,
    shutdown: CancellationToken,
) -> impl Stream<Item = Result<Bytes, Infallible>> {
    status.mark_changed();
    stream::unfold((status, shutdown), |(mut status, shutdown)| async move {
        tokio::select! {
            biased;
            () = shutdown.cancelled() => return None,
            changed = tokio::time::timeout(REPEAT_AFTER, status.changed()) => changed.unwrap_or(Ok(())).ok()?,
        }
        let line = line(&status.borrow_and_update());
        Some((Ok(line), (status, shutdown)))
    })
}

fn line(status: &NodeStatus) -> Bytes {
    let mut line = serde_json::to_vec(status).unwrap_or_default();
    line.push(b'\n');
    line.into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use tokio::sync::watch;

    fn status(observed_at: &str) -> NodeStatus {
        NodeStatus { observed_at: observed_at.to_owned(), ..NodeStatus::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn without_a_change_the_last_status_is_repeated() {
        let (_sender, receiver) = watch::channel(status("one"));
        let mut lines = Box::pin(lines(receiver, CancellationToken::new()));
        let first = lines.next().await;
        assert_eq!(lines.next().await, first);
    }

    #[tokio::test]
    async fn a_watcher_gets_the_present_status_then_the_newest_and_an_end_at_shutdown() {
        let (sender, receiver) = watch::channel(status("one"));
        let shutdown = CancellationToken::new();
        let mut lines = Box::pin(lines(receiver, shutdown.clone()));
        let read = |line: Option<Result<Bytes, Infallible>>| {
            serde_json::from_slice::<NodeStatus>(&line.unwrap().unwrap()).unwrap().observed_at
        };
        assert_eq!(read(lines.next().await), "one");
        sender.send(status("two")).unwrap();
        sender.send(status("three")).unwrap();
        assert_eq!(read(lines.next().await), "three");
        shutdown.cancel();
        assert!(lines.next().await.is_none());
    }
}
