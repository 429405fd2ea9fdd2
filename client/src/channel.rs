//! A connection to a coordinator, with the trace that the calls on it belong to.

use std::task::{Context, Poll};

use http::{HeaderValue, Request, Response};
use mvm_proto::TraceContext;
use mvm_proto::trace::TRACEPARENT;
use tonic::body::Body;
use tonic::transport::channel::ResponseFuture;
use tower::Service;

/// What generated clients call through. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Channel {
    inner: tonic::transport::Channel,
    traceparent: Option<HeaderValue>,
}

impl Channel {
    /// The same connection, for calls of one trace.
    #[must_use]
    pub fn of_trace(self, context: TraceContext) -> Self {
        Self { traceparent: HeaderValue::from_str(&context.to_string()).ok(), ..self }
    }
}

impl From<tonic::transport::Channel> for Channel {
    fn from(inner: tonic::transport::Channel) -> Self {
        Self { inner, traceparent: None }
    }
}

impl Service<Request<Body>> for Channel {
    type Response = Response<Body>;
    type Error = tonic::transport::Error;
    type Future = ResponseFuture;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        Service::poll_ready(&mut self.inner, cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(traceparent) = &self.traceparent {
            request.headers_mut().insert(TRACEPARENT, traceparent.clone());
        }
        Service::call(&mut self.inner, request)
    }
}
