//! Who makes a request, found out before any service sees it: by the connection's certificate, or by an API key.

use std::sync::Arc;
use std::task::{Context, Poll};

use futures::future::BoxFuture;
use http::{HeaderMap, Request, header};
use mvm_pki::Role;
use mvm_proto::Problem;
use mvm_proto::object::KeyRole;
use tower::Service;

use crate::grpc_listener::GrpcPeer;
use crate::objects::{Caller, caller_of_key};
use crate::refuse;
use crate::state::State;
use crate::stored::now;

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

impl<S, B> Service<Request<B>> for Identify<S>
where
    S: Service<Request<B>> + Clone + Send + 'static,
    S::Future: Send,
    B: Send + 'static,
{
    type Response = S::Response;
    type Error = S::Error;
    type Future = BoxFuture<'static, Result<S::Response, S::Error>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<B>) -> Self::Future {
        // The one that is ready answers; its clone waits for the next request.
        let next = self.inner.clone();
        let mut inner = std::mem::replace(&mut self.inner, next);
        let state = Arc::clone(&self.state);
        Box::pin(async move {
            let peer = request.extensions().get::<GrpcPeer>().cloned();
            let caller = identify(&state, peer.as_ref(), request.headers()).await;
            request.extensions_mut().insert(Identified(caller));
            inner.call(request).await
        })
    }
}

/// What a request was identified by, for those that last.
#[derive(Debug, Clone)]
pub(super) struct Credential {
    peer: Option<GrpcPeer>,
    headers: HeaderMap,
}

impl Credential {
    pub(super) fn of(extensions: &http::Extensions, metadata: &tonic::metadata::MetadataMap) -> Self {
        let mut headers = HeaderMap::new();
        if let Some(value) = metadata.as_ref().get(header::AUTHORIZATION) {
            headers.insert(header::AUTHORIZATION, value.clone());
        }
        Self { peer: extensions.get::<GrpcPeer>().cloned(), headers }
    }

    /// Whether it is still accepted.
    pub(super) async fn check(&self, state: &State) -> Result<Caller, Problem> {
        identify(state, self.peer.as_ref(), &self.headers).await
    }
}

/// Asked for every request, so that what was revoked ends what open connections can do.
async fn identify(state: &State, peer: Option<&GrpcPeer>, headers: &HeaderMap) -> Result<Caller, Problem> {
    let peer = peer.ok_or_else(refuse::no_certificate)?;
    let address = peer.address.ip().to_string();
    if let Some((identity, certificate)) = &peer.proven {
        state.operators.check(identity, Some(&certificate.fingerprint), now())?;
        // No other role has a connection here.
        if identity.role() != Role::Operator {
            return Err(refuse::wrong_role(&identity.to_string(), "operator"));
        }
        let name = format!("operator/{}", identity.name());
        return Ok(Caller { name, role: KeyRole::Admin, tenant: None, address });
    }
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| value.to_str().ok());
    let text =
        bearer.and_then(|value| value.strip_prefix("Bearer ").or_else(|| value.strip_prefix("bearer ")));
    let text = text.ok_or_else(refuse::no_credential)?;
    caller_of_key(&state.store, text.trim(), address, now()).await
}
