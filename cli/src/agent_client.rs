//! Calls to one agent's API: over the unix socket of this machine, or over HTTP/3 with an operator's certificate.

use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use anyhow::{Context as _, anyhow};
use bytes::Bytes;
use http::{Method, Request, StatusCode, header};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1::SendRequest;
use hyper_util::rt::TokioIo;
use mvm_pki::tls::client_config;
use mvm_pki::{ExpectedPeer, LiveAnchors, LiveCredential, Role};
use mvm_proto::trace::TRACEPARENT;
use mvm_transport::{ALPN_H3, Client, Limits, Target};
use serde::de::DeserializeOwned;

use crate::client::{Operator, problem_from_json};
use crate::exit::Outcome;
use crate::trace;

/// A list of all instances of a large node is far below this.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// The name in requests over a unix socket, which has none.
const LOCAL_HOST: &str = "localhost";

#[derive(Debug)]
pub(crate) struct AgentClient {
    wire: Wire,
    timeout: Duration,
}

#[derive(Debug)]
enum Wire {
    Local(PathBuf),
    Network(Client),
}

/// A body that arrives piece by piece.
pub(crate) enum Pieces {
    Local(hyper::body::Incoming),
    Network(Box<mvm_transport::ResponseBody>),
}

impl Pieces {
    pub(crate) async fn next(&mut self) -> anyhow::Result<Option<Bytes>> {
        loop {
            let frame = match self {
                Self::Local(body) => body.frame().await.transpose()?,
                Self::Network(body) => body.frame().await.transpose()?,
            };
            match frame.map(hyper::body::Frame::into_data) {
                Some(Ok(data)) => return Ok(Some(data)),
                Some(Err(_)) => {}
                None => return Ok(None),
            }
        }
    }

    async fn all(self) -> anyhow::Result<Bytes> {
        let too_long = || anyhow!("the agent's answer is longer than {MAX_ANSWER_BYTES} bytes, or broke off");
        match self {
            Self::Local(body) => {
                Ok(Limited::new(body, MAX_ANSWER_BYTES).collect().await.map_err(|_| too_long())?.to_bytes())
            }
            Self::Network(body) => body.bytes(MAX_ANSWER_BYTES).await.map_err(anyhow::Error::new),
        }
    }
}

impl AgentClient {
    pub(crate) fn local(socket: &Path, timeout: Duration) -> Self {
        Self { wire: Wire::Local(socket.to_owned()), timeout }
    }

    pub(crate) async fn network(
        target: &Target,
        operator: &Operator,
        timeout: Duration,
    ) -> Result<Self, Outcome> {
        let (credential, anchors) = operator.credential()?;
        let cluster = credential.identity().cluster().clone();
        // Which node answers at this address is what the caller wants to know, not something to insist on.
        let expected = ExpectedPeer { cluster, role: Role::Node, name: None, check_host: false };
        let (credential, anchors) = (LiveCredential::new(credential), LiveAnchors::new(anchors));
        let tls = client_config(Some(&credential), &anchors, expected, &[ALPN_H3]);
        let tls = tls.map_err(anyhow::Error::new)?;
        let unreachable = |error: anyhow::Error| {
            Outcome::Unreachable(error.context(format!("could not reach the agent at {target}")))
        };
        let mut last = anyhow!("the name has no address");
        for address in target.resolve().await.map_err(|error| unreachable(error.into()))? {
            match Client::connect(address, target.host(), tls.clone(), &Limits::default()).await {
                Ok(client) => return Ok(Self { wire: Wire::Network(client), timeout }),
                Err(error) => last = error.into(),
            }
        }
        Err(unreachable(last))
    }

    pub(crate) async fn get<T: DeserializeOwned>(&self, path: &str) -> Result<T, Outcome> {
        let body = self.bytes(path).await?;
        let read = serde_json::from_slice(&body);
        Ok(read.with_context(|| format!("could not read the agent's answer to {path}"))?)
    }

    pub(crate) async fn bytes(&self, path: &str) -> Result<Bytes, Outcome> {
        let answer = self.ask(Method::GET, path, Bytes::new());
        self.within(async { Ok(answer.await?.1.all().await?) }).await
    }

    /// The answer to an action: its status and body.
    pub(crate) async fn post(
        &self,
        path: &str,
        body: &serde_json::Value,
    ) -> Result<(StatusCode, Bytes), Outcome> {
        let answer = self.ask(Method::POST, path, body.to_string().into());
        self.within(async {
            let (status, body) = answer.await?;
            Ok((status, body.all().await?))
        })
        .await
    }

    /// An answer that is read as it comes; only its beginning is bound by the timeout.
    pub(crate) async fn stream(&self, method: Method, path: &str, body: Bytes) -> Result<Pieces, Outcome> {
        self.within(async { Ok(self.ask(method, path, body).await?.1) }).await
    }

    /// Whether it is this machine's agent, over its own socket.
    pub(crate) fn is_local(&self) -> bool {
        matches!(self.wire, Wire::Local(_))
    }

    /// Asks with lines of which `first` is the first; the others are what is sent from then on, while the answer comes.
    pub(crate) async fn exchange(
        &self,
        path: &str,
        first: Bytes,
    ) -> Result<(tokio::sync::mpsc::Sender<std::io::Result<Bytes>>, Pieces), Outcome> {
        let Wire::Local(socket) = &self.wire else {
            return Err(Outcome::Usage(anyhow!("this is done on the node itself, over its agent's socket")));
        };
        let (lines, body) = tokio::sync::mpsc::channel(UPLOAD_PIECES);
        // There is room: nothing was sent before.
        let _ = lines.try_send(Ok(first));
        let request = Request::builder().method(Method::POST).uri(path).header(header::HOST, LOCAL_HOST);
        let request = request.header(header::CONTENT_TYPE, "application/x-ndjson").body(Upload(body));
        let request = request.context("could not build the request")?;
        let answer = async {
            let mut connection = connect(socket).await?;
            let answer = connection.send_request(request).await;
            let answer = answer.map_err(|error| gone(anyhow::Error::new(error)))?;
            let (status, body) = (answer.status(), Pieces::Local(answer.into_body()));
            if status.is_success() {
                return Ok(body);
            }
            Err(Outcome::Failed(problem_from_json(&body.all().await?)))
        };
        Ok((lines, self.within(answer).await?))
    }

    /// Sends what is read as it is read; the answer comes when all of it was taken, in whatever time that takes.
    pub(crate) async fn upload(
        &self,
        path: &str,
        content: Box<dyn std::io::Read + Send>,
    ) -> Result<Bytes, Outcome> {
        let Wire::Local(socket) = &self.wire else {
            return Err(Outcome::Usage(anyhow!("this is done on the node itself, over its agent's socket")));
        };
        let request = Request::builder().method(Method::POST).uri(path).header(header::HOST, LOCAL_HOST);
        let request = request.header(header::CONTENT_TYPE, "application/octet-stream");
        let request = request.body(Upload::of(content)).context("could not build the request")?;
        let mut connection = connect(socket).await?;
        let answer = connection.send_request(request).await;
        let answer = answer.map_err(|error| gone(anyhow::Error::new(error)))?;
        let (status, body) = (answer.status(), Pieces::Local(answer.into_body()).all().await?);
        if status.is_success() { Ok(body) } else { Err(Outcome::Failed(problem_from_json(&body))) }
    }

    async fn within<T>(&self, work: impl Future<Output = Result<T, Outcome>>) -> Result<T, Outcome> {
        let limit = humantime::format_duration(self.timeout);
        let late = || Outcome::TimedOut(anyhow!("the agent gave no answer within {limit}"));
        tokio::time::timeout(self.timeout, work).await.unwrap_or_else(|_| Err(late()))
    }

    async fn ask(&self, method: Method, path: &str, body: Bytes) -> Result<(StatusCode, Pieces), Outcome> {
        let request = Request::builder().method(method).uri(path);
        let mut request = request.header(header::CONTENT_TYPE, "application/json");
        if let Some(context) = trace::context() {
            request = request.header(TRACEPARENT, context.to_string());
        }
        let (status, body) = match &self.wire {
            Wire::Local(socket) => {
                let request = request.header(header::HOST, LOCAL_HOST).body(Full::new(body));
                let request = request.context("could not build the request")?;
                let mut connection = connect(socket).await?;
                let answer = connection.send_request(request).await;
                let answer = answer.map_err(|error| gone(anyhow::Error::new(error)))?;
                (answer.status(), Pieces::Local(answer.into_body()))
            }
            Wire::Network(client) => {
                let request = request.body(body).context("could not build the request")?;
                let answer = client.request(request).await;
                let answer = answer.map_err(|error| gone(anyhow::Error::new(error)))?;
                (answer.status(), Pieces::Network(Box::new(answer.into_body())))
            }
        };
        if status.is_success() {
            return Ok((status, body));
        }
        Err(Outcome::Failed(problem_from_json(&body.all().await?)))
    }
}

fn gone(error: anyhow::Error) -> Outcome {
    Outcome::Unreachable(error.context("lost the connection to the agent during the request"))
}

async fn connect<B>(socket: &Path) -> Result<SendRequest<B>, Outcome>
where
    B: hyper::body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let stream = tokio::net::UnixStream::connect(socket).await.map_err(|error| {
        let hint = match error.kind() {
            std::io::ErrorKind::PermissionDenied => {
                "only root, the agent's own user and members of the group mvm may: try sudo, or join the group"
            }
            _ => "is `mvm agent serve` running here? name its folder with --data-dir, or another with --endpoint",
        };
        let text = format!("could not reach the agent at {}\n{hint}", socket.display());
        Outcome::Unreachable(anyhow::Error::new(error).context(text))
    })?;
    let handshake = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
    let (sender, connection) = handshake.map_err(|error| gone(anyhow::Error::new(error)))?;
    // Ends with the connection; its errors reach the reader of the answer.
    tokio::spawn(connection);
    Ok(sender)
}

/// Pieces that were read and not sent yet.
const UPLOAD_PIECES: usize = 4;
const UPLOAD_BYTES: usize = 256 * 1024;

/// A body that is read by a thread of its own while it is sent.
struct Upload(tokio::sync::mpsc::Receiver<std::io::Result<Bytes>>);

impl Upload {
    fn of(mut content: Box<dyn std::io::Read + Send>) -> Self {
        let (pieces, body) = tokio::sync::mpsc::channel(UPLOAD_PIECES);
        tokio::task::spawn_blocking(move || {
            loop {
                let mut piece = vec![0; UPLOAD_BYTES];
                let read = match content.read(&mut piece) {
                    Ok(0) => return,
                    Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
                    read => read,
                };
                let failed = read.is_err();
                let piece = read.map(|length| {
                    piece.truncate(length);
                    Bytes::from(piece)
                });
                // The receiver may have refused already.
                if pieces.blocking_send(piece).is_err() || failed {
                    return;
                }
            }
        });
        Self(body)
    }
}

impl hyper::body::Body for Upload {
    type Data = Bytes;
    type Error = std::io::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<hyper::body::Frame<Bytes>, std::io::Error>>> {
        self.0.poll_recv(context).map(|piece| piece.map(|piece| piece.map(hyper::body::Frame::data)))
    }
}
