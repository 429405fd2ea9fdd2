//! An HTTP/3 client: one connection, any number of requests, each with a deadline.
//!
//! A task drives the connection; requests and the bodies of their responses keep it alive, so a body can be read after
//! its client is gone.

mod body;

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures::future::poll_fn;
use h3::client::{RequestStream, SendRequest};
use h3::error::{Code, StreamError};
use http::uri::{Authority, Scheme};
use http::{Request, Response, Uri};
use mvm_pki::Identity;
use tokio::time::timeout;
use tracing::debug;

use crate::ALPN_H3;
use crate::connect::{ConnectError, Dialled, dial};
use crate::h3_streams::{Bidi, Connection, Opener};
use crate::limits::Limits;
pub use body::ResponseBody;

/// How long [`Client::close`] waits for the farewell to leave.
const FAREWELL: Duration = Duration::from_millis(20);

/// Pieces in which a body is handed to the connection, so that a large one is not copied whole before it leaves.
const PIECE_BYTES: usize = 64 * 1024;

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
    #[error("lost the connection: {0}")]
    Lost(String),
    #[error("the peer reset the request ({0})")]
    Reset(String),
}

impl From<StreamError> for RequestError {
    fn from(error: StreamError) -> Self {
        match error {
            StreamError::RemoteTerminate { code, .. } => Self::Reset(code.to_string()),
            StreamError::HeaderTooBig { actual_size, max_size, .. } => {
                Self::Unsendable(format!("its headers are {actual_size} bytes long, the limit is {max_size}"))
            }
            other => Self::Lost(other.to_string()),
        }
    }
}

/// An HTTP/3 connection to one server.
#[derive(Debug)]
pub struct Client {
    shared: Arc<Shared>,
    peer: Identity,
}

/// What a client and its responses' bodies share; the connection ends with the last of them.
struct Shared {
    endpoint: quinn::Endpoint,
    connection: quinn::Connection,
    requests: SendRequest<Opener, Bytes>,
    authority: Authority,
    request_timeout: Duration,
}

impl std::fmt::Debug for Shared {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Shared").field("authority", &self.authority).finish_non_exhaustive()
    }
}

impl Client {
    /// Dials and waits until both sides have verified each other. `tls` comes from `mvm_pki::tls`; its ALPN is set here.
    pub async fn connect(
        addr: SocketAddr,
        server_name: &str,
        tls: rustls::ClientConfig,
        limits: &Limits,
    ) -> Result<Self, ConnectError> {
        let authority = authority_of(server_name, addr.port())?;
        let Dialled { endpoint, connection, peer } =
            Box::pin(dial(addr, server_name, tls, ALPN_H3, limits)).await?;
        let streams = Connection::new(connection.clone(), limits.max_header_bytes);
        let mut builder = h3::client::builder();
        builder.max_field_section_size(limits.max_header_bytes as u64).send_grease(false);
        let built = timeout(limits.handshake_timeout, builder.build(streams)).await;
        let (mut driver, requests) = match built {
            Ok(Ok(built)) => built,
            Ok(Err(error)) => return Err(ConnectError::Failed { address: addr, reason: error.to_string() }),
            Err(_) => return Err(ConnectError::TimedOut { address: addr, waited: limits.handshake_timeout }),
        };
        tokio::spawn(async move {
            let ended = poll_fn(|cx| driver.poll_close(cx)).await;
            debug!(%ended, "an HTTP/3 connection ended");
        });
        let request_timeout = limits.request_timeout;
        Ok(Self {
            shared: Arc::new(Shared { endpoint, connection, requests, authority, request_timeout }),
            peer,
        })
    }

    /// Sends a request and waits for the response's headers; the body follows as it is read. A URI may be a path only.
    pub async fn request(&self, request: Request<Bytes>) -> Result<Response<ResponseBody>, RequestError> {
        let waited = self.shared.request_timeout;
        match timeout(waited, Box::pin(self.exchange(request))).await {
            Ok(answered) => answered,
            Err(_) => Err(RequestError::TimedOut { waited }),
        }
    }

    async fn exchange(&self, request: Request<Bytes>) -> Result<Response<ResponseBody>, RequestError> {
        let (mut parts, body) = request.into_parts();
        parts.uri = self.absolute(parts.uri)?;
        let mut requests = self.shared.requests.clone();
        let mut stream = requests.send_request(Request::from_parts(parts, ())).await?;
        match send_body(&mut stream, body).await {
            // The server has heard enough, and says why in its answer.
            Ok(()) | Err(StreamError::RemoteTerminate { .. }) => {}
            Err(error) => return Err(error.into()),
        }
        let response = stream.recv_response().await?;
        Ok(response.map(|()| ResponseBody::new(stream, Arc::clone(&self.shared))))
    }

    /// HTTP/3 sends scheme and authority with every request.
    fn absolute(&self, uri: Uri) -> Result<Uri, RequestError> {
        let mut parts = uri.into_parts();
        parts.scheme.get_or_insert(Scheme::HTTPS);
        parts.authority.get_or_insert_with(|| self.shared.authority.clone());
        Uri::from_parts(parts).map_err(|error| RequestError::Unsendable(error.to_string()))
    }

    /// Who answers, from its verified certificate.
    #[must_use]
    pub fn peer(&self) -> &Identity {
        &self.peer
    }

    /// Whether the connection has ended; a new request would fail.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.connection.close_reason().is_some()
    }

    /// Closes the connection, also under bodies that are still being read, and lets the peer know.
    pub async fn close(self) {
        let code = quinn::VarInt::from_u64(Code::H3_NO_ERROR.value()).unwrap_or_default();
        self.shared.connection.close(code, b"done");
        timeout(FAREWELL, self.shared.endpoint.wait_idle()).await.ok();
    }
}

async fn send_body(stream: &mut RequestStream<Bidi, Bytes>, mut body: Bytes) -> Result<(), StreamError> {
    while !body.is_empty() {
        stream.send_data(body.split_to(body.len().min(PIECE_BYTES))).await?;
    }
    stream.finish().await
}

fn authority_of(server_name: &str, port: u16) -> Result<Authority, ConnectError> {
    let host = if server_name.contains(':') { format!("[{server_name}]") } else { server_name.to_owned() };
    let name = || ConnectError::ServerName { name: server_name.to_owned() };
    format!("{host}:{port}").parse().map_err(|_| name())
}
