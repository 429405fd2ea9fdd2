//! Counts the calls under way on each gRPC connection, so that only an idle one is evicted.
//!
//! A layer around all services. A call begins with its head and ends when its answer, which may be a long stream, has
//! been sent or given up.

use std::task::{Context, Poll};

use bytes::Bytes;
use futures::future::BoxFuture;
use http::{Request, Response};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use tower::Service;

use super::GrpcPeer;
use crate::api::identify::Identified;

#[derive(Debug, Clone)]
pub(crate) struct CountCalls<S> {
    inner: S,
}

impl<S> CountCalls<S> {
    pub(crate) fn new(inner: S) -> Self {
        Self { inner }
    }
}

impl<S, B, A> Service<Request<B>> for CountCalls<S>
where
    S: Service<Request<B>, Response = Response<A>>,
    S::Future: Send + 'static,
    A: http_body::Body<Data = Bytes> + Send + 'static,
{
    type Response = Response<UnsyncBoxBody<Bytes, A::Error>>;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<Self::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        // A caller that is not known keeps no connection from others, however slowly it reads what it is told. A connection that
        // was evicted is about to end, and its calls with it.
        let is_known = matches!(request.extensions().get::<Identified>(), Some(Identified(Ok(_))));
        let peer = request.extensions().get::<GrpcPeer>().filter(|_| is_known);
        let busy = peer.and_then(|peer| peer.activity.begin());
        let answering = self.inner.call(request);
        Box::pin(async move {
            let answer = answering.await?;
            Ok(answer.map(|body| {
                let counted = body.map_frame(move |frame| {
                    let _until_the_body_ends = &busy;
                    frame
                });
                counted.boxed_unsync()
            }))
        })
    }
}
