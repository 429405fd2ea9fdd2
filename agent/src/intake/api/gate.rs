//! What every request passes before its handler: who is it, is it asking too often, may it ask this.

use std::time::{Duration, Instant};

use axum::body::{Body, HttpBody as _};
use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use futures::StreamExt as _;
use http::{HeaderValue, header};
use mvm_pki::Role;
use mvm_proto::Problem;
use mvm_telemetry::Route;
use mvm_transport::Peer;
use tracing::{debug, warn};

use super::problem::{self, Refused};
use super::{ANSWER_DEADLINE, Api};
use crate::intake::authz::{Caller, Rule};

/// The label of requests that no route took.
const UNMATCHED: &str = "unmatched";

/// The listener that a request came through, which decides how its caller is identified.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Listener {
    /// HTTP/3 with mutual TLS: known by its certificate.
    Network,
    /// The unix socket: known by having been able to open it.
    Local,
}

/// Puts the [`Caller`] on the request. Outermost, so that nothing runs for a caller without a name.
pub(super) async fn name_caller(listener: Listener, mut request: Request, next: Next) -> Response {
    let caller = match listener {
        Listener::Local => Caller::Local,
        Listener::Network => match request.extensions().get::<Peer>() {
            Some(Peer { identity: Some(identity), .. }) => Caller::Certified(identity.clone()),
            _ => Caller::Unknown,
        },
    };
    request.extensions_mut().insert(caller);
    next.run(request).await
}

fn caller_of(request: &Request) -> Caller {
    request.extensions().get().cloned().unwrap_or(Caller::Unknown)
}

/// Holds the peer to its rate and the handler to its deadline, and counts the answer.
pub(super) async fn admit(State(api): State<Api>, request: Request, next: Next) -> Response {
    let caller = caller_of(&request);
    let peer = request.extensions().get::<Peer>().cloned();
    // Before the rate: a removed certificate must not use up what its successor of the same name has. As often as it
    // likes, therefore no warning.
    if is_removed(&api, &request) {
        debug!(caller = %caller.describe(), "refused a removed operator");
        return removed(&caller).into_response();
    }
    let response = match take_token(&api, &caller) {
        Err(limited) => {
            debug!(caller = %caller.describe(), "asked too often");
            too_many_requests(limited)
        }
        // What moves an instance has limits of its own: on how long nothing may come or be taken.
        Ok(()) if Rule::is_long(request.uri().path()) => next.run(request).await,
        Ok(()) => match tokio::time::timeout(ANSWER_DEADLINE, next.run(request)).await {
            Ok(response) => response,
            Err(_) => problem::timed_out().into_response(),
        },
    };
    let response = end_with_removal(&api, peer, response);
    // Carried from `authorise` on the response.
    let route = response.extensions().get::<&'static Rule>().map_or(UNMATCHED, |rule| rule.path);
    api.shared.metrics.request(route, response.status().as_u16());
    response
}

/// An error says how long to wait.
fn take_token(api: &Api, caller: &Caller) -> Result<(), Duration> {
    if *caller == Caller::Local {
        return Ok(());
    }
    api.shared.limit.take(caller.clone(), Instant::now())
}

fn is_removed(api: &Api, request: &Request) -> bool {
    let Some(Peer { identity: Some(identity), certificate, .. }) = request.extensions().get::<Peer>() else {
        return false;
    };
    api.shared.removed_operators.refuses(identity, certificate.as_ref())
}

fn removed(caller: &Caller) -> Refused {
    let detail = format!("{} was removed from the cluster, or this certificate of it was", caller.describe());
    let remediation =
        "Make a new certificate on the coordinator's machine: `mvm coordinator operator create`.";
    Refused(Problem::new(403, "operator_removed", detail, remediation))
}

/// An answer that goes on for as long as its caller listens ends when that operator is removed.
fn end_with_removal(api: &Api, peer: Option<Peer>, response: Response) -> Response {
    let Some(Peer { identity: Some(identity), certificate, .. }) = peer else { return response };
    if identity.role() != Role::Operator || response.body().size_hint().exact().is_some() {
        return response;
    }
    let api = api.clone();
    let removal = async move { api.shared.removed_operators.refused(identity, certificate).await };
    response.map(|body| Body::from_stream(body.into_data_stream().take_until(Box::pin(removal))))
}

fn too_many_requests(retry_after: Duration) -> Response {
    // Whole seconds, rounded up: a client that waits this long is let through.
    let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
    let detail = format!("this peer exceeds its request rate; the next call is allowed in {seconds} s");
    let remediation = "Wait as long as Retry-After says, and use /v1/node/watch instead of polling.";
    let mut response = Refused(Problem::new(429, "too_many_requests", detail, remediation)).into_response();
    response.headers_mut().insert(header::RETRY_AFTER, HeaderValue::from(seconds));
    response
}

/// Asks the route's row of the table whether this caller may go on.
pub(super) async fn authorise(State(rule): State<&'static Rule>, request: Request, next: Next) -> Response {
    let caller = caller_of(&request);
    let mut response = if rule.permits(&caller) {
        next.run(request).await
    } else {
        warn!(caller = %caller.describe(), method = %rule.method, route = rule.path, "forbidden");
        forbidden(rule, &caller).into_response()
    };
    response.extensions_mut().insert(rule);
    response.extensions_mut().insert(Route(rule.path.to_owned()));
    response
}

fn forbidden(rule: &Rule, caller: &Caller) -> Refused {
    let detail = format!("{} may not call {} {}", caller.describe(), rule.method, rule.path);
    let roles: Vec<String> = rule.allows.iter().map(ToString::to_string).collect();
    let remediation = match roles.is_empty() {
        true => "Call over the node's own unix socket.".to_owned(),
        false => format!("Call with a certificate of role {}.", roles.join(" or ")),
    };
    Refused(Problem::new(403, "forbidden", detail, remediation))
}
