//! A span for every request to a server: a layer around all of its services.
//!
//! It reads the caller's `traceparent`, and answers with one that names this request's span, recorded or not. A request is named
//! by its route, never by its path: what answers it says which ([`Route`]). A gRPC call's path is its method, which is told
//! where there is such a method. Probes of health are not told.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{HeaderMap, HeaderValue, Method, Request, Response, header};
use mvm_proto::TraceContext;
use mvm_proto::trace::TRACEPARENT;
use parking_lot::Mutex;
use tower::Service;
use tracing::Instrument as _;

use crate::current;
use crate::span::{Attribute, Kind, Span, Tracer};

/// In an answer's extensions: the route that was taken, with the names of its parameters in place of what a caller wrote.
#[derive(Debug, Clone)]
pub struct Route(pub String);

/// What is asked all day and says nothing.
const PROBES: [&str; 4] = ["/healthz", "/readyz", "/livez", "/metrics"];
const GRPC_PROBES: &str = "grpc.health.v1.Health/";
/// gRPC's word for a method that there is not.
const UNIMPLEMENTED: &str = "12";

/// What the log's lines of a request say of it.
pub type LogSpan = fn(&TraceContext) -> tracing::Span;

#[derive(Debug, Clone)]
pub struct TraceRequests<S> {
    inner: S,
    tracer: Tracer,
    log: LogSpan,
}

impl<S> TraceRequests<S> {
    pub fn new(inner: S, tracer: Tracer, log: LogSpan) -> Self {
        Self { inner, tracer, log }
    }
}

impl<S, B, A> Service<Request<B>> for TraceRequests<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
    S::Error: Send,
    A: Send,
{
    type Response = Response<A>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let span = self.tracer.begin(Kind::Server, "request", caller_of(request.headers()));
        let log = span.context().map_or_else(tracing::Span::none, |context| (self.log)(&context));
        let span = Arc::new(Mutex::new(span));
        let asked = Asked::of(&request);
        // What it does before its future is polled belongs to the request as well.
        let answering = self.inner.call(request);
        Box::pin(async move {
            let mut answer = current::within(Arc::clone(&span), answering).instrument(log).await?;
            let mut span = span.lock();
            if let Some(context) = span.context()
                && let Ok(value) = HeaderValue::from_str(&context.to_string())
            {
                answer.headers_mut().insert(TRACEPARENT, value);
            }
            let is_told = asked.tell(&mut span, &answer);
            let ended = std::mem::replace(&mut *span, Tracer::default().begin(Kind::Server, "", None));
            drop(span);
            if !is_told {
                ended.discard();
            }
            Ok(answer)
        })
    }
}

/// The caller's context, where it has sent one and no more.
fn caller_of(headers: &HeaderMap) -> Option<TraceContext> {
    let mut values = headers.get_all(TRACEPARENT).iter();
    let value = values.next().filter(|_| values.next().is_none())?;
    TraceContext::parse(value.to_str().ok()?)
}

/// What is kept of a request until it is answered.
struct Asked {
    method: Method,
    /// Of a gRPC call: its service and method.
    call: Option<String>,
}

impl Asked {
    fn of<B>(request: &Request<B>) -> Self {
        let media = request.headers().get(header::CONTENT_TYPE);
        let is_grpc = media.is_some_and(|media| media.as_bytes().starts_with(b"application/grpc"));
        let call = is_grpc.then(|| request.uri().path().trim_start_matches('/').to_owned());
        Self { method: request.method().clone(), call }
    }

    /// Says of the span what the answer shows. False: it is to be told to nobody.
    fn tell<A>(self, span: &mut Span, answer: &Response<A>) -> bool {
        if let Some(call) = self.call {
            let status = answer.headers().get("grpc-status").and_then(|status| status.to_str().ok());
            let status = status.unwrap_or("0");
            let call = if status == UNIMPLEMENTED { "unknown".to_owned() } else { call };
            if call.starts_with(GRPC_PROBES) {
                return false;
            }
            span.set(Attribute::RpcMethod, call.as_str());
            span.set(Attribute::RpcStatus, status.parse().unwrap_or(2_i64));
            span.rename(call);
            return true;
        }
        let route = answer.extensions().get::<Route>().map_or("unknown", |route| route.0.as_str());
        if PROBES.contains(&route) {
            return false;
        }
        // Of the methods that there are: others are a caller's own words.
        let known = [Method::GET, Method::POST, Method::PUT, Method::PATCH, Method::DELETE, Method::HEAD];
        let method = known.iter().find(|known| **known == self.method).map_or("_OTHER", Method::as_str);
        span.set(Attribute::HttpMethod, method);
        span.set(Attribute::HttpRoute, route);
        span.set(Attribute::HttpStatus, i64::from(answer.status().as_u16()));
        span.rename(format!("{method} {route}"));
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GOOD: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_request_with_two_contexts_or_a_bad_one_has_none() {
        let mut headers = HeaderMap::new();
        assert_eq!(caller_of(&headers), None);
        headers.append(TRACEPARENT, HeaderValue::from_static(GOOD));
        assert_eq!(caller_of(&headers).unwrap().to_string(), GOOD);
        headers.append(TRACEPARENT, HeaderValue::from_static(GOOD));
        assert_eq!(caller_of(&headers), None);
        headers.insert(TRACEPARENT, HeaderValue::from_bytes(b"00-\xff").unwrap());
        assert_eq!(caller_of(&headers), None);
    }

    #[tokio::test]
    async fn what_answers_a_request_finds_its_span_and_the_answer_names_it() {
        let answer = |_: Request<()>| async {
            let mut answer = Response::new((current::context(), current::request_id()));
            answer.extensions_mut().insert(Route("/v1/{name}".to_owned()));
            Ok::<_, std::convert::Infallible>(answer)
        };
        let mut server =
            TraceRequests::new(tower::service_fn(answer), Tracer::default(), |_| tracing::Span::none());
        let request = Request::get("/v1/secret").header(TRACEPARENT, GOOD).body(()).unwrap();
        let answer = server.call(request).await.unwrap();
        assert_eq!(answer.headers()[TRACEPARENT], GOOD);
        assert_eq!(answer.body().0.unwrap().to_string(), GOOD);
        assert_eq!(answer.body().1.as_ref().unwrap().len(), 16);
        assert_eq!(current::context(), None);
    }
}
