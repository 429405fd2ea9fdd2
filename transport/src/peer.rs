//! Who is at the other end of a request, as far as the handshake proved it.

use std::net::SocketAddr;

use axum::extract::FromRequestParts;
use http::StatusCode;
use http::request::Parts;
use mvm_pki::identity::Identity;
use mvm_proto::Digest;

/// Put in every request's extensions, and an axum extractor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    /// From the verified certificate; `None` when the peer showed none and the server does not require one.
    pub identity: Option<Identity>,
    /// The fingerprint of that certificate: SHA-256 of its DER.
    pub certificate: Option<Digest>,
    pub address: SocketAddr,
}

impl<S: Sync> FromRequestParts<S> for Peer {
    type Rejection = StatusCode;

    /// Fails only when the router is served by something other than [`crate::Server`] that forgot to say who the peer is.
    async fn from_request_parts(parts: &mut Parts, _state: &S) -> Result<Self, StatusCode> {
        parts.extensions.get::<Self>().cloned().ok_or(StatusCode::INTERNAL_SERVER_ERROR)
    }
}
