//! A REST client of the tests: HTTP/1.1 over TLS, with an operator's certificate or an API key.

use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt as _, Full};
use hyper::body::Incoming;
use hyper::client::conn::http1::{SendRequest, handshake};
use hyper_util::rt::TokioIo;
use mvm_pki::{Credential, LiveCredential};
use rustls::pki_types::ServerName;
use serde_json::Value;
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::support::{Running, coordinator, soon};

pub(crate) struct Rest {
    sender: SendRequest<Full<Bytes>>,
    key: Option<String>,
}

/// An answer: its status, its headers, its JSON.
pub(crate) struct Answered {
    pub(crate) status: u16,
    pub(crate) headers: http::HeaderMap,
    pub(crate) body: Value,
}

impl Rest {
    /// As the first operator.
    pub(crate) async fn operator(running: &Running) -> Self {
        let credential = Credential::load(&running.data_dir.join("operator/operator.pem")).unwrap();
        Self::connect(running, Some(&LiveCredential::new(credential)), None).await
    }

    pub(crate) async fn with_key(running: &Running, key: Option<&str>) -> Self {
        Self::connect(running, None, key.map(str::to_owned)).await
    }

    async fn connect(running: &Running, credential: Option<&LiveCredential>, key: Option<String>) -> Self {
        let stream = Self::stream(running, credential).await;
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self { sender, key }
    }

    /// A connection without HTTP on it.
    pub(crate) async fn stream(
        running: &Running,
        credential: Option<&LiveCredential>,
    ) -> TlsStream<TcpStream> {
        let tls = mvm_pki::tls::client_config(credential, &running.anchors(), coordinator(), &[b"http/1.1"]);
        let connector = TlsConnector::from(Arc::new(tls.unwrap()));
        let tcp = TcpStream::connect(running.addresses.grpc).await.unwrap();
        connector.connect(ServerName::try_from("127.0.0.1").unwrap(), tcp).await.unwrap()
    }

    /// A connection from another address of this machine.
    pub(crate) async fn from_site(running: &Running, site: [u8; 4], key: &str) -> Self {
        let tls = mvm_pki::tls::client_config(None, &running.anchors(), coordinator(), &[b"http/1.1"]);
        let socket = tokio::net::TcpSocket::new_v4().unwrap();
        socket.bind((site, 0).into()).unwrap();
        let tcp = socket.connect(running.addresses.grpc).await.unwrap();
        let connector = TlsConnector::from(Arc::new(tls.unwrap()));
        let stream = connector.connect(ServerName::try_from("127.0.0.1").unwrap(), tcp).await.unwrap();
        let (sender, connection) = handshake(TokioIo::new(stream)).await.unwrap();
        tokio::spawn(connection);
        Self { sender, key: Some(key.to_owned()) }
    }

    pub(crate) async fn send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Response<Incoming> {
        self.try_send(method, path, headers, body).await.unwrap()
    }

    /// The answer, unless the connection ends before it.
    pub(crate) async fn try_send(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        let text = body.map(|body| Bytes::from(body.to_string()));
        self.send_bytes(method, path, headers, text).await
    }

    /// The same with whatever bytes.
    pub(crate) async fn send_bytes(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<Bytes>,
    ) -> Result<Response<Incoming>, hyper::Error> {
        let mut request = Request::builder().method(method).uri(path).header("host", "127.0.0.1");
        if let Some(key) = &self.key {
            request = request.header("authorization", format!("Bearer {key}"));
        }
        if body.is_some() && !headers.iter().any(|(name, _)| *name == "content-type") {
            request = request.header("content-type", "application/json");
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let sent = self.sender.send_request(request.body(Full::new(body.unwrap_or_default())).unwrap());
        soon("an answer", sent).await
    }

    pub(crate) async fn call(
        &mut self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Option<&Value>,
    ) -> Answered {
        Answered::read(self.send(method, path, headers, body).await).await
    }

    pub(crate) async fn get(&mut self, path: &str) -> Answered {
        self.call("GET", path, &[], None).await
    }

    pub(crate) async fn put(&mut self, path: &str, body: &Value) -> Answered {
        self.call("PUT", path, &[], Some(body)).await
    }
}

impl Answered {
    pub(crate) async fn read(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let bytes = soon("a body", body.collect()).await.unwrap().to_bytes();
        let body = serde_json::from_slice(&bytes).unwrap_or(Value::Null);
        Self { status: parts.status.as_u16(), headers: parts.headers, body }
    }

    /// The code of a problem.
    pub(crate) fn code(&self) -> &str {
        self.body["code"].as_str().unwrap_or_default()
    }
}

/// The events of a watch.
pub(crate) struct Events {
    body: Incoming,
    text: String,
}

/// What an event says: what happened, the version to go on from, and the object.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Told {
    pub(crate) what: String,
    pub(crate) version: u64,
    pub(crate) object: Value,
}

impl Events {
    /// Watches at this path, which must be answered with a stream.
    pub(crate) async fn of(rest: &mut Rest, path: &str) -> Self {
        let response = rest.send("GET", path, &[], None).await;
        assert_eq!(response.status(), 200, "{path}");
        Self { body: response.into_body(), text: String::new() }
    }

    pub(crate) async fn next(&mut self) -> Told {
        loop {
            if let Some((event, more)) = self.text.clone().split_once("\n\n") {
                self.text = more.to_owned();
                let line =
                    |start: &str| event.lines().find_map(|line| line.strip_prefix(start)).unwrap_or_default();
                if line("event: ").is_empty() {
                    continue;
                }
                let object = serde_json::from_str(line("data: ")).unwrap_or_default();
                let version = line("id: ").parse().unwrap_or_default();
                return Told { what: line("event: ").to_owned(), version, object };
            }
            let frame = soon("an event", self.body.frame()).await.unwrap().unwrap();
            if let Some(data) = frame.data_ref() {
                self.text.push_str(&String::from_utf8_lossy(data));
            }
        }
    }
}

impl Told {
    pub(crate) fn name(&self) -> &str {
        self.object["metadata"]["name"].as_str().unwrap_or_default()
    }
}
