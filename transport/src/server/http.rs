//! HTTP/3 for any axum router: one task per connection, one per request under it.

use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::Body;
use bytes::Bytes;
use futures::FutureExt;
use h3::error::Code;
use h3::server::{RequestResolver, RequestStream};
use http::{Response, StatusCode, header};
use http_body_util::BodyExt;
use mvm_proto::Problem;
use mvm_proto::problem::PROBLEM_MEDIA_TYPE;
use tokio::time::{Instant, sleep_until, timeout, timeout_at};
use tokio_util::task::TaskTracker;
use tower::ServiceExt;
use tracing::{debug, error};

use super::admission::Holder;
use super::connection_task::Services;
use super::request_body::{Failure, RequestBody};
use super::request_head::announced_length;
use super::stats::Count;
use crate::h3_streams::{Connection, Send};
use crate::limits::Limits;
use crate::peer::Peer;
use crate::slots::Activity;

/// How long a connection whose requests are all answered is kept for the answers to arrive.
const LINGER: Duration = Duration::from_millis(250);

/// Header sections up to this many times the limit are read, so that they can be answered; longer ones are cut off.
const HEADER_SLACK: usize = 4;

/// Serves one connection until the peer leaves or shutdown has drained it.
pub(super) async fn serve_http(
    connection: quinn::Connection,
    router: axum::Router,
    peer: Peer,
    activity: Activity<Holder>,
    services: &Arc<Services>,
) {
    let limits = &services.limits;
    let streams = Connection::new(connection.clone(), limits.max_header_bytes * HEADER_SLACK);
    let mut builder = h3::server::builder();
    builder.max_field_section_size(limits.max_header_bytes as u64).send_grease(false);
    let Ok(Ok(mut h3)) = timeout(limits.handshake_timeout, builder.build(streams)).await else {
        return debug!("could not set up HTTP/3");
    };
    let requests = TaskTracker::new();
    requests.close();
    let mut drain_until = None;
    loop {
        tokio::select! {
            accepted = h3.accept() => match accepted {
                Ok(Some(resolver)) => {
                    // Nothing is begun on a connection that is about to be closed.
                    let Some(busy) = activity.begin() else { break };
                    let answering = answer(resolver, router.clone(), peer.clone(), Arc::clone(services));
                    let until_lost = lost(connection.clone());
                    requests.spawn(async move {
                        let _busy = busy;
                        tokio::select! { () = answering => {}, () = until_lost => {} }
                    });
                }
                Ok(None) => break,
                Err(error) => {
                    debug!(%error, "an HTTP/3 connection ended");
                    break;
                }
            },
            () = services.shutdown.cancelled(), if drain_until.is_none() => {
                // GOAWAY: what has begun is finished, nothing new is begun.
                if h3.shutdown(0).await.is_err() {
                    break;
                }
                drain_until = Some(Instant::now() + limits.drain_timeout);
            }
            () = requests.wait(), if drain_until.is_some() => break,
            () = sleep_until(drain_until.unwrap_or_else(Instant::now)), if drain_until.is_some() => break,
        }
    }
    // Dropping h3 closes the connection and whatever is still on its way with it.
    timeout(LINGER, connection.closed()).await.ok();
}

async fn lost(connection: quinn::Connection) {
    connection.closed().await;
}

type Resolver = RequestResolver<Connection, Bytes>;
type Answer = RequestStream<Send, Bytes>;

/// Reads one request's head, has the router answer it, and sends the answer.
async fn answer(resolver: Resolver, router: axum::Router, peer: Peer, services: Arc<Services>) {
    let limits = &services.limits;
    let deadline = Instant::now() + limits.request_timeout;
    let (request, stream) = match timeout_at(deadline, resolver.resolve_request()).await {
        Ok(Ok(resolved)) => resolved,
        Ok(Err(error)) => {
            services.stats.count(Count::requests_refused);
            return debug!(%error, "refused a request for its head");
        }
        Err(_) => {
            services.stats.count(Count::requests_refused);
            return debug!("a request's head did not arrive in time");
        }
    };
    let (mut send, recv) = stream.split();
    let announced = announced_length(&request);
    let length = announced.unwrap_or_default();
    let (body, failure) = RequestBody::new(recv, limits.max_body_bytes, length, deadline);
    let response = if let Err(detail) = announced {
        drop(body);
        services.stats.count(Count::requests_refused);
        problem(&Problem::new(400, "malformed_request", detail, "Send what HTTP/3 allows."))
    } else if length.is_some_and(|length| length > limits.max_body_bytes as u64) {
        drop(body);
        services.stats.count(Count::requests_refused);
        refusal(Failure::TooLarge, limits)
    } else {
        services.stats.count(Count::requests);
        let mut request = request.map(|()| Body::new(body));
        request.extensions_mut().insert(peer);
        let response = match AssertUnwindSafe(router.oneshot(request)).catch_unwind().await {
            Ok(Ok(response)) => response,
            Err(_) => {
                services.stats.count(Count::panics);
                error!("a request's handler panicked");
                internal_error()
            }
        };
        match failure.get() {
            // Whatever the handler made of a body that broke off, this is what was wrong with it.
            Some(failure @ (Failure::TooLarge | Failure::TooSlow)) if !response.status().is_success() => {
                services.stats.count(Count::requests_refused);
                refusal(*failure, limits)
            }
            // Also where the handler did not look at the body: such a request is malformed.
            Some(Failure::WrongLength) => {
                services.stats.count(Count::requests_refused);
                refusal(Failure::WrongLength, limits)
            }
            _ => response,
        }
    };
    if let Err(error) = respond(&mut send, response, limits.request_timeout).await {
        debug!(%error, "the peer did not read a response");
    }
}

/// Sends a response as its body makes it. Each piece must be taken within `patience`; the body may take its time.
async fn respond(send: &mut Answer, response: Response<Body>, patience: Duration) -> Result<(), NotTaken> {
    let (parts, mut body) = response.into_parts();
    within(patience, send.send_response(Response::from_parts(parts, ()))).await?;
    while let Some(frame) = body.frame().await {
        let frame = match frame {
            Ok(frame) => frame,
            Err(error) => {
                debug!(%error, "a response's body ended early");
                send.stop_stream(Code::H3_INTERNAL_ERROR);
                return Ok(());
            }
        };
        match frame.into_data() {
            // An empty piece is nothing to say, and h3 clients take an empty DATA frame for the end.
            Ok(data) if data.is_empty() => {}
            Ok(data) => {
                if let Err(error) = within(patience, send.send_data(data)).await {
                    send.stop_stream(Code::H3_REQUEST_CANCELLED);
                    return Err(error);
                }
            }
            Err(frame) => {
                if let Ok(trailers) = frame.into_trailers() {
                    return within(patience, send.send_trailers(trailers)).await;
                }
            }
        }
    }
    within(patience, send.finish()).await
}

async fn within(
    patience: Duration,
    work: impl Future<Output = Result<(), h3::error::StreamError>>,
) -> Result<(), NotTaken> {
    timeout(patience, work).await.map_err(|_| NotTaken::Unread)?.map_err(NotTaken::Stream)
}

/// Why an answer did not reach its peer.
#[derive(Debug, thiserror::Error)]
enum NotTaken {
    #[error("the peer does not read it")]
    Unread,
    #[error(transparent)]
    Stream(h3::error::StreamError),
}

/// The answer to a body that broke a limit.
fn refusal(failure: Failure, limits: &Limits) -> Response<Body> {
    problem(&match failure {
        Failure::TooLarge => Problem::new(
            413,
            "body_too_large",
            format!("the request body is longer than {} bytes", limits.max_body_bytes),
            "Send a smaller document.",
        ),
        Failure::TooSlow => Problem::new(
            408,
            "request_too_slow",
            format!("the request did not arrive within {} s", limits.request_timeout.as_secs_f32()),
            "Send the whole request at once.",
        ),
        Failure::BrokenOff => Problem::new(400, "body_broken_off", "the request body ended early", ""),
        Failure::WrongLength => Problem::new(
            400,
            "malformed_request",
            "the request body is not as long as `content-length` says",
            "Send as many bytes as are announced.",
        ),
    })
}

fn internal_error() -> Response<Body> {
    problem(&Problem::new(
        500,
        "internal_error",
        "could not answer the request",
        "This is a bug in mvm; its log says more.",
    ))
}

fn problem(problem: &Problem) -> Response<Body> {
    let body = serde_json::to_vec(problem).unwrap_or_default();
    let mut response = Response::new(Body::from(body));
    *response.status_mut() =
        StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, header::HeaderValue::from_static(PROBLEM_MEDIA_TYPE));
    response
}
