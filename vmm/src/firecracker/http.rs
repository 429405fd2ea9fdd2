//! One connection to Firecracker's API: HTTP/1.1 over a unix socket, one request at a time.
//!
//! Only what Firecracker's own server says is understood: a status line, headers, a body of the length that was
//! announced. Whatever is longer, cut off or late is an error, for at the other end may be a process gone mad.

use std::io;
use std::time::Duration;

use mvm_proto::text::one_line;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::time::{Instant, sleep, timeout};

use super::request::Request;
use crate::run_files::Dial;

/// The longest answer is that to `GET /vm/config`; a few KiB.
const MAX_BODY_BYTES: usize = 256 * 1024;
const MAX_HEAD_BYTES: usize = 8 * 1024;

/// The socket appears some 10 ms after the spawn.
const FIRST_RETRY: Duration = Duration::from_millis(1);
const LAST_RETRY: Duration = Duration::from_millis(20);

#[derive(Debug, thiserror::Error)]
pub enum ApiError {
    #[error("could not connect to the API socket")]
    Connect(#[source] io::Error),
    /// The socket did not appear, or nobody listened on it.
    #[error("no API socket within {0:?}")]
    NoSocket(Duration),
    #[error("the API connection broke during {call}")]
    Broken {
        call: String,
        #[source]
        cause: io::Error,
    },
    #[error("no answer to {call} within {waited:?}")]
    TimedOut { call: String, waited: Duration },
    /// Firecracker understood and said no.
    #[error("{call} was refused: {fault}")]
    Refused { call: String, status: u16, fault: String },
    #[error("the answer to {call} makes no sense: {what}")]
    Nonsense { call: String, what: &'static str },
}

/// What a load that came too late is refused with; the only refused load after which the process lives on, besides
/// one that could not be read at all.
const LOAD_TOO_LATE: &str = "not allowed after configuring boot-specific resources";
const UNREADABLE: [&str; 2] = ["deserializ", "Invalid request"];

impl ApiError {
    /// Whether the process ends by itself after this: a snapshot that can't be loaded leaves nothing to go on with.
    #[must_use]
    pub fn ends_the_process(&self) -> bool {
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
pub struct ApiClient {
    stream: UnixStream,
}

impl ApiClient {
    /// Connects to a process that has been up for a while.
    pub async fn connect(api: &Dial) -> Result<Self, ApiError> {
        api.connect().await.map(|stream| Self { stream }).map_err(ApiError::Connect)
    }

    /// Connects to one that was just started: its socket may not be there, or be there and not be listened on.
    pub async fn connect_when_up(api: &Dial, limit: Duration) -> Result<Self, ApiError> {
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
    pub async fn send(&mut self, request: &Request, limit: Duration) -> Result<Vec<u8>, ApiError> {
        let call = || format!("{} {}", request.method.as_str(), request.path);
        let answered = timeout(limit, self.exchange(request)).await;
        let answer = answered.map_err(|_| ApiError::TimedOut { call: call(), waited: limit })?;
        let (status, body) = answer.map_err(|fault| fault.of(call()))?;
        if (200..300).contains(&status) {
            return Ok(body);
        }
        Err(ApiError::Refused { call: call(), status, fault: fault_message(&body) })
    }

    async fn exchange(&mut self, request: &Request) -> Result<(u16, Vec<u8>), Fault> {
        let mut text = format!(
            "{} {} HTTP/1.1\r\nHost: localhost\r\nAccept: application/json\r\n",
            request.method.as_str(),
            request.path
        );
        if let Some(body) = &request.body {
            text.push_str(&format!("Content-Type: application/json\r\nContent-Length: {}\r\n", body.len()));
        }
        text.push_str("\r\n");
        text.push_str(request.body.as_deref().unwrap_or_default());
        self.stream.write_all(text.as_bytes()).await?;
        self.answer().await
    }

    async fn answer(&mut self) -> Result<(u16, Vec<u8>), Fault> {
        let mut buffer = Vec::new();
        let head_end = loop {
            if let Some(at) = find(&buffer, b"\r\n\r\n") {
                break at;
            }
            if buffer.len() > MAX_HEAD_BYTES {
                return Err(Fault::Nonsense("its head does not end"));
            }
            self.more(&mut buffer).await?;
        };
        let (status, length) = parse_head(&buffer[..head_end])?;
        let mut body = buffer.split_off(head_end + 4);
        while body.len() < length {
            self.more(&mut body).await?;
        }
        if body.len() > length {
            return Err(Fault::Nonsense("it goes on after its end"));
        }
        Ok((status, body))
    }

    async fn more(&mut self, buffer: &mut Vec<u8>) -> Result<(), Fault> {
        if self.stream.read_buf(buffer).await? == 0 {
            return Err(Fault::Io(io::ErrorKind::UnexpectedEof.into()));
        }
        Ok(())
    }
}

fn not_up_yet(cause: &io::Error) -> bool {
    matches!(cause.kind(), io::ErrorKind::NotFound | io::ErrorKind::ConnectionRefused)
}

/// What is wrong with an answer, before it is known to what.
enum Fault {
    Io(io::Error),
    Nonsense(&'static str),
}

impl From<io::Error> for Fault {
    fn from(cause: io::Error) -> Self {
        Fault::Io(cause)
    }
}

impl Fault {
    fn of(self, call: String) -> ApiError {
        match self {
            Fault::Io(cause) => ApiError::Broken { call, cause },
            Fault::Nonsense(what) => ApiError::Nonsense { call, what },
        }
    }
}

fn find(bytes: &[u8], wanted: &[u8]) -> Option<usize> {
    bytes.windows(wanted.len()).position(|window| window == wanted)
}

/// The status and the body's length.
fn parse_head(head: &[u8]) -> Result<(u16, usize), Fault> {
    let text = std::str::from_utf8(head).map_err(|_| Fault::Nonsense("its head is no text"))?;
    let mut lines = text.split("\r\n");
    let status = lines
        .next()
        .and_then(|line| line.strip_prefix("HTTP/1.1 "))
        .and_then(|rest| rest.get(..3))
        .and_then(|code| code.parse().ok())
        .filter(|code| (100..600).contains(code))
        .ok_or(Fault::Nonsense("it has no status"))?;
    let mut length = None;
    for line in lines {
        let (name, value) = line.split_once(':').ok_or(Fault::Nonsense("a header has no value"))?;
        if name.eq_ignore_ascii_case("transfer-encoding") {
            return Err(Fault::Nonsense("its body is encoded"));
        }
        if name.eq_ignore_ascii_case("content-length") {
            let parsed = value.trim().parse::<usize>().map_err(|_| Fault::Nonsense("its length is none"))?;
            if length.replace(parsed).is_some_and(|other| other != parsed) {
                return Err(Fault::Nonsense("it has two lengths"));
            }
        }
    }
    match length.unwrap_or(0) {
        long if long > MAX_BODY_BYTES => Err(Fault::Nonsense("its body is too long")),
        // A 204 has no body, whatever its headers say.
        _ if status == 204 => Ok((status, 0)),
        length => Ok((status, length)),
    }
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
