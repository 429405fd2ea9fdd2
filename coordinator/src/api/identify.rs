//! Who makes a request, found out before any service sees it: by the connection's certificate, or by an API key. A request that
//! is under way, such as a watch, ends when that certificate or key counts no more.

use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, header};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Full};
use mvm_pki::Role;
use mvm_proto::Problem;
use mvm_proto::object::KeyRole;
use mvm_proto::problem::PROBLEM_MEDIA_TYPE;
use tower::Service;

use crate::grpc_listener::GrpcPeer;
use crate::key_calls::KeyCall;
use crate::objects::{Caller, caller_of_key};
use crate::refuse;
use crate::state::State;
use crate::stored::now;

/// The longest that is waited for the end of a credential before its time is looked at again: clocks are put right.
const LOOK_AGAIN: Duration = Duration::from_secs(3600);

/// A request that ends its own credential is answered still.
const LAST_ANSWER: Duration = Duration::from_millis(250);
/// After the store could not say whether it counts.
const RETRY: Duration = Duration::from_secs(1);

/// In every request's extensions: its caller, or why there is none.
#[derive(Debug, Clone)]
pub(crate) struct Identified(pub(crate) Result<Caller, Problem>);

#[derive(Clone)]
pub(super) struct Identify<S> {
    inner: S,
    state: Arc<State>,
}

impl<S> Identify<S> {
    pub(super) fn new(inner: S, state: Arc<State>) -> Self {
        Self { inner, state }
    }
}

impl<S, B, A> Service<Request<B>> for Identify<S>
where
    S: Service<Request<B>, Response = Response<A>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
    A: Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<UnsyncBoxBody<Bytes, A::Error>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // The one that is ready answers; its clone waits for the next request.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let state = Arc::clone(&self.state);
        Box::pin(async move {
            let shown = Credential::shown(request.extensions(), request.headers());
            let is_grpc = is_grpc(request.headers());
            // Before it is judged, so that no revocation falls between.
            let revocations = state.revocations.subscribe();
            let (caller, slot) = match shown.check(&state).await {
                Ok(caller) => match state.key_calls.begin(&caller) {
                    Ok(slot) => (Ok(caller), slot),
                    Err(problem) => (Err(problem), None),
                },
                Err(problem) => (Err(problem), None),
            };
            request.extensions_mut().insert(Identified(caller.clone()));
            let answering = inner.call(request);
            let Ok(caller) = caller else { return Ok(answering.await?.map(UnsyncBoxBody::new)) };
            let mut ended: BoxFuture<'static, Problem> = Box::pin(ended(state, shown, caller, revocations));
            let answer = tokio::select! {
                biased;
                answer = answering => answer?,
                problem = &mut ended => return Ok(refusal(&problem, is_grpc)),
            };
            let what = if is_grpc { Stream::Grpc } else { Stream::of(answer.headers()) };
            Ok(answer.map(|body| {
                Ending { body: body.boxed_unsync(), ended, what, is_over: false, _slot: slot }.boxed_unsync()
            }))
        })
    }
}

fn is_grpc(headers: &HeaderMap) -> bool {
    let media = headers.get(header::CONTENT_TYPE);
    media.is_some_and(|media| media.as_bytes().starts_with(b"application/grpc"))
}

/// What a request was identified by, for those that last.
#[derive(Debug, Clone)]
pub(super) struct Credential {
    peer: Option<GrpcPeer>,
    key: Option<HeaderValue>,
}

impl Credential {
    pub(super) fn of(extensions: &http::Extensions, metadata: &tonic::metadata::MetadataMap) -> Self {
        Self::shown(extensions, metadata.as_ref())
    }

    fn shown(extensions: &http::Extensions, headers: &HeaderMap) -> Self {
        let peer = extensions.get::<GrpcPeer>().cloned();
        Self { peer, key: headers.get(header::AUTHORIZATION).cloned() }
    }

    /// Asked for every request, so that what was revoked ends what open connections can do.
    pub(super) async fn check(&self, state: &State) -> Result<Caller, Problem> {
        let peer = self.peer.as_ref().ok_or_else(refuse::no_certificate)?;
        let address = peer.address.ip().to_string();
        if let Some((identity, certificate)) = &peer.proven {
            state.operators.check(identity, Some(&certificate.fingerprint), now())?;
            // No other role has a connection here.
            if identity.role() != Role::Operator {
                return Err(refuse::wrong_role(&identity.to_string(), "operator"));
            }
            // A connection may last longer than the certificate that it was made with.
            if certificate.not_after <= now() {
                return Err(refuse::expired_certificate());
            }
            let (name, until) = (format!("operator/{}", identity.name()), Some(certificate.not_after));
            return Ok(Caller { name, role: KeyRole::Admin, tenant: None, address, until });
        }
        let bearer = self.key.as_ref().and_then(|value| value.to_str().ok());
        let text =
            bearer.and_then(|value| value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")));
        let text = text.ok_or_else(refuse::no_credential)?;
        caller_of_key(&state.store, text.trim(), address, now()).await
    }
}

/// Waits until what a request came with counts no more.
pub(super) async fn ended(
    state: Arc<State>,
    shown: Credential,
    mut caller: Caller,
    mut revocations: tokio::sync::watch::Receiver<u64>,
) -> Problem {
    loop {
        let left = caller.until.map_or(LOOK_AGAIN, |until| until.since(now()).min(LOOK_AGAIN));
        tokio::select! {
            changed = revocations.changed() => if changed.is_err() {
                return refuse::stopping();
            },
            () = tokio::time::sleep(left) => {}
        }
        match shown.check(&state).await {
            Ok(now) => caller = now,
            // A store that can't be read has revoked nothing.
            Err(problem) if problem.status >= 500 => tokio::time::sleep(RETRY).await,
            Err(problem) => {
                tokio::time::sleep(LAST_ANSWER).await;
                return problem;
            }
        }
    }
}

/// A problem as the whole answer.
fn refusal<E: 'static>(problem: &Problem, is_grpc: bool) -> Response<UnsyncBoxBody<Bytes, E>> {
    let body = |bytes: Bytes| Full::new(bytes).map_err(|never| match never {}).boxed_unsync();
    if is_grpc {
        return refuse::status(problem).into_http::<Full<Bytes>>().map(|_| body(Bytes::new()));
    }
    let mut response = Response::new(body(serde_json::to_vec(problem).unwrap_or_default().into()));
    *response.status_mut() =
        StatusCode::from_u16(problem.status).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static(PROBLEM_MEDIA_TYPE));
    response
}

/// What an answer is that may go on without end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Stream {
    Grpc,
    /// Server-sent events.
    Events,
    /// None: it is whole already.
    No,
}

impl Stream {
    fn of(headers: &HeaderMap) -> Self {
        let media = headers.get(header::CONTENT_TYPE);
        let is_events = media.is_some_and(|media| media.as_bytes().starts_with(b"text/event-stream"));
        if is_events { Self::Events } else { Self::No }
    }

    /// The last that is told.
    fn last(self, problem: &Problem) -> Option<Frame<Bytes>> {
        match self {
            Self::Grpc => {
                let mut trailers = HeaderMap::new();
                refuse::status(problem).add_header(&mut trailers).ok()?;
                Some(Frame::trailers(trailers))
            }
            Self::Events => {
                let data = serde_json::to_string(problem).ok()?;
                Some(Frame::data(format!("event: error\ndata: {data}\n\n").into()))
            }
            Self::No => None,
        }
    }
}

/// The body of an answer, which ends with the credential that was shown for it.
struct Ending<E> {
    body: UnsyncBoxBody<Bytes, E>,
    ended: BoxFuture<'static, Problem>,
    what: Stream,
    is_over: bool,
    /// For as long as the answer is sent.
    _slot: Option<KeyCall>,
}

impl<E> Body for Ending<E> {
    type Data = Bytes;
    type Error = E;

    fn poll_frame(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, E>>> {
        let this = self.get_mut();
        if this.is_over {
            return Poll::Ready(None);
        }
        if this.what != Stream::No
            && let Poll::Ready(problem) = this.ended.as_mut().poll(cx)
        {
            this.is_over = true;
            return Poll::Ready(this.what.last(&problem).map(Ok));
        }
        Poll::Ready(ready!(Pin::new(&mut this.body).poll_frame(cx)))
    }

    fn is_end_stream(&self) -> bool {
        self.is_over || self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        if self.what == Stream::No { self.body.size_hint() } else { SizeHint::new() }
    }
}
