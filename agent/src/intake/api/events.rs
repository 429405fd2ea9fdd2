//! `GET /v1/node/events`: what happened lately, one JSON object per line; with `?follow=true` also what happens next.
//!
//! While nothing happens a follower is sent an empty line now and then, so that one that went away is noticed.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use axum::extract::rejection::QueryRejection;
use axum::extract::{Query, State};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures::{Stream, stream};
use http::header;
use serde::Deserialize;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use super::Api;
use super::problem::{self, Refused};
use super::watch::NDJSON;
use crate::node::event_log::EventLog;

const SAY_SOMETHING_AFTER: Duration = Duration::from_secs(10);

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct EventsQuery {
    #[serde(default)]
    follow: bool,
}

pub(super) async fn node_events(
    State(api): State<Api>,
    query: Result<Query<EventsQuery>, QueryRejection>,
) -> Result<Response, Refused> {
    let Query(query) = query.map_err(|cause| problem::bad_query(cause.body_text()))?;
    let log = Arc::clone(&api.shared.events);
    let body = if query.follow {
        Body::from_stream(follow(log, api.shared.shutdown.clone()))
    } else {
        Body::from(lines(&log, 0).0)
    };
    Ok(([(header::CONTENT_TYPE, NDJSON)], body).into_response())
}

/// Everything after event number `after`, and the number of the last.
fn lines(log: &EventLog, after: u64) -> (Bytes, u64) {
    let mut text = Vec::new();
    let mut last = after;
    for (number, event) in log.after(after) {
        text.extend(serde_json::to_vec(&event).unwrap_or_default());
        text.push(b'\n');
        last = number;
    }
    (text.into(), last)
}

struct Follower {
    log: Arc<EventLog>,
    newest: watch::Receiver<u64>,
    seen: u64,
    first: bool,
    shutdown: CancellationToken,
}

fn follow(log: Arc<EventLog>, shutdown: CancellationToken) -> impl Stream<Item = Result<Bytes, Infallible>> {
    let newest = log.newest();
    let follower = Follower { log, newest, seen: 0, first: true, shutdown };
    stream::unfold(follower, |mut follower| async move {
        if !std::mem::take(&mut follower.first) {
            tokio::select! {
                biased;
                () = follower.shutdown.cancelled() => return None,
                changed = tokio::time::timeout(SAY_SOMETHING_AFTER, follower.newest.changed()) => {
                    changed.unwrap_or(Ok(())).ok()?;
                }
            }
        }
        follower.newest.borrow_and_update();
        let (text, seen) = lines(&follower.log, follower.seen);
        follower.seen = seen;
        let text = if text.is_empty() { Bytes::from_static(b"\n") } else { text };
        Some((Ok(text), follower))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::StreamExt;
    use mvm_proto::status::Event;

    fn event(message: &str) -> Event {
        Event { message: message.to_owned(), ..Event::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_follower_gets_what_was_then_what_comes_each_once_and_a_sign_of_life_between() {
        let log = Arc::new(EventLog::default());
        log.push(event("one"));
        let shutdown = CancellationToken::new();
        let mut lines = Box::pin(follow(Arc::clone(&log), shutdown.clone()));
        let first = lines.next().await.unwrap().unwrap();
        assert_eq!(serde_json::from_slice::<Event>(&first).unwrap(), event("one"));
        assert_eq!(lines.next().await.unwrap().unwrap().as_ref(), b"\n");
        log.push(event("two"));
        let second = lines.next().await.unwrap().unwrap();
        assert_eq!(serde_json::from_slice::<Event>(&second).unwrap(), event("two"));
        shutdown.cancel();
        assert!(lines.next().await.is_none());
    }
}
