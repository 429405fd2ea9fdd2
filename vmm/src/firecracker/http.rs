//! One connection to Firecracker's API: HTTP/1.1 over a unix socket, one request at a time.
//!
//! Hyper speaks HTTP; here are the deadline and the size limit of each answer, since the VMM at the other end is not
//! trusted, and the retries until a new process listens.

use std::error::Error;
use std::io;
use std::time::Duration;

use http_body_util::{BodyExt as _, Limited};
use hyper::body::Bytes;
use hyper::client::conn::http1::{self, SendRequest};
use hyper::{StatusCode, header};
use hyper_util::rt::TokioIo;
use mvm_proto::text::one_line;
use tokio::time::{Instant, sleep, timeout};

use super::request::Request;
use crate::run_files::Dial;

/// The longest answer is that to `GET /vm/config`; a few KiB.
const MAX_BODY_BYTES: usize = 256 * 1024;
/// The least that hyper takes.
const MAX_HEAD_BYTES: usize = 8 * 1024;
const JSON: &str = "application/json";

/// The socket appears some 10 ms after the spawn.
const FIRST_RETRY: Duration = Duration::from_millis(1);
const LAST_RETRY: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub(super) enum ApiError {
    #[error("could not connect to the API socket")]
    Connect(#[source] io::Error),
    /// The socket did not appear, or refused connections.
    #[error("no API socket within {0:?}")]
    NoSocket(Duration),
    /// It was cut off, too long, or no HTTP.
    #[error("could not read the answer to {call}")]
    Broken {
        call: String,
        #[source]
        cause: Box<dyn Error + Send + Sync>,
    },
    #[error("no answer to {call} within {waited:?}")]
    TimedOut { call: String, waited: Duration },
    /// Firecracker understood and said no.
    #[error("{call} was refused: {fault}")]
    Refused { call: String, status: u16, fault: String },
}

/// What a load that came too late is refused with; the only refused load after which the process lives on, besides
/// one that could not be read at all.
const LOAD_TOO_LATE: &str = "not allowed after configuring boot-specific resources";
const UNREADABLE: [&str; 2] = ["deserializ", "Invalid request"];

impl ApiError {
    /// Whether the process ends by itself after this: a snapshot that can't be loaded leaves nothing to go on with.
    #[must_use]
    pub(super) fn ends_the_process(&self) -> bool {
        match self {
            ApiError::Refused { call, fault, .. } => {
                call.ends_with("/snapshot/load")
                    && !fault.contains(LOAD_TOO_LATE)
                    && !UNREADABLE.iter().any(|word| fault.contains(word))
            }
            _ => false,
        }
    }
}

#[derive(Debug)]
pub(super) struct ApiClient {
    requests: SendRequest<String>,
}

impl ApiClient {
    /// Connects to a process that has been up for a while.
    pub(super) async fn connect(api: &Dial) -> Result<Self, ApiError> {
        let stream = api.connect().await.map_err(ApiError::Connect)?;
        let handshake = http1::Builder::new().max_buf_size(MAX_HEAD_BYTES).handshake(TokioIo::new(stream));
        let (requests, connection) =
            handshake.await.map_err(|cause| ApiError::Connect(io::Error::other(cause)))?;
        // It ends with this client, and its errors are those of the requests.
        tokio::spawn(connection);
        Ok(Self { requests })
    }

    /// Connects to one that was just started: its socket may not be there, or be there and not be listened on.
    pub(super) async fn connect_when_up(api: &Dial, limit: Duration) -> Result<Self, ApiError> {
        let deadline = Instant::now() + limit;
        let mut pause = FIRST_RETRY;
        loop {
            match Self::connect(api).await {
                Err(ApiError::Connect(cause)) if not_up_yet(&cause) => {}
                answer => return answer,
            }
            if Instant::now() + pause > deadline {
                return Err(ApiError::NoSocket(limit));
            }
            sleep(pause).await;
            pause = (pause * 2).min(LAST_RETRY);
        }
    }

    /// Sends one request and reads its answer's body; a refusal is an error.
    pub(super) async fn send(&mut self, request: &Request, limit: Duration) -> Result<Bytes, ApiError> {
        let call = || format!("{} {}", request.method, request.path);
        let answered = timeout(limit, self.exchange(request)).await;
        let answer = answered.map_err(|_| ApiError::TimedOut { call: call(), waited: limit })?;
        let (status, body) = answer.map_err(|cause| ApiError::Broken { call: call(), cause })?;
        if status.is_success() {
            return Ok(body);
        }
        Err(ApiError::Refused { call: call(), status: status.as_u16(), fault: fault_message(&body) })
    }

    async fn exchange(
        &mut self,
        request: &Request,
    ) -> Result<(StatusCode, Bytes), Box<dyn Error + Send + Sync>> {
        let mut http = hyper::Request::builder()
            .method(&request.method)
            .uri(&request.path)
            .header(header::HOST, "localhost")
            .header(header::ACCEPT, JSON);
        if request.body.is_some() {
            http = http.header(header::CONTENT_TYPE, JSON);
        }
        let http = http.body(request.body.clone().unwrap_or_default())?;
        self.requests.ready().await?;
        let answer = self.requests.send_request(http).await?;
        let status = answer.status();
        let body = Limited::new(answer.into_body(), MAX_BODY_BYTES).collect().await?;
        Ok((status, body.to_bytes()))
    }
}

fn not_up_yet(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// The words of a refusal, bounded.
fn fault_message(body: &[u8]) -> String {
    const LONGEST: usize = 1024;
    let parsed: Option<serde_json::Value> = serde_json::from_slice(body).ok();
    let said = parsed.as_ref().and_then(|value| value.get("fault_message")).and_then(|text| text.as_str());
    let text = said.map_or_else(|| String::from_utf8_lossy(body).into_owned(), str::to_owned);
    one_line(&text, LONGEST)
}

#[cfg(test)]
#[path = "http_tests.rs"]
mod tests;
