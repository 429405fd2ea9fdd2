//! An HTTP/3 client: one connection, any number of requests, each with a deadline.

use std::net::SocketAddr;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use mvm_pki::identity::Identity;

use crate::connect::ConnectError;
use crate::limits::Limits;

/// Why a request got no answer.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RequestError {
    #[error("no answer within {waited:?}")]
    TimedOut { waited: Duration },
    #[error("the answer is longer than the limit of {limit} bytes")]
    TooLarge { limit: usize },
    #[error("the request can't be sent over HTTP/3: {0}")]
    Unsendable(String),
    #[error("the connection is lost: {0}")]
    Lost(String),
    #[error("the peer gave up on the request: {0}")]
    Reset(String),
}

/// An HTTP/3 connection to one server.
#[derive(Debug)]
pub struct Client {
    peer: Identity,
}

impl Client {
    /// Dials and waits until both sides have verified each other. `tls` comes from `mvm_pki::tls`; its ALPN is set here.
    pub async fn connect(
        _addr: SocketAddr,
        _server_name: &str,
        _tls: rustls::ClientConfig,
        _limits: &Limits,
    ) -> Result<Self, ConnectError> {
        todo!()
    }

    /// Sends a request and waits for the response's headers; the body follows as it is read.
    pub async fn request(
        &self,
        _request: http::Request<Bytes>,
    ) -> Result<http::Response<ResponseBody>, RequestError> {
        todo!()
    }

    /// Who answered, from its verified certificate.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// Closes the connection and waits until the peer was told.
    pub async fn close(self) {
        todo!()
    }
}

/// A response's body, read as it arrives.
#[derive(Debug)]
pub struct ResponseBody {}

impl ResponseBody {
    /// The next piece, or `None` at the end. Endless bodies have no deadline here.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, RequestError> {
        todo!()
    }

    /// The whole body, if it is at most `limit` bytes and arrives within the request timeout.
    pub async fn bytes(self, _limit: usize) -> Result<Bytes, RequestError> {
        todo!()
    }
}

impl http_body::Body for ResponseBody {
    type Data = Bytes;
    type Error = RequestError;

    fn poll_frame(
        self: Pin<&mut Self>,
        _cx: &mut Context<'_>,
    ) -> Poll<Option<Result<http_body::Frame<Bytes>, RequestError>>> {
        todo!()
    }
}
