//! Peers that take their time, and peers that ask too often: neither may cost the others anything.

use std::future::poll_fn;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, header};
use mvm_tests::{PATIENCE, wait_for, wait_until};
use tokio::task::JoinSet;

use crate::bad_input::one_agent::{OneAgent, UNHURRIED, exchange};

/// Connections that stall, all with one identity; more would be refused.
const STALLED_CONNECTIONS: usize = 8;
/// Requests on each of them that never end: as many as a connection may have.
const STALLED_REQUESTS: usize = 16;
/// Far above what a stream carries before its reader has read.
const STALLED_BODY_BYTES: usize = 6 << 20;
/// How often each request is driven before it is left alone: its head and a part of its body are sent.
const DRIVES: usize = 4;
/// A healthy answer takes milliseconds; a request that waited for a stalled one would take half a minute.
const PROMPT: Duration = Duration::from_secs(5);
/// Asked at once: far more than the default burst, so that the limit is met even while tokens come back.
const MANY: usize = 200;

#[test]
fn requests_that_never_end_do_not_keep_others_waiting() {
    let mut agent = OneAgent::start(UNHURRIED);
    let before = agent.state();
    let coordinator = agent.coordinator();
    let slow: Vec<_> = (0..STALLED_CONNECTIONS).map(|_| agent.connect(Some(&coordinator)).unwrap()).collect();
    let body = Bytes::from(vec![b' '; STALLED_BODY_BYTES]);
    let mut stalled = Vec::new();
    for client in &slow {
        for _ in 0..STALLED_REQUESTS {
            let request = Request::post("/v1/reconcile").header(header::CONTENT_TYPE, "application/json");
            stalled.push(Box::pin(client.request(request.body(body.clone()).unwrap())));
        }
    }
    for request in &mut stalled {
        for _ in 0..DRIVES {
            let ended = agent
                .runtime
                .block_on(poll_fn(|context| Poll::Ready(request.as_mut().poll(context).is_ready())));
            assert!(!ended, "a request with most of its body missing was answered");
        }
    }

    // Each of those connections is taken up whole: one request more waits for its turn.
    let info = Request::get("/v1/node/info").body(Bytes::new()).unwrap();
    let mut waiting = Box::pin(slow[0].request(info));
    let mut is_answered = |agent: &OneAgent| {
        agent.runtime.block_on(poll_fn(|context| Poll::Ready(waiting.as_mut().poll(context).is_ready())))
    };
    assert!(!is_answered(&agent), "the requests do not stall");

    let asked = Instant::now();
    assert_eq!(agent.state(), before);
    assert_eq!(agent.push_good().instances, before.instances);
    assert!(asked.elapsed() < PROMPT, "others waited for {:?}", asked.elapsed());
    assert!(!is_answered(&agent), "the requests do not stall");

    drop(stalled);
    let answer = agent.runtime.block_on(waiting).expect("the connection is free again");
    assert_eq!(answer.status(), 200);
}

#[test]
fn a_peer_that_asks_too_often_is_told_when_to_come_back_and_others_are_served() {
    // The limits are the default ones.
    let mut agent = OneAgent::start(&["--no-session"]);
    let before = agent.state();
    let credential = agent.operator();
    let operator = Arc::new(agent.connect(Some(&credential)).unwrap());
    let info = || Request::get("/v1/node/info").body(Bytes::new()).unwrap();
    let answers = agent.runtime.block_on(async {
        let mut asking = JoinSet::new();
        for _ in 0..MANY {
            let (operator, request) = (Arc::clone(&operator), info());
            asking.spawn(async move { exchange(&operator, request).await });
        }
        asking.join_all().await
    });
    let (served, limited): (Vec<_>, Vec<_>) = answers.iter().partition(|answer| answer.status == 200);
    assert!(served.len() >= 20, "a burst is let through, {} were", served.len());
    assert!(!limited.is_empty());
    for answer in limited {
        assert_eq!(answer.refusal(), (429, "too_many_requests"));
        assert_eq!(answer.retry_after, Some(1), "{answer:?}");
    }
    wait_until("the peer to be served again", PATIENCE, || agent.send(&operator, info()).status == 200);

    assert_eq!(agent.state(), before);
    let document = agent.next();
    let envelope = agent.sealed(&document);
    let answer = wait_for("the coordinator's turn", PATIENCE, || {
        Some(agent.push(envelope.clone())).filter(|answer| answer.status != 429)
    });
    assert_eq!(answer.status, 202, "{answer:?}");
    agent.generation = document.provenance.generation;
    assert_eq!(agent.converged().instances, before.instances);
}
